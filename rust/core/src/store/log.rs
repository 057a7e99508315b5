//! The commit log: what each fragment applied, in the order in which it did. Enough to replay a run bit for bit,
//! which is what the mutex oracle does in tests and what a standby will do.

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

/// Hears of every commit, in each fragment's order. Called by the applier, so it must be quick.
pub trait CommitObserver: Send + Sync {
    fn committed(&self, commit: Commit);
}
