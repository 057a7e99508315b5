//! The ways a client fails, each with what was tried and what to do. Nothing here is logged: it is returned.

use crate::frame::FrameError;
use crate::handshake::HandshakeError;
use crate::limits::explained;
use offbeat_core::wire::message::{RefusalCode, Refused};
use std::time::Duration;

/// Why a call of a [`Client`](super::Client) did not do what it should.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no server at {address}: {attempts} attempt{} in {:.1} s, which ended with: {cause}. Is the server started, \
         and is this its address? (It prints the line to join with; one without a token listens on its own machine only)",
        if *.attempts == 1 { "" } else { "s" }, .waited.as_secs_f64()
    )]
    Unreachable { address: String, attempts: u32, waited: Duration, cause: String },
    #[error(
        "something accepts connections at {address} but has not answered in {:.1} s (its handshake is missing). If it is the \
         server, it hangs or was stopped (Ctrl-Z, a debugger): look at its process and its log, and start it again; \
         else another program has the port, or a tunnel or a proxy whose other end is gone: compare the address with \
         the line to join with that the server prints",
        .waited.as_secs_f64()
    )]
    Timeout { address: String, waited: Duration },
    #[error("the server at {address} and this worker do not share a token: {message}")]
    Authentication { address: String, message: String },
    /// The server's model is another one.
    #[error("{message}")]
    ModelMismatch { message: String },
    /// The server said no to this.
    #[error("{message}")]
    Refused { code: RefusalCode, message: String },
    /// A newer process has this worker's name; this one must stop.
    #[error("this worker must stop: {message}")]
    Fenced { message: String },
    #[error(
        "tensor {tensor:?} holds a value that is not finite ({value}) at index {index}; nothing was sent. Lower the \
         learning rate, clip gradients, or look for a division by zero"
    )]
    NonFinite { tensor: String, index: usize, value: f64 },
    #[error(
        "parameter {tensor:?} of the model to begin with is not finite ({value}) at index {index}; nothing was sent. \
         Look at how it was initialized or loaded"
    )]
    NonFiniteModel { tensor: String, index: usize, value: f64 },
    #[error("the connection to {address} is lost: {cause}")]
    Lost { address: String, cause: String },
    /// The server sent something that cannot be right.
    #[error("the server at {address} broke the protocol: {cause}")]
    Protocol { address: String, cause: String },
    #[error("interrupted; what was in flight is settled by the next call")]
    Interrupted,
    #[error("this client belongs to the process that made it; create it after the fork, or use spawn")]
    Forked,
    #[error("this client is closed")]
    Closed,
    /// An argument that does not fit the model; nothing was sent.
    #[error("{message}")]
    BadInput { message: String },
    /// A call that another one must come before; nothing was sent.
    #[error("{message}")]
    OutOfOrder { message: String },
}

impl ClientError {
    pub(super) fn bad_input(message: impl Into<String>) -> Self {
        Self::BadInput { message: message.into() }
    }

    pub(super) fn out_of_order(message: impl Into<String>) -> Self {
        Self::OutOfOrder { message: message.into() }
    }

    /// What a failed connection means to the caller.
    pub(super) fn from_frame(address: &str, error: &FrameError) -> Self {
        let (address, cause) = (address.to_owned(), error.to_string());
        match error {
            FrameError::Io(error) => Self::Lost { address, cause: explained(error) },
            FrameError::Closed { .. } => Self::Lost { address, cause },
            FrameError::Header(_) | FrameError::Checksum { .. } | FrameError::Message(_) => {
                Self::Protocol { address, cause }
            }
        }
    }

    /// What a refusal means to the caller.
    pub(super) fn from_refused(address: &str, refused: Refused) -> Self {
        let Refused { code, message, fatal: _ } = refused;
        match code {
            RefusalCode::Authentication => Self::Authentication { address: address.to_owned(), message },
            RefusalCode::ModelMismatch => Self::ModelMismatch { message },
            RefusalCode::Fenced => Self::Fenced { message },
            _ => Self::Refused { code, message },
        }
    }

    pub(super) fn from_handshake(address: &str, error: HandshakeError) -> Self {
        match error {
            HandshakeError::Frame(error) => Self::from_frame(address, &error),
            HandshakeError::Authentication(message) => {
                Self::Authentication { address: address.to_owned(), message: message.to_owned() }
            }
            HandshakeError::Refused(refused) => Self::from_refused(address, refused),
            error @ (HandshakeError::OutOfPlace(_)
            | HandshakeError::Foreign { .. }
            | HandshakeError::Unreadable { .. }) => {
                Self::Protocol { address: address.to_owned(), cause: error.to_string() }
            }
        }
    }
}
