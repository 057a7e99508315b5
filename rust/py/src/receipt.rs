//! Receipts as Python's `offbeat.receipt.Receipt`.

use offbeat_core::pipeline::Reason;
use offbeat_core::store::Receipt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Builds the named tuple.
pub(crate) fn to_python<'py>(py: Python<'py>, receipt: &Receipt) -> PyResult<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = CLASS.import(py, "offbeat.receipt", "Receipt")?;
    let Receipt { term, version, staleness, weight, verdict, applied, duplicate, reason, detail } = receipt;
    let reason = reason.map(Reason::name);
    class.call1((term, version, staleness, weight, verdict.name(), applied, duplicate, reason, detail))
}
