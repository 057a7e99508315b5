//! The store from outside, as a server uses it.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod lives;
mod loads;
mod oracle;
mod readers;
mod rejoin;
mod support;
mod whole;
