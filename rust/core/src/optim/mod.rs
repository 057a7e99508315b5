//! The update rules, torch.optim's to the letter: what one push does to a run of parameters and their state.
//!
//! Each rule's file holds its formula for one element, `kernel` runs a formula over slices, [`Isa`] compiles that for
//! every instruction set, and this file picks. Rounding is spelled out: a fused multiply-add stands exactly where
//! torch's CPU kernels fuse (`add(alpha)`, `lerp`, `addcmul`) and nowhere else, so every instruction set gives the same
//! bits, and SGD gives torch's.
//!
//! A push's weight w scales what the push will ever do. SGD: the gradient with its coupled decay, before the
//! momentum buffer; delayed Nesterov likewise. The rules that normalise the gradient (Adam, AdamW, Adagrad, RMSprop) would not notice that, so
//! there it scales the step and AdamW's decay, and the moments take the gradient as it is. w = 1 leaves every bit.

mod adagrad;
mod adam;
mod add;
mod delayed;
mod isa;
pub(crate) mod kernel;
mod prefetch;
mod rmsprop;
mod scan;
pub(crate) mod sgd;

pub use isa::Isa;
pub(crate) use scan::all_smaller;
pub use scan::{all_finite, sum_squares};

use crate::spec::Rule;

/// The most f32 arrays any rule keeps beside the parameters (Adam with amsgrad, RMSprop with all its options).
pub const MAX_STATE: usize = 3;

/// Where a step reads: parameters and state of equal length; a slot that the rule does not use may be empty.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub param: &'a [f32],
    pub state: [&'a [f32]; MAX_STATE],
}

/// Where a step writes: as [`Source`], elsewhere in memory.
#[derive(Debug)]
pub struct Target<'a> {
    pub param: &'a mut [f32],
    pub state: [&'a mut [f32]; MAX_STATE],
}

impl Target<'_> {
    /// The same target for a shorter while, so that a batch's pushes can go over it one after another.
    pub fn reborrow(&mut self) -> Target<'_> {
        Target { param: self.param, state: self.state.each_mut().map(|slot| &mut **slot) }
    }
}

/// A group's rule made ready to run: constants computed the way torch computes them, in double with one cast at
/// the end. Cheap to build, once for each tensor's part of each push.
#[derive(Clone, Copy, Debug)]
pub struct Stepper(Kernel);

#[derive(Clone, Copy, Debug)]
enum Kernel {
    SgdBare(sgd::Bare),
    Sgd(sgd::Plain),
    SgdMomentum(sgd::Momentum),
    Adam(adam::Adam),
    AdamAmsgrad(adam::Amsgrad),
    Adagrad(adagrad::Adagrad),
    RmsProp(rmsprop::RmsProp<false, false>),
    RmsPropCentered(rmsprop::RmsProp<false, true>),
    RmsPropMomentum(rmsprop::RmsProp<true, false>),
    RmsPropBoth(rmsprop::RmsProp<true, true>),
    DelayedBetween(delayed::Between),
    DelayedNth(delayed::Nth),
    Add(add::Add),
}

impl Stepper {
    /// Prepares one tensor's step.
    ///
    /// Args:
    /// * `rule`: the group's rule.
    /// * `lr`: learning rate of the ticket, schedule and `set_lr` included; [`Rule::Add`] has none and ignores it.
    /// * `weight`: what the push is worth; exactly 1 leaves every bit as it is.
    /// * `step`: number of this update of this tensor, counted from 1 as torch's `state["step"]`.
    #[must_use]
    pub fn new(rule: &Rule, lr: f64, weight: f64, step: u64) -> Self {
        Self(match *rule {
            Rule::Sgd { momentum, dampening, weight_decay, nesterov, maximize } => {
                let plain = sgd::Plain::new(lr, weight, weight_decay, maximize);
                if momentum != 0.0 {
                    Kernel::SgdMomentum(sgd::Momentum::new(plain, momentum, dampening, nesterov, step))
                } else if let Some(bare) = plain.bare() {
                    Kernel::SgdBare(bare)
                } else {
                    Kernel::Sgd(plain)
                }
            }
            Rule::Adam { betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay } => {
                let decay = adam::Decay::new(weight_decay, decoupled_weight_decay);
                let adam = adam::Adam::new(lr, weight, betas, eps, decay, maximize, step);
                if amsgrad { Kernel::AdamAmsgrad(adam::Amsgrad(adam)) } else { Kernel::Adam(adam) }
            }
            Rule::Adagrad { lr_decay, weight_decay, initial_accumulator_value: _, eps, maximize } => {
                Kernel::Adagrad(adagrad::Adagrad::new(
                    lr,
                    weight,
                    lr_decay,
                    weight_decay,
                    eps,
                    maximize,
                    step,
                ))
            }
            Rule::RmsProp { alpha, eps, weight_decay, momentum, centered, maximize } => {
                let of = rmsprop::Constants::new(lr, weight, alpha, eps, weight_decay, momentum, maximize);
                match (momentum > 0.0, centered) {
                    (false, false) => Kernel::RmsProp(rmsprop::RmsProp(of)),
                    (false, true) => Kernel::RmsPropCentered(rmsprop::RmsProp(of)),
                    (true, false) => Kernel::RmsPropMomentum(rmsprop::RmsProp(of)),
                    (true, true) => Kernel::RmsPropBoth(rmsprop::RmsProp(of)),
                }
            }
            Rule::DelayedNesterov { momentum, delay, activation } => {
                let of = delayed::Constants::new(lr, weight, momentum, delay, activation);
                if step.is_multiple_of(delay) {
                    Kernel::DelayedNth(of.nth())
                } else {
                    Kernel::DelayedBetween(of.between())
                }
            }
            Rule::Add => Kernel::Add(add::Add::new(weight)),
        })
    }
}

