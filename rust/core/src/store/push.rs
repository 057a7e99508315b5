//! One admitted push: its record, which every fragment's applier reports to, and the handle that its sender holds.

use super::Store;
use super::book::{Ending, Progress};
use super::ledger::WorkerKey;
use super::receipt::{Fate, Receipt};
use super::ticket::Ticket;
use crate::layout::{Fragment, FragmentKind, Layout, Presence};
use crate::pipeline::Reason;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a push says of itself before its first fragment.
#[derive(Clone, Debug)]
pub struct PushHead {
    pub worker: WorkerKey,
    /// The worker's own count of pushes, from 1, without gaps.
    pub sequence: u64,
    /// The life of the store in which the worker read.
    pub term: u64,
    /// The model's version at that read.
    pub base: u64,
    /// [`super::Run::epoch`] of the optimizer that the worker knows of; 0: of none.
    pub epoch: u32,
    /// Samples the gradient is a mean over.
    pub samples: u64,
    pub present: Presence,
    /// The gradient's L2 norm, where a stage asked for it and the worker sends something else (momentum correction).
    pub norm: Option<f64>,
}

/// An admitted push, shared by its sender and the appliers of its fragments.
#[derive(Debug)]
pub struct PushRecord {
    pub ticket: Ticket,
    pub worker: WorkerKey,
    pub sequence: u64,
    pub samples: u64,
    pub present: Presence,
    /// Fragments it touches.
    pub(super) fragments: usize,
    /// Whether parameters are among them.
    brings_parameters: bool,
    /// Its worker was replaced: what has not been applied of it is not any more.
    is_revoked: AtomicBool,
    progress: Mutex<Progress>,
}

impl PushRecord {
    pub(super) fn new(ticket: Ticket, head: &PushHead, layout: &Layout) -> Self {
        let present = || layout.present_fragments(&head.present);
        let is_parameters = |i: usize| layout.fragments[i].kind == FragmentKind::Parameters;
        Self {
            ticket,
            worker: head.worker,
            sequence: head.sequence,
            samples: head.samples,
            present: head.present.clone(),
            fragments: present().count(),
            brings_parameters: present().any(is_parameters),
            is_revoked: AtomicBool::new(false),
            progress: Mutex::default(),
        }
    }

    /// As it was in another life of the store.
    pub(super) fn with_progress(mut self, progress: Progress) -> Self {
        self.progress = Mutex::new(progress);
        self
    }

    pub(super) fn revoke(&self) {
        // Relaxed, here and below: it guards nothing but itself. A fragment that is being committed while it is set comes
        // before it.
        self.is_revoked.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::Relaxed)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count_applied(&self, weight: f64, fragment: &Fragment) {
        let mut p = self.progress();
        p.applied += 1;
        // A buffer moves by the difference that a forward pass made, whatever its push is worth.
        if fragment.kind == FragmentKind::Buffers {
            return;
        }
        let elements: usize = fragment.present_segments(&self.present).map(|s| s.len).sum();
        #[expect(clippy::cast_precision_loss, reason = "a fragment has at most 2^16 elements")]
        let elements = elements as f64;
        p.weighted += weight * elements;
        p.elements += elements;
        let (low, high) = p.range.unwrap_or((weight, weight));
        p.range = Some((low.min(weight), high.max(weight)));
    }

    pub(super) fn count_refused(&self, reason: Reason, detail: &str) {
        let mut p = self.progress();
        p.reason.get_or_insert(reason);
        if p.detail.is_empty() {
            detail.clone_into(&mut p.detail);
        }
    }

    pub(super) fn ending(&self) -> Ending {
        self.progress().ending(self.fragments)
    }

    pub(super) fn receipt(&self) -> Receipt {
        let p = self.progress();
        let applied = p.applied > 0 || self.fragments == 0;
        let weight = match p.range {
            Some((low, high)) if low < high => p.weighted / p.elements,
            Some((low, _)) => low,
            // A push of buffers alone, or of nothing, is worth what it says; of any other, all parameters were refused.
            None if applied && !self.brings_parameters => 1.0,
            None => 0.0,
        };
        let verdict = match (applied, weight < 1.0) {
            (false, _) => Fate::Reject,
            (true, true) => Fate::Damp,
            (true, false) => Fate::Admit,
        };
        Receipt {
            term: self.ticket.term,
            version: self.ticket.version,
            staleness: self.ticket.staleness,
            weight,
            verdict,
            applied,
            duplicate: false,
            reason: p.reason,
            detail: p.detail.clone(),
        }
    }
}

/// Whether a push may send its fragments on to the store.
pub enum Admission {
    Open(OpenPush),
    /// Rejected, or a sequence number that was answered before. Its fragments are to be read and dropped.
    Settled(Receipt),
}

/// The sender's hold on an admitted push. Settle it when all its fragments have their outcome; dropping it says that
/// the sender died or stalled, and the ticket is then counted by how far it came.
pub struct OpenPush {
    store: Arc<Store>,
    pub(super) record: Arc<PushRecord>,
    settled: bool,
}

impl OpenPush {
    pub(super) fn new(store: Arc<Store>, record: Arc<PushRecord>) -> Self {
        Self { store, record, settled: false }
    }

    #[must_use]
    pub fn record(&self) -> &Arc<PushRecord> {
        &self.record
    }

    /// Ends the push and says what became of it.
    #[must_use]
    pub fn settle(mut self) -> Receipt {
        self.settled = true;
        self.store.settle(&self.record)
    }
}

impl Drop for OpenPush {
    fn drop(&mut self) {
        if !self.settled {
            self.store.abandon(&self.record);
        }
    }
}
