//! Workers that put together what each has made on its own, and wait for those who are there, and for nobody else.

use crate::cells::status;
use crate::relay::Relay;
use crate::support::{
    DEADLINE, Worker, client_config, config, eventually, filled, never, parameter, sgd, table,
};
use offbeat_core::spec::{Contribution, Transaction};
use offbeat_core::wire::message::{New, Parting};
use offbeat_net::client::{Client, ClientConfig, ClientError, Entered, Entry};
use offbeat_net::server::{CheckpointConfig, Ending, Every, Resume, Server, ServerConfig, Snapshot};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const LEN: usize = 70_000;

/// Of differences, which it adds.
fn adding(transaction: Transaction) -> ServerConfig {
    ServerConfig { transaction, optimizer: None, ..config(sgd(1.0, 0.0, 0.0)) }
}

fn start(config: ServerConfig) -> Server {
    let table = table(vec![parameter("w", LEN)]);
    let values = filled(&table, 0);
    Server::with_model(config, Snapshot::of(table, &values).unwrap()).unwrap()
}

/// A worker that has read, and pushes differences.
fn worker(address: SocketAddr, name: &str) -> Worker {
    let config = ClientConfig {
        worker_id: Some(name.to_owned()),
        patience: Some(DEADLINE),
        ..client_config(address, 1)
    };
    let client = Client::connect(config, None, &never).unwrap();
    let table = client.session().unwrap().table.as_deref().unwrap().clone();
    let params = filled(&table, 0);
    let mut worker = Worker { client, table, params };
    worker.client.configure(Contribution::Delta, None, &never).unwrap();
    worker.pull(false).unwrap();
    worker
}

fn enter(worker: &mut Worker, samples: f64) -> Entered {
    worker.client.enter(&Entry::of(samples), &never).unwrap()
}

/// One round, with a difference of so much everywhere. How many shares were missing.
fn take_part(worker: &mut Worker, entered: Entered, delta: f64) -> u64 {
    let mut values = worker.gradient((entered.share * delta) as f32);
    let receipt = worker.push(&mut values).unwrap();
    assert!(receipt.applied && receipt.weight == 1.0, "{receipt:?}");
    let gathered = worker.client.gather(entered.round, &never).unwrap();
    assert_eq!(worker.pull(true).unwrap().version, gathered.version);
    gathered.missing
}

/// Makes all of them members: each is in a round, with whoever is there.
fn acquaint(workers: &mut [Worker]) -> u64 {
    let num = workers.len();
    thread::scope(|scope| {
        let all = workers.iter_mut().map(|worker| {
            scope.spawn(move || {
                loop {
                    let entered = enter(worker, 0.0);
                    worker.client.gather(entered.round, &never).unwrap();
                    if entered.members as usize == num {
                        return entered.round;
                    }
                }
            })
        });
        let all: Vec<_> = all.collect();
        let rounds: Vec<u64> = all.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
        rounds[0]
    })
}

/// What a worker is told on a thread of its own, and what is done meanwhile.
fn both<T: Send, R>(
    worker: &mut Worker,
    waits: impl FnOnce(&mut Worker) -> T + Send,
    meanwhile: impl FnOnce() -> R,
) -> (T, R) {
    thread::scope(|scope| {
        let waits = scope.spawn(move || waits(worker));
        let done = meanwhile();
        (waits.join().unwrap(), done)
    })
}

fn rounds(server: &Server) -> Value {
    status(server)["rounds"].clone()
}

fn until_entered(server: &Server, num: u64) {
    eventually("an entrant", || rounds(server)["open_entrants"] == num);
}

