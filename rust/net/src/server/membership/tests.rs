use super::member::GRACE_OF_ANOTHER_LIFE;
use super::*;
use crate::frame::Socket;
use offbeat_core::dtype::Dtype;
use offbeat_core::store::{Store, StoreConfig};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use std::net::{TcpListener, TcpStream};

const LEASE: Duration = Duration::from_secs(10);
const PATIENCE: Patience =
    Patience { linger: Duration::from_secs(10), rejoin_grace: Duration::from_secs(60) };

const LINGER: Pause = Pause::Linger { linger: PATIENCE.linger };

const FIRST: Life = Life { term: FIRST_TERM, last_incarnation: 0 };

fn connection() -> Arc<Connection> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    Arc::new(Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
}

/// A worker that waits for the model.
fn come(members: &mut Members, id: &str, now: Instant) -> u32 {
    members.join(Some(id.to_owned()), (String::new(), None), [7; 16], connection(), now).incarnation
}

/// A worker with its place in the store.
fn join(members: &mut Members, id: &str, now: Instant) -> u32 {
    let incarnation = come(members, id, now);
    begin(members, incarnation)
}

fn begin(members: &mut Members, incarnation: u32) -> u32 {
    members.register::<()>(incarnation, |_| Ok(key(incarnation))).unwrap().unwrap();
    members.answered(incarnation);
    incarnation
}

const fn key(incarnation: u32) -> WorkerKey {
    WorkerKey { slot: 3, incarnation }
}

fn state(members: &Members, id: &str) -> State {
    members.by_id[id].state
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

#[tokio::test]
async fn silence_for_the_lease_is_a_loss_and_a_heartbeat_undoes_it() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    assert!(members.tick(LEASE, seconds(60), start + seconds(9)).lost.is_empty());
    let ticked = members.tick(LEASE, seconds(60), start + seconds(10));
    assert_eq!(ticked.lost[0].3, "no heartbeat for 10 s");
    assert_eq!(state(&members, "a"), State::Lost);
    assert_eq!(members.heard(a, 1, start + seconds(11)).as_deref(), Some("a"));
    assert_eq!(state(&members, "a"), State::Joined);
    assert_eq!(members.departures().count(), 1);
}

#[tokio::test]
async fn who_never_heard_that_it_was_in_could_not_begin_and_leaves_its_name() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = come(&mut members, "worker-0", start);
    members.register::<()>(a, |_| Ok(key(a))).unwrap().unwrap();
    let ended = members.lost(a, "the line broke", start).unwrap();
    assert!(ended.withdrawn && ended.key == Some(key(a)));
    assert_eq!(members.num_joined(), 0);
    let again = members.join(None, (String::new(), None), [7; 16], connection(), start);
    assert_eq!(again.id, "worker-0", "it is the same worker");
}

#[tokio::test]
async fn who_was_lost_before_it_could_speak_is_back_when_it_attaches() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (a, b) = (come(&mut members, "a", start), come(&mut members, "b", start));
    let late = start + seconds(11);
    assert_eq!(members.tick(LEASE, seconds(60), late).lost.len(), 2);
    let control = || (tokio::sync::mpsc::unbounded_channel().0, connection());
    assert_eq!(members.attach(a, &[7; 16], control(), late).map(|a| a.back), Some(true));
    assert_eq!((state(&members, "a"), state(&members, "b")), (State::Joined, State::Lost));
    let ticked = members.tick(LEASE, seconds(60), late + seconds(9));
    assert!(ticked.lost.is_empty() && ticked.stalled.is_empty(), "{ticked:?}");
    members.lost(b, "its connection ended", late);
    assert_eq!(members.attach(b, &[7; 16], control(), late), None);
}

#[tokio::test]
async fn who_was_forgotten_is_not_brought_back_by_what_was_under_way() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    members.tick(LEASE, seconds(60), start + seconds(10));
    assert_eq!(members.tick(LEASE, seconds(60), start + seconds(70)).forgotten.len(), 1);
    assert_eq!(members.heard(a, 1, start + seconds(71)), None);
    assert_eq!(state(&members, "a"), State::Lost);
}

