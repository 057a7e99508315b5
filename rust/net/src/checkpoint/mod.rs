//! Checkpoints on a disk: how they get there whole ([`Directory::save`]), and which one a server goes on from
//! ([`Directory::newest`]). What is in one is the core's affair ([`offbeat_core::checkpoint`]).

mod directory;
mod error;
mod files;
mod folder;
mod lives;

pub use directory::{Directory, KEPT};
pub use error::DirectoryError;
pub use folder::{Checkpoint, checkpoints};
