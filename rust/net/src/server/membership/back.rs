//! A worker process that was in and comes back: on another connection, or to a server that was started again and does
//! not know it yet.

use super::connections::Connections;
use super::member::{Link, Member, State, Traffic};
use super::{Ended, Members};
use crate::server::connection::Connection;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::message::Attempt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How a worker of the life before was last known to stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Standing {
    There,
    /// Lost, and no longer waited for.
    Away,
    Left,
    Finished,
}

/// Why a process has no seat to come back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum NoSeat {
    /// It has tried again since.
    Overtaken,
    /// A newer process has its name.
    Replaced,
    /// It said goodbye, or was told to go.
    Gone,
    /// It was never given this incarnation, or does not know what it was told with it.
    Unknown,
}

/// The seat of a process that is back, and the connections that it still had, which are to be closed.
#[derive(Debug)]
pub(in crate::server) struct Called {
    pub(in crate::server) seat: Arc<Semaphore>,
    pub(in crate::server) connections: Option<Connections>,
}

/// A process that has its seat again.
#[derive(Debug)]
pub(in crate::server) struct Seated {
    pub(in crate::server) traffic: Arc<Traffic>,
    /// An older one with its name, which was the last that the life before had heard of: to be fenced.
    pub(in crate::server) replaced: Option<Ended>,
}

impl Members {
    /// Adds a worker of the life before: one that was there is waited for as a lost one is.
    pub(in crate::server) fn expect(&mut self, id: &str, key: WorkerKey, standing: Standing, now: Instant) {
        let (state, cause) = match standing {
            Standing::There => (State::Lost, "has not come back since the server was started again"),
            Standing::Away => (State::Lost, "had been away for long before the server was started again"),
            Standing::Finished => (State::Finished, "finished"),
            Standing::Left => (State::Left, "had left before the server was started again"),
        };
        let mut member = Member::absent(key.incarnation, Some(key), state, cause, now);
        member.was_away = standing == Standing::Away;
        member.forgotten = member.was_away;
        self.by_id.insert(id.to_owned(), member);
    }

    /// A process says that it is back. Of one that is not known the seat is a new one: who has come after the last
    /// checkpoint of the life before is known to itself alone.
    pub(in crate::server) fn call_back(
        &mut self,
        id: &str,
        incarnation: u32,
        secret: &[u8; 16],
        attempt: Option<Attempt>,
    ) -> Result<Called, NoSeat> {
        let is_other_lifes = incarnation > 0 && incarnation <= self.life.last_incarnation;
        match self.by_id.get_mut(id) {
            Some(member) if member.incarnation > incarnation => Err(NoSeat::Replaced),
            Some(member) if member.incarnation == incarnation => {
                if member.secret.is_some() && !member.is_secret(secret) {
                    return Err(NoSeat::Unknown);
                }
                if matches!(member.state, State::Left | State::Finished) {
                    return Err(NoSeat::Gone);
                }
                if attempt.is_some_and(|attempt| attempt.is_before(member.attempt)) {
                    return Err(NoSeat::Overtaken);
                }
                member.attempt = attempt;
                if member.link != Link::Untold {
                    member.link = Link::Returning;
                }
                let connections = Some(member.connections());
                Ok(Called { seat: Arc::clone(&member.seat), connections })
            }
            Some(_) | None if is_other_lifes => {
                Ok(Called { seat: Arc::new(Semaphore::new(1)), connections: None })
            }
            Some(_) | None => Err(NoSeat::Unknown),
        }
    }

    /// A process that was [called back](Self::call_back) fails to come: it is where its old session's end leaves it, as if
    /// that had never been held back. Whether that has been, and is to be told now as a loss.
    pub(in crate::server) fn not_back(
        &mut self,
        id: &str,
        incarnation: u32,
        attempt: Option<Attempt>,
    ) -> bool {
        let same = |member: &&mut Member| member.incarnation == incarnation && member.attempt == attempt;
        let Some(member) = self.by_id.get_mut(id).filter(same) else { return false };
        match member.link {
            Link::Stands | Link::CutOff => false, // it is seated, or another connection of its has failed first
            Link::Returning => {
                member.link = Link::CutOff;
                false
            }
            Link::Untold => {
                (member.link, member.state) = (Link::CutOff, State::Joined);
                true
            }
        }
    }

    /// Whether it is still this seat that a process has to wait for.
    pub(in crate::server) fn is_seat(
        &self,
        id: &str,
        incarnation: u32,
        seat: &Arc<Semaphore>,
        attempt: Option<Attempt>,
    ) -> bool {
        match self.by_id.get(id) {
            Some(member) if member.incarnation == incarnation => {
                Arc::ptr_eq(&member.seat, seat) && !self.is_overtaken(id, attempt)
            }
            Some(member) => member.incarnation < incarnation,
            None => true,
        }
    }

    /// How long nothing was heard of a worker of this life.
    pub(in crate::server) fn silence(&self, id: &str, incarnation: u32, now: Instant) -> Option<Duration> {
        let member = self.by_id.get(id).filter(|m| m.incarnation == incarnation)?;
        member.secret.is_some().then(|| now.saturating_duration_since(member.heard))
    }

    /// A process has its seat again.
    pub(in crate::server) fn seat(
        &mut self,
        id: &str,
        (incarnation, key): (u32, Option<WorkerKey>),
        seat: &Arc<Semaphore>,
        (host, attempt, secret): (String, Option<Attempt>, [u8; 16]),
        connection: &Arc<Connection>,
        now: Instant,
    ) -> Seated {
        let mut replaced = None;
        let mut member = match self.by_id.remove(id) {
            Some(member) if member.incarnation == incarnation => member,
            older => {
                let mut member = Member::absent(incarnation, None, State::Lost, "", now);
                member.seat = Arc::clone(seat);
                replaced = older.and_then(|older| self.replace(id, older, &mut member, now));
                member
            }
        };
        member.key = key.or(member.key);
        member.attempt = attempt;
        member.sit(host, secret, connection, now);
        let traffic = Arc::clone(&member.traffic);
        self.by_id.insert(id.to_owned(), member);
        Seated { traffic, replaced }
    }
}
