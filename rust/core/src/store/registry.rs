//! The one place that issues: terms, incarnations, tickets, verdicts. A plain state machine behind one short lock,
//! taken a few times a push (to admit it, to read the version, to settle it), never once a fragment.

use super::book::Ending;
use super::ledger::WorkerKey;
use super::push::{PushHead, PushRecord};
use super::receipt::{Fate, Receipt};
use super::slot::{Recent, Slot, Whereabouts};
use super::tally::{Tally, TicketCounts};
use super::ticket::{Run, Ticket};
use crate::layout::Layout;
use crate::pipeline::{PushFacts, Reason, Verdict, admit};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Answers kept per worker: as many as it may have in flight.
pub(super) const RECENT: usize = 2;
/// Most slots: each fragment's ledger has an entry for every one.
pub const MAX_WORKERS: usize = 1 << 16;

const UNDONE: &str = "parts of it were applied after the checkpoint that the server went on from, and its worker no longer had them";

const OTHER_OPTIMIZER: &str = "parts of it were applied before the run's optimizer was replaced, and the rest came again as made for the new one";

const ALL_FOR_ANOTHER: &str = "nothing of it was applied before the run's optimizer was replaced, and it came again as made for the new one";

/// Every slot is taken: who could leave to make room is the caller's affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "all {max_workers} places for workers are taken, as many as a server has: close workers and clients that are done; a lost one leaves its place when it has been away for rejoin_grace_s"
)]
pub struct Full {
    pub max_workers: usize,
}

/// The life that a registry goes on from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resumed {
    /// The first term of this life: what was read under an earlier one may be of a future that never was.
    pub(super) first_term: u64,
    /// Incarnations up to this one were of lives before.
    pub(super) last_incarnation: u32,
    /// The last of these of which it is not known any more what it has pushed.
    pub(super) last_forgotten: u32,
}

/// What the registry says to an arriving push.
pub(super) enum Ruling {
    Ticketed(Arc<PushRecord>),
    Settled(Receipt),
}

/// Who is there, as far as a checkpoint has to tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attendance {
    /// How often somebody came, went or was given up in this life.
    pub comings_and_goings: u64,
    /// Whether a worker has a place that it was not found away from.
    pub is_anybody_here: bool,
}

