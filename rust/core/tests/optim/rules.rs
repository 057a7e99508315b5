//! Every rule against torch's statements: the same bits in f32, the same formula in f64.

use crate::support::{Tensor, any_rule, bits, history};
use crate::torch::Element;
use offbeat_core::optim::{self, Isa, MAX_STATE, Source, Stepper, Target};
use offbeat_core::spec::Rule;
use proptest::prelude::*;

/// The learning rate of step i: it changes, as under a schedule.
fn lr(i: usize) -> f64 {
    0.05 / (1.0 + i as f64)
}

proptest! {
    #[test]
    fn steps_are_torchs_bit_for_bit(rule in any_rule(), (param, grads) in history(12)) {
        let mut ours = Tensor::new(&rule, param.clone());
        let mut torch: Vec<_> = param.iter().map(|&p| Element::<f32>::new(&rule, p)).collect();
        for (i, grad) in grads.iter().enumerate() {
            ours.step(Isa::detect(), grad, lr(i), 1.0);
            torch.iter_mut().zip(grad).for_each(|(t, &g)| t.step(&rule, g, lr(i)));
            let expected: Vec<f32> = torch.iter().map(|t| t.param).collect();
            prop_assert_eq!(bits(&ours.param), bits(&expected), "step {}", i + 1);
        }
    }

    #[test]
    fn steps_follow_the_formula_in_double_precision(rule in any_rule(), (param, grads) in history(8)) {
        let mut ours = Tensor::new(&rule, param.clone());
        let mut exact: Vec<_> = param.iter().map(|&p| Element::<f64>::new(&rule, p.into())).collect();
        for (i, grad) in grads.iter().enumerate() {
            ours.step(Isa::detect(), grad, lr(i), 1.0);
            exact.iter_mut().zip(grad).for_each(|(e, &g)| e.step(&rule, g.into(), lr(i)));
        }
        for (&ours, exact) in ours.param.iter().zip(&exact) {
            let difference = (f64::from(ours) - exact.param).abs();
            // Steps are at most about lr/√(1 − α) ≈ 1.6 each; what f32 loses is 1e-7 of that, cancellation aside.
            prop_assert!(difference <= 2e-4, "{ours} against {}", exact.param);
        }
    }

    #[test]
    fn in_place_gives_the_bits_of_out_of_place(rule in any_rule(), (param, grads) in history(4)) {
        let mut apart = Tensor::new(&rule, param);
        let mut batch = apart.clone();
        for (i, grad) in grads.iter().enumerate() {
            let weight = 1.0 / (1.0 + i as f64);
            let finite = apart.step(Isa::detect(), grad, lr(i), weight);
            let first = i == 0;
            let in_batch = if first {
                batch.step(Isa::detect(), grad, lr(i), weight)
            } else {
                batch.step_in_place(Isa::detect(), grad, lr(i), weight)
            };
            prop_assert_eq!(finite, in_batch);
            prop_assert_eq!(apart.bits(), batch.bits());
        }
    }
}

#[test]
fn first_momentum_buffer_is_the_gradient_undampened() {
    let rule =
        Rule::Sgd { momentum: 0.9, dampening: 0.5, weight_decay: 0.0, nesterov: false, maximize: false };
    let mut tensor = Tensor::new(&rule, vec![0.0, 0.0]);
    // Even where memory holds something else, as recycled memory does.
    tensor.state[0].fill(7.0);
    tensor.step(Isa::detect(), &[2.0, -0.0], 0.1, 1.0);
    assert_eq!(bits(&tensor.state[0]), bits(&[2.0, -0.0]));
    tensor.step(Isa::detect(), &[2.0, 2.0], 0.1, 1.0);
    assert_eq!(tensor.state[0], [0.9 * 2.0 + 0.5 * 2.0, 1.0]);
}

