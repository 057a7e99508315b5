//! How the registry writes its book at a cut, and how another life of the store reads it.

use super::StoreConfig;
use super::book::{
    Answer, Book, BookError, Ending, MOST, MOST_INCARNATIONS, Progress, Reached, RunPage, Unfinished,
    WorkerPage,
};
use super::ledger::{self, LedgerEntry, WorkerKey};
use super::push::{PushHead, PushRecord};
use super::receipt::Receipt;
use super::registry::{MAX_WORKERS, RECENT, Registry, Resumed};
use super::resume::Life;
use super::root::Root;
use super::slot::{Recent, Slot, Whereabouts};
use super::tally::{STALENESS_BUCKETS, Tally, TicketCounts};
use super::ticket::{Run, Ticket};
use crate::layout::{Layout, Presence};
use crate::pipeline::Reason;
use crate::spec::Transaction;
use crate::table::TensorTable;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Where a cut lies between the tickets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    /// The last ticket before it.
    pub(super) last: u64,
    version: u64,
    samples: u64,
}

impl Registry {
    /// A line behind everything ticketed so far.
    pub(super) fn line(&self) -> Line {
        Line { last: self.tickets.issued, version: self.version, samples: self.samples }
    }

    /// The line behind what a model root holds: what is open comes after it. `None` while that root's own ticket is
    /// still to be settled.
    pub(super) fn line_at(&self, version: u64) -> Option<Line> {
        let open = || self.open.values();
        let samples = open().fold(self.samples, |left, record| left.saturating_sub(record.samples));
        let is_after = open().all(|record| record.ticket.version > version);
        is_after.then_some(Line { last: self.tickets.issued - self.num_open(), version, samples })
    }

    /// What is written down of the tickets before a line. What they have reached is left open: see
    /// [`Book::note_reached`].
    pub(super) fn book(&self, line: Line) -> Book {
        // One look at each: their fragments go on being applied.
        let open = self.open.range(..=line.last);
        let open: BTreeMap<u64, Progress> = open.map(|(&n, record)| (n, record.progress().clone())).collect();
        let mut tickets = self.tickets.clone();
        for (number, progress) in &open {
            match progress.ending(self.open[number].fragments) {
                Ending::Applied => tickets.applied += 1,
                Ending::Partial => tickets.partial += 1,
                Ending::Dropped => {}
            }
        }
        // Those after the line that have ended were dropped: they could not commit.
        let dropped = line.last.saturating_sub(tickets.applied + tickets.partial);
        let slots = self.slots.iter().enumerate();
        Book {
            term: self.term,
            version: line.version,
            samples: line.samples,
            run: self.run.as_ref().map(|run| RunPage { spec: run.spec.clone(), epoch: run.epoch }),
            tickets: TicketCounts { issued: line.last, dropped, open: 0, ..tickets },
            totals: self.totals.clone(),
            lost_updates: self.lost_updates,
            last_incarnation: self.last_incarnation,
            last_forgotten: Some(self.last_forgotten),
            workers: slots.filter_map(|(i, slot)| Some(self.page(i, slot.as_ref()?, line, &open))).collect(),
        }
    }

    fn page(&self, index: usize, slot: &Slot, line: Line, open: &BTreeMap<u64, Progress>) -> WorkerPage {
        let is_after = |recent: &Recent| match recent {
            Recent::Open(record) | Recent::Unfinished(record, _) => record.ticket.number > line.last,
            Recent::Settled(receipt) => receipt.term == self.term && receipt.version > line.version,
        };
        let first_after = slot.recent.iter().find(|(_, recent)| is_after(recent));
        let last_sequence = first_after.map_or(slot.last_sequence, |(sequence, _)| sequence - 1);
        let before = slot.recent.iter().take_while(|(sequence, _)| *sequence <= last_sequence);
        // What ends with this book is answered by it, and not counted by the slot yet.
        let mut ended = 0;
        let recent = before.map(|(sequence, recent)| {
            let answer = self.answer(recent, open);
            if let (Answer::Settled(receipt), Recent::Open(_) | Recent::Unfinished(..)) = (&answer, recent) {
                ended += u64::from(receipt.applied);
            }
            (*sequence, answer)
        });
        let recent = recent.collect();
        WorkerPage {
            slot: u32::try_from(index).unwrap_or(u32::MAX), // there are at most MAX_WORKERS
            worker_id: slot.worker_id.clone(),
            incarnation: slot.incarnation,
            last_sequence,
            applied: slot.applied + ended, // none after the line was: it could not commit
            present: !matches!(slot.whereabouts, Whereabouts::Left | Whereabouts::Finished),
            away: slot.whereabouts == Whereabouts::Away,
            finished: slot.whereabouts == Whereabouts::Finished,
            in_rounds: false,
            recent,
            tally: slot.tally.clone(),
        }
    }

