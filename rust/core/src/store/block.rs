//! Aligned, recycled memory. Every root is written out of place, so the store frees a fragment-sized buffer as
//! often as it takes one: freed buffers wait on a free list and the last freed, the one most likely still in the
//! cache, is reused first.

use crate::sync::{Mutex, MutexGuard};
use bytemuck::{Pod, Zeroable};
use std::sync::{Arc, PoisonError};

/// A cache line: what makes the allocator align a block for SIMD.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Size classes are powers of two from one line to 2 MiB (a buffer fragment of 64 Ki float64 values, old and new).
const CLASSES: usize = 16;

fn class_of(bytes: usize) -> usize {
    bytes.div_ceil(64).next_power_of_two().trailing_zeros() as usize
}

/// Free lists by size class. Blocks return here when dropped, so the pool never holds more than was live at once.
#[derive(Default)]
pub struct Pool {
    free: [Mutex<Vec<Vec<Line>>>; CLASSES],
}

impl Pool {
    /// A block of `bytes`, with whatever an earlier owner left in it: the caller writes all of it.
    ///
    /// # Panics
    /// If `bytes` exceeds 2 MiB, which no fragment does (`layout::FRAGMENT_ELEMENTS`).
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: usize) -> Block {
        let class = class_of(bytes);
        let lines = self.list(class).pop();
        let lines = lines.unwrap_or_else(|| vec![Line::zeroed(); bytes.div_ceil(64).next_power_of_two()]);
        Block { lines, bytes, pool: Arc::clone(self) }
    }

    /// Bytes waiting to be reused.
    #[must_use]
    pub fn idle_bytes(&self) -> usize {
        self.free.iter().map(|list| lock(list).iter().map(|b| b.len() * 64).sum::<usize>()).sum()
    }

    fn list(&self, class: usize) -> MutexGuard<'_, Vec<Vec<Line>>> {
        lock(&self.free[class])
    }
}

/// A free list is a plain vector: a panic elsewhere cannot leave it half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Owned memory of a fixed length, aligned to 64 bytes.
pub struct Block {
    lines: Vec<Line>,
    bytes: usize,
    pool: Arc<Pool>,
}

impl Block {
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }

    /// The whole block as f32; its length must be a multiple of four bytes.
    #[must_use]
    pub fn floats(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes())
    }

    pub fn floats_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if !lines.is_empty() {
            self.pool.list(lines.len().trailing_zeros() as usize).push(lines);
        }
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_the_last_freed_is_reused_first() {
        let pool = Arc::new(Pool::default());
        let (a, b) = (pool.take(1000), pool.take(1000));
        let (first, second) = (a.bytes().as_ptr() as usize, b.bytes().as_ptr() as usize);
        assert_eq!((first % 64, second % 64), (0, 0));
        drop(a);
        drop(b);
        assert_eq!(pool.idle_bytes(), 2048);
        assert_eq!(pool.take(900).bytes().as_ptr() as usize, second);
    }

    #[test]
    fn an_empty_block_has_no_bytes() {
        let pool = Arc::new(Pool::default());
        assert!(pool.take(0).bytes().is_empty());
    }
}
