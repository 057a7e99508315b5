//! The parts of Offbeat that decide: what a model looks like in memory ([`table`], [`layout`]), what a late
//! gradient is worth ([`spec`], [`pipeline`], [`optim`]), how updates are applied without locks ([`store`]), and
//! how all of it looks on the wire ([`wire`]) and in files ([`checkpoint`]). No sockets, no clock, no Python: time and randomness come in as arguments.

pub mod checkpoint;
pub mod checksum;
pub mod dtype;
pub mod layout;
pub mod optim;
pub mod pipeline;
pub mod spec;
pub mod store;
mod sync;
pub mod table;
pub mod validate;
pub mod values;
pub mod velocity;
pub mod wire;
