//! Messages off the hot path (and the receipt, which is cheap enough): small structs in named MessagePack. A field
//! that a peer does not know is ignored, a new one has a default, so that builds of one protocol understand each
//! other.

use super::auth::{Nonce, Proof};
use crate::spec::{Contribution, OptimizerSpec, Schedule, StalenessSpec, Transaction};
use crate::table::TensorTable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A payload that does not say what its kind should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("a message cannot be read: {0}")]
    Decode(String),
    #[error("a message cannot be read: {0}")]
    Form(&'static str),
}

/// Appends a message's wire form.
///
/// # Panics
/// Never with the messages of this crate: their keys are strings, and a `Vec` takes any length.
pub fn encode<T: Serialize>(message: &T, out: &mut Vec<u8>) {
    rmp_serde::encode::write_named(out, message)
        .expect("our messages have string keys, and a Vec takes any length");
}

/// Reads a message's wire form.
///
/// # Errors
/// [`MessageError::Decode`], with the decoder's words.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    rmp_serde::from_slice(bytes).map_err(|e| MessageError::Decode(e.to_string()))
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    Data,
    Control,
    /// Reads [`Call::Status`] and nothing else.
    Status,
}

/// Worker → server, first frame of every connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Protocols the worker speaks.
    pub protocol_min: u16,
    pub protocol_max: u16,
    pub nonce: Nonce,
    pub purpose: Purpose,
}

/// Server → worker: I hold the token, now you.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// What the server has chosen among the worker's protocols.
    pub protocol: u16,
    pub nonce: Nonce,
    pub token_required: bool,
    /// `None` if the server has no token.
    #[serde(default)]
    pub proof: Option<Proof>,
}

/// Worker → server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authenticate {
    /// `None` if the server asked for none, or the worker has no token.
    #[serde(default)]
    pub proof: Option<Proof>,
}

/// Server → worker: the door is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The server's version of Offbeat.
    pub version: String,
}

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
    /// 0 until there is a model: [`Reply::Model`] has the real one.
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
}

/// Worker → server, control connection: which data session this belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub incarnation: u32,
    pub secret: [u8; 16],
}

/// A request on the data connection; answered by [`Reply`] or [`Refused`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// I bring a model. If the answer is `taken`, one [`Kind::Value`](super::Kind::Value) frame per fragment
    /// follows, in order, then [`Call::InitCommit`]. Waits while another worker is bringing one.
    InitBegin { table: TensorTable, blueprint: Option<String> },
    /// All values are sent; they become the model.
    InitCommit,
    /// Answer when there is a model.
    WaitModel,
    /// What this worker's pushes carry, and the optimizer it was given, if any.
    Configure { contribution: Contribution, optimizer: Option<OptimizerSpec> },
    /// The server's status as JSON.
    Status,
    /// This worker ends: its work is done, or it leaves before that.
    Goodbye { finished: bool },
}

/// The answer to a [`Call`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// `false`: there is a model already, and its table is the worker's.
    Init {
        taken: bool,
    },
    /// There is a model.
    Model {
        model: ModelInfo,
        run: RunConfig,
        term: u64,
        version: u64,
    },
    Configured {
        run: RunConfig,
    },
    Status {
        json: String,
    },
    Goodbye,
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
}

/// `max_samples` is reached.
pub const FINISHED_BUDGET: &str = "budget";
/// The server was stopped.
pub const FINISHED_STOPPED: &str = "stopped";

/// Why something was refused, for programs; the words are in [`Refused::message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalCode {
    /// No protocol in common.
    Protocol,
    /// No token, or another one.
    Authentication,
    /// Not this run.
    RunId,
    /// Another model.
    ModelMismatch,
    /// There is no model yet.
    NoModel,
    /// No optimizer is set, or another one than the worker's.
    Optimizer,
    /// Only the learning rate differs.
    LearningRate,
    /// The run's pushes carry something else.
    Contribution,
    /// Out of place: a frame that this state of the connection does not expect.
    State,
    /// A message that cannot be read, or a value that cannot be right.
    Malformed,
    /// A payload that was damaged on its way.
    Checksum,
    /// Too many connections or workers, or a model that does not fit.
    Full,
    /// A newer process has this worker's name, or the push contradicts one that was applied.
    Fenced,
    /// Nothing moved for too long.
    Timeout,
    /// The other connection of the session has ended.
    Lost,
    /// The run is over or ending.
    Finished,
    /// A code of a newer build.
    #[serde(other)]
    Unknown,
}

