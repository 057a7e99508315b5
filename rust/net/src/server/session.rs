//! One worker's data connection: it joins, then sends calls, pulls and pushes, one after the other. Between two of them
//! its task may end on one data thread and go on on another ([`super::attend`]).

use super::connection::{Answer, Connection, Phase};
use super::end::{End, or_closed};
use super::init::{Init, gives_way};
use super::joined::Entered;
use super::membership::Traffic;
use super::outbox::Outbox;
use super::place::Place;
use super::poll;
use super::rounds::Entry;
use super::shared::{Meter, Shared};
use crate::frame::{FrameError, FrameReader, Moving};
use crate::handshake;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::{Call, ModelInfo, Parting, RefusalCode, Replaces, Reply};
use offbeat_core::wire::{Header, Kind, decode};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::spawn_blocking;

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
    place: Option<Place>,
    init: Option<Init>,
    /// The newest version that holds a push of ours.
    pub(super) own_version: u64,
    /// A frame has come since it joined.
    has_answered: bool,
    /// It has brought the model, pushed or pulled: if it ends now, a worker of the run does.
    has_begun: bool,
    /// What its worker had received and sent before on other connections.
    before: (u64, u64),
    goodbye: bool,
    /// Let go of at the very end: then the worker may come back on another connection.
    _seat: OwnedSemaphorePermit,
}

/// Why a session does not go on where it was.
pub(super) enum Pause {
    /// The worker has said goodbye.
    Gone,
    /// To another data thread, where the stream is to arrive.
    Moves { to: usize, stream: Moving },
}

impl Session {
    /// That of a worker that is in.
    pub(super) fn new(
        shared: Arc<Shared>,
        connection: Arc<Connection>,
        reader: FrameReader,
        entered: Entered,
    ) -> Self {
        let Entered { worker_id, incarnation, traffic, seat, own_version, has_begun } = entered;
        // Relaxed: statistics.
        let before = (traffic.received.load(Ordering::Relaxed), traffic.sent.load(Ordering::Relaxed));
        Self {
            outbox: Outbox::default(),
            place: None,
            init: None,
            own_version,
            has_answered: false,
            has_begun,
            before,
            goodbye: false,
            shared,
            connection,
            reader,
            traffic,
            worker_id,
            incarnation,
            _seat: seat,
        }
    }

    /// Serves frame after frame; returns after a goodbye, or to move.
    pub(super) async fn run(&mut self) -> Result<Pause, End> {
        let connection = Arc::clone(&self.connection);
        let socket = &connection.socket;
        // Relaxed throughout: statistics, which go on from what an earlier process with this name has moved.
        let count = |total: &AtomicU64, before: u64, now: u64| total.store(before + now, Ordering::Relaxed);
        let (traffic, before) = (Arc::clone(&self.traffic), self.before);
        while !self.goodbye {
            count(&traffic.received, before.0, socket.received());
            count(&traffic.sent, before.1, socket.sent());
            connection.idle(self.reader.buffered());
            if self.shared.is_stopping() {
                return Err(End::Refused { request: 0, refused: self.shared.refusal() });
            }
            if let Some(to) = connection.asked_to_move() {
                match socket.to_moving() {
                    Ok(stream) => return Ok(Pause::Moves { to, stream }),
                    Err(error) => self.stay(&error),
                }
            }
            let header = self.reader.header(socket).await?;
            // Before the phase: who sees a frame under way sees what it is.
            connection.answers(match header.kind {
                Kind::Push | Kind::Pull => {
                    self.has_begun = true;
                    Answer::Exchange { pinned: None }
                }
                _ => Answer::Awaited,
            });
            connection.enter(Phase::Receiving);
            if !self.has_answered {
                self.has_answered = true;
                self.shared.members().answered(self.incarnation);
            }
            match (header.kind, &mut self.init) {
                (Kind::Push, _) => self.push(&header).await?,
                (Kind::Pull, _) => self.pull(&header).await?,
                (Kind::Call, _) => self.call(&header).await?,
                (Kind::Value, Some(init)) => init.value(&header, &mut self.reader, socket).await?,
                _ => return Err(End::out_of_place(&header, "Push, Pull or Call")),
            }
            poll::breathe().await;
        }
        Ok(Pause::Gone)
    }

    /// It goes on where it is, though it was asked to move.
    pub(super) fn stay(&self, error: &io::Error) {
        tracing::debug!(worker = self.worker_id, %error, "a connection could not move to another thread");
        if let Some(thread) = self.connection.thread {
            self.connection.ask_to_move(thread);
        }
    }

