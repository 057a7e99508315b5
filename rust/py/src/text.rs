//! Settings, tables and status cross the line as JSON.

use crate::error::{Class, raise};
use pyo3::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// From Python.
pub(crate) fn parse<T: DeserializeOwned>(py: Python<'_>, what: &str, text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|e| raise(py, Class::Config, format!("{what} cannot be used: {e}")))
}

/// To Python.
pub(crate) fn json<T: Serialize>(py: Python<'_>, value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| raise(py, Class::State, format!("it cannot be told: {e}")))
}
