//! What the registry has written down, as a plain value: what another life of the store needs to go on counting, and
//! to answer a retry as this one would have.

use super::receipt::Receipt;
use super::tally::{Tally, TicketCounts};
use super::ticket::RunSpec;
use crate::pipeline::Reason;
use serde::{Deserialize, Serialize};

/// No count is above it: they go on from there, and no run gets so far.
pub const MOST: u64 = 1 << 60;
/// No incarnation and no epoch is above it.
pub const MOST_INCARNATIONS: u32 = u32::MAX - (1 << 24);

/// The registry at a cut: tickets after it have left no trace, and their sequence numbers are not taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Book {
    pub term: u64,
    /// Updates ticketed.
    pub version: u64,
    /// Samples in them.
    pub samples: u64,
    /// What later tickets obey.
    pub run: Option<RunPage>,
    pub tickets: TicketCounts,
    pub totals: Tally,
    /// Updates of which workers had been told, and which a server that went on from a checkpoint did not have.
    #[serde(default)]
    pub lost_updates: u64,
    /// No incarnation above this one was issued before the book was written; some may have been since.
    pub last_incarnation: u32,
    /// Of an incarnation above this one that is not among the workers nothing is in the store. `None`: not known, as in
    /// books of before.
    #[serde(default)]
    pub last_forgotten: Option<u32>,
    /// In the order of their slots.
    pub workers: Vec<WorkerPage>,
}

/// What tickets obey.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunPage {
    pub spec: RunSpec,
    /// [`super::Run::epoch`]
    pub epoch: u32,
}

/// A worker as the registry remembers it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each came with a later build, and books without it are read"
)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPage {
    pub slot: u32,
    pub worker_id: String,
    pub incarnation: u32,
    /// Pushes up to this one have been answered for, in order.
    pub last_sequence: u64,
    /// How many of this incarnation's were answered as applied.
    #[serde(default)]
    pub applied: u64,
    /// Whether it had not departed.
    pub present: bool,
    /// Whether nobody waited for it any more, who had not departed.
    #[serde(default)]
    pub away: bool,
    /// Whether it departed with its work done.
    #[serde(default)]
    pub finished: bool,
    /// Whether others waited for it in rounds: the server's to say, not the registry's.
    #[serde(default)]
    pub in_rounds: bool,
    /// The last of them, oldest first, by sequence number.
    pub recent: Vec<(u64, Answer)>,
    pub tally: Tally,
}

/// What a retry of a push is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Settled(Receipt),
    /// It goes on where it is missing.
    Unfinished(Unfinished),
}

/// A ticket of the cut whose fragments had not all come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unfinished {
    pub ticket: u64,
    pub version: u64,
    pub staleness: u64,
    /// One a group of the optimizer, which is still the run's.
    pub learning_rates: Vec<f64>,
    pub samples: u64,
    /// [`crate::layout::Presence::as_bytes`]
    pub present: Vec<u8>,
    pub reached: Vec<Reached>,
    /// How the ticket is counted until then.
    pub counted: Ending,
    pub progress: Progress,
}

/// A fragment that a retry is to find done: its number, and sequence number and payload checksum of the worker's last
/// push there, which is this one or came after it. Fragments are those of [`crate::layout::FRAGMENT_ELEMENTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached(pub usize, pub u64, pub u32);

/// How a ticket ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Applied,
    Partial,
    Dropped,
}

/// How far an admitted push has come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Fragments that hold it.
    pub applied: usize,
    /// Why others do not.
    pub reason: Option<Reason>,
    pub detail: String,
    /// Of the parameters that the push brought and that have moved: their weights' sum, and their number.
    pub weighted: f64,
    pub elements: f64,
    /// (smallest, largest) weight of them so far.
    pub range: Option<(f64, f64)>,
}

impl Progress {
    /// How a push of so many fragments ends, as far as it has come.
    pub(super) fn ending(&self, fragments: usize) -> Ending {
        match self.applied {
            0 if fragments > 0 => Ending::Dropped,
            n if n == fragments => Ending::Applied,
            _ => Ending::Partial,
        }
    }
}

/// A book that no registry has written: which field, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {what}")]
pub struct BookError {
    pub field: String,
    pub what: String,
}