#[tokio::test]
async fn a_grace_without_end_is_no_time_to_add() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
    members.goodbye(a, &Parting::Finished, start);
    members.lost(b, "killed", start);
    let patience = Patience { rejoin_grace: Duration::MAX, ..PATIENCE };
    assert_eq!(members.outcome(2, patience, false, start + seconds(1_000_000)), Outcome::Waiting);
    assert_eq!(members.outcome(2, patience, true, start), Outcome::Done);
}

#[tokio::test]
async fn a_heartbeat_that_was_under_way_brings_nobody_back_whose_connection_has_ended() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    assert!(members.lost(a, "killed", start).unwrap().news);
    assert_eq!(members.heard(a, 1, start), None);
    assert_eq!(state(&members, "a"), State::Lost);
    assert!(!members.lost(a, "its other connection", start).unwrap().news, "told once");
}

#[tokio::test]
async fn heartbeats_without_progress_show_a_stall() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    for s in 1..10 {
        members.heard(a, 0, start + seconds(s));
    }
    assert_eq!(members.tick(LEASE, seconds(60), start + seconds(10)).stalled, ["a"]);
    assert_eq!(members.heard(a, 5, start + seconds(11)), None);
    assert_eq!(state(&members, "a"), State::Joined);
}

#[tokio::test]
async fn who_waits_for_others_does_not_stall() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
    members.lost(b, "killed", start);
    for s in 1..=30 {
        members.heard(a, 0, start + seconds(s));
        members.wait(|_| s >= 12, start + seconds(s));
        let stalled = members.tick(LEASE, seconds(60), start + seconds(s)).stalled;
        assert_eq!(stalled, if s == 10 { vec!["a"] } else { vec![] }, "after {s} s");
    }
    assert_eq!((state(&members, "a"), state(&members, "b")), (State::Joined, State::Lost));
}

#[tokio::test]
async fn who_takes_long_from_step_to_step_stalls_after_three_times_as_long() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    let mut stalled = Vec::new();
    for s in 1..=300 {
        let steps = if s < 100 { s / 20 } else { 5 };
        members.heard(a, steps, start + seconds(s));
        if !members.tick(LEASE, seconds(60), start + seconds(s)).stalled.is_empty() {
            stalled.push(s);
        }
    }
    assert_eq!(stalled, [10, 160], "before its first step was known, and three steps after the last");
}

#[tokio::test]
async fn the_servers_own_standstill_is_nobodys_silence_stall_or_grace() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
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
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    assert!(members.goodbye(a, &Parting::Finished, start).unwrap().news);
    assert!(members.lost(a, "hung up", start).is_none());
    assert_eq!(state(&members, "a"), State::Finished);
    assert_eq!(members.heard(a, 9, start), None, "nor does a late heartbeat bring it back");
    assert_eq!(state(&members, "a"), State::Finished);
}

#[tokio::test]
async fn a_newer_process_takes_the_name_and_fences_the_older() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    let next = members.join(Some("a".into()), (String::new(), None), [8; 16], connection(), start);
    assert_eq!(next.replaced.unwrap().incarnation, a);
    assert!(next.incarnation > a);
    assert!(members.lost(a, "hung up", start).is_none(), "the old process cannot end the new one");
    let register = |members: &mut Members, process| members.register::<()>(process, |_| Ok(key(process)));
    assert!(register(&mut members, a).is_none(), "nor register after it");
    assert_eq!(register(&mut members, next.incarnation), Some(Ok(key(next.incarnation))));
}

#[tokio::test]
async fn a_lost_one_is_fenced_too_as_long_as_it_is_connected() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (first, second) = (connection(), connection());
    let join = |members: &mut Members, connection: &Arc<Connection>| {
        let joined =
            members.join(Some("a".into()), (String::new(), None), [7; 16], Arc::clone(connection), start);
        begin(members, joined.incarnation);
        joined
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
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    let control = || (tokio::sync::mpsc::unbounded_channel().0, connection());
    assert_eq!(members.attach(a, &[6; 16], control(), start), None);
    assert_eq!(members.attach(a + 1, &[7; 16], control(), start), None);
    assert_eq!(members.attach(a, &[7; 16], control(), start).map(|a| a.back), Some(false));
}

