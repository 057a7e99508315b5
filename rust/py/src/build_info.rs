//! What a bug report needs to know about this build.

use offbeat_core::wire::PROTOCOL;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Tells version, profile, platform and wire protocol of this build.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("profile", if cfg!(debug_assertions) { "debug" } else { "release" })?;
    info.set_item("os", std::env::consts::OS)?;
    info.set_item("arch", std::env::consts::ARCH)?;
    info.set_item("protocol", PROTOCOL)?;
    Ok(info)
}
