//! Adam and AdamW: m ← lerp(m, g, 1 − β₁), v ← β₂v + (1 − β₂)g², p ← p − w·lr/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε).
//!
//! Source: torch 2.15, `torch/optim/adam.py::_single_tensor_adam`, its operations in its order, each rounded as its
//! CPU kernel rounds (found by comparing bits): given exact square roots, the same bits. torch's builds with MKL miss
//! the last bit of a fifth of all roots; ours are exact.
//! Differs in the weight w: it scales the step and AdamW's decay, while the moments take the gradient as it is.

use super::kernel::Element;

/// How weight decay enters: not at all, into the gradient (Adam) or beside it (AdamW).
#[derive(Clone, Copy, Debug)]
pub(super) enum Decay {
    None,
    Coupled(f64),
    Decoupled(f64),
}

impl Decay {
    pub(super) fn new(weight_decay: f64, decoupled: bool) -> Self {
        match (weight_decay != 0.0, decoupled) {
            (false, _) => Self::None,
            (true, false) => Self::Coupled(weight_decay),
            (true, true) => Self::Decoupled(weight_decay),
        }
    }
}

/// Two slots: m (`exp_avg`) and v (`exp_avg_sq`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Adam {
    sign: f32,
    /// λ, and whether the gradient gets λp.
    weight_decay: f32,
    couples: bool,
    /// 1 − w·lr·λ, and whether the parameter shrinks by it.
    shrink: f32,
    shrinks: bool,
    average: Lerp,
    beta2: f32,
    one_minus_beta2: f32,
    bias_correction2_sqrt: f32,
    eps: f32,
    minus_step_size: f32,
}

impl Adam {
    /// `step` counts from 1.
    pub(super) fn new(
        lr: f64,
        weight: f64,
        (beta1, beta2): (f64, f64),
        eps: f64,
        decay: Decay,
        maximize: bool,
        step: u64,
    ) -> Self {
        let t = step.max(1) as f64;
        let bias_correction1 = 1.0 - beta1.powf(t);
        let bias_correction2 = 1.0 - beta2.powf(t);
        let (weight_decay, couples, shrink, shrinks) = match decay {
            Decay::None => (0.0, false, 1.0, false),
            Decay::Coupled(decay) => (decay, true, 1.0, false),
            Decay::Decoupled(decay) => (0.0, false, 1.0 - weight * (lr * decay), true),
        };
        Self {
            sign: if maximize { -1.0 } else { 1.0 },
            weight_decay: weight_decay as f32,
            couples,
            shrink: shrink as f32,
            shrinks,
            average: Lerp::new(1.0 - beta1),
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            bias_correction2_sqrt: bias_correction2.sqrt() as f32,
            eps: eps as f32,
            minus_step_size: -(weight * (lr / bias_correction1)) as f32,
        }
    }

    /// The parameter after its decay, and both moments.
    #[inline(always)]
    fn moments(&self, grad: f32, param: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let g = self.sign * grad;
        let g = if self.couples { self.weight_decay.mul_add(param, g) } else { g };
        let param = if self.shrinks { param * self.shrink } else { param };
        let m = self.average.between(m, g);
        let v = (self.one_minus_beta2 * g).mul_add(g, self.beta2 * v);
        (param, m, v)
    }

    #[inline(always)]
    fn step(&self, param: f32, m: f32, v: f32) -> f32 {
        let denominator = v.sqrt() / self.bias_correction2_sqrt + self.eps;
        param + self.minus_step_size * m / denominator
    }
}

impl Element<2> for Adam {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let (param, m, v) = self.moments(grad, param, m, v);
        (self.step(param, m, v), [m, v])
    }
}

/// A third slot: the largest v so far (`max_exp_avg_sq`), which takes v's place in the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amsgrad(pub(super) Adam);

impl Element<3> for Amsgrad {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [m, v, largest]: [f32; 3]) -> (f32, [f32; 3]) {
        let (param, m, v) = self.0.moments(grad, param, m, v);
        // Written out and not `f32::max`: one instruction, and a NaN in v stays to be seen.
        let largest = if largest > v { largest } else { v };
        (self.0.step(param, m, largest), [m, v, largest])
    }
}

/// torch's `lerp(a, b, weight)`: from the nearer end, so that weight 1 gives b exactly.
///
/// Source: torch 2.15, `aten/src/ATen/native/Lerp.h` and `cpu/LerpKernel.cpp`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lerp {
    coefficient: f32,
    from_end: bool,
}

impl Lerp {
    pub(super) fn new(weight: f64) -> Self {
        let weight = weight as f32;
        let from_end = weight.abs() >= 0.5;
        Self { coefficient: if from_end { weight - 1.0 } else { weight }, from_end }
    }

    #[inline(always)]
    pub(super) fn between(self, start: f32, end: f32) -> f32 {
        self.coefficient.mul_add(end - start, if self.from_end { end } else { start })
    }
}
