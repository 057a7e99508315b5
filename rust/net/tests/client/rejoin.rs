//! A connection that is lost is made again, and every push counts once, whatever was cut where.

use crate::relay::{Cut, Relay, WHOLE};
use crate::support::{
    DEADLINE, Worker, client_config, config, eventually, filled, never, parameter, sgd, table, tensor,
};
use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::Receipt;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::{Parting, RefusalCode};
use offbeat_net::client::{Client, ClientConfig, ClientError};
use offbeat_net::server::{CheckpointConfig, Ending, Every, Resume, Server, ServerConfig, Snapshot};
use proptest::prelude::*;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Of three fragments.
const W: usize = 140_000;
const FRAGMENT: usize = 65_536;
const MODEL_BYTES: usize = 4 * W;
/// Of a server under load, with each transaction.
const DRAINS: usize = 5;

fn model(has_buffers: bool) -> TensorTable {
    let mut tensors = vec![parameter("w", W)];
    if has_buffers {
        tensors.push(tensor("count", 1, Dtype::I64, Role::Buffer));
    }
    table(tensors)
}

fn start(config: ServerConfig, has_buffers: bool) -> Server {
    let table = model(has_buffers);
    let values = filled(&table, 0);
    Server::with_model(config, Snapshot::of(table, &values).unwrap()).unwrap()
}

fn join(relay: &Relay, in_flight: usize) -> Worker {
    join_as(relay, in_flight, None)
}

fn join_as(relay: &Relay, in_flight: usize, name: Option<&str>) -> Worker {
    let config = ClientConfig {
        patience: Some(DEADLINE),
        worker_id: name.map(str::to_owned),
        ..client_config(relay.address, in_flight)
    };
    let client = Client::connect(config, None, &never).unwrap();
    let table = client.session().unwrap().table.as_deref().unwrap().clone();
    let params = filled(&table, 0xa5);
    let mut worker = Worker { client, table, params };
    worker.pull(false).unwrap();
    worker
}

/// Push n, which moves cell n of every fragment by one; and a forward pass, which counts itself.
fn cells(worker: &mut Worker, n: usize) -> Vec<Option<Vec<u8>>> {
    let mut gradient = vec![0.0_f32; W];
    for fragment in 0..W.div_ceil(FRAGMENT) {
        gradient[fragment * FRAGMENT + n] = -1.0;
    }
    let mut values = vec![Some(crate::support::bytes_of(&gradient))];
    if let Some(count) = worker.params.get_mut(1) {
        let next = i64::from_le_bytes(count[..].try_into().unwrap()) + 1;
        *count = next.to_le_bytes().to_vec();
        values.push(Some(count.clone()));
    }
    values
}

/// Which fragments hold each of the first `pushes`; nothing else may have moved.
fn held(server: &Server, pushes: usize) -> Vec<Vec<f32>> {
    let (_, tensors) = server.tensors().unwrap().unwrap();
    let w = crate::support::floats(&tensors[0]);
    let of = |n: usize| (0..W.div_ceil(FRAGMENT)).map(|f| w[f * FRAGMENT + n]).collect::<Vec<_>>();
    let moved: usize = w.iter().filter(|w| **w != 0.0).count();
    let held: Vec<_> = (0..pushes).map(of).collect();
    assert_eq!(held.iter().flatten().filter(|w| **w != 0.0).count(), moved, "what nobody pushed has moved");
    held
}

fn status(server: &Server) -> Value {
    serde_json::from_str(&server.status_json().unwrap()).unwrap()
}

fn cut() -> impl Strategy<Value = Cut> {
    let most = 3 * MODEL_BYTES;
    // Of data and control connections alike, in the order in which they come.
    let budget = prop_oneof![0..600_usize, 0..most, Just(usize::MAX)];
    (budget.clone(), budget, any::<bool>()).prop_map(|(up, down, is_heard)| Cut { up, down, is_heard })
}

