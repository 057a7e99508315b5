//! The model: there from the start, or brought by the first worker that has one. Set once, whole.

use super::config::ServerConfig;
use super::error::ServerError;
use super::snapshot::Snapshot;
use offbeat_core::layout::{Layout, Presence};
use offbeat_core::spec::Transaction;
use offbeat_core::store::{RunSpec, Store};
use offbeat_core::wire::message::ModelInfo;
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The least that the staging budget is set to by default.
const MIN_STAGING_BYTES: u64 = 64 << 20;
/// Staging is reserved in units of this, so that a semaphore's count holds any budget.
const STAGING_UNIT_BYTES: u64 = 4 << 10;

/// What the server trains.
pub(super) struct Model {
    pub(super) store: Arc<Store>,
    pub(super) blueprint: Option<String>,
    pub(super) staging: Staging,
    /// Held by whoever replaces or copies all values, from the first to the last: no copy is of two lives.
    pub(super) whole: Mutex<()>,
    /// The server's owner began with it, and nobody has put other values there since.
    pub(super) is_initial: AtomicBool,
    /// `None`: it began in this life of the server, or its owner went back to a checkpoint.
    pub(super) resumed: Option<ResumedAt>,
}

/// Where a model goes on from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResumedAt {
    /// From the one in which its values were made to the checkpoint's own: nobody has pushed since.
    pub(super) from_terms: RangeInclusive<u64>,
    /// Of this life's first term.
    pub(super) term: u64,
    /// Of the checkpoint, and so of the model until a push comes.
    pub(super) version: u64,
}

impl Model {
    /// What a worker needs of it.
    pub(super) fn info(&self) -> ModelInfo {
        ModelInfo { table: self.store.table().as_ref().clone(), blueprint: self.blueprint.clone() }
    }
}

/// Memory for pushes that are staged whole: reserved in full before the first byte is asked for, first come, first
/// served.
pub(super) struct Staging {
    pub(super) budget: u64,
    units: Arc<Semaphore>,
}

impl Staging {
    fn new(config: &ServerConfig, layout: &Layout) -> Result<Self, ServerError> {
        let all = Presence::all(layout.num_tensors());
        let needed: u64 = layout.fragments.iter().map(|f| f.push_bytes(&all) as u64).sum();
        let budget = config.staging_budget.unwrap_or((2 * needed).max(MIN_STAGING_BYTES));
        if config.transaction() == Transaction::Model && budget < needed {
            return Err(ServerError::StagingBudget { needed, budget });
        }
        // Rounded up, as every reservation is, so that what fits the budget fits the units.
        let units = usize::try_from(budget.div_ceil(STAGING_UNIT_BYTES)).unwrap_or(usize::MAX);
        Ok(Self { budget, units: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))) })
    }

    /// Waits for room for a push of so many bytes.
    ///
    /// # Cancel safety
    /// Safe; the place in the queue is lost.
    pub(super) async fn reserve(&self, bytes: u64) -> OwnedSemaphorePermit {
        let units = u32::try_from(bytes.div_ceil(STAGING_UNIT_BYTES)).unwrap_or(u32::MAX);
        Arc::clone(&self.units).acquire_many_owned(units).await.expect("the semaphore is never closed")
    }

    /// Bytes reserved now.
    pub(super) fn reserved(&self) -> u64 {
        let free = self.units.available_permits() as u64 * STAGING_UNIT_BYTES;
        self.budget.saturating_sub(free)
    }
}

/// The place where the model is or will be.
pub(super) struct ModelSlot {
    model: OnceLock<Arc<Model>>,
    ready: watch::Sender<bool>,
    /// The right to bring the model.
    bringing: Arc<Semaphore>,
}

impl ModelSlot {
    pub(super) fn new() -> Self {
        Self {
            model: OnceLock::new(),
            ready: watch::Sender::new(false),
            bringing: Arc::new(Semaphore::new(1)),
        }
    }

    pub(super) fn get(&self) -> Option<&Arc<Model>> {
        self.model.get()
    }

    /// Waits until there is a model.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn wait(&self) {
        self.ready.subscribe().wait_for(|ready| *ready).await.expect("the sender lives as long as the slot");
    }

    /// Waits for the right to bring the model; whoever gets it looks first whether it has come meanwhile.
    ///
    /// # Cancel safety
    /// Safe; the place in the queue is lost.
    pub(super) async fn claim(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.bringing).acquire_owned().await.expect("the semaphore is never closed")
    }

    /// The store of a new model; a model that cannot be put there is refused before anything large is made.
    pub(super) fn store(
        config: &ServerConfig,
        term: u64,
        snapshot: Snapshot,
        blueprint: Option<&str>,
    ) -> Result<Arc<Store>, ServerError> {
        let Snapshot { table, mut fragments } = snapshot;
        ModelInfo::check_size(&table, blueprint)?;
        Staging::new(config, &Layout::of(&table))?;
        let fill = &mut |i: usize, to: &mut [u8]| to.copy_from_slice(&std::mem::take(&mut fragments[i]));
        Ok(Store::new(Arc::new(table), config.store(), term, fill))
    }

    /// Puts a model there, unless there is one. `run` is in force before anybody sees it.
    pub(super) fn go_on(
        &self,
        config: &ServerConfig,
        store: Arc<Store>,
        blueprint: Option<String>,
        run: Option<RunSpec>,
        resumed: Option<ResumedAt>,
    ) -> Result<&Arc<Model>, ServerError> {
        let staging = Staging::new(config, store.layout())?;
        if let Some(run) = run {
            store.configure(run);
        }
        let model = self.model.get_or_init(|| {
            let (whole, is_initial) = (Mutex::new(()), AtomicBool::new(false));
            Arc::new(Model { store, blueprint, staging, whole, is_initial, resumed })
        });
        self.ready.send_replace(true);
        Ok(model)
    }
}
