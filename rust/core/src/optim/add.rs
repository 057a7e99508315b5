//! Add: p ← p + w·δ. What the server does with the difference that a worker's own optimizer made.

use super::kernel::Element;

#[derive(Clone, Copy, Debug)]
pub(super) struct Add {
    weight: f32,
}

impl Add {
    pub(super) fn new(weight: f64) -> Self {
        Self { weight: weight as f32 }
    }
}

impl Element<0> for Add {
    #[inline(always)]
    fn apply(&self, delta: f32, param: f32, []: [f32; 0]) -> (f32, [f32; 0]) {
        (self.weight.mul_add(delta, param), [])
    }
}