/// Pushes some cells through a relay that cuts as planned. The receipts, and what the server holds of each push.
fn run(
    transaction: Transaction,
    in_flight: usize,
    has_buffers: bool,
    plan: Vec<Cut>,
    ways: &[(bool, bool)],
) -> (Vec<Receipt>, Vec<Vec<f32>>) {
    let server = start(ServerConfig { transaction, ..config(sgd(1.0, 0.0, 0.0)) }, has_buffers);
    // It joins undisturbed, and has read.
    let relay = Relay::new(server.address(), [WHOLE, WHOLE]);
    let mut worker = join(&relay, in_flight);
    relay.disturb(plan);
    let mut receipts = Vec::new();
    for (n, &(pulls, incremental)) in ways.iter().enumerate() {
        // With two in flight an answer is asked for a call before, and so for the same memory.
        let incremental = if in_flight == 1 { incremental } else { ways[0].1 };
        let mut values = cells(&mut worker, n);
        if pulls {
            receipts.extend(worker.push_pull(&mut values, incremental).unwrap());
        } else {
            receipts.push(worker.push(&mut values).unwrap());
        }
    }
    receipts.extend(worker.flush().unwrap());
    worker.pull(true).unwrap();
    let (_, tensors) = server.tensors().unwrap().unwrap();
    assert!(worker.params[0] == tensors[0], "the worker has read something else than the server holds");
    if has_buffers && in_flight == 1 {
        assert_eq!(tensors[1], i64::try_from(ways.len()).unwrap().to_le_bytes(), "the forward passes");
    }
    let held = held(&server, ways.len());
    worker.client.close(Parting::Finished, &never).unwrap();
    let tickets = &status(&server)["tickets"];
    assert_eq!(tickets["open"], 0);
    let applied = receipts.iter().filter(|r| r.applied && r.reason.is_none()).count();
    assert_eq!(tickets["applied"], applied, "{tickets}");
    (receipts, held)
}

fn transactions() -> impl Strategy<Value = Transaction> {
    prop_oneof![Just(Transaction::Fragment), Just(Transaction::Model)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn with_one_in_flight_every_push_is_applied_once(
        transaction in transactions(), has_buffers: bool, plan in prop::collection::vec(cut(), 1..8),
        ways in prop::collection::vec(any::<(bool, bool)>(), 2..8),
    ) {
        let (receipts, held) = run(transaction, 1, has_buffers, plan, &ways);
        prop_assert_eq!(receipts.len(), ways.len());
        prop_assert!(receipts.iter().all(|r| r.applied && r.reason.is_none()), "{:?}", receipts);
        prop_assert!(held.iter().flatten().all(|w| *w == 1.0), "{:?}", held);
    }

    #[test]
    fn with_two_in_flight_every_push_is_applied_at_most_once_and_its_receipt_says_how(
        transaction in transactions(), has_buffers: bool, plan in prop::collection::vec(cut(), 1..8),
        ways in prop::collection::vec(any::<(bool, bool)>(), 2..8),
    ) {
        let (receipts, held) = run(transaction, 2, has_buffers, plan, &ways);
        prop_assert_eq!(receipts.len(), ways.len());
        let whole = receipts.iter().filter(|r| r.applied && r.reason.is_none()).count();
        let partly = receipts.iter().filter(|r| r.applied && r.reason == Some(Reason::ConnectionLost)).count();
        let none = receipts.iter().filter(|r| !r.applied && r.reason == Some(Reason::ConnectionLost)).count();
        prop_assert_eq!(whole + partly + none, ways.len(), "{:?}", receipts);
        prop_assert!(held.iter().flatten().all(|w| *w == 0.0 || *w == 1.0), "{:?}", held);
        // Of one that has come in parts it may be the buffers alone that have, or have not.
        let slack = if has_buffers { partly } else { 0 };
        let everywhere = held.iter().filter(|h| h.iter().all(|w| *w == 1.0)).count();
        let nowhere = held.iter().filter(|h| h.iter().all(|w| *w == 0.0)).count();
        prop_assert!((whole..=whole + slack).contains(&everywhere) && (none..=none + slack).contains(&nowhere));
        prop_assert!(transaction == Transaction::Fragment || partly == 0);
    }
}

#[test]
fn a_reply_that_is_lost_after_the_push_was_applied_is_given_again() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    let relay = Relay::new(server.address(), [WHOLE, WHOLE]);
    let mut worker = join_as(&relay, 1, Some("a"));
    let before = worker.client.session().unwrap().incarnation;
    for (n, down) in [0, 1, 30, MODEL_BYTES / 2, MODEL_BYTES].into_iter().enumerate() {
        relay.cut_answer_after(down);
        let mut values = cells(&mut worker, n);
        let receipt = worker.push_pull(&mut values, false).unwrap().unwrap();
        assert!(receipt.applied, "{receipt:?}");
    }
    assert!(held(&server, 5).iter().flatten().all(|w| *w == 1.0));
    assert!(relay.num_cut() >= 5);
    let status = status(&server);
    let worker_now = &status["workers"][0];
    assert_eq!((&worker_now["id"], &worker_now["incarnation"]), (&"a".into(), &before.into()));
    assert_eq!(status["workers"].as_array().unwrap().len(), 1, "it is who it was");
}

