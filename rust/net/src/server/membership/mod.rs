//! Who is in the run: a plain state machine over joins, heartbeats and departures. Time comes in as an argument.
//!
//! Lost is not gone: a lost worker whose connections stand goes on as soon as it is heard again. What ends a
//! membership is a goodbye, or a newer process with the same name; of a worker that has no place in the store yet, or has
//! not been heard since it was given one, the end of a connection or of its grace, too. One whose connections have ended may
//! come back on others ([`back`]).

mod back;
mod connections;
mod departures;
mod member;
mod outcome;

pub(super) use back::{Called, NoSeat, Standing};
pub(super) use connections::Connections;
pub(super) use departures::Departure;
pub(super) use member::{Member, State, Traffic};
pub(super) use outcome::{Outcome, Patience, Pause};

use super::connection::Connection;
use departures::Departures;
use member::{Link, REPLACED};
use offbeat_core::store::book::MOST_INCARNATIONS;
use offbeat_core::store::{Life, WorkerKey};
use offbeat_core::wire::message::{Attempt, Event, FIRST_TERM, Parting};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedSender;

/// Members that have gone for good and are still remembered by name: as many as departures.
const MAX_GONE: usize = 1000;

/// Why a worker went, in its own words or as the server has refused it, is cut there.
const MAX_CAUSE_CHARS: usize = 300;

/// What a join leads to.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) id: String,
    pub(super) incarnation: u32,
    /// Whether no process of this name has ever begun.
    pub(super) is_new_name: bool,
    pub(super) traffic: Arc<Traffic>,
    pub(super) seat: Arc<Semaphore>,
    /// The process that had the name, if it is still connected: to be fenced.
    pub(super) replaced: Option<Ended>,
}

/// Whose control connection it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) id: String,
    /// Whether it had been given up.
    pub(super) back: bool,
}

/// A member that is out, with what is left to do about it.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) id: String,
    pub(super) incarnation: u32,
    pub(super) key: Option<WorkerKey>,
    pub(super) connections: Connections,
    pub(super) control: Option<UnboundedSender<Event>>,
    /// As departures tell it.
    pub(super) cause: String,
    /// Whether it could not begin: it is no member any more.
    pub(super) withdrawn: bool,
    /// Whether this is the first that is heard of it.
    pub(super) news: bool,
}

/// What is left of the members that went before the last [`MAX_GONE`].
#[derive(Debug, Default)]
struct Bygone {
    /// One whose name comes back counts again.
    num: usize,
    num_lost: usize,
    num_finished: usize,
}

/// The workers, by name.
#[derive(Debug)]
pub(super) struct Members {
    by_id: BTreeMap<String, Member>,
    bygone: Bygone,
    last_incarnation: u32,
    /// Up to which no other life will have them.
    last_reserved: u32,
    /// The life that it is the membership of: incarnations up to its last were other lives'.
    life: Life,
    departures: Departures,
    /// When one that could not begin went: it is no member, and somebody was there until then.
    last_withdrawn: Option<Instant>,
    /// When the clock was last looked at.
    looked: Option<Instant>,
}

impl Members {
    /// Nobody yet.
    pub(super) fn new(life: Life) -> Self {
        Self {
            by_id: BTreeMap::new(),
            bygone: Bygone::default(),
            last_incarnation: life.last_incarnation,
            last_reserved: MOST_INCARNATIONS,
            life,
            departures: Departures::default(),
            last_withdrawn: None,
            looked: None,
        }
    }

    /// Whether a process has tried again since, and that was heard first: this is of a connection that it has given up.
    pub(super) fn is_overtaken(&self, id: &str, attempt: Option<Attempt>) -> bool {
        let latest = self.by_id.get(id).and_then(|member| member.attempt);
        attempt.is_some_and(|attempt| attempt.is_before(latest))
    }

    /// Incarnations up to this one are this life's own.
    pub(super) const fn reserved(&mut self, last: u32) {
        self.last_reserved = last;
    }

    /// The last incarnation that is this life's own, if it has been given: more are to be [reserved](Self::reserved) before
    /// another process may [join](Self::join).
    pub(super) fn last_if_all_are_given(&self) -> Option<u32> {
        (self.last_incarnation >= self.last_reserved).then_some(self.last_reserved)
    }

