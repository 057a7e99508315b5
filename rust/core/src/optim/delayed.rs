//! Delayed Nesterov: every arrival steps by its share of the gradient, and the momentum once in so many arrivals.
//!
//! Source: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam and Ranzato, "Asynchronous Local-SGD Training for Language
//! Modeling" (2024), algorithm 3. With d = w·g, N arrivals from one step of the momentum to the next, and c in 0..1/N:
//!
//! * each arrival: Δ ← Δ + d and p ← p − lr·(cμv + d/N);
//! * but each N-th: Δ ← Δ + d, v ← μv + Δ/N, p ← p − lr·((1 − cN + c)·μv + d/N), Δ ← 0.
//!
//! So N arrivals at one p and with c = 0 are one step of Nesterov's on their mean, and N = 1 is torch's
//! `SGD(nesterov=True)`, to the bit.

use super::kernel::Element;

/// An arrival after which the momentum stays as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Between {
    minus_lr: f32,
    weight: f32,
    delay: f32,
    /// cμ
    active: f32,
}

impl Element<2> for Between {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [velocity, waiting]: [f32; 2]) -> (f32, [f32; 2]) {
        let d = self.weight * grad;
        let ahead = self.active.mul_add(velocity, d / self.delay);
        (self.minus_lr.mul_add(ahead, param), [velocity, waiting + d])
    }
}

/// An arrival with which the momentum steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nth {
    minus_lr: f32,
    weight: f32,
    delay: f32,
    momentum: f32,
    /// (1 − cN + c)·μ
    rest: f32,
}

impl Element<2> for Nth {
    #[inline(always)]
    fn apply(&self, grad: f32, param: f32, [velocity, waiting]: [f32; 2]) -> (f32, [f32; 2]) {
        let d = self.weight * grad;
        let velocity = self.momentum * velocity + (waiting + d) / self.delay;
        let ahead = self.rest.mul_add(velocity, d / self.delay);
        (self.minus_lr.mul_add(ahead, param), [velocity, 0.0])
    }
}

/// The numbers of one push.
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants {
    lr: f64,
    weight: f64,
    momentum: f64,
    delay: u64,
    activation: f64,
}

impl Constants {
    pub(super) const fn new(lr: f64, weight: f64, momentum: f64, delay: u64, activation: f64) -> Self {
        Self { lr, weight, momentum, delay, activation }
    }

    pub(super) fn between(&self) -> Between {
        Between {
            minus_lr: -self.lr as f32,
            weight: self.weight as f32,
            delay: self.delay as f32,
            active: (self.activation * self.momentum) as f32,
        }
    }

    pub(super) fn nth(&self) -> Nth {
        let rest = 1.0 - self.activation * self.delay as f64 + self.activation;
        Nth {
            minus_lr: -self.lr as f32,
            weight: self.weight as f32,
            delay: self.delay as f32,
            momentum: self.momentum as f32,
            rest: (rest * self.momentum) as f32,
        }
    }
}