#[test]
fn what_each_has_made_is_put_together_by_its_share_and_all_read_the_same() {
    const ROUNDS: u32 = 5;
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let server = start(adding(transaction));
        assert_eq!(rounds(&server), json!({"closed": 0, "missing": 0, "open_entrants": 0}));
        let mut workers: Vec<Worker> =
            ["a", "b", "c"].iter().map(|name| worker(server.address(), name)).collect();
        let before = acquaint(&mut workers);
        thread::scope(|scope| {
            for (worker, samples) in workers.iter_mut().zip([1.0, 2.0, 5.0]) {
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        let entered = enter(worker, samples);
                        let due = Entered {
                            round: before + u64::from(round),
                            share: samples / 8.0,
                            members: 3,
                            at_work: 3,
                            agreed: true,
                            new_share: None,
                        };
                        assert_eq!(entered, due);
                        assert_eq!(take_part(worker, entered, samples * 8.0), 0);
                        // 1/8 of 8, 2/8 of 16, 5/8 of 40, each round.
                        let mean = 30.0 * round as f32;
                        assert!(worker.floats(0).iter().all(|w| *w == mean), "{}", worker.floats(0)[0]);
                    }
                });
            }
        });
        assert_eq!(rounds(&server)["missing"], 0);
    }
}

#[test]
fn a_worker_that_dies_in_a_round_holds_nobody_up_and_its_share_is_missing() {
    let server = start(adding(Transaction::Fragment));
    let relay = Relay::new(server.address(), []);
    let mut others = vec![worker(server.address(), "a"), worker(server.address(), "b")];
    others.push(worker(relay.address, "dies"));
    acquaint(&mut others);
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        for (n, worker) in others.iter_mut().enumerate() {
            let (barrier, relay) = (&barrier, &relay);
            scope.spawn(move || {
                let entered = enter(worker, 1.0);
                assert_eq!((entered.members, entered.share), (3, 1.0 / 3.0));
                barrier.wait();
                if n == 2 {
                    relay.go_down(); // as if its process were gone
                } else {
                    assert_eq!(take_part(worker, entered, 3.0), 1);
                    assert!(worker.floats(0).iter().all(|w| *w == 2.0), "the others' shares are there");
                    let next = enter(worker, 1.0);
                    assert_eq!((next.members, next.share), (2, 0.5));
                    assert_eq!(take_part(worker, next, 1.0), 0);
                }
            });
        }
    });
    assert_eq!(rounds(&server)["missing"], 1);
}

#[test]
fn who_is_slow_is_in_the_next_round_and_who_leaves_in_none() {
    let server = start(adding(Transaction::Fragment));
    let mut workers = vec![
        worker(server.address(), "quick"),
        worker(server.address(), "slow"),
        worker(server.address(), "leaves"),
    ];
    acquaint(&mut workers);
    let [mut quick, mut slow, mut leaves] = <[Worker; 3]>::try_from(workers).ok().unwrap();
    let grace = Duration::from_millis(150);
    let begun = Instant::now();
    let entered = quick.client.enter(&Entry { grace: Some(grace), ..Entry::of(1.0) }, &never).unwrap();
    assert!(begun.elapsed() >= grace);
    assert_eq!((entered.members, entered.share), (1, 1.0));
    assert_eq!(take_part(&mut quick, entered, 1.0), 0);
    let (waited, last) = both(
        &mut slow,
        |slow| slow.client.enter(&Entry { grace: Some(Duration::MAX), ..Entry::of(1.0) }, &never).unwrap(),
        || {
            until_entered(&server, 1);
            leaves.client.close(Parting::Finished, &never).unwrap();
            quick.client.enter(&Entry { at_work: false, ..Entry::of(0.0) }, &never).unwrap()
        },
    );
    assert_eq!((waited.round, waited.members, waited.at_work, waited.share), (last.round, 2, 1, 1.0));
}

#[test]
fn a_newer_process_of_the_same_name_is_waited_for_once_it_has_entered() {
    let server = start(adding(Transaction::Fragment));
    let mut workers = vec![worker(server.address(), "a"), worker(server.address(), "b")];
    acquaint(&mut workers);
    let _newer = worker(server.address(), "b");
    assert_eq!(enter(&mut workers[0], 1.0).members, 1);
}

