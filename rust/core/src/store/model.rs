//! `transaction = "model"`: a push is staged whole, then committed as one by a task of the store, in ticket order.
//! Readers pin one model root, the only truth in this mode.

use super::apply::{self, Arrival, Decision, Place};
use super::block::Block;
use super::push::{PushHead, PushRecord};
use super::receipt::Receipt;
use super::registry::Ruling;
use super::root::Root;
use super::{Commit, Store};
use crate::layout::FragmentKind;
use crate::pipeline::Reason;
use crate::values;
use futures_channel::oneshot;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A consistent set of roots: one version of the whole model.
#[derive(Debug)]
pub struct ModelRoot {
    pub term: u64,
    /// Pushes committed.
    pub version: u64,
    pub(super) roots: Vec<Arc<Root>>,
}

/// One fragment of a push that was staged whole.
pub struct StagedFragment {
    pub fragment: usize,
    /// The fragment's version that the worker had read.
    pub base: u64,
    /// Wire bytes, checksum verified.
    pub payload: Block,
    pub checksum: u32,
}

/// A whole push waiting for its commit.
pub(super) struct Waiting {
    head: PushHead,
    fragments: Vec<StagedFragment>,
    done: oneshot::Sender<Receipt>,
}

/// What the model's combiner orders.
pub(super) enum ModelEntry {
    Push(Waiting),
    Replace { roots: Vec<Root>, done: oneshot::Sender<()> },
}

/// The turn to commit staged pushes. Each [`ModelRole::step`] works on one fragment, so that whoever drives it can
/// let others run in between; dropped, it finishes in place, so that no push is stranded.
pub struct ModelRole {
    store: Arc<Store>,
    counted: usize,
    current: Option<InProgress>,
}

enum Phase {
    /// Reading the push for what admission must know: finite, and how long it is.
    Measure {
        squares: f64,
    },
    Apply {
        record: Arc<PushRecord>,
        next: Vec<Arc<Root>>,
        steps: Vec<Step>,
    },
}

/// What a push did to a fragment of `next`, to be told once nothing can refuse the push any more.
struct Step {
    fragment: usize,
    tau: u64,
    weight: f64,
}

struct InProgress {
    waiting: Waiting,
    phase: Phase,
    position: usize,
}

impl ModelRole {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store, counted: 1, current: None }
    }

    /// Works on one fragment. `None` when nothing is left to commit.
    #[must_use]
    pub fn step(mut self) -> Option<Self> {
        self.advance();
        (self.counted > 0).then_some(self)
    }

    fn advance(&mut self) {
        let Some(current) = &mut self.current else { return self.begin() };
        // A panic in a kernel is a bug of ours; it must cost this push, not the process.
        let store = &self.store;
        let end = match catch_unwind(AssertUnwindSafe(|| current.work(store))) {
            Ok(None) => return,
            Ok(Some(end)) => end,
            Err(_) => current.failed(store),
        };
        let Some(InProgress { waiting: Waiting { done, fragments, .. }, .. }) = self.current.take() else {
            unreachable!("it was there when its work began")
        };
        drop(fragments);
        let receipt = match end {
            End::Committed(record, roots) => {
                self.publish(roots, record.ticket.version);
                self.store.settle(&record)
            }
            End::Refused(record) => {
                // Its ticket counts: readers who kept the version before it would all be late by one for good.
                let roots = self.store.model().roots.clone();
                self.publish(roots, record.ticket.version);
                self.store.settle(&record)
            }
            End::Settled(receipt) => receipt,
        };
        // A session that died does not hear; its push is committed and the ledger keeps the answer.
        done.send(receipt).ok();
        self.counted = self.store.models.finish(1);
    }

    /// Takes the next entry.
    fn begin(&mut self) {
        match self.store.models.take() {
            ModelEntry::Push(waiting) => {
                let phase = Phase::Measure { squares: 0.0 };
                self.current = Some(InProgress { waiting, phase, position: 0 });
            }
            ModelEntry::Replace { roots, done } => {
                let version = self.store.model().version;
                self.publish(roots.into_iter().map(Arc::new).collect(), version);
                // The caller may have stopped waiting; the load stands all the same.
                done.send(()).ok();
                self.counted = self.store.models.finish(1);
            }
        }
    }

    fn publish(&self, roots: Vec<Arc<Root>>, version: u64) {
        let term = roots.first().map_or(0, |r| r.term);
        self.store.publish_model(ModelRoot { term, version, roots });
    }
}

