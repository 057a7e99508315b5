//! How a session ends before its goodbye: the connection broke, or this side refuses to go on.

use super::connection::Connection;
use super::error::ServerError;
use crate::frame::FrameError;
use offbeat_core::wire::message::{RefusalCode, Refused};
use offbeat_core::wire::{Header, MessageError};
use std::io;
use tokio::task::JoinError;

/// Why a session ends before its goodbye.
#[derive(Debug)]
pub(super) enum End {
    Frame(FrameError),
    /// The worker is told, and the connection closed.
    Refused {
        request: u32,
        refused: Refused,
    },
}

impl From<FrameError> for End {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Frame(FrameError::Io(error))
    }
}

/// Waits for something that is not the peer's to give, unless the peer goes away.
pub(super) async fn or_closed<T>(connection: &Connection, wait: impl Future<Output = T>) -> Result<T, End> {
    tokio::select! {
        biased;
        done = wait => Ok(done),
        closed = connection.socket.closed() => {
            closed?;
            Err(End::Frame(FrameError::Closed { inside: false }))
        }
    }
}

impl End {
    pub(super) fn refused(header: &Header, code: RefusalCode, message: impl Into<String>) -> Self {
        Self::Refused {
            request: header.request,
            refused: Refused { code, message: message.into(), fatal: true },
        }
    }

    /// What was made on another thread was not: mostly it panicked.
    pub(super) fn lost_inside(header: &Header, what: &str, error: &JoinError) -> Self {
        let message = format!("{what} was lost inside the server ({error}); please report this");
        Self::refused(header, RefusalCode::Unknown, message)
    }

    /// A frame that may not come now.
    pub(super) fn out_of_place(header: &Header, due: &str) -> Self {
        Self::refused(header, RefusalCode::State, format!("{due} was due, a {:?} frame came", header.kind))
    }

    pub(super) fn malformed(header: &Header, error: &MessageError) -> Self {
        Self::refused(header, RefusalCode::Malformed, error.to_string())
    }

    /// What a refused initial model is to its worker.
    pub(super) fn of_model(header: &Header, error: &ServerError) -> Self {
        let code = match error {
            ServerError::StagingBudget { .. } | ServerError::ModelTooLong(_) => RefusalCode::Full,
            _ => RefusalCode::Malformed,
        };
        Self::refused(header, code, error.to_string())
    }

    /// What ended a connection, in words for the log and status.
    pub(super) fn cause(&self, connection: &Connection) -> String {
        match (connection.end(), self) {
            (Some((_, cause)), _) => cause,
            (None, Self::Frame(error @ FrameError::Closed { .. })) => error.to_string(),
            (None, Self::Frame(error)) => format!("the connection broke: {error}"),
            (None, Self::Refused { refused, .. }) => format!("it was refused: {refused}"),
        }
    }
}
