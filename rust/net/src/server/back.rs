//! A worker process is back: its old session ends first, then it is told what has become of its pushes, and goes on as
//! who it was.

use super::connection::{Connection, Phase};
use super::end::{End, or_closed};
use super::joined::{Entered, Known, joined, overtaken};
use super::membership::{Called, Members, NoSeat};
use super::shared::Shared;
use crate::handshake;
use offbeat_core::store::{Claim, NoWayBack, Rejoin, Standing};
use offbeat_core::wire::message::{Back, Join, Joined, RefusalCode};
use offbeat_core::wire::{Header, Kind};
use std::sync::Arc;
use std::time::Instant;

/// Serves a Join that says who it was.
pub(super) async fn rejoin(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    header: &Header,
    join: Join,
    back: Back,
) -> Result<Entered, End> {
    let Some(worker_id) = join.worker_id else {
        return Err(End::refused(header, RefusalCode::Malformed, "one that is back has a worker_id"));
    };
    let Back { claim, secret } = back;
    let incarnation = claim.incarnation;
    connection.enter(Phase::Waiting);
    let fails = |end: End| {
        shared.not_back((&worker_id, incarnation), join.attempt, &end.cause(connection), connection);
        end
    };
    let (seat, seated, standing) = 'seated: loop {
        let called = shared.members().call_back(&worker_id, incarnation, &secret, join.attempt);
        let Called { seat, connections } = called.map_err(|no| no_seat(header, &worker_id, no))?;
        if let Some(connections) = connections {
            connections.cut(RefusalCode::Lost, "its worker came back on another connection");
        }
        let permit = or_closed(connection, Arc::clone(&seat).acquire_owned()).await.map_err(fails)?;
        let permit = permit.expect("a seat is never closed");
        let busy = 'busy: {
            let mut members = shared.members();
            if !members.is_seat(&worker_id, incarnation, &seat, join.attempt) {
                continue 'seated; // somebody else was faster, or it has tried again
            }
            let standing = match settle(shared, &members, &worker_id, &claim) {
                Err(no) => {
                    drop(members);
                    return Err(fails(no_way(header, &no)));
                }
                Ok(Some(Rejoin::Busy(told))) => break 'busy told,
                Ok(Some(Rejoin::Back(standing))) => Some(standing),
                Ok(None) => None,
            };
            let who = (incarnation, standing.as_ref().map(|standing| standing.key));
            let from = (join.host, join.attempt, secret);
            let seated = members.seat(&worker_id, who, &seat, from, connection, Instant::now());
            break 'seated (permit, seated, standing);
        };
        // An error says that it has ended, too.
        or_closed(connection, busy).await.map_err(fails)?.ok();
    };
    if let Some(replaced) = seated.replaced {
        shared.fence(replaced);
    }
    let (has_begun, own_version) = standing.as_ref().map_or((false, 0), |s| (true, s.own_version));
    let (answers, lost_updates) = standing.map_or_else(Default::default, |s| (s.answers, s.lost_updates));
    let peer = connection.socket.peer();
    if lost_updates > 0 {
        tracing::warn!(worker = worker_id, incarnation, %peer, lost_updates, "a worker is back that had been told of updates \
            which the checkpoint did not have");
    } else {
        tracing::info!(worker = worker_id, incarnation, %peer, "a worker is back");
    }
    shared.notify();
    let told = async {
        let known = Known { worker_id: &worker_id, incarnation, secret, in_flight: join.in_flight };
        let reply = Joined { answers, lost_updates, ..joined(shared, &known, header)? };
        connection.enter(Phase::Sending);
        handshake::send(&connection.socket, Kind::Joined, header.request, &reply).await?;
        Ok::<_, End>(())
    };
    if let Err(end) = told.await {
        shared.lost(incarnation, &end.cause(connection), connection);
        return Err(end);
    }
    Ok(Entered { worker_id, incarnation, traffic: seated.traffic, seat, own_version, has_begun })
}

/// The store's part, under the members' lock; `None` where there is no model yet.
fn settle(
    shared: &Shared,
    members: &Members,
    worker_id: &str,
    claim: &Claim,
) -> Result<Option<Rejoin>, NoWayBack> {
    let Some(model) = shared.model.get() else {
        // No life of this server's has a model that was pushed to: the one that had was never kept.
        return if claim.has_pushed() { Err(NoWayBack::forgotten(worker_id, claim)) } else { Ok(None) };
    };
    let rejoin = model.store.rejoin(worker_id, claim)?;
    if let Rejoin::Back(Standing { key, .. }) = &rejoin {
        let silence = members.silence(worker_id, claim.incarnation, Instant::now());
        if silence.is_some_and(|silence| silence >= shared.config.lease) {
            // Whatever it had read before it fell silent is too old.
            model.store.lost(*key);
        }
    }
    Ok(Some(rejoin))
}

fn no_seat(header: &Header, worker_id: &str, no: NoSeat) -> End {
    match no {
        NoSeat::Overtaken => overtaken(header, worker_id),
        NoSeat::Replaced => {
            let message = format!("a newer process has the name {worker_id:?}");
            End::refused(header, RefusalCode::Fenced, message)
        }
        NoSeat::Gone => {
            let message =
                format!("worker {worker_id:?} has said goodbye, and cannot go on after that; start it again");
            End::refused(header, RefusalCode::State, message)
        }
        NoSeat::Unknown => {
            let message = format!(
                "this server knows nothing of worker {worker_id:?} as it was: it has not gone on from a checkpoint of \
                 that run, or has forgotten it; start the worker again"
            );
            End::refused(header, RefusalCode::Forgotten, message)
        }
    }
}

fn no_way(header: &Header, no: &NoWayBack) -> End {
    let code = match no {
        NoWayBack::Fenced { .. } => RefusalCode::Fenced,
        NoWayBack::Forgotten { .. } => RefusalCode::Forgotten,
        NoWayBack::Impossible { .. } => RefusalCode::Malformed,
        NoWayBack::Full(_) => RefusalCode::Full,
    };
    End::refused(header, code, no.to_string())
}
