//! The parameter server: the store of the core behind sockets.
//!
//! One current-thread runtime per processor serves data connections ([`session`], [`exchange`], [`staged`]). Where some
//! threads have become busier than others, connections move between two frames ([`balance`] says which, [`attend`] how).
//! One more thread takes connections at the [`door`] and hears heartbeats ([`control`]), and looks at the [`clock`].
//! [`threads`] starts both. What the run's workers must agree on is in [`run`], who they are in [`membership`]; they wait
//! for each other at a [`rendezvous`], by the rules of [`rounds`]. Their owner waits for them in [`wait`], and copies and
//! replaces the model in [`values`]; what outlives the server is in [`checkpoints`], and written by [`keeper`].

mod attend;
mod back;
mod balance;
mod checkpoints;
mod clock;
mod config;
mod connection;
mod control;
mod cut;
mod door;
mod drain;
mod end;
mod error;
mod exchange;
mod init;
mod join;
mod joined;
mod keeper;
mod membership;
mod model;
mod outbox;
mod place;
mod poll;
mod rendezvous;
mod rounds;
mod run;
mod session;
mod shared;
mod snapshot;
mod staged;
mod status;
mod strangers;
mod threads;
mod values;
mod wait;

pub use config::{CheckpointConfig, Ending, Every, Resume, ServerConfig};
pub use error::ServerError;
pub use snapshot::Snapshot;

use crate::fork::{ClosedInChildren, Origin};
use crate::handshake::random;
use checkpoints::Opened;
use keeper::Keeper;
use offbeat_core::spec::OptimizerSpec;
use offbeat_core::store::Life;
use offbeat_core::wire::message::FIRST_TERM;
use shared::Shared;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use threads::Listener;
use tokio::runtime::Handle;

/// A server that has everything it needs from the machine, its port and its threads, but does not answer yet. Whoever
/// has a model to give gives it now, when little can fail any more. Dropped, it stops.
#[derive(Debug)]
pub struct Bound(Server);

impl Bound {
    /// Begins to take connections; the first worker brings the model, if none is given.
    ///
    /// # Errors
    /// [`ServerError::StagingBudget`], [`ServerError::OtherModel`], or what keeps the life from being begun.
    pub fn serve(self, model: Option<Snapshot>) -> Result<Server, ServerError> {
        let Self(server) = self;
        let has_resumed = server.shared.model.get().is_some();
        if let Some(model) = model {
            server.give(model)?;
        }
        if let Some(checkpoints) = &server.shared.checkpoints {
            let last = checkpoints.begin()?; // nothing but the machine can refuse the start any more
            server.shared.members().reserved(last);
            *lock(&server.keeper) = Some(Keeper::start(&server.shared)?);
        }
        server.shared.tell_of_checkpoints(has_resumed);
        server.shared.serving.send_replace(true);
        tracing::info!(address = %server.address(), run_id = server.shared.run_id, "the server listens");
        server.shared.agreement().announce();
        Ok(server)
    }
}

/// A running parameter server. Dropped, it stops.
pub struct Server {
    shared: Arc<Shared>,
    control: Handle,
    threads: Mutex<Vec<JoinHandle<()>>>,
    keeper: Mutex<Option<Keeper>>,
    origin: Origin,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Takes the port; connections wait until [`Bound::serve`].
    ///
    /// # Errors
    /// [`ServerError`], before anything is left running.
    pub fn bind(config: ServerConfig) -> Result<Bound, ServerError> {
        config.validate()?;
        let (shared, listener) = open(config)?;
        let (control, threads) = threads::start(&shared, listener)?;
        let (threads, keeper) = (Mutex::new(threads), Mutex::default());
        Ok(Bound(Self { shared, control, threads, keeper, origin: Origin::here() }))
    }

