//! Who is in the run: a plain state machine over joins, heartbeats and departures. Time comes in as an argument.
//!
//! Lost is not gone: a lost worker whose connections stand goes on as soon as it is heard again. What ends a
//! membership is a goodbye, or a newer process with the same name.

mod connections;
mod departures;
mod member;

pub(super) use connections::Connections;
pub(super) use departures::Departure;
pub(super) use member::{Member, State, Traffic};

use super::connection::Connection;
use departures::Departures;
use member::REPLACED;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::message::{Event, Parting};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Members that have gone for good and are still remembered by name: as many as departures.
const MAX_GONE: usize = 1000;

/// A worker's own words on why it leaves are cut there.
const MAX_CAUSE_CHARS: usize = 300;

/// What a join leads to.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) id: String,
    pub(super) incarnation: u32,
    /// Whether the name had never come.
    pub(super) newcomer: bool,
    pub(super) traffic: Arc<Traffic>,
    /// The process that had the name, if it is still connected: to be fenced.
    pub(super) replaced: Option<Ended>,
}

/// A member that is out, with what is left to do about it.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) id: String,
    pub(super) incarnation: u32,
    pub(super) key: Option<WorkerKey>,
    pub(super) connections: Connections,
    pub(super) control: Option<UnboundedSender<Event>>,
    /// Whether this is the first that is heard of it.
    pub(super) news: bool,
}

/// What became of waiting for the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Waiting,
    Done,
    /// (worker, cause) of each.
    NoneFinished(Vec<(String, String)>),
}

/// What waiting for the workers waits for while none of them is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// Somebody is there, or too few have come yet.
    None,
    /// That nobody comes any more.
    Linger,
    /// That lost ones come back.
    Grace { num_lost: usize },
}

/// Bounds for [`Members::outcome`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) linger: Duration,
    pub(super) rejoin_grace: Duration,
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
    departures: Departures,
    /// When one that could not begin went: it is no member, and somebody was there until then.
    last_withdrawn: Option<Instant>,
    /// When the clock was last looked at.
    looked: Option<Instant>,
}

impl Members {
    pub(super) fn new() -> Self {
        let (by_id, bygone, departures) = (BTreeMap::new(), Bygone::default(), Departures::default());
        Self { by_id, bygone, last_incarnation: 0, departures, last_withdrawn: None, looked: None }
    }

    /// A worker process comes in. Without a name it gets one.
    pub(super) fn join(
        &mut self,
        id: Option<String>,
        host: String,
        secret: [u8; 16],
        connection: Arc<Connection>,
        now: Instant,
    ) -> Admitted {
        self.last_incarnation += 1;
        let id = id.unwrap_or_else(|| self.free_name());
        let predecessor = self.by_id.get(&id).map(Member::as_predecessor);
        let newcomer = predecessor.is_none();
        let traffic = self.by_id.get(&id).map_or_else(Arc::default, |old| Arc::clone(&old.traffic));
        let mut member =
            Member::new(self.last_incarnation, secret, host, Arc::clone(&traffic), &connection, now);
        member.predecessor = predecessor;
        let replaced = self.by_id.insert(id.clone(), member).and_then(|old| {
            let (news, connections) = (old.state.is_present(), old.connections());
            // A lost one may be frozen, and what it has of connections would stand for ever.
            let frozen = old.state == State::Lost && !connections.have_ended();
            if !news && !frozen {
                return None;
            }
            if news {
                self.departures.remember(&id, old.incarnation, State::Lost, REPLACED, now);
            }
            let control = old.control.map(|(tell, _)| tell);
            Some(Ended {
                id: id.clone(),
                incarnation: old.incarnation,
                key: old.key,
                connections,
                control,
                news,
            })
        });
        Admitted { id, incarnation: self.last_incarnation, newcomer, traffic, replaced }
    }

