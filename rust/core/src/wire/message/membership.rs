//! Messages by which a worker comes into a run, stays in it and is told of it.

use crate::spec::{Contribution, OptimizerSpec, Schedule, StalenessSpec, Transaction};
use crate::store::{Claim, Receipt};
use crate::table::TensorTable;
use crate::wire::encode;
use crate::wire::header::MAX_MODEL_BYTES;
use serde::{Deserialize, Serialize};

/// Worker → server, data connection: who I am.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Join {
    /// `None`: the server names the worker.
    #[serde(default)]
    pub worker_id: Option<String>,
    /// A run the worker insists on.
    #[serde(default)]
    pub run_id: Option<String>,
    /// The worker's model; must be the server's, where it has one.
    #[serde(default)]
    pub table: Option<TensorTable>,
    /// The machine's name, for status.
    #[serde(default)]
    pub host: String,
    /// Pushes the worker wants in flight.
    #[serde(default = "one")]
    pub in_flight: u32,
    /// `None`: a new process. Else one that was in, and has lost its connection.
    #[serde(default)]
    pub back: Option<Back>,
    /// Of those by one clock the latest counts, in whatever order they are heard.
    #[serde(default)]
    pub attempt: Option<Attempt>,
}

/// When a worker has sent this. What an attempt of before had sent may be heard after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// By which clock: a random number of a process and of those that it has forked.
    pub clock: [u8; 16],
    /// Nanoseconds on it.
    pub at_ns: u64,
}

impl Attempt {
    /// Whether another attempt is known to have been made after this one.
    pub fn is_before(self, other: Option<Self>) -> bool {
        other.is_some_and(|other| self.clock == other.clock && self.at_ns < other.at_ns)
    }
}

/// A worker process that is back, and what it knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Back {
    pub claim: Claim,
    /// [`Joined::secret`], which a server that was started again does not know.
    pub secret: [u8; 16],
}

const fn one() -> u32 {
    1
}

/// The server's model, as far as a worker needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    pub table: TensorTable,
    /// How to build the module, for a worker that brings none.
    #[serde(default)]
    pub blueprint: Option<String>,
}

impl ModelInfo {
    /// Checks that a worker can be told of a model, whatever the run is.
    ///
    /// # Errors
    /// [`ModelTooLong`], with its bytes.
    pub fn check_size(table: &TensorTable, blueprint: Option<&str>) -> Result<(), ModelTooLong> {
        let mut bytes = Vec::new();
        encode(table, &mut bytes);
        let bytes = bytes.len() + blueprint.map_or(0, str::len);
        if bytes > MAX_MODEL_BYTES as usize { Err(ModelTooLong { bytes }) } else { Ok(()) }
    }
}

/// A model that no worker could be told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the names and shapes of the model's tensors, and how to build it, are {bytes} bytes; a worker can be told of at most \
     {MAX_MODEL_BYTES}: use fewer tensors or shorter names, or fewer modules"
)]
pub struct ModelTooLong {
    pub bytes: usize,
}

/// What is in force in this run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Counts the run's optimizers, as the server runs them; a push names it. 0: none yet, or there is no model.
    #[serde(default)]
    pub epoch: u32,
    pub transaction: Transaction,
    /// `None` until a worker has said it, or the server has an optimizer.
    #[serde(default)]
    pub contribution: Option<Contribution>,
    /// `None` until someone has set it.
    #[serde(default)]
    pub optimizer: Option<OptimizerSpec>,
    /// Whether workers keep SGD's momentum (never with a worker-side optimizer).
    #[serde(default)]
    pub momentum_correction: bool,
    #[serde(default)]
    pub staleness: StalenessSpec,
    #[serde(default)]
    pub schedule: Schedule,
    #[serde(default)]
    pub max_samples: Option<u64>,
}

/// Server → worker: you are in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Joined {
    pub run_id: String,
    pub worker_id: String,
    /// The worker's place among the store's, for logs; 0 if there is no model yet, and then no other is told. Nothing
    /// asks for it: a worker is found by its incarnation and secret, a push by its sequence number beside them.
    pub slot: u32,
    /// Never issued twice.
    pub incarnation: u32,
    /// What [`Attach`] must repeat.
    pub secret: [u8; 16],
    pub term: u64,
    pub version: u64,
    /// The newest version on disk; 0 without checkpoints.
    #[serde(default)]
    pub durable_version: u64,
    /// `None` until somebody has brought a model.
    #[serde(default)]
    pub model: Option<ModelInfo>,
    pub run: RunConfig,
    /// Pushes the server lets be in flight.
    pub in_flight: u32,
    /// How often it wants to hear from the control connection, and after what silence it holds the worker for lost.
    pub heartbeat_ms: u64,
    pub lease_ms: u64,
    /// Whether it keeps checkpoints: then a server that is gone may come again.
    #[serde(default)]
    pub keeps_checkpoints: bool,
    /// Of one that is back: what has become of the pushes in its claim. What is not among them is to be sent again.
    #[serde(default)]
    pub answers: Vec<(u64, Receipt)>,
    /// Of one that is back: updates of which it had been told and which a server that was started again does not have.
    #[serde(default)]
    pub lost_updates: u64,
}

/// Worker → server, control connection: which data session this belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub incarnation: u32,
    pub secret: [u8; 16],
}

/// Worker → server, control connection, every [`Joined::heartbeat_ms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Counts whatever the worker does; a worker whose count stands still is alive but stalled.
    pub progress: u64,
}

/// Server → worker, control connection. A worker ignores an event it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// Finish what is in flight and push nothing more.
    Drain,
    /// The store has begun a new life; what was read before counts for nothing.
    Term { term: u64 },
    /// Another process has this worker's name now.
    Fenced { detail: String },
    /// The run is over: [`FINISHED_BUDGET`] or [`FINISHED_STOPPED`].
    Finished { reason: String },
    /// The server goes away, and will come again: nothing that it was told is lost.
    Restarting,
}

/// `max_samples` is reached.
pub const FINISHED_BUDGET: &str = "budget";
/// The server was stopped.
pub const FINISHED_STOPPED: &str = "stopped";
