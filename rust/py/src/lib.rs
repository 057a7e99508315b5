//! The extension module `offbeat._offbeat`: Rust's server and client as Python classes. Each method converts its
//! arguments, runs without the GIL through [`interrupt::wait`], and wraps what comes back; what it means is decided
//! elsewhere, in the crates below or in `python/offbeat`.

mod arrays;
mod build_info;
mod checkpoints;
mod error;
mod interrupt;
mod log;
mod memory;
mod owned;
mod receipt;
mod server;
mod session;
mod text;

use pyo3::prelude::*;

#[pymodule]
mod _offbeat {
    #[pymodule_export]
    use super::arrays::ArrayTable;
    #[pymodule_export]
    use super::build_info::build_info;
    #[pymodule_export]
    use super::checkpoints::{
        checkpoint_model, checkpoint_names, inspect_checkpoints, verify_checkpoint, verify_lives,
    };
    #[pymodule_export]
    use super::log::{set_log_level, take_log_records, wait_for_log_records};
    #[pymodule_export]
    use super::server::{Server, Snapshot};
    #[pymodule_export]
    use super::session::{Session, fetch_status, forget_after_fork};
}