#[tokio::test]
async fn waiting_ends_when_enough_have_come_and_nobody_was_there_for_the_linger() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
    let a = join(&mut members, "a", start);
    members.goodbye(a, &Parting::Finished, start + seconds(5));
    assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(14)), Outcome::Waiting);
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(15)), Outcome::Done);
    assert_eq!(members.outcome(1, PATIENCE, true, start + seconds(6)), Outcome::Done, "a run that is over");
}

#[tokio::test]
async fn a_lost_worker_counts_as_there_for_its_grace() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
    members.goodbye(a, &Parting::Finished, start);
    members.lost(b, "killed", start);
    assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(59)), Outcome::Waiting);
    assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(70)), Outcome::Done);
}

#[tokio::test]
async fn what_is_waited_for_when_nobody_is_there_is_known() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    assert_eq!(members.pause(1, PATIENCE, start), Pause::None, "nobody has come");
    let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
    members.goodbye(a, &Parting::Finished, start);
    assert_eq!(members.pause(1, PATIENCE, start), Pause::None, "one is there");
    members.lost(b, "killed", start);
    assert_eq!(members.pause(3, PATIENCE, start), Pause::None, "a third one is waited for");
    assert_eq!(
        members.pause(2, PATIENCE, start + seconds(59)),
        Pause::Grace { num_lost: 1, grace: PATIENCE.rejoin_grace, linger: PATIENCE.linger }
    );
    assert_eq!(members.pause(2, PATIENCE, start + seconds(60)), LINGER);
}

#[tokio::test]
async fn the_wait_that_is_announced_is_the_one_that_is_waited() {
    for (others_finished, graces) in [(true, 1), (false, 1), (true, 5), (false, 5)] {
        let start = Instant::now();
        let mut members = if graces == 1 {
            let mut members = Members::new(FIRST);
            let (lost, other) = (join(&mut members, "a", start), join(&mut members, "b", start));
            members.lost(lost, "killed", start);
            if others_finished {
                members.goodbye(other, &Parting::Finished, start);
            } else {
                members.lost(other, "killed", start);
            }
            members
        } else {
            let mut members = Members::new(Life { term: 2, last_incarnation: 9 });
            let other = if others_finished { Standing::Finished } else { Standing::There };
            members.expect("a", key(1), Standing::There, start);
            members.expect("b", key(2), other, start);
            members
        };
        let Pause::Grace { grace, linger, .. } = members.pause(1, PATIENCE, start) else {
            panic!("nobody is there, and one is lost")
        };
        assert_eq!(grace, PATIENCE.rejoin_grace * graces);
        assert_eq!(linger.is_zero(), !others_finished);
        members.tick(LEASE, PATIENCE.rejoin_grace, start + grace);
        let outcome_in = |wait: Duration| members.outcome(1, PATIENCE, false, start + wait);
        assert_eq!(outcome_in((grace + linger).saturating_sub(Duration::from_millis(1))), Outcome::Waiting);
        assert_ne!(outcome_in(grace + linger), Outcome::Waiting);
    }
}

#[tokio::test]
async fn who_left_before_its_work_was_done_has_not_finished() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let (a, b) = (join(&mut members, "a", start), join(&mut members, "b", start));
    members.goodbye(a, &Parting::Left { cause: None }, start);
    members.lost(b, "killed", start);
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(69)), Outcome::Waiting, "it may return");
    let causes = [("a", "left before its work was done"), ("b", "killed")].map(|(w, c)| (w.into(), c.into()));
    let late = start + seconds(70);
    assert_eq!(members.outcome(1, PATIENCE, false, late), Outcome::NoneFinished(causes.into()));
    assert_eq!(members.outcome(1, PATIENCE, true, late), Outcome::Done, "a run that is over");
}

