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
use crate::values;
use futures_channel::oneshot;
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
        weights: Vec<(f64, usize)>,
    },
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
        let Some(current) = self.current.take() else {
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
            return;
        };
        let (done, store) = (current.waiting.fragments.len(), Arc::clone(&self.store));
        self.current = match current {
            InProgress { phase: Phase::Measure { squares }, waiting, position } if position == done => {
                self.rule(waiting, squares.sqrt())
            }
            InProgress { phase: Phase::Measure { squares }, waiting, position } => {
                match measure(&store, &waiting.fragments[position]) {
                    Some(more) => {
                        let phase = Phase::Measure { squares: squares + more };
                        Some(InProgress { waiting, phase, position: position + 1 })
                    }
                    None => self.rule(waiting, f64::NAN),
                }
            }
            InProgress { phase: Phase::Apply { record, next, weights }, waiting, position }
                if position == done =>
            {
                for (weight, elements) in weights {
                    record.count_applied(weight, elements);
                }
                self.publish(next, record.ticket.version);
                self.end(waiting, store.settle(&record));
                None
            }
            InProgress { phase: Phase::Apply { record, mut next, mut weights }, waiting, position } => {
                match apply_one(&store, &record, &waiting.fragments[position], &next) {
                    Ok((root, tau, weight)) => {
                        let index = waiting.fragments[position].fragment;
                        weights.push((weight, store.layout.fragments[index].len));
                        store.observe(index, &root, &record, tau);
                        next[index] = Arc::new(root);
                        let phase = Phase::Apply { record, next, weights };
                        Some(InProgress { waiting, phase, position: position + 1 })
                    }
                    Err((reason, detail)) => {
                        record.count_refused(reason, &detail);
                        self.end(waiting, store.settle(&record));
                        None
                    }
                }
            }
        };
    }

    /// Admission of a staged push: after its last byte, with its norm known.
    fn rule(&mut self, mut waiting: Waiting, norm: f64) -> Option<InProgress> {
        waiting.head.norm = Some(norm);
        match self.store.rule(&waiting.head) {
            Ruling::Ticketed(record) => {
                let next = self.store.model().roots.clone();
                let phase = Phase::Apply { record, next, weights: Vec::new() };
                Some(InProgress { waiting, phase, position: 0 })
            }
            Ruling::Settled(receipt) => {
                self.end(waiting, receipt);
                None
            }
        }
    }

    fn publish(&self, roots: Vec<Arc<Root>>, version: u64) {
        let term = roots.first().map_or(0, |r| r.term);
        self.store.publish_model(ModelRoot { term, version, roots });
    }

    fn end(&mut self, waiting: Waiting, receipt: Receipt) {
        let Waiting { done, fragments, .. } = waiting;
        drop(fragments);
        // A session that died does not hear; its push is committed and the ledger keeps the answer.
        done.send(receipt).ok();
        self.counted = self.store.models.finish(1);
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
) -> Result<(Root, u64, f64), (crate::pipeline::Reason, String)> {
    let place =
        Place { fragment: &store.layout.fragments[staged.fragment], pool: &store.pool, isa: store.isa };
    let arrival =
        Arrival { record, base: staged.base, payload: staged.payload.bytes(), checksum: staged.checksum };
    let (root, decisions) = apply::apply(place, &roots[staged.fragment], std::slice::from_ref(&arrival));
    match (root, decisions.into_iter().next()) {
        (Some(root), Some(Decision::Applied { tau, weight })) => Ok((root, tau, weight)),
        (_, Some(Decision::Refused(reason, detail))) => Err((reason, detail)),
        _ => Err((crate::pipeline::Reason::Failed, "the fragment had this push already".to_owned())),
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
