//! The server's status: one JSON document for `server.status()`, `offbeat status` and the demo.

use super::checkpoints::CheckpointStatus;
use super::end::End;
use super::membership::{Departure, Member, Members, State};
use super::rounds::RoundsStatus;
use super::shared::Shared;
use crate::describe::{OptimizerTold, ScheduleTold};
use offbeat_core::spec::{Contribution, StalenessSpec, Transaction};
use offbeat_core::store::{StoreStatus, Tally, TicketCounts};
use offbeat_core::wire::Header;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::task::spawn_blocking;

#[derive(Serialize)]
struct Status<'a> {
    address: String,
    run_id: &'a str,
    /// `waiting_for_model`, `running`, `finished` (its samples are used up) or `stopped`.
    state: &'static str,
    uptime_s: f64,
    term: u64,
    version: u64,
    samples: u64,
    max_samples: Option<u64>,
    transaction: Transaction,
    contribution: Option<Contribution>,
    optimizer: Option<OptimizerTold<'a>>,
    momentum_correction: bool,
    staleness: &'a StalenessSpec,
    schedule: ScheduleTold,
    workers: Vec<Worker>,
    departures: Vec<DepartureStatus>,
    tickets: TicketCounts,
    rounds: RoundsStatus,
    /// Of which workers had been told, and which the checkpoint that was gone on from did not have.
    lost_updates: u64,
    rejected: BTreeMap<String, u64>,
    duplicates: u64,
    /// Pushes that broke off before they had come whole, in this life of the server.
    cut_short: u64,
    memory: Memory,
    checkpoints: Option<CheckpointStatus>,
    connections: usize,
    /// Of them, the workers' data connections: one number a data thread.
    connections_by_thread: Vec<usize>,
    /// How often one has gone to another data thread.
    moved_connections: u64,
    num_data_threads: usize,
    longest_poll_ms: f64,
}

#[derive(Serialize)]
struct Worker {
    id: String,
    state: State,
    cause: Option<String>,
    host: String,
    incarnation: u32,
    /// Which of the data threads serves it now.
    data_thread: Option<usize>,
    samples: u64,
    samples_per_s: f64,
    pushes: u64,
    applied: u64,
    damped: u64,
    rejected: BTreeMap<String, u64>,
    duplicates: u64,
    mean_staleness: f64,
    max_staleness: u64,
    /// Pushes by staleness, 0 to 63; the last entry holds all above.
    staleness_histogram: Vec<u64>,
    last_push_age_s: Option<f64>,
    bytes_received: u64,
    bytes_sent: u64,
}

#[derive(Serialize)]
struct DepartureStatus {
    #[serde(flatten)]
    departure: Departure,
    age_s: f64,
}

/// Resident memory of the model and its traffic: total = roots + ledgers + pinned + idle + staging.
#[derive(Default, Serialize)]
struct Memory {
    formula: &'static str,
    total_bytes: u64,
    /// The newest parameters, buffers and optimizer state.
    roots_bytes: u64,
    /// Who has pushed what: 16 bytes in each fragment for each place of a worker.
    ledgers_bytes: u64,
    /// What only older versions hold, which pulls under way keep alive: what they share with the newest is in the roots.
    pinned_bytes: u64,
    /// Recycled memory that waits for its next use.
    idle_bytes: u64,
    /// Reserved for pushes that are staged whole, and the most that may be.
    staging_bytes: u64,
    staging_budget_bytes: u64,
    live_versions: usize,
}

/// The status as JSON, made where nobody waits for the thread: with many workers it takes its time.
pub(super) async fn told(shared: &Arc<Shared>, header: &Header) -> Result<String, End> {
    let shared = Arc::clone(shared);
    spawn_blocking(move || json(&shared)).await.map_err(|e| End::lost_inside(header, "the status", &e))
}

