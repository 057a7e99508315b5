//! One worker process, as the server knows it.

use super::connections::Connections;
use crate::server::connection::Connection;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::message::{Attempt, Event};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedSender;

/// Workers of the life before have so many times the grace: their machines may have gone with the server's. With the
/// defaults it is as long as they wait for the server.
pub(super) const GRACE_OF_ANOTHER_LIFE: u32 = 5;
/// The span over which samples per second are measured.
const RATE_WINDOW: Duration = Duration::from_secs(10);

/// Who has not got on for so many times as long as its newest step took stands still, if that is longer than a lease.
const STRIDES: u32 = 3;

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

/// How a worker is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Stands,
    /// One of its connections has ended: what is still heard was sent before.
    CutOff,
    /// It is back, and waits for its old session to end, which is no news.
    Returning,
    /// The same; its old session has ended, and nobody was told.
    Untold,
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

/// One worker process.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) incarnation: u32,
    /// The last process of this name before it that had begun; what the name goes back to if this one cannot.
    pub(super) predecessor: Option<Box<Member>>,
    /// `None`: what it was told in another life of the server is not known.
    pub(super) secret: Option<[u8; 16]>,
    /// Held by the session that serves it: one that comes back waits until its old session has let go.
    pub(super) seat: Arc<Semaphore>,
    pub(crate) host: String,
    /// The latest of its process's that was heard.
    pub(super) attempt: Option<Attempt>,
    pub(crate) state: State,
    pub(crate) cause: Option<String>,
    /// When the state was entered.
    pub(crate) since: Instant,
    pub(super) heard: Instant,
    pub(super) progress: u64,
    pub(super) moved: Instant,
    /// From the step before to the newest, as far as heartbeats tell.
    pub(super) stride: Duration,
    pub(crate) traffic: Arc<Traffic>,
    /// (when, samples) over the last window, oldest first.
    history: VecDeque<(Instant, u64)>,
    /// Weak, so that a connection is closed when its task ends.
    connection: Weak<Connection>,
    pub(super) control: Option<(UnboundedSender<Event>, Weak<Connection>)>,
    pub(super) key: Option<WorkerKey>,
    pub(super) forgotten: bool,
    /// Another life of the server had waited for it long enough.
    pub(super) was_away: bool,
    pub(super) link: Link,
    /// Something has come since it was told that it is in: it has heard that.
    pub(super) has_answered: bool,
}

impl Member {
    /// A process that has just joined. A name's traffic outlives the process.
    pub(super) fn new(
        incarnation: u32,
        secret: [u8; 16],
        host: String,
        attempt: Option<Attempt>,
        traffic: Arc<Traffic>,
        connection: &Arc<Connection>,
        now: Instant,
    ) -> Self {
        Self {
            incarnation,
            predecessor: None,
            secret: Some(secret),
            seat: Arc::new(Semaphore::new(1)),
            host,
            attempt,
            state: State::Joined,
            cause: None,
            since: now,
            heard: now,
            progress: 0,
            moved: now,
            stride: Duration::ZERO,
            traffic,
            history: VecDeque::new(),
            connection: Arc::downgrade(connection),
            control: None,
            key: None,
            forgotten: false,
            was_away: false,
            link: Link::Stands,
            has_answered: false,
        }
    }

    /// One that is not here: of another life of the server.
    pub(super) fn absent(
        incarnation: u32,
        key: Option<WorkerKey>,
        state: State,
        cause: &str,
        now: Instant,
    ) -> Self {
        Self {
            incarnation,
            predecessor: None,
            secret: None,
            seat: Arc::new(Semaphore::new(1)),
            host: String::new(),
            attempt: None,
            state,
            cause: Some(cause.to_owned()),
            since: now,
            heard: now,
            progress: 0,
            moved: now,
            stride: Duration::ZERO,
            traffic: Arc::default(),
            history: VecDeque::new(),
            connection: Weak::new(),
            control: None,
            key,
            forgotten: false,
            was_away: false,
            link: Link::CutOff,
            has_answered: true,
        }
    }