#[tokio::test]
async fn all_lost_and_none_finished_is_an_error_with_each_cause() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
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
    let (mut members, now) = (Members::new(FIRST), Instant::now());
    join(&mut members, "worker-1", now);
    let name =
        |members: &mut Members| members.join(None, (String::new(), None), [0; 16], connection(), now).id;
    assert_eq!((name(&mut members), name(&mut members)), ("worker-2".into(), "worker-3".into()));
}

#[tokio::test]
async fn those_that_went_long_ago_are_counted_and_no_longer_named() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let connection = connection();
    let come = |members: &mut Members, id: Option<&str>, at: u64| {
        let id = id.map(str::to_owned);
        let joined =
            members.join(id, (String::new(), None), [7; 16], Arc::clone(&connection), start + seconds(at));
        begin(members, joined.incarnation);
        joined
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
async fn ten_thousand_that_came_and_went_take_no_more_room_than_those_who_are_remembered() {
    const WORKERS: usize = 10_000;
    let config = StoreConfig { max_workers: 8, ..StoreConfig::default() };
    let (name, dtype, role) = ("w".into(), Dtype::F32, Role::Parameter);
    let tensor = TensorSpec { name, aliases: vec![], shape: vec![4], dtype, role };
    let table = Arc::new(TensorTable::new(vec![tensor]).unwrap());
    let store = Store::new(table, config, FIRST_TERM, &mut |_, bytes| bytes.fill(0));
    let (mut members, start, connection) = (Members::new(FIRST), Instant::now(), connection());
    let (grace, mut most) = (PATIENCE.rejoin_grace, 0);
    for n in 0..WORKERS {
        let now = start + Duration::from_millis(100) * u32::try_from(n).unwrap();
        let joined = members.join(None, (String::new(), None), [7; 16], Arc::clone(&connection), now);
        let incarnation = joined.incarnation;
        let key = members.register(incarnation, |id| store.register(id, incarnation)).unwrap().unwrap();
        members.answered(incarnation);
        match n % 3 {
            0 => drop(members.goodbye(incarnation, &Parting::Finished, now)),
            1 => drop(members.goodbye(incarnation, &Parting::Left { cause: None }, now)),
            _ => drop(members.lost(incarnation, "killed", now)),
        }
        store.depart(key, n % 3 == 0);
        members.tick(LEASE, grace, now);
        most = most.max(members.iter().count());
    }
    // One in three of those who came within the grace, at ten a second, may come back.
    let may_come_back = 10 * usize::try_from(grace.as_secs()).unwrap() / 3;
    assert!(most <= MAX_GONE + may_come_back + 2, "{most}");
    assert_eq!(members.num_joined(), WORKERS);
    assert_eq!(members.departures().count(), 1000);
    assert_eq!(store.status().workers.len(), 8, "slots are given away");
}

#[tokio::test]
async fn who_cannot_begin_is_no_member_and_is_told_of() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let withdrawn = |cause: &str| Parting::Withdrawn { cause: Some(cause.to_owned()) };
    let first = members.join(None, (String::new(), None), [7; 16], connection(), start);
    let ended = members.goodbye(first.incarnation, &withdrawn("it\ndiffers"), start).unwrap();
    assert_eq!((ended.id.as_str(), ended.cause.as_str()), ("worker-0", "could not begin: it differs"));
    assert_eq!((members.departures().next().unwrap().cause.as_str(), ended.withdrawn), (&*ended.cause, true));
    assert_eq!(members.num_joined(), 0);
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
    assert_eq!(
        members.join(None, (String::new(), None), [7; 16], connection(), start).id,
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
async fn who_leaves_while_there_is_no_model_could_not_begin() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let left = Parting::Left { cause: Some("ZeroDivisionError".to_owned()) };
    let waiting = come(&mut members, "a", start);
    let ended = members.goodbye(waiting, &left, start).unwrap();
    assert_eq!((ended.cause.as_str(), ended.withdrawn), ("could not begin: ZeroDivisionError", true));
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
    let finished = come(&mut members, "b", start);
    members.goodbye(finished, &Parting::Finished, start);
    assert_eq!((members.num_joined(), state(&members, "b")), (1, State::Finished), "as it says itself");
}

#[tokio::test]
async fn a_name_that_comes_again_and_cannot_begin_is_what_it_was() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let withdrawn = Parting::Withdrawn { cause: Some("it differs".to_owned()) };
    let come = |members: &mut Members, id: &str, host: &str, connection: &Arc<Connection>, now: Instant| {
        members.join(Some(id.into()), (host.into(), None), [7; 16], Arc::clone(connection), now).incarnation
    };
    let mut keys = Vec::new();
    let (served, newer) = (connection(), connection());
    for id in ["finished", "left", "lost", "there"] {
        let first = come(&mut members, id, "before", &served, start);
        keys.push(Some(key(begin(&mut members, first))));
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
        let again = come(&mut members, id, "newer", &newer, late);
        assert!(members.goodbye(again, &withdrawn, late).unwrap().news);
        let told = members.departures().last().unwrap();
        assert_eq!((told.state, told.cause.as_str()), (State::Left, "could not begin: it differs"));
        let member = &members.by_id[id];
        assert_eq!((member.state, member.cause.as_deref(), member.since), (was, Some(cause), late));
        assert_eq!((member.host.as_str(), member.is_served_by(&newer)), ("before", false));
        let before = member.incarnation;
        assert!(before < again);
        let late_heartbeats = [again, before].map(|process| members.heard(process, 1, late));
        assert_eq!(late_heartbeats, [None, None], "what was under way brings nobody back");
        assert!(members.goodbye(again, &withdrawn, late).is_none(), "told once");
    }
    assert_eq!(members.num_joined(), 4);
    let grace = PATIENCE.rejoin_grace;
    assert_eq!(members.outcome(1, PATIENCE, false, late + seconds(59)), Outcome::Waiting);
    let forgotten = members.tick(LEASE, grace, late + grace).forgotten;
    assert_eq!(forgotten.iter().map(|f| f.key).collect::<Vec<_>>(), keys[2..], "of the lost ones");
    assert_eq!(members.outcome(1, PATIENCE, false, late + grace + PATIENCE.linger), Outcome::Done);
}

