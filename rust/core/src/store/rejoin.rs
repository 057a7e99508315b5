//! Exactly once, over connections: a worker process that lost its connection, or whose server was started again, comes
//! back with what it knows, and both agree on what has become of the pushes that were under way.
//!
//! The worker says up to which push it was told ([`Claim::settled`]) and which came after it. Of those, the registry
//! answers what it has answered before; what it has not heard of, or only in parts, the worker sends again under the
//! same number, or gives up if it no longer has it: then it ends as it is.
//!
//! A registry that goes on from a checkpoint may know less than the worker. What the worker was told of and the
//! checkpoint does not hold is lost, counted, and the worker's numbers go on from its own: nobody is fenced for it.

use super::book::{Ending, MOST};
use super::ledger::WorkerKey;
use super::push::PushHead;
use super::receipt::{Fate, Receipt};
use super::registry::{Full, RECENT, Registry};
use super::slot::{Recent, Slot, Whereabouts};
use crate::layout::Presence;
use crate::pipeline::Reason;
use futures_channel::oneshot;
use serde::{Deserialize, Serialize};

/// No worker gets so far.
const MOST_PUSHES: u64 = MOST / 2;

/// What a worker process knows of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub incarnation: u32,
    /// The newest term that it has heard of.
    pub term: u64,
    /// The last push that it was told of; all before it were, too.
    pub settled: u64,
    /// How many of them were applied.
    pub applied: u64,
    /// Those that came after, in order: at most as many as may be in flight.
    pub unsettled: Vec<Unsettled>,
}

/// A push of which its worker has not heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unsettled {
    pub sequence: u64,
    pub samples: u64,
    /// Whether the worker cannot send it again: it ends as it is.
    pub gone: bool,
}

/// What a rejoin leads to.
#[derive(Debug)]
pub enum Rejoin {
    /// A push is still being committed: to be asked again when this resolves.
    Busy(oneshot::Receiver<()>),
    Back(Standing),
}

/// Where a worker stands that is back.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    pub key: WorkerKey,
    /// The pushes of the claim that have ended, by sequence number. The others are to be sent again.
    pub answers: Vec<(u64, Receipt)>,
    /// Updates of which it had been told and which are not here.
    pub lost_updates: u64,
    /// The newest version that holds a push of its.
    pub own_version: u64,
}

/// Why a worker process cannot go on where it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWayBack {
    #[error("a newer process has the name {worker_id:?}")]
    Fenced { worker_id: String },
    #[error(
        "nothing is known (any more) of worker {worker_id:?} as incarnation {incarnation}: what has become of its last \
         pushes cannot be said, so that it cannot go on; start it again"
    )]
    Forgotten { worker_id: String, incarnation: u32 },
    #[error("worker {worker_id:?} says what cannot be: {what}")]
    Impossible { worker_id: String, what: String },
    #[error(transparent)]
    Full(#[from] Full),
}

impl NoWayBack {
    /// One of which nothing is known, and that has pushed.
    pub fn forgotten(worker_id: &str, claim: &Claim) -> Self {
        Self::Forgotten { worker_id: worker_id.to_owned(), incarnation: claim.incarnation }
    }
}

impl Claim {
    /// Whether there is anything that it could have lost.
    pub const fn has_pushed(&self) -> bool {
        self.settled > 0 || !self.unsettled.is_empty()
    }
}

impl Registry {
    /// See the module.
    pub(super) fn rejoin(&mut self, worker_id: &str, claim: &Claim) -> Result<Rejoin, NoWayBack> {
        check(worker_id, claim)?;
        let is_past = self.resumed.is_some_and(|resumed| claim.term < resumed.first_term);
        let slot = self.slots.iter_mut().enumerate();
        let known =
            slot.filter_map(|(i, slot)| Some((i, slot.as_mut()?))).find(|(_, s)| s.worker_id == worker_id);
        let Some((index, slot)) = known.filter(|(_, slot)| slot.incarnation >= claim.incarnation) else {
            return self.enter(worker_id, claim);
        };
        if slot.incarnation > claim.incarnation {
            return Err(NoWayBack::Fenced { worker_id: worker_id.to_owned() });
        }
        if slot.is_busy() {
            let (tell, told) = oneshot::channel();
            slot.waiting.push(tell);
            return Ok(Rejoin::Busy(told));
        }
        let last = claim.settled + claim.unsettled.len() as u64;
        // Of this life, it was told nothing that is not in the book.
        let knows_more = claim.settled > slot.last_sequence || claim.applied > slot.told(claim);
        if slot.last_sequence > last || knows_more && !is_past {
            let what = format!(
                "that it was answered up to push {} ({} of them applied) and has sent up to {last}; here the last \
                 that came is {} ({} applied)",
                claim.settled, claim.applied, slot.last_sequence, slot.applied
            );
            return Err(NoWayBack::Impossible { worker_id: worker_id.to_owned(), what });
        }
        let key =
            WorkerKey { slot: u32::try_from(index).unwrap_or(u32::MAX), incarnation: claim.incarnation };
        let lost = slot.catch_up(claim);
        slot.whereabouts = Whereabouts::Here;
        self.comings_and_goings += 1;
        self.count_lost(lost);
        Ok(Rejoin::Back(self.stand(key, claim, lost)))
    }

