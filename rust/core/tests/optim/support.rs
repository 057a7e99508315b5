//! One tensor that steps, and the generators of what it steps through.

use offbeat_core::optim::{self, Isa, MAX_STATE, Source, Stepper, Target};
use offbeat_core::spec::Rule;
use proptest::prelude::*;
use std::array;

/// A tensor with its state and step count, as a store keeps them.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) rule: Rule,
    pub(crate) param: Vec<f32>,
    pub(crate) state: Vec<Vec<f32>>,
    pub(crate) step: u64,
}

impl Tensor {
    pub(crate) fn new(rule: &Rule, param: Vec<f32>) -> Self {
        let state = (0..optim::state_slots(rule))
            .map(|slot| vec![optim::initial_state(rule, slot); param.len()])
            .collect();
        Self { rule: rule.clone(), param, state, step: 0 }
    }

    fn stepper(&mut self, lr: f64, weight: f64) -> Stepper {
        self.step += 1;
        Stepper::new(&self.rule, lr, weight, self.step)
    }

    pub(crate) fn step(&mut self, isa: Isa, grad: &[f32], lr: f64, weight: f64) -> bool {
        let stepper = self.stepper(lr, weight);
        // Garbage where the result goes: a step writes every element.
        let mut next = vec![f32::NAN; self.param.len()];
        let mut next_state = vec![next.clone(); self.state.len()];
        let source = Source {
            param: &self.param,
            state: array::from_fn(|slot| self.state.get(slot).map_or(&[][..], Vec::as_slice)),
        };
        let finite = optim::step_into(isa, &stepper, grad, &source, target(&mut next, &mut next_state));
        (self.param, self.state) = (next, next_state);
        finite
    }

    pub(crate) fn step_in_place(&mut self, isa: Isa, grad: &[f32], lr: f64, weight: f64) -> bool {
        let stepper = self.stepper(lr, weight);
        optim::step_in_place(isa, &stepper, grad, target(&mut self.param, &mut self.state))
    }

    /// Parameters and state as bits; all NaN are one, since which NaN comes out is the CPU's choice.
    pub(crate) fn bits(&self) -> Vec<Vec<u32>> {
        std::iter::once(&self.param).chain(&self.state).map(|values| bits(values)).collect()
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

fn target<'a>(param: &'a mut [f32], state: &'a mut [Vec<f32>]) -> Target<'a> {
    let mut slots = state.iter_mut().map(Vec::as_mut_slice);
    let state: [&mut [f32]; MAX_STATE] = array::from_fn(|_| slots.next().unwrap_or_default());
    Target { param, state }
}

/// 0 half of the time, since rules take another path there.
fn option(range: std::ops::Range<f64>) -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), range]
}

/// Every rule with every flag, hyper-parameters in their usual ranges.
pub(crate) fn any_rule() -> impl Strategy<Value = Rule> {
    prop_oneof![sgd(), adam(), adagrad(), rmsprop(), delayed(), Just(Rule::Add)]
}

pub(crate) fn sgd() -> impl Strategy<Value = Rule> {
    (option(0.1..0.99), option(0.1..0.9), option(1e-4..0.1), any::<bool>(), any::<bool>()).prop_map(
        |(momentum, dampening, weight_decay, nesterov, maximize)| {
            let nesterov = nesterov && momentum > 0.0;
            let dampening = if nesterov { 0.0 } else { dampening };
            Rule::Sgd { momentum, dampening, weight_decay, nesterov, maximize }
        },
    )
}

pub(crate) fn adam() -> impl Strategy<Value = Rule> {
    ((0.0..0.99, 0.5..0.9999), 1e-8..1e-3, option(1e-4..0.1), any::<[bool; 3]>()).prop_map(
        |(betas, eps, weight_decay, [amsgrad, maximize, decoupled_weight_decay])| Rule::Adam {
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
            decoupled_weight_decay,
        },
    )
}

pub(crate) fn adagrad() -> impl Strategy<Value = Rule> {
    (option(1e-3..0.1), option(1e-4..0.1), option(0.01..1.0), 1e-10..1e-3, any::<bool>()).prop_map(
        |(lr_decay, weight_decay, initial_accumulator_value, eps, maximize)| Rule::Adagrad {
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            maximize,
        },
    )
}

/// α from .8, so that the centered variance is not all cancellation.
pub(crate) fn rmsprop() -> impl Strategy<Value = Rule> {
    (0.8..0.999, 1e-8..1e-3, option(1e-4..0.1), option(0.1..0.99), any::<[bool; 2]>()).prop_map(
        |(alpha, eps, weight_decay, momentum, [centered, maximize])| Rule::RmsProp {
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            maximize,
        },
    )
}

pub(crate) fn delayed() -> impl Strategy<Value = Rule> {
    (option(0.1..0.99), 1_u64..6, option(0.0..1.0)).prop_map(|(momentum, delay, share)| {
        Rule::DelayedNesterov { momentum, delay, activation: share / delay as f64 }
    })
}

/// Values as training has them, both zeros among them.
pub(crate) fn usual() -> impl Strategy<Value = f32> {
    prop_oneof![8 => -2.0_f32..2.0, 1 => Just(0.0), 1 => Just(-0.0)]
}

/// Parameters and a few gradients of one length.
pub(crate) fn history(steps: usize) -> impl Strategy<Value = (Vec<f32>, Vec<Vec<f32>>)> {
    (1_usize..40).prop_flat_map(move |n| {
        let values = || prop::collection::vec(usual(), n);
        (values(), prop::collection::vec(values(), 1..=steps))
    })
}