    /// The model of its owner, unless it goes on from a checkpoint.
    fn give(&self, model: Snapshot) -> Result<(), ServerError> {
        let shared = &self.shared;
        let Some(resumed) = shared.model.get() else {
            let model = shared.set_model(model, shared.config.blueprint.clone())?;
            model.is_initial.store(true, Ordering::Relaxed);
            return Ok(());
        };
        // A file of a model may have its tensors in another order; the checkpoint's is kept.
        let Some(difference) = model.table.first_difference_by_name(resumed.store.table()) else {
            tracing::warn!("the given parameters are not used: the checkpoint's are");
            return Ok(());
        };
        let checkpoint = shared.checkpoints.as_ref().map(|checkpoints| checkpoints.directory().to_owned());
        let remedy = "Give that model or none, or begin anew with resume=\"never\"";
        Err(ServerError::other_model(checkpoint.unwrap_or_default(), &difference, remedy))
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
        drop(agreement);
        tracing::info!(lr, ?group, "the learning rate was set");
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
        agreement.announce();
        Ok(())
    }

    /// Replaces the bound on staleness, for pushes that come from now on; `None` is no bound.
    ///
    /// # Errors
    /// [`ServerError`] if members average here: those of a round come one after the other, and a share that was rejected
    /// would be missing in their mean.
    pub fn set_max_staleness(&self, most: Option<u64>) -> Result<(), ServerError> {
        self.check()?;
        let mut agreement = self.shared.agreement();
        if let Some(most) = most.filter(|_| self.shared.rounds_status().terms.is_some()) {
            return Err(ServerError::Config {
                name: "max_staleness",
                value: most.to_string(),
                remedy: "members average at this server, and a share of theirs that was rejected would be missing in the \
                         mean: leave it None",
            });
        }
        agreement.set_max_staleness(most)?;
        self.shared.apply(&agreement);
        drop(agreement);
        tracing::info!(?most, "the bound on staleness was set");
        Ok(())
    }

    /// Stops the server: workers are told that the run has finished, connections end. Twice is fine.
    pub fn stop(&self) {
        self.end(Ending::Finished);
    }

    /// Stops the server, after pushes that are under way have ended. One that keeps no checkpoints is finished, whatever is
    /// said.
    pub fn end(&self, how: Ending) {
        if self.origin.is_elsewhere() {
            return;
        }
        let keeps = self.shared.checkpoints.is_some();
        self.shared.begin_to_stop(if keeps { how } else { Ending::Finished });
        // Held to the end: whoever else stops it returns when it has stopped, too.
        let mut threads = lock(&self.threads);
        for thread in threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the server had panicked");
            }
        }
        // Last: nothing changes any more.
        if let Some(keeper) = lock(&self.keeper).take() {
            keeper.finish();
        }
    }
}

/// Takes what there is to go on from, binds the port and makes what all threads share.
fn open(config: ServerConfig) -> Result<(Arc<Shared>, Listener), ServerError> {
    let opened = config.checkpoints.as_ref().map(|kept| checkpoints::open(&config, kept)).transpose()?;
    let (life, checkpoints, resumed) = match opened {
        None => (None, None, None),
        Some(Opened { checkpoints, life, resumed }) => (Some(life), Some(checkpoints), resumed),
    };
    let before = resumed.as_ref().map(|resumed| &resumed.run);
    let listener = ClosedInChildren::new(config.listen(before.map(|run| run.port))?);
    let address = listener.local_addr().map_err(ServerError::System)?;
    let run_id = match config.run_id.as_ref().or(before.map(|run| &run.run_id)) {
        Some(id) => id.clone(),
        None => hex(random::<8>().map_err(ServerError::System)?),
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let num_data_threads = config.num_data_threads.unwrap_or(processors);
    let life_now = life.unwrap_or(Life { term: FIRST_TERM, last_incarnation: 0 });
    let shared = Shared::new(config, address, run_id, num_data_threads, (life_now, checkpoints))?;
    if let Some(resumed) = resumed {
        shared.resume(resumed)?;
    }
    Ok((Arc::new(shared), listener))
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

fn hex(bytes: [u8; 8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes any text");
        text
    })
}
