//! Exactly once: who has pushed what. Two small books, kept apart on purpose.
//!
//! * Every root carries a dense array of [`LedgerEntry`], one per worker slot: the last push this fragment saw. It
//!   commits with the fragment, so a fragment never forgets what it has applied.
//! * The registry keeps a [`Slot`] per worker: its incarnation, the last sequence number it settled and the answers
//!   to its last pushes. Contiguity of sequence numbers is checked here and only here; in a root gaps are normal,
//!   because a push need not touch every fragment.

use super::push::PushRecord;
use super::receipt::Receipt;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A worker process as the store knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerKey {
    pub slot: u32,
    /// From one counter, never issued twice: tells a process from the one it replaced.
    pub incarnation: u32,
}

/// A fragment's memory of one worker slot: 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerEntry {
    pub sequence: u64,
    pub incarnation: u32,
    pub payload_checksum: u32,
}

/// What a fragment's ledger says of an arriving push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    New,
    /// Applied before, with the same bytes.
    Before,
    /// The same sequence number with other bytes, or an incarnation that has been replaced.
    Conflict,
}

/// Looks a push up in a fragment's ledger. In one incarnation sequence numbers only grow.
pub(super) fn seen(ledger: &[LedgerEntry], worker: WorkerKey, sequence: u64, checksum: u32) -> Seen {
    match ledger.get(worker.slot as usize) {
        Some(entry) if entry.incarnation > worker.incarnation => Seen::Conflict,
        Some(entry) if entry.incarnation < worker.incarnation || entry.sequence < sequence => Seen::New,
        Some(entry) if entry.sequence == sequence && entry.payload_checksum != checksum => Seen::Conflict,
        Some(_) => Seen::Before,
        None => Seen::New,
    }
}

/// Writes a push into a fragment's ledger, growing it to the worker's slot.
pub(super) fn record(ledger: &mut Vec<LedgerEntry>, worker: WorkerKey, sequence: u64, payload_checksum: u32) {
    let slot = worker.slot as usize;
    if ledger.len() <= slot {
        ledger.resize(slot + 1, LedgerEntry::default());
    }
    ledger[slot] = LedgerEntry { sequence, incarnation: worker.incarnation, payload_checksum };
}

/// One of a worker's last pushes.
#[derive(Debug)]
pub(super) enum Recent {
    /// Its fragments are arriving.
    Open,
    /// The connection ended before all its fragments had arrived; a retry keeps its ticket.
    Unfinished(Arc<PushRecord>),
    Settled(Receipt),
}

/// A worker's place in the registry.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) worker_id: String,
    pub(super) incarnation: u32,
    /// Pushes up to this one have been answered for, in order.
    pub(super) last_sequence: u64,
    /// The last pushes, oldest first, by sequence number.
    pub(super) recent: VecDeque<(u64, Recent)>,
    /// The model's version when the worker was lost: what it had read before is too old to push.
    pub(super) lost_at: Option<u64>,
    pub(super) present: bool,
    pub(super) tally: Tally,
}

impl Slot {
    pub(super) fn new(worker_id: &str, incarnation: u32) -> Self {
        Self {
            worker_id: worker_id.to_owned(),
            incarnation,
            last_sequence: 0,
            recent: VecDeque::new(),
            lost_at: None,
            present: true,
            tally: Tally::default(),
        }
    }

    /// Remembers an answer, forgetting all but the last `keep`.
    pub(super) fn remember(&mut self, sequence: u64, recent: Recent, keep: usize) {
        if let Some(entry) = self.recent.iter_mut().find(|(s, _)| *s == sequence) {
            entry.1 = recent;
            return;
        }
        self.last_sequence = self.last_sequence.max(sequence);
        self.recent.push_back((sequence, recent));
        while self.recent.len() > keep {
            self.recent.pop_front();
        }
    }
}

/// How many updates late: exact up to 63, then one bucket.
pub const STALENESS_BUCKETS: usize = 65;

/// Counts of a worker's pushes (or of all workers').
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tally {
    pub pushes: u64,
    pub samples: u64,
    pub applied: u64,
    pub damped: u64,
    pub rejected: BTreeMap<String, u64>,
    pub duplicates: u64,
    pub staleness_sum: u64,
    pub staleness_max: u64,
    /// `staleness_histogram[τ]` for τ ≤ 63; the last bucket holds all above.
    pub staleness_histogram: Vec<u64>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            pushes: 0,
            samples: 0,
            applied: 0,
            damped: 0,
            rejected: BTreeMap::new(),
            duplicates: 0,
            staleness_sum: 0,
            staleness_max: 0,
            staleness_histogram: vec![0; STALENESS_BUCKETS],
        }
    }
}

impl Tally {
    pub(super) fn count(&mut self, receipt: &Receipt, samples: u64) {
        self.pushes += 1;
        if let (false, Some(reason)) = (receipt.applied, receipt.reason) {
            *self.rejected.entry(reason.to_string()).or_default() += 1;
            return;
        }
        self.samples = self.samples.saturating_add(samples);
        self.applied += 1;
        self.damped += u64::from(receipt.weight < 1.0);
        self.staleness_sum = self.staleness_sum.saturating_add(receipt.staleness);
        self.staleness_max = self.staleness_max.max(receipt.staleness);
        let bucket = usize::try_from(receipt.staleness).unwrap_or(usize::MAX).min(STALENESS_BUCKETS - 1);
        self.staleness_histogram[bucket] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_tells_new_from_old_from_forged() {
        let mut ledger = Vec::new();
        let w = WorkerKey { slot: 2, incarnation: 5 };
        assert_eq!(seen(&ledger, w, 1, 7), Seen::New);
        record(&mut ledger, w, 4, 7);
        assert_eq!(ledger.len(), 3);
        assert_eq!(seen(&ledger, w, 4, 7), Seen::Before);
        assert_eq!(seen(&ledger, w, 4, 8), Seen::Conflict);
        assert_eq!(seen(&ledger, w, 3, 8), Seen::Before);
        assert_eq!(seen(&ledger, w, 9, 8), Seen::New);
        assert_eq!(seen(&ledger, WorkerKey { slot: 2, incarnation: 6 }, 1, 8), Seen::New);
        assert_eq!(seen(&ledger, WorkerKey { slot: 2, incarnation: 4 }, 9, 8), Seen::Conflict);
    }
}