#[tokio::test]
async fn who_is_replaced_before_it_began_leaves_the_name_as_it_was() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let finished = join(&mut members, "old", start);
    members.goodbye(finished, &Parting::Finished, start);
    for id in ["old", "new"] {
        let waiting = come(&mut members, id, start);
        let newer = members.join(Some(id.into()), (String::new(), None), [8; 16], connection(), start);
        assert_eq!((newer.is_new_name, newer.replaced.unwrap().incarnation), (id == "new", waiting));
        let told = members.departures().last().unwrap();
        assert_eq!((told.incarnation, told.state), (waiting, State::Left));
        assert_eq!(told.cause, format!("could not begin: {REPLACED}"));
        assert!(members.goodbye(newer.incarnation, &Parting::Withdrawn { cause: None }, start).is_some());
    }
    assert_eq!((members.num_joined(), state(&members, "old")), (1, State::Finished));
    assert_eq!(members.outcome(1, PATIENCE, false, start + PATIENCE.linger), Outcome::Done);
    assert_eq!(members.outcome(2, PATIENCE, false, start + seconds(1000)), Outcome::Waiting);
}

#[tokio::test]
async fn who_could_not_begin_was_there_until_it_went() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
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
async fn a_replacement_that_could_not_begin_is_lingered_for_where_all_others_are_lost() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let crashed = join(&mut members, "a", start);
    members.lost(crashed, "killed", start);
    let replacement = join(&mut members, "b", start + seconds(50));
    members.goodbye(replacement, &Parting::Withdrawn { cause: None }, start + seconds(61));
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(70)), Outcome::Waiting);
    assert_eq!(members.pause(1, PATIENCE, start + seconds(70)), LINGER, "as is announced");
    let causes = [("a".to_owned(), "killed".to_owned())];
    assert_eq!(
        members.outcome(1, PATIENCE, false, start + seconds(71)),
        Outcome::NoneFinished(causes.into())
    );
}