    /// A worker process comes in. Without a name it gets one.
    pub(super) fn join(
        &mut self,
        id: Option<String>,
        (host, attempt): (String, Option<Attempt>),
        secret: [u8; 16],
        connection: Arc<Connection>,
        now: Instant,
    ) -> Admitted {
        self.last_incarnation += 1;
        let id = id.unwrap_or_else(|| self.free_name());
        let old = self.by_id.remove(&id);
        let traffic = old.as_ref().map_or_else(Arc::default, |old| Arc::clone(&old.traffic));
        let mut member =
            Member::new(self.last_incarnation, secret, host, attempt, Arc::clone(&traffic), &connection, now);
        let seat = Arc::clone(&member.seat);
        let replaced = old.and_then(|old| self.replace(&id, old, &mut member, now));
        let is_new_name = member.predecessor.is_none();
        self.by_id.insert(id.clone(), member);
        Admitted { id, incarnation: self.last_incarnation, is_new_name, traffic, seat, replaced }
    }

    /// A newer process takes the name of an older one. What is left to do about that one, if it is still there.
    fn replace(&mut self, id: &str, mut old: Member, newer: &mut Member, now: Instant) -> Option<Ended> {
        let news = old.state.is_present() || old.link == Link::Untold;
        let connections = old.connections();
        // A lost one may be frozen, and what it has of connections would stand for ever.
        let frozen = old.state == State::Lost && !connections.have_ended();
        let withdrawn = old.has_not_begun();
        let (state, cause) = if withdrawn {
            (State::Left, told("could not begin", Some(REPLACED)))
        } else {
            (State::Lost, REPLACED.to_owned())
        };
        if news {
            self.departures.remember(id, old.incarnation, state, &cause, now);
        }
        let control = old.control.take().map(|(tell, _)| tell);
        let (incarnation, key) = (old.incarnation, old.key);
        newer.predecessor = old.into_predecessor(now);
        let ended =
            Ended { id: id.to_owned(), incarnation, key, connections, control, cause, withdrawn, news };
        (news || frozen).then_some(ended)
    }

    /// A name that nobody has; nor may have who came after the last checkpoint of a life before, and is not known here.
    fn free_name(&self) -> String {
        let mut number = self.num_joined();
        let of_life =
            if self.life.term > FIRST_TERM { format!("-t{}", self.life.term) } else { String::new() };
        loop {
            let name = format!("worker-{number}{of_life}");
            if !self.by_id.contains_key(&name) {
                return name;
            }
            number += 1;
        }
    }

    /// A newcomer is refused before it has heard that it was in: as if it had never come.
    pub(super) fn withdraw(&mut self, incarnation: u32) {
        self.by_id.retain(|_, member| member.incarnation != incarnation);
    }

    /// The control connection of a session: `None` if the incarnation or its secret is not known (any more).
    pub(super) fn attach(
        &mut self,
        incarnation: u32,
        secret: &[u8; 16],
        control: (UnboundedSender<Event>, Arc<Connection>),
        now: Instant,
    ) -> Option<Attached> {
        let (id, member) = self.find(incarnation)?;
        if !member.is_secret(secret) || !(member.state.is_present() || member.may_come_back()) {
            return None;
        }
        let back = member.state == State::Lost;
        if back {
            member.enter(State::Joined, None, now); // it had nowhere to be heard until now
        }
        member.control = Some((control.0, Arc::downgrade(&control.1)));
        (member.heard, member.moved, member.has_answered) = (now, now, true);
        Some(Attached { id, back })
    }

    /// A worker's data connection goes on on another thread, as another one of ours.
    pub(super) fn moved(&mut self, incarnation: u32, from: &Arc<Connection>, to: &Arc<Connection>) {
        let member = self.find(incarnation).map(|(_, member)| member);
        if let Some(member) = member.filter(|member| member.is_served_by(from)) {
            member.go_on_with(to);
        }
    }

    /// A worker's first frame since it was let in.
    pub(super) fn answered(&mut self, incarnation: u32) {
        if let Some((_, member)) = self.find(incarnation) {
            member.has_answered = true;
        }
    }

