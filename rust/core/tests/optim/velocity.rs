//! Momentum in the worker: one worker is torch's Nesterov, and several do not share a velocity.

use crate::support::{Tensor, bits, history};
use crate::torch::Element;
use offbeat_core::optim::Isa;
use offbeat_core::spec::Rule;
use offbeat_core::velocity::{correct, server_rule};
use proptest::prelude::*;

fn nesterov(momentum: f64, weight_decay: f64, maximize: bool) -> Rule {
    Rule::Sgd { momentum, dampening: 0.0, weight_decay, nesterov: momentum > 0.0, maximize }
}

/// A worker that keeps one velocity, and a server that runs what is left of the rule.
struct Pair {
    mu: f64,
    wd: f64,
    maximize: bool,
    velocity: Vec<f32>,
    server: Tensor,
}

impl Pair {
    fn new(mu: f64, wd: f64, maximize: bool, param: Vec<f32>) -> Self {
        let server = Tensor::new(&server_rule(&nesterov(mu, wd, maximize)), param);
        Self { mu, wd, maximize, velocity: Vec::new(), server }
    }

    /// What is sent for a gradient, and the velocity if the push settles.
    fn correct(&self, isa: Isa, grad: &[f32]) -> (Vec<f32>, Vec<f32>, bool) {
        let (mut next, mut out) = (vec![f32::NAN; grad.len()], vec![f32::NAN; grad.len()]);
        let x_read = if self.wd == 0.0 { &[][..] } else { &self.server.param };
        let first = self.velocity.is_empty();
        let v = &self.velocity;
        let finite =
            correct(isa, self.mu, self.wd, self.maximize, first, grad, x_read, v, &mut next, &mut out);
        (out, next, finite)
    }
}

proptest! {
    #[test]
    fn one_worker_is_torchs_nesterov_bit_for_bit(
        mu in prop_oneof![Just(0.0), 0.1..0.99], wd in prop_oneof![Just(0.0), 1e-4..0.1], maximize in any::<bool>(),
        (param, grads) in history(20),
    ) {
        let rule = nesterov(mu, wd, maximize);
        let mut torch: Vec<_> = param.iter().map(|&p| Element::<f32>::new(&rule, p)).collect();
        let mut pair = Pair::new(mu, wd, maximize, param);
        for grad in &grads {
            let (out, next, finite) = pair.correct(Isa::detect(), grad);
            prop_assert!(finite);
            pair.velocity = next;
            pair.server.step(Isa::detect(), &out, 0.1, 1.0);
            torch.iter_mut().zip(grad).for_each(|(t, &g)| t.step(&rule, g, 0.1));
            let expected: Vec<f32> = torch.iter().map(|t| t.param).collect();
            prop_assert_eq!(bits(&pair.server.param), bits(&expected));
        }
    }

    #[test]
    fn every_instruction_set_corrects_to_the_same_bits(
        wd in prop_oneof![Just(0.0), 1e-4..0.1], (param, grads) in history(2),
    ) {
        let mut pair = Pair::new(0.9, wd, false, param);
        for grad in &grads {
            let (out, next, _) = pair.correct(Isa::available()[0], grad);
            for isa in Isa::available() {
                let (other_out, other_next, _) = pair.correct(isa, grad);
                prop_assert_eq!((bits(&other_out), bits(&other_next)), (bits(&out), bits(&next)));
            }
            pair.velocity = next;
        }
    }
}

#[test]
fn the_sum_of_what_one_gradient_sends_is_its_nesterov_total() {
    // g at once, then nothing: μ⁰ + μ + μ² + ... = 1/(1 − μ) of it arrives.
    let mut pair = Pair::new(0.9, 0.0, false, vec![0.0]);
    for step in 0..200 {
        let (out, next, _) = pair.correct(Isa::detect(), &[if step == 0 { 1.0 } else { 0.0 }]);
        pair.velocity = next;
        pair.server.step(Isa::detect(), &out, 1.0, 1.0);
    }
    assert!((pair.server.param[0] + 10.0).abs() < 1e-4);
}

#[test]
fn an_overflowing_velocity_is_reported() {
    let mut pair = Pair::new(0.9, 0.0, false, vec![0.0]);
    pair.velocity = vec![f32::MAX];
    let (_, _, finite) = pair.correct(Isa::detect(), &[f32::MAX]);
    assert!(!finite);
}

#[test]
fn the_server_keeps_other_rules() {
    assert_eq!(server_rule(&Rule::Add), Rule::Add);
}