#[test]
fn a_worker_that_takes_an_answer_of_its_old_connection_for_lost_is_seated_after_it() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    // The server hears nothing of the end: to it the old connections stand.
    let quiet = |up| Cut { up, down: usize::MAX, is_heard: false };
    let relay = Relay::new(server.address(), [WHOLE, WHOLE]);
    let mut worker = join_as(&relay, 1, Some("a"));
    relay.disturb([quiet(MODEL_BYTES / 2), WHOLE, quiet(MODEL_BYTES + 4000), WHOLE]);
    let mut values = cells(&mut worker, 0);
    assert!(worker.push_pull(&mut values, false).unwrap().unwrap().applied);
    assert!(held(&server, 1)[0].iter().all(|w| *w == 1.0));
    let status = status(&server);
    assert_eq!((&status["tickets"]["applied"], &status["tickets"]["partial"]), (&1.into(), &0.into()));
    assert_eq!(status["workers"][0]["state"], "joined");
}

#[test]
fn a_worker_whose_name_was_taken_meanwhile_is_fenced() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    let relay = Relay::new(server.address(), []);
    let mut old = join_as(&relay, 1, Some("a"));
    let server_side = Relay::new(server.address(), []);
    relay.go_down();
    let mut new = join_as(&server_side, 1, Some("a"));
    relay.come_up(server.address());
    let mut values = cells(&mut old, 0);
    let fenced = old.push(&mut values).unwrap_err();
    assert!(matches!(&fenced, ClientError::Fenced { message } if message.contains("\"a\"")), "{fenced}");
    assert_eq!(old.pull(false).unwrap_err(), fenced, "for good");
    let mut values = cells(&mut new, 1);
    assert!(new.push(&mut values).unwrap().applied);
}

#[test]
fn another_server_in_the_place_of_the_lost_one_is_told_from_it() {
    let named = || ServerConfig { run_id: Some("same".into()), ..config(sgd(1.0, 0.0, 0.0)) };
    for (again, why) in [(named(), "knows nothing of worker"), (config(sgd(1.0, 0.0, 0.0)), "holds run")] {
        let server = start(named(), false);
        let relay = Relay::new(server.address(), []);
        let mut worker = join_as(&relay, 1, Some("a"));
        let mut values = cells(&mut worker, 0);
        assert!(worker.push(&mut values).unwrap().applied);
        relay.go_down();
        let other = start(again, false);
        relay.come_up(other.address());
        let lost = worker.push(&mut values).unwrap_err();
        assert!(matches!(&lost, ClientError::Lost { cause, .. } if cause.contains(why)), "{lost}");
        assert!(held(&other, 1)[0].iter().all(|w| *w == 0.0));
    }
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
fn a_server_that_was_stopped_is_not_waited_for() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    let relay = Relay::new(server.address(), []);
    let mut worker = join(&relay, 1);
    server.stop();
    let mut values = cells(&mut worker, 0);
    let over = worker.push(&mut values).unwrap_err();
    assert!(matches!(over, ClientError::Refused { code: RefusalCode::Finished, .. }), "{over}");
}