    fn find(&mut self, incarnation: u32) -> Option<(String, &mut Member)> {
        let (id, member) = self.by_id.iter_mut().find(|(_, m)| m.incarnation == incarnation)?;
        Some((id.clone(), member))
    }

    /// Whether this is a connection of a worker's, and not one that it had before it came back.
    pub(super) fn has(&mut self, incarnation: u32, connection: &Arc<Connection>) -> bool {
        self.find(incarnation).is_some_and(|(_, member)| member.has(connection))
    }

    /// Whether this is the data connection of a worker that is heard.
    pub(super) fn is_present(&self, connection: &Arc<Connection>) -> bool {
        self.by_id.values().any(|m| m.state.is_present() && m.is_served_by(connection))
    }

    /// Whether a process is heard, and has its name.
    pub(super) fn is_heard(&self, incarnation: u32) -> bool {
        self.by_id.values().any(|m| m.incarnation == incarnation && m.state.is_present())
    }

    /// The name and the data connection of one of these, as long as it is connected.
    pub(super) fn data_of(&self, incarnation: u32) -> Option<(String, Arc<Connection>)> {
        let (id, member) =
            self.by_id.iter().find(|(_, m)| m.incarnation == incarnation && m.state.is_present())?;
        Some((id.clone(), member.connections().data?))
    }

    /// All who are heard.
    pub(super) fn those_heard(&self) -> BTreeSet<u32> {
        self.by_id.values().filter(|m| m.state.is_present()).map(|m| m.incarnation).collect()
    }

    /// Who is lost, and may come back.
    pub(super) fn those_lost(&self) -> BTreeSet<u32> {
        let is_lost = |m: &&Member| m.state == State::Lost && !m.forgotten;
        self.by_id.values().filter(is_lost).map(|m| m.incarnation).collect()
    }

    /// Those of the life before who may still come back.
    pub(super) fn those_expected(&self) -> BTreeSet<u32> {
        self.by_id.values().filter(|m| m.is_expected()).map(|m| m.incarnation).collect()
    }

    /// Whether a newer process has a worker's name.
    pub(super) fn is_replaced(&self, id: &str, incarnation: u32) -> bool {
        self.by_id.get(id).is_some_and(|member| member.incarnation > incarnation)
    }

    /// Makes the store's key for a worker, unless it is no member any more. Under our lock, so that the order in
    /// which the store hears of two processes is the order in which they joined.
    pub(super) fn register<E>(
        &mut self,
        incarnation: u32,
        register: impl FnOnce(&str) -> Result<WorkerKey, E>,
    ) -> Option<Result<WorkerKey, E>> {
        let (id, member) = self.find(incarnation)?;
        Some(match member.key {
            Some(key) => Ok(key),
            None => register(&id).inspect(|key| member.key = Some(*key)),
        })
    }

    /// A heartbeat. The worker's name, if it had been given up and is back.
    pub(super) fn heard(&mut self, incarnation: u32, progress: u64, now: Instant) -> Option<String> {
        let (id, member) = self.find(incarnation)?;
        if !member.state.is_present() && !member.may_come_back() {
            return None;
        }
        member.heard = now;
        let back = member.state == State::Lost;
        if back {
            member.enter(State::Joined, None, now);
            member.moved = now;
        }
        if progress != member.progress {
            (member.progress, member.stride) = (progress, now.duration_since(member.moved));
            member.get_on(now);
        }
        back.then_some(id)
    }

    /// A goodbye. Who leaves and has not begun could not begin; who has finished then says so itself.
    pub(super) fn goodbye(&mut self, incarnation: u32, parting: &Parting, now: Instant) -> Option<Ended> {
        let has_begun = !self.find(incarnation)?.1.has_not_begun();
        match parting {
            Parting::Finished => self.end(incarnation, State::Finished, "finished".to_owned(), now),
            Parting::Left { cause } if has_begun => {
                let cause = told("left before its work was done", cause.as_deref());
                self.end(incarnation, State::Left, cause, now)
            }
            Parting::Left { cause } | Parting::Withdrawn { cause } => {
                self.end_unbegun(incarnation, State::Left, told("could not begin", cause.as_deref()), now)
            }
        }
    }

