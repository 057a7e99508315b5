//! What a process needs to come back to its server as who it is, and for how long it tries.

use super::connect::Target;
use offbeat_core::spec::{Contribution, OptimizerSpec};
use std::time::Duration;

/// How long a server is waited for that keeps checkpoints, and may be started again on another machine.
const KEPT: Duration = Duration::from_secs(300);
/// The same of one that keeps none: it cannot come again, but the way to it may.
const UNKEPT: Duration = Duration::from_secs(30);
/// The same of a worker that has finished, and only has to say so.
const LAST_KEPT: Duration = Duration::from_secs(30);
const LAST_UNKEPT: Duration = Duration::from_secs(5);

/// What it takes to come back.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) target: Target,
    pub(super) secret: [u8; 16],
    /// Pushes in flight.
    pub(super) in_flight: u32,
    /// How long a lost server is waited for; `None`: as long as it makes sense.
    pub(super) patience: Option<Duration>,
    pub(super) keeps_checkpoints: bool,
    /// The newest term that was heard of.
    pub(super) term: u64,
    /// What was said of this worker's pushes.
    pub(super) configured: Option<(Contribution, Option<OptimizerSpec>)>,
}

impl Way {
    /// How long a call waits for a server that is lost.
    pub(super) fn patience(&self) -> Duration {
        self.patience.unwrap_or(if self.keeps_checkpoints { KEPT } else { UNKEPT })
    }

    /// How long who has finished tries to say so to a server that is lost, and would wait for it.
    pub(super) fn last_patience(&self) -> Duration {
        self.patience().min(if self.keeps_checkpoints { LAST_KEPT } else { LAST_UNKEPT })
    }
}
