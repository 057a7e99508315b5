//! The one way into a call that waits: the GIL is released, Python's signal handlers run every 100 ms, and what
//! they raise (Ctrl-C's `KeyboardInterrupt`, a SIGTERM handler's `SystemExit`) ends the call.

use crate::error::IntoPyErr;
use offbeat_net::client::Interrupt;
use pyo3::prelude::*;
use std::sync::Mutex;
use std::time::Duration;

/// Runs Python's signal handlers when polled and keeps what one of them raised, or a call between.
#[derive(Default)]
pub(crate) struct Signals {
    raised: Mutex<Option<PyErr>>,
}

impl Signals {
    /// Runs the handlers, then calls Python; false if there is an exception now. Where the interpreter is being taken
    /// down nothing is called.
    pub(crate) fn call(&self, call: impl FnOnce(Python<'_>) -> PyResult<()>) -> bool {
        if self.interrupted() {
            return false;
        }
        let Some(Err(error)) = Python::try_attach(call) else { return true };
        if let Ok(mut raised) = self.raised.lock() {
            *raised = Some(error);
        }
        false
    }
}

impl Interrupt for Signals {
    /// Attaches for a moment. On other threads than the main one it finds nothing, and once the interpreter is
    /// being taken down it does nothing.
    fn interrupted(&self) -> bool {
        let Ok(mut raised) = self.raised.lock() else {
            return true;
        };
        if raised.is_none() {
            *raised = Python::try_attach(|py| py.check_signals().err()).flatten();
        }
        raised.is_some()
    }
}

/// Runs `work` without the GIL and maps its error. A signal handler's exception goes before whatever the work
/// returns, since it must not be lost.
pub(crate) fn wait<T, E>(py: Python<'_>, work: impl FnOnce(&Signals) -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: IntoPyErr + Send,
{
    let signals = Signals::default();
    let result = py.detach(|| work(&signals));
    match signals.raised.into_inner() {
        Ok(Some(raised)) => Err(raised),
        _ => result.map_err(|error| error.into_py_err(py)),
    }
}

/// A time that Python gave; what cannot be a duration (`inf`) is as long as can be.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}