#[test]
fn a_lost_server_is_waited_for_as_long_as_was_said_and_an_interrupt_ends_that() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    let relay = Relay::new(server.address(), []);
    let patience = Some(Duration::from_millis(300));
    let config = ClientConfig { patience, ..client_config(relay.address, 1) };
    let mut client = Client::connect(config, None, &never).unwrap();
    relay.go_down();
    let lost = client.status(&never).unwrap_err();
    assert!(
        matches!(&lost, ClientError::Lost { cause, .. } if cause.contains("did not come back within 0.")),
        "{lost}"
    );
    relay.come_up(server.address());
    let mut worker = join(&relay, 1);
    relay.go_down();
    let mut values = cells(&mut worker, 0);
    let input = crate::support::memories(&mut values);
    let asked = std::cell::Cell::new(0);
    let soon = || asked.replace(asked.get() + 1) > 3;
    let input = offbeat_net::client::PushInput { values: &input, samples: 1 };
    assert_eq!(worker.client.push(input, &soon), Err(ClientError::Interrupted));
    relay.come_up(server.address());
    let receipts = worker.flush().unwrap();
    assert!(
        matches!(&receipts[..], [r] if r.reason == Some(Reason::ConnectionLost) && !r.applied),
        "{receipts:?}"
    );
    let mut values = cells(&mut worker, 1);
    assert!(worker.push(&mut values).unwrap().applied, "its number goes on");
}