    /// A connection ended without a goodbye. One that has not begun is not lost: it could not begin.
    pub(super) fn lost(&mut self, incarnation: u32, cause: &str, now: Instant) -> Option<Ended> {
        let (_, member) = self.find(incarnation)?;
        match member.link {
            Link::Untold => return None,
            Link::Returning if member.state.is_present() => {
                member.enter(State::Lost, Some(on_one_line(cause)), now);
                member.link = Link::Untold;
                return None;
            }
            _ => {}
        }
        if member.has_not_begun() {
            // Of one that was silent it was told before that it went.
            let state = if member.state == State::Lost { State::Lost } else { State::Left };
            return self.end_unbegun(incarnation, state, told("could not begin", Some(cause)), now);
        }
        member.link = Link::CutOff;
        self.end(incarnation, State::Lost, on_one_line(cause), now)
    }

    /// Who could not begin is among the departures, but no member any more.
    fn end_unbegun(&mut self, incarnation: u32, state: State, cause: String, now: Instant) -> Option<Ended> {
        let ended = self.end(incarnation, state, cause, now)?;
        self.give_name_back(incarnation, now);
        Some(Ended { withdrawn: true, ..ended })
    }

    /// One that could not begin has gone: its name is free, and nobody who waits for n workers takes it for one. If the
    /// name had come before, it is again what it was then, from now: an earlier process that has finished has finished
    /// all the same.
    fn give_name_back(&mut self, incarnation: u32, now: Instant) {
        self.last_withdrawn = Some(now);
        let Some((id, member)) = self.find(incarnation) else { return };
        match member.predecessor.take() {
            Some(mut before) => {
                before.since = now;
                *member = *before;
            }
            None => drop(self.by_id.remove(&id)),
        }
    }

    /// The server ends the run for a worker.
    pub(super) fn dismissed(&mut self, incarnation: u32, cause: &str, now: Instant) -> Option<Ended> {
        self.end(incarnation, State::Left, cause.to_owned(), now)
    }

    fn end(&mut self, incarnation: u32, state: State, cause: String, now: Instant) -> Option<Ended> {
        let (id, member) = self.find(incarnation)?;
        // One that said goodbye is not lost by hanging up. One that was silent may still say goodbye, and its
        // connections may end, which is no news but needs cleaning up.
        let news = match member.state {
            State::Left | State::Finished => return None,
            State::Joined | State::Stalled => true,
            State::Lost => state != State::Lost,
        };
        if news {
            member.enter(state, Some(cause.clone()), now);
        }
        let (key, connections) = (member.key, member.connections());
        let control = member.control.take().map(|(tell, _)| tell);
        if news {
            self.departures.remember(&id, incarnation, state, &cause, now);
        }
        Some(Ended { id, incarnation, key, connections, control, cause, withdrawn: false, news })
    }

    /// The server stood still for so long: that time counts for nobody's silence, stall, grace or linger.
    pub(super) fn excuse(&mut self, standstill: Duration, now: Instant) {
        for member in self.by_id.values_mut() {
            member.excuse(standstill, now);
        }
        self.last_withdrawn = self.last_withdrawn.map(|at| (at + standstill).min(now));
    }

    /// Those that wait for others do not stall.
    pub(super) fn wait(&mut self, is_waiting: impl Fn(u32) -> bool, now: Instant) {
        for member in self.by_id.values_mut() {
            if member.state.is_present() && is_waiting(member.incarnation) {
                member.get_on(now);
            }
        }
    }

