//! Messages that open a connection: who speaks which protocol, and who holds the token.

use crate::wire::auth::{Nonce, Proof};
use serde::{Deserialize, Serialize};

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    Data,
    Control,
    /// Reads [`Call::Status`](super::Call::Status) and nothing else.
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