#[test]
fn what_was_read_before_a_long_silence_is_too_old_after_it() {
    let lease = Duration::from_millis(300);
    let server = start(ServerConfig { lease, ..config(sgd(1.0, 0.0, 0.0)) }, false);
    let relay = Relay::new(server.address(), []);
    let (mut zombie, mut other) = (join_as(&relay, 1, Some("a")), Worker::ready(&server, 1));
    relay.go_down();
    let mut values = cells(&mut other, 0);
    assert!(other.push(&mut values).unwrap().applied);
    let at = std::time::Instant::now();
    eventually("a silence", || at.elapsed() >= lease * 2);
    relay.come_up(server.address());
    let mut values = cells(&mut zombie, 1);
    let receipt = zombie.push_pull(&mut values, true).unwrap().unwrap();
    assert_eq!((receipt.applied, receipt.reason), (false, Some(Reason::Slept)));
    assert!(zombie.push(&mut values).unwrap().applied, "having read anew, it goes on");
}

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
    let place = Place::new("answered");
    let server = start(place.config(Transaction::Fragment), false);
    let relay = Relay::new(server.address(), []);
    let mut worker = join_as(&relay, 1, Some("a"));
    // The answer does not come through; what it answers is in a checkpoint.
    let mut values = cells(&mut worker, 0);
    let (receipt, _again) = std::thread::scope(|scope| {
        relay.cut_answer_after(10);
        relay.send_on_to_nobody();
        let pushing = scope.spawn(|| worker.push_pull(&mut values, true).unwrap().unwrap());
        until_kept(&server, 1);
        relay.go_down();
        server.stop();
        let again = start(place.config(Transaction::Fragment), false);
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
        relay.cut_answer_after(MODEL_BYTES - FRAGMENT); // two fragments have come
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
fn a_forward_pass_that_came_before_two_cuts_and_an_interrupt_is_not_counted_again() {
    let table = table(vec![
        parameter("w", W),
        tensor("count", 1, Dtype::I64, Role::Buffer),
        tensor("mean", W, Dtype::F32, Role::Buffer),
    ]);
    let values = filled(&table, 0);
    let server =
        Server::with_model(config(sgd(1.0, 0.0, 0.0)), Snapshot::of(table, &values).unwrap()).unwrap();
    let relay = Relay::new(server.address(), [WHOLE, WHOLE]);
    let mut worker = join(&relay, 1);
    let forward = |worker: &mut Worker| {
        let count = i64::from_le_bytes(worker.params[1][..].try_into().unwrap()) + 1;
        worker.params[1] = count.to_le_bytes().to_vec();
        let mut values = worker.gradient(-1.0);
        values[1] = Some(worker.params[1].clone());
        values[2] = Some(crate::support::bytes_of(&vec![count as f32; W])); // what is as it was is not sent
        values
    };
    // The first connection takes the count with it, the second the push's head alone; there is no third for a while.
    let after = |up| Cut { up, ..WHOLE };
    relay.disturb(
        [after(MODEL_BYTES + FRAGMENT), WHOLE, after(FRAGMENT), WHOLE].into_iter().chain([after(0); 100]),
    );
    let mut values = forward(&mut worker);
    let input = crate::support::memories(&mut values);
    let input = offbeat_net::client::PushInput { values: &input, samples: 1 };
    assert_eq!(worker.client.push(input, &|| relay.num_cut() > 2), Err(ClientError::Interrupted));
    relay.disturb([]);
    let receipts = worker.client.flush(None, &never).unwrap();
    assert!(
        matches!(&receipts[..], [r] if r.reason == Some(Reason::ConnectionLost) && r.applied),
        "{receipts:?}"
    );
    let mut values = forward(&mut worker);
    assert!(worker.push(&mut values).unwrap().applied);
    let (_, tensors) = server.tensors().unwrap().unwrap();
    assert_eq!(tensors[1], 2_i64.to_le_bytes(), "forward passes");
}

#[test]
fn a_push_gives_its_own_receipt_and_not_that_of_one_before_it() {
    let server = start(config(sgd(1.0, 0.0, 0.0)), false);
    let relay = Relay::new(server.address(), []);
    let mut worker = join(&relay, 2);
    let mut values = cells(&mut worker, 0);
    assert_eq!(worker.push_pull(&mut values, false), Ok(None));
    eventually("the first push", || status(&server)["tickets"]["applied"] == 1);
    relay.disturb([]);
    worker.client.status(&never).unwrap();
    relay.cut_answer_after(10);
    let mut values = cells(&mut worker, 1);
    assert_eq!(worker.push(&mut values).unwrap().version, 2);
    let left: Vec<u64> = worker.flush().unwrap().iter().map(|receipt| receipt.version).collect();
    assert_eq!(left, [1]);
}

#[test]
fn a_push_that_cannot_be_made_again_for_the_runs_new_optimizer_ends_as_it_is() {
    let server = start(config(sgd(1.0, 0.5, 0.0)), false);
    let relay = Relay::new(server.address(), []);
    let mut worker = join(&relay, 1);
    relay.go_down();
    let mut values = cells(&mut worker, 0);
    let receipt = std::thread::scope(|scope| {
        let pushing = scope.spawn(|| worker.push_pull(&mut values, false));
        // Its weight decay asks for the parameters that were read, of which there is no copy.
        server.set_optimizer(sgd(1.0, 0.5, 0.1)).unwrap();
        relay.come_up(server.address());
        pushing.join().unwrap().unwrap().unwrap()
    });
    assert_eq!((receipt.applied, receipt.reason), (false, Some(Reason::ConnectionLost)), "{receipt:?}");
    let mut values = cells(&mut worker, 1);
    worker.pull(false).unwrap();
    assert!(worker.push(&mut values).unwrap().applied, "its number goes on");
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
