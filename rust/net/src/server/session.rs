//! One worker's data connection: it joins, then sends calls, pulls and pushes, one after the other. The task runs on
//! one data thread from its first frame to its last.

use super::connection::{Connection, Phase};
use super::end::End;
use super::init::Init;
use super::membership::Traffic;
use super::model::Model;
use super::outbox::Outbox;
use super::poll;
use super::shared::{Meter, Shared};
use crate::frame::{FrameError, FrameReader, Moving};
use crate::handshake::{self, frame_refusal};
use offbeat_core::layout::Presence;
use offbeat_core::store::WorkerKey;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::header::MAX_TABLE_BYTES;
use offbeat_core::wire::message::{
    Call, FINISHED_STOPPED, Join, Joined, ModelInfo, RefusalCode, Refused, Reply,
};
use offbeat_core::wire::{Header, Kind, decode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

/// Most pushes a worker may have in flight: as many as the store remembers the answers of.
const MAX_IN_FLIGHT: u32 = 2;
/// How often a worker should say that it is alive, as a part of the lease.
const HEARTBEATS_A_LEASE: u32 = 10;

/// A worker and its data connection.
pub(super) struct Session {
    pub(super) shared: Arc<Shared>,
    pub(super) connection: Arc<Connection>,
    pub(super) reader: FrameReader,
    pub(super) outbox: Outbox,
    pub(super) traffic: Arc<Traffic>,
    pub(super) worker_id: String,
    pub(super) incarnation: u32,
    /// There once the model is.
    pub(super) place: Option<Place>,
    init: Option<Init>,
    /// The newest version that holds a push of ours.
    pub(super) own_version: u64,
    goodbye: bool,
}

/// A session's place in the store.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) model: Arc<Model>,
    pub(super) key: WorkerKey,
    /// Every tensor: what most pushes bring.
    pub(super) all: Presence,
}

