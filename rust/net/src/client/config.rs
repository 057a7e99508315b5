//! What a caller gives to a client and gets from it.

use super::memory::Memory;
use crate::token::Token;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::RunConfig;
use std::sync::Arc;
use std::time::Duration;

/// How to reach a server, and as whom.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// `HOST:PORT`.
    pub address: String,
    /// `None`: the server names this worker.
    pub worker_id: Option<String>,
    pub token: Option<Token>,
    /// A run to insist on.
    pub run_id: Option<String>,
    /// 1: a push is answered before the next begins, exactly. 2: each is answered by the call after it, so that both
    /// directions are busy, and every gradient is one update late.
    pub in_flight: usize,
    /// How long a server that does not answer is tried.
    pub connect_timeout: Duration,
    /// How long a server is waited for that was there and is lost: 0 not at all. `None`: 300 s if it keeps checkpoints,
    /// and may be started again; else 30 s, for the way to it.
    pub patience: Option<Duration>,
}

/// Whether the caller wants out (Ctrl-C). Asked at least every 100 ms while a call waits.
pub trait Interrupt {
    fn interrupted(&self) -> bool;
}

impl<F: Fn() -> bool> Interrupt for F {
    fn interrupted(&self) -> bool {
        self()
    }
}

/// What the server has said about the session.
#[derive(Clone, Debug)]
pub struct Session {
    pub run_id: String,
    pub worker_id: String,
    /// Tells this process from any other that had or will have this worker's name.
    pub incarnation: u32,
    /// The life of the store and the model's version, as of joining or the newest pull.
    pub term: u64,
    pub version: u64,
    /// Whether the last push wrote parameters where its caller asked for them. With two in flight the first does not, nor
    /// the first after a connection was lost with two under way, though it may bring a receipt.
    pub came: bool,
    /// `None` until the server has a model.
    pub table: Option<Arc<TensorTable>>,
    /// How to build the model's module, if the one who brought it said so.
    pub blueprint: Option<String>,
    pub run: RunConfig,
}

/// What a pull has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    pub term: u64,
    pub version: u64,
}

/// One contribution.
#[derive(Debug)]
pub struct PushInput<'a> {
    /// Per tensor of the table. A parameter: its gradient or delta; a buffer: its value now. In the tensor's own
    /// element type and C order; `None`: the push leaves it as it is.
    pub values: &'a [Option<Memory<'a>>],
    /// Samples that a gradient is a mean over.
    pub samples: u64,
}
