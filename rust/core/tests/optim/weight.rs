//! A weight scales all that a push will ever do, and a weight of 1 does nothing.

use crate::support::{Tensor, adagrad, adam, any_rule, bits, delayed, history, rmsprop, sgd};
use offbeat_core::optim::Isa;
use offbeat_core::spec::Rule;
use proptest::prelude::*;

const LR: f64 = 0.01;

/// How far from 0 a push of this weight has moved each parameter after `quiet` steps with no gradient, in a tensor
/// that had pushes before it.
fn moved(rule: &Rule, grad: f32, weight: f64, quiet: usize) -> f64 {
    let mut tensor = Tensor::new(rule, vec![0.0]);
    tensor.step(Isa::detect(), &[0.0], LR, 1.0);
    tensor.step(Isa::detect(), &[grad], LR, weight);
    for _ in 0..quiet {
        tensor.step(Isa::detect(), &[0.0], LR, 1.0);
    }
    tensor.param[0].into()
}

proptest! {
    #[test]
    fn momentum_of_a_damped_push_is_damped_as_much(
        nesterov in any::<bool>(), grad in 0.1_f32..2.0, weight in 0.01..1.0,
    ) {
        let rule = Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov, maximize: false };
        let (full, damped) = (moved(&rule, grad, 1.0, 200), moved(&rule, grad, weight, 200));
        prop_assert!((damped - weight * full).abs() <= 1e-5 * (weight * full).abs());
        // 1/(1 − μ) = 10 times the step: the buffer did carry it on.
        prop_assert!((full / (-LR * f64::from(grad)) - 10.0).abs() < 1e-3);
    }

    #[test]
    fn all_that_a_push_does_under_delayed_nesterov_is_damped(
        rule in delayed(), grad in 0.1_f32..2.0, weight in 0.01..1.0,
    ) {
        let (full, damped) = (moved(&rule, grad, 1.0, 200), moved(&rule, grad, weight, 200));
        prop_assert!((damped - weight * full).abs() <= 1e-5 * (weight * full).abs());
    }

    #[test]
    fn momentum_of_a_damped_rmsprop_step_is_damped_as_much(
        centered in any::<bool>(), grad in 0.1_f32..2.0, weight in 0.01..1.0,
    ) {
        let rule = Rule::RmsProp {
            alpha: 0.9, eps: 1e-8, weight_decay: 0.0, momentum: 0.9, centered, maximize: false,
        };
        let (full, damped) = (moved(&rule, grad, 1.0, 200), moved(&rule, grad, weight, 200));
        prop_assert!((damped - weight * full).abs() <= 1e-5 * (weight * full).abs());
    }

    /// A scaled gradient they would not notice.
    #[test]
    fn normalising_rules_scale_the_step(
        rule in prop_oneof![adam(), adagrad(), rmsprop()], (param, grads) in history(5), weight in 0.01..1.0,
    ) {
        let mut before = Tensor::new(&rule, param);
        let (last, earlier) = grads.split_last().unwrap();
        for grad in earlier {
            before.step(Isa::detect(), grad, LR, 1.0);
        }
        let has_buffer = matches!(rule, Rule::RmsProp { momentum, .. } if momentum > 0.0);
        prop_assume!(!has_buffer || earlier.is_empty());
        let (mut full, mut damped) = (before.clone(), before.clone());
        full.step(Isa::detect(), last, LR, 1.0);
        damped.step(Isa::detect(), last, LR, weight);
        for ((&start, &full), &damped) in before.param.iter().zip(&full.param).zip(&damped.param) {
            let (full, damped) = (f64::from(full - start), f64::from(damped - start));
            prop_assert!((damped - weight * full).abs() <= 1e-5 * full.abs() + 1e-6, "{damped} of {full}");
        }
        // The moments take the gradient as it is; only RMSprop's buffer holds steps.
        for (slot, (full, damped)) in full.state.iter().zip(&damped.state).enumerate() {
            if !(has_buffer && slot == 1) {
                prop_assert_eq!(bits(full), bits(damped));
            }
        }
    }

    #[test]
    fn a_worker_side_difference_is_scaled(param in -2.0_f32..2.0, delta in -2.0_f32..2.0, weight in 0.0..1.0) {
        let mut tensor = Tensor::new(&Rule::Add, vec![param]);
        tensor.step(Isa::detect(), &[delta], 123.0, weight);
        prop_assert_eq!(tensor.param[0], (weight as f32).mul_add(delta, param));
        let mut whole = Tensor::new(&Rule::Add, vec![param]);
        whole.step(Isa::detect(), &[delta], 123.0, 1.0);
        prop_assert_eq!(whole.param[0], param + delta);
    }

    #[test]
    fn weight_zero_without_momentum_moves_nothing(
        rule in prop_oneof![sgd(), adam(), adagrad(), rmsprop(), delayed(), Just(Rule::Add)],
        (param, grads) in history(1),
    ) {
        let mut tensor = Tensor::new(&rule, param.clone());
        tensor.step(Isa::detect(), &grads[0], LR, 0.0);
        prop_assert_eq!(tensor.param, param);
    }

    /// Bits of every rule at weight 1 are torch's (`rules.rs`); this says that the next float is not 1.
    #[test]
    fn only_exactly_one_is_neutral(rule in any_rule()) {
        let step = |weight: f64| {
            let mut tensor = Tensor::new(&rule, vec![0.0; 64]);
            let grad: Vec<f32> = (1_u16..=64).map(|i| f32::from(i) / 7.0).collect();
            tensor.step(Isa::detect(), &grad, LR, weight);
            tensor.bits()
        };
        prop_assert_ne!(step(1.0), step(1.0 - 1e-6));
    }
}
