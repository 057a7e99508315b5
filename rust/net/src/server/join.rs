//! A worker comes in: what it says of itself is checked, it becomes a member or is the one that it was ([`back`]), and it
//! is told where it stands.

use super::back;
use super::config::MAX_ID_BYTES;
use super::connection::{Connection, Phase};
use super::end::End;
use super::membership::Traffic;
use super::place::Place;
use super::shared::Shared;
use crate::frame::FrameReader;
use crate::handshake;
use offbeat_core::wire::header::MAX_TABLE_BYTES;
use offbeat_core::wire::message::{Join, Joined, RefusalCode, Refused, cut};
use offbeat_core::wire::{Header, Kind, decode};
use std::sync::Arc;
use std::time::Instant;
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

/// Receives Join, answers Joined.
pub(super) async fn join(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    reader: &mut FrameReader,
) -> Result<Entered, End> {
    let socket = &connection.socket;
    let header = reader.header(socket).await?;
    if header.kind != Kind::Join || header.payload_len > MAX_TABLE_BYTES {
        return Err(End::out_of_place(&header, "Join"));
    }
    let mut join: Join =
        decode(reader.message(socket, &header).await?).map_err(|e| End::malformed(&header, &e))?;
    check_join(shared, &join).map_err(|refused| End::Refused { request: header.request, refused })?;
    if join.host.is_empty() {
        join.host = socket.peer().ip().to_canonical().to_string();
    }
    if let Some(back) = join.back.take() {
        return back::rejoin(shared, connection, &header, join, back).await;
    }
    let (secret, from) = (handshake::random()?, (join.host, join.attempt));
    let admitted = {
        let mut members = shared.members();
        if let Some(id) = join.worker_id.as_deref().filter(|id| members.is_overtaken(id, join.attempt)) {
            return Err(overtaken(&header, id));
        }
        members.join(join.worker_id, from, secret, Arc::clone(connection), Instant::now())
    };
    let seat = admitted.seat.try_acquire_owned().expect("nobody else knows of a new member's seat yet");
    if let Some(replaced) = admitted.replaced {
        shared.fence(replaced);
    }
    tracing::info!(worker = admitted.id, incarnation = admitted.incarnation, peer = %socket.peer(), "a worker joined");
    shared.notify();
    let joined = async {
        let known = Known {
            worker_id: &admitted.id,
            incarnation: admitted.incarnation,
            secret,
            in_flight: join.in_flight,
        };
        let reply = joined(shared, &known, &header)?;
        connection.enter(Phase::Sending);
        handshake::send(socket, Kind::Joined, header.request, &reply).await?;
        Ok::<_, End>(())
    };
    if let Err(end) = joined.await {
        if admitted.newcomer && matches!(end, End::Refused { .. }) {
            shared.members().withdraw(admitted.incarnation);
            shared.notify();
        } else {
            shared.lost(admitted.incarnation, &end.cause(connection), connection);
        }
        return Err(end);
    }
    Ok(Entered {
        worker_id: admitted.id,
        incarnation: admitted.incarnation,
        traffic: admitted.traffic,
        seat,
        own_version: 0,
        has_begun: false,
    })
}

/// Nobody waits for the answer, unless two threads of one process want the same name.
pub(super) fn overtaken(header: &Header, worker_id: &str) -> End {
    let message = format!("a later attempt of the same process to be worker {worker_id:?} was heard first");
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
        term: store.map_or(0, |s| s.term()),
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

fn check_join(shared: &Shared, join: &Join) -> Result<(), Refused> {
    let refuse = |code, message| Err(Refused { code, message, fatal: true });
    if shared.is_stopping() {
        return Err(shared.refusal());
    }
    if let Some(run_id) = join.run_id.as_ref().filter(|id| **id != shared.run_id) {
        let wanted = cut(run_id, MAX_ID_BYTES);
        let message = format!("this server holds run {:?}, the worker wants {wanted:?}", shared.run_id);
        return refuse(RefusalCode::RunId, message);
    }
    if let Some(id) = &join.worker_id
        && (id.is_empty() || id.len() > MAX_ID_BYTES || id.chars().any(char::is_control))
    {
        let id = cut(id, MAX_ID_BYTES);
        return refuse(
            RefusalCode::Malformed,
            format!("worker_id {id:?} is not 1 to {MAX_ID_BYTES} bytes of printable text"),
        );
    }
    if join.host.len() > MAX_ID_BYTES || join.host.chars().any(char::is_control) {
        let host = cut(&join.host, MAX_ID_BYTES);
        let message = format!("host {host:?} is not at most {MAX_ID_BYTES} bytes of printable text");
        return refuse(RefusalCode::Malformed, message);
    }
    if let (Some(model), Some(table)) = (shared.model.get(), &join.table)
        && let Some(difference) = model.store.table().first_difference(table)
    {
        return refuse(
            RefusalCode::ModelMismatch,
            format!("this worker's model is not the server's: {difference}"),
        );
    }
    Ok(())
}
