//! The targets, by name.

mod checkpoint;
mod client;
mod frame;
mod handshake;
mod session;

pub use checkpoint::checkpoint;
pub use client::client;
pub use frame::frame;
pub use handshake::handshake;
pub use session::session;

pub(crate) use checkpoint::GOLDEN;
pub(crate) use client::joined;

/// A name, and what must hold of any bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All of them; each has a binary in `fuzz/targets` and a folder in `fuzz/corpus`.
pub const TARGETS: [Target; 5] = [
    ("frame", frame),
    ("handshake", handshake),
    ("session", session),
    ("client", client),
    ("checkpoint", checkpoint),
];
