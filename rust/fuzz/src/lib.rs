//! What must hold of any bytes. Each target is a function of the bytes that an attacker chose, and panics where a
//! promise is broken: libFuzzer drives it from `fuzz/`, and a test over the seed corpus in `fuzz/corpus`.
//!
//! Only what the crates show to everybody is used here, so that nothing is public for the fuzzer's sake.

mod frames;
mod input;
pub mod memory;
mod peer;
mod seeds;
mod small;
mod targets;

pub use seeds::{Seed, seeds};
pub use targets::{TARGETS, Target, checkpoint, client, frame, handshake, session};