#[test]
fn a_wait_can_be_interrupted_and_taken_up_again_or_ended() {
    let server = start(adding(Transaction::Fragment));
    let mut workers = vec![worker(server.address(), "a"), worker(server.address(), "b")];
    acquaint(&mut workers);
    let [mut a, mut b] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    let interrupted = |a: &mut Worker, samples: f64| {
        let begun = Instant::now();
        let pressed = || begun.elapsed() > Duration::from_millis(50);
        assert_eq!(a.client.enter(&Entry::of(samples), &pressed), Err(ClientError::Interrupted));
    };
    interrupted(&mut a, 3.0);
    until_entered(&server, 1);
    let (again, entered) = both(&mut a, |a| enter(a, 3.0), || enter(&mut b, 1.0));
    assert_eq!((entered.members, entered.share), (2, 0.25));
    assert_eq!(again, Entered { share: 0.75, ..entered });
    let gather = |worker: &mut Worker| worker.client.gather(entered.round, &never).unwrap().missing;
    assert_eq!(both(&mut a, gather, || gather(&mut b)), (0, 0));
    interrupted(&mut a, 1.0);
    a.client.close(Parting::Left { cause: None }, &never).unwrap();
    until_entered(&server, 0);
    assert_eq!(enter(&mut b, 1.0).members, 1, "nobody else is there");
}

#[test]
fn a_goodbye_out_of_a_wait_is_heard() {
    for (parting, state) in [(Parting::Finished, "finished"), (Parting::Left { cause: None }, "left")] {
        let server = start(adding(Transaction::Fragment));
        let mut workers = vec![worker(server.address(), "a"), worker(server.address(), "b")];
        acquaint(&mut workers);
        let [mut a, mut b] = <[Worker; 2]>::try_from(workers).ok().unwrap();
        let once_in = || rounds(&server)["open_entrants"] == 1;
        assert_eq!(a.client.enter(&Entry::of(1.0), &once_in), Err(ClientError::Interrupted));
        assert_eq!(a.client.close(parting, &never), Ok(()));
        let told = status(&server)["workers"].clone();
        assert!(told.as_array().unwrap().iter().any(|w| w["id"] == "a" && w["state"] == state), "{told}");
        assert_eq!(enter(&mut b, 1.0).members, 1, "nobody else is there");
    }
}

#[test]
fn a_goodbye_out_of_a_wait_to_a_server_that_is_gone_is_none() {
    let server = start(adding(Transaction::Fragment));
    let relay = Relay::new(server.address(), []);
    let mut workers = vec![worker(relay.address, "a"), worker(server.address(), "b")];
    acquaint(&mut workers);
    let once_in = || rounds(&server)["open_entrants"] == 1;
    assert_eq!(workers[0].client.enter(&Entry::of(1.0), &once_in), Err(ClientError::Interrupted));
    relay.go_down();
    until_entered(&server, 0);
    assert_eq!(workers[0].client.close(Parting::Left { cause: None }, &never), Ok(()));
}

#[test]
fn a_wait_outlives_its_connection() {
    let server = start(adding(Transaction::Fragment));
    let relay = Relay::new(server.address(), []);
    let mut workers = vec![worker(server.address(), "a"), worker(relay.address, "cut")];
    acquaint(&mut workers);
    let [mut a, mut cut] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    let (tell, is_in) = mpsc::channel();
    let waits = |cut: &mut Worker| {
        let entered = enter(cut, 1.0);
        tell.send(()).unwrap();
        (entered, cut.client.gather(entered.round, &never).unwrap().missing)
    };
    let (told, due) = both(&mut cut, waits, || {
        until_entered(&server, 1);
        relay.go_down();
        until_entered(&server, 0);
        relay.come_up(server.address());
        until_entered(&server, 1);
        let entered = enter(&mut a, 1.0);
        assert_eq!(entered.members, 2);
        let is = |state: &str| {
            let told = status(&server)["workers"].clone();
            told.as_array().unwrap().iter().any(|w| w["id"] == "cut" && w["state"] == state)
        };
        is_in.recv().unwrap();
        // While it gathers, or is about to.
        relay.go_down();
        eventually("its loss", || is("lost"));
        relay.come_up(server.address());
        eventually("its return", || is("joined"));
        (entered, a.client.gather(entered.round, &never).unwrap().missing)
    });
    // Whether it had gathered, or has again, before that round was over: both are told the same.
    assert_eq!(told, due);
    assert_eq!(rounds(&server)["missing"], told.1);
}

