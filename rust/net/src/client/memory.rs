//! Memory that belongs to the caller (a gradient where autograd left it, a parameter where the module keeps it),
//! read and written in place so that a push copies nothing.
//!
//! - MEM-1 A [`Memory`] is valid for reads of its whole length for `'a`, and for writes where it is given as `out`.
//! - MEM-2 While a call of a [`Client`](super::Client) has it, nobody else writes to it, and nobody else reads
//!   what is given as `out`. Memories of one call may overlap: a module's buffers are sent and received in place.
//! - MEM-3 A reference into it lives only inside a closure that one of the functions below runs; the closure ends
//!   before an await and reaches no `write` of another memory. So a shared and an exclusive reference to the same
//!   bytes are never alive together, whatever overlaps.
//! - MEM-4 The memories given as `out` of one call do not overlap each other ([`check_disjoint`]), so that several
//!   may be written in one closure.
#![expect(unsafe_code, reason = "Python owns this memory; the invariants above are what makes that sound")]

use offbeat_core::checksum::{Checksum, checksum};
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::ops::Range;

/// The bytes of one tensor in the caller's hands: C order, little-endian, in the tensor's own element type.
#[derive(Debug)]
pub struct Memory<'a> {
    start: *mut u8,
    len: usize,
    owner: PhantomData<&'a mut [u8]>,
}

// SAFETY: MEM-1 and MEM-2 do not depend on the thread; a `Memory` is neither `Clone` nor `Sync`, so one thread has it.
unsafe impl Send for Memory<'_> {}

impl<'a> Memory<'a> {
    /// Takes memory by address.
    ///
    /// # Safety
    /// MEM-1 and MEM-2 hold for the `len` bytes from `start`. `start` may be anything if `len` is 0.
    #[must_use]
    pub unsafe fn from_raw(start: *mut u8, len: usize) -> Self {
        let start = if len == 0 { std::ptr::dangling_mut() } else { start };
        Self { start, len, owner: PhantomData }
    }