proptest! {
    /// The paper's remark on its algorithm 3, and why the step of a whole group is not damped.
    #[test]
    fn arrivals_of_one_group_are_a_nesterov_step_on_their_mean(
        delay in 1_u64..6, momentum in 0.1..0.99, (param, grads) in history(1),
    ) {
        let mut delayed = Tensor::new(&Rule::DelayedNesterov { momentum, delay, activation: 0.0 }, param.clone());
        let nesterov = Rule::Sgd { momentum, dampening: 0.0, weight_decay: 0.0, nesterov: true, maximize: false };
        let mut once = Tensor::new(&nesterov, param);
        for turn in 0_u16..3 {
            let turned: Vec<f32> = grads[0].iter().map(|g| g * f32::from(turn)).collect();
            for _ in 0..delay {
                delayed.step(Isa::detect(), &turned, lr(0), 1.0);
            }
            once.step(Isa::detect(), &turned, lr(0), 1.0);
        }
        for (ours, torchs) in delayed.param.iter().zip(&once.param) {
            prop_assert!((ours - torchs).abs() <= 1e-5 * torchs.abs().max(1.0), "{ours} against {torchs}");
        }
    }
}

#[test]
fn delayed_nesterov_waits_for_its_turn() {
    let rule = Rule::DelayedNesterov { momentum: 0.5, delay: 2, activation: 0.25 };
    let mut tensor = Tensor::new(&rule, vec![0.0]);
    let mut seen = Vec::new();
    for grad in [2.0, 4.0, 8.0, 16.0] {
        tensor.step(Isa::detect(), &[grad], 1.0, 1.0);
        seen.push((tensor.param[0], tensor.state[0][0], tensor.state[1][0]));
    }
    // v = (2 + 4)/2 = 3; the second goes (1 − .25·2 + .25)·.5·3 = 1.125 further, the third .25·.5·3 = .375.
    // Then v = 1.5 + (8 + 16)/2 = 13.5, and .75·.5·13.5 = 5.0625.
    let expected = [(-1.0, 0.0, 2.0), (-4.125, 3.0, 0.0), (-8.5, 3.0, 8.0), (-21.5625, 13.5, 0.0)];
    assert_eq!(seen, expected);
}

#[test]
fn adagrad_starts_from_its_initial_accumulator() {
    let rule = Rule::Adagrad {
        lr_decay: 0.0,
        weight_decay: 0.0,
        initial_accumulator_value: 0.25,
        eps: 1e-10,
        maximize: false,
    };
    assert_eq!(optim::state_slots(&rule), 1);
    assert_eq!(optim::initial_state(&rule, 0), 0.25);
}

proptest! {
    #[test]
    fn no_rule_keeps_more_state_than_there_is_room_for(rule in any_rule()) {
        prop_assert!(optim::state_slots(&rule) <= MAX_STATE);
    }
}

#[test]
fn slots_that_the_rule_does_not_use_are_carried_over() {
    let stepper = Stepper::new(&Rule::Add, 0.0, 1.0, 1);
    let (param, kept) = ([1.0, 2.0], [5.0, 6.0]);
    let source = Source { param: &param, state: [&kept, &[], &[]] };
    let (mut next, mut next_kept) = ([f32::NAN; 2], [f32::NAN; 2]);
    let target = Target { param: &mut next, state: [&mut next_kept, &mut [], &mut []] };
    assert!(optim::step_into(Isa::detect(), &stepper, &[0.5, 0.5], &source, target));
    assert_eq!((next, next_kept), ([1.5, 2.5], kept));
}

#[test]
#[should_panic(expected = "different lengths")]
fn slices_of_different_lengths_are_refused() {
    let source = Source { param: &[1.0, 2.0], state: [&[]; MAX_STATE] };
    let mut next = [0.0; 2];
    let target = Target { param: &mut next, state: [&mut [], &mut [], &mut []] };
    optim::step_into(Isa::detect(), &Stepper::new(&Rule::Add, 0.0, 1.0, 1), &[0.5], &source, target);
}
