//! One TCP connection as frames: a reader with a little read-ahead and a vectored writer, shared by both sides.
//!
//! A system call costs as much as checking a kilobyte, so what belongs together travels together: a read asks for
//! the rest of a payload *and* the next header at once (`readv`), a write sends headers and payloads from where they
//! lie (`writev`).

mod ahead;
mod error;
mod reader;
mod socket;

pub(crate) use ahead::{AHEAD_BYTES, ReadAhead};
pub use error::FrameError;
pub use reader::FrameReader;
pub(crate) use reader::MESSAGE_STEP_BYTES;
pub use socket::{Moving, Socket};
