//! The parameter server: the store of the core behind sockets.
//!
//! One current-thread runtime per processor serves data connections ([`session`], [`exchange`], [`staged`]); a
//! connection stays on its thread. One more takes connections, hears heartbeats and looks at the clock ([`control`]).
//! What the run's workers must agree on is in [`run`], who they are in [`membership`].

mod config;
mod connection;
mod control;
mod end;
mod error;
mod exchange;
mod init;
mod membership;
mod model;
mod outbox;
mod poll;
mod run;
mod session;
mod shared;
mod snapshot;
mod staged;
mod status;

pub use config::ServerConfig;
pub use error::ServerError;
pub use snapshot::Snapshot;

use crate::fork::{ClosedInChildren, Origin};
use crate::handshake::random;
use membership::{Outcome, Patience};
use offbeat_core::spec::{OptimizerSpec, Transaction};
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::Event;
use run::{Agreement, describe};
use shared::Shared;
use snapshot::{check_values, gather, scatter};
use std::fmt::Write as _;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

/// How often a wait asks whether it is interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(100);
/// How long a stopping server waits for its connections to end.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// A model's table and each tensor's bytes (own dtype, little-endian, C order).
pub type Tensors = (Arc<TensorTable>, Vec<Vec<u8>>);

/// A server that has everything it needs from the machine, its port and its threads, but does not answer yet. Whoever
/// has a model to give gives it now, when little can fail any more. Dropped, it stops.
#[derive(Debug)]
pub struct Bound(Server);

impl Bound {
    /// Begins to take connections; the first worker brings the model, if none is given.
    ///
    /// # Errors
    /// [`ServerError::StagingBudget`].
    pub fn serve(self, model: Option<Snapshot>) -> Result<Server, ServerError> {
        let Self(server) = self;
        if let Some(model) = model {
            server.shared.set_model(model, server.shared.config.blueprint.clone())?;
        }
        server.shared.serving.send_replace(true);
        tracing::info!(address = %server.address(), run_id = server.shared.run_id, "the server listens");
        announce(&server.shared.agreement());
        Ok(server)
    }
}

/// A running parameter server. Dropped, it stops.
pub struct Server {
    shared: Arc<Shared>,
    control: Handle,
    threads: Mutex<Vec<JoinHandle<()>>>,
    origin: Origin,
}

impl Server {
    /// Takes the port; connections wait until [`Bound::serve`].
    ///
    /// # Errors
    /// [`ServerError`], before anything is left running.
    pub fn bind(config: ServerConfig) -> Result<Bound, ServerError> {
        config.validate()?;
        let (shared, listener) = open(config)?;
        Ok(Bound(Self::spawn(shared, listener)?))
    }

    /// Starts a server; the first worker brings the model. It listens when this returns.
    ///
    /// # Errors
    /// [`ServerError`], before anything is left running.
    pub fn start(config: ServerConfig) -> Result<Self, ServerError> {
        Self::bind(config)?.serve(None)
    }

    /// Starts a server with a model.
    ///
    /// # Errors
    /// [`ServerError`], before anything is left running.
    pub fn with_model(config: ServerConfig, model: Snapshot) -> Result<Self, ServerError> {
        Self::bind(config)?.serve(Some(model))
    }

    fn spawn(shared: Arc<Shared>, listener: Listener) -> Result<Self, ServerError> {
        let mut threads = Vec::new();
        let mut data = Vec::new();
        for number in 0..shared.loads.len() {
            let (handle, thread) = start_thread(&format!("offbeat-data-{number}"), Builder::enable_io, {
                let shared = Arc::clone(&shared);
                move |runtime| {
                    // Until the control thread has seen the connections end.
                    runtime.block_on(is_true(&shared.ended));
                }
            })
            .inspect_err(|_| {
                shared.ended.send_replace(true);
            })?;
            data.push(handle);
            threads.push(thread);
        }
        let (control, thread) = start_thread("offbeat-control", Builder::enable_all, {
            let shared = Arc::clone(&shared);
            move |runtime| {
                let _end = Ended(Arc::clone(&shared));
                runtime.block_on(async {
                    tokio::select! {
                        () = control::accept(Arc::clone(&shared), listener, data) => {}
                        () = control::tick(Arc::clone(&shared)) => {}
                        () = is_true(&shared.stopping) => {}
                    }
                    is_true(&shared.stopping).await;
                    control::dismiss(&shared);
                    tokio::select! {
                        () = control::tick(Arc::clone(&shared)) => {}
                        () = drained(&shared) => {}
                    }
                });
            }
        })
        .inspect_err(|_| {
            shared.ended.send_replace(true);
        })?;
        threads.push(thread);
        Ok(Self { shared, control, threads: Mutex::new(threads), origin: Origin::here() })
    }