#[tokio::test]
async fn who_falls_silent_before_it_began_is_told_of_once_and_out_with_its_grace() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let grace = PATIENCE.rejoin_grace;
    let lost = join(&mut members, "a", start);
    members.lost(lost, "killed", start);
    let (silent, broken) = (come(&mut members, "b", start), come(&mut members, "c", start));
    let at = start + LEASE;
    assert_eq!(members.tick(LEASE, grace, at).lost.len(), 2);
    assert_eq!(state(&members, "b"), State::Lost, "it may be heard again");
    let ended = members.lost(broken, "hung up", at + seconds(1)).unwrap();
    assert_eq!((ended.news, ended.withdrawn), (false, true));
    let forgotten = members.tick(LEASE, grace, at + grace).forgotten;
    let keys: Vec<_> = forgotten.iter().map(|f| f.key).collect();
    assert_eq!(keys, [Some(key(lost)), None], "the connections of both are to be closed");
    assert!(members.lost(silent, "closed for its silence", at + grace).is_none());
    assert_eq!((members.num_joined(), members.departures().count()), (1, 3));
    assert_eq!(members.outcome(1, PATIENCE, false, at + grace), Outcome::Waiting, "it was there until now");
    let late = at + grace + PATIENCE.linger;
    let causes = [("a".to_owned(), "killed".to_owned())];
    assert_eq!(members.outcome(1, PATIENCE, false, late), Outcome::NoneFinished(causes.into()));
}

#[tokio::test]
async fn a_long_cause_is_cut_whatever_it_is_the_cause_of() {
    let (mut members, now) = (Members::new(FIRST), Instant::now());
    let long = format!("it was refused:\n{}", "x".repeat(1000));
    let (a, b) = (join(&mut members, "a", now), come(&mut members, "b", now));
    for worker in [a, b] {
        let ended = members.lost(worker, &long, now).unwrap();
        let cause = &ended.cause;
        assert!(cause.contains("it was refused: xxx") && cause.ends_with("x…"), "{cause}");
        assert_eq!(members.departures().last().unwrap().cause, *cause);
    }
}

#[tokio::test]
async fn only_who_is_there_is_measured() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = members.join(Some("a".into()), (String::new(), None), [7; 16], connection(), start);
    begin(&mut members, a.incarnation);
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
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let finished = join(&mut members, "a", start);
    members.goodbye(finished, &Parting::Finished, start);
    let b = members.join(Some("b".into()), (String::new(), None), [7; 16], connection(), start);
    assert!(b.is_new_name);
    members.withdraw(b.incarnation);
    assert_eq!((members.num_joined(), members.departures().count()), (1, 1));
    let again = members.join(Some("a".into()), (String::new(), None), [7; 16], connection(), start);
    assert!(!again.is_new_name, "its name has come before, and stays");
}

#[tokio::test]
async fn the_slot_of_a_lost_worker_is_given_up_once_after_its_grace() {
    let (mut members, start) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", start);
    members.lost(a, "killed", start);
    assert!(members.tick(LEASE, seconds(60), start + seconds(59)).forgotten.is_empty());
    assert_eq!(members.tick(LEASE, seconds(60), start + seconds(60)).forgotten[0].key, Some(key(a)));
    assert!(members.tick(LEASE, seconds(60), start + seconds(61)).forgotten.is_empty());
}

#[tokio::test]
async fn of_two_that_wait_for_one_seat_the_earlier_attempt_does_not_get_it() {
    let (mut members, now) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", now);
    let at = |at_ns| Some(Attempt { clock: [1; 16], at_ns });
    let seat = members.call_back("a", a, &[7; 16], at(1)).unwrap().seat;
    assert!(members.is_seat("a", a, &seat, at(1)));
    members.call_back("a", a, &[7; 16], at(2)).unwrap();
    assert!(!members.is_seat("a", a, &seat, at(1)) && members.is_seat("a", a, &seat, at(2)));
    assert_eq!(members.call_back("a", a, &[7; 16], at(1)).unwrap_err(), NoSeat::Overtaken);
    members.seat("a", (a, None), &seat, (String::new(), at(2), [7; 16]), &connection(), now);
    assert_eq!(members.call_back("a", a, &[7; 16], at(1)).unwrap_err(), NoSeat::Overtaken);
}

