//! The fast path: one fragment's queue, whose turn it is to apply it, and what became of each push on it.

use super::apply::{self, Arrival, Decision, Place};
use super::block::Block;
use super::combine::Combiner;
use super::push::{OpenPush, PushRecord};
use super::root::Root;
use super::{Store, log};
use crate::pipeline::Reason;
use crate::sync::RootCell;
use futures_channel::oneshot;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Pushes applied in one drain before others get the thread.
pub const MAX_DRAIN: usize = 8;

pub(super) struct Cell {
    pub(super) root: RootCell<Root>,
    pub(super) combiner: Combiner<Entry>,
}

pub(super) enum Entry {
    Push(Queued),
    /// The whole fragment is replaced (`load_state_dict`).
    Replace {
        root: Root,
        done: oneshot::Sender<()>,
    },
}

pub(super) struct Queued {
    record: Arc<PushRecord>,
    base: u64,
    payload: Block,
    checksum: u32,
    done: oneshot::Sender<FragmentOutcome>,
}

/// What became of one fragment of a push.
#[derive(Clone, Debug)]
pub struct FragmentOutcome {
    /// The fragment's state afterwards.
    pub root: Arc<Root>,
    /// Whether the push is in that state.
    pub applied: bool,
    /// Updates applied between the worker's read and this apply.
    pub tau: u64,
    pub weight: f64,
    pub reason: Option<Reason>,
}

/// A submitted fragment.
pub struct Submission {
    /// Often ready at once: the submitter applied it itself.
    pub outcome: oneshot::Receiver<FragmentOutcome>,
    /// More pushes are queued than one drain may apply: drive it from a task of its own.
    pub role: Option<Role>,
}

/// The turn to apply what is queued on one fragment. Dropped, it drains in place, so that no push is stranded.
pub struct Role {
    store: Arc<Store>,
    fragment: usize,
    counted: usize,
}

impl Role {
    /// Applies up to [`MAX_DRAIN`] pushes. `None` when nothing is left.
    #[must_use]
    pub fn drain(mut self) -> Option<Self> {
        self.counted = self.store.drain(self.fragment, self.counted);
        (self.counted > 0).then_some(self)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        while self.counted > 0 {
            self.counted = self.store.drain(self.fragment, self.counted);
        }
    }
}

impl Store {
    /// Queues one fragment of a push, received whole and checked, and applies what is queued if nobody else does.
    ///
    /// `payload` is what the wire brought: [`crate::layout::Fragment::push_bytes`] long.
    #[must_use]
    pub fn submit(
        self: &Arc<Self>,
        push: &OpenPush,
        fragment: usize,
        base: u64,
        payload: Block,
        checksum: u32,
    ) -> Submission {
        self.submit_record(Arc::clone(push.record()), fragment, base, payload, checksum)
    }

    pub(super) fn submit_record(
        self: &Arc<Self>,
        record: Arc<PushRecord>,
        fragment: usize,
        base: u64,
        payload: Block,
        checksum: u32,
    ) -> Submission {
        let (done, outcome) = oneshot::channel();
        let turn = self.cells[fragment].combiner.enqueue(Entry::Push(Queued {
            record,
            base,
            payload,
            checksum,
            done,
        }));
        Submission { outcome, role: turn.then(|| self.role(fragment).drain()).flatten() }
    }

    pub(super) fn role(self: &Arc<Self>, fragment: usize) -> Role {
        Role { store: Arc::clone(self), fragment, counted: 1 }
    }

    /// One drain of a fragment's queue by the holder of its turn; returns how many entries are counted afterwards.
    fn drain(&self, fragment: usize, counted: usize) -> usize {
        let cell = &self.cells[fragment];
        let mut batch: Vec<Queued> = Vec::with_capacity(counted.min(MAX_DRAIN));
        for _ in 0..counted.min(MAX_DRAIN) {
            match cell.combiner.take() {
                Entry::Push(queued) => batch.push(queued),
                Entry::Replace { root, done } => {
                    let taken = batch.len();
                    self.apply_batch(fragment, std::mem::take(&mut batch));
                    self.replace(fragment, root);
                    // The caller may have stopped waiting; the load stands all the same.
                    done.send(()).ok();
                    return cell.combiner.finish(taken + 1);
                }
            }
        }
        let taken = batch.len();
        self.apply_batch(fragment, batch);
        cell.combiner.finish(taken)
    }

    fn apply_batch(&self, fragment: usize, batch: Vec<Queued>) {
        if batch.is_empty() {
            return;
        }
        let cell = &self.cells[fragment];
        let old = cell.root.load();
        let place = Place { fragment: &self.layout.fragments[fragment], pool: &self.pool, isa: self.isa };
        let arrivals: Vec<Arrival<'_>> = batch
            .iter()
            .map(|q| Arrival {
                record: &q.record,
                base: q.base,
                payload: q.payload.bytes(),
                checksum: q.checksum,
            })
            .collect();
        // A panic in a kernel is a bug of ours; it must cost these pushes, not the fragment.
        let applied = catch_unwind(AssertUnwindSafe(|| apply::apply(place, &old, &arrivals)));
        let (next, decisions) = applied.unwrap_or_else(|_| {
            let refused =
                Decision::Refused(Reason::Failed, "applying it panicked; please report this".to_owned());
            (None, vec![refused; batch.len()])
        });
        let root = match next {
            Some(next) => {
                let next = Arc::new(next);
                cell.root.store(Arc::clone(&next));
                next
            }
            None => Arc::clone(&old),
        };
        drop(old);
        let mut version =
            root.version - decisions.iter().filter(|d| matches!(d, Decision::Applied { .. })).count() as u64;
        for (queued, decision) in batch.into_iter().zip(decisions) {
            let Queued { record, payload, done, .. } = queued;
            drop(payload); // back to the free list while it is warm
            let outcome = match decision {
                Decision::Applied { tau, weight } => {
                    version += 1;
                    record.count_applied(weight, place.fragment);
                    if let Some(observer) = &self.config.observer {
                        observer.committed(log::Commit { fragment, version, tau, push: Arc::clone(&record) });
                    }
                    FragmentOutcome { root: Arc::clone(&root), applied: true, tau, weight, reason: None }
                }
                Decision::Before => FragmentOutcome {
                    root: Arc::clone(&root),
                    applied: true,
                    tau: 0,
                    weight: 1.0,
                    reason: None,
                },
                Decision::Refused(reason, detail) => {
                    record.count_refused(reason, &detail);
                    let reason = Some(reason);
                    FragmentOutcome { root: Arc::clone(&root), applied: false, tau: 0, weight: 0.0, reason }
                }
            };
            // A session that died does not hear its outcome; the push stays applied.
            done.send(outcome).ok();
        }
    }

    pub(super) fn observe(&self, fragment: usize, root: &Root, push: &Arc<PushRecord>, tau: u64) {
        if let Some(observer) = &self.config.observer {
            observer.committed(log::Commit { fragment, version: root.version, tau, push: Arc::clone(push) });
        }
    }

    fn replace(&self, fragment: usize, mut root: Root) {
        let cell = &self.cells[fragment];
        let old = cell.root.load_full();
        root.version = old.version + 1;
        root.ledger.clone_from(&old.ledger);
        cell.root.store(Arc::new(root));
    }
}
