//! Scalar, AVX2 and AVX-512: the same bits, whatever the length, the alignment and the values.

use crate::support::{Tensor, any_rule, usual};
use offbeat_core::optim::{self, Isa};
use proptest::prelude::*;

/// Denormals, values at the edge of overflow, infinities and NaN among usual ones.
fn extreme() -> impl Strategy<Value = f32> {
    prop_oneof![
        12 => usual(),
        2 => -1e-38_f32..1e-38,
        2 => prop_oneof![1e37_f32..3e38, -3e38_f32..-1e37],
        1 => any::<f32>(),
    ]
}

/// Values that begin `offset` elements into an allocation.
#[derive(Clone, Debug)]
struct Shifted {
    values: Vec<f32>,
    offset: usize,
}

impl Shifted {
    fn get(&self) -> &[f32] {
        &self.values[self.offset..]
    }
}

fn shifted(n: usize) -> impl Strategy<Value = Shifted> {
    (0_usize..8).prop_flat_map(move |offset| {
        prop::collection::vec(extreme(), n + offset).prop_map(move |values| Shifted { values, offset })
    })
}

fn push() -> impl Strategy<Value = (Vec<f32>, Vec<Shifted>)> {
    // Around a vector, and around a kernel's block.
    prop_oneof![4 => 0_usize..=70, 1 => 250_usize..=270, 1 => 505_usize..=520]
        .prop_flat_map(|n| (prop::collection::vec(extreme(), n), prop::collection::vec(shifted(n), 1..4)))
}

#[test]
fn the_widest_instruction_set_is_among_the_available() {
    let all = Isa::available();
    assert_eq!(all[0].name(), "scalar");
    assert_eq!(all.last(), Some(&Isa::detect()));
    println!("instruction sets held against each other here: {all:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn every_instruction_set_gives_the_same_bits(
        rule in any_rule(),
        (param, grads) in push(),
        weight in prop_oneof![Just(1.0), 0.01..1.0],
    ) {
        let run = |isa: Isa| {
            let mut tensor = Tensor::new(&rule, param.clone());
            let mut steps = Vec::new();
            for (i, grad) in grads.iter().enumerate() {
                let finite = if i % 2 == 0 {
                    tensor.step(isa, grad.get(), 0.01, weight)
                } else {
                    tensor.step_in_place(isa, grad.get(), 0.01, weight)
                };
                steps.push((finite, tensor.bits()));
            }
            steps
        };
        let scalar = run(Isa::available()[0]);
        for (finite, bits) in &scalar {
            let all = bits.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite());
            prop_assert_eq!(*finite, all, "a step tells whether all it wrote is finite");
        }
        for isa in Isa::available() {
            prop_assert_eq!(&run(isa), &scalar, "{:?}", isa);
        }
    }

    #[test]
    fn every_instruction_set_sums_squares_to_the_same_bits(x in (0_usize..200).prop_flat_map(shifted)) {
        let scalar = optim::sum_squares(Isa::available()[0], x.get());
        for isa in Isa::available() {
            let sum = optim::sum_squares(isa, x.get());
            prop_assert!(sum.to_bits() == scalar.to_bits() || (sum.is_nan() && scalar.is_nan()), "{:?}", isa);
        }
    }
}