    /// A look at the clock: who has been silent for the lease, who makes no progress, whose grace has ended (its
    /// slot in the store may be given away).
    pub(super) fn tick(&mut self, lease: Duration, rejoin_grace: Duration, now: Instant) -> Ticked {
        self.looked = Some(now);
        let mut ticked = Ticked::default();
        let mut unbegun = Vec::new();
        for (id, member) in &mut self.by_id {
            if member.state.is_present() {
                member.measure(now);
            }
            match member.state {
                State::Joined | State::Stalled if now.duration_since(member.heard) >= lease => {
                    let cause = format!("no heartbeat for {} s", lease.as_secs_f64());
                    member.enter(State::Lost, Some(cause.clone()), now);
                    ticked.lost.push((id.clone(), member.incarnation, member.key, cause));
                }
                State::Joined if member.stands_still(lease, now) => {
                    (member.state, member.since) = (State::Stalled, now);
                    ticked.stalled.push(id.clone());
                }
                State::Lost
                    if !member.forgotten
                        && now.duration_since(member.since) >= member.grace(rejoin_grace) =>
                {
                    member.forgotten = true;
                    let has_begun = !member.has_not_begun();
                    if !has_begun {
                        unbegun.push(member.incarnation);
                    }
                    let (key, connections) = (member.key, member.connections());
                    ticked.forgotten.push(Forgotten { key, has_begun, connections });
                }
                _ => {}
            }
        }
        for (id, incarnation, _, cause) in &ticked.lost {
            self.departures.remember(id, *incarnation, State::Lost, cause, now);
        }
        for incarnation in unbegun {
            self.give_name_back(incarnation, now);
        }
        self.let_go();
        ticked
    }

    /// The time by which to judge [`Members::outcome`] and [`Members::pause`]: that of the last look at the clock. A
    /// thread that wakes from a standstill before that look would take the standstill for grace that has passed.
    pub(super) fn looked(&self) -> Option<Instant> {
        self.looked
    }

    #[cfg(test)]
    pub(super) fn rewind(&mut self, time: Duration) {
        self.looked = self.looked.and_then(|looked| looked.checked_sub(time));
    }

    /// Forgets the names of those that went first: a worker that crashes and is started again without a name comes
    /// under a new one each time.
    fn let_go(&mut self) {
        let num_gone = self.by_id.values().filter(|m| m.is_gone()).count();
        for _ in MAX_GONE..num_gone {
            let gone = self.by_id.iter().filter(|(_, m)| m.is_gone());
            let first = gone.min_by_key(|(_, m)| m.since).map(|(id, _)| id.clone());
            let Some(member) = first.and_then(|id| self.by_id.remove(&id)) else { return };
            self.bygone.num += 1;
            self.bygone.num_lost += usize::from(member.state == State::Lost);
            self.bygone.num_finished += usize::from(member.state == State::Finished);
        }
    }

    /// Workers that have ever come.
    pub(super) fn num_joined(&self) -> usize {
        self.by_id.len() + self.bygone.num
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Member)> {
        self.by_id.iter()
    }

    pub(super) fn departures(&self) -> impl Iterator<Item = &Departure> {
        self.departures.iter()
    }

    /// Tells every worker that listens.
    pub(super) fn tell_all(&self, event: &Event) {
        for (control, _) in self.by_id.values().filter_map(|m| m.control.as_ref()) {
            // Its task may just have ended.
            control.send(event.clone()).ok();
        }
    }
}

/// What has become of a worker, and why.
fn told(what: &str, cause: Option<&str>) -> String {
    cause.map_or_else(|| what.to_owned(), |cause| format!("{what}: {}", on_one_line(cause)))
}

/// A text that may be a peer's, or name what a peer has sent, as it goes into logs and errors.
fn on_one_line(text: &str) -> String {
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line: String = line.take(MAX_CAUSE_CHARS + 1).collect();
    if line.chars().count() > MAX_CAUSE_CHARS {
        line.pop();
        line.push('…');
    }
    line
}

/// What a look at the clock found.
#[derive(Debug, Default)]
pub(super) struct Ticked {
    /// (worker, incarnation, key, cause)
    pub(super) lost: Vec<(String, u32, Option<WorkerKey>, String)>,
    pub(super) stalled: Vec<String>,
    pub(super) forgotten: Vec<Forgotten>,
}

/// A lost worker whose grace has ended: what it held, which may be given away, and its connections, if they still
/// stand.
#[derive(Debug)]
pub(super) struct Forgotten {
    pub(super) key: Option<WorkerKey>,
    /// Whether it may come back; else it is no member any more.
    pub(super) has_begun: bool,
    pub(super) connections: Connections,
}

#[cfg(test)]
mod tests;