    /// It is back, on this connection.
    pub(super) fn sit(&mut self, host: String, secret: [u8; 16], connection: &Arc<Connection>, now: Instant) {
        self.enter(State::Joined, None, now);
        (self.host, self.secret, self.connection) = (host, Some(secret), Arc::downgrade(connection));
        (self.heard, self.moved, self.control) = (now, now, None);
        (self.forgotten, self.was_away, self.link) = (false, false, Link::Stands);
    }

    /// Whether it is this connection of its that has ended, and not one that it had before it came back.
    pub(super) fn has(&self, connection: &Arc<Connection>) -> bool {
        let control = self.control.as_ref().map(|(_, control)| control.as_ptr());
        self.is_served_by(connection) || control.is_some_and(|c| std::ptr::eq(c, Arc::as_ptr(connection)))
    }

    pub(super) fn is_served_by(&self, connection: &Arc<Connection>) -> bool {
        std::ptr::eq(self.connection.as_ptr(), Arc::as_ptr(connection))
    }

    /// Its data connection is this one from now on.
    pub(super) fn go_on_with(&mut self, connection: &Arc<Connection>) {
        self.connection = Arc::downgrade(connection);
    }

    /// The data thread that serves it, as long as it is connected.
    pub(crate) fn thread(&self) -> Option<usize> {
        self.connection.upgrade()?.thread
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

    /// Whether it says what it was told. Every byte is looked at, so that the time says nothing about the first that
    /// differs.
    pub(super) fn is_secret(&self, given: &[u8; 16]) -> bool {
        self.secret.is_some_and(|secret| secret.iter().zip(given).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0)
    }

    /// Whether it never had a place in the store, or never heard of it, and has not said goodbye: nothing is missed
    /// when it goes. One that heard nothing may come again, without a name as another one.
    pub(super) const fn has_not_begun(&self) -> bool {
        (self.key.is_none() || !self.has_answered) && !matches!(self.state, State::Left | State::Finished)
    }

    /// How long it counts as there after its loss, and its place in the store is its own.
    pub(super) fn grace(&self, rejoin_grace: Duration) -> Duration {
        if self.has_come() {
            rejoin_grace
        } else if self.was_away {
            Duration::ZERO
        } else {
            rejoin_grace.saturating_mul(GRACE_OF_ANOTHER_LIFE)
        }
    }

    /// Whether it is lost by its silence alone, and its place in the store is still its own.
    pub(super) fn may_come_back(&self) -> bool {
        self.state == State::Lost && self.link == Link::Stands && !self.forgotten
    }

    /// What its name goes back to if the newer process that takes it cannot begin. One that was there is lost: it was
    /// told to stop. One that has not begun leaves the name as it was before it.
    pub(super) fn into_predecessor(mut self, now: Instant) -> Option<Box<Self>> {
        if self.has_not_begun() {
            return self.predecessor;
        }
        if self.state.is_present() {
            self.enter(State::Lost, Some(REPLACED.to_owned()), now);
        }
        // Its session is over, whatever is still heard of it; of a lost one the slot is still to be given up.
        (self.link, self.forgotten, self.predecessor) = (Link::CutOff, false, None);
        Some(Box::new(self))
    }

    /// Whether it was heard in this life of the server.
    pub(super) const fn has_come(&self) -> bool {
        self.secret.is_some()
    }

    /// Whether it was there in the life before, has not come yet, and still has its grace for that.
    pub(super) fn is_expected(&self) -> bool {
        self.state == State::Lost && !self.has_come() && !self.forgotten
    }

    /// Whether nobody waits for it to come back.
    pub(super) fn is_gone(&self) -> bool {
        match self.state {
            State::Joined | State::Stalled => false,
            State::Lost => self.forgotten,
            State::Left | State::Finished => true,
        }
    }

    /// It has got on, or waits for others: no stall.
    pub(super) fn get_on(&mut self, now: Instant) {
        self.moved = now;
        if self.state == State::Stalled {
            self.enter(State::Joined, None, now);
        }
    }

    /// Whether it has not got on for so long, and for much longer than it takes from step to step.
    pub(super) fn stands_still(&self, least: Duration, now: Instant) -> bool {
        now.duration_since(self.moved) >= least.max(self.stride.saturating_mul(STRIDES))
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
