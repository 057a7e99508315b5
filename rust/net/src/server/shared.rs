//! What the server's threads share. Locks are short, never held across an await, and taken in this order:
//! agreement, members, rounds, then the store's own.

use super::checkpoints::{Checkpoints, Resumed};
use super::clock;
use super::config::{Ending, Resume, ServerConfig};
use super::connection::Connection;
use super::error::ServerError;
use super::membership::{Ended, Members};
use super::model::{Model, ModelSlot, ResumedAt};
use super::rounds::{Entry, OtherTerms, Part, Rounds, RoundsStatus};
use super::run::Agreement;
use super::snapshot::Snapshot;
use super::strangers::Strangers;
use offbeat_core::pipeline::Reason;
use offbeat_core::store::{Life, Receipt, Run, Store};
use offbeat_core::wire::message::{
    Attempt, Event, FINISHED_BUDGET, FINISHED_STOPPED, FIRST_TERM, Parting, RefusalCode, Refused, RunConfig,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Who is in a round and does nothing is given so many leases, or more where others took long.
const LEASES_IN_A_ROUND: u32 = 3;

/// How busy a data thread is.
#[derive(Debug, Default)]
pub(super) struct Load {
    pub(super) connections: AtomicUsize,
    /// Bytes moved recently: halved a few times a second.
    pub(super) recent_bytes: AtomicU64,
    pub(super) longest_poll_us: AtomicU64,
}

pub(super) struct Shared {
    pub(super) config: ServerConfig,
    pub(super) address: SocketAddr,
    pub(super) run_id: String,
    /// Of a model that is not there yet.
    pub(super) first_term: u64,
    pub(super) checkpoints: Option<Checkpoints>,
    pub(super) started: Instant,
    pub(super) model: ModelSlot,
    pub(super) loads: Vec<Load>,
    /// Pushes whose sender was gone before they had come whole.
    pub(super) cut_short: AtomicU64,
    /// Room for connections that have proved who they are.
    pub(super) admitted: Arc<Semaphore>,
    /// True: connections are taken.
    pub(super) serving: watch::Sender<bool>,
    /// True: everything ends.
    pub(super) stopping: watch::Sender<bool>,
    /// True: everything has ended, the data threads may go.
    pub(super) ended: watch::Sender<bool>,
    /// Whether it will come again, once it stops.
    restarting: AtomicBool,
    /// Whether `max_samples` is reached.
    over: AtomicBool,
    /// Whether it was said that several workers push into one velocity.
    warned: AtomicBool,
    agreement: Mutex<Agreement>,
    members: Mutex<Members>,
    changed: Condvar,
    rounds: Mutex<Rounds>,
    /// Counts what may have changed for those who wait in a round.
    round_changes: watch::Sender<u64>,
    connections: Mutex<BTreeMap<u64, Arc<Connection>>>,
    next_connection: AtomicU64,
    strangers: Mutex<Strangers>,
    /// Of connections, from one data thread to another.
    pub(super) num_moves: AtomicU64,
}

/// Nothing here is left half changed by a panic: every method of the locked values is one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a flag to be raised.
pub(super) async fn is_true(flag: &watch::Sender<bool>) {
    // An error says that the sender is gone, and with it the server.
    flag.subscribe().wait_for(|set| *set).await.ok();
}

impl Shared {
    pub(super) fn new(
        config: ServerConfig,
        address: SocketAddr,
        run_id: String,
        num_data_threads: usize,
        (life, checkpoints): (Life, Option<Checkpoints>),
    ) -> Result<Self, ServerError> {
        Ok(Self {
            first_term: life.term,
            checkpoints,
            address,
            run_id,
            started: Instant::now(),
            model: ModelSlot::new(),
            loads: (0..num_data_threads).map(|_| Load::default()).collect(),
            cut_short: AtomicU64::new(0),
            admitted: Arc::new(Semaphore::new(config.max_connections)),
            serving: watch::Sender::new(false),
            stopping: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            restarting: AtomicBool::new(false),
            over: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            agreement: Mutex::new(Agreement::new(&config)?),
            members: Mutex::new(Members::new(life)),
            changed: Condvar::new(),
            rounds: Mutex::default(),
            round_changes: watch::Sender::new(0),
            connections: Mutex::new(BTreeMap::new()),
            next_connection: AtomicU64::new(0),
            strangers: Mutex::default(),
            num_moves: AtomicU64::new(0),
            config,
        })
    }

    pub(super) fn agreement(&self) -> MutexGuard<'_, Agreement> {
        lock(&self.agreement)
    }

    pub(super) fn members(&self) -> MutexGuard<'_, Members> {
        lock(&self.members)
    }

    pub(super) fn strangers(&self) -> MutexGuard<'_, Strangers> {
        lock(&self.strangers)
    }

    /// Waits for something to change in the membership, for at most `time`.
    pub(super) fn wait_for_change<'a>(
        &self,
        members: MutexGuard<'a, Members>,
        time: Duration,
    ) -> MutexGuard<'a, Members> {
        self.changed.wait_timeout(members, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Says that something has changed in the membership; its lock is free.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
        let members = self.members();
        let mut rounds = lock(&self.rounds);
        // Whom a server that stops sends away is not missed in a round: nobody is left who could go on with it.
        if !self.is_stopping() {
            let (there, expected) = (members.those_heard(), members.those_expected());
            let now = self.judged(&members, Instant::now());
            rounds.expect_only(|incarnation| expected.contains(&incarnation));
            rounds.keep(|incarnation| there.contains(&incarnation) || expected.contains(&incarnation), now);
            rounds.see(&there, &members.those_lost(), now);
        }
        drop((members, rounds));
        self.round_has_changed();
    }

    fn round_has_changed(&self) {
        self.round_changes.send_modify(|count| *count += 1);
    }

    /// Whatever changes for those who wait in a round from now on.
    pub(super) fn round_changes(&self) -> watch::Receiver<u64> {
        self.round_changes.subscribe()
    }

    /// A worker enters a round, or asks whether it has closed. One that is not there enters when it is back.
    pub(super) fn enter_round(&self, incarnation: u32, entry: Entry) -> Option<Result<Part, OtherTerms>> {
        self.with_rounds(incarnation, |rounds, now| rounds.enter(incarnation, entry, now).transpose())
    }

    /// A worker's push has ended, or it asks whether its round is over: with how many shares missing.
    pub(super) fn gather_round(&self, incarnation: u32, round: u64) -> Option<u64> {
        self.with_rounds(incarnation, |rounds, now| rounds.gather(incarnation, round, now))
    }

    /// Does something for a worker that is there, unless the server stops; tells those who wait if that has changed
    /// something for them.
    fn with_rounds<T>(
        &self,
        incarnation: u32,
        act: impl FnOnce(&mut Rounds, Instant) -> Option<T>,
    ) -> Option<T> {
        let members = self.members(); // held, so that who is lost now is taken off after it came on
        if !members.is_heard(incarnation) || self.is_stopping() {
            return None;
        }
        let now = self.judged(&members, Instant::now());
        let mut rounds = lock(&self.rounds);
        let before = rounds.milestones();
        let answer = act(&mut rounds, now);
        let has_changed = before != rounds.milestones();
        drop((members, rounds));
        if has_changed {
            self.round_has_changed();
        }
        answer
    }

    /// Closes the open round if its time has passed. Else, when it will have; `None`, too, where that is for the next
    /// look at the clock to find.
    pub(super) fn close_late_round(&self, now: Instant) -> Option<Instant> {
        let members = self.members();
        let mut rounds = lock(&self.rounds);
        let before = rounds.milestones();
        rounds.tick(self.judged(&members, now));
        let (has_changed, next) = (before != rounds.milestones(), rounds.next_look(now));
        drop((members, rounds));
        if has_changed {
            self.round_has_changed();
        }
        next
    }

    /// By when to judge a round: now, unless the clock was not looked at for too long. Who wakes from a standstill before
    /// that look would take the standstill for grace that has passed.
    fn judged(&self, members: &Members, now: Instant) -> Instant {
        members.looked().filter(|looked| clock::has_stood_still(&self.config, *looked, now)).unwrap_or(now)
    }

    /// Who waits in a round does not stall.
    pub(super) fn note_who_waits(&self, members: &mut Members, now: Instant) {
        let rounds = lock(&self.rounds);
        members.wait(|incarnation| rounds.is_waiting(incarnation), now);
    }

    /// The server stood still for so long, which counts for nobody.
    pub(super) fn excuse(&self, standstill: Duration, now: Instant) {
        let mut members = self.members();
        members.excuse(standstill, now);
        lock(&self.rounds).excuse(standstill, now);
        drop(members);
        self.round_has_changed();
    }

    /// Puts what waiting is judged by so far into the past, as if that time had passed without a look at the clock.
    #[cfg(test)]
    pub(super) fn rewind(&self, time: Duration) {
        let mut members = self.members();
        members.rewind(time);
        lock(&self.rounds).rewind(time);
    }

    /// Goes on without those for whose push others wait, and who do nothing though they are heard. `idle`: for how long
    /// nothing has come on a data connection, between two frames.
    pub(super) fn give_up_the_idle(&self, idle: impl Fn(&Arc<Connection>) -> Option<Duration>, now: Instant) {
        let members = self.members();
        let mut rounds = lock(&self.rounds);
        let mut given_up = vec![];
        for (incarnation, patience) in rounds.overdue(self.config.lease.saturating_mul(LEASES_IN_A_ROUND)) {
            let Some((worker, data)) = members.data_of(incarnation) else { continue };
            if idle(&data).is_some_and(|idle| idle >= patience) {
                rounds.give_up(incarnation, now);
                given_up.push((worker, incarnation, patience));
            }
        }
        drop((members, rounds));
        for (worker, incarnation, patience) in &given_up {
            let seconds = patience.as_secs_f64();
            tracing::warn!(
                worker,
                incarnation,
                seconds,
                "a worker is heard, and does nothing in a round that others wait \
                for: they go on without its share"
            );
        }
        if !given_up.is_empty() {
            self.round_has_changed();
        }
    }

    /// For whom others are to wait in rounds if another life goes on from here: who is told that all is over does not come.
    pub(super) fn roster(&self) -> BTreeSet<u32> {
        if self.is_stopping() && self.ending() == Ending::Finished {
            return BTreeSet::new();
        }
        lock(&self.rounds).roster().clone()
    }

    pub(super) fn rounds_status(&self) -> RoundsStatus {
        lock(&self.rounds).status()
    }

    pub(super) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// How it stops.
    pub(super) fn ending(&self) -> Ending {
        if self.restarting.load(Ordering::Relaxed) { Ending::Restarting } else { Ending::Finished }
    }

    /// Begins to stop. Whoever said so first has said how.
    pub(super) fn begin_to_stop(&self, how: Ending) {
        let members = self.members(); // held, so that two do not both come first
        if !self.is_stopping() {
            self.restarting.store(how == Ending::Restarting, Ordering::Relaxed); // ordered by the flag
            self.stopping.send_replace(true);
        }
        drop(members);
        self.notify();
    }

    /// What a worker is told when the server stops.
    pub(super) fn refusal(&self) -> Refused {
        let (code, message) = match self.ending() {
            Ending::Finished => (RefusalCode::Finished, "the server was stopped"),
            Ending::Restarting => (RefusalCode::Restarting, "the server goes away, and will come again"),
        };
        Refused { code, message: message.to_owned(), fatal: true }
    }

    /// The same on the control connection.
    pub(super) fn farewell(&self) -> Event {
        match self.ending() {
            Ending::Finished => Event::Finished { reason: FINISHED_STOPPED.to_owned() },
            Ending::Restarting => Event::Restarting,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed) // a flag that only rises; the members' lock orders what depends on it
    }

    /// Puts the model in place with what has been agreed on.
    pub(super) fn set_model(
        &self,
        snapshot: Snapshot,
        blueprint: Option<String>,
    ) -> Result<&Arc<Model>, ServerError> {
        // Before the lock, which everybody who joins takes: it copies all values.
        let store = ModelSlot::store(&self.config, self.first_term, snapshot, blueprint.as_deref())?;
        let agreement = self.agreement();
        let model = self.model.go_on(&self.config, store, blueprint, agreement.store_spec(), None)?;
        drop(agreement);
        Self::announce(model);
        Ok(model)
    }

    /// Says where checkpoints go, and whether a run begins where another may have been meant to go on.
    pub(super) fn tell_of_checkpoints(&self, has_resumed: bool) {
        let Some(kept) = &self.config.checkpoints else { return };
        let directory = kept.directory.display();
        if kept.resume == Resume::Auto && !has_resumed && self.first_term > FIRST_TERM {
            tracing::warn!(
                %directory,
                "a server was here before, and no checkpoint of it is: a new run begins; resume=\"must\" refuses to"
            );
        }
        tracing::info!(%directory, every = %kept.every, "checkpoints are kept");
    }

    /// Goes on from a checkpoint, with what has been agreed on then.
    pub(super) fn resume(&self, resumed: Resumed) -> Result<(), ServerError> {
        let Resumed { path, run, store, from_terms, workers, roster } = resumed;
        let (term, version) = (store.term(), store.version());
        let at = from_terms.map(|from_terms| ResumedAt { from_terms, term, version });
        let mut agreement = self.agreement();
        agreement.resume(run.agreed)?;
        let blueprint = self.config.blueprint.clone().or(run.blueprint);
        let before = store.run();
        let model = self.model.go_on(&self.config, store, blueprint, agreement.store_spec(), at)?;
        drop(agreement);
        for (id, key, state) in workers {
            self.members().expect(&id, key, state, Instant::now());
        }
        lock(&self.rounds).expect(roster, self.config.lease);
        let path = path.display();
        if self.config.checkpoints.as_ref().is_some_and(|kept| kept.resume == Resume::Must) {
            tracing::info!(checkpoint = %path, version, term, "the server goes on from a checkpoint");
        } else {
            // It may not have been meant.
            tracing::warn!(checkpoint = %path, version, term, "the server goes on from a checkpoint");
        }
        if let (Some(before), Some(now)) = (before, model.store.run()) {
            warn_of_other_settings(&before, &now);
        }
        if self.config.max_samples.is_some_and(|max| model.store.samples() >= max) {
            self.over.store(true, Ordering::Relaxed);
            tracing::warn!(
                max_samples = self.config.max_samples,
                "the run was over before: its samples are used up; to go on, give more max_samples, or none"
            );
        }
        Self::announce(model);
        Ok(())
    }

    fn announce(model: &Arc<Model>) {
        tracing::info!(
            tensors = model.store.table().len(),
            fragments = model.store.layout().fragments.len(),
            transaction = ?model.store.transaction(),
            "the model is in place"
        );
        warn_of_idle_groups(&model.store);
    }

    /// Brings what has been agreed on into force.
    pub(super) fn apply(&self, agreement: &Agreement) {
        if let (Some(model), Some(spec)) = (self.model.get(), agreement.store_spec()) {
            let epoch = |store: &Store| store.run().map(|run| run.epoch);
            let before = epoch(&model.store);
            model.store.configure(spec);
            if epoch(&model.store) != before {
                warn_of_idle_groups(&model.store);
            }
        }
    }

    /// What is in force, as a worker is told; the lock in hand keeps the two parts together.
    pub(super) fn run_config(&self, agreement: &Agreement) -> RunConfig {
        let epoch = self.model.get().and_then(|model| model.store.run()).map_or(0, |run| run.epoch);
        RunConfig { epoch, ..agreement.config().clone() }
    }

    /// Says, once, that stale gradients make one velocity for several workers diverge.
    pub(super) fn warn_of_shared_velocity(&self, agreement: &Agreement) {
        if agreement.shares_velocity()
            && self.members().num_joined() > 1
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "several workers push into one velocity on the server, which stale gradients can make diverge: leave \
                 momentum_correction=False out, and each worker keeps its own"
            );
        }
    }

    /// Looks at a push's end for the run's end, and tells everybody once.
    pub(super) fn after_push(&self, receipt: &Receipt) {
        let Some(max) = self.config.max_samples else { return };
        let Some(model) = self.model.get() else { return };
        let over = receipt.reason == Some(Reason::Budget) || model.store.samples() >= max;
        if over && !self.over.swap(true, Ordering::Relaxed) {
            tracing::info!(max_samples = max, "the run is over: its samples are used up");
            self.members().tell_all(&Event::Finished { reason: FINISHED_BUDGET.to_owned() });
            self.notify();
        }
    }

    /// Makes a connection visible to the watchdog until the guard is dropped.
    pub(super) fn enrol(self: &Arc<Self>, connection: &Arc<Connection>) -> Enrolled {
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed); // only its uniqueness counts
        lock(&self.connections).insert(number, Arc::clone(connection));
        Enrolled { shared: Arc::clone(self), number, thread: connection.thread }
    }

    pub(super) fn connections(&self) -> Vec<(u64, Arc<Connection>)> {
        lock(&self.connections).iter().map(|(&number, connection)| (number, Arc::clone(connection))).collect()
    }

    pub(super) fn num_connections(&self) -> usize {
        lock(&self.connections).len()
    }

    /// The data thread for the next connection: the one with the fewest recent bytes, then connections.
    pub(super) fn least_loaded(&self) -> usize {
        // Relaxed: statistics; a wrong guess costs some balance.
        let load = |l: &Load| (l.recent_bytes.load(Ordering::Relaxed), l.connections.load(Ordering::Relaxed));
        (0..self.loads.len()).min_by_key(|&i| load(&self.loads[i])).unwrap_or(0)
    }

    /// A connection of a worker ended without a goodbye, broken or refused; the worker's other one is ended too.
    pub(super) fn lost(&self, incarnation: u32, cause: &str, ended_one: &Arc<Connection>) {
        let mut members = self.members();
        // Else its worker has come back on another.
        if members.has(incarnation, ended_one) {
            self.lose(members, incarnation, cause, ended_one);
        }
    }

    /// A worker that was about to come back on a connection does not: its loss, if that was held back, is told now.
    pub(super) fn not_back(
        &self,
        (id, incarnation): (&str, u32),
        attempt: Option<Attempt>,
        cause: &str,
        connection: &Arc<Connection>,
    ) {
        let mut members = self.members();
        if members.not_back(id, incarnation, attempt) {
            self.lose(members, incarnation, cause, connection);
        }
    }

    fn lose(
        &self,
        mut members: MutexGuard<'_, Members>,
        incarnation: u32,
        cause: &str,
        ended_one: &Arc<Connection>,
    ) {
        let now = Instant::now();
        let is_dismissed = self.is_stopping();
        let ended = if is_dismissed {
            members.dismissed(incarnation, &self.refusal().message, now)
        } else {
            members.lost(incarnation, cause, now)
        };
        drop(members);
        let Some(ended) = ended else { return };
        let (worker, told) = (&ended.id, &ended.cause);
        if is_dismissed && let Some(tell) = &ended.control {
            // Its session may have seen that the server stops before everybody was told.
            tell.send(self.farewell()).ok(); // its task may just have ended
        }
        if ended.news && is_dismissed {
            let what = self.refusal().message;
            tracing::info!(worker, incarnation, "a worker was told: {what}");
        } else if ended.news && ended.withdrawn {
            tracing::warn!(worker, incarnation, cause = told, "a worker cannot begin");
        } else if ended.news {
            tracing::warn!(worker, incarnation, cause = told, "a worker is lost");
        }
        self.clean_up(&ended, cause, ended_one);
    }

    /// A worker said goodbye.
    pub(super) fn goodbye(&self, incarnation: u32, parting: &Parting) {
        let ended = self.members().goodbye(incarnation, parting, Instant::now());
        let Some(ended) = ended else { return };
        let Ended { id: worker, cause, withdrawn, .. } = &ended;
        match parting {
            _ if *withdrawn => tracing::warn!(worker, incarnation, cause, "a worker cannot begin"),
            Parting::Finished => tracing::info!(worker, incarnation, "a worker has finished"),
            _ => tracing::info!(worker, incarnation, cause, "a worker leaves"),
        }
        if let (Some(key), Some(model)) = (ended.key, self.model.get()) {
            model.store.depart(key, *parting == Parting::Finished);
        }
        self.notify();
    }

    /// A newer process has taken the worker's name.
    pub(super) fn fence(&self, ended: Ended) {
        let detail = format!("worker {:?} was replaced by a newer process with the same worker_id", ended.id);
        tracing::warn!(worker = ended.id, incarnation = ended.incarnation, "a worker is fenced off");
        if let Some(control) = &ended.control {
            // Its task may just have ended.
            control.send(Event::Fenced { detail: detail.clone() }).ok();
        }
        // The control connection ends when it has said so.
        if let Some(data) = &ended.connections.data {
            data.close(RefusalCode::Fenced, &detail, Shutdown::Read);
        }
        self.notify();
    }

    fn clean_up(&self, ended: &Ended, cause: &str, ended_one: &Arc<Connection>) {
        if let (true, Some(key), Some(model)) = (ended.withdrawn, ended.key, self.model.get()) {
            model.store.depart(key, false);
        }
        // The one that has ended is told why by its own task.
        ended.connections.close(RefusalCode::Lost, cause, Some(ended_one));
        self.notify();
    }
}

