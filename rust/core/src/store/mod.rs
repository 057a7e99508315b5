//! The parameter store: fragments behind atomic roots.
//!
//! A root is an immutable, complete state of a fragment ([`root`]). A push is admitted once and gets a ticket
//! ([`registry`], [`ticket`]); each of its fragments is queued where it belongs and whoever holds that fragment's
//! turn applies what is queued ([`combine`], [`apply`]) and publishes the next root. Readers load roots and never
//! wait ([`reader`]). What must be known of the past to apply nothing twice is in [`ledger`] and [`slot`]. The same pushes, applied
//! one at a time under a lock by code that does nothing clever, are [`oracle`].

mod apply;
pub mod block;
pub mod book;
mod bookkeeping;
mod buffers;
mod combine;
pub mod cut;
mod fragments;
pub mod ledger;
pub mod log;
#[cfg(all(test, offbeat_loom))]
mod loom_tests;
pub mod model;
pub mod oracle;
mod pins;
pub mod push;
pub mod reader;
pub mod receipt;
mod registry;
pub mod rejoin;
pub mod resume;
mod rollback;
pub mod root;
mod slot;
pub mod status;
pub mod tally;
pub mod ticket;

pub use block::{Block, Pool};
pub use book::Book;
pub use cut::Cut;
pub use fragments::{FragmentOutcome, MAX_DRAIN, Role, Submission};
pub use ledger::WorkerKey;
pub use model::{ModelRole, StagedFragment};
pub use push::{Admission, OpenPush, PushHead, PushRecord};
pub use reader::{Reader, Turn};
pub use receipt::{Fate, Receipt};
pub use registry::{Attendance, Full, MAX_WORKERS};
pub use rejoin::{Claim, NoWayBack, Rejoin, Standing, Unsettled};
pub use resume::{Life, ResumeError, ResumedFragment, StoreState};
pub use root::Root;
pub use status::StoreStatus;
pub use tally::{Tally, TicketCounts};
pub use ticket::{Run, RunSpec, Ticket};

use crate::layout::Layout;
use crate::optim::Isa;
use crate::spec::Transaction;
use crate::sync::RootCell;
use crate::table::TensorTable;
use combine::Combiner;
use fragments::{Cell, Entry};
use futures_channel::oneshot;
use ledger::LedgerEntry;
use log::CommitObserver;
use model::{ModelEntry, ModelRoot};
use pins::{Pin, Pins};
use registry::{Registry, Ruling};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a store is built.
#[derive(Clone)]
pub struct StoreConfig {
    pub transaction: Transaction,
    /// At most [`MAX_WORKERS`].
    pub max_workers: usize,
    /// Versions of the whole model that readers may keep alive under "model".
    pub max_live_versions: usize,
    pub observer: Option<Arc<dyn CommitObserver>>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { transaction: Transaction::Fragment, max_workers: 1024, max_live_versions: 3, observer: None }
    }
}

/// A push staged whole and queued.
pub struct Commit {
    pub receipt: oneshot::Receiver<Receipt>,
    /// To be driven by a task of the store.
    pub role: Option<ModelRole>,
}

/// The parameters of one model, and everything that may happen to them.
pub struct Store {
    table: Arc<TensorTable>,
    layout: Arc<Layout>,
    config: StoreConfig,
    pool: Arc<Pool>,
    isa: Isa,
    cells: Vec<Cell>,
    model: RootCell<ModelRoot>,
    models: Combiner<ModelEntry>,
    pins: Pins,
    registry: Mutex<Registry>,
    gate: cut::Gate,
    /// Held while a load queues its values: every fragment gets those of two loads in the order of their terms.
    loading: Mutex<()>,
    /// Held while a run is resolved: it follows from the one before.
    configuring: Mutex<()>,
}