#[tokio::test]
async fn a_return_that_fails_is_a_loss_that_is_told_once() {
    for old_session_ends_first in [true, false] {
        let (mut members, now) = (Members::new(FIRST), Instant::now());
        let a = join(&mut members, "a", now);
        members.call_back("a", a, &[7; 16], None).unwrap();
        let ended = if old_session_ends_first {
            assert!(members.lost(a, "it came back", now).is_none(), "no news while it may be seated");
            assert!(members.lost(a, "its other connection, too", now).is_none());
            assert!(members.not_back("a", a, None));
            members.lost(a, "its new connection broke", now).unwrap()
        } else {
            assert!(!members.not_back("a", a, None), "its old session is still to end");
            members.lost(a, "it came back", now).unwrap()
        };
        assert!(ended.news && !ended.withdrawn, "{ended:?}");
        assert_eq!((state(&members, "a"), members.departures().count()), (State::Lost, 1));
        assert!(!members.not_back("a", a, None));
        assert_eq!(members.heard(a, 1, now), None, "it has no connection");
        assert!(members.call_back("a", a, &[7; 16], None).is_ok(), "it may try again");
    }
}

#[tokio::test]
async fn who_had_not_begun_and_does_not_come_back_could_not_begin() {
    let (mut members, now) = (Members::new(FIRST), Instant::now());
    let a = come(&mut members, "a", now);
    members.call_back("a", a, &[7; 16], None).unwrap();
    assert!(members.lost(a, "it came back", now).is_none());
    assert!(members.not_back("a", a, None));
    let ended = members.lost(a, "its new connection broke", now).unwrap();
    assert!(ended.news && ended.withdrawn, "{ended:?}");
    assert_eq!((members.num_joined(), members.departures().count()), (0, 1));
}

#[tokio::test]
async fn a_return_that_fails_is_no_loss_where_another_attempt_waits_or_is_seated() {
    let (mut members, now) = (Members::new(FIRST), Instant::now());
    let a = join(&mut members, "a", now);
    let at = |at_ns| Some(Attempt { clock: [1; 16], at_ns });
    let seat = members.call_back("a", a, &[7; 16], at(1)).unwrap().seat;
    assert!(members.lost(a, "it came back", now).is_none());
    members.call_back("a", a, &[7; 16], at(2)).unwrap();
    assert!(!members.not_back("a", a, at(1)), "it has tried again");
    members.seat("a", (a, None), &seat, (String::new(), at(2), [7; 16]), &connection(), now);
    assert!(!members.not_back("a", a, at(2)));
    assert_eq!((state(&members, "a"), members.departures().count()), (State::Joined, 0));
}

#[tokio::test]
async fn after_a_restart_the_places_of_the_life_before_are_kept_for_as_long_as_they_are_waited_for() {
    let (mut members, start) = (Members::new(Life { term: 2, last_incarnation: 9 }), Instant::now());
    members.expect("a", key(1), Standing::There, start);
    let mut forgotten = |at| {
        let ticked = members.tick(seconds(10), PATIENCE.rejoin_grace, start + seconds(at));
        ticked.forgotten.iter().filter_map(|f| f.key).collect::<Vec<_>>()
    };
    assert_eq!(forgotten(299), []);
    assert_eq!(forgotten(300), [key(1)]);
    assert_eq!(forgotten(301), []);
    assert!(members.call_back("a", key(1).incarnation, &[7; 16], None).is_ok(), "nor does it end there");
}

