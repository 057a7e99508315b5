//! A worker that is in, whether it is new or back, and what it is told of where it stands.

use super::end::End;
use super::membership::Traffic;
use super::place::Place;
use super::shared::Shared;
use offbeat_core::wire::Header;
use offbeat_core::wire::message::{Joined, RefusalCode};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Most pushes a worker may have in flight: as many as the store remembers the answers of.
const MAX_IN_FLIGHT: u32 = 2;
/// How often a worker should say that it is alive, as a part of the lease.
const HEARTBEATS_A_LEASE: u32 = 10;

/// A worker that is in.
pub(super) struct Entered {
    pub(super) worker_id: String,
    pub(super) incarnation: u32,
    pub(super) traffic: Arc<Traffic>,
    /// Let go of when the session has ended.
    pub(super) seat: OwnedSemaphorePermit,
    /// The newest version that holds a push of its.
    pub(super) own_version: u64,
    /// Whether it has pushed or pulled before.
    pub(super) has_begun: bool,
}

/// What a worker is told of itself.
pub(super) struct Known<'a> {
    pub(super) worker_id: &'a str,
    pub(super) incarnation: u32,
    pub(super) secret: [u8; 16],
    /// Pushes that it wants in flight.
    pub(super) in_flight: u32,
}

/// Nobody waits for the answer, unless two threads of one process want the same name.
pub(super) fn overtaken(header: &Header, worker_id: &str) -> End {
    let message = format!(
        "a later attempt of the same process to be worker {worker_id:?} was heard first; \
         where two of one process are wanted, give each a worker_id of its own"
    );
    End::refused(header, RefusalCode::Fenced, message)
}

/// Where a worker stands.
pub(super) fn joined(shared: &Shared, known: &Known<'_>, header: &Header) -> Result<Joined, End> {
    let place = Place::of(shared, known.worker_id, known.incarnation, header)?;
    let run = shared.run_config(&shared.agreement());
    let store = place.as_ref().map(|p| &p.model.store);
    let lease = shared.config.lease;
    Ok(Joined {
        run_id: shared.run_id.clone(),
        worker_id: known.worker_id.to_owned(),
        slot: place.as_ref().map_or(0, |p| p.key.slot),
        incarnation: known.incarnation,
        secret: known.secret,
        term: store.map_or(shared.first_term, |s| s.term()),
        version: store.map_or(0, |s| s.version()),
        durable_version: 0,
        model: place.as_ref().map(|p| p.model.info()),
        run,
        in_flight: known.in_flight.clamp(1, MAX_IN_FLIGHT),
        heartbeat_ms: millis(lease / HEARTBEATS_A_LEASE),
        lease_ms: millis(lease),
        keeps_checkpoints: shared.checkpoints.is_some(),
        answers: Vec::new(),
        lost_updates: 0,
    })
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}
