//! SGD: p ← p − lr·d with d = w·(±g + λp), by way of a momentum buffer v ← μv + (1 − dampening)·d if μ ≠ 0.
//!
//! Source: torch 2.15, `torch/optim/sgd.py::_single_tensor_sgd`, the same bits. `mul_(μ).add_(d, alpha)` rounds μv
//! and fuses the rest; the first step copies d into the buffer, without dampening. Differs in w, which torch lacks.

use super::kernel::Element;

/// Nothing but the step: one fused multiply-add an element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bare {
    minus_lr: f32,
}

impl Element<0> for Bare {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, []: [f32; 0]) -> (f32, [f32; 0]) {
        (self.minus_lr.mul_add(grad, param), [])
    }
}

/// Without momentum, with any of weight, decay and maximize.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    minus_lr: f32,
    direction: Direction,
}

impl Plain {
    pub(crate) fn new(lr: f64, weight: f64, weight_decay: f64, maximize: bool) -> Self {
        Self { minus_lr: -lr as f32, direction: Direction::new(weight, weight_decay, maximize) }
    }

    /// The same step in its cheapest form, if there is nothing to do to the gradient.
    pub(crate) fn bare(&self) -> Option<Bare> {
        self.direction.is_gradient().then_some(Bare { minus_lr: self.minus_lr })
    }
}

impl Element<0> for Plain {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, []: [f32; 0]) -> (f32, [f32; 0]) {
        (self.minus_lr.mul_add(self.direction.of(grad, param), param), [])
    }
}

/// With a momentum buffer; heavy ball or Nesterov.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Momentum {
    plain: Plain,
    velocity: Velocity,
    nesterov: bool,
}

impl Momentum {
    /// `step` counts from 1.
    pub(crate) fn new(plain: Plain, momentum: f64, dampening: f64, nesterov: bool, step: u64) -> Self {
        Self { plain, velocity: Velocity::new(momentum, dampening, step <= 1), nesterov }
    }
}

impl Element<1> for Momentum {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [buffer]: [f32; 1]) -> (f32, [f32; 1]) {
        let d = self.plain.direction.of(grad, param);
        let buffer = self.velocity.next(buffer, d);
        let d = if self.nesterov { self.velocity.ahead(buffer, d) } else { buffer };
        (self.plain.minus_lr.mul_add(d, param), [buffer])
    }
}

/// d = w·(±g + λp).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direction {
    sign: f32,
    weight_decay: f32,
    /// torch adds no decay of 0: −0 + 0·p would lose its sign.
    decays: bool,
    weight: f32,
}

impl Direction {
    pub(crate) fn new(weight: f64, weight_decay: f64, maximize: bool) -> Self {
        Self {
            sign: if maximize { -1.0 } else { 1.0 },
            weight_decay: weight_decay as f32,
            decays: weight_decay != 0.0,
            weight: weight as f32,
        }
    }

    fn is_gradient(&self) -> bool {
        self.sign == 1.0 && !self.decays && self.weight == 1.0
    }

    #[inline(always)]
    pub(crate) fn of(&self, grad: f32, param: f32) -> f32 {
        let d = self.sign * grad;
        let d = if self.decays { self.weight_decay.mul_add(param, d) } else { d };
        self.weight * d
    }
}

/// The momentum buffer's recurrence, here and in the workers ([`crate::velocity`]).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Velocity {
    momentum: f32,
    undamped: f32,
    first: bool,
}

impl Velocity {
    pub(crate) fn new(momentum: f64, dampening: f64, first: bool) -> Self {
        Self { momentum: momentum as f32, undamped: (1.0 - dampening) as f32, first }
    }

    /// v ← μv + (1 − dampening)·d; the first time d itself.
    #[inline(always)]
    pub(crate) fn next(&self, buffer: f32, d: f32) -> f32 {
        if self.first { d } else { self.undamped.mul_add(d, self.momentum * buffer) }
    }

    /// d + μv: where Nesterov looks.
    #[inline(always)]
    pub(crate) fn ahead(&self, buffer: f32, d: f32) -> f32 {
        self.momentum.mul_add(buffer, d)
    }
}
