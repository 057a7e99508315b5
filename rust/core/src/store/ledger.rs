//! Exactly once: who has pushed what, as a fragment remembers it.
//!
//! Every root carries a dense array of [`LedgerEntry`], one per worker slot: the last push this fragment saw. It commits
//! with the fragment, so a fragment never forgets what it has applied. Gaps between sequence numbers are normal here,
//! because a push need not touch every fragment. The registry keeps a book of its own ([`super::slot`]), apart on purpose.

use serde::{Deserialize, Serialize};

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