/// What a server is given comes before what the checkpoint had, but not in silence.
fn warn_of_other_settings(before: &Run, now: &Run) {
    if before.epoch != now.epoch {
        tracing::warn!("the optimizer is not the checkpoint's: what that one remembered is left out");
    }
    let rates = |run: &Run| run.spec.optimizer.groups.iter().map(|group| group.lr).collect::<Vec<_>>();
    if rates(before) != rates(now) {
        tracing::warn!(was = ?rates(before), is = ?rates(now), "the learning rate is not the checkpoint's");
    }
    let (was, is) = (&before.spec, &now.spec);
    warn_of_another("learning rate's schedule", &was.schedule, &is.schedule);
    warn_of_another("staleness bound or policy", &was.staleness, &is.staleness);
    warn_of_another("max_samples", &was.max_samples, &is.max_samples);
}

fn warn_of_another<T: PartialEq + Serialize>(what: &str, was: &T, is: &T) {
    if was == is {
        return;
    }
    // As it is in the manifest.
    let told = |value: &T| serde_json::to_string(value).unwrap_or_else(|error| error.to_string());
    tracing::warn!(was = told(was), is = told(is), "the {what} is not the checkpoint's");
}

/// A connection on the watchdog's list.
pub(super) struct Enrolled {
    shared: Arc<Shared>,
    number: u64,
    thread: Option<usize>,
}