    /// A worker of which nothing is known comes in: one that has pushed nothing, or that came after the checkpoint, in
    /// whichever life before this one.
    fn enter(&mut self, worker_id: &str, claim: &Claim) -> Result<Rejoin, NoWayBack> {
        let came_after = self.resumed.is_some_and(|resumed| {
            claim.term < resumed.first_term && claim.incarnation > resumed.last_forgotten
        });
        if claim.has_pushed() && !came_after {
            return Err(NoWayBack::forgotten(worker_id, claim));
        }
        let key = self.register(worker_id, claim.incarnation).map_err(|full| {
            // None of these will ever be an older one's: see `register`.
            let are_newer = self.slots.iter().flatten().all(|slot| slot.incarnation > claim.incarnation);
            if are_newer { NoWayBack::forgotten(worker_id, claim) } else { full.into() }
        })?;
        let lost = self.slot(key).map_or(0, |slot| slot.catch_up(claim));
        self.count_lost(lost);
        Ok(Rejoin::Back(self.stand(key, claim, lost)))
    }

    /// As far as anybody counts.
    fn count_lost(&mut self, updates: u64) {
        self.lost_updates = (self.lost_updates + updates).min(MOST);
    }

    /// What is said to a worker that is back; what it no longer has ends as it is.
    fn stand(&mut self, key: WorkerKey, claim: &Claim, lost_updates: u64) -> Standing {
        let mut answers = Vec::new();
        for unsettled in &claim.unsettled {
            if let Some(receipt) = self.answer_to(key, unsettled) {
                answers.push((unsettled.sequence, receipt));
            }
        }
        let recent = self.slot(key).into_iter().flat_map(|slot| &slot.recent);
        let own = recent.filter_map(|(_, recent)| match recent {
            Recent::Settled(receipt) => receipt.applied.then_some(receipt.version),
            Recent::Unfinished(record, _) | Recent::Open(record) => Some(record.ticket.version),
        });
        let own_version = own.max().unwrap_or(0);
        Standing { key, answers, lost_updates, own_version }
    }

    fn answer_to(&mut self, key: WorkerKey, unsettled: &Unsettled) -> Option<Receipt> {
        let Unsettled { sequence, samples, gone } = *unsettled;
        let slot = self.slot(key)?;
        match slot.recent.iter().find(|(s, _)| *s == sequence) {
            Some((_, Recent::Settled(receipt))) => {
                let receipt = Receipt { duplicate: true, ..receipt.clone() };
                slot.tally.duplicates += 1;
                self.totals.duplicates += 1;
                return Some(receipt);
            }
            Some((_, Recent::Unfinished(record, counted))) if gone => {
                let (record, counted) = (record.clone(), *counted);
                if record.ending() != Ending::Applied {
                    record.count_refused(Reason::ConnectionLost, LOST);
                }
                self.reopen(&record, counted);
                return Some(self.settle(&record));
            }
            _ => {}
        }
        if !gone {
            return None;
        }
        let receipt = Receipt {
            term: self.term,
            version: self.version,
            staleness: 0,
            weight: 0.0,
            verdict: Fate::Reject,
            applied: false,
            duplicate: false,
            reason: Some(Reason::ConnectionLost),
            detail: LOST.to_owned(),
        };
        let present = Presence::from_fn(0, |_| false);
        let (term, base, epoch) = (self.term, self.version, 0);
        let head = PushHead { worker: key, sequence, term, base, epoch, samples, present, norm: None };
        self.remember(&head, &receipt);
        Some(receipt)
    }
}

const LOST: &str =
    "the connection was lost while it was on its way, and the worker no longer had it to send again";

impl Slot {
    /// Goes on from where the worker is, if that is further. Gives the number of updates of which it had been told and
    /// which are not here; one that is here in parts is among those that are counted as partial.
    fn catch_up(&mut self, claim: &Claim) -> u64 {
        let in_parts = |recent: &Recent| match recent {
            Recent::Unfinished(record, _) => record.progress().applied > 0,
            Recent::Open(_) | Recent::Settled(_) => false,
        };
        let told = self.recent.iter().filter(|(sequence, _)| *sequence <= claim.settled);
        let partial = told.filter(|(_, recent)| in_parts(recent)).count() as u64;
        let missing = claim.applied.saturating_sub(self.told(claim));
        self.recent.retain(|(sequence, _)| *sequence > claim.settled);
        self.last_sequence = self.last_sequence.max(claim.settled);
        self.applied += missing;
        missing.saturating_sub(partial)
    }

    /// How many of the pushes that the worker was told of were applied, as far as is known here.
    fn told(&self, claim: &Claim) -> u64 {
        let untold = self.recent.iter().filter(|(sequence, recent)| {
            *sequence > claim.settled && matches!(recent, Recent::Settled(receipt) if receipt.applied)
        });
        self.applied.saturating_sub(untold.count() as u64)
    }
}

/// Looks for what no worker says.
fn check(worker_id: &str, claim: &Claim) -> Result<(), NoWayBack> {
    let mut due = claim.settled;
    let in_order = claim.unsettled.iter().all(|u| {
        due = due.saturating_add(1);
        u.sequence == due
    });
    // One that is to be sent again has to be the last: what came after it would be a gap.
    let again = claim.unsettled.iter().rev().skip(1).any(|u| !u.gone);
    // They are taken over, go on, and have to be within what a checkpoint may say.
    let can_be = claim.settled <= MOST_PUSHES && claim.applied <= claim.settled;
    if in_order && !again && claim.unsettled.len() <= RECENT && can_be {
        return Ok(());
    }
    let what = format!("its open pushes are {:?}, of {} answered", claim.unsettled, claim.settled);
    Err(NoWayBack::Impossible { worker_id: worker_id.to_owned(), what })
}
