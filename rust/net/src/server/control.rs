//! What comes to the control thread: it takes connections, opens the door for those that prove themselves, hears the
//! workers' heartbeats, and answers status.

use super::attend;
use super::connection::{Connection, Phase};
use super::door::{Door, Place};
use super::end::End;
use super::membership::Attached;
use super::poll;
use super::shared::{Meter, Shared, is_true};
use super::strangers::{Cause, Telling};
use crate::fork::ClosedInChildren;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::{self, frame_refusal, refuse};
use crate::limits::explained;
use offbeat_core::wire::header::MAX_HANDSHAKE_BYTES;
use offbeat_core::wire::message::{
    Attach, Call, Event, FINISHED_BUDGET, Heartbeat, Purpose, RefusalCode, Refused, Reply,
};
use offbeat_core::wire::{Header, Kind, decode};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// A pause after the operating system had no descriptor for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Takes connections, once the server serves, until it stops.
pub(super) async fn accept(
    shared: Arc<Shared>,
    listener: ClosedInChildren<std::net::TcpListener>,
    data: Vec<Handle>,
) {
    let listener = match listener.try_map(TcpListener::from_std) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "the listening socket cannot be used");
            return;
        }
    };
    is_true(&shared.serving).await;
    let data: Arc<[Handle]> = data.into();
    let mut door = Door::new(shared.config.max_pending);
    let mut is_told = false;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                is_told = false;
                match Socket::of(ClosedInChildren::new(stream)) {
                    Ok(socket) => {
                        let place = door.enter().await;
                        tokio::spawn(open(Arc::clone(&shared), Arc::clone(&data), socket, place));
                    }
                    Err(error) => {
                        tracing::debug!(%peer, %error, "a connection was gone before it was opened");
                    }
                }
            }
            Err(error) => {
                // Once: it is tried again, and may be so for long.
                if !std::mem::replace(&mut is_told, true) {
                    let error = explained(&error);
                    tracing::warn!(
                        error,
                        "connections cannot be taken; a worker needs two, and waits until then"
                    );
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Lets one connection prove itself, then serves it or hands it on.
async fn open(shared: Arc<Shared>, data: Arc<[Handle]>, socket: Socket, mut place: Place) {
    let mut reader = FrameReader::default();
    let peer = socket.peer();
    let handshake = handshake::admit(&socket, &mut reader, shared.config.token.as_deref());
    let proved = tokio::select! {
        biased;
        proved = timeout(shared.config.handshake_timeout, handshake) => match proved {
            Ok(Ok(purpose)) => Ok(purpose),
            Ok(Err(error)) => Err((Cause::of(&error), error.to_string())),
            Err(_) => Err((Cause::Unproved, "it did not prove itself in time".to_owned())),
        },
        () = place.wanted() => {
            Err((Cause::Unproved, "it had not proved itself when another needed its place".to_owned()))
        }
    };
    let purpose = match proved {
        Ok(purpose) => purpose,
        Err((cause, error)) => {
            drop(socket); // before its place is given to another
            let telling = shared.strangers().came(cause, Instant::now());
            match telling {
                Telling::Told => tracing::warn!(%peer, error, "a connection did not get in"),
                Telling::Last => tracing::warn!(
                    %peer,
                    error,
                    "a connection did not get in; more of its kind are counted, and told in a minute at the latest"
                ),
                Telling::Counted => {}
            }
            return;
        }
    };
    drop(place);
    let Ok(admitted) = Arc::clone(&shared.admitted).try_acquire_owned() else {
        let message = format!("the server has its {} connections already", shared.config.max_connections);
        tracing::warn!(%peer, message);
        refuse(&socket, 0, Refused { code: RefusalCode::Full, message, fatal: true }).await;
        return;
    };
    match purpose {
        Purpose::Data => {
            let thread = shared.least_loaded();
            match socket.into_moving() {
                Ok(stream) => {
                    shared.loads[thread].connections.fetch_add(1, Ordering::Relaxed); // a statistic
                    let task = attend::serve(
                        Arc::clone(&shared),
                        Arc::clone(&data),
                        thread,
                        stream,
                        reader,
                        admitted,
                    );
                    data[thread].spawn(poll::timed(Meter::new(&shared, thread), task));
                }
                Err(error) => tracing::debug!(%peer, %error, "a connection could not be handed on"),
            }
        }
        Purpose::Control | Purpose::Status => {
            let connection = Arc::new(Connection::new(socket, None));
            let _enrolled = shared.enrol(&connection);
            let served = match purpose {
                Purpose::Control => control(&shared, &connection, &mut reader).await,
                _ => status(&shared, &connection, &mut reader).await,
            };
            if let Err(end) = served {
                let refused = match (connection.end(), end) {
                    (Some((code, message)), _) => Some(Refused { code, message, fatal: true }),
                    (None, End::Refused { refused, .. }) => Some(refused),
                    (None, End::Frame(error)) => frame_refusal(&error),
                };
                if let Some(refused) = refused {
                    refuse(&connection.socket, 0, refused).await;
                }
            }
            drop(admitted);
        }
    }
}

/// Serves a worker's control connection to its end.
async fn control(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    reader: &mut FrameReader,
) -> Result<(), End> {
    let socket = &connection.socket;
    let header = reader.header(socket).await?;
    if header.kind != Kind::Attach || header.payload_len > MAX_HANDSHAKE_BYTES {
        return Err(End::out_of_place(&header, "Attach"));
    }
    let attach: Attach =
        decode(reader.message(socket, &header).await?).map_err(|e| End::malformed(&header, &e))?;
    let (tell, mut told) = mpsc::unbounded_channel();
    let attached = {
        let mut members = shared.members(); // who is told of the run's end is in it, or looks for it after that
        if shared.is_over() {
            // The receiver is in our hands.
            tell.send(Event::Finished { reason: FINISHED_BUDGET.to_owned() }).ok();
        }
        let control = (tell, Arc::clone(connection));
        members.attach(attach.incarnation, &attach.secret, control, Instant::now())
    };
    let Some(Attached { id: worker, back }) = attached else {
        return Err(End::refused(&header, RefusalCode::State, "there is no such session (any more)"));
    };
    if back {
        tracing::info!(worker, incarnation = attach.incarnation, "a worker that was lost is heard again");
        shared.notify();
    }
    socket.write_frame(&Header { request: header.request, ..Header::new(Kind::Attached) }, &[]).await?;
    let ended = converse(shared, connection, reader, &mut told, attach.incarnation).await;
    if let Err(end) = &ended {
        let cause = match (connection.end(), end) {
            (Some((_, cause)), _) => cause,
            (None, End::Frame(FrameError::Closed { .. })) => {
                "the peer closed the control connection".to_owned()
            }
            (None, End::Frame(error)) => format!("the control connection broke: {error}"),
            (None, End::Refused { refused, .. }) => format!("the control connection was refused: {refused}"),
        };
        shared.lost(attach.incarnation, &cause, connection);
    }
    ended
}

async fn converse(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    reader: &mut FrameReader,
    told: &mut mpsc::UnboundedReceiver<Event>,
    incarnation: u32,
) -> Result<(), End> {
    let socket = &connection.socket;
    loop {
        connection.idle(reader.buffered());
        let header = tokio::select! {
            biased;
            event = told.recv() => {
                // A member that ends lets go of its sender.
                let Some(event) = event else { return Ok(()) };
                handshake::send(socket, Kind::Event, 0, &event).await?;
                continue;
            }
            header = reader.header(socket) => header?,
        };
        if header.kind != Kind::Heartbeat || header.payload_len > MAX_HANDSHAKE_BYTES {
            return Err(End::out_of_place(&header, "Heartbeat"));
        }
        let heartbeat: Heartbeat =
            decode(reader.message(socket, &header).await?).map_err(|e| End::malformed(&header, &e))?;
        let back = shared.members().heard(incarnation, heartbeat.progress, Instant::now());
        if let Some(worker) = back {
            tracing::info!(worker, incarnation, "a worker that was lost is heard again");
            shared.notify();
        }
    }
}

/// Serves a connection that only asks how things are.
async fn status(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    reader: &mut FrameReader,
) -> Result<(), End> {
    let socket = &connection.socket;
    loop {
        connection.idle(reader.buffered());
        let header = tokio::select! {
            biased;
            () = is_true(&shared.stopping) => {
                return Err(End::Refused { request: 0, refused: shared.refusal() });
            }
            header = reader.header(socket) => header?,
        };
        if header.kind != Kind::Call || header.payload_len > MAX_HANDSHAKE_BYTES {
            return Err(End::out_of_place(&header, "a Call for status"));
        }
        let call: Call =
            decode(reader.message(socket, &header).await?).map_err(|e| End::malformed(&header, &e))?;
        if call != Call::Status {
            return Err(End::refused(&header, RefusalCode::State, "this connection may ask for status only"));
        }
        connection.enter(Phase::Waiting);
        let reply = Reply::Status { json: super::status::told(shared, &header).await? };
        connection.enter(Phase::Sending);
        handshake::send(socket, Kind::Reply, header.request, &reply).await?;
    }
}