impl Enrolled {
    /// The connection has moved to another data thread.
    pub(super) fn moved(&mut self, connection: &Arc<Connection>) {
        lock(&self.shared.connections).insert(self.number, Arc::clone(connection));
        let loads = &self.shared.loads;
        // Relaxed: statistics.
        if let (Some(from), Some(to)) = (self.thread, connection.thread) {
            loads[from].connections.fetch_sub(1, Ordering::Relaxed);
            loads[to].connections.fetch_add(1, Ordering::Relaxed);
        }
        self.thread = connection.thread;
        self.shared.num_moves.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        lock(&self.shared.connections).remove(&self.number);
        if let Some(thread) = self.thread {
            self.shared.loads[thread].connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Where the tasks of a data thread note their longest turn.
pub(super) struct Meter {
    shared: Arc<Shared>,
    thread: usize,
}

impl Meter {
    pub(super) fn new(shared: &Arc<Shared>, thread: usize) -> Self {
        Self { shared: Arc::clone(shared), thread }
    }
}

impl AsRef<AtomicU64> for Meter {
    fn as_ref(&self) -> &AtomicU64 {
        &self.shared.loads[self.thread].longest_poll_us
    }
}

/// A group whose pattern is no tensor's is a slip as a rule: its values then hold for nothing, in silence.
fn warn_of_idle_groups(store: &Store) {
    let Some(run) = store.run() else { return };
    let example = store.table().tensors().first().map_or("", |tensor| tensor.name.as_str());
    for pattern in run.idle_patterns() {
        tracing::warn!(
            pattern,
            "no tensor is in this group of the optimizer: a pattern is for the whole name, such as {example:?}"
        );
    }
}