    fn answer(&self, recent: &Recent, open: &BTreeMap<u64, Progress>) -> Answer {
        let (record, progress, counted) = match recent {
            Recent::Settled(receipt) => return Answer::Settled(receipt.clone()),
            Recent::Open(record) => {
                let progress = open[&record.ticket.number].clone();
                let counted = progress.ending(record.fragments);
                (record, progress, counted)
            }
            Recent::Unfinished(record, counted) => (record, record.progress().clone(), *counted),
        };
        let ticket = &record.ticket;
        // No retry finishes what belongs to other values, or to another optimizer: it ends as it is.
        if ticket.term != self.term {
            return Answer::Settled(ended(record, Reason::ServerRolledBack));
        }
        if self.run.as_ref().is_none_or(|run| run.epoch != ticket.run.epoch) {
            return Answer::Settled(ended(record, Reason::OptimizerChanged));
        }
        Answer::Unfinished(Unfinished {
            ticket: ticket.number,
            version: ticket.version,
            staleness: ticket.staleness,
            learning_rates: ticket.learning_rates.to_vec(),
            samples: record.samples,
            present: record.present.as_bytes().to_vec(),
            reached: Vec::new(),
            counted,
            progress,
        })
    }

    /// The registry that goes on from a [checked](Book::check) book, in a life of its own. Nobody is there yet.
    pub(super) fn resumed(
        book: Book,
        run: Option<Arc<Run>>,
        life: Life,
        config: &StoreConfig,
        layout: &Layout,
    ) -> Result<Self, BookError> {
        let mut slots = Vec::new();
        for page in book.workers {
            let field = page.field();
            let key = WorkerKey { slot: page.slot, incarnation: page.incarnation };
            let mut slot = Slot::new(&page.worker_id, page.incarnation);
            slot.whereabouts = Whereabouts::of(&page);
            (slot.last_sequence, slot.applied, slot.tally) = (page.last_sequence, page.applied, page.tally);
            for (sequence, answer) in page.recent {
                let recent = match answer {
                    Answer::Settled(receipt) => Recent::Settled(receipt),
                    Answer::Unfinished(unfinished) => {
                        let Some(run) = &run else {
                            return Err(error(&field, "has a push under way where there is no optimizer"));
                        };
                        let counted = unfinished.counted;
                        let record = recalled(unfinished, key, sequence, life.term, run, layout);
                        let record = record.map_err(|what| error(&field, what))?;
                        match config.transaction {
                            Transaction::Fragment => Recent::Unfinished(Arc::new(record), counted),
                            // Whole pushes alone are committed from now on.
                            Transaction::Model => {
                                let receipt = ended(&record, Reason::ServerRolledBack);
                                slot.applied += u64::from(receipt.applied);
                                Recent::Settled(receipt)
                            }
                        }
                    }
                };
                slot.recent.push_back((sequence, recent));
            }
            slots.resize_with(page.slot as usize, || None);
            slots.push(Some(slot));
        }
        let last_incarnation = life.last_incarnation.max(book.last_incarnation);
        let last_forgotten = book.last_forgotten.unwrap_or(book.last_incarnation);
        Ok(Self {
            version: book.version,
            samples: book.samples,
            run,
            totals: book.totals,
            tickets: book.tickets,
            slots,
            lost_updates: book.lost_updates,
            last_incarnation,
            last_forgotten,
            resumed: Some(Resumed { first_term: life.term, last_incarnation, last_forgotten }),
            ..Self::new(life.term, config.max_workers)
        })
    }
}