/// The status as JSON.
pub(super) fn json(shared: &Shared) -> String {
    let model = shared.model.get();
    let store = model.map(|m| m.store.status());
    let agreement = shared.agreement().clone();
    let config = agreement.config();
    let (version, samples) = store.as_ref().map_or((0, 0), |s| (s.version, s.samples));
    let optimizer = config.optimizer.as_ref();
    let state = match (shared.is_stopping(), shared.is_over(), model) {
        (true, ..) => "stopped",
        (_, true, _) => "finished",
        (_, _, None) => "waiting_for_model",
        _ => "running",
    };
    let totals = store.as_ref().map(|s| s.totals.clone()).unwrap_or_default();
    let now = Instant::now();
    let (workers, departures) = {
        // Held for both: whoever goes in between would be told of as there and as gone.
        let members = shared.members();
        (workers(shared, &members, store.as_ref(), now), departures(&members, now))
    };
    let status = Status {
        address: shared.address.to_string(),
        run_id: &shared.run_id,
        state,
        uptime_s: now.duration_since(shared.started).as_secs_f64(),
        term: store.as_ref().map_or(0, |s| s.term),
        version,
        samples,
        max_samples: config.max_samples,
        transaction: config.transaction,
        contribution: config.contribution,
        optimizer: optimizer.map(|spec| OptimizerTold::of(spec, config.contribution)),
        momentum_correction: config.momentum_correction,
        staleness: &config.staleness,
        schedule: ScheduleTold::at(config.schedule, optimizer, version, samples),
        workers,
        departures,
        tickets: store.as_ref().map(|s| s.tickets.clone()).unwrap_or_default(),
        rounds: shared.rounds_status(),
        lost_updates: store.as_ref().map_or(0, |s| s.lost_updates),
        rejected: totals.rejected,
        duplicates: totals.duplicates,
        // Relaxed: a statistic.
        cut_short: shared.cut_short.load(Ordering::Relaxed),
        memory: memory(shared, store.as_ref()),
        checkpoints: shared.checkpoints.as_ref().map(|checkpoints| checkpoints.status(now)),
        connections: shared.num_connections(),
        // Relaxed: statistics.
        connections_by_thread: shared.loads.iter().map(|l| l.connections.load(Ordering::Relaxed)).collect(),
        moved_connections: shared.num_moves.load(Ordering::Relaxed),
        num_data_threads: shared.loads.len(),
        longest_poll_ms: shared
            .loads
            .iter()
            .map(|l| l.longest_poll_us.load(Ordering::Relaxed))
            .max()
            .unwrap_or(0) as f64
            / 1e3,
    };
    serde_json::to_string(&status).expect("every key is a string")
}

fn workers(shared: &Shared, members: &Members, store: Option<&StoreStatus>, now: Instant) -> Vec<Worker> {
    let none = Tally::default();
    let known = store.into_iter().flat_map(|s| &s.workers);
    let tallies: HashMap<&str, &Tally> = known.map(|(name, _, tally)| (name.as_str(), tally)).collect();
    let worker = |(id, member): (&String, &Member)| {
        let tally = *tallies.get(id.as_str()).unwrap_or(&&none);
        let traffic = &member.traffic;
        // Relaxed: statistics.
        let last_push_ms = Some(traffic.last_push_ms.load(Ordering::Relaxed)).filter(|&ms| ms > 0);
        let up = now.duration_since(shared.started).as_secs_f64();
        Worker {
            id: id.clone(),
            state: member.state,
            cause: member.cause.clone(),
            host: member.host.clone(),
            incarnation: member.incarnation,
            data_thread: member.thread(),
            samples: tally.samples,
            samples_per_s: member.rate(),
            pushes: tally.pushes,
            applied: tally.applied,
            damped: tally.damped,
            rejected: tally.rejected.clone(),
            duplicates: tally.duplicates,
            mean_staleness: if tally.applied > 0 {
                tally.staleness_sum as f64 / tally.applied as f64
            } else {
                0.0
            },
            max_staleness: tally.staleness_max,
            staleness_histogram: tally.staleness_histogram.clone(),
            last_push_age_s: last_push_ms.map(|ms| (up - ms as f64 / 1e3).max(0.0)),
            bytes_received: traffic.received.load(Ordering::Relaxed),
            bytes_sent: traffic.sent.load(Ordering::Relaxed),
        }
    };
    members.iter().map(worker).collect()
}

fn departures(members: &Members, now: Instant) -> Vec<DepartureStatus> {
    let age = |departure: &Departure| DepartureStatus {
        age_s: now.saturating_duration_since(departure.at).as_secs_f64(),
        departure: departure.clone(),
    };
    members.departures().map(age).collect()
}

fn memory(shared: &Shared, store: Option<&StoreStatus>) -> Memory {
    let (Some(model), Some(store)) = (shared.model.get(), store) else { return Memory::default() };
    let (roots, ledgers) = (store.root_bytes as u64, store.ledger_bytes as u64);
    let pinned = store.pinned_bytes as u64;
    let (idle, staging) = (store.idle_bytes as u64, model.staging.reserved());
    Memory {
        formula: "roots + ledgers + pinned + idle + staging",
        total_bytes: roots + ledgers + pinned + idle + staging,
        roots_bytes: roots,
        ledgers_bytes: ledgers,
        pinned_bytes: pinned,
        idle_bytes: idle,
        staging_bytes: staging,
        staging_budget_bytes: if store_is_staged(model.store.transaction()) {
            model.staging.budget
        } else {
            0
        },
        live_versions: store.live_versions,
    }
}

const fn store_is_staged(transaction: Transaction) -> bool {
    matches!(transaction, Transaction::Model)
}