pub(super) struct Registry {
    pub(super) term: u64,
    pub(super) version: u64,
    pub(super) samples: u64,
    /// What later tickets obey.
    pub(super) run: Option<Arc<Run>>,
    pub(super) totals: Tally,
    pub(super) tickets: TicketCounts,
    /// Updates of which workers had been told, and which the checkpoint that was gone on from did not have.
    pub(super) lost_updates: u64,
    pub(super) slots: Vec<Option<Slot>>,
    /// In this life, as [`Attendance`] has them.
    pub(super) comings_and_goings: u64,
    pub(super) max_workers: usize,
    /// The newest incarnation that has a slot or had one, or was issued in a life before.
    pub(super) last_incarnation: u32,
    /// The newest one whose slot was given to another worker. Of an incarnation above it that has no slot nothing is in
    /// the store.
    pub(super) last_forgotten: u32,
    pub(super) resumed: Option<Resumed>,
    pub(super) open: BTreeMap<u64, Arc<PushRecord>>,
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
            lost_updates: 0,
            slots: Vec::new(),
            comings_and_goings: 0,
            max_workers: max_workers.min(MAX_WORKERS),
            last_incarnation: 0,
            last_forgotten: 0,
            resumed: None,
            open: BTreeMap::new(),
        }
    }

    /// Gives a worker's new incarnation its slot. The same id keeps its slot (and its tally): its older incarnation is
    /// fenced off by that alone.
    pub(super) fn register(&mut self, worker_id: &str, incarnation: u32) -> Result<WorkerKey, Full> {
        self.last_incarnation = self.last_incarnation.max(incarnation);
        let known = self.slots.iter().position(|s| s.as_ref().is_some_and(|s| s.worker_id == worker_id));
        let index = match known {
            Some(index) => index,
            None if self.slots.len() < self.max_workers => {
                self.slots.push(None);
                self.slots.len() - 1
            }
            None => {
                // A slot goes to newer incarnations only: to the fragments' ledgers an older one has been replaced.
                let is = |s: &Option<Slot>, whereabouts: &[Whereabouts]| {
                    s.as_ref()
                        .is_none_or(|s| s.incarnation < incarnation && whereabouts.contains(&s.whereabouts))
                };
                let first = |whereabouts: &[Whereabouts]| self.slots.iter().position(|s| is(s, whereabouts));
                let free = first(&[Whereabouts::Left, Whereabouts::Finished]);
                let free = free.or_else(|| first(&[Whereabouts::Away]));
                // Of those that are waited for, the last to come is the most likely to come again.
                let expected = |(_, s): &(usize, &Option<Slot>)| is(s, &[Whereabouts::Expected]);
                let oldest = || {
                    let expected = self.slots.iter().enumerate().filter(expected);
                    expected.min_by_key(|(_, s)| s.as_ref().map_or(0, |s| s.incarnation)).map(|(i, _)| i)
                };
                free.or_else(oldest).ok_or(Full { max_workers: self.max_workers })?
            }
        };
        let mut slot = Slot::new(worker_id, incarnation);
        if let Some(old) = &self.slots[index] {
            old.revoke();
        }
        match self.slots[index].take() {
            Some(old) if old.worker_id == worker_id => {
                slot.departed_with = old.departed_with();
                (slot.tally, slot.predecessor) =
                    (old.tally, old.predecessor.max(self.of_before(old.incarnation)));
            }
            Some(old) => {
                self.forget(old.predecessor);
                self.forget(old.incarnation);
            }
            None => {}
        }
        self.slots[index] = Some(slot);
        self.comings_and_goings += 1;
        Ok(WorkerKey { slot: u32::try_from(index).unwrap_or(u32::MAX), incarnation })
    }

    /// An incarnation that another life has given, else none (0).
    fn of_before(&self, incarnation: u32) -> u32 {
        if self.resumed.is_some_and(|resumed| incarnation <= resumed.last_incarnation) {
            incarnation
        } else {
            0
        }
    }

    /// What became of a process's last pushes cannot be said any more.
    fn forget(&mut self, incarnation: u32) {
        self.last_forgotten = self.last_forgotten.max(incarnation);
        let of_before = self.of_before(incarnation);
        if let Some(resumed) = &mut self.resumed {
            resumed.last_forgotten = resumed.last_forgotten.max(of_before);
        }
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

    pub(super) fn absent(&mut self, key: WorkerKey) {
        self.moved(key, Whereabouts::Away);
    }

    pub(super) fn depart(&mut self, key: WorkerKey, finished: bool) {
        self.moved(key, if finished { Whereabouts::Finished } else { Whereabouts::Left });
    }

    fn moved(&mut self, key: WorkerKey, to: Whereabouts) {
        if let Some(slot) = self.slot(key) {
            slot.whereabouts = to;
            self.comings_and_goings += 1;
        }
    }

    /// How many of these workers have not departed, and for how many of them somebody would wait.
    pub(super) fn those_left_of(&self, workers: &BTreeSet<String>) -> (usize, usize) {
        let (mut present, mut awaited) = (0, 0);
        for slot in self.slots.iter().flatten().filter(|slot| workers.contains(&slot.worker_id)) {
            let is_present = !matches!(slot.whereabouts, Whereabouts::Left | Whereabouts::Finished);
            present += usize::from(is_present);
            awaited += usize::from(is_present && slot.whereabouts != Whereabouts::Away);
        }
        (present, awaited)
    }

    /// Whether one has departed that had pushed more than is known of it, also if another process has its name by now.
    pub(super) fn has_departed_with_more(&self, known_pushes: &BTreeMap<String, u64>) -> bool {
        let known = |slot: &Slot| known_pushes.get(&slot.worker_id).copied().unwrap_or(0);
        self.slots.iter().flatten().any(|slot| slot.departed_with() > known(slot))
    }

    pub(super) fn attendance(&self) -> Attendance {
        Attendance {
            comings_and_goings: self.comings_and_goings,
            is_anybody_here: self.slots.iter().flatten().any(|slot| slot.whereabouts == Whereabouts::Here),
        }
    }

    pub(super) fn slot(&mut self, key: WorkerKey) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?.as_mut()?;
        (slot.incarnation == key.incarnation).then_some(slot)
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
        let corrected = self.run.as_ref().is_some_and(|run| run.spec.optimizer.momentum_correction);
        let Some(slot) = self.slot(head.worker) else {
            let detail = "this worker was replaced by a newer process with the same id; stop this one";
            return Ruling::Settled(rejection(Reason::Fenced, detail.to_owned()));
        };
        if head.sequence <= slot.last_sequence {
            slot.tally.duplicates += 1;
            let again = again(slot, head, corrected, rejection);
            self.totals.duplicates += 1;
            return match again {
                Again::Resumed(record, counted) => {
                    self.reopen(&record, counted);
                    Ruling::Ticketed(record)
                }
                Again::Ended(record, counted) => {
                    record.revoke(); // a fragment of it may be queued
                    match record.ending() {
                        Ending::Applied => {}
                        Ending::Partial => record.count_refused(Reason::OptimizerChanged, OTHER_OPTIMIZER),
                        Ending::Dropped => record.count_refused(Reason::OptimizerChanged, ALL_FOR_ANOTHER),
                    }
                    self.reopen(&record, counted);
                    Ruling::Settled(self.settle(&record))
                }
                Again::Answered(receipt) => Ruling::Settled(receipt),
            };
        }
        if head.sequence != slot.last_sequence + 1 {
            let detail = format!("sequence {} came where {} was due", head.sequence, slot.last_sequence + 1);
            return Ruling::Settled(rejection(Reason::Fenced, detail));
        }
        let slept = slot.lost_at.is_some_and(|lost_at| head.base < lost_at);
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
        let record = Arc::new(PushRecord::new(ticket, head, layout));
        self.open.insert(number, Arc::clone(&record));
        if let Some(slot) = self.slot(head.worker) {
            slot.lost_at = None;
            slot.remember(head.sequence, Recent::Open(Arc::clone(&record)), RECENT);
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

    pub(super) fn remember(&mut self, head: &PushHead, receipt: &Receipt) {
        self.totals.count(receipt, head.samples);
        if let Some(slot) = self.slot(head.worker) {
            slot.tally.count(receipt, head.samples);
            slot.remember(head.sequence, Recent::Settled(receipt.clone()), RECENT);
        }
    }

    /// A retry goes on with a ticket that was counted as ended.
    pub(super) fn reopen(&mut self, record: &Arc<PushRecord>, counted: Ending) {
        let counter = self.counter(counted);
        *counter = counter.saturating_sub(1);
        self.open.insert(record.ticket.number, Arc::clone(record));
        if let Some(slot) = self.slot(record.worker) {
            slot.remember(record.sequence, Recent::Open(Arc::clone(record)), RECENT);
        }
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
        let ending = record.ending();
        if ending != Ending::Applied {
            // Where nothing else is wrong, a retry has left out what a life before had answered.
            record.count_refused(Reason::ServerRolledBack, UNDONE);
        }
        *self.counter(ending) += 1;
        let receipt = record.receipt();
        self.totals.count(&receipt, record.samples);
        if let Some(slot) = self.slot(record.worker) {
            slot.tally.count(&receipt, record.samples);
            slot.applied += u64::from(receipt.applied);
            slot.remember(record.sequence, Recent::Settled(receipt.clone()), RECENT);
        }
        receipt
    }

    /// The sender of an open push is gone; a retry may still finish it.
    pub(super) fn abandon(&mut self, record: &Arc<PushRecord>) {
        self.open.remove(&record.ticket.number);
        let ending = record.ending();
        *self.counter(ending) += 1;
        if let Some(slot) = self.slot(record.worker) {
            slot.remember(record.sequence, Recent::Unfinished(Arc::clone(record), ending), RECENT);
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

/// What a sequence number that came before leads to.
enum Again {
    /// Its ticket goes on; with the ending that it is counted by.
    Resumed(Arc<PushRecord>, Ending),
    /// Its ticket cannot go on: it stays as it is.
    Ended(Arc<PushRecord>, Ending),
    Answered(Receipt),
}

/// `corrected`: the worker's part of the run's optimizer is momentum.
fn again(
    slot: &Slot,
    head: &PushHead,
    corrected: bool,
    rejection: impl Fn(Reason, String) -> Receipt,
) -> Again {
    let sequence = head.sequence;
    Again::Answered(match slot.recent.iter().find(|(s, _)| *s == sequence) {
        Some((_, Recent::Settled(receipt))) => Receipt { duplicate: true, ..receipt.clone() },
        Some((_, Recent::Unfinished(record, counted))) if record.present == head.present => {
            let (record, counted) = (Arc::clone(record), *counted);
            // What is sent holds the worker's part of the optimizer that it was made for, if that has one.
            let had_a_part = record.ticket.run.spec.optimizer.momentum_correction;
            let is_same = record.ticket.run.epoch == head.epoch || !(corrected || had_a_part);
            return if is_same { Again::Resumed(record, counted) } else { Again::Ended(record, counted) };
        }
        Some((_, Recent::Unfinished(..))) => {
            // Its fragments would be cut by the tensors that it says, and applied by those that the ticket says.
            rejection(Reason::Fenced, format!("sequence {sequence} came again with other tensors"))
        }
        Some((_, Recent::Open(_))) => {
            let detail = format!("sequence {sequence} is still arriving on another connection");
            rejection(Reason::Fenced, detail)
        }
        None => {
            let detail = format!("sequence {sequence} was answered too long ago to be repeated");
            Receipt { duplicate: true, ..rejection(Reason::AlreadySettled, detail) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::layout::Presence;
    use crate::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec};
    use crate::store::RunSpec;
    use crate::table::{Role, TensorSpec, TensorTable};

    fn registry() -> (Registry, Layout) {
        let tensor = TensorSpec {
            name: "w".into(),
            aliases: vec![],
            shape: vec![4],
            dtype: Dtype::F32,
            role: Role::Parameter,
        };
        let table = TensorTable::new(vec![tensor]).unwrap();
        let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule: Rule::Add }];
        let spec = RunSpec {
            optimizer: OptimizerSpec { groups, momentum_correction: false },
            staleness: StalenessSpec::default(),
            schedule: Schedule::default(),
            max_samples: None,
        };
        let mut registry = Registry::new(1, 1);
        registry.run = Some(Arc::new(Run::after(None, spec, &table)));
        (registry, Layout::of(&table))
    }

    #[test]
    fn of_workers_it_is_told_how_many_have_not_departed_and_how_many_of_them_are_not_away() {
        let (mut registry, _) = registry();
        registry.max_workers = 2;
        let workers = ["a", "b"].map(str::to_owned).into();
        registry.register("a", 1).unwrap();
        let b = registry.register("b", 2).unwrap();
        assert_eq!(registry.those_left_of(&workers), (2, 2));
        registry.absent(b);
        assert_eq!(registry.those_left_of(&workers), (2, 1));
        registry.depart(b, true);
        assert_eq!(registry.those_left_of(&workers), (1, 1));
        registry.register("a stranger", 3).unwrap();
        registry.register("a", 4).unwrap();
        assert_eq!(registry.those_left_of(&workers), (1, 1), "a place that is taken, and a newer process");
    }

    #[test]
    fn of_who_has_departed_it_is_told_whether_it_has_pushed_more_than_is_known() {
        let (mut registry, _) = registry();
        let known = |pushes| BTreeMap::from([("a".to_owned(), pushes)]);
        let a = registry.register("a", 1).unwrap();
        registry.slot(a).unwrap().tally.pushes = 2;
        registry.absent(a);
        assert!(!registry.has_departed_with_more(&known(1)), "it may come back");
        for finished in [true, false] {
            registry.depart(a, finished);
            let [none, one, both] = [BTreeMap::new(), known(1), known(2)];
            let told = [&none, &one, &both].map(|known| registry.has_departed_with_more(known));
            assert_eq!(told, [true, true, false]);
        }
        let of =
            |registry: &Registry| [1, 2, 3].map(|pushes| registry.has_departed_with_more(&known(pushes)));
        let again = registry.register("a", 2).unwrap();
        assert_eq!(of(&registry), [true, false, false], "whoever has its name by then");
        registry.slot(again).unwrap().tally.pushes = 3;
        assert_eq!(of(&registry), [true, false, false], "what that has pushed it may push again");
        registry.register("a", 3).unwrap();
        assert_eq!(of(&registry), [true, false, false], "it has not departed, but was replaced");
    }

    #[test]
    fn a_fragment_applied_between_the_end_of_a_sender_and_its_retry_changes_no_other_count() {
        let (mut registry, layout) = registry();
        let worker = registry.register("a", 1).unwrap();
        let present = Presence::all(1);
        let head =
            PushHead { worker, sequence: 1, term: 1, base: 0, epoch: 1, samples: 1, present, norm: None };
        let ticketed = |registry: &mut Registry| match registry.admit(&head, None, &layout) {
            Ruling::Ticketed(record) => record,
            Ruling::Settled(receipt) => panic!("{receipt:?}"),
        };
        let record = ticketed(&mut registry);
        registry.abandon(&record);
        record.count_applied(1.0, &layout.fragments[0]); // it was queued when its sender died
        let retried = ticketed(&mut registry);
        assert!(registry.settle(&retried).applied);
        let expected = TicketCounts { issued: 1, applied: 1, ..TicketCounts::default() };
        assert_eq!(registry.tickets, expected);
    }
}