/// The answer to a push that no retry can finish; one of which all has come is whole.
fn ended(record: &PushRecord, why: Reason) -> Receipt {
    let receipt = record.receipt();
    let why = (record.ending() != Ending::Applied).then_some(why);
    Receipt { reason: receipt.reason.or(why), ..receipt }
}

/// The record of a push that a retry is to finish.
fn recalled(
    unfinished: Unfinished,
    worker: WorkerKey,
    sequence: u64,
    term: u64,
    run: &Arc<Run>,
    layout: &Layout,
) -> Result<PushRecord, &'static str> {
    if unfinished.learning_rates.len() != run.spec.optimizer.groups.len() {
        return Err("has a push under way with other groups than the optimizer's");
    }
    let present = Presence::from_bytes(layout.num_tensors(), &unfinished.present)
        .ok_or("has a push under way of other tensors than the model's")?;
    let ticket = Ticket {
        number: unfinished.ticket,
        term,
        version: unfinished.version,
        staleness: unfinished.staleness,
        learning_rates: unfinished.learning_rates.into(),
        run: Arc::clone(run),
    };
    let head = PushHead {
        worker,
        sequence,
        term,
        base: 0,
        epoch: run.epoch,
        samples: unfinished.samples,
        present,
        norm: None,
    };
    Ok(PushRecord::new(ticket, &head, layout).with_progress(unfinished.progress))
}

impl Book {
    /// The run with the model's tensors in its groups.
    pub(crate) fn resolve(&self, table: &TensorTable) -> Option<Arc<Run>> {
        let page = self.run.as_ref()?;
        Some(Arc::new(Run::resumed(page.spec.clone(), page.epoch, table)))
    }

    /// Writes down which fragments hold the pushes that are under way. False if one of them has been applied since the
    /// book was written, so that the two do not belong together.
    #[must_use]
    pub(super) fn note_reached(&mut self, layout: &Layout, roots: &[Arc<Root>]) -> bool {
        for page in &mut self.workers {
            for (sequence, answer) in &mut page.recent {
                let Answer::Unfinished(unfinished) = answer else { continue };
                let present = Presence::from_bytes(layout.num_tensors(), &unfinished.present)
                    .expect("it was written by a registry with this layout");
                let mut num_own = 0;
                for fragment in layout.present_fragments(&present) {
                    let Some(entry) = roots[fragment].ledger.get(page.slot as usize) else { continue };
                    if entry.incarnation == page.incarnation && entry.sequence >= *sequence {
                        num_own += usize::from(entry.sequence == *sequence);
                        unfinished.reached.push(Reached(fragment, entry.sequence, entry.payload_checksum));
                    }
                }
                // Not "unequal": a fragment may have taken a later push of the worker already.
                if num_own > unfinished.progress.applied {
                    return false;
                }
            }
        }
        true
    }

    /// Each fragment's ledger: what a retry of a push that is under way has to find there.
    pub(super) fn ledgers(&self, num_fragments: usize) -> Vec<Vec<LedgerEntry>> {
        let mut ledgers = vec![Vec::new(); num_fragments];
        for page in &self.workers {
            let worker = WorkerKey { slot: page.slot, incarnation: page.incarnation };
            for (_, answer) in &page.recent {
                let Answer::Unfinished(unfinished) = answer else { continue };
                for &Reached(fragment, sequence, checksum) in &unfinished.reached {
                    ledger::record(&mut ledgers[fragment], worker, sequence, checksum);
                }
            }
        }
        ledgers
    }

