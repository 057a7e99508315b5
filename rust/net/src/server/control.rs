//! The control thread: it takes connections, opens the door for those that prove themselves, hears the workers'
//! heartbeats, answers status, and looks at the clock for everybody.

use super::attend;
use super::balance::{Balance, Served};
use super::config::Ending;
use super::connection::{Answer, Connection, Phase, Watch};
use super::door::{Door, Place};
use super::end::End;
use super::membership::{Attached, Forgotten, Ticked};
use super::poll;
use super::shared::{Meter, Shared, is_true};
use crate::fork::ClosedInChildren;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::{self, frame_refusal, refuse};
use crate::limits::explained;
use offbeat_core::wire::header::MAX_HANDSHAKE_BYTES;
use offbeat_core::wire::message::{
    Attach, Call, Event, FINISHED_BUDGET, FINISHED_STOPPED, Heartbeat, Purpose, RefusalCode, Refused, Reply,
};
use offbeat_core::wire::{Header, Kind, decode};
use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// The longest time between two looks at the clock.
const MAX_TICK: Duration = Duration::from_millis(250);
/// Looks per timeout, so that it is noticed soon after it has passed.
const LOOKS: u32 = 8;
/// So many looks late, half of the shortest timeout, and the server itself stood still.
const LOOKS_MISSED: u32 = LOOKS / 2;
/// A stopping server waits so long for pushes that are under way, in all and while nothing of one moves that should.
const DRAIN: Duration = Duration::from_secs(10);
const DRAIN_PROGRESS: Duration = Duration::from_secs(1);
/// Between two looks at them.
const DRAIN_LOOK: Duration = Duration::from_millis(2);
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
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it did not prove itself in time".to_owned()),
        },
        () = place.wanted() => Err("it had not proved itself when another needed its place".to_owned()),
    };
    let purpose = match proved {
        Ok(purpose) => purpose,
        Err(error) => {
            drop(socket); // before its place is given to another
            if shared.strangers().tells(Instant::now()) {
                tracing::warn!(%peer, error, "a connection did not get in");
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

/// Looks at the clock until the server stops.
pub(super) async fn tick(shared: Arc<Shared>) {
    let config = &shared.config;
    let shortest = config.lease.min(config.progress_timeout) / LOOKS;
    let period = shortest.clamp(Duration::from_millis(1), MAX_TICK);
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watches: HashMap<u64, Watch> = HashMap::new();
    let mut balance = Balance::default();
    let mut looked = Instant::now();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let standstill = standstill(looked, now, period);
        looked = now;
        if !standstill.is_zero() {
            tracing::warn!(seconds = standstill.as_secs_f64(), "the server itself stood still");
            shared.members().excuse(standstill, now);
        }
        let connections = shared.connections();
        watch(&shared, &connections, &mut watches, standstill, now);
        spread(&shared, &connections, &watches, &mut balance);
        let untold = shared.strangers().untold(now);
        if let Some(connections) = untold {
            tracing::warn!(connections, "more connections did not get in");
        }
        let mut members = shared.members();
        let Ticked { lost, stalled, forgotten } = members.tick(config.lease, config.rejoin_grace, now);
        if let Some(model) = shared.model.get() {
            // Under the members' lock: one that comes back meanwhile comes after it.
            lost.iter().filter_map(|(.., key, _)| *key).for_each(|key| model.store.lost(key));
            forgotten.iter().filter_map(|f| f.key).for_each(|key| model.store.depart(key, false));
        }
        drop(members);
        for (worker, incarnation, _, cause) in &lost {
            tracing::warn!(worker, incarnation, cause, "a worker is lost");
        }
        for worker in stalled {
            tracing::warn!(worker, "a worker is alive but makes no progress");
        }
        for Forgotten { connections, .. } in forgotten {
            connections.close(RefusalCode::Timeout, "the worker was not heard of for too long", None);
        }
        if !lost.is_empty() {
            shared.notify();
        }
    }
}

/// How long nothing was looked at, where that was too long, else no time: the process was stopped, its machine moved.
/// What workers said meanwhile has not been read yet, so that this time is taken out of every judgement.
fn standstill(looked: Instant, now: Instant, period: Duration) -> Duration {
    let gap = now.saturating_duration_since(looked);
    if gap > period * LOOKS_MISSED { gap } else { Duration::ZERO }
}

/// Closes the connections on which nothing moves that should, and measures how busy each data thread is.
fn watch(
    shared: &Shared,
    connections: &[(u64, Arc<Connection>)],
    watches: &mut HashMap<u64, Watch>,
    standstill: Duration,
    now: Instant,
) {
    let mut moved = vec![0_u64; shared.loads.len()];
    watches.retain(|number, _| connections.binary_search_by_key(number, |(n, _)| *n).is_ok());
    for (number, connection) in connections {
        let watch = watches.entry(*number).or_insert_with(|| Watch::new(connection, now));
        watch.excuse(standstill, now);
        let (bytes, slow) = watch.look(connection, now, shared.config.progress_timeout);
        if let Some(thread) = connection.thread {
            moved[thread] += bytes;
        }
        let Some(slow) = slow else { continue };
        match connection.sending() {
            // One that is frozen is not heard, and so not present for long.
            Some(Answer::Exchange { pinned }) if shared.members().is_present(connection) => {
                if let (Some(pinned), Some(model)) = (pinned, shared.model.get()) {
                    model.store.discount(pinned);
                }
            }
            // What was sent may have been taken since the look, and its connection be another one's elsewhere.
            _ if slow.holds(connection) => connection.close(RefusalCode::Timeout, &slow.cause, slow.how),
            _ => {}
        }
    }
    for (load, moved) in shared.loads.iter().zip(moved) {
        // Relaxed: a statistic, written here only.
        let recent = load.recent_bytes.load(Ordering::Relaxed);
        load.recent_bytes.store(recent / 2 + moved, Ordering::Relaxed);
    }
}

/// Asks connections to move where some data threads have become busier than others.
fn spread(
    shared: &Shared,
    connections: &[(u64, Arc<Connection>)],
    watches: &HashMap<u64, Watch>,
    balance: &mut Balance,
) {
    let served = || {
        let served = |(number, connection): &(u64, Arc<Connection>)| {
            Some(Served {
                number: *number,
                thread: connection.asked_to_move().or(connection.thread)?,
                recent_bytes: watches.get(number).map_or(0, Watch::recent_bytes),
            })
        };
        connections.iter().filter_map(served).collect()
    };
    for moves in balance.look(shared.loads.len(), served) {
        if let Ok(at) = connections.binary_search_by_key(&moves.number, |(number, _)| *number) {
            connections[at].1.ask_to_move(moves.to);
        }
    }
}

/// How a push or a pull that is under way got on while the server stops.
struct Pace {
    /// Bytes, both ways.
    moved: u64,
    since: Instant,
}

impl Pace {
    /// Whether it still does. What a checkpoint's cut pauses, or the store holds up, is not stuck: that ends by itself.
    fn gets_on(&mut self, phase: Phase, moved: u64, now: Instant) -> bool {
        if phase == Phase::Waiting || moved != self.moved {
            (self.moved, self.since) = (moved, now);
        }
        now.duration_since(self.since) < DRAIN_PROGRESS
    }
}

/// Tells everybody that the server stops, and ends what is waiting. Pushes that are under way have a while to end, as
/// long as something moves.
pub(super) async fn dismiss(shared: &Shared) {
    shared.members().tell_all(&match shared.ending() {
        Ending::Finished => Event::Finished { reason: FINISHED_STOPPED.to_owned() },
        Ending::Restarting => Event::Restarting,
    });
    let refused = shared.refusal();
    let begun = Instant::now();
    let mut paces: HashMap<u64, Pace> = HashMap::new();
    loop {
        let now = Instant::now();
        let mut num_busy = 0;
        for (number, connection) in shared.connections() {
            if connection.thread.is_none() {
                continue;
            }
            let moved = connection.socket.received() + connection.socket.sent();
            let pace = paces.entry(number).or_insert(Pace { moved, since: now });
            let gets_on = connection.exchanging().is_some_and(|phase| pace.gets_on(phase, moved, now));
            if gets_on && now.duration_since(begun) < DRAIN {
                num_busy += 1;
            } else {
                connection.close(refused.code, &refused.message, Shutdown::Read);
            }
        }
        if num_busy == 0 {
            break;
        }
        sleep(DRAIN_LOOK).await;
    }
    shared.notify();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Client, ClientConfig};
    use crate::server::{Server, ServerConfig};
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    #[test]
    fn a_look_that_is_much_too_late_is_a_standstill() {
        let (looked, period) = (Instant::now(), Duration::from_millis(250));
        assert_eq!(standstill(looked, looked + period, period), Duration::ZERO);
        assert_eq!(standstill(looked, looked + period * LOOKS_MISSED, period), Duration::ZERO);
        let minute = Duration::from_secs(60);
        assert_eq!(standstill(looked, looked + minute, period), minute);
    }

    #[test]
    fn a_push_that_waits_for_the_server_is_not_stuck_while_that_stops() {
        let begun = Instant::now();
        let mut pace = Pace { moved: 7, since: begun };
        let later = begun + DRAIN_PROGRESS * 3;
        assert!(pace.gets_on(Phase::Waiting, 7, later));
        assert!(
            pace.gets_on(Phase::Receiving, 7, later + DRAIN_PROGRESS / 2),
            "its peer has a second from then"
        );
        assert!(pace.gets_on(Phase::Receiving, 8, later + DRAIN_PROGRESS), "a byte came");
        assert!(!pace.gets_on(Phase::Receiving, 8, later + DRAIN_PROGRESS * 2));
    }

    #[test]
    fn a_standstill_of_the_server_is_nobodys_silence() {
        let lease = Duration::from_secs(2);
        let server = Server::start(ServerConfig { lease, ..ServerConfig::default() }).unwrap();
        let config = ClientConfig {
            address: server.address().to_string(),
            worker_id: Some("heard".into()),
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: Duration::from_secs(20),
            patience: None,
        };
        let _client = Client::connect(config, None, &|| false).unwrap();
        let (halted, over) = mpsc::channel();
        server.control.spawn(async move {
            // Blocks the thread, as SIGSTOP would.
            let (_never, clock) = mpsc::channel::<()>();
            clock.recv_timeout(lease * 2).ok();
            halted.send(()).ok();
        });
        over.recv().unwrap();
        // Looks go on after it: they find one that is silent, and only that one.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connection = {
            let _on_its_runtime = server.control.enter();
            Arc::new(Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
        };
        let members = || server.shared.members();
        members().join(Some("silent".into()), (String::new(), None), [7; 16], connection, Instant::now());
        let end = Instant::now() + Duration::from_secs(20);
        let mut found = members();
        while found.departures().count() == 0 {
            assert!(Instant::now() < end, "nobody was missed");
            found = server.shared.wait_for_change(found, Duration::from_millis(10));
        }
        let lost: Vec<_> = found.departures().map(|departure| departure.worker.as_str()).collect();
        assert_eq!(lost, ["silent"]);
    }
}
