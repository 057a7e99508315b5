//! What travels between a worker and the server, as bytes and nothing else: no sockets, no clock.
//!
//! Every frame is a [`Header`] of [`HEADER_BYTES`] bytes and a payload of the length the header says. Payloads
//! are raw tensor bytes ([`Kind::Fragment`], [`Kind::Value`], [`Kind::Root`]), two compact binary forms on the hot
//! path ([`PushRequest`], [`PullRequest`]) or messages in named MessagePack ([`message`]; a receipt is one).
//!
//! Promises, each with its test:
//! - WIRE-1 A header's own checksum is checked before its length is believed; a flipped bit is always seen.
//! - WIRE-2 Whatever the bytes, a decoder returns a value or an error: it neither panics nor allocates more than
//!   a small multiple of the bytes it was given.
//! - WIRE-3 What a state of a connection does not expect is refused by kind and length before it is received
//!   ([`Kind::cap`]).

pub mod auth;
mod cursor;
pub mod header;
pub mod message;
pub mod push;

pub use cursor::MessageError;
pub use header::{HEADER_BYTES, Header, HeaderError, Kind, PROTOCOL, check_beginning, flags};
pub use message::{decode, encode};
pub use push::{PullRequest, PushRequest, Versions, Want};
