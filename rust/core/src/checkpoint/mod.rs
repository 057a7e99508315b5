//! A checkpoint: a store's state as files. Tensors are by name and whole, in safetensors, so that any tool can read
//! them and no fragment of today binds the store of tomorrow; everything else is in the manifest, which is written
//! last and names the files with their digests. Readers and writers come from outside: where files lie, and how they
//! get there whole, is not known here.
//!
//! `model.safetensors` holds every tensor under its name: parameters as the float32 that the store keeps of them,
//! buffers in their own dtype. `optimizer.safetensors` holds what the optimizer remembers, as `exp_avg.<tensor>`.

mod digest;
mod draft;
mod error;
mod manifest;
mod plan;
mod restore;
mod tensors;

pub use digest::FileEntry;
pub use draft::Draft;
pub use error::CheckpointError;
pub use manifest::{Agreed, FORMAT, MANIFEST, MAX_MANIFEST_BYTES, Manifest, Range, RunRecord};
pub use plan::{MODEL, OPTIMIZER};
pub use restore::restore;