    /// Looks for what no registry would have written, before any of it is used.
    pub(crate) fn check(&self, num_fragments: usize) -> Result<(), BookError> {
        let TicketCounts { issued, applied, dropped, partial, open } = self.tickets;
        let counts = [self.term, self.version, issued, applied, dropped, partial, open, self.lost_updates];
        check_counts("tickets", &counts)?;
        check_tally("totals", &self.totals)?;
        if let Some(page) = self.run.as_ref().filter(|page| page.epoch > MOST_INCARNATIONS) {
            return Err(error("run", format!("has epoch {}, too many", page.epoch)));
        }
        if self.last_incarnation > MOST_INCARNATIONS {
            return Err(error("last_incarnation", format!("is {}, too many", self.last_incarnation)));
        }
        if let Some(last) = self.last_forgotten.filter(|&last| last > self.last_incarnation) {
            return Err(error("last_forgotten", format!("is {last}, not issued")));
        }
        let (mut ids, mut tickets) = (BTreeSet::new(), BTreeSet::new());
        let mut least_slot = 0;
        for page in &self.workers {
            let field = page.field();
            if page.slot < least_slot || page.slot as usize >= MAX_WORKERS {
                return Err(error(&field, "is out of order, or one too many"));
            }
            least_slot = page.slot + 1;
            if !ids.insert(&page.worker_id) {
                return Err(error(&field, format!("is a second {:?}", page.worker_id)));
            }
            if page.incarnation > self.last_incarnation {
                return Err(error(&field, format!("has incarnation {}, not issued", page.incarnation)));
            }
            check_counts(&field, &[page.last_sequence, page.applied])?;
            check_tally(&field, &page.tally)?;
            let sequences: Vec<u64> = page.recent.iter().map(|(sequence, _)| *sequence).collect();
            let is_ascending = sequences.windows(2).all(|pair| pair[0] < pair[1]);
            let is_within = sequences.iter().all(|s| (1..=page.last_sequence).contains(s));
            if !is_ascending || !is_within || sequences.len() > RECENT {
                let last = page.last_sequence;
                return Err(error(
                    &field,
                    format!("answers pushes {sequences:?}, and the last that came is {last}"),
                ));
            }
            let reached = page.reached();
            for (sequence, answer) in &page.recent {
                let Answer::Unfinished(unfinished) = answer else { continue };
                let is_new = tickets.insert(unfinished.ticket);
                let is_issued =
                    (1..=issued).contains(&unfinished.ticket) && unfinished.version <= self.version;
                let has_reached = |&Reached(fragment, last, _): &Reached| {
                    fragment < num_fragments && (*sequence..=page.last_sequence).contains(&last)
                };
                // A fragment may be named by the push before, too; more of them than were applied fit no cut.
                let num_own = reached.iter().filter(|(_, last)| last == sequence).count();
                let is_reached =
                    unfinished.reached.iter().all(has_reached) && num_own <= unfinished.progress.applied;
                let Progress { applied, weighted, elements, range, .. } = unfinished.progress;
                let has_come = applied <= num_fragments
                    && range
                        .is_none_or(|(low, high)| 0.0 <= low && low <= high && high <= 1.0 && elements > 0.0)
                    && (0.0..=elements).contains(&weighted);
                if !(is_new && is_issued && is_reached && has_come) {
                    return Err(error(&field, format!("has push {sequence} under way, as it cannot be")));
                }
            }
        }
        Ok(())
    }
}

impl WorkerPage {
    /// What the ledgers will have of its pushes under way: fragments, and the push that each has.
    fn reached(&self) -> BTreeSet<(usize, u64)> {
        let answers = self.recent.iter().filter_map(|(_, answer)| match answer {
            Answer::Unfinished(unfinished) => Some(&unfinished.reached),
            Answer::Settled(_) => None,
        });
        answers.flatten().map(|&Reached(fragment, last, _)| (fragment, last)).collect()
    }

    fn field(&self) -> String {
        format!("the worker in slot {}", self.slot)
    }
}

fn check_counts(field: &str, counts: &[u64]) -> Result<(), BookError> {
    match counts.iter().find(|&&count| count > MOST) {
        Some(count) => Err(error(field, format!("counts to {count}, too far"))),
        None => Ok(()),
    }
}

fn check_tally(field: &str, tally: &Tally) -> Result<(), BookError> {
    let Tally { pushes, samples: _, applied, damped, rejected, duplicates, .. } = tally;
    check_counts(field, &[*pushes, *applied, *damped, *duplicates])?;
    check_counts(field, &rejected.values().copied().collect::<Vec<_>>())?;
    check_counts(field, &tally.staleness_histogram)?;
    let buckets = tally.staleness_histogram.len();
    if buckets == STALENESS_BUCKETS {
        return Ok(());
    }
    Err(error(field, format!("has a histogram of {buckets} buckets, {STALENESS_BUCKETS} were due")))
}

fn error(field: &str, what: impl Into<String>) -> BookError {
    BookError { field: field.to_owned(), what: what.into() }
}