impl Store {
    /// A store in its first moment. `fill` writes each fragment's initial values, as they travel (own dtype, C order).
    pub fn new(
        table: Arc<TensorTable>,
        config: StoreConfig,
        term: u64,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Arc<Self> {
        let layout = Arc::new(Layout::of(&table));
        let pool = Arc::new(Pool::default());
        let roots: Vec<Arc<Root>> = (0..layout.fragments.len())
            .map(|i| Arc::new(filled(&layout, i, (term, 0), Box::default(), &pool, fill)))
            .collect();
        let registry = Registry::new(term, config.max_workers);
        Self::assemble(table, layout, config, pool, registry, roots, 0)
    }

    /// A store of its parts; `version` is what the roots hold of the registry's.
    fn assemble(
        table: Arc<TensorTable>,
        layout: Arc<Layout>,
        config: StoreConfig,
        pool: Arc<Pool>,
        registry: Registry,
        roots: Vec<Arc<Root>>,
        version: u64,
    ) -> Arc<Self> {
        let cells = roots
            .iter()
            .map(|root| Cell { root: RootCell::new(Arc::clone(root)), combiner: Combiner::new() });
        let cells = cells.collect();
        // Under "fragment" the model root would only pin the first version of everything.
        let roots = if config.transaction == Transaction::Model { roots } else { Vec::new() };
        let model = Arc::new(ModelRoot { term: registry.term, version, roots });
        let pins = Pins::default();
        pins.add(&model);
        Arc::new(Self {
            registry: Mutex::new(registry),
            isa: Isa::detect(),
            model: RootCell::new(model),
            models: Combiner::new(),
            gate: cut::Gate::new(),
            loading: Mutex::new(()),
            configuring: Mutex::new(()),
            table,
            layout,
            config,
            pool,
            cells,
            pins,
        })
    }

    #[must_use]
    pub fn table(&self) -> &Arc<TensorTable> {
        &self.table
    }

    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    #[must_use]
    pub fn transaction(&self) -> Transaction {
        self.config.transaction
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // The registry's methods leave it whole at every point where they could panic.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[must_use]
    pub fn term(&self) -> u64 {
        self.registry().term
    }

    /// Who is there.
    #[must_use]
    pub fn attendance(&self) -> Attendance {
        self.registry().attendance()
    }

    /// How many of these workers have not departed, and how many of them were not given up either.
    #[must_use]
    pub fn those_left_of(&self, workers: &BTreeSet<String>) -> (usize, usize) {
        self.registry().those_left_of(workers)
    }

    /// Whether one has departed that had pushed more than is known of it, by worker, also if another process has its name by
    /// now.
    #[must_use]
    pub fn has_departed_with_more(&self, known_pushes: &BTreeMap<String, u64>) -> bool {
        self.registry().has_departed_with_more(known_pushes)
    }

    /// Updates ticketed.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.registry().version
    }

    /// Samples in the pushes ticketed.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.registry().samples
    }

    /// Sets what later tickets obey. Optimizer state is kept unless the rules changed.
    pub fn configure(&self, spec: RunSpec) {
        // It guards no value: a run that panicked has not been set.
        let _one_after_the_other = self.configuring.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.run();
        // Without the registry's lock, which every push takes: many names and many patterns take their time.
        let run = Run::after(before.as_deref(), spec, &self.table);
        self.registry().run = Some(Arc::new(run));
    }

    #[must_use]
    pub fn run(&self) -> Option<Arc<Run>> {
        self.registry().run.clone()
    }

    /// Gives a worker's new incarnation, which nobody else has had, a slot; an older one with the same id is fenced.
    ///
    /// # Errors
    /// [`Full`] if every slot is taken by a worker that has not departed.
    pub fn register(&self, worker_id: &str, incarnation: u32) -> Result<WorkerKey, Full> {
        self.registry().register(worker_id, incarnation)
    }

    /// A worker process is back on another connection, after its old one has ended: see [`rejoin`].
    ///
    /// # Errors
    /// [`NoWayBack`], and nothing has changed.
    pub fn rejoin(&self, worker_id: &str, claim: &Claim) -> Result<Rejoin, NoWayBack> {
        self.registry().rejoin(worker_id, claim)
    }

    /// The worker has not been heard of: what it read before now is too old to push.
    pub fn lost(self: &Arc<Self>, key: WorkerKey) {
        // What a reader gets now. Under "model" the registry is ahead of it by a ticket whose commit is under way.
        let newest = self.reader().version();
        self.registry().lost(key, newest);
    }

    /// The worker has been away for long, and may come back: its slot may be given away, after those of workers that are gone
    /// for good.
    pub fn absent(&self, key: WorkerKey) {
        self.registry().absent(key);
    }

    /// The worker is gone for good, with its work done or not; its slot may be given away.
    pub fn depart(&self, key: WorkerKey, finished: bool) {
        self.registry().depart(key, finished);
    }

    /// Judges a push by its head.
    pub fn admit(self: &Arc<Self>, head: &PushHead) -> Admission {
        match self.rule(head, None) {
            Ruling::Ticketed(record) => Admission::Open(OpenPush::new(Arc::clone(self), record)),
            Ruling::Settled(receipt) => Admission::Settled(receipt),
        }
    }

    /// `measured`: the norm of what has come, if all of it has.
    fn rule(&self, head: &PushHead, measured: Option<f64>) -> Ruling {
        self.registry().admit(head, measured, &self.layout)
    }

    /// Settles a push that went wrong before it had a ticket.
    fn fail(&self, head: &PushHead, detail: &str) -> Receipt {
        self.registry().fail(head, detail)
    }

    fn settle(&self, record: &Arc<PushRecord>) -> Receipt {
        self.registry().settle(record)
    }

    fn abandon(&self, record: &Arc<PushRecord>) {
        self.registry().abandon(record);
    }

    /// Recycled memory for `bytes` of a payload; the caller writes all of it.
    #[must_use]
    pub fn staging(&self, bytes: usize) -> Block {
        self.pool.take(bytes)
    }

    fn model(&self) -> Arc<ModelRoot> {
        self.model.load_full()
    }

    fn publish_model(&self, root: ModelRoot) {
        self.pins.publish(&self.model, Arc::new(root));
    }