#[tokio::test]
async fn after_a_restart_who_had_been_away_for_long_before_is_not_waited_for_and_may_come() {
    let life = Life { term: 2, last_incarnation: 9 };
    let (mut members, start) = (Members::new(life), Instant::now());
    members.expect("away", key(1), Standing::Away, start);
    let alone = |members: &Members, at| members.outcome(1, PATIENCE, false, start + seconds(at));
    assert_eq!(members.pause(1, PATIENCE, start), Pause::Linger { linger: PATIENCE.rejoin_grace });
    assert_eq!(alone(&members, 59), Outcome::Waiting, "for a newcomer");
    assert!(matches!(alone(&members, 60), Outcome::NoneFinished(_)));
    let b = join(&mut members, "b", start);
    members.goodbye(b, &Parting::Finished, start + seconds(20));
    assert_eq!(alone(&members, 29), Outcome::Waiting);
    assert_eq!(alone(&members, 30), Outcome::Done, "the linger");
    let missing: Vec<_> = members.missing().collect();
    assert_eq!(missing, [("away", "had been away for long before the server was started again")]);
    assert!(members.tick(LEASE, PATIENCE.rejoin_grace, start + seconds(40)).forgotten.is_empty());
    let seat = members.call_back("away", key(1).incarnation, &[7; 16], None).unwrap().seat;
    members.seat(
        "away",
        (key(1).incarnation, None),
        &seat,
        (String::new(), None, [7; 16]),
        &connection(),
        start,
    );
    assert_eq!(alone(&members, 100), Outcome::Waiting, "it is there");
}

#[tokio::test]
async fn who_was_there_in_the_life_before_is_awaited_for_its_grace_unless_a_newer_process_has_its_name() {
    let (mut members, start) = (Members::new(Life { term: 2, last_incarnation: 9 }), Instant::now());
    let standings = [Standing::There, Standing::There, Standing::Away, Standing::Left, Standing::Finished];
    for (incarnation, standing) in (1..).zip(standings) {
        members.expect(&format!("of before {incarnation}"), key(incarnation), standing, start);
    }
    assert_eq!(&members.those_heard() | &members.those_expected(), [1, 2].into());
    let newer = join(&mut members, "of before 2", start);
    assert_eq!(&members.those_heard() | &members.those_expected(), [1, newer].into());
    let grace = PATIENCE.rejoin_grace * GRACE_OF_ANOTHER_LIFE;
    let mut tick = |at| {
        members.heard(newer, 0, start + at);
        members.tick(seconds(10), PATIENCE.rejoin_grace, start + at);
        &members.those_heard() | &members.those_expected()
    };
    assert_eq!(tick(seconds(299)), [1, newer].into());
    assert_eq!(tick(grace), [newer].into());
}

#[tokio::test]
async fn after_a_restart_those_of_the_life_before_are_waited_for_longer() {
    let (mut members, start) = (Members::new(Life { term: 2, last_incarnation: 9 }), Instant::now());
    members.expect("done", key(1), Standing::Finished, start);
    let all_gone = |members: &Members, at| members.pause(1, PATIENCE, start + seconds(at));
    let grace = PATIENCE.rejoin_grace * GRACE_OF_ANOTHER_LIFE;
    assert_eq!(
        all_gone(&members, 0),
        Pause::Linger { linger: PATIENCE.rejoin_grace },
        "a newcomer needs longer"
    );
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(59)), Outcome::Waiting);
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(60)), Outcome::Done);
    members.expect("a", key(2), Standing::There, start);
    let linger = PATIENCE.rejoin_grace; // as announced: a newcomer still needs longer
    assert_eq!(all_gone(&members, 299), Pause::Grace { num_lost: 1, grace, linger });
    assert_eq!(members.outcome(1, PATIENCE, false, start + seconds(299)), Outcome::Waiting);
    let over = start + grace + PATIENCE.rejoin_grace;
    assert_eq!(members.outcome(1, PATIENCE, false, over), Outcome::Done);
    let missing: Vec<_> = members.missing().map(|(id, _)| id).collect();
    assert_eq!(missing, ["a"], "which is to be told");
    // Once one has come, it is as in any other life.
    let b = join(&mut members, "b", start);
    members.goodbye(b, &Parting::Finished, over);
    assert_eq!(members.pause(1, PATIENCE, over), LINGER);
    assert_eq!(members.outcome(1, PATIENCE, false, over + PATIENCE.linger), Outcome::Done);
}
