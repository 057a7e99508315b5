//! Adagrad: s ← s + g², p ← p − w·lr/(1 + (t − 1)·lr_decay) · g / (√s + ε), with g ← ±g + λp.
//!
//! Source: torch 2.15, `torch/optim/adagrad.py::_single_tensor_adagrad`, its operations in its order and rounding.
//! Differs in the weight w: it scales the step, while the sum takes the gradient as it is.

use super::kernel::Element;
use super::sgd::Direction;

/// One slot: the sum of squares (`sum`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Adagrad {
    direction: Direction,
    eps: f32,
    minus_lr: f32,
}

impl Adagrad {
    /// `step` counts from 1.
    pub(super) fn new(
        lr: f64,
        weight: f64,
        lr_decay: f64,
        weight_decay: f64,
        eps: f64,
        maximize: bool,
        step: u64,
    ) -> Self {
        let earlier = step.saturating_sub(1) as f64;
        Self {
            direction: Direction::new(1.0, weight_decay, maximize),
            eps: eps as f32,
            minus_lr: -(weight * (lr / (1.0 + earlier * lr_decay))) as f32,
        }
    }
}

impl Element<1> for Adagrad {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [sum]: [f32; 1]) -> (f32, [f32; 1]) {
        let g = self.direction.of(grad, param);
        let sum = g.mul_add(g, sum);
        (param + self.minus_lr * g / (sum.sqrt() + self.eps), [sum])
    }
}
