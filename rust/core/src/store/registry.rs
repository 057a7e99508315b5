//! The one place that issues: terms, incarnations, tickets, verdicts. A plain state machine behind one short lock,
//! taken a few times a push (to admit it, to read the version, to settle it), never once a fragment.

use super::ledger::WorkerKey;
use super::push::{Ending, PushHead, PushRecord};
use super::receipt::{Fate, Receipt};
use super::slot::{Recent, Slot};
use super::tally::Tally;
use super::ticket::{Run, RunSpec, Ticket};
use crate::layout::Layout;
use crate::pipeline::{PushFacts, Reason, Verdict, admit};
use crate::table::TensorTable;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Answers kept per worker: as many as it may have in flight.
const RECENT: usize = 2;

/// How tickets ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketCounts {
    pub issued: u64,
    pub applied: u64,
    /// Admitted, but nothing of it was applied.
    pub dropped: u64,
    /// Some fragments were applied and others were not.
    pub partial: u64,
    pub open: u64,
}

/// Every slot is taken: who could leave to make room is the caller's affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {max_workers} worker slots are taken; raise max_workers or let workers leave")]
pub struct Full {
    pub max_workers: usize,
}

/// What the registry says to an arriving push.
pub(super) enum Ruling {
    Ticketed(Arc<PushRecord>),
    Settled(Receipt),
}

pub(super) struct Registry {
    pub(super) term: u64,
    pub(super) version: u64,
    pub(super) samples: u64,
    pub(super) run: Option<Arc<Run>>,
    pub(super) totals: Tally,
    pub(super) tickets: TicketCounts,
    slots: Vec<Option<Slot>>,
    max_workers: usize,
    last_incarnation: u32,
    open: BTreeMap<u64, Arc<PushRecord>>,
}

impl Registry {
    pub(super) fn new(term: u64, max_workers: usize) -> Self {
        Self {
            term,
            version: 0,
            samples: 0,
            run: None,
            totals: Tally::default(),
            tickets: TicketCounts::default(),
            slots: Vec::new(),
            max_workers,
            last_incarnation: 0,
            open: BTreeMap::new(),
        }
    }

    /// Gives a worker its slot and a fresh incarnation. The same id keeps its slot (and its tally): its older
    /// incarnation is fenced off by that alone.
    pub(super) fn register(&mut self, worker_id: &str) -> Result<WorkerKey, Full> {
        self.last_incarnation += 1;
        let incarnation = self.last_incarnation;
        let known = self.slots.iter().position(|s| s.as_ref().is_some_and(|s| s.worker_id == worker_id));
        let index = match known {
            Some(index) => index,
            None if self.slots.len() < self.max_workers => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => {
                let absent = |s: &Option<Slot>| s.as_ref().is_none_or(|s| !s.present);
                self.slots.iter().position(absent).ok_or(Full { max_workers: self.max_workers })?
            }
        };
        let mut slot = Slot::new(worker_id, incarnation);
        if let Some(old) = self.slots[index].take().filter(|old| old.worker_id == worker_id) {
            slot.tally = old.tally;
        }
        self.slots[index] = Some(slot);
        Ok(WorkerKey { slot: u32::try_from(index).unwrap_or(u32::MAX), incarnation })
    }

    /// `newest`: the newest version that it could have read.
    pub(super) fn lost(&mut self, key: WorkerKey, newest: u64) {
        if let Some(slot) = self.slot(key) {
            slot.lost_at = Some(newest);
        }
    }

    /// The oldest version on which a push of this worker does not count as slept.
    pub(super) fn least_base(&mut self, key: WorkerKey) -> u64 {
        self.slot(key).and_then(|slot| slot.lost_at).unwrap_or(0)
    }

    pub(super) fn depart(&mut self, key: WorkerKey) {
        if let Some(slot) = self.slot(key) {
            slot.present = false;
        }
    }

