//! A worker comes in: what it says of itself is checked, it becomes a member or is the one that it was ([`back`]), and it
//! is told where it stands.

use super::back;
use super::config::MAX_ID_BYTES;
use super::connection::{Connection, Phase};
use super::end::End;
use super::joined::{Entered, Known, joined, overtaken};
use super::shared::Shared;
use crate::frame::FrameReader;
use crate::handshake;
use offbeat_core::wire::header::MAX_TABLE_BYTES;
use offbeat_core::wire::message::{Join, RefusalCode, Refused, cut, is_printable};
use offbeat_core::wire::{Header, Kind, decode};
use std::sync::Arc;
use std::time::Instant;
use tokio::task::spawn_blocking;

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
    let admitted = loop {
        let last = {
            let mut members = shared.members();
            if let Some(id) = join.worker_id.as_deref().filter(|id| members.is_overtaken(id, join.attempt)) {
                return Err(overtaken(&header, id));
            }
            match members.last_if_all_are_given() {
                None => {
                    let connection = Arc::clone(connection);
                    break members.join(join.worker_id, from, secret, connection, Instant::now());
                }
                Some(last) => last,
            }
        };
        connection.enter(Phase::Waiting);
        reserve_incarnations(shared, last, &header).await?;
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
        if admitted.is_new_name && matches!(end, End::Refused { .. }) {
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

/// Gets more incarnations, on the disk before the first of them is given.
async fn reserve_incarnations(shared: &Arc<Shared>, last: u32, header: &Header) -> Result<(), End> {
    let all = Arc::clone(shared);
    let reserved = spawn_blocking(move || {
        let more = all.checkpoints.as_ref().map(|checkpoints| checkpoints.reserve_incarnations(last));
        more.map(|more| more.map(|last| all.members().reserved(last)))
    });
    let refused = |why: String| {
        let message =
            format!("no room can be reserved for another process: {why}; start the worker again then");
        End::refused(header, RefusalCode::Full, message)
    };
    match reserved.await.map_err(|e| End::lost_inside(header, "the incarnations", &e))? {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(refused(error.to_string())),
        None => Err(refused(format!(
            "there is none after incarnation {last}, so that the server has to be started again"
        ))),
    }
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
        && (id.is_empty() || !is_printable(id, MAX_ID_BYTES))
    {
        let id = cut(id, MAX_ID_BYTES);
        return refuse(
            RefusalCode::Malformed,
            format!("worker_id {id:?} is not 1 to {MAX_ID_BYTES} bytes of printable text"),
        );
    }
    if !is_printable(&join.host, MAX_ID_BYTES) {
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