/// How a staged push ends.
enum End {
    /// With its new roots.
    Committed(Arc<PushRecord>, Vec<Arc<Root>>),
    /// It had a ticket; the old roots stay.
    Refused(Arc<PushRecord>),
    /// It got none.
    Settled(Receipt),
}

impl InProgress {
    /// Works on one fragment, or on what comes between the phases.
    fn work(&mut self, store: &Arc<Store>) -> Option<End> {
        let staged = self.waiting.fragments.get(self.position);
        match (&mut self.phase, staged) {
            (Phase::Measure { squares }, Some(staged)) => {
                let Some(more) = measure(store, staged) else { return self.rule(store, f64::NAN) };
                *squares += more;
            }
            (Phase::Measure { squares }, None) => {
                let norm = squares.sqrt();
                return self.rule(store, norm);
            }
            (Phase::Apply { record, next, steps }, Some(staged)) => {
                match apply_one(store, record, staged, next) {
                    Ok((root, tau, weight)) => {
                        let fragment = staged.fragment;
                        steps.push(Step { fragment, tau, weight });
                        next[fragment] = Arc::new(root);
                    }
                    Err((reason, detail)) => {
                        record.count_refused(reason, &detail);
                        return Some(End::Refused(Arc::clone(record)));
                    }
                }
            }
            (Phase::Apply { record, next, steps }, None) => {
                for &Step { fragment, tau, .. } in &*steps {
                    store.observe(fragment, &next[fragment], record, tau);
                }
                for &Step { fragment, weight, .. } in &*steps {
                    record.count_applied(weight, &store.layout.fragments[fragment]);
                }
                return Some(End::Committed(Arc::clone(record), std::mem::take(next)));
            }
        }
        self.position += 1;
        None
    }

    /// Admission of a staged push: after its last byte, with its norm known.
    fn rule(&mut self, store: &Store, norm: f64) -> Option<End> {
        match store.rule(&self.waiting.head, Some(norm)) {
            Ruling::Ticketed(record) => {
                let next = store.model().roots.clone();
                (self.phase, self.position) = (Phase::Apply { record, next, steps: Vec::new() }, 0);
                None
            }
            Ruling::Settled(receipt) => Some(End::Settled(receipt)),
        }
    }

    /// Its work panicked.
    fn failed(&self, store: &Store) -> End {
        let detail = "applying it panicked; please report this";
        match &self.phase {
            Phase::Measure { .. } => End::Settled(store.fail(&self.waiting.head, detail)),
            Phase::Apply { record, .. } => {
                record.count_refused(Reason::Failed, detail);
                End::Refused(Arc::clone(record))
            }
        }
    }
}

impl Drop for ModelRole {
    fn drop(&mut self) {
        while self.counted > 0 {
            self.advance();
        }
    }
}

/// Sum of squares of a fragment's gradient, or `None` if it is not finite.
fn measure(store: &Store, staged: &StagedFragment) -> Option<f64> {
    let fragment = &store.layout.fragments[staged.fragment];
    match fragment.kind {
        FragmentKind::Buffers => Some(0.0),
        FragmentKind::Parameters => {
            let bytes = staged.payload.bytes();
            let (isa, dtype) = (store.isa, fragment.dtype);
            values::all_finite(isa, dtype, bytes).then(|| values::sum_squares(isa, dtype, bytes))
        }
    }
}

fn apply_one(
    store: &Store,
    record: &Arc<PushRecord>,
    staged: &StagedFragment,
    roots: &[Arc<Root>],
) -> Result<(Root, u64, f64), (Reason, String)> {
    let place =
        Place { fragment: &store.layout.fragments[staged.fragment], pool: &store.pool, isa: store.isa };
    let arrival =
        Arrival { record, base: staged.base, payload: staged.payload.bytes(), checksum: staged.checksum };
    let (root, decisions) = apply::apply(place, &roots[staged.fragment], std::slice::from_ref(&arrival));
    match (root, decisions.into_iter().next()) {
        (Some(root), Some(Decision::Applied { tau, weight })) => Ok((root, tau, weight)),
        (_, Some(Decision::Refused(reason, detail))) => Err((reason, detail)),
        _ => Err((Reason::Failed, "the fragment had this push already".to_owned())),
    }
}

impl Store {
    /// Queues a push that is staged whole. If a role comes back, its holder drives the commits.
    #[must_use]
    pub fn commit(self: &Arc<Self>, head: PushHead, fragments: Vec<StagedFragment>) -> Commit {
        let (done, receipt) = oneshot::channel();
        let turn = self.models.enqueue(ModelEntry::Push(Waiting { head, fragments, done }));
        Commit { receipt, role: turn.then(|| ModelRole::new(Arc::clone(self))) }
    }
}
