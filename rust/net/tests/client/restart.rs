//! Workers over the end of their server, and what they find in its next life.

use crate::cells::{FRAGMENT, MODEL_BYTES, cells, held, join, join_as, start, status};
use crate::relay::Relay;
use crate::support::{
    Worker, bytes_of, client_config, config, eventually, memories, never, parameter, sgd, table,
};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::Receipt;
use offbeat_core::wire::HEADER_BYTES;
use offbeat_core::wire::message::Parting;
use offbeat_net::checkpoint::checkpoints;
use offbeat_net::client::{Client, ClientError, PushInput};
use offbeat_net::server::{CheckpointConfig, Ending, Every, Resume, Server, ServerConfig};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Of a server under load, with each transaction.
const DRAINS: usize = 5;

/// A directory that is gone after the test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("offbeat-rejoin-{name}-{}", std::process::id()));
        fs::remove_dir_all(&path).ok(); // of a test that was killed
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn config(&self, transaction: Transaction) -> ServerConfig {
        let kept =
            CheckpointConfig { directory: self.0.clone(), every: Every::Versions(1), resume: Resume::Auto };
        ServerConfig { transaction, checkpoints: Some(kept), ..config(sgd(1.0, 0.0, 0.0)) }
    }

    /// What is there now, as a crash would leave it.
    fn copy(&self, name: &str) -> Self {
        let copy = Self::new(name);
        copy_all(&self.0, &copy.0);
        copy
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_all(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

fn until_kept(server: &Server, version: u64) {
    eventually("a checkpoint", || status(server)["checkpoints"]["version"].as_u64() == Some(version));
}

#[test]
fn a_server_that_was_started_again_without_its_model_has_not_this_session() {
    let place = Place::new("bare");
    let named = || ServerConfig { run_id: Some("same".into()), ..place.config(Transaction::Fragment) };
    for in_flight in [1, 2] {
        let server = start(ServerConfig { checkpoints: None, ..named() }, false);
        let relay = Relay::new(server.address(), []);
        let mut worker = join_as(&relay, in_flight, Some("a"));
        let mut values = cells(&mut worker, 0);
        assert!(worker.push(&mut values).unwrap().applied);
        relay.go_down();
        server.stop();
        // Its life is on the disk, and no checkpoint was.
        let life = Place::new("bare-life");
        fs::write(life.0.join("life.json"), r#"{"term":1,"last_incarnation":65536}"#).unwrap();
        let kept =
            CheckpointConfig { directory: life.0.clone(), every: Every::Versions(1), resume: Resume::Auto };
        let again = Server::start(ServerConfig { checkpoints: Some(kept), ..named() }).unwrap();
        relay.come_up(again.address());
        let lost = worker.push(&mut values).unwrap_err();
        let why = "has not this session: nothing is known (any more) of worker";
        assert!(matches!(&lost, ClientError::Lost { cause, .. } if cause.contains(why)), "{lost}");
    }
}

#[test]
fn a_server_that_goes_on_from_before_says_what_is_lost_and_fences_nobody() {
    for (transaction, name, num_lost) in
        [(Transaction::Fragment, "fragment", 400), (Transaction::Model, "model", 3)]
    {
        let place = Place::new(name);
        let server = start(place.config(transaction), false);
        let relay = Relay::new(server.address(), []);
        let (mut a, mut b) = (join_as(&relay, 1, Some("a")), join_as(&relay, 1, Some("b")));
        let push = |worker: &mut Worker, n| {
            let mut values = cells(worker, n);
            worker.push_pull(&mut values, true).unwrap().unwrap()
        };
        for n in 0..4 {
            assert!(push(if n % 2 == 0 { &mut a } else { &mut b }, n).applied);
        }
        until_kept(&server, 4);
        let before = place.copy(&format!("{name}-before"));
        // More of them, of one that was there then and of one that was not.
        let mut late = join_as(&relay, 1, Some("late"));
        let then = 4 + num_lost;
        for n in 4..then {
            assert!(push(if n % 2 == 0 { &mut a } else { &mut late }, n).applied);
        }
        assert_eq!(status(&server)["version"], then);
        relay.go_down();
        server.stop();
        let again = start(before.config(transaction), false);
        assert_eq!(status(&again)["term"], 2);
        relay.come_up(again.address());
        for (worker, n) in [(&mut a, then), (&mut late, then + 1), (&mut b, then + 2)] {
            let rolled_back = push(worker, n);
            assert_eq!((rolled_back.applied, rolled_back.reason), (false, Some(Reason::ServerRolledBack)));
            assert_eq!(rolled_back.term, 2);
            let goes_on = push(worker, n + 3);
            let version = (4 + 1 + n - then) as u64;
            assert!(goes_on.applied && (goes_on.term, goes_on.version) == (2, version), "{goes_on:?}");
        }
        let held = held(&again, then + 6);
        for (n, held) in held.iter().enumerate() {
            let is_there = !(4..then + 3).contains(&n);
            assert!(held.iter().all(|w| *w == f32::from(u8::from(is_there))), "push {n}: {held:?}");
        }
        let status = status(&again);
        assert_eq!(status["lost_updates"], num_lost, "{status:#}");
        let workers = status["workers"].as_array().unwrap();
        assert_eq!(workers.iter().map(|w| w["state"].as_str().unwrap()).collect::<Vec<_>>(), ["joined"; 3]);
    }
}

#[test]
fn a_push_of_which_the_checkpoint_has_heard_is_answered_by_another_life() {
    // Neither answer begins before the push has arrived whole: a receipt follows the last fragment, and a model the
    // commit. Before that there is only the grant of the room for a model's push.
    let push: fn(&mut Worker, &mut [Option<Vec<u8>>]) -> Receipt = |worker, values| {
        let receipt = worker.push(values).unwrap();
        worker.pull(true).unwrap();
        receipt
    };
    let push_pull: fn(&mut Worker, &mut [Option<Vec<u8>>]) -> Receipt =
        |worker, values| worker.push_pull(values, true).unwrap().unwrap();
    for (transaction, name, pushing, before) in [
        (Transaction::Fragment, "answered-f", push, 0),
        (Transaction::Model, "answered-m", push_pull, HEADER_BYTES),
    ] {
        let place = Place::new(name);
        let server = start(place.config(transaction), false);
        let relay = Relay::new(server.address(), []);
        let mut worker = join_as(&relay, 1, Some("a"));
        // The answer does not come through; what it answers is in a checkpoint.
        let mut values = cells(&mut worker, 0);
        let (receipt, _again) = std::thread::scope(|scope| {
            relay.cut_answer_after(before + 10);
            relay.send_on_to_nobody();
            let pushing = scope.spawn(|| pushing(&mut worker, &mut values));
            eventually("the push", || status(&server)["tickets"]["applied"] == 1);
            until_kept(&server, 1);
            relay.go_down();
            server.stop();
            let again = start(place.config(transaction), false);
            relay.come_up(again.address());
            let receipt = pushing.join().unwrap();
            assert!(held(&again, 1)[0].iter().all(|w| *w == 1.0));
            assert_eq!(status(&again)["lost_updates"], 0);
            (receipt, again)
        });
        assert!(receipt.applied && receipt.duplicate && receipt.term == 1, "{receipt:?}");
        let mut values = cells(&mut worker, 1);
        assert!(worker.push(&mut values).unwrap().applied, "it has read what is there now");
    }
}

#[test]
fn a_push_whose_answer_broke_off_is_rejected_whole_by_a_life_that_takes_whole_ones_and_has_not_heard_of_it() {
    let place = Place::new("whole");
    let server = start(place.config(Transaction::Model), false);
    let relay = Relay::new(server.address(), []);
    let mut worker = join_as(&relay, 1, Some("a"));
    until_kept(&server, 0);
    let before = place.copy("whole-before");
    let mut values = cells(&mut worker, 0);
    let (receipt, again) = std::thread::scope(|scope| {
        relay.cut_answer_after(MODEL_BYTES - FRAGMENT); // one fragment has come, and a part of another
        relay.send_on_to_nobody();
        let pushing = scope.spawn(|| worker.push_pull(&mut values, false).unwrap().unwrap());
        eventually("a cut", || relay.num_cut() > 0);
        relay.go_down();
        server.stop();
        let again = start(before.config(Transaction::Model), false);
        relay.come_up(again.address());
        (pushing.join().unwrap(), again)
    });
    assert_eq!((receipt.applied, receipt.reason), (false, Some(Reason::ServerRolledBack)), "{receipt:?}");
    let mut values = cells(&mut worker, 1);
    assert!(worker.push_pull(&mut values, true).unwrap().unwrap().applied);
    let held = held(&again, 2);
    assert!(held[0].iter().all(|w| *w == 0.0) && held[1].iter().all(|w| *w == 1.0), "{held:?}");
}

#[test]
fn who_was_there_is_waited_for_after_a_restart() {
    let place = Place::new("waited");
    let server = start(place.config(Transaction::Fragment), false);
    let relay = Relay::new(server.address(), []);
    let (mut a, mut done) = (join_as(&relay, 1, Some("a")), join_as(&relay, 1, Some("done")));
    let mut values = cells(&mut done, 0);
    assert!(done.push(&mut values).unwrap().applied);
    done.client.close(Parting::Finished, &never).unwrap();
    let mut values = cells(&mut a, 1);
    assert!(a.push(&mut values).unwrap().applied);
    until_kept(&server, 2);
    relay.go_down();
    server.stop();
    let again = start(place.config(Transaction::Fragment), false);
    let state = |id: &str| {
        let status = status(&again);
        let workers = status["workers"].as_array().unwrap();
        workers.iter().find(|w| w["id"] == id).unwrap()["state"].as_str().unwrap().to_owned()
    };
    assert_eq!((state("a"), state("done")), ("lost".into(), "finished".into()));
    relay.come_up(again.address());
    a.pull(true).unwrap();
    assert_eq!(state("a"), "joined");
    let unnamed = join(&relay, 1);
    let name = unnamed.client.session().unwrap().worker_id.clone();
    assert!(name.ends_with("-t2"), "{name}: no name that a worker may have which came after the checkpoint");
    a.client.close(Parting::Finished, &never).unwrap();
}

#[test]
fn who_brings_the_model_in_a_later_life_pushes_without_a_pull_as_in_the_first() {
    let place = Place::new("brought");
    let model = table(vec![parameter("w", 8)]);
    for _ in 0..2 {
        let server = Server::start(place.config(Transaction::Fragment)).unwrap();
        let mut client = Client::connect(client_config(server.address(), 1), None, &never).unwrap();
        assert!(client.init(&model, &[&bytes_of(&[0.0; 8])], None, &never).unwrap());
        let mut gradient = vec![Some(bytes_of(&[1.0; 8]))];
        let push = PushInput { values: &memories(&mut gradient), samples: 1 };
        assert!(client.push(push, &never).unwrap().applied);
        client.close(Parting::Finished, &never).unwrap();
        server.stop();
        for (_, folder) in checkpoints(&place.0).unwrap() {
            fs::remove_dir_all(folder).unwrap(); // its lives are still counted
        }
    }
}

#[test]
fn a_goodbye_after_the_last_push_is_kept_when_the_server_stops() {
    let place = Place::new("goodbye");
    let server = start(place.config(Transaction::Fragment), false);
    let relay = Relay::new(server.address(), []);
    let mut done = join_as(&relay, 1, Some("done"));
    let mut values = cells(&mut done, 0);
    assert!(done.push(&mut values).unwrap().applied);
    until_kept(&server, 1); // nothing but the goodbye comes after that
    done.client.close(Parting::Finished, &never).unwrap();
    server.stop();
    let again = start(place.config(Transaction::Fragment), false);
    let workers = status(&again)["workers"].clone();
    assert_eq!((&workers[0]["id"], &workers[0]["state"]), (&"done".into(), &"finished".into()));
}

#[test]
fn who_was_away_for_longer_than_the_grace_when_its_server_was_started_again_goes_on() {
    let place = Place::new("away");
    let rejoin_grace = Duration::from_millis(200);
    let server = start(ServerConfig { rejoin_grace, ..place.config(Transaction::Fragment) }, false);
    let (relay, steady) = (Relay::new(server.address(), []), Relay::new(server.address(), []));
    let (mut away, mut there) = (join_as(&relay, 1, Some("away")), join_as(&steady, 1, Some("there")));
    let mut values = cells(&mut away, 0);
    assert!(away.push(&mut values).unwrap().applied);
    relay.go_down();
    eventually("its end", || status(&server)["workers"][0]["state"] == "lost");
    let begun = Instant::now();
    eventually("the end of its grace", || begun.elapsed() > 5 * rejoin_grace);
    let mut values = cells(&mut there, 1);
    assert!(there.push(&mut values).unwrap().applied);
    until_kept(&server, 2);
    steady.go_down();
    server.stop();
    let again = start(ServerConfig { rejoin_grace, ..place.config(Transaction::Fragment) }, false);
    assert_eq!(status(&again)["workers"][0]["state"], "lost", "it has not said goodbye");
    relay.come_up(again.address());
    away.pull(true).unwrap();
    let mut values = cells(&mut away, 2);
    assert!(away.push(&mut values).unwrap().applied);
    assert!(held(&again, 3).iter().flatten().all(|w| *w == 1.0));
}

#[test]
fn a_server_that_is_being_started_again_loses_nothing_that_was_acknowledged_and_its_workers_go_on() {
    for (transaction, name) in [(Transaction::Fragment, "drain-f"), (Transaction::Model, "drain-m")] {
        let place = Place::new(name);
        let every = |config: ServerConfig| {
            let kept =
                config.checkpoints.map(|kept| CheckpointConfig { every: Every::Versions(1_000_000), ..kept });
            ServerConfig { checkpoints: kept, ..config }
        };
        let mut server = start(every(place.config(transaction)), false);
        // The port is the checkpoint's.
        let address = server.address();
        let relay = Relay::new(address, []);
        let over = AtomicBool::new(false);
        let num_pushed = AtomicUsize::new(0);
        let receipts = std::thread::scope(|scope| {
            let pushing = [0, 1].map(|k| {
                let mut worker = join_as(&relay, 1, Some(["a", "b"][k]));
                let (over, num_pushed) = (&over, &num_pushed);
                scope.spawn(move || {
                    let mut receipts = Vec::new();
                    for n in (k..FRAGMENT).step_by(2) {
                        let mut values = cells(&mut worker, n);
                        receipts.push((n, worker.push_pull(&mut values, true).unwrap().unwrap()));
                        num_pushed.fetch_add(1, Ordering::SeqCst);
                        if over.load(Ordering::SeqCst) {
                            break;
                        }
                    }
                    worker.client.close(Parting::Finished, &never).unwrap();
                    receipts
                })
            });
            for _ in 0..DRAINS {
                let before = num_pushed.load(Ordering::SeqCst);
                eventually("some pushes", || num_pushed.load(Ordering::SeqCst) > before + 20);
                server.end(Ending::Restarting);
                server = start(every(place.config(transaction)), false);
                relay.come_up(server.address());
            }
            let before = num_pushed.load(Ordering::SeqCst);
            eventually("some pushes", || num_pushed.load(Ordering::SeqCst) > before + 20);
            over.store(true, Ordering::SeqCst);
            pushing.map(|thread| thread.join().unwrap()).concat()
        });
        let status = status(&server);
        assert_eq!((&status["lost_updates"], &status["term"]), (&0.into(), &(DRAINS + 1).into()));
        let last = receipts.iter().map(|(n, _)| n + 1).max().unwrap();
        let held = held(&server, last);
        for (n, receipt) in &receipts {
            let due = f32::from(u8::from(receipt.applied));
            assert!(held[*n].iter().all(|w| *w == due), "push {n}: {receipt:?}, {:?}", held[*n]);
            assert!(receipt.applied || receipt.reason == Some(Reason::ServerRolledBack), "{receipt:?}");
        }
        let rolled_back = receipts.iter().filter(|(_, receipt)| !receipt.applied).count();
        assert!(rolled_back <= 2 * DRAINS, "one a worker and restart: {rolled_back}");
    }
}