    /// The session ends here; what is left to say is its connection's farewell.
    pub(super) fn end(mut self, end: &End) -> Arc<Connection> {
        let cause = end.cause(&self.connection);
        self.shared.lost(self.incarnation, &cause, &self.connection);
        self.goodbye = true; // what there was to say is said
        Arc::clone(&self.connection)
    }

    /// The session's place in the store, made when there is a model.
    pub(super) fn place(&mut self, header: &Header) -> Result<&Place, End> {
        if self.place.is_none() {
            self.place = Place::of(&self.shared, &self.worker_id, self.incarnation, header)?;
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
            // It went while it waited. What it had sent before that is still read: it may be a goodbye.
            Err(End::Frame(FrameError::Closed { inside: false })) => {}
            Err(end) => return Err(end),
        }
        Ok(())
    }

    async fn answer(&mut self, header: &Header, call: Call) -> Result<Reply, End> {
        match call {
            Call::InitBegin { table, blueprint, replaces } => {
                self.init_begin(header, table, blueprint, replaces).await
            }
            Call::InitCommit => self.init_commit(header).await,
            Call::WaitModel => {
                self.or_closed(self.shared.model.wait()).await?;
                let run = self.shared.run_config(&self.shared.agreement());
                let model = &self.place(header)?.model;
                Ok(Reply::Model {
                    model: model.info(),
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
            Call::Status => Ok(Reply::Status { json: super::status::told(&self.shared, header).await? }),
            Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new } => {
                let entry = Entry {
                    samples,
                    at_work,
                    grace: grace_ms.map(Duration::from_millis),
                    at_least: at_least.unwrap_or(0),
                    linger: linger_ms.map(Duration::from_millis),
                    terms: terms.map(Arc::from),
                    wish: wish.map(Arc::from),
                    new,
                };
                self.enter(header, entry).await
            }
            Call::Gather { round } => self.gather(round).await,
            Call::Goodbye { parting } => {
                self.shared.goodbye(self.incarnation, &parting);
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
        replaces: Option<Replaces>,
    ) -> Result<Reply, End> {
        if self.init.is_some() {
            return Err(End::refused(header, RefusalCode::State, "this worker is bringing a model already"));
        }
        // Before the values, which may take long.
        ModelInfo::check_size(&table, blueprint.as_deref()).map_err(|e| End::of_model(header, &e.into()))?;
        let right = self.or_closed(self.shared.model.claim()).await?;
        if let Some(model) = self.shared.model.get() {
            if let Some(difference) = model.store.table().first_difference(&table) {
                let message = format!("this worker's model is not the server's: {difference}");
                let end = End::refused(header, RefusalCode::ModelMismatch, message);
                if !self.has_begun {
                    // It may have its place in the store since it joined, which says nothing of its model.
                    let cause = Some(end.cause(&self.connection));
                    self.shared.goodbye(self.incarnation, &Parting::Withdrawn { cause });
                }
                return Err(end);
            }
            let at = (model.store.term(), model.store.version()); // what is brought is asked about once more
            let stays = !gives_way(model, at, replaces);
            self.place(header)?;
            if stays {
                return Ok(Reply::Init { taken: false });
            }
        }
        self.init = Some(Init::new(table, blueprint, replaces, right));
        Ok(Reply::Init { taken: true })
    }

    async fn init_commit(&mut self, header: &Header) -> Result<Reply, End> {
        let Some(init) = self.init.take_if(|init| init.is_whole()) else {
            return Err(End::refused(header, RefusalCode::State, "the model's values have not all come"));
        };
        let (shared, runtime) = (Arc::clone(&self.shared), Handle::current());
        // All values are copied: not on a thread that others wait for.
        let put = spawn_blocking(move || init.put(&shared, &runtime)).await;
        let put = put.map_err(|e| End::lost_inside(header, "the model", &e))?;
        let taken = put.map_err(|e| End::of_model(header, &e))?;
        if taken {
            tracing::info!(worker = self.worker_id, "the worker brought the model");
        }
        self.place(header)?;
        self.has_begun = true;
        Ok(Reply::Init { taken })
    }

    /// Waits for something that is not the peer's to give, unless the peer goes away.
    pub(super) async fn or_closed<T>(&self, wait: impl Future<Output = T>) -> Result<T, End> {
        or_closed(&self.connection, wait).await
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
