//! Offbeat's sockets. A [`frame`] is the wire codec of the core over one TCP connection; [`handshake`] opens a
//! connection from both ends; [`server`] holds the store and answers; [`client`] is a worker's side of a session;
//! [`checkpoint`] keeps what a store was on a disk.

pub mod checkpoint;
pub mod client;
mod describe;
pub mod fork;
pub mod frame;
pub mod handshake;
mod limits;
pub mod server;
mod tensors;
mod token;

pub use fork::forget_after_fork;
pub use tensors::Tensors;
pub use token::Token;
