//! A worker's side of a session as a Python class, for one thread at a time.

use crate::error::{Class, IntoPyErr, raise};
use crate::interrupt::{seconds, wait};
use crate::memory::{memories, optional_memories, take_out, take_tensors, take_values, tensors};
use crate::owned::Owned;
use crate::text::{json, parse};
use crate::{log, receipt};
use offbeat_core::spec::{Contribution, OptimizerSpec};
use offbeat_core::store::Receipt;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::{New, Parting, Replaces};
use offbeat_net::client::{self, Client, ClientConfig, ClientError, Entered, Entry, Interrupt, PushInput};
use pyo3::prelude::*;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// How often who leaves looks whether another thread is out of its call.
const LOOK: Duration = Duration::from_millis(100);

/// Rust's client; `offbeat.Client` and `offbeat.AsyncWorker` are what users hold.
#[pyclass(frozen, module = "offbeat._offbeat")]
pub(crate) struct Session {
    #[pyo3(get)]
    address: String,
    /// Tried, never waited for: two threads in one session are their owner's mistake.
    client: Owned<Mutex<Client>>,
    /// Once the process ends, and another thread is to be out of its call.
    is_leaving: AtomicBool,
    /// Who leaves waits here for that.
    is_out: (Mutex<()>, Condvar),
}

impl Session {
    fn lock(&self) -> Result<MutexGuard<'_, Client>, SessionError> {
        if self.is_leaving() {
            return Err(ClientError::Closed.into());
        }
        match self.client.get().try_lock() {
            Ok(client) => Ok(client),
            Err(TryLockError::WouldBlock) => Err(SessionError::Busy),
            Err(TryLockError::Poisoned(_)) => Err(ClientError::Closed.into()),
        }
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Client, &dyn Interrupt) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        wait(py, |signals| {
            let result = work(&mut *self.lock()?, &|| self.is_leaving() || signals.interrupted());
            self.is_out.1.notify_all();
            match result {
                Err(ClientError::Interrupted) if self.is_leaving() => Err(ClientError::Closed.into()),
                result => result.map_err(SessionError::Client),
            }
        })
    }

    fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed) // looked at now and then; orders nothing
    }

    /// Runs signal handlers a last time while the receipts can still be kept: raised on the way back to the caller,
    /// Ctrl-C would take them along.
    fn unless_signalled(&self, py: Python<'_>, receipts: &[Receipt]) -> PyResult<()> {
        let Err(raised) = py.check_signals() else { return Ok(()) };
        if let Ok(mut client) = self.lock() {
            client.unclaim(receipts).ok(); // a client that a handler closed has nobody to tell
        }
        Err(raised)
    }

    /// Something about the session that is known without asking the server.
    fn told<T: Send>(&self, py: Python<'_>, tell: impl FnOnce(&client::Session) -> T + Send) -> PyResult<T> {
        self.call(py, |client, _| client.session().map(tell))
    }
}

/// Why a call of a session fails.
enum SessionError {
    /// Another thread is in one.
    Busy,
    Client(ClientError),
}

impl From<ClientError> for SessionError {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}

impl IntoPyErr for SessionError {
    fn into_py_err(self, py: Python<'_>) -> PyErr {
        const BUSY: &str =
            "another thread is in a call of this session: one thread at a time, or a session each";
        match self {
            Self::Busy => raise(py, Class::State, BUSY),
            Self::Client(error) => error.into_py_err(py),
        }
    }
}

#[pymethods]
impl Session {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what a session is opened with")]
    fn new(
        py: Python<'_>,
        address: String,
        worker_id: Option<String>,
        token: Option<String>,
        run_id: Option<String>,
        in_flight: usize,
        connect_timeout_s: f64,
        reconnect_timeout_s: Option<f64>,
        table: Option<&str>,
    ) -> PyResult<Self> {
        log::install();
        let table: Option<TensorTable> = table.map(|t| parse(py, "the model", t)).transpose()?;
        let connect_timeout = seconds(connect_timeout_s);
        let config = ClientConfig {
            address: address.clone(),
            worker_id,
            token: token.map(Into::into),
            run_id,
            in_flight,
            connect_timeout,
            patience: reconnect_timeout_s.map(seconds),
        };
        let client = wait(py, |signals| Client::connect(config, table.as_ref(), signals))?;
        Ok(Self {
            address,
            client: Owned::new(Mutex::new(client)),
            is_leaving: AtomicBool::new(false),
            is_out: Default::default(),
        })
    }