    fn slot(&mut self, key: WorkerKey) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?.as_mut()?;
        (slot.incarnation == key.incarnation).then_some(slot)
    }

    /// Sets what later tickets obey. Optimizer state survives unless the rules changed.
    pub(super) fn configure(&mut self, spec: RunSpec, table: &TensorTable) {
        let epoch = match &self.run {
            None => 1,
            Some(run) if same_rules(&run.spec, &spec) => run.epoch,
            Some(run) => run.epoch + 1,
        };
        self.run = Some(Arc::new(Run::resolve(spec, epoch, table)));
    }

    /// Judges a push from its head and, if it is let in, issues its ticket.
    pub(super) fn admit(&mut self, head: &PushHead, measured: Option<f64>, layout: &Layout) -> Ruling {
        let (version, term) = (self.version, self.term);
        let rejection = |reason: Reason, detail: String| Receipt {
            term,
            version,
            staleness: version.saturating_sub(head.base),
            weight: 0.0,
            verdict: Fate::Reject,
            applied: false,
            duplicate: false,
            reason: Some(reason),
            detail,
        };
        let Some(slot) = self.slot(head.worker) else {
            let detail = "this worker was replaced by a newer process with the same id; stop this one";
            return Ruling::Settled(rejection(Reason::Fenced, detail.to_owned()));
        };
        if head.sequence <= slot.last_sequence {
            let ruling = again(slot, head.sequence, rejection);
            self.totals.duplicates += 1;
            if let Some(slot) = self.slot(head.worker) {
                slot.tally.duplicates += 1;
            }
            if let Ruling::Ticketed(record) = &ruling {
                self.reopen(record);
            }
            return ruling;
        }
        if head.sequence != slot.last_sequence + 1 {
            let detail = format!("sequence {} came where {} was due", head.sequence, slot.last_sequence + 1);
            return Ruling::Settled(rejection(Reason::Fenced, detail));
        }
        let slept = slot.lost_at.is_some_and(|lost_at| head.base < lost_at);
        let corrected = self.run.as_ref().is_some_and(|run| run.spec.optimizer.momentum_correction);
        let norm = match measured {
            // What has come is a direction, momentum included; limits are for the gradient, whose norm the head says.
            Some(direction) if corrected && direction.is_finite() => head.norm.or(measured),
            Some(_) => measured,
            None => head.norm,
        };
        let facts = PushFacts {
            staleness: version.saturating_sub(head.base),
            same_term: head.term == term && head.base <= version,
            awake: !slept,
            finite: norm.is_none_or(f64::is_finite),
            norm,
        };
        let verdict = match &self.run {
            None => {
                let detail =
                    "the server has no optimizer; give one to ParameterServer(optimizer=…) or AsyncWorker";
                Verdict::reject(Reason::NoOptimizer, detail)
            }
            Some(run) => match run.spec.max_samples.filter(|&max| self.samples >= max) {
                Some(max) => Verdict::reject(Reason::Budget, format!("the run's {max} samples are used up")),
                None if head.epoch != run.epoch => {
                    let detail =
                        "it was made for an optimizer that is no longer the run's: ask for the run and go on";
                    Verdict::reject(Reason::OptimizerChanged, detail)
                }
                None => admit(&run.spec.staleness, &facts),
            },
        };
        match (verdict, self.run.clone()) {
            (Verdict::Admit, Some(run)) => Ruling::Ticketed(self.issue(head, &run, facts.staleness, layout)),
            (Verdict::Admit, None) => unreachable!("without a run the verdict is a rejection"),
            (Verdict::Reject { reason, detail }, _) => {
                let receipt = rejection(reason, detail);
                self.remember(head, &receipt);
                Ruling::Settled(receipt)
            }
        }
    }

    fn issue(&mut self, head: &PushHead, run: &Arc<Run>, staleness: u64, layout: &Layout) -> Arc<PushRecord> {
        let learning_rates = run.learning_rates(self.version, self.samples);
        self.version += 1;
        self.samples = self.samples.saturating_add(head.samples);
        self.tickets.issued += 1;
        let number = self.tickets.issued;
        let ticket = Ticket {
            number,
            term: self.term,
            version: self.version,
            staleness,
            learning_rates,
            run: Arc::clone(run),
        };
        let fragments = layout.present_fragments(&head.present).count();
        let record = Arc::new(PushRecord::new(ticket, head, fragments));
        self.open.insert(number, Arc::clone(&record));
        if let Some(slot) = self.slot(head.worker) {
            slot.lost_at = None;
            slot.remember(head.sequence, Recent::Open, RECENT);
        }
        record
    }

    /// The end of a push that went wrong before its ticket.
    pub(super) fn fail(&mut self, head: &PushHead, detail: &str) -> Receipt {
        let receipt = Receipt {
            term: self.term,
            version: self.version,
            staleness: self.version.saturating_sub(head.base),
            weight: 0.0,
            verdict: Fate::Reject,
            applied: false,
            duplicate: false,
            reason: Some(Reason::Failed),
            detail: detail.to_owned(),
        };
        if self.slot(head.worker).is_some_and(|slot| head.sequence == slot.last_sequence + 1) {
            self.remember(head, &receipt);
        }
        receipt
    }

    fn remember(&mut self, head: &PushHead, receipt: &Receipt) {
        self.totals.count(receipt, head.samples);
        if let Some(slot) = self.slot(head.worker) {
            slot.tally.count(receipt, head.samples);
            slot.remember(head.sequence, Recent::Settled(receipt.clone()), RECENT);
        }
    }

    fn reopen(&mut self, record: &Arc<PushRecord>) {
        self.uncount(record.ending());
        self.open.insert(record.ticket.number, Arc::clone(record));
    }

    fn count(&mut self, ending: Ending) {
        *self.counter(ending) += 1;
    }

    fn uncount(&mut self, ending: Ending) {
        *self.counter(ending) -= 1;
    }

    fn counter(&mut self, ending: Ending) -> &mut u64 {
        match ending {
            Ending::Applied => &mut self.tickets.applied,
            Ending::Partial => &mut self.tickets.partial,
            Ending::Dropped => &mut self.tickets.dropped,
        }
    }

    /// All fragments of an open push have their outcome.
    pub(super) fn settle(&mut self, record: &Arc<PushRecord>) -> Receipt {
        self.open.remove(&record.ticket.number);
        self.count(record.ending());
        let receipt = record.receipt();
        self.totals.count(&receipt, record.samples);
        if let Some(slot) = self.slot(record.worker) {
            slot.tally.count(&receipt, record.samples);
            slot.remember(record.sequence, Recent::Settled(receipt.clone()), RECENT);
        }
        receipt
    }

    /// The sender of an open push is gone; a retry may still finish it.
    pub(super) fn abandon(&mut self, record: &Arc<PushRecord>) {
        self.open.remove(&record.ticket.number);
        self.count(record.ending());
        if let Some(slot) = self.slot(record.worker) {
            slot.remember(record.sequence, Recent::Unfinished(Arc::clone(record)), RECENT);
        }
    }

    /// Open tickets up to `last`, lowest first.
    pub(super) fn open_until(&self, last: u64) -> Vec<u64> {
        self.open.range(..=last).map(|(&number, _)| number).collect()
    }

    pub(super) fn num_open(&self) -> u64 {
        self.open.len() as u64
    }

    /// Workers' counts by id, in slot order.
    pub(super) fn tallies(&self) -> Vec<(String, u32, Tally)> {
        let slots = self.slots.iter().flatten();
        slots.map(|s| (s.worker_id.clone(), s.incarnation, s.tally.clone())).collect()
    }
}

