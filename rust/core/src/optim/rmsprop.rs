//! RMSprop: s ← αs + (1 − α)g², p ← p − w·lr·g / (√s + ε), with g ← ±g + λp.
//!
//! Centered: √(s − a²) for √s, where a ← lerp(a, g, 1 − α). With momentum: b ← μb + w·g / (√s + ε), p ← p − lr·b.
//!
//! Source: torch 2.15, `torch/optim/rmsprop.py::_single_tensor_rmsprop`, its operations in its order and rounding.
//! Differs in the weight w: it scales the step, before the momentum buffer where there is one, while the averages
//! take the gradient as it is.

use super::adam::Lerp;
use super::kernel::Element;
use super::sgd::Direction;

/// The rule with its options as types, so that each keeps only the slots it needs:
/// `square_avg`, then `momentum_buffer`, then `grad_avg`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RmsProp<const MOMENTUM: bool, const CENTERED: bool>(pub(super) Constants);

#[derive(Clone, Copy, Debug)]
pub(super) struct Constants {
    direction: Direction,
    alpha: f32,
    one_minus_alpha: f32,
    average: Lerp,
    eps: f32,
    momentum: f32,
    weight: f32,
    minus_lr: f32,
    minus_weighted_lr: f32,
}

impl Constants {
    pub(super) fn new(
        lr: f64,
        weight: f64,
        alpha: f64,
        eps: f64,
        weight_decay: f64,
        momentum: f64,
        maximize: bool,
    ) -> Self {
        Self {
            direction: Direction::new(1.0, weight_decay, maximize),
            alpha: alpha as f32,
            one_minus_alpha: (1.0 - alpha) as f32,
            average: Lerp::new(1.0 - alpha),
            eps: eps as f32,
            momentum: momentum as f32,
            weight: weight as f32,
            minus_lr: -lr as f32,
            minus_weighted_lr: -(weight * lr) as f32,
        }
    }
}

struct Moments {
    square: f32,
    buffer: f32,
    mean: f32,
}

impl<const MOMENTUM: bool, const CENTERED: bool> RmsProp<MOMENTUM, CENTERED> {
    /// What the rule does not keep comes in as 0 and is dropped by the caller.
    #[inline(always)]
    fn step(&self, grad: f32, param: f32, at: Moments) -> (f32, Moments) {
        let of = &self.0;
        let g = of.direction.of(grad, param);
        let square = (of.one_minus_alpha * g).mul_add(g, of.alpha * at.square);
        let (mean, variance) = if CENTERED {
            let mean = of.average.between(at.mean, g);
            (mean, (-mean).mul_add(mean, square))
        } else {
            (0.0, square)
        };
        let denominator = variance.sqrt() + of.eps;
        if MOMENTUM {
            let buffer = of.momentum * at.buffer + of.weight * g / denominator;
            (of.minus_lr.mul_add(buffer, param), Moments { square, buffer, mean })
        } else {
            (param + of.minus_weighted_lr * g / denominator, Moments { square, buffer: 0.0, mean })
        }
    }
}

impl Element<1> for RmsProp<false, false> {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [square]: [f32; 1]) -> (f32, [f32; 1]) {
        let (param, to) = self.step(grad, param, Moments { square, buffer: 0.0, mean: 0.0 });
        (param, [to.square])
    }
}

impl Element<2> for RmsProp<false, true> {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [square, mean]: [f32; 2]) -> (f32, [f32; 2]) {
        let (param, to) = self.step(grad, param, Moments { square, buffer: 0.0, mean });
        (param, [to.square, to.mean])
    }
}

impl Element<2> for RmsProp<true, false> {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [square, buffer]: [f32; 2]) -> (f32, [f32; 2]) {
        let (param, to) = self.step(grad, param, Moments { square, buffer, mean: 0.0 });
        (param, [to.square, to.buffer])
    }
}

impl Element<3> for RmsProp<true, true> {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [square, buffer, mean]: [f32; 3]) -> (f32, [f32; 3]) {
        let (param, to) = self.step(grad, param, Moments { square, buffer, mean });
        (param, [to.square, to.buffer, to.mean])
    }
}
