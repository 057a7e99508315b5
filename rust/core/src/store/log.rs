//! The commit log: what each fragment applied, in the order in which it did, which is what the mutex oracle replays in
//! tests, bit for bit.
//!
//! No values are in it. A replay also needs the pushes' payloads, and what each life of the store began with: the
//! initial values, and those of every load. A load is no commit; that one lies between two commits of a fragment is
//! seen from the terms of their tickets. It counts as a version under "fragment"; under "model" versions begin anew.

use super::push::PushRecord;
use std::sync::Arc;

/// One push applied to one fragment.
#[derive(Clone, Debug)]
pub struct Commit {
    pub fragment: usize,
    /// The fragment's version with this push counted.
    pub version: u64,
    pub tau: u64,
    pub push: Arc<PushRecord>,
}

/// Hears of every commit, in each fragment's order, when nothing can refuse it any more. Called by the applier, so it
/// must be quick.
pub trait CommitObserver: Send + Sync {
    fn committed(&self, commit: Commit);
}
