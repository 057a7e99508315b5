//! One formula over whole slices: the only two loops that change a parameter.
//!
//! Both also look at what they write. A float is infinite or NaN exactly where its exponent bits are all ones, so
//! the largest magnitude seen, as an unsigned integer, tells for all of them at two instructions a vector.

use super::prefetch::{AHEAD, prefetch};
use super::scan::{self, INFINITY};
use super::{Isa, Source, Target};
use std::array;

/// Elements between two askings for memory: few enough to come one by one, enough to reduce `largest` seldom.
const BLOCK: usize = 256;

/// An update rule's formula for one element with `N` values of state.
pub(crate) trait Element<const N: usize>: Copy {
    /// The next parameter and state. Must be `#[inline(always)]`, see [`Isa::run`].
    fn apply(&self, grad: f32, param: f32, state: [f32; N]) -> (f32, [f32; N]);
}

/// Reads `src`, writes `dst`, copies the slots that the rule does not use; true if all that the rule wrote is finite.
pub(crate) fn out_of_place<const N: usize, E: Element<N>>(
    isa: Isa,
    element: E,
    grad: &[f32],
    src: &Source<'_>,
    dst: Target<'_>,
) -> bool {
    let Target { param, state } = dst;
    let mut slots = state.into_iter();
    let to: [&mut [f32]; N] = array::from_fn(|_| slots.next().unwrap_or_default());
    for (unused, from) in slots.zip(&src.state[N..]) {
        unused.copy_from_slice(from);
    }
    let from: [&[f32]; N] = array::from_fn(|slot| src.state[slot]);
    isa.run(
        #[inline(always)]
        || write(element, grad, src.param, from, param, to),
    )
}

/// Reads and writes `dst`; true if all that the rule wrote is finite.
pub(crate) fn in_place<const N: usize, E: Element<N>>(
    isa: Isa,
    element: E,
    grad: &[f32],
    dst: Target<'_>,
) -> bool {
    let mut slots = dst.state.into_iter();
    let state: [&mut [f32]; N] = array::from_fn(|_| slots.next().unwrap_or_default());
    isa.run(
        #[inline(always)]
        || rewrite(element, grad, dst.param, state),
    )
}

/// Walks the slices block by block, and asks for what comes [`AHEAD`] of each.
#[inline(always)]
fn write<const N: usize, E: Element<N>>(
    element: E,
    grad: &[f32],
    param: &[f32],
    state: [&[f32]; N],
    to_param: &mut [f32],
    mut to_state: [&mut [f32]; N],
) -> bool {
    let n = grad.len();
    assert!(param.len() == n && to_param.len() == n, "a step over slices of different lengths");
    for slot in 0..N {
        assert!(state[slot].len() == n && to_state[slot].len() == n, "a step over state of another length");
    }
    let mut largest = 0;
    for start in (0..n).step_by(BLOCK) {
        let end = n.min(start + BLOCK);
        let ahead = n.min(start + AHEAD)..n.min(end + AHEAD);
        prefetch(&param[ahead.clone()]);
        for slot in state {
            prefetch(&slot[ahead.clone()]);
        }
        let state = state.map(|slot| &slot[start..end]);
        let to_state = to_state.each_mut().map(|slot| &mut slot[start..end]);
        let block = write_block(
            element,
            &grad[start..end],
            &param[start..end],
            state,
            &mut to_param[start..end],
            to_state,
        );
        largest = largest.max(block);
    }
    largest < INFINITY
}

/// One block, all its slices of the same length, which the compiler sees; returns the largest magnitude written.
#[inline(always)]
fn write_block<const N: usize, E: Element<N>>(
    element: E,
    grad: &[f32],
    param: &[f32],
    state: [&[f32]; N],
    to_param: &mut [f32],
    to_state: [&mut [f32]; N],
) -> u32 {
    let n = grad.len();
    let mut largest = 0;
    for i in 0..n {
        let (next, next_state) = element.apply(grad[i], param[i], array::from_fn(|slot| state[slot][i]));
        to_param[i] = next;
        largest = scan::larger(largest, next);
        for slot in 0..N {
            to_state[slot][i] = next_state[slot];
            largest = scan::larger(largest, next_state[slot]);
        }
    }
    largest
}

#[inline(always)]
fn rewrite<const N: usize, E: Element<N>>(
    element: E,
    grad: &[f32],
    param: &mut [f32],
    state: [&mut [f32]; N],
) -> bool {
    let n = grad.len();
    assert!(param.len() == n, "a step over slices of different lengths");
    for slot in &state {
        assert!(slot.len() == n, "a step over state of another length");
    }
    let mut largest = 0;
    for i in 0..n {
        let (next, next_state) = element.apply(grad[i], param[i], array::from_fn(|slot| state[slot][i]));
        param[i] = next;
        largest = scan::larger(largest, next);
        for slot in 0..N {
            state[slot][i] = next_state[slot];
            largest = scan::larger(largest, next_state[slot]);
        }
    }
    largest < INFINITY
}
