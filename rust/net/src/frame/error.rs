//! Why frames end.

use offbeat_core::wire::{HeaderError, Kind, MessageError};
use std::io;

/// Why a connection cannot be followed further.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer closed the connection, or its process ended, between two frames or inside one.
    #[error("the peer closed the connection{}", if *.inside { " in the middle of a frame" } else { "" })]
    Closed { inside: bool },
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("a {kind:?} frame's payload is damaged (checksum {found:#010x}, computed {computed:#010x})")]
    Checksum { kind: Kind, found: u32, computed: u32 },
    #[error(transparent)]
    Message(#[from] MessageError),
}