/// Runs `$run` with `$kernel` bound to the formula that the stepper holds, each with its own type.
macro_rules! with_kernel {
    ($stepper:expr, $kernel:ident => $run:expr) => {
        match $stepper.0 {
            Kernel::SgdBare($kernel) => $run,
            Kernel::Sgd($kernel) => $run,
            Kernel::SgdMomentum($kernel) => $run,
            Kernel::Adam($kernel) => $run,
            Kernel::AdamAmsgrad($kernel) => $run,
            Kernel::Adagrad($kernel) => $run,
            Kernel::RmsProp($kernel) => $run,
            Kernel::RmsPropCentered($kernel) => $run,
            Kernel::RmsPropMomentum($kernel) => $run,
            Kernel::RmsPropBoth($kernel) => $run,
            Kernel::DelayedBetween($kernel) => $run,
            Kernel::DelayedNth($kernel) => $run,
            Kernel::Add($kernel) => $run,
        }
    };
}

/// One step out of place: reads `src`, writes every element of `dst`. A slot that the rule does not use is copied.
///
/// Returns whether every parameter and moment written is finite. If not, `dst` holds what came out and is not to
/// be published; `src` is as it was.
///
/// # Panics
/// If the slices differ in length, or a slot that the rule uses is missing.
pub fn step_into(isa: Isa, stepper: &Stepper, grad: &[f32], src: &Source<'_>, dst: Target<'_>) -> bool {
    with_kernel!(stepper, kernel => kernel::out_of_place(isa, kernel, grad, src, dst))
}

/// One step in place: the second and later pushes of a combined batch, with the bits of [`step_into`].
///
/// Returns whether every parameter and moment written is finite. If not, what was there is lost.
///
/// # Panics
/// If the slices differ in length, or a slot that the rule uses is missing.
pub fn step_in_place(isa: Isa, stepper: &Stepper, grad: &[f32], dst: Target<'_>) -> bool {
    with_kernel!(stepper, kernel => kernel::in_place(isa, kernel, grad, dst))
}

/// The rule's state, by torch's names where torch has the rule, in the order of its slots. SGD without momentum and `Add` keep none.
#[must_use]
pub fn state_names(rule: &Rule) -> &'static [&'static str] {
    match *rule {
        Rule::Sgd { momentum, .. } if momentum != 0.0 => &["momentum_buffer"],
        Rule::Sgd { .. } | Rule::Add => &[],
        Rule::DelayedNesterov { .. } => &["momentum_buffer", "delayed_gradient"],
        Rule::Adam { amsgrad: false, .. } => &["exp_avg", "exp_avg_sq"],
        Rule::Adam { amsgrad: true, .. } => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        Rule::Adagrad { .. } => &["sum"],
        Rule::RmsProp { momentum, centered, .. } => match (momentum > 0.0, centered) {
            (false, false) => &["square_avg"],
            (false, true) => &["square_avg", "grad_avg"],
            (true, false) => &["square_avg", "momentum_buffer"],
            (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
        },
    }
}

/// How many f32 arrays of state a parameter has under this rule, at most [`MAX_STATE`].
#[must_use]
pub fn state_slots(rule: &Rule) -> usize {
    state_names(rule).len()
}

/// What every element of a state slot starts with.
#[must_use]
pub fn initial_state(rule: &Rule, _slot: usize) -> f32 {
    match *rule {
        Rule::Adagrad { initial_accumulator_value, .. } => initial_accumulator_value as f32,
        Rule::Sgd { .. }
        | Rule::Adam { .. }
        | Rule::RmsProp { .. }
        | Rule::DelayedNesterov { .. }
        | Rule::Add => 0.0,
    }
}
