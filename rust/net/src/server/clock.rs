//! The control thread's look at the clock, for everybody: who has been silent, on which connection nothing moves that
//! should, how busy each data thread is.

use super::balance::{Balance, Served};
use super::config::ServerConfig;
use super::connection::{Answer, Connection, Watch};
use super::membership::{Forgotten, Ticked};
use super::shared::Shared;
use offbeat_core::wire::message::RefusalCode;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};

/// The longest time between two looks at the clock.
const MAX_TICK: Duration = Duration::from_millis(250);
/// Looks per timeout, so that it is noticed soon after it has passed.
const LOOKS: u32 = 8;
/// So many looks late, half of the shortest timeout, and the server itself stood still.
const LOOKS_MISSED: u32 = LOOKS / 2;

/// Looks at the clock until the server stops.
pub(super) async fn tick(shared: Arc<Shared>) {
    let config = &shared.config;
    let period = period(config);
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watches: HashMap<u64, Watch> = HashMap::new();
    let mut balance = Balance::default();
    let begun = Instant::now();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let standstill = standstill(shared.members().looked().unwrap_or(begun), now, period);
        if !standstill.is_zero() {
            tracing::warn!(seconds = standstill.as_secs_f64(), "the server itself stood still");
            shared.excuse(standstill, now);
        }
        let connections = shared.connections();
        watch(&shared, &connections, &mut watches, standstill, now);
        spread(&shared, &connections, &watches, &mut balance);
        shared.give_up_the_idle(|data| idle(&connections, &watches, data, now), now);
        let untold = shared.strangers().untold(now);
        untold.tell();
        let mut members = shared.members();
        shared.note_who_waits(&mut members, now);
        let Ticked { lost, stalled, forgotten } = members.tick(config.lease, config.rejoin_grace, now);
        let have_gone = !lost.is_empty() || !forgotten.is_empty();
        if let Some(model) = shared.model.get() {
            // Under the members' lock: one that comes back meanwhile comes after it.
            lost.iter().filter_map(|(.., key, _)| *key).for_each(|key| model.store.lost(key));
            for Forgotten { key, has_begun, .. } in &forgotten {
                match key {
                    Some(key) if *has_begun => model.store.absent(*key),
                    Some(key) => model.store.depart(*key, false),
                    None => {}
                }
            }
        }
        drop(members);
        shared.close_late_round(now);
        for (worker, incarnation, _, cause) in &lost {
            tracing::warn!(worker, incarnation, cause, "a worker is lost");
        }
        for worker in stalled {
            tracing::warn!(worker, "a worker is alive but makes no progress");
        }
        for Forgotten { connections, .. } in forgotten {
            connections.close(RefusalCode::Timeout, "the worker was not heard of for too long", None);
        }
        if have_gone {
            shared.notify();
        }
    }
}

/// Between two looks.
fn period(config: &ServerConfig) -> Duration {
    let shortest = config.lease.min(config.progress_timeout) / LOOKS;
    shortest.clamp(Duration::from_millis(1), MAX_TICK)
}

/// Whether the clock was last looked at too long ago, so that the next look will find a standstill.
pub(super) fn has_stood_still(config: &ServerConfig, looked: Instant, now: Instant) -> bool {
    !standstill(looked, now, period(config)).is_zero()
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

/// For how long nothing has come on a connection, between two frames.
fn idle(
    connections: &[(u64, Arc<Connection>)],
    watches: &HashMap<u64, Watch>,
    connection: &Arc<Connection>,
    now: Instant,
) -> Option<Duration> {
    let (number, _) = connections.iter().find(|(_, one)| Arc::ptr_eq(one, connection))?;
    watches.get(number)?.idle(now)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Client, ClientConfig, Entered, Entry};
    use crate::frame::Socket;
    use crate::server::{Server, ServerConfig};
    use std::net::SocketAddr;
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::thread;

    fn client(address: SocketAddr, name: &str) -> Client {
        let config = ClientConfig {
            address: address.to_string(),
            worker_id: Some(name.to_owned()),
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: Duration::from_secs(20),
            patience: None,
        };
        Client::connect(config, None, &|| false).unwrap()
    }

    #[test]
    fn a_look_that_is_much_too_late_is_a_standstill() {
        let (looked, period) = (Instant::now(), Duration::from_millis(250));
        assert_eq!(standstill(looked, looked + period, period), Duration::ZERO);
        assert_eq!(standstill(looked, looked + period * LOOKS_MISSED, period), Duration::ZERO);
        let minute = Duration::from_secs(60);
        assert_eq!(standstill(looked, looked + minute, period), minute);
    }

    #[test]
    fn a_standstill_of_the_server_is_nobodys_silence() {
        let lease = Duration::from_secs(2);
        let server = Server::start(ServerConfig { lease, ..ServerConfig::default() }).unwrap();
        let _client = client(server.address(), "heard");
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

    #[test]
    fn a_standstill_of_the_server_is_nobodys_grace_though_a_round_is_entered_before_it_is_seen() {
        let grace = Duration::from_secs(60); // far more than what is done here takes, however busy the machine is
        let server = Server::start(ServerConfig { lease: grace, ..ServerConfig::default() }).unwrap();
        let mut clients = ["a", "b", "c"].map(|name| client(server.address(), name));
        let rounds = || server.shared.rounds_status();
        let until = |is_so: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(20);
            while !is_so() {
                assert!(Instant::now() < end, "it never came true");
                thread::yield_now();
            }
        };
        let enter =
            |client: &mut Client, entry: Entry| -> Entered { client.enter(&entry, &|| false).unwrap() };
        let within = |grace| Entry { grace: Some(grace), ..Entry::of(1.0) };
        thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| {
                    let together = Entry { at_least: Some(3), ..Entry::of(0.0) };
                    let entered = enter(client, together);
                    client.gather(entered.round, &|| false).unwrap();
                });
            }
        });
        let [a, b, c] = &mut clients;
        thread::scope(|scope| {
            let ((go_on, halted), (tell, is_halted)) = (mpsc::channel::<()>(), mpsc::channel());
            server.control.spawn(async move {
                tell.send(()).ok();
                halted.recv().ok(); // blocks the thread, as SIGSTOP would: there is no look at the clock
            });
            is_halted.recv().unwrap();
            let first = scope.spawn(|| enter(a, within(grace)));
            until(&|| rounds().open_entrants == 1);
            server.shared.rewind(grace * 3); // it passes, and is a standstill
            let second = scope.spawn(|| enter(b, Entry::of(1.0)));
            until(&|| rounds().open_entrants == 2 || rounds().closed > 1);
            go_on.send(()).unwrap();
            until(&|| server.shared.members().looked().is_some_and(|looked| looked.elapsed() < grace * 3));
            let last = enter(c, within(Duration::ZERO));
            let members =
                [first.join().unwrap(), second.join().unwrap(), last].map(|entered| entered.members);
            assert_eq!(members, [3; 3]);
        });
    }
}
