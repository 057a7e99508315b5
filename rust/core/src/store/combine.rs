//! Flat combining's hand-over: who applies the updates that several sessions queue on one fragment.
//!
//! The whole protocol is one counter.
//!
//! * **COMBINE-1** An item is pushed before it is counted, so a counted item can always be popped.
//! * **COMBINE-2** Whoever counts from 0 to 1 takes the turn; everybody else leaves. So at most one turn exists.
//! * **COMBINE-3** The holder pops only counted items and subtracts exactly those it popped. It keeps the turn while
//!   the counter stays above 0 and loses it in the same atomic step that brings the counter to 0. So no counted item
//!   is ever without a holder.
//!
//! A busy flag plus `is_empty()` cannot do this: between the holder's last look at the queue and its release of the
//! flag an item can be pushed by somebody who sees the flag still set, and nobody applies it.

use crate::sync::{AtomicUsize, Ordering, Queue};

/// A queue of items and the right to work on them.
pub(crate) struct Combiner<T> {
    queue: Queue<T>,
    pending: AtomicUsize,
}

impl<T> Combiner<T> {
    pub(crate) fn new() -> Self {
        Self { queue: Queue::new(), pending: AtomicUsize::new(0) }
    }

    /// Queues an item. True: the caller now holds the turn, with one item counted, and must work until
    /// [`Self::finish`] returns 0.
    #[must_use]
    pub(crate) fn enqueue(&self, item: T) -> bool {
        self.queue.push(item);
        // Release: publishes the push above to the holder. Acquire: a holder that starts here sees everything the
        // previous holder published. Both pair with `finish`.
        self.pending.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// Takes one counted item (the turn's holder only, at most as often as items are counted).
    pub(crate) fn take(&self) -> T {
        self.queue.pop().expect("COMBINE-1: a counted item is in the queue")
    }

    /// Reports `done` taken items as finished. Returns how many are counted now: 0 gives up the turn.
    #[must_use]
    pub(crate) fn finish(&self, done: usize) -> usize {
        // AcqRel: pairs with `enqueue` (see there).
        self.pending.fetch_sub(done, Ordering::AcqRel) - done
    }
}