    /// Memory that Rust owns: the exclusive borrow upholds MEM-1 and MEM-2.
    #[must_use]
    pub fn of(bytes: &'a mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), len: bytes.len(), owner: PhantomData }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, as a tensor with a 0 in its shape.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Runs `f` on a range of the bytes.
    ///
    /// # Panics
    /// If the range is not inside; every caller takes it from a layout that was compared with the length.
    pub(crate) fn read<R>(&self, range: Range<usize>, f: impl FnOnce(&[u8]) -> R) -> R {
        f(self.shared(range))
    }

    /// Runs `f` on a range of the bytes of an `out` memory.
    ///
    /// # Panics
    /// As [`Memory::read`].
    pub(crate) fn write<R>(&self, range: Range<usize>, f: impl FnOnce(&mut [u8]) -> R) -> R {
        f(self.exclusive(range))
    }

    fn shared(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "a range of this memory");
        // SAFETY: MEM-1 makes the bytes readable, the assertion keeps the range inside, MEM-2 and MEM-3 exclude a
        // writer while the reference lives (it goes to a closure only).
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    #[expect(clippy::mut_from_ref, reason = "private; MEM-3 and MEM-4 say why it is the only reference")]
    fn exclusive(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len, "a range of this memory");
        // SAFETY: MEM-1 makes the bytes of an `out` memory writable, the assertion keeps the range inside, MEM-2,
        // MEM-3 and MEM-4 exclude every other reference while this one lives (it goes to a closure only).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Most runs that one vectored call names; a fragment of more goes through a scratch buffer.
pub(crate) const MAX_RUNS: usize = 16;
/// Room for what goes before and after the runs: two heads and a read-ahead.
const MAX_SLICES: usize = MAX_RUNS + 3;

/// The checksum of what the runs hold, taken one after another.
pub(crate) fn checksum_of<'m>(mut runs: impl Iterator<Item = (&'m Memory<'m>, Range<usize>)>) -> u32 {
    let (first, second) = (runs.next(), runs.next());
    if let (Some((memory, range)), None) = (&first, &second) {
        return memory.read(range.clone(), checksum); // all at once, which needs no state
    }
    let mut checksum = Checksum::default();
    for (memory, range) in first.into_iter().chain(second).chain(runs) {
        memory.read(range, |bytes| checksum.update(bytes));
    }
    checksum.finish()
}

/// Runs `f` on `head` followed by what the runs hold from their byte `skip` on, as slices for one vectored write.
///
/// # Panics
/// If there are more than [`MAX_RUNS`] runs, or a run is not inside its memory.
pub(crate) fn with_slices<'m, R>(
    head: &[u8],
    runs: impl Iterator<Item = (&'m Memory<'m>, Range<usize>)>,
    mut skip: usize,
    f: impl FnOnce(&[IoSlice<'_>]) -> R,
) -> R {
    let mut slices = [IoSlice::new(&[]); MAX_SLICES];
    let mut count = 0;
    if !head.is_empty() {
        slices[0] = IoSlice::new(head);
        count = 1;
    }
    for (memory, mut range) in runs {
        let skipped = skip.min(range.len());
        (range.start, skip) = (range.start + skipped, skip - skipped);
        if !range.is_empty() {
            slices[count] = IoSlice::new(memory.shared(range));
            count += 1;
        }
    }
    f(&slices[..count])
}

/// Runs `f` on what the runs of `out` memories hold from their byte `skip` on, followed by `tail`, as slices for
/// one vectored read.
///
/// # Panics
/// As [`with_slices`].
pub(crate) fn with_slices_mut<'m, R>(
    runs: impl Iterator<Item = (&'m Memory<'m>, Range<usize>)>,
    mut skip: usize,
    tail: &mut [u8],
    f: impl FnOnce(&mut [IoSliceMut<'_>]) -> R,
) -> R {
    let mut slices = [const { None }; MAX_SLICES];
    let mut count = 0;
    for (memory, mut range) in runs {
        let skipped = skip.min(range.len());
        (range.start, skip) = (range.start + skipped, skip - skipped);
        if !range.is_empty() {
            slices[count] = Some(IoSliceMut::new(memory.exclusive(range)));
            count += 1;
        }
    }
    slices[count] = Some(IoSliceMut::new(tail));
    count += 1;
    let mut slices = slices.map(|s| s.unwrap_or_else(|| IoSliceMut::new(&mut [])));
    f(&mut slices[..count])
}

impl Memory<'_> {
    /// Whether both are the very same bytes.
    pub(crate) fn is_same(&self, other: &Memory<'_>) -> bool {
        span(self) == span(other)
    }
}

/// The first two memories that share a byte, as positions; `None` upholds MEM-4.
pub(crate) fn check_disjoint(memories: &[Memory<'_>]) -> Option<(usize, usize)> {
    let mut end = 0;
    let ascending = memories.iter().filter(|m| m.len > 0).all(|m| {
        let (first, last) = span(m);
        let above = first >= end;
        end = last;
        above
    });
    if ascending {
        return None;
    }
    let mut order: Vec<usize> = (0..memories.len()).filter(|&i| memories[i].len > 0).collect();
    order.sort_by_key(|&i| span(&memories[i]));
    order.windows(2).find_map(|pair| {
        let (a, b) = (pair[0], pair[1]);
        (span(&memories[a]).1 > span(&memories[b]).0).then_some((a.min(b), a.max(b)))
    })
}

/// Whether one of `these` shares a byte with one of `others`, which are disjoint.
pub(crate) fn overlap<'m>(these: impl Iterator<Item = &'m Memory<'m>>, others: &[Memory<'_>]) -> bool {
    let mut spans: Vec<_> = others.iter().filter(|m| m.len > 0).map(span).collect();
    spans.sort_unstable();
    these.filter(|m| m.len > 0).map(span).any(|(first, last)| {
        let next = spans.partition_point(|&(_, end)| end <= first);
        spans.get(next).is_some_and(|&(start, _)| start < last)
    })
}

/// First byte and the one after the last.
fn span(memory: &Memory<'_>) -> (usize, usize) {
    (memory.start.addr(), memory.start.addr() + memory.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Where a part of a fragment lies: which of a list of memories, and which of its bytes.
    #[derive(Clone, Debug)]
    struct Run {
        tensor: usize,
        bytes: Range<usize>,
    }

    /// Some tensors with bytes in them and runs over these, in order.
    fn cut() -> impl Strategy<Value = (Vec<Vec<u8>>, Vec<Run>)> {
        let tensors = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 1..8);
        tensors.prop_flat_map(|tensors| {
            let sizes: Vec<usize> = tensors.iter().map(Vec::len).collect();
            let run = (0..sizes.len(), any::<prop::sample::Index>(), any::<prop::sample::Index>());
            let runs = prop::collection::vec(run, 0..MAX_RUNS).prop_map(move |runs| {
                let mut used: Vec<usize> = vec![0; sizes.len()]; // runs of one tensor follow each other
                let mut cut = vec![];
                for (tensor, from, len) in runs {
                    let start = used[tensor] + from.index(sizes[tensor] - used[tensor] + 1);
                    let end = start + len.index(sizes[tensor] - start + 1);
                    used[tensor] = end;
                    cut.push(Run { tensor, bytes: start..end });
                }
                cut
            });
            (Just(tensors), runs)
        })
    }

    fn joined(tensors: &[Vec<u8>], runs: &[Run]) -> Vec<u8> {
        runs.iter().flat_map(|r| tensors[r.tensor][r.bytes.clone()].to_vec()).collect()
    }

    proptest! {
        #[test]
        fn gathered_slices_are_the_runs_from_any_byte_on((mut tensors, runs) in cut(), at: prop::sample::Index) {
            let whole = joined(&tensors, &runs);
            let skip = at.index(whole.len() + 1);
            let memories: Vec<Memory<'_>> = tensors.iter_mut().map(|t| Memory::of(t)).collect();
            let parts = runs.iter().map(|r| (&memories[r.tensor], r.bytes.clone()));
            let seen = with_slices(b"head", parts, skip, |slices| {
                slices.iter().flat_map(|s| s.to_vec()).collect::<Vec<u8>>()
            });
            prop_assert_eq!(&seen[..4], b"head");
            prop_assert_eq!(&seen[4..], &whole[skip..]);
        }

        #[test]
        fn what_is_scattered_is_gathered((mut tensors, runs) in cut(), at: prop::sample::Index, fill: u8) {
            let whole = joined(&tensors, &runs);
            let skip = at.index(whole.len() + 1);
            let mut expected = whole.clone();
            expected[skip..].fill(fill);
            let mut tail = [0; 3];
            {
                let memories: Vec<Memory<'_>> = tensors.iter_mut().map(|t| Memory::of(t)).collect();
                let parts = runs.iter().map(|r| (&memories[r.tensor], r.bytes.clone()));
                let total: usize = with_slices_mut(parts, skip, &mut tail, |slices| {
                    slices.iter_mut().map(|s| { s.fill(fill); s.len() }).sum()
                });
                prop_assert_eq!(total, whole.len() - skip + 3);
            }
            prop_assert_eq!(joined(&tensors, &runs), expected);
            prop_assert_eq!(tail, [fill; 3]);
        }

        #[test]
        fn overlap_is_found(spans in prop::collection::vec((0_usize..60, 0_usize..12), 0..6)) {
            let mut all = [0_u8; 80];
            let start = all.as_mut_ptr();
            let memories: Vec<Memory<'_>> = spans.iter()
                // SAFETY: inside `all`, which outlives the memories; nothing reads or writes through them.
                .map(|&(at, len)| unsafe { Memory::from_raw(start.add(at), len) })
                .collect();
            let meet = |a: usize, b: usize| {
                let ((a, m), (b, n)) = (spans[a], spans[b]);
                m > 0 && n > 0 && a < b + n && b < a + m
            };
            let any = (0..spans.len()).any(|a| (0..a).any(|b| meet(a, b)));
            match check_disjoint(&memories) {
                None => prop_assert!(!any),
                Some((a, b)) => prop_assert!(a < b && meet(a, b)),
            }
            for (n, memory) in memories.iter().enumerate() {
                let others = &memories[..n];
                if check_disjoint(others).is_none() {
                    let any = (0..n).any(|other| meet(n, other));
                    prop_assert_eq!(overlap([memory].into_iter(), others), any);
                }
            }
        }
    }

    #[test]
    fn an_empty_memory_may_come_from_a_null_pointer() {
        // SAFETY: a length of 0 promises nothing.
        let memory = unsafe { Memory::from_raw(std::ptr::null_mut(), 0) };
        assert!(memory.is_empty() && memory.read(0..0, <[u8]>::is_empty));
    }

    #[test]
    #[should_panic(expected = "a range of this memory")]
    fn a_range_outside_is_refused() {
        Memory::of(&mut [0; 4]).read(2..5, |_| ());
    }
}
