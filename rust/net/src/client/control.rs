//! The control connection: a small thread that says "alive, and this far" at the pace the server asked for and listens
//! to what the server has to say. It needs no lock of the caller's, and backpressure on the data cannot silence it.

use super::error::ClientError;
use crate::fork::ClosedInChildren;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::send;
use offbeat_core::wire::message::{Event, Heartbeat, RefusalCode, Refused};
use offbeat_core::wire::{Kind, decode};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::MissedTickBehavior;

/// What the server has said on the control connection so far.
#[derive(Clone, Debug, Default)]
pub struct Events {
    /// The server is stopping: finish what is in flight, push nothing more.
    pub drain: bool,
    /// The newest life of the store, if one began since joining.
    pub term: Option<u64>,
    /// Another process has this worker's name now; why.
    pub fenced: Option<String>,
    /// The run is over; `"budget"` or `"stopped"`.
    pub finished: Option<String>,
    /// When and why the connection ended.
    pub(super) lost: Option<(Instant, String)>,
}

#[derive(Debug, Default)]
struct Shared {
    /// What the caller says of itself, and calls that ended.
    said: AtomicU64,
    calls: AtomicU64,
    events: Mutex<Events>,
}

impl Shared {
    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's handle. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Control {
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread on a connection that is attached.
    pub(super) fn start(
        socket: Socket,
        reader: FrameReader,
        heartbeat: Duration,
        address: &str,
    ) -> Result<Self, ClientError> {
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = oneshot::channel();
        let failed = |error: std::io::Error| ClientError::from_frame(address, &FrameError::Io(error));
        let stream = socket.into_std().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("offbeat-control".into())
            .spawn(move || runtime.block_on(run(stream, reader, heartbeat, of_thread, stopped)))
            .map_err(failed)?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn events(&self) -> Events {
        self.shared.events().clone()
    }

    /// Runs `f` on the events without copying them.
    pub(super) fn look<R>(&self, f: impl FnOnce(&Events) -> R) -> R {
        f(&self.shared.events())
    }

    /// What the heartbeat says; it must grow while the worker gets on.
    pub(super) fn set_progress(&self, progress: u64) {
        self.shared.said.store(progress, Ordering::Relaxed); // a sign of life; orders nothing
    }

    /// A call has ended, which is progress too.
    pub(super) fn count_call(&self) {
        self.shared.calls.fetch_add(1, Ordering::Relaxed); // as above
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the control thread panicked");
        }
    }
}

async fn run(
    stream: ClosedInChildren<TcpStream>,
    mut reader: FrameReader,
    heartbeat: Duration,
    shared: Arc<Shared>,
    stopped: oneshot::Receiver<()>,
) {
    let error = match Socket::from_std(stream) {
        Err(error) => FrameError::Io(error),
        Ok(socket) => tokio::select! {
            biased;
            _ = stopped => return,
            error = listen(&socket, &mut reader, &shared) => error,
            error = beat(&socket, heartbeat, &shared) => error,
        },
    };
    tracing::debug!(%error, "the control connection ended");
    shared.events().lost = Some((Instant::now(), error.to_string()));
}

async fn beat(socket: &Socket, pace: Duration, shared: &Shared) -> FrameError {
    let mut ticks = tokio::time::interval(pace.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let progress = shared.said.load(Ordering::Relaxed) + shared.calls.load(Ordering::Relaxed);
        if let Err(error) = send(socket, Kind::Heartbeat, 0, &Heartbeat { progress }).await {
            return error.into();
        }
    }
}

async fn listen(socket: &Socket, reader: &mut FrameReader, shared: &Shared) -> FrameError {
    loop {
        let header = match reader.header(socket).await {
            Ok(header) => header,
            Err(error) => return error,
        };
        let payload = match reader.message(socket, &header).await {
            Ok(payload) => payload,
            Err(error) => return error,
        };
        let mut events = shared.events();
        if header.kind == Kind::Refused {
            match decode::<Refused>(payload) {
                Ok(Refused { code: RefusalCode::Fenced, message, .. }) => events.fenced = Some(message),
                Ok(Refused { message, .. }) => return FrameError::Io(std::io::Error::other(message)),
                Err(error) => return error.into(),
            }
            continue;
        }
        // Events of a newer build are none of ours.
        let Ok(event) = decode::<Event>(payload) else {
            continue;
        };
        match event {
            Event::Drain => events.drain = true,
            Event::Term { term } => events.term = Some(term),
            Event::Fenced { detail } => events.fenced = Some(detail),
            Event::Finished { reason } => events.finished = Some(reason),
            Event::Restarting => {} // what is under way is told by the data connection
        }
    }
}