    fn free_name(&self) -> String {
        let mut number = self.num_joined();
        loop {
            let name = format!("worker-{number}");
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
    ) -> Option<String> {
        let (id, member) = self.find(incarnation)?;
        // Every byte is looked at, so that the time says nothing about the first that differs.
        let differs = member.secret.iter().zip(secret).fold(0, |sum, (a, b)| sum | (a ^ b));
        if differs != 0 || !member.state.is_present() {
            return None;
        }
        member.control = Some((control.0, Arc::downgrade(&control.1)));
        member.heard = now;
        Some(id)
    }

    fn find(&mut self, incarnation: u32) -> Option<(String, &mut Member)> {
        let (id, member) = self.by_id.iter_mut().find(|(_, m)| m.incarnation == incarnation)?;
        Some((id.clone(), member))
    }

    /// Whether this is the data connection of a worker that is heard.
    pub(super) fn is_present(&self, connection: &Arc<Connection>) -> bool {
        self.by_id.values().any(|m| m.state.is_present() && m.is_served_by(connection))
    }

    /// Makes the store's key for a worker, unless a newer process has its name. Under our lock, so that the order in
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

    /// A heartbeat. True if the worker had been given up and is back.
    pub(super) fn heard(&mut self, incarnation: u32, progress: u64, now: Instant) -> bool {
        let Some((_, member)) = self.find(incarnation).filter(|(_, member)| !member.is_cut_off) else {
            return false;
        };
        member.heard = now;
        if progress != member.progress {
            (member.progress, member.moved) = (progress, now);
        }
        let back = member.state == State::Lost;
        if back || member.state == State::Stalled && member.moved == now {
            member.enter(State::Joined, None, now);
            member.moved = now;
        }
        back
    }

    /// A goodbye; gives the cause that departures will show, too. Who could not begin is among them, but no member any
    /// more: the name is free, and nobody who waits for n workers takes it for one. If the name had come before, it is
    /// again what it was then: an earlier process that has finished has finished all the same.
    pub(super) fn goodbye(
        &mut self,
        incarnation: u32,
        parting: &Parting,
        now: Instant,
    ) -> Option<(Ended, String)> {
        let told = |what: &str, cause: &Option<String>| match cause {
            None => what.to_owned(),
            Some(cause) => format!("{what}: {}", on_one_line(cause)),
        };
        let (state, cause) = match parting {
            Parting::Finished => (State::Finished, "finished".to_owned()),
            Parting::Left { cause } => (State::Left, told("left before its work was done", cause)),
            Parting::Withdrawn { cause } => (State::Left, told("could not begin", cause)),
        };
        let ended = self.end(incarnation, state, &cause, now)?;
        if matches!(parting, Parting::Withdrawn { .. }) {
            self.last_withdrawn = Some(now);
            if self.find(incarnation).is_some_and(|(_, member)| !member.restore_predecessor(now)) {
                self.withdraw(incarnation);
            }
        }
        Some((ended, cause))
    }

    /// Whether a worker that is there has no place in the store yet: there was no model, or no room.
    pub(super) fn has_not_begun(&mut self, incarnation: u32) -> bool {
        self.find(incarnation).is_some_and(|(_, member)| member.key.is_none() && !member.is_cut_off)
    }

    /// A connection ended without a goodbye.
    pub(super) fn lost(&mut self, incarnation: u32, cause: &str, now: Instant) -> Option<Ended> {
        if let Some((_, member)) = self.find(incarnation) {
            member.is_cut_off = true;
        }
        self.end(incarnation, State::Lost, cause, now)
    }

    /// The server ends the run for a worker.
    pub(super) fn dismissed(&mut self, incarnation: u32, cause: &str, now: Instant) -> Option<Ended> {
        self.end(incarnation, State::Left, cause, now)
    }

    fn end(&mut self, incarnation: u32, state: State, cause: &str, now: Instant) -> Option<Ended> {
        let (id, member) = self.find(incarnation)?;
        // One that said goodbye is not lost by hanging up. One that was silent may still say goodbye, and its
        // connections may end, which is no news but needs cleaning up.
        let news = match member.state {
            State::Left | State::Finished => return None,
            State::Joined | State::Stalled => true,
            State::Lost => state != State::Lost,
        };
        if news {
            member.enter(state, Some(cause.to_owned()), now);
        }
        let ended = Ended {
            id: id.clone(),
            incarnation,
            key: member.key,
            connections: member.connections(),
            control: member.control.take().map(|(tell, _)| tell),
            news,
        };
        if news {
            self.departures.remember(&id, incarnation, state, cause, now);
        }
        Some(ended)
    }

    /// The server stood still for so long: that time counts for nobody's silence, stall, grace or linger.
    pub(super) fn excuse(&mut self, standstill: Duration, now: Instant) {
        for member in self.by_id.values_mut() {
            member.excuse(standstill, now);
        }
        self.last_withdrawn = self.last_withdrawn.map(|at| (at + standstill).min(now));
    }

    /// A look at the clock: who has been silent for the lease, who makes no progress, whose grace has ended (its
    /// slot in the store may be given away).
    pub(super) fn tick(&mut self, lease: Duration, rejoin_grace: Duration, now: Instant) -> Ticked {
        self.looked = Some(now);
        let mut ticked = Ticked::default();
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
                State::Joined if now.duration_since(member.moved) >= lease => {
                    (member.state, member.since) = (State::Stalled, now);
                    ticked.stalled.push(id.clone());
                }
                State::Lost if !member.forgotten && now.duration_since(member.since) >= rejoin_grace => {
                    member.forgotten = true;
                    ticked.forgotten.push(Forgotten { key: member.key, connections: member.connections() });
                }
                _ => {}
            }
        }
        for (id, incarnation, _, cause) in &ticked.lost {
            self.departures.remember(id, *incarnation, State::Lost, cause, now);
        }
        self.let_go();
        ticked
    }

    /// The time by which to judge [`Members::outcome`] and [`Members::pause`]: that of the last look at the clock. A
    /// thread that wakes from a standstill before that look would take the standstill for grace that has passed.
    pub(super) fn looked(&self) -> Option<Instant> {
        self.looked
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

    /// Whether waiting for `n` workers is over: enough have come and nobody has been there for the linger, where a
    /// lost one counts as there for its grace. Once the run is over nobody can come back, and nothing is waited for.
    pub(super) fn outcome(&self, n: usize, patience: Patience, over: bool, now: Instant) -> Outcome {
        let there = |m: &Member| {
            let grace = m.state == State::Lost && now.duration_since(m.since) < patience.rejoin_grace;
            m.state.is_present() || grace && !over
        };
        if self.num_joined() < n.max(1) || self.by_id.values().any(there) {
            return Outcome::Waiting;
        }
        let all_lost =
            self.bygone.num_lost == self.bygone.num && self.by_id.values().all(|m| m.state == State::Lost);
        let gone =
            |m: &Member| if m.state == State::Lost { m.since + patience.rejoin_grace } else { m.since };
        let alone = self.by_id.values().map(gone).chain(self.last_withdrawn).max().unwrap_or(now);
        if over {
            Outcome::Done
        } else if !all_lost && now.saturating_duration_since(alone) < patience.linger {
            Outcome::Waiting
        } else if self.bygone.num_finished > 0 || self.by_id.values().any(|m| m.state == State::Finished) {
            Outcome::Done
        } else {
            let cause = |(id, m): (&String, &Member)| (id.clone(), m.cause.clone().unwrap_or_default());
            Outcome::NoneFinished(self.by_id.iter().map(cause).collect())
        }
    }

    /// What is waited for as long as [`Members::outcome`] says `Waiting`.
    pub(super) fn pause(&self, n: usize, patience: Patience, now: Instant) -> Pause {
        if self.num_joined() < n.max(1) || self.by_id.values().any(|m| m.state.is_present()) {
            return Pause::None;
        }
        let missed =
            |m: &&Member| m.state == State::Lost && now.duration_since(m.since) < patience.rejoin_grace;
        match self.by_id.values().filter(missed).count() {
            0 => Pause::Linger,
            num_lost => Pause::Grace { num_lost },
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

/// A text of a peer's, as it goes into logs and errors.
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
    pub(super) connections: Connections,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Socket;
    use std::net::{TcpListener, TcpStream};

    const LEASE: Duration = Duration::from_secs(10);
    const PATIENCE: Patience =
        Patience { linger: Duration::from_secs(10), rejoin_grace: Duration::from_secs(60) };

    fn connection() -> Arc<Connection> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Arc::new(Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
    }

    fn join(members: &mut Members, id: &str, now: Instant) -> u32 {
        members.join(Some(id.to_owned()), String::new(), [7; 16], connection(), now).incarnation
    }

    fn state(members: &Members, id: &str) -> State {
        members.by_id[id].state
    }

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[tokio::test]
    async fn silence_for_the_lease_is_a_loss_and_a_heartbeat_undoes_it() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        assert!(members.tick(LEASE, seconds(60), start + seconds(9)).lost.is_empty());
        let ticked = members.tick(LEASE, seconds(60), start + seconds(10));
        assert_eq!(ticked.lost[0].3, "no heartbeat for 10 s");
        assert_eq!(state(&members, "a"), State::Lost);
        assert!(members.heard(a, 1, start + seconds(11)));
        assert_eq!(state(&members, "a"), State::Joined);
        assert_eq!(members.departures().count(), 1);
    }

    #[tokio::test]
    async fn a_heartbeat_that_was_under_way_brings_nobody_back_whose_connection_has_ended() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        assert!(members.lost(a, "killed", start).unwrap().news);
        assert!(!members.heard(a, 1, start));
        assert_eq!(state(&members, "a"), State::Lost);
        assert!(!members.lost(a, "its other connection", start).unwrap().news, "told once");
    }

    #[tokio::test]
    async fn heartbeats_without_progress_show_a_stall() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        for s in 1..10 {
            members.heard(a, 0, start + seconds(s));
        }
        assert_eq!(members.tick(LEASE, seconds(60), start + seconds(10)).stalled, ["a"]);
        assert!(!members.heard(a, 5, start + seconds(11)));
        assert_eq!(state(&members, "a"), State::Joined);
    }

    #[tokio::test]
    async fn the_servers_own_standstill_is_nobodys_silence_stall_or_grace() {
        let (mut members, start) = (Members::new(), Instant::now());
        let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
        members.lost(a, "killed", start);
        let before = start + seconds(9);
        members.heard(b, 0, before);
        let woke = before + seconds(100);
        members.excuse(seconds(100), woke);
        let ticked = members.tick(LEASE, seconds(10), woke);
        assert!(ticked.lost.is_empty() && ticked.stalled.is_empty() && ticked.forgotten.is_empty());
        let ticked = members.tick(LEASE, seconds(10), woke + seconds(1));
        assert_eq!((ticked.stalled, ticked.forgotten.len()), (vec!["b".to_owned()], 1));
        members.heard(b, 1, woke + seconds(2));
        members.excuse(seconds(100), woke + seconds(3));
        let ticked = members.tick(LEASE, seconds(10), woke + seconds(13));
        assert_eq!(ticked.lost[0].0, "b", "what it said after waking is not put off into the future");
    }

    #[tokio::test]
    async fn a_goodbye_makes_the_end_of_the_connection_no_loss() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        assert!(members.goodbye(a, &Parting::Finished, start).unwrap().0.news);
        assert!(members.lost(a, "hung up", start).is_none());
        assert_eq!(state(&members, "a"), State::Finished);
        assert!(!members.heard(a, 9, start), "nor does a late heartbeat bring it back");
        assert_eq!(state(&members, "a"), State::Finished);
    }

    #[tokio::test]
    async fn a_newer_process_takes_the_name_and_fences_the_older() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        let next = members.join(Some("a".into()), String::new(), [8; 16], connection(), start);
        assert_eq!(next.replaced.unwrap().incarnation, a);
        assert!(next.incarnation > a);
        assert!(members.lost(a, "hung up", start).is_none(), "the old process cannot end the new one");
        let key = WorkerKey { slot: 0, incarnation: 1 };
        assert!(members.register::<()>(a, |_| Ok(key)).is_none(), "nor register after it");
        assert_eq!(members.register::<()>(next.incarnation, |_| Ok(key)), Some(Ok(key)));
    }

    #[tokio::test]
    async fn a_lost_one_is_fenced_too_as_long_as_it_is_connected() {
        let (mut members, start) = (Members::new(), Instant::now());
        let (first, second) = (connection(), connection());
        let join = |members: &mut Members, connection: &Arc<Connection>| {
            members.join(Some("a".into()), String::new(), [7; 16], Arc::clone(connection), start)
        };
        let a = join(&mut members, &first).incarnation;
        members.lost(a, "silent", start);
        let next = join(&mut members, &second);
        let ended = next.replaced.unwrap();
        assert_eq!((ended.incarnation, ended.news), (a, false));
        assert_eq!(members.departures().count(), 1, "it has departed once");
        drop(second);
        members.lost(next.incarnation, "killed", start);
        assert!(join(&mut members, &first).replaced.is_none(), "there is nobody to tell");
    }

    #[tokio::test]
    async fn only_the_secret_attaches_a_control_connection() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        let control = || (tokio::sync::mpsc::unbounded_channel().0, connection());
        assert_eq!(members.attach(a, &[6; 16], control(), start), None);
        assert_eq!(members.attach(a + 1, &[7; 16], control(), start), None);
        assert_eq!(members.attach(a, &[7; 16], control(), start).as_deref(), Some("a"));
    }

    #[tokio::test]
    async fn waiting_ends_when_enough_have_come_and_nobody_was_there_for_the_linger() {
        let (mut members, start) = (Members::new(), Instant::now());
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
        let a = join(&mut members, "a", start);
        members.goodbye(a, &Parting::Finished, start + seconds(5));
        assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(14)), Outcome::Waiting);
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(15)), Outcome::Done);
        assert_eq!(
            members.outcome(1, PATIENCE, true, start + seconds(6)),
            Outcome::Done,
            "a run that is over"
        );
    }

    #[tokio::test]
    async fn a_lost_worker_counts_as_there_for_its_grace() {
        let (mut members, start) = (Members::new(), Instant::now());
        let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
        members.goodbye(a, &Parting::Finished, start);
        members.lost(b, "killed", start);
        assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(59)), Outcome::Waiting);
        assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(70)), Outcome::Done);
    }

    #[tokio::test]
    async fn what_is_waited_for_when_nobody_is_there_is_known() {
        let (mut members, start) = (Members::new(), Instant::now());
        assert_eq!(members.pause(1, PATIENCE, start), Pause::None, "nobody has come");
        let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
        members.goodbye(a, &Parting::Finished, start);
        assert_eq!(members.pause(1, PATIENCE, start), Pause::None, "one is there");
        members.lost(b, "killed", start);
        assert_eq!(members.pause(3, PATIENCE, start), Pause::None, "a third one is waited for");
        assert_eq!(members.pause(2, PATIENCE, start + seconds(59)), Pause::Grace { num_lost: 1 });
        assert_eq!(members.pause(2, PATIENCE, start + seconds(60)), Pause::Linger);
    }

    #[tokio::test]
    async fn who_left_before_its_work_was_done_has_not_finished() {
        let (mut members, start) = (Members::new(), Instant::now());
        let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
        members.goodbye(a, &Parting::Left { cause: None }, start);
        members.lost(b, "killed", start);
        assert_eq!(
            members.outcome(1, PATIENCE, false, start + seconds(69)),
            Outcome::Waiting,
            "it may return"
        );
        let causes =
            [("a", "left before its work was done"), ("b", "killed")].map(|(w, c)| (w.into(), c.into()));
        let late = start + seconds(70);
        assert_eq!(members.outcome(1, PATIENCE, false, late), Outcome::NoneFinished(causes.into()));
        assert_eq!(members.outcome(1, PATIENCE, true, late), Outcome::Done, "a run that is over");
    }

    #[tokio::test]
    async fn all_lost_and_none_finished_is_an_error_with_each_cause() {
        let (mut members, start) = (Members::new(), Instant::now());
        let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
        members.lost(a, "killed", start);
        members.lost(b, "unplugged", start + seconds(1));
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(60)), Outcome::Waiting);
        let causes = [("a".to_owned(), "killed".to_owned()), ("b".to_owned(), "unplugged".to_owned())];
        assert_eq!(
            members.outcome(1, PATIENCE, false, start + seconds(61)),
            Outcome::NoneFinished(causes.into())
        );
    }

    #[tokio::test]
    async fn names_are_given_where_none_is_brought() {
        let (mut members, now) = (Members::new(), Instant::now());
        join(&mut members, "worker-1", now);
        let name = |members: &mut Members| members.join(None, String::new(), [0; 16], connection(), now).id;
        assert_eq!((name(&mut members), name(&mut members)), ("worker-2".into(), "worker-3".into()));
    }

    #[tokio::test]
    async fn those_that_went_long_ago_are_counted_and_no_longer_named() {
        let (mut members, start) = (Members::new(), Instant::now());
        let connection = connection();
        let come = |members: &mut Members, id: Option<&str>, at: u64| {
            let id = id.map(str::to_owned);
            members.join(id, String::new(), [7; 16], Arc::clone(&connection), start + seconds(at))
        };
        let finished = come(&mut members, Some("first"), 0).incarnation;
        members.goodbye(finished, &Parting::Finished, start);
        for at in 1..=MAX_GONE as u64 + 4 {
            let crashed = come(&mut members, None, at).incarnation;
            members.lost(crashed, "killed", start + seconds(at));
        }
        let last = start + seconds(MAX_GONE as u64 + 4);
        let grace = PATIENCE.rejoin_grace;
        members.tick(LEASE, grace, last);
        members.tick(LEASE, grace, last);
        assert_eq!(members.iter().count(), MAX_GONE + 5, "the last ones may come back");
        members.tick(LEASE, grace, last + grace);
        members.tick(LEASE, grace, last + grace);
        assert_eq!((members.iter().count(), members.num_joined()), (MAX_GONE, MAX_GONE + 5));
        assert!(members.iter().all(|(_, member)| member.incarnation > finished + 4), "the oldest went");
        assert_eq!(members.outcome(MAX_GONE + 5, PATIENCE, false, last + grace + LEASE), Outcome::Done);
        let next = come(&mut members, None, 9999);
        assert_eq!(next.id, format!("worker-{}", MAX_GONE + 5), "a name that nobody had");
    }

    #[tokio::test]
    async fn who_cannot_begin_is_no_member_and_is_told_of() {
        let (mut members, start) = (Members::new(), Instant::now());
        let withdrawn = |cause: &str| Parting::Withdrawn { cause: Some(cause.to_owned()) };
        let first = members.join(None, String::new(), [7; 16], connection(), start);
        let (ended, cause) = members.goodbye(first.incarnation, &withdrawn("it\ndiffers"), start).unwrap();
        assert_eq!((ended.id.as_str(), cause.as_str()), ("worker-0", "could not begin: it differs"));
        assert_eq!(members.departures().next().unwrap().cause, cause);
        assert_eq!(members.num_joined(), 0);
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
        assert_eq!(
            members.join(None, String::new(), [7; 16], connection(), start).id,
            "worker-0",
            "it is free"
        );

        let b = join(&mut members, "b", start);
        members.goodbye(b, &Parting::Finished, start);
        let again = join(&mut members, "b", start);
        members.goodbye(again, &withdrawn(&"x".repeat(1000)), start);
        let told = members.departures().last().unwrap().cause.chars().count();
        assert!((MAX_CAUSE_CHARS..MAX_CAUSE_CHARS + 30).contains(&told), "{told}");
    }

    #[tokio::test]
    async fn a_name_that_comes_again_and_cannot_begin_is_what_it_was() {
        let (mut members, start) = (Members::new(), Instant::now());
        let withdrawn = Parting::Withdrawn { cause: Some("it differs".to_owned()) };
        let key = WorkerKey { slot: 3, incarnation: 1 };
        for id in ["finished", "left", "lost", "there"] {
            let first = join(&mut members, id, start);
            members.register::<()>(first, |_| Ok(key));
            match id {
                "finished" => drop(members.goodbye(first, &Parting::Finished, start)),
                "left" => drop(members.goodbye(first, &Parting::Left { cause: None }, start)),
                "lost" => drop(members.lost(first, "killed", start)),
                _ => {}
            }
        }
        let late = start + seconds(40);
        for (id, was, cause) in [
            ("finished", State::Finished, "finished"),
            ("left", State::Left, "left before its work was done"),
            ("lost", State::Lost, "killed"),
            ("there", State::Lost, REPLACED),
        ] {
            let again = join(&mut members, id, late);
            assert!(members.goodbye(again, &withdrawn, late).unwrap().0.news);
            let told = members.departures().last().unwrap();
            assert_eq!((told.state, told.cause.as_str()), (State::Left, "could not begin: it differs"));
            let member = &members.by_id[id];
            assert_eq!((member.state, member.cause.as_deref(), member.since), (was, Some(cause), late));
            let before = member.incarnation;
            assert!(before < again);
            let late_heartbeats = [again, before].map(|process| members.heard(process, 1, late));
            assert_eq!(late_heartbeats, [false; 2], "what was under way brings nobody back");
            assert!(!members.has_not_begun(again) && !members.has_not_begun(before));
            assert!(members.goodbye(again, &withdrawn, late).is_none(), "told once");
        }
        assert_eq!(members.num_joined(), 4);
        let grace = PATIENCE.rejoin_grace;
        assert_eq!(members.outcome(1, PATIENCE, false, late + seconds(59)), Outcome::Waiting);
        let forgotten = members.tick(LEASE, grace, late + grace).forgotten;
        assert_eq!(forgotten.iter().map(|f| f.key).collect::<Vec<_>>(), [Some(key); 2], "of the lost ones");
        assert_eq!(members.outcome(1, PATIENCE, false, late + grace + PATIENCE.linger), Outcome::Done);
    }

    #[tokio::test]
    async fn who_could_not_begin_was_there_until_it_went() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        members.goodbye(a, &Parting::Finished, start);
        let b = join(&mut members, "b", start + seconds(5));
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(19)), Outcome::Waiting);
        members.goodbye(b, &Parting::Withdrawn { cause: None }, start + seconds(20));
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(29)), Outcome::Waiting);
        members.excuse(seconds(100), start + seconds(129));
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(129)), Outcome::Waiting);
        assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(130)), Outcome::Done);
    }

    #[tokio::test]
    async fn only_who_is_there_is_measured() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = members.join(Some("a".into()), String::new(), [7; 16], connection(), start);
        members.tick(LEASE, seconds(60), start);
        a.traffic.samples.store(20, std::sync::atomic::Ordering::Relaxed);
        members.tick(LEASE, seconds(60), start + seconds(2));
        let rate = |members: &Members| members.by_id["a"].rate();
        assert_eq!(rate(&members), 10.0);
        members.lost(a.incarnation, "killed", start + seconds(2));
        for s in 3..5 {
            members.tick(LEASE, seconds(60), start + seconds(s));
        }
        assert_eq!(rate(&members), 0.0);
        assert_eq!(members.by_id["a"].num_measured(), 0);
    }

    #[tokio::test]
    async fn a_newcomer_that_is_refused_has_never_come() {
        let (mut members, start) = (Members::new(), Instant::now());
        let finished = join(&mut members, "a", start);
        members.goodbye(finished, &Parting::Finished, start);
        let b = members.join(Some("b".into()), String::new(), [7; 16], connection(), start);
        assert!(b.newcomer);
        members.withdraw(b.incarnation);
        assert_eq!((members.num_joined(), members.departures().count()), (1, 1));
        let again = members.join(Some("a".into()), String::new(), [7; 16], connection(), start);
        assert!(!again.newcomer, "its name has come before, and stays");
    }

    #[tokio::test]
    async fn the_slot_of_a_lost_worker_is_given_up_once_after_its_grace() {
        let (mut members, start) = (Members::new(), Instant::now());
        let a = join(&mut members, "a", start);
        let key = WorkerKey { slot: 3, incarnation: 1 };
        members.register::<()>(a, |_| Ok(key));
        members.lost(a, "killed", start);
        assert!(members.tick(LEASE, seconds(60), start + seconds(59)).forgotten.is_empty());
        assert_eq!(members.tick(LEASE, seconds(60), start + seconds(60)).forgotten[0].key, Some(key));
        assert!(members.tick(LEASE, seconds(60), start + seconds(61)).forgotten.is_empty());
    }
}
