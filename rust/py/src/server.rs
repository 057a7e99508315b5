//! The parameter server as a Python class.

use crate::error::{Class, raise};
use crate::interrupt::{Signals, seconds, wait};
use crate::log;
use crate::memory::{take_tensors, tensors};
use crate::owned::Owned;
use crate::text::{json, parse};
use offbeat_core::spec::{OptimizerSpec, Schedule, StalenessSpec, Transaction};
use offbeat_core::table::TensorTable;
use offbeat_net::client::Interrupt;
use offbeat_net::server::{
    self, CheckpointConfig, Ending, Every, Resume, Server as NetServer, ServerConfig, ServerError,
};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Mutex;

/// What `offbeat/settings.py` writes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    host: Option<String>,
    port: u16,
    token: Option<String>,
    insecure: bool,
    run_id: Option<String>,
    transaction: Transaction,
    max_samples: Option<u64>,
    staleness: StalenessSpec,
    schedule: Schedule,
    optimizer: Option<OptimizerSpec>,
    momentum_correction: Option<bool>,
    blueprint: Option<String>,
    linger_s: f64,
    rejoin_grace_s: f64,
    checkpoints: Option<Checkpoints>,
}

/// `checkpoint_dir` and what goes with it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Checkpoints {
    directory: PathBuf,
    every: Frequency,
    resume: ResumeMode,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Frequency {
    Versions(u64),
    Seconds(f64),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ResumeMode {
    Auto,
    Never,
    Must,
}

impl Checkpoints {
    fn config(self) -> CheckpointConfig {
        let Self { directory, every, resume } = self;
        let every = match every {
            Frequency::Versions(number) => Every::Versions(number),
            Frequency::Seconds(time) => Every::Time(seconds(time)),
        };
        let resume = match resume {
            ResumeMode::Auto => Resume::Auto,
            ResumeMode::Never => Resume::Never,
            ResumeMode::Must => Resume::Must,
        };
        CheckpointConfig { directory, every, resume }
    }
}

impl Settings {
    fn config(self) -> ServerConfig {
        let Self { host, port, token, insecure, run_id, transaction, max_samples, staleness, .. } = self;
        let Self { schedule, optimizer, momentum_correction, blueprint, linger_s, rejoin_grace_s, .. } = self;
        let Self { checkpoints, .. } = self;
        ServerConfig {
            host,
            port,
            token: token.map(Into::into),
            insecure,
            run_id,
            transaction,
            max_samples,
            staleness,
            schedule,
            optimizer,
            momentum_correction,
            blueprint,
            linger: seconds(linger_s),
            rejoin_grace: seconds(rejoin_grace_s),
            checkpoints: checkpoints.map(Checkpoints::config),
            ..ServerConfig::default()
        }
    }
}

/// A model's values, copied, for the server that it is given to.
#[pyclass(frozen, module = "offbeat._offbeat")]
pub(crate) struct Snapshot(Mutex<Option<server::Snapshot>>);

#[pymethods]
impl Snapshot {
    #[new]
    fn new(py: Python<'_>, table: &str, values: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let table: TensorTable = parse(py, "the model", table)?;
        let held = take_tensors(&values)?;
        let values = tensors(&held);
        let snapshot = wait(py, |_| server::Snapshot::of(table, &values))?;
        Ok(Self(Mutex::new(Some(snapshot))))
    }
}

/// Rust's server; `offbeat.ParameterServer` is what users hold.
#[pyclass(frozen, module = "offbeat._offbeat")]
pub(crate) struct Server(Owned<NetServer>);

impl Server {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&NetServer, &Signals) -> Result<T, ServerError> + Send,
    ) -> PyResult<T> {
        wait(py, |signals| work(self.0.get(), signals))
    }
}

#[pymethods]
impl Server {
    #[new]
    fn new(py: Python<'_>, config: &str, model: Option<&Snapshot>) -> PyResult<Self> {
        log::install();
        let config = parse::<Settings>(py, "the configuration", config)?.config();
        // The port first: a start that fails leaves the snapshot for the next.
        let bound = wait(py, |_| NetServer::bind(config))?;
        let model = match model {
            None => None,
            Some(model) => match model.0.lock().map_or(None, |mut model| model.take()) {
                None => {
                    py.detach(|| drop(bound));
                    return Err(raise(py, Class::State, "this snapshot was given to a server before"));
                }
                some => some,
            },
        };
        Ok(Self(Owned::new(wait(py, |_| bound.serve(model))?)))
    }

    #[getter]
    fn address(&self) -> String {
        self.0.get().address().to_string()
    }

    fn wait_for_workers(&self, py: Python<'_>, n: usize, timeout_s: Option<f64>) -> PyResult<bool> {
        self.call(py, |server, signals| {
            server.wait_for_workers(n, timeout_s.map(seconds), &|| signals.interrupted())
        })
    }

    fn wait_until_joined(&self, py: Python<'_>, n: usize, timeout_s: Option<f64>) -> PyResult<bool> {
        self.call(py, |server, signals| {
            server.wait_until_joined(n, timeout_s.map(seconds), &|| signals.interrupted())
        })
    }

    fn status(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |server, _| server.status_json())
    }

    fn set_lr(&self, py: Python<'_>, lr: f64, group: Option<usize>) -> PyResult<()> {
        self.call(py, |server, _| server.set_lr(lr, group))
    }

    fn set_optimizer(&self, py: Python<'_>, optimizer: &str) -> PyResult<()> {
        let optimizer: OptimizerSpec = parse(py, "the optimizer", optimizer)?;
        self.call(py, |server, _| server.set_optimizer(optimizer))
    }

    fn set_max_staleness(&self, py: Python<'_>, most: Option<u64>) -> PyResult<()> {
        self.call(py, |server, _| server.set_max_staleness(most))
    }

    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Option<(String, Vec<Bound<'py, PyByteArray>>)>> {
        let Some((table, values)) = self.call(py, |server, _| server.tensors())? else {
            return Ok(None);
        };
        // One at a time: each copy in Rust is freed as its twin in Python is made.
        let values = values.into_iter().map(|bytes| PyByteArray::new(py, &bytes)).collect();
        Ok(Some((json(py, &*table)?, values)))
    }

    fn load_tensors(&self, py: Python<'_>, values: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let held = take_tensors(&values)?;
        let values = tensors(&held);
        self.call(py, |server, _| server.load_tensors(&values))
    }

    fn roll_back(&self, py: Python<'_>, version: Option<u64>) -> PyResult<u64> {
        self.call(py, |server, _| server.roll_back(version))
    }

    fn stop(&self, py: Python<'_>, is_over: bool) -> PyResult<()> {
        self.call(py, |server, _| {
            server.end(if is_over { Ending::Finished } else { Ending::Restarting });
            Ok(())
        })
    }
}