/// Serves a connection that has proved who it is, to its end.
pub(super) async fn serve(
    shared: Arc<Shared>,
    thread: usize,
    stream: Moving,
    reader: FrameReader,
    _admitted: OwnedSemaphorePermit,
) {
    let socket = match stream.arrive() {
        Ok(socket) => socket,
        Err(error) => {
            tracing::debug!(%error, "a connection was gone before it was served");
            shared.loads[thread].connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
    };
    let connection = Arc::new(Connection::new(socket, Some(thread)));
    let _watched = shared.enrol(&connection); // to the last word
    let (mut reader, peer) = (reader, connection.socket.peer());
    let joined = join(&shared, &connection, &mut reader).await;
    let (worker_id, incarnation, traffic) = match joined {
        Ok(joined) => joined,
        Err(end) => {
            tracing::warn!(%peer, cause = cause(&connection, &end), "a worker could not join");
            farewell(&connection, end).await;
            return;
        }
    };
    let mut session = Session {
        outbox: Outbox::default(),
        place: None,
        init: None,
        own_version: 0,
        goodbye: false,
        shared,
        connection,
        reader,
        traffic,
        worker_id,
        incarnation,
    };
    let Err(end) = session.run().await else { return };
    let cause = cause(&session.connection, &end);
    session.shared.lost(session.incarnation, &cause, &session.connection);
    session.goodbye = true; // what there was to say is said
    let connection = Arc::clone(&session.connection);
    drop(session); // an open push is given up before the farewell, which may take a moment
    farewell(&connection, end).await;
}

/// What ended a connection, in words for the log and status.
fn cause(connection: &Connection, end: &End) -> String {
    match (connection.end(), end) {
        (Some((_, cause)), _) => cause,
        (None, End::Frame(error @ FrameError::Closed { .. })) => error.to_string(),
        (None, End::Frame(error)) => format!("the connection broke: {error}"),
        (None, End::Refused { refused, .. }) => format!("it was refused: {refused}"),
    }
}

/// Tells the worker why, where it can still be told.
async fn farewell(connection: &Connection, end: End) {
    let (request, refused) = match (connection.end(), end) {
        // What this end refused comes before what its other connection's end made of it.
        (_, End::Refused { request, refused }) => (request, Some(refused)),
        (Some((code, message)), _) => (0, Some(Refused { code, message, fatal: true })),
        (None, End::Frame(error)) => (0, frame_refusal(&error)),
    };
    if let Some(refused) = refused {
        connection.enter(Phase::Parting); // the watchdog bounds it: data threads have no timers
        handshake::part(&connection.socket, request, &refused).await;
    }
}

/// Receives Join, answers Joined.
async fn join(
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
        let place = place(shared, admitted.incarnation, &header)?;
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
            model: place.as_ref().map(|p| info(&p.model)),
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
        shared.lost(admitted.incarnation, &cause(connection, &end), connection);
        return Err(end);
    }
    Ok((admitted.id, admitted.incarnation, admitted.traffic))
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn info(model: &Model) -> ModelInfo {
    ModelInfo { table: model.store.table().as_ref().clone(), blueprint: model.blueprint.clone() }
}

fn check_join(shared: &Shared, join: &Join) -> Result<(), Refused> {
    let refuse = |code, message| Err(Refused { code, message, fatal: true });
    if shared.is_stopping() {
        return refuse(RefusalCode::Finished, format!("the server is {FINISHED_STOPPED}"));
    }
    if let Some(run_id) = join.run_id.as_ref().filter(|id| **id != shared.run_id) {
        let message = format!("this server holds run {:?}, the worker wants {run_id:?}", shared.run_id);
        return refuse(RefusalCode::RunId, message);
    }
    if let Some(id) = &join.worker_id
        && (id.is_empty() || id.len() > super::config::MAX_ID_BYTES || id.chars().any(char::is_control))
    {
        return refuse(
            RefusalCode::Malformed,
            format!("worker_id {id:?} is not 1 to 128 bytes of printable text"),
        );
    }
    if join.host.len() > super::config::MAX_ID_BYTES {
        return refuse(RefusalCode::Malformed, format!("a host name of {} bytes", join.host.len()));
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

/// A worker's place in the store, if there is a model.
fn place(shared: &Shared, incarnation: u32, header: &Header) -> Result<Option<Place>, End> {
    let Some(model) = shared.model.get() else { return Ok(None) };
    match shared.members().register(incarnation, |id| model.store.register(id)) {
        Some(Ok(key)) => {
            let all = Presence::all(model.store.layout().num_tensors());
            Ok(Some(Place { model: Arc::clone(model), key, all }))
        }
        Some(Err(full)) => Err(End::refused(header, RefusalCode::Full, full.to_string())),
        None => Err(End::refused(header, RefusalCode::Fenced, "a newer process has this worker's name")),
    }
}

impl Session {
    /// Serves frame after frame; returns after a goodbye.
    async fn run(&mut self) -> Result<(), End> {
        let connection = Arc::clone(&self.connection);
        let socket = &connection.socket;
        // Relaxed throughout: statistics, which go on from what an earlier process with this name has moved.
        let count = |total: &AtomicU64, before: u64, now: u64| total.store(before + now, Ordering::Relaxed);
        let traffic = Arc::clone(&self.traffic);
        let before = (traffic.received.load(Ordering::Relaxed), traffic.sent.load(Ordering::Relaxed));
        while !self.goodbye {
            count(&traffic.received, before.0, socket.received());
            count(&traffic.sent, before.1, socket.sent());
            connection.idle(self.reader.buffered());
            let header = self.reader.header(socket).await?;
            connection.enter(Phase::Receiving);
            match (header.kind, &mut self.init) {
                (Kind::Push, _) => self.push(&header).await?,
                (Kind::Pull, _) => self.pull(&header).await?,
                (Kind::Call, _) => self.call(&header).await?,
                (Kind::Value, Some(init)) => init.value(&header, &mut self.reader, socket).await?,
                _ => return Err(End::out_of_place(&header, "Push, Pull or Call")),
            }
            poll::breathe().await;
        }
        Ok(())
    }

    /// The session's place in the store, made when there is a model.
    pub(super) fn place(&mut self, header: &Header) -> Result<&Place, End> {
        if self.place.is_none() {
            self.place = place(&self.shared, self.incarnation, header)?;
        }
        self.place.as_ref().ok_or_else(|| {
            let message =
                "there is no model yet: bring one (model=, client.init) or wait for the worker that does";
            End::refused(header, RefusalCode::NoModel, message)
        })
    }

    /// Where tasks that this session starts note their longest turn.
    pub(super) fn meter(&self) -> Meter {
        Meter::new(&self.shared, self.connection.thread.unwrap_or_default())
    }

    async fn call(&mut self, header: &Header) -> Result<(), End> {
        let connection = Arc::clone(&self.connection);
        let message = self.reader.message(&connection.socket, header).await?;
        let call = decode(message).map_err(|e| End::malformed(header, &e))?;
        connection.enter(Phase::Waiting);
        match self.answer(header, call).await {
            Ok(reply) => {
                connection.enter(Phase::Sending);
                handshake::send(&connection.socket, Kind::Reply, header.request, &reply).await?;
            }
            Err(End::Refused { request, refused }) if !refused.fatal => {
                connection.enter(Phase::Sending);
                handshake::send(&connection.socket, Kind::Refused, request, &refused).await?;
            }
            Err(end) => return Err(end),
        }
        Ok(())
    }

    async fn answer(&mut self, header: &Header, call: Call) -> Result<Reply, End> {
        match call {
            Call::InitBegin { table, blueprint } => self.init_begin(header, table, blueprint).await,
            Call::InitCommit => self.init_commit(header),
            Call::WaitModel => {
                self.or_closed(self.shared.model.wait()).await?;
                let run = self.shared.run_config(&self.shared.agreement());
                let model = &self.place(header)?.model;
                Ok(Reply::Model {
                    model: info(model),
                    run,
                    term: model.store.term(),
                    version: model.store.version(),
                })
            }
            Call::Configure { contribution, optimizer } => {
                let mut agreement = self.shared.agreement();
                match agreement.join(&self.worker_id, contribution, optimizer) {
                    Ok(changed) => {
                        if changed {
                            self.shared.apply(&agreement);
                            agreement.announce();
                        }
                        self.shared.warn_of_shared_velocity(&agreement);
                        Ok(Reply::Configured { run: self.shared.run_config(&agreement) })
                    }
                    Err(refused) => Err(End::Refused { request: header.request, refused }),
                }
            }
            Call::Status => Ok(Reply::Status { json: super::status::json(&self.shared) }),
            Call::Goodbye { finished } => {
                self.shared.goodbye(self.incarnation, finished);
                self.goodbye = true;
                Ok(Reply::Goodbye)
            }
        }
    }

    async fn init_begin(
        &mut self,
        header: &Header,
        table: TensorTable,
        blueprint: Option<String>,
    ) -> Result<Reply, End> {
        if self.init.is_some() {
            return Err(End::refused(header, RefusalCode::State, "this worker is bringing a model already"));
        }
        let right = self.or_closed(self.shared.model.claim()).await?;
        if let Some(model) = self.shared.model.get() {
            if let Some(difference) = model.store.table().first_difference(&table) {
                let message = format!("this worker's model is not the server's: {difference}");
                return Err(End::refused(header, RefusalCode::ModelMismatch, message));
            }
            self.place(header)?;
            return Ok(Reply::Init { taken: false });
        }
        self.init = Some(Init::new(table, blueprint, right));
        Ok(Reply::Init { taken: true })
    }

    fn init_commit(&mut self, header: &Header) -> Result<Reply, End> {
        let Some(init) = self.init.take_if(|init| init.is_whole()) else {
            return Err(End::refused(header, RefusalCode::State, "the model's values have not all come"));
        };
        let (snapshot, blueprint, _right) = init.into_parts();
        let shared = Arc::clone(&self.shared);
        shared.set_model(snapshot, blueprint).map_err(|e| End::of_model(header, &e))?;
        tracing::info!(worker = self.worker_id, "the worker brought the model");
        self.place(header)?;
        Ok(Reply::Init { taken: true })
    }

    /// Waits for something that is not the peer's to give, unless the peer goes away.
    pub(super) async fn or_closed<T>(&self, wait: impl Future<Output = T>) -> Result<T, End> {
        tokio::select! {
            biased;
            done = wait => Ok(done),
            closed = self.connection.socket.closed() => {
                closed?;
                Err(End::Frame(FrameError::Closed { inside: false }))
            }
        }
    }
}

impl Drop for Session {
    /// A session that ends by a panic, or with its runtime, must not leave its worker among the living.
    fn drop(&mut self) {
        if !self.goodbye {
            self.shared.lost(self.incarnation, "its session ended inside the server", &self.connection);
        }
    }
}
