//! Finding what is not finite, wherever it is; and the sum of squares.

use offbeat_core::optim::{Isa, all_finite, sum_squares};
use offbeat_core::spec::Rule;
use proptest::prelude::*;

use crate::support::Tensor;

const BAD: [f32; 4] = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

proptest! {
    #[test]
    fn one_bad_value_anywhere_is_found(n in 1_usize..10_000, at in any::<prop::sample::Index>(), bad in 0..BAD.len()) {
        let mut x = vec![f32::MAX; n];
        for isa in Isa::available() {
            prop_assert!(all_finite(isa, &x));
        }
        x[at.index(n)] = BAD[bad];
        for isa in Isa::available() {
            prop_assert!(!all_finite(isa, &x), "{:?}", isa);
        }
    }

    #[test]
    fn sum_squares_is_the_sum_of_squares(x in prop::collection::vec(-1e3_f32..1e3, 0..300)) {
        let plain: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
        prop_assert!((sum_squares(Isa::detect(), &x) - plain).abs() <= 1e-13 * plain);
    }
}

#[test]
fn nothing_is_finite_and_has_no_length() {
    for isa in Isa::available() {
        assert!(all_finite(isa, &[]));
        assert_eq!(sum_squares(isa, &[]), 0.0);
    }
}

#[test]
fn a_sum_of_squares_does_not_overflow_in_f32() {
    assert_eq!(sum_squares(Isa::detect(), &[1e30; 4]), 4.0 * f64::from(1e30_f32).powi(2));
    assert!(!sum_squares(Isa::detect(), &[1.0, f32::NAN]).is_finite());
}

/// Finite gradients whose result is not: in the parameter, or in a moment that the step hides.
#[test]
fn an_infinite_parameter_or_moment_is_reported() {
    let sgd =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let mut tensor = Tensor::new(&sgd, vec![-f32::MAX; 19]);
    assert!(!tensor.step(Isa::detect(), &[f32::MAX; 19], 1.0, 1.0));

    // v = ∞ makes the step 0: the parameters alone look healthy.
    let adam = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.0,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: false,
    };
    for isa in Isa::available() {
        let mut tensor = Tensor::new(&adam, vec![1.0; 19]);
        let mut grad = [1.0; 19];
        grad[17] = 1e30;
        assert!(!tensor.step(isa, &grad, 0.1, 1.0));
        assert!(tensor.param.iter().all(|p| p.is_finite()));
    }
}
