//! A worker comes in: what it says of itself is checked, it becomes a member, and it is told where it stands.

use super::config::MAX_ID_BYTES;
use super::connection::{Connection, Phase};
use super::end::End;
use super::membership::Traffic;
use super::place::Place;
use super::shared::Shared;
use crate::frame::FrameReader;
use crate::handshake;
use offbeat_core::wire::header::MAX_TABLE_BYTES;
use offbeat_core::wire::message::{FINISHED_STOPPED, Join, Joined, RefusalCode, Refused, cut};
use offbeat_core::wire::{Kind, decode};
use std::sync::Arc;
use std::time::Instant;

/// Most pushes a worker may have in flight: as many as the store remembers the answers of.
const MAX_IN_FLIGHT: u32 = 2;
/// How often a worker should say that it is alive, as a part of the lease.
const HEARTBEATS_A_LEASE: u32 = 10;

/// Receives Join, answers Joined.
pub(super) async fn join(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    reader: &mut FrameReader,
) -> Result<(String, u32, Arc<Traffic>), End> {
    let socket = &connection.socket;
    let header = reader.header(socket).await?;
    if header.kind != Kind::Join || header.payload_len > MAX_TABLE_BYTES {
        return Err(End::out_of_place(&header, "Join"));
    }
    let join: Join =
        decode(reader.message(socket, &header).await?).map_err(|e| End::malformed(&header, &e))?;
    check_join(shared, &join).map_err(|refused| End::Refused { request: header.request, refused })?;
    let secret = handshake::random()?;
    let host = if join.host.is_empty() { socket.peer().ip().to_canonical().to_string() } else { join.host };
    let admitted =
        shared.members().join(join.worker_id, host, secret, Arc::clone(connection), Instant::now());
    if let Some(replaced) = admitted.replaced {
        shared.fence(replaced);
    }
    tracing::info!(worker = admitted.id, incarnation = admitted.incarnation, peer = %socket.peer(), "a worker joined");
    shared.notify();
    let joined = async {
        let place = Place::of(shared, &admitted.id, admitted.incarnation, &header)?;
        let run = shared.run_config(&shared.agreement());
        let store = place.as_ref().map(|p| &p.model.store);
        let lease = shared.config.lease;
        let reply = Joined {
            run_id: shared.run_id.clone(),
            worker_id: admitted.id.clone(),
            slot: place.as_ref().map_or(0, |p| p.key.slot),
            incarnation: admitted.incarnation,
            secret,
            term: store.map_or(0, |s| s.term()),
            version: store.map_or(0, |s| s.version()),
            durable_version: 0,
            model: place.as_ref().map(|p| p.model.info()),
            run,
            in_flight: join.in_flight.clamp(1, MAX_IN_FLIGHT),
            heartbeat_ms: millis(lease / HEARTBEATS_A_LEASE),
            lease_ms: millis(lease),
        };
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
    Ok((admitted.id, admitted.incarnation, admitted.traffic))
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn check_join(shared: &Shared, join: &Join) -> Result<(), Refused> {
    let refuse = |code, message| Err(Refused { code, message, fatal: true });
    if shared.is_stopping() {
        return refuse(RefusalCode::Finished, format!("the server is {FINISHED_STOPPED}"));
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