    #[getter]
    fn run_id(&self, py: Python<'_>) -> PyResult<String> {
        self.told(py, |session| session.run_id.clone())
    }

    #[getter]
    fn worker_id(&self, py: Python<'_>) -> PyResult<String> {
        self.told(py, |session| session.worker_id.clone())
    }

    #[getter]
    fn incarnation(&self, py: Python<'_>) -> PyResult<u32> {
        self.told(py, |session| session.incarnation)
    }

    #[getter]
    fn term(&self, py: Python<'_>) -> PyResult<u64> {
        self.told(py, |session| session.term)
    }

    #[getter]
    fn version(&self, py: Python<'_>) -> PyResult<u64> {
        self.told(py, |session| session.version)
    }

    #[getter]
    fn table(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.told(py, |session| session.table.clone())?.map(|table| json(py, &*table)).transpose()
    }

    #[getter]
    fn blueprint(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.told(py, |session| session.blueprint.clone())
    }

    #[getter]
    fn run(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.told(py, |session| session.run.clone())?)
    }

    #[getter]
    fn patience_s(&self, py: Python<'_>) -> PyResult<f64> {
        self.call(py, |client, _| client.patience()).map(|patience| patience.as_secs_f64())
    }

    #[getter]
    fn finished(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.call(py, |client, _| Ok(client.events()?.finished))
    }

    fn wait_for_model(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &*self.call(py, |client, signals| client.wait_for_model(signals))?)
    }

    fn init(
        &self,
        py: Python<'_>,
        table: &str,
        values: Vec<Bound<'_, PyAny>>,
        blueprint: Option<&str>,
    ) -> PyResult<bool> {
        let table: TensorTable = parse(py, "the model", table)?;
        let held = take_tensors(&values)?;
        let bytes = tensors(&held);
        self.call(py, |client, signals| client.init(&table, &bytes, blueprint, signals))
    }

    fn replace(
        &self,
        py: Python<'_>,
        table: &str,
        values: Vec<Bound<'_, PyAny>>,
        since: Option<(u64, u64)>,
    ) -> PyResult<bool> {
        let table: TensorTable = parse(py, "the model", table)?;
        let held = take_tensors(&values)?;
        let bytes = tensors(&held);
        let gives_way = since.map_or(Replaces::Untrained, |(term, version)| Replaces::At { term, version });
        self.call(py, |client, signals| client.replace(&table, &bytes, gives_way, signals))
    }

    fn configure(&self, py: Python<'_>, contribution: &str, optimizer: Option<&str>) -> PyResult<String> {
        let contribution: Contribution = parse(py, "the contribution", &json(py, &contribution)?)?;
        let optimizer: Option<OptimizerSpec> =
            optimizer.map(|o| parse(py, "the optimizer", o)).transpose()?;
        json(
            py,
            &self.call(py, |client, signals| client.configure(contribution, optimizer.as_ref(), signals))?,
        )
    }

    fn pull(&self, py: Python<'_>, out: Vec<Bound<'_, PyAny>>, incremental: bool) -> PyResult<(u64, u64)> {
        let held = take_out(&out)?;
        let out = memories(&held);
        let pulled = self.call(py, move |client, signals| client.pull(&out, incremental, signals))?;
        Ok((pulled.term, pulled.version))
    }

    fn push<'py>(
        &self,
        py: Python<'py>,
        values: Vec<Bound<'py, PyAny>>,
        samples: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let held = take_values(&values)?;
        let values = optional_memories(&held);
        let receipt = self
            .call(py, move |client, signals| client.push(PushInput { values: &values, samples }, signals))?;
        self.unless_signalled(py, slice::from_ref(&receipt))?;
        receipt::to_python(py, &receipt)
    }

    fn push_pull<'py>(
        &self,
        py: Python<'py>,
        values: Vec<Bound<'py, PyAny>>,
        samples: u64,
        out: Vec<Bound<'py, PyAny>>,
        incremental: bool,
    ) -> PyResult<(Option<Bound<'py, PyAny>>, bool)> {
        let (held_values, held_out) = (take_values(&values)?, take_out(&out)?);
        let (values, out) = (optional_memories(&held_values), memories(&held_out));
        let (receipt, came) = self.call(py, move |client, signals| {
            let input = PushInput { values: &values, samples };
            let receipt = client.push_pull(input, &out, incremental, signals)?;
            // Asked for here and not by a call of its own, which another thread's may keep from being made.
            Ok((receipt, client.session()?.came))
        })?;
        self.unless_signalled(py, receipt.as_slice())?;
        Ok((receipt.map(|receipt| receipt::to_python(py, &receipt)).transpose()?, came))
    }

    fn flush<'py>(
        &self,
        py: Python<'py>,
        out: Option<Vec<Bound<'py, PyAny>>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let held = out.as_deref().map(take_out).transpose()?;
        let out = held.as_deref().map(memories);
        let receipts = self.call(py, move |client, signals| client.flush(out.as_deref(), signals))?;
        self.unless_signalled(py, &receipts)?;
        receipts.iter().map(|receipt| receipt::to_python(py, receipt)).collect()
    }

    fn enter(
        &self,
        py: Python<'_>,
        samples: (f64, Option<(f64, u64)>),
        at_work: bool,
        times_s: (Option<f64>, Option<f64>),
        at_least: u32,
        words: (Option<String>, Option<String>),
    ) -> PyResult<(u64, f64, u32, u32, bool, Option<f64>)> {
        let ((samples, new), (grace, linger), (terms, wish)) = (samples, times_s, words);
        let new = new.map(|(samples, of)| New { samples, of });
        let (grace, linger) = (grace.map(seconds), linger.map(seconds));
        let entry = Entry { samples, at_work, grace, at_least: Some(at_least), linger, terms, wish, new };
        let entered = self.call(py, |client, signals| client.enter(&entry, signals))?;
        let Entered { round, share, members, at_work, agreed, new_share } = entered;
        Ok((round, share, members, at_work, agreed, new_share))
    }

    fn gather(&self, py: Python<'_>, round: u64) -> PyResult<(u64, u64)> {
        let gathered = self.call(py, |client, signals| client.gather(round, signals))?;
        Ok((gathered.missing, gathered.version))
    }

    fn set_progress(&self, py: Python<'_>, steps: u64) -> PyResult<()> {
        self.call(py, |client, _| client.set_progress(steps))
    }

    fn status(&self, py: Python<'_>) -> PyResult<String> {
        self.call(py, |client, signals| client.status(signals))
    }

    #[pyo3(signature = (parting, cause=None))]
    fn close(&self, py: Python<'_>, parting: &str, cause: Option<String>) -> PyResult<()> {
        let parting = parting_of(py, parting, cause)?;
        // Not broken off where the process ends meanwhile: it is what is to be said then.
        wait(py, |signals| {
            let result = self.lock()?.close(parting, signals);
            self.is_out.1.notify_all();
            result.map_err(SessionError::Client)
        })
    }

    /// Closes as the process ends: another thread's call is broken off, and none follows.
    #[pyo3(signature = (parting, cause=None))]
    fn leave(&self, py: Python<'_>, parting: &str, cause: Option<String>) -> PyResult<()> {
        let parting = parting_of(py, parting, cause)?;
        self.is_leaving.store(true, Ordering::Relaxed); // as it is looked at
        wait(py, |signals| {
            // Not on the client's own lock, in which Ctrl-C is not heard.
            let mut waits = self.is_out.0.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                match self.client.get().try_lock() {
                    Ok(mut client) => return client.close(parting, signals),
                    Err(TryLockError::Poisoned(_)) => return Ok(()),
                    Err(TryLockError::WouldBlock) if signals.interrupted() => {
                        return Err(ClientError::Interrupted);
                    }
                    Err(TryLockError::WouldBlock) => {
                        let woken = self.is_out.1.wait_timeout(waits, LOOK);
                        waits = woken.unwrap_or_else(PoisonError::into_inner).0;
                    }
                }
            }
        })
    }
}

fn parting_of(py: Python<'_>, parting: &str, cause: Option<String>) -> PyResult<Parting> {
    match parting {
        "finished" => Ok(Parting::Finished),
        "left" => Ok(Parting::Left { cause }),
        "withdrawn" => Ok(Parting::Withdrawn { cause }),
        other => {
            let message = format!("parting is {other:?}: finished, left or withdrawn");
            Err(raise(py, Class::Config, message))
        }
    }
}

/// Asks a server for its status without joining it.
#[pyfunction]
pub(crate) fn fetch_status(
    py: Python<'_>,
    address: &str,
    token: Option<&str>,
    timeout_s: f64,
) -> PyResult<String> {
    wait(py, |signals| client::fetch_status(address, token, seconds(timeout_s), signals))
}

/// In a forked child, first thing: closes what was inherited, without a word to the other side.
#[pyfunction]
pub(crate) fn forget_after_fork() {
    offbeat_net::fork::forget_after_fork();
    log::forget();
}
