//! Checkpoints where no server runs: looked at, put to the proof, their model taken. Nothing on the disk is changed.

use crate::interrupt::wait;
use crate::text::json;
use offbeat_net::checkpoint::{self, DirectoryError, Model, Watch};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use std::path::PathBuf;

/// Reads without the GIL; `tell(bytes read, bytes to be read)` and signal handlers are called now and then.
fn watched<T: Send>(
    py: Python<'_>,
    tell: Option<Py<PyAny>>,
    read: impl FnOnce(&Watch<'_>) -> Result<T, DirectoryError> + Send,
) -> PyResult<T> {
    wait(py, |signals| {
        let goes_on = |read: u64, all: u64| {
            signals.call(|py| tell.as_ref().map_or(Ok(()), |tell| tell.call1(py, (read, all)).map(drop)))
        };
        read(&Watch::new(&goes_on))
    })
}

/// A name, a version, what was passed over, a table and its values.
type Exported<'py> = (String, u64, Vec<String>, String, Vec<Bound<'py, PyByteArray>>);

#[pyfunction]
pub(crate) fn checkpoint_names(py: Python<'_>, path: PathBuf) -> PyResult<Option<Vec<String>>> {
    wait(py, |_| checkpoint::names(&path))
}

#[pyfunction]
pub(crate) fn inspect_checkpoints(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    wait(py, |_| checkpoint::inspect(&path))
}

#[pyfunction]
pub(crate) fn verify_lives(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    wait(py, |_| checkpoint::verify_lives(&directory))
}

#[pyfunction]
pub(crate) fn verify_checkpoint(py: Python<'_>, folder: PathBuf, tell: Option<Py<PyAny>>) -> PyResult<bool> {
    watched(py, tell, |watch| checkpoint::verify(&folder, watch))
}

#[pyfunction]
pub(crate) fn checkpoint_model(
    py: Python<'_>,
    path: PathBuf,
    tell: Option<Py<PyAny>>,
) -> PyResult<Exported<'_>> {
    let Model { name, version, tensors: (table, values), passed_over } =
        watched(py, tell, |watch| checkpoint::model(&path, watch))?;
    // One at a time: each copy in Rust is freed as its twin in Python is made.
    let values = values.into_iter().map(|bytes| PyByteArray::new(py, &bytes)).collect();
    Ok((name, version, passed_over, json(py, &*table)?, values))
}
