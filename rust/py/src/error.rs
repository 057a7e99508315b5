//! From Rust's errors to the classes of `offbeat.errors`, one arm per variant: a new variant does not compile until
//! it has a class.

use offbeat_core::wire::message::RefusalCode;
use offbeat_net::checkpoint::DirectoryError;
use offbeat_net::client::ClientError;
use offbeat_net::server::ServerError;
use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The classes of `offbeat.errors` that this crate raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    AddressInUse,
    Authentication,
    Checkpoint,
    Closed,
    Config,
    Connect,
    ConnectionLost,
    Fenced,
    Forked,
    ModelMismatch,
    NonFinite,
    Protocol,
    ServerClosed,
    State,
    Timeout,
}

impl Class {
    const fn name(self) -> &'static str {
        match self {
            Self::AddressInUse => "AddressInUseError",
            Self::Authentication => "AuthenticationError",
            Self::Checkpoint => "CheckpointError",
            Self::Closed => "ClosedError",
            Self::Config => "ConfigError",
            Self::Connect => "ConnectError",
            Self::ConnectionLost => "ConnectionLostError",
            Self::Fenced => "FencedError",
            Self::Forked => "ForkedError",
            Self::ModelMismatch => "ModelMismatchError",
            Self::NonFinite => "NonFiniteError",
            Self::Protocol => "ProtocolError",
            Self::ServerClosed => "ServerClosedError",
            Self::State => "StateError",
            Self::Timeout => "OffbeatTimeoutError",
        }
    }

    fn get(self, py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
        static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let module = ERRORS.get_or_try_init(py, || py.import("offbeat.errors").map(Bound::unbind))?;
        Ok(module.bind(py).getattr(self.name())?.cast_into()?)
    }
}

/// An exception of that class.
pub(crate) fn raise(py: Python<'_>, class: Class, message: impl Into<String>) -> PyErr {
    match class.get(py) {
        Ok(found) => PyErr::from_type(found, message.into()),
        Err(missing) => missing,
    }
}

/// An error that Python can be told.
pub(crate) trait IntoPyErr {
    fn into_py_err(self, py: Python<'_>) -> PyErr;
}

impl IntoPyErr for ClientError {
    fn into_py_err(self, py: Python<'_>) -> PyErr {
        let class = match &self {
            Self::Unreachable { .. } => Class::Connect,
            Self::Timeout { .. } => Class::Timeout,
            Self::Authentication { .. } => Class::Authentication,
            Self::ModelMismatch { .. } => Class::ModelMismatch,
            Self::Refused { code, message: _ } => refusal(*code),
            Self::Fenced { .. } => Class::Fenced,
            Self::NonFinite { .. } | Self::NonFiniteModel { .. } => Class::NonFinite,
            Self::Lost { .. } => Class::ConnectionLost,
            Self::Protocol { .. } => Class::Protocol,
            // Reported by `wait` as what the handler raised; alone it would be a poll that lost its exception.
            Self::Interrupted => return PyRuntimeError::new_err(self.to_string()),
            Self::Forked => Class::Forked,
            Self::Closed => Class::Closed,
            Self::BadInput { .. } => Class::Config,
            Self::OutOfOrder { .. } => Class::State,
        };
        raise(py, class, self.to_string())
    }
}

/// What a server's refusal is to the worker's user.
fn refusal(code: RefusalCode) -> Class {
    match code {
        RefusalCode::Protocol | RefusalCode::Malformed | RefusalCode::Checksum | RefusalCode::Unknown => {
            Class::Protocol
        }
        RefusalCode::Authentication => Class::Authentication,
        RefusalCode::RunId
        | RefusalCode::Optimizer
        | RefusalCode::LearningRate
        | RefusalCode::Contribution => Class::Config,
        RefusalCode::ModelMismatch => Class::ModelMismatch,
        RefusalCode::NoModel | RefusalCode::State | RefusalCode::Full => Class::State,
        RefusalCode::Fenced => Class::Fenced,
        RefusalCode::Timeout | RefusalCode::Lost | RefusalCode::Forgotten | RefusalCode::Restarting => {
            Class::ConnectionLost
        }
        RefusalCode::Finished => Class::ServerClosed,
    }
}

impl IntoPyErr for ServerError {
    fn into_py_err(self, py: Python<'_>) -> PyErr {
        let class = match &self {
            Self::AddressInUse { .. } => Class::AddressInUse,
            Self::Bind { .. }
            | Self::Host { .. }
            | Self::Insecure { .. }
            | Self::Spec(_)
            | Self::Config { .. }
            | Self::StagingBudget { .. }
            | Self::ModelTooLong(_)
            | Self::OtherRun { .. }
            | Self::OtherContribution { .. }
            | Self::Checkpoints(DirectoryError::Trainers { .. })
            | Self::Group { .. } => Class::Config,
            Self::Values { .. } | Self::NumTensors { .. } | Self::OtherModel { .. } => Class::ModelMismatch,
            Self::Checkpoints(_)
            | Self::NoCheckpoint { .. }
            | Self::NoSuchCheckpoint { .. }
            | Self::DamagedNewest { .. } => Class::Checkpoint,
            Self::NonFinite { .. } => Class::NonFinite,
            Self::NoModel | Self::NoOptimizer | Self::WorkerSide | Self::KeepsNone => Class::State,
            Self::NoneFinished { .. } => Class::ConnectionLost,
            Self::Stopped => Class::Closed,
            // As with `ClientError`.
            Self::Interrupted => return PyRuntimeError::new_err(self.to_string()),
            Self::Forked => Class::Forked,
            Self::System(_) => return PyOSError::new_err(self.to_string()),
        };
        raise(py, class, self.to_string())
    }
}

impl IntoPyErr for DirectoryError {
    fn into_py_err(self, py: Python<'_>) -> PyErr {
        let class = match &self {
            // What was given is none.
            Self::Foreign { .. } | Self::Trainers { .. } => Class::Config,
            Self::Io { .. }
            | Self::Locked { .. }
            | Self::Life { .. }
            | Self::Checkpoint { .. }
            | Self::NoneUsable { .. }
            | Self::Empty { .. }
            | Self::Gone { .. } => Class::Checkpoint,
        };
        raise(py, class, self.to_string())
    }
}
