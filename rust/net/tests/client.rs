//! The client against the real server, and against one that does what a test tells it, when it tells it.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "client/breaches.rs"]
mod breaches;
#[path = "client/buffers.rs"]
mod buffers;
#[path = "client/cells.rs"]
mod cells;
#[path = "client/connecting.rs"]
mod connecting;
#[path = "client/interrupts.rs"]
mod interrupts;
#[path = "client/momentum.rs"]
mod momentum;
#[path = "client/pushes.rs"]
mod pushes;
#[path = "client/rejoin.rs"]
mod rejoin;
#[path = "client/relay.rs"]
mod relay;
#[path = "client/replies.rs"]
mod replies;
#[path = "client/restart.rs"]
mod restart;
#[path = "client/rounds.rs"]
mod rounds;
#[path = "client/script.rs"]
mod script;
#[path = "client/support.rs"]
mod support;
#[path = "client/turns.rs"]
mod turns;