/// The answer to a sequence number that came before.
fn again(slot: &Slot, sequence: u64, rejection: impl Fn(Reason, String) -> Receipt) -> Ruling {
    match slot.recent.iter().find(|(s, _)| *s == sequence) {
        Some((_, Recent::Settled(receipt))) => {
            Ruling::Settled(Receipt { duplicate: true, ..receipt.clone() })
        }
        Some((_, Recent::Unfinished(record))) => Ruling::Ticketed(Arc::clone(record)),
        Some((_, Recent::Open)) => {
            let detail = format!("sequence {sequence} is still arriving on another connection");
            Ruling::Settled(rejection(Reason::Fenced, detail))
        }
        None => {
            let detail = format!("sequence {sequence} was answered too long ago to be repeated");
            Ruling::Settled(Receipt { duplicate: true, ..rejection(Reason::AlreadySettled, detail) })
        }
    }
}

/// Whether workers and store go on as before: the parts of both are compared.
fn same_rules(a: &RunSpec, b: &RunSpec) -> bool {
    let rules = |spec: &RunSpec| -> Vec<_> {
        spec.optimizer.groups.iter().map(|g| (g.pattern.clone(), g.rule.clone())).collect()
    };
    a.optimizer.momentum_correction == b.optimizer.momentum_correction && rules(a) == rules(b)
}
