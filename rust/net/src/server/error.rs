//! Every way in which the server fails its owner. What a worker is told is a [`Refused`] instead.
//!
//! [`Refused`]: offbeat_core::wire::message::Refused

use crate::checkpoint::{DirectoryError, Others};
use crate::limits::explained;
use offbeat_core::spec::SpecError;
use offbeat_core::table::{Difference, TensorSpec};
use offbeat_core::wire::message::ModelTooLong;
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

/// A server that cannot start, or a request of its owner that it cannot do.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(
        "address {address} is in use: stop what listens there, or choose another port (0 for any free one)"
    )]
    AddressInUse { address: String },
    #[error(
        "cannot listen on {address}: {cause}; host must be an address of this machine (0.0.0.0 is all of them, \
         127.0.0.1 this machine only), and ports below 1024 may need privileges"
    )]
    Bind { address: String, cause: io::Error },
    #[error("host {host:?} is not an address of this machine: {cause}")]
    Host { host: String, cause: io::Error },
    #[error(
        "host {host:?} would let anybody on the network in: give a token (token= or OFFBEAT_TOKEN), \
         or say that this is meant (insecure=True, --insecure)"
    )]
    Insecure { host: String },
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("a server that keeps no checkpoints has nothing to go back to: give checkpoint_dir")]
    KeepsNone,
    #[error("there is no checkpoint{} in {}; {others}",
        .version.map(|version| format!(" of version {version}")).unwrap_or_default(), .directory.display())]
    NoSuchCheckpoint { directory: PathBuf, version: Option<u64>, others: Others },
    #[error("{cause}; it is the newest, so give another version to go back to")]
    DamagedNewest { cause: DirectoryError },
    #[error("{name} is {value}: {remedy}")]
    Config { name: &'static str, value: String, remedy: &'static str },
    #[error(
        "a push of this model is {needed} bytes and the staging budget {budget}: raise staging_budget, \
         or use transaction=\"fragment\""
    )]
    StagingBudget { needed: u64, budget: u64 },
    #[error(transparent)]
    ModelTooLong(#[from] ModelTooLong),
    #[error("tensor {name:?} was given {found} bytes where its shape and dtype make {expected}")]
    Values { name: String, expected: u64, found: u64 },
    #[error(
        "parameter {name:?} is not finite ({value}) at index {index}: look at how the model was initialized or loaded"
    )]
    NonFinite { name: String, index: usize, value: f64 },
    #[error("{found} tensors were given and the model has {expected}")]
    NumTensors { expected: usize, found: usize },
    #[error("the server has no model yet: give it one, or wait for the first worker to bring one")]
    NoModel,
    #[error("no optimizer is set, so there is no learning rate to change")]
    NoOptimizer,
    #[error("parameter group {group} does not exist; the optimizer has {groups}")]
    Group { group: usize, groups: usize },
    #[error(
        "this run's optimizers are on the workers: the server has neither an optimizer nor a learning rate to set"
    )]
    WorkerSide,
    #[error(transparent)]
    Checkpoints(#[from] DirectoryError),
    #[error(
        "there is no checkpoint in {} to go on from: look at checkpoint_dir, or use resume=\"auto\"",
        directory.display()
    )]
    NoCheckpoint { directory: PathBuf },
    #[error(
        "the checkpoint {} is of run {found:?}, not of {run_id:?}: leave run_id out to go on with that run, or give \
         this one a directory of its own",
        checkpoint.display()
    )]
    OtherRun { checkpoint: PathBuf, found: String, run_id: String },
    #[error(
        "the model is not that of the checkpoint {}: {difference}. {remedy}",
        checkpoint.display()
    )]
    OtherModel { checkpoint: PathBuf, difference: String, remedy: &'static str },
    #[error("the checkpoint's workers had live optimizers of their own, and {why}")]
    OtherContribution { why: String },
    #[error("no worker finished: {}", in_words(.causes))]
    NoneFinished { causes: Vec<(String, String)> },
    #[error("the server has been stopped")]
    Stopped,
    #[error("interrupted while waiting")]
    Interrupted,
    #[error("this server belongs to the process that started it: create it after the fork, or use spawn")]
    Forked,
    #[error("the operating system refused what the server needs: {}", explained(.0))]
    System(io::Error),
}

impl ServerError {
    /// `difference`: "ours" is the model that there is or was given, "theirs" the checkpoint's.
    pub(super) fn other_model(checkpoint: PathBuf, difference: &Difference, remedy: &'static str) -> Self {
        let side =
            |tensor: &Option<TensorSpec>| tensor.as_ref().map_or("nothing".to_owned(), ToString::to_string);
        let (now, then) = (side(&difference.ours), side(&difference.theirs));
        let difference = if now == then {
            format!("tensor number {}, {now}, has another role or other names there", difference.position)
        } else {
            format!("tensor number {} is {now}, and was {then} there", difference.position)
        };
        Self::OtherModel { checkpoint, difference, remedy }
    }
}

/// An operating system's error while a thread or a runtime is made.
impl From<io::Error> for ServerError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

fn in_words(causes: &[(String, String)]) -> String {
    let mut text = String::new();
    for (worker, cause) in causes {
        let comma = if text.is_empty() { "" } else { "; " };
        write!(text, "{comma}{worker}: {cause}").expect("a String takes any text");
    }
    text
}