/// Keeps its checkpoints in a directory of this name.
fn keeping(name: &str) -> (PathBuf, ServerConfig) {
    let directory = std::env::temp_dir().join(format!("offbeat-rounds-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&directory).ok();
    let kept = CheckpointConfig {
        directory: directory.clone(),
        every: Every::Versions(1_000_000),
        resume: Resume::Auto,
    };
    (directory, ServerConfig { checkpoints: Some(kept), ..adding(Transaction::Fragment) })
}

#[test]
fn a_server_that_stops_ends_every_wait_and_one_that_comes_again_takes_them_up() {
    let (directory, config) = keeping("waits");
    let server = start(config.clone());
    let relay = Relay::new(server.address(), []);
    let mut workers = vec![worker(relay.address, "a"), worker(relay.address, "b")];
    acquaint(&mut workers);
    let [mut a, mut b] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    let (waited, (entered, again)) = both(
        &mut a,
        |a| enter(a, 1.0),
        || {
            until_entered(&server, 1);
            let begun = Instant::now();
            relay.send_on_to_nobody();
            server.end(Ending::Restarting);
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
            let again = Server::start(config).unwrap();
            relay.come_up(again.address());
            until_entered(&again, 1);
            // Who works on its own comes back when it has something to say.
            assert_eq!(b.client.gather(77, &never).unwrap().missing, 0, "of this round nothing is known");
            until_entered(&again, 1);
            (enter(&mut b, 1.0), again)
        },
    );
    assert_eq!((waited.round, waited.members), (1, 2), "whom others waited for before they wait for again");
    assert_eq!((entered.round, entered.members), (1, 2));
    let (ended, ()) = both(&mut a, |a| a.client.gather(entered.round, &never), || again.stop());
    assert!(ended.is_err(), "it is over for good");
    std::fs::remove_dir_all(&directory).ok();
}

#[test]
fn who_does_not_come_back_after_a_restart_is_waited_for_no_longer_than_its_grace() {
    let (directory, config) = keeping("grace");
    let grace = Duration::from_millis(200);
    let config = ServerConfig { rejoin_grace: grace, ..config };
    let server = start(config.clone());
    let relay = Relay::new(server.address(), []);
    let mut workers = vec![worker(relay.address, "a"), worker(server.address(), "gone")];
    acquaint(&mut workers);
    let [mut a, _gone] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    relay.send_on_to_nobody();
    server.end(Ending::Restarting);
    let begun = Instant::now();
    let again = Server::start(config.clone()).unwrap();
    relay.come_up(again.address());
    assert_eq!(enter(&mut a, 1.0).members, 1);
    assert!(begun.elapsed() >= 5 * grace, "{:?}", begun.elapsed());
    // To a run that is over nobody comes back.
    relay.send_on_to_nobody();
    again.stop();
    let last = Server::start(config).unwrap();
    assert_eq!(enter(&mut worker(last.address(), "new"), 1.0).members, 1);
    std::fs::remove_dir_all(&directory).ok();
}

#[test]
fn who_works_after_a_restart_waits_a_lease_for_those_of_before_and_who_has_ended_waits_on() {
    let (directory, config) = keeping("restarted");
    let lease = Duration::from_secs(1);
    let config = ServerConfig { lease, rejoin_grace: Duration::from_secs(3600), ..config };
    let server = start(config.clone());
    let relay = Relay::new(server.address(), []);
    let mut workers = vec![worker(relay.address, "back"), worker(server.address(), "gone")];
    acquaint(&mut workers);
    let [mut back, _gone] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    relay.send_on_to_nobody();
    server.end(Ending::Restarting);
    let begun = Instant::now();
    let again = Server::start(config).unwrap();
    let mut new = worker(again.address(), "new");
    let is_tired = || begun.elapsed() > DEADLINE;
    let entered = new.client.enter(&Entry::of(1.0), &is_tired).expect("it waits for those who do not come");
    assert!(begun.elapsed() >= lease, "{:?}", begun.elapsed());
    assert_eq!((entered.members, entered.share, entered.agreed), (1, 1.0, false));
    new.client.gather(1, &never).unwrap();
    let ended = Entry { at_work: false, ..Entry::of(0.0) };
    let is_tired = || begun.elapsed() > 3 * lease;
    assert_eq!(new.client.enter(&ended, &is_tired), Err(ClientError::Interrupted), "others may be at work");
    // Who is back is waited for as it was before, with the lease long over.
    relay.come_up(again.address());
    assert_eq!(back.client.gather(77, &never).unwrap().missing, 0);
    let is_tired = || begun.elapsed() > 5 * lease;
    assert_eq!(new.client.enter(&Entry::of(1.0), &is_tired), Err(ClientError::Interrupted));
    assert_eq!(enter(&mut back, 1.0).members, 2);
    drop(again);
    std::fs::remove_dir_all(&directory).ok();
}

#[test]
fn what_cannot_be_samples_is_refused_before_it_leaves() {
    let server = start(adding(Transaction::Fragment));
    let mut a = worker(server.address(), "a");
    for samples in [f64::NAN, f64::INFINITY, -1.0] {
        let refused = a.client.enter(&Entry::of(samples), &never).unwrap_err();
        assert!(matches!(&refused, ClientError::BadInput { message } if message.contains("0 or more")));
    }
    assert_eq!(rounds(&server)["closed"], 0);
}

#[test]
fn who_is_heard_and_does_nothing_holds_up_nobody_for_long_and_goes_on_when_it_wakes() {
    let lease = Duration::from_millis(400);
    let server = start(ServerConfig { lease, ..adding(Transaction::Model) });
    let mut workers = vec![worker(server.address(), "works"), worker(server.address(), "hangs")];
    acquaint(&mut workers);
    let [mut works, mut hangs] = <[Worker; 2]>::try_from(workers).ok().unwrap();
    let (held, entered) = both(&mut hangs, |hangs| enter(hangs, 1.0), || enter(&mut works, 1.0));
    let begun = Instant::now();
    assert_eq!(take_part(&mut works, entered, 2.0), 1, "without the other's share");
    assert!(begun.elapsed() >= 3 * lease && begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    assert!(works.floats(0).iter().all(|w| *w == 1.0));
    assert_eq!(enter(&mut works, 1.0).members, 1, "nor is it waited for to enter");
    works.client.gather(held.round + 1, &never).unwrap();
    // It wakes up: what it has made is late, and counts.
    assert_eq!(take_part(&mut hangs, held, 2.0), 1);
    assert!(hangs.floats(0).iter().all(|w| *w == 2.0));
    let (again, entered) = both(
        &mut hangs,
        |hangs| enter(hangs, 1.0),
        || {
            until_entered(&server, 1);
            enter(&mut works, 1.0)
        },
    );
    assert_eq!((again.members, entered.members), (2, 2));
}

#[test]
fn who_takes_part_by_other_terms_is_told_both_and_stays_connected() {
    let server = start(adding(Transaction::Model));
    let by = |terms: &str| Entry { terms: Some(terms.to_owned()), ..Entry::of(1.0) };
    let mut a = worker(server.address(), "a");
    let mut b = worker(server.address(), "b");
    let entered = a.client.enter(&by("the mean"), &never).unwrap();
    assert_eq!(rounds(&server)["terms"], "the mean");
    let refused = b.client.enter(&by("the median"), &never).unwrap_err();
    assert!(
        refused.to_string().contains("by the median") && refused.to_string().contains("by the mean"),
        "{refused}"
    );
    a.client.gather(entered.round, &never).unwrap();
    assert_eq!(a.client.enter(&by("the mean"), &never).unwrap().members, 1, "nobody waits for it");
    let (waits, entered) = both(
        &mut b,
        |b| b.client.enter(&by("the mean"), &never).unwrap(),
        || {
            until_entered(&server, 1);
            a.client.gather(2, &never).unwrap();
            a.client.enter(&by("the mean"), &never).unwrap()
        },
    );
    assert_eq!((waits.members, entered.members), (2, 2));
    let new = Some(New { samples: f64::NAN, of: 1 });
    let unsound = b.client.enter(&Entry { new, ..Entry::of(1.0) }, &never).unwrap_err();
    assert!(matches!(&unsound, ClientError::BadInput { message } if message.contains("new is NaN")));
    let long = b.client.enter(&by(&"x".repeat(1025)), &never).unwrap_err();
    assert!(matches!(&long, ClientError::BadInput { message } if message.contains("1025 bytes: give 1024")));
    let forged = b.client.enter(&by("a\nWARNING server: all is lost"), &never).unwrap_err();
    assert!(matches!(&forged, ClientError::BadInput { message } if message.contains("\"a\\nWARNING")));
}