    /// In a forked child the server's threads do not exist and its locks may be held for ever.
    fn check(&self) -> Result<(), ServerError> {
        if self.origin.is_elsewhere() { Err(ServerError::Forked) } else { Ok(()) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    pub fn run_id(&self) -> &str {
        &self.shared.run_id
    }

    /// Waits until at least `n` workers have come and nobody has been there for the linger. `false`: the time is up.
    ///
    /// # Errors
    /// [`ServerError::AllLost`] if every worker was lost and none finished, [`ServerError::Interrupted`],
    /// [`ServerError::Stopped`], [`ServerError::Forked`].
    pub fn wait_for_workers(
        &self,
        n: usize,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<bool, ServerError> {
        let config = &self.shared.config;
        let patience = Patience { linger: config.linger, rejoin_grace: config.rejoin_grace };
        self.wait(timeout, interrupt, |members, over| {
            match members.outcome(n, patience, over, Instant::now()) {
                Outcome::Waiting => None,
                Outcome::Done => Some(Ok(())),
                Outcome::AllLost(causes) => Some(Err(ServerError::AllLost { causes })),
            }
        })
    }

    /// Waits until `n` workers have come. `false`: the time is up.
    ///
    /// # Errors
    /// [`ServerError::Interrupted`], [`ServerError::Stopped`], [`ServerError::Forked`].
    pub fn wait_until_joined(
        &self,
        n: usize,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<bool, ServerError> {
        self.wait(timeout, interrupt, |members, _| (members.num_joined() >= n).then_some(Ok(())))
    }

    fn wait(
        &self,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
        done: impl Fn(&membership::Members, bool) -> Option<Result<(), ServerError>>,
    ) -> Result<bool, ServerError> {
        self.check()?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let mut wait = INTERRUPT_POLL;
            {
                let members = self.shared.members();
                if let Some(result) = done(&members, self.shared.is_over()) {
                    return result.map(|()| true);
                }
                if self.shared.is_stopping() {
                    return Err(ServerError::Stopped);
                }
                if let Some(deadline) = deadline {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    wait = wait.min(left);
                }
                drop(self.shared.wait_for_change(members, wait));
            }
            // Without a lock: it may run Python's signal handlers, which may ask for our status.
            if interrupt() {
                return Err(ServerError::Interrupted);
            }
        }
    }

    /// The status as a JSON document.
    ///
    /// # Errors
    /// [`ServerError::Forked`].
    pub fn status_json(&self) -> Result<String, ServerError> {
        self.check()?;
        Ok(status::json(&self.shared))
    }

    /// Replaces the base learning rate of one parameter group, or of all, for pushes ticketed from now on. The
    /// schedule goes on multiplying it.
    ///
    /// # Errors
    /// [`ServerError`] if there is no such group, no optimizer, or the rate cannot be.
    pub fn set_lr(&self, lr: f64, group: Option<usize>) -> Result<(), ServerError> {
        self.check()?;
        let mut agreement = self.shared.agreement();
        agreement.set_lr(lr, group)?;
        self.shared.apply(&agreement);
        Ok(())
    }

    /// Replaces the optimizer for pushes ticketed from now on. Workers that compare theirs later compare with this.
    ///
    /// # Errors
    /// [`ServerError`] if the spec cannot be run, or the run's optimizers are on the workers.
    pub fn set_optimizer(&self, optimizer: OptimizerSpec) -> Result<(), ServerError> {
        self.check()?;
        let mut agreement = self.shared.agreement();
        agreement.replace_optimizer(optimizer)?;
        self.shared.apply(&agreement);
        announce(&agreement);
        Ok(())
    }

    /// A consistent copy of the model: its table and each tensor's bytes. `None` while there is no model.
    ///
    /// # Errors
    /// [`ServerError::Forked`].
    pub fn tensors(&self) -> Result<Option<Tensors>, ServerError> {
        self.check()?;
        let Some(model) = self.shared.model.get() else { return Ok(None) };
        let store = &model.store;
        let (table, layout) = (Arc::clone(store.table()), store.layout());
        let bytes = |t: &offbeat_core::table::TensorSpec| t.num_elements() as usize * t.dtype.size();
        let mut tensors: Vec<Vec<u8>> = table.tensors().iter().map(|t| vec![0; bytes(t)]).collect();
        let whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
        let roots = match store.transaction() {
            Transaction::Fragment => self.cut(store),
            Transaction::Model => {
                let reader = store.reader();
                (0..layout.fragments.len()).map(|i| reader.root(i)).collect()
            }
        };
        drop(whole); // the roots stay as they are
        let mut scratch = Vec::new();
        for (index, root) in roots.into_iter().enumerate() {
            scatter(layout, index, root.payload(&mut scratch), &mut tensors);
        }
        Ok(Some((table, tensors)))
    }

    /// Roots that belong together: pushes that come later pause until those under way have ended.
    fn cut(&self, store: &Arc<offbeat_core::store::Store>) -> Vec<Arc<offbeat_core::store::Root>> {
        let deadline = Instant::now() + self.shared.config.cut_deadline;
        let (_never, clock) = mpsc::channel::<()>();
        loop {
            if let Some(cut) = store.begin_cut() {
                while !cut.open().is_empty() && Instant::now() < deadline {
                    // Nobody sends: this is a short wait.
                    clock.recv_timeout(Duration::from_millis(1)).ok();
                }
                let open = cut.open();
                if !open.is_empty() {
                    tracing::info!(?open, "a copy of the model was taken with pushes still under way");
                }
                return cut.roots();
            }
            clock.recv_timeout(Duration::from_millis(1)).ok();
        }
    }

    /// Replaces every value of the model. Pushes that were computed on the old ones are rejected.
    ///
    /// # Errors
    /// [`ServerError`] if there is no model yet, or the bytes are not those of its tensors.
    pub fn load_tensors(&self, tensors: &[impl AsRef<[u8]>]) -> Result<(), ServerError> {
        self.check()?;
        let model = self.shared.model.get().ok_or(ServerError::NoModel)?;
        let store = &model.store;
        check_values(store.table(), tensors)?;
        let whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
        let layout = Arc::clone(store.layout());
        let mut load = store.load(&mut |i, to| gather(&layout, tensors, i, to));
        let mut role = load.model_role.take();
        while let Some(held) = role {
            role = held.step();
        }
        for done in load.done {
            // Driven by whoever held the turn; an error says that the store is gone.
            self.control.block_on(done).ok();
        }
        let term = store.term();
        drop(whole);
        tracing::info!(term, "the model's values were replaced");
        self.shared.members().tell_all(&Event::Term { term });
        Ok(())
    }

    /// Stops the server: workers are told that the run has finished, connections end. Twice is fine.
    pub fn stop(&self) {
        if self.origin.is_elsewhere() {
            return;
        }
        self.shared.stopping.send_replace(true);
        self.shared.notify();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the server had panicked");
            }
        }
    }
}

type Listener = ClosedInChildren<TcpListener>;

/// Binds the port and makes what all threads share.
fn open(config: ServerConfig) -> Result<(Arc<Shared>, Listener), ServerError> {
    let listener = ClosedInChildren::new(config.listen()?);
    let address = listener.local_addr().map_err(ServerError::System)?;
    let run_id = match &config.run_id {
        Some(id) => id.clone(),
        None => hex(random::<8>().map_err(ServerError::System)?),
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let num_data_threads = config.num_data_threads.unwrap_or(processors);
    Ok((Arc::new(Shared::new(config, address, run_id, num_data_threads)?), listener))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("address", &self.shared.address).finish_non_exhaustive()
    }
}

/// One line that says what runs where.
fn announce(agreement: &Agreement) {
    let config = agreement.config();
    if let Some(optimizer) = &config.optimizer {
        let runs_on = match config.contribution {
            Some(offbeat_core::spec::Contribution::Delta) => "the workers",
            _ => "the server",
        };
        let momentum = if config.momentum_correction { "each worker" } else { "the server" };
        tracing::info!(
            optimizer = describe(optimizer),
            runs_on,
            momentum_in = momentum,
            "the run's optimizer"
        );
    }
}

/// Starts a thread with a runtime of its own; returns when its handle can be used.
fn start_thread(
    name: &str,
    drivers: impl Fn(&mut Builder) -> &mut Builder,
    body: impl FnOnce(Runtime) + Send + 'static,
) -> Result<(Handle, JoinHandle<()>), ServerError> {
    let mut builder = Builder::new_current_thread();
    let runtime = drivers(&mut builder).build().map_err(ServerError::System)?;
    let handle = runtime.handle().clone();
    let thread = thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || body(runtime))
        .map_err(ServerError::System)?;
    Ok((handle, thread))
}

/// Lets the data threads go when the control thread does, however that ends.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.send_replace(true);
    }
}

async fn is_true(flag: &watch::Sender<bool>) {
    // An error says that the sender is gone, and with it the server.
    flag.subscribe().wait_for(|set| *set).await.ok();
}

/// Waits until no connection is left, but not for ever.
async fn drained(shared: &Shared) {
    let end = Instant::now() + STOP_GRACE;
    while shared.num_connections() > 0 && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn hex(bytes: [u8; 8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes any text");
        text
    })
}

/// An operating system's error while a thread or a runtime is made.
impl From<io::Error> for ServerError {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}
