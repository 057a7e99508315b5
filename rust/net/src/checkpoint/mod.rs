//! Checkpoints on a disk: how they get there whole ([`Directory::save`]), and which one a server goes on from
//! ([`Directory::newest`]). Whoever is no server looks at them ([`inspect`]), puts them to the proof ([`verify`]) and takes
//! their model ([`model`]), and changes nothing. What is in one is the core's affair ([`offbeat_core::checkpoint`]).

mod choice;
mod directory;
mod error;
mod files;
mod folder;
mod inspection;
mod lives;
mod proof;
mod survey;
mod watch;

pub use choice::KEPT;
pub use directory::{Directory, Others};
pub use error::DirectoryError;
pub use folder::{Checkpoint, Mark, checkpoints};
pub use inspection::inspect;
pub use proof::{Model, model, verify, verify_lives};
pub use survey::names;
pub use watch::{Tell, Watch};
