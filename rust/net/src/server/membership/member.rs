//! One worker process, as the server knows it.

use super::connections::Connections;
use crate::server::connection::Connection;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::message::Event;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// The span over which samples per second are measured.
const RATE_WINDOW: Duration = Duration::from_secs(10);

/// What ended a process whose name a newer one has taken.
pub(super) const REPLACED: &str = "replaced by a newer process with the same worker_id";

/// Where a worker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    Joined,
    /// Alive, but its count of progress stands still.
    Stalled,
    Lost,
    /// Said goodbye before its work was done.
    Left,
    /// Said goodbye with its work done.
    Finished,
}

impl State {
    pub(super) const fn is_present(self) -> bool {
        matches!(self, Self::Joined | Self::Stalled)
    }
}

/// What a worker's session counts while it serves; read by status and the rates.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) samples: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) sent: AtomicU64,
    /// Milliseconds since the server's start; 0: never.
    pub(crate) last_push_ms: AtomicU64,
}

/// What an earlier process of a name was when a newer one took it.
#[derive(Debug)]
pub(super) struct Predecessor {
    incarnation: u32,
    state: State,
    cause: Option<String>,
    key: Option<WorkerKey>,
}

/// One worker process.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) incarnation: u32,
    /// `None`: the name had never come before this process.
    pub(super) predecessor: Option<Predecessor>,
    pub(super) secret: [u8; 16],
    pub(crate) host: String,
    pub(crate) state: State,
    pub(crate) cause: Option<String>,
    /// When the state was entered.
    pub(crate) since: Instant,
    pub(super) heard: Instant,
    pub(super) progress: u64,
    pub(super) moved: Instant,
    pub(crate) traffic: Arc<Traffic>,
    /// (when, samples) over the last window, oldest first.
    history: VecDeque<(Instant, u64)>,
    /// Weak, so that a connection is closed when its task ends.
    connection: Weak<Connection>,
    pub(super) control: Option<(UnboundedSender<Event>, Weak<Connection>)>,
    pub(super) key: Option<WorkerKey>,
    pub(super) forgotten: bool,
    /// One of its connections has ended: what is still heard was sent before.
    pub(super) is_cut_off: bool,
}

impl Member {
    /// A process that has just joined. A name's traffic outlives the process.
    pub(super) fn new(
        incarnation: u32,
        secret: [u8; 16],
        host: String,
        traffic: Arc<Traffic>,
        connection: &Arc<Connection>,
        now: Instant,
    ) -> Self {
        Self {
            incarnation,
            predecessor: None,
            secret,
            host,
            state: State::Joined,
            cause: None,
            since: now,
            heard: now,
            progress: 0,
            moved: now,
            traffic,
            history: VecDeque::new(),
            connection: Arc::downgrade(connection),
            control: None,
            key: None,
            forgotten: false,
            is_cut_off: false,
        }
    }

    pub(super) fn is_served_by(&self, connection: &Arc<Connection>) -> bool {
        std::ptr::eq(self.connection.as_ptr(), Arc::as_ptr(connection))
    }

    pub(super) fn connections(&self) -> Connections {
        Connections {
            data: self.connection.upgrade(),
            control: self.control.as_ref().and_then(|(_, connection)| connection.upgrade()),
        }
    }

    /// Enters a state, for a reason if there is one to tell. Who is absent does nothing a second.
    pub(super) fn enter(&mut self, state: State, cause: Option<String>, now: Instant) {
        (self.state, self.cause, self.since) = (state, cause, now);
        if !state.is_present() {
            self.history = VecDeque::new();
        }
    }

    /// What this process is to a newer one of its name. One that was there is lost: it was told to stop.
    pub(super) fn as_predecessor(&self) -> Predecessor {
        let (state, cause) = match self.state {
            State::Joined | State::Stalled => (State::Lost, Some(REPLACED.to_owned())),
            gone => (gone, self.cause.clone()),
        };
        Predecessor { incarnation: self.incarnation, state, cause, key: self.key }
    }

    /// This process has come to nothing: the name is again what it was before, from now. False if it never was.
    pub(super) fn restore_predecessor(&mut self, now: Instant) -> bool {
        let Some(predecessor) = self.predecessor.take() else { return false };
        self.enter(predecessor.state, predecessor.cause, now);
        // Nothing that is still to come of this process is of that one.
        self.incarnation = predecessor.incarnation;
        // Of a lost one the slot is still to be given up; this process' own has been, if it had one.
        self.key = if self.key.is_some() { None } else { predecessor.key };
        self.is_cut_off = true;
        true
    }

    /// Whether nobody waits for it to come back.
    pub(super) fn is_gone(&self) -> bool {
        match self.state {
            State::Joined | State::Stalled => false,
            State::Lost => self.forgotten,
            State::Left | State::Finished => true,
        }
    }

    /// Takes a standstill of the server out of what is judged; what was heard since then is not of the future.
    pub(super) fn excuse(&mut self, standstill: Duration, now: Instant) {
        for time in [&mut self.since, &mut self.heard, &mut self.moved] {
            *time = (*time + standstill).min(now);
        }
    }

    /// Notes how many samples have come by now.
    pub(super) fn measure(&mut self, now: Instant) {
        let samples = self.traffic.samples.load(Ordering::Relaxed); // a statistic
        self.history.push_back((now, samples));
        while self.history.front().is_some_and(|(at, _)| now.duration_since(*at) > RATE_WINDOW) {
            self.history.pop_front();
        }
    }

    #[cfg(test)]
    pub(super) fn num_measured(&self) -> usize {
        self.history.len()
    }

    /// Samples per second over the last seconds.
    pub(crate) fn rate(&self) -> f64 {
        match (self.history.front(), self.history.back()) {
            (Some((from, before)), Some((to, after))) if to > from => {
                (after - before) as f64 / to.duration_since(*from).as_secs_f64()
            }
            _ => 0.0,
        }
    }
}
