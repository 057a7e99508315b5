//! Exactly once: a worker as the registry remembers it, with its incarnation, the last sequence number it settled and
//! the answers to its last pushes. Contiguity of sequence numbers is checked against this and nothing else.

use super::book::{Ending, WorkerPage};
use super::push::PushRecord;
use super::receipt::Receipt;
use super::tally::Tally;
use futures_channel::oneshot;
use std::collections::VecDeque;
use std::sync::Arc;

/// One of a worker's last pushes.
#[derive(Debug)]
pub(super) enum Recent {
    /// Its fragments are arriving.
    Open(Arc<PushRecord>),
    /// The connection ended before all its fragments had arrived; a retry keeps its ticket. With the ending that it
    /// is counted by: a fragment that was queued then may have been applied since.
    Unfinished(Arc<PushRecord>, Ending),
    Settled(Receipt),
}

/// Where a worker is, as far as its slot matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whereabouts {
    Here,
    /// It was there in the life before, and may come: its place is the last to be given away.
    Expected,
    /// It has been away for long, and may come, if nobody needed its place meanwhile.
    Away,
    /// It will not come again: its work was not done.
    Left,
    /// It will not come again: its work was done.
    Finished,
}

impl Whereabouts {
    /// What a book says of it.
    pub(super) const fn of(page: &WorkerPage) -> Self {
        match page {
            WorkerPage { present: true, away: true, .. } => Self::Away,
            WorkerPage { present: true, away: false, .. } => Self::Expected,
            WorkerPage { finished: true, .. } => Self::Finished,
            _ => Self::Left,
        }
    }
}

/// A worker's place in the registry.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) worker_id: String,
    pub(super) incarnation: u32,
    /// The newest process of a life before that had this name, and of whose last pushes it is known as long as the name
    /// has a slot that they were made before this one's; 0: none.
    pub(super) predecessor: u32,
    /// Pushes up to this one have been answered for, in order.
    pub(super) last_sequence: u64,
    /// How many of this incarnation's were answered as applied.
    pub(super) applied: u64,
    /// The last pushes, oldest first, by sequence number.
    pub(super) recent: VecDeque<(u64, Recent)>,
    /// The newest version that could be read when the worker was lost: what is older is too old to push.
    pub(super) lost_at: Option<u64>,
    pub(super) whereabouts: Whereabouts,
    /// What the newest older process of this name that departed had pushed by then, with all before it; 0: none has.
    pub(super) departed_with: u64,
    /// Who waits for its pushes under way to end.
    pub(super) waiting: Vec<oneshot::Sender<()>>,
    pub(super) tally: Tally,
}

impl Slot {
    pub(super) fn new(worker_id: &str, incarnation: u32) -> Self {
        Self {
            worker_id: worker_id.to_owned(),
            incarnation,
            predecessor: 0,
            last_sequence: 0,
            applied: 0,
            recent: VecDeque::new(),
            lost_at: None,
            whereabouts: Whereabouts::Here,
            departed_with: 0,
            waiting: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// How many pushes there were when a process of this name departed last; 0: none has, in this life.
    pub(super) const fn departed_with(&self) -> u64 {
        match self.whereabouts {
            Whereabouts::Left | Whereabouts::Finished => self.tally.pushes,
            _ => self.departed_with,
        }
    }

    /// Remembers an answer, forgetting all but the last `keep`.
    pub(super) fn remember(&mut self, sequence: u64, recent: Recent, keep: usize) {
        self.note(sequence, recent, keep);
        if !self.is_busy() {
            for waiting in self.waiting.drain(..) {
                waiting.send(()).ok(); // it may have given up
            }
        }
    }

    /// Whether fragments of its pushes are arriving, or being committed.
    pub(super) fn is_busy(&self) -> bool {
        self.recent.iter().any(|(_, recent)| matches!(recent, Recent::Open(_)))
    }

    /// Nothing more is applied of what its worker has under way.
    pub(super) fn revoke(&self) {
        for (_, recent) in &self.recent {
            if let Recent::Open(record) | Recent::Unfinished(record, _) = recent {
                record.revoke();
            }
        }
    }

    fn note(&mut self, sequence: u64, recent: Recent, keep: usize) {
        if let Some(entry) = self.recent.iter_mut().find(|(s, _)| *s == sequence) {
            entry.1 = recent;
            return;
        }
        if sequence <= self.last_sequence {
            return; // it has been forgotten
        }
        self.last_sequence = sequence;
        self.recent.push_back((sequence, recent));
        while self.recent.len() > keep {
            self.recent.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Fate;

    #[test]
    fn an_answer_that_was_forgotten_takes_the_place_of_none() {
        let settled = || {
            Recent::Settled(Receipt {
                term: 1,
                version: 1,
                staleness: 0,
                weight: 1.0,
                verdict: Fate::Admit,
                applied: true,
                duplicate: false,
                reason: None,
                detail: String::new(),
            })
        };
        let mut slot = Slot::new("a", 1);
        for sequence in [1, 2, 3, 1, 3] {
            slot.remember(sequence, settled(), 2);
        }
        let kept: Vec<u64> = slot.recent.iter().map(|(sequence, _)| *sequence).collect();
        assert_eq!((kept, slot.last_sequence), (vec![2, 3], 3));
    }
}