    /// A pull, for whoever needs no turn (status, checkpoints, "fragment").
    #[must_use]
    pub fn reader(self: &Arc<Self>) -> Reader {
        match self.config.transaction {
            Transaction::Fragment => Reader::new(Arc::clone(self), None, self.version()),
            Transaction::Model => {
                let model = self.model();
                let version = model.version;
                Reader::new(Arc::clone(self), Some(model), version)
            }
        }
    }

    /// A pull under the cap on live versions. `own` is the version of the worker's last push: what it is shown holds
    /// that push and, if it was lost since, is new enough to push on. Under "fragment" nothing is pinned and the turn
    /// is always now.
    #[must_use]
    pub fn turn(self: &Arc<Self>, worker: WorkerKey, own: u64) -> Turn {
        if self.config.transaction == Transaction::Fragment {
            return Turn::Now(self.reader());
        }
        let least = own.max(self.registry().least_base(worker));
        match self.pins.pin(least, self.config.max_live_versions) {
            Pin::Now(root) => {
                let version = root.version;
                Turn::Now(Reader::new(Arc::clone(self), Some(root), version))
            }
            Pin::Wait(told) => Turn::Wait(told),
        }
    }

    /// Whoever reads this ([`Reader::pinned`]) has paused: no other reader waits for it to let go. The version lives on,
    /// beyond the cap on live ones.
    pub fn discount(&self, pinned: (u64, u64)) {
        self.pins.discount(pinned);
    }

    /// Replaces every value (`load_state_dict`) under a new term: pushes on their way were computed on other
    /// parameters and are rejected as rolled back. Optimizer state starts anew. Resolves when the last fragment has
    /// changed; any roles that come back are to be driven like a submission's.
    pub fn load(self: &Arc<Self>, fill: &mut dyn FnMut(usize, &mut [u8])) -> Load {
        let _in_order = self.in_order();
        let at = raised(&mut self.registry());
        self.load_at(at, fill)
    }

    /// Replaces every value as [`Self::load`] does, if the term and the version are such that they may be: from when that is
    /// asked on no push of this term gets a ticket.
    pub fn load_if(
        self: &Arc<Self>,
        may: impl FnOnce(u64, u64) -> bool,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Option<Load> {
        let _in_order = self.in_order();
        let at = {
            let mut registry = self.registry();
            may(registry.term, registry.version).then(|| raised(&mut registry))?
        };
        Some(self.load_at(at, fill))
    }

    fn load_at(self: &Arc<Self>, at: (u64, u64), fill: &mut dyn FnMut(usize, &mut [u8])) -> Load {
        self.replace_all(at, &mut |i, term| {
            filled(&self.layout, i, (term, 0), Box::default(), &self.pool, fill)
        })
    }

    /// Held by whoever replaces all roots. It guards no value: a load that panicked has left the fragments it had queued.
    fn in_order(&self) -> MutexGuard<'_, ()> {
        self.loading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces every root by those that `make` gives for a fragment and a new term, which began at a version.
    fn replace_all(
        self: &Arc<Self>,
        (term, version): (u64, u64),
        make: &mut dyn FnMut(usize, u64) -> Root,
    ) -> Load {
        let mut root = |i: usize| make(i, term);
        let mut load = Load { version, ..Load::default() };
        if self.config.transaction == Transaction::Model {
            let (done, heard) = oneshot::channel();
            let roots = (0..self.cells.len()).map(&mut root).collect();
            let turn = self.models.enqueue(ModelEntry::Replace { roots, done });
            load.done.push(heard);
            load.model_role = turn.then(|| ModelRole::new(Arc::clone(self)));
            return load;
        }
        for fragment in 0..self.cells.len() {
            let (done, heard) = oneshot::channel();
            let turn = self.cells[fragment].combiner.enqueue(Entry::Replace { root: root(fragment), done });
            load.done.push(heard);
            // Dropping a role drains it in place: a load is rare and may take its time.
            drop(turn.then(|| self.role(fragment)));
        }
        load
    }
}

/// Begins a new term; gives it, and the version at which it begins.
fn raised(registry: &mut Registry) -> (u64, u64) {
    registry.term += 1;
    (registry.term, registry.version)
}

/// A load under way.
#[derive(Default)]
pub struct Load {
    /// One per fragment (or one in all, under "model").
    pub done: Vec<oneshot::Receiver<()>>,
    pub model_role: Option<ModelRole>,
    /// The model's, at which the new values are in place: no ticket of the new term is up to it.
    pub version: u64,
}

fn filled(
    layout: &Layout,
    index: usize,
    at: (u64, u64),
    ledger: Box<[LedgerEntry]>,
    pool: &Arc<Pool>,
    fill: &mut dyn FnMut(usize, &mut [u8]),
) -> Root {
    let fragment = &layout.fragments[index];
    let mut wire = pool.take(fragment.wire_bytes());
    fill(index, wire.bytes_mut());
    Root::from_wire(fragment, at, wire, ledger, pool)
}