/// Either side: no.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub code: RefusalCode,
    /// For the user: what happened, with which value, what to do.
    pub message: String,
    /// Whether the sender closes the connection after this.
    pub fatal: bool,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::spec::{Group, Rule};
    use crate::table::{Role, TensorSpec};
    use proptest::prelude::*;

    fn survives<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(message: &T) {
        let mut bytes = vec![];
        encode(message, &mut bytes);
        assert_eq!(&decode::<T>(&bytes).unwrap(), message);
        for cut in 0..bytes.len() {
            assert!(decode::<T>(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    fn table() -> TensorTable {
        let spec = |name: &str, role| TensorSpec {
            name: name.into(),
            aliases: vec![format!("{name}.tied")],
            shape: vec![2, 3],
            dtype: Dtype::F32,
            role,
        };
        TensorTable::new(vec![spec("w", Role::Parameter), spec("b", Role::Buffer)]).unwrap()
    }

    fn optimizer() -> OptimizerSpec {
        let rule =
            Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 1e-4, nesterov: true, maximize: false };
        OptimizerSpec {
            groups: vec![Group { pattern: "*".into(), lr: 0.1, rule }],
            momentum_correction: true,
        }
    }

    fn run() -> RunConfig {
        RunConfig {
            epoch: 3,
            transaction: Transaction::Model,
            contribution: Some(Contribution::Gradient),
            optimizer: Some(optimizer()),
            momentum_correction: true,
            staleness: StalenessSpec { max_staleness: Some(10), ..StalenessSpec::default() },
            schedule: Schedule::default(),
            max_samples: None,
        }
    }

    #[test]
    fn every_message_survives_the_wire() {
        survives(&Hello { protocol_min: 1, protocol_max: 3, nonce: [200; 32], purpose: Purpose::Data });
        survives(&Challenge { protocol: 1, nonce: [7; 32], token_required: true, proof: Some([255; 32]) });
        survives(&Authenticate { proof: None });
        survives(&Welcome { version: "0.1.0".into() });
        survives(&Join {
            worker_id: Some("w".into()),
            run_id: None,
            table: Some(table()),
            host: "a".into(),
            in_flight: 2,
        });
        survives(&Joined {
            run_id: "r".into(),
            worker_id: "w".into(),
            slot: 3,
            incarnation: 9,
            secret: [1; 16],
            term: 1,
            version: 1 << 40,
            durable_version: 0,
            model: Some(ModelInfo { table: table(), blueprint: Some("{}".into()) }),
            run: run(),
            in_flight: 2,
            heartbeat_ms: 1000,
            lease_ms: 10_000,
        });
        survives(&Attach { incarnation: 1, secret: [9; 16] });
        survives(&Call::InitBegin { table: table(), blueprint: None });
        survives(&Call::InitCommit);
        survives(&Call::Configure { contribution: Contribution::Delta, optimizer: Some(optimizer()) });
        survives(&Call::Goodbye { finished: true });
        survives(&Reply::Init { taken: true });
        survives(&Reply::Model {
            model: ModelInfo { table: table(), blueprint: None },
            run: run(),
            term: 1,
            version: 2,
        });
        survives(&Reply::Status { json: "{}".into() });
        survives(&Heartbeat { progress: u64::MAX });
        survives(&Event::Finished { reason: FINISHED_BUDGET.into() });
        survives(&Refused { code: RefusalCode::Fenced, message: "no".into(), fatal: true });
    }

    #[test]
    fn an_unknown_field_or_code_is_no_error() {
        #[derive(Serialize)]
        struct Newer<'a> {
            code: &'a str,
            message: &'a str,
            fatal: bool,
            also: [u8; 3],
        }
        let mut bytes = vec![];
        encode(&Newer { code: "of_tomorrow", message: "no", fatal: false, also: [1, 2, 3] }, &mut bytes);
        let read: Refused = decode(&bytes).unwrap();
        assert_eq!(read, Refused { code: RefusalCode::Unknown, message: "no".into(), fatal: false });
    }

    #[test]
    fn a_table_that_is_none_is_refused_on_the_way_in() {
        #[derive(Serialize)]
        struct Bad {
            table: Vec<TensorSpec>,
        }
        let mut bytes = vec![];
        encode(&Bad { table: vec![] }, &mut bytes);
        assert!(decode::<Join>(&bytes).unwrap_err().to_string().contains("a model without tensors"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(decode::<Hello>(&bytes));
            drop(decode::<Challenge>(&bytes));
            drop(decode::<Join>(&bytes));
            drop(decode::<Joined>(&bytes));
            drop(decode::<Call>(&bytes));
            drop(decode::<Reply>(&bytes));
            drop(decode::<Event>(&bytes));
            drop(decode::<Refused>(&bytes));
        }

        #[test]
        fn a_damaged_message_never_panics(at in 0_usize..400, byte: u8) {
            let mut bytes = vec![];
            encode(&Join { worker_id: None, run_id: None, table: Some(table()), host: String::new(), in_flight: 1 }, &mut bytes);
            let at = at % bytes.len();
            bytes[at] = byte;
            drop(decode::<Join>(&bytes));
        }
    }

    #[test]
    fn a_promised_length_allocates_nothing() {
        // An array of 2^32-1 tensors, a string of 2^32-1 bytes, and a thousand nested arrays.
        for bytes in
            [vec![0xdd, 0xff, 0xff, 0xff, 0xff], vec![0xdb, 0xff, 0xff, 0xff, 0xff], vec![0x91; 5000]]
        {
            assert!(decode::<TensorTable>(&bytes).is_err());
            assert!(decode::<Call>(&bytes).is_err());
        }
    }
}
