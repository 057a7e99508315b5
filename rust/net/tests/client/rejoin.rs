//! A connection that is lost is made again, and every push counts once, whatever was cut where.

use crate::cells::{FRAGMENT, MODEL_BYTES, W, cells, held, join, join_as, start, status};
use crate::relay::{Cut, Relay, WHOLE};
use crate::support::{
    Worker, client_config, config, eventually, filled, never, parameter, sgd, table, tensor,
};
use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::Receipt;
use offbeat_core::table::Role;
use offbeat_core::wire::message::{Parting, RefusalCode};
use offbeat_net::client::{Client, ClientConfig, ClientError};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use proptest::prelude::*;
use std::time::Duration;

fn cut() -> impl Strategy<Value = Cut> {
    let most = 3 * MODEL_BYTES;
    // Of data and control connections alike, in the order in which they come.
    let budget = prop_oneof![0..600_usize, 0..most, Just(usize::MAX)];
    (budget.clone(), budget, any::<bool>()).prop_map(|(up, down, is_heard)| Cut { up, down, is_heard })
}

/// Pushes some cells through a relay that cuts as planned, each after one that is refused before it leaves, if
/// `is_refused`. The receipts, what the server holds of each push, and how many
/// of the receipts came with the last flush.
fn run(
    transaction: Transaction,
    in_flight: usize,
    has_buffers: bool,
    is_refused: bool,
    plan: Vec<Cut>,
    ways: &[(bool, bool)],
) -> (Vec<Receipt>, Vec<Vec<f32>>, usize) {
    let server = start(ServerConfig { transaction, ..config(sgd(1.0, 0.0, 0.0)) }, has_buffers);
    // It joins undisturbed, and has read.
    let relay = Relay::new(server.address(), [WHOLE, WHOLE]);
    let mut worker = join(&relay, in_flight);
    relay.disturb(plan);
    let mut receipts = Vec::new();
    for (n, &(pulls, incremental)) in ways.iter().enumerate() {
        // With two in flight an answer is asked for a call before, and so for the same memory.
        let incremental = if in_flight == 1 { incremental } else { ways[0].1 };
        if is_refused && pulls {
            let mut values = worker.gradient(f32::NAN);
            let refused = worker.push_pull(&mut values, incremental).unwrap_err();
            assert!(matches!(refused, ClientError::NonFinite { .. }), "{refused}");
        }
        let mut values = cells(&mut worker, n);
        if pulls {
            receipts.extend(worker.push_pull(&mut values, incremental).unwrap());
        } else {
            receipts.push(worker.push(&mut values).unwrap());
        }
    }
    let num_before = receipts.len();
    receipts.extend(worker.flush().unwrap());
    let num_flushed = receipts.len() - num_before;
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
    (receipts, held, num_flushed)
}

fn transactions() -> impl Strategy<Value = Transaction> {
    prop_oneof![Just(Transaction::Fragment), Just(Transaction::Model)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn with_one_in_flight_every_push_is_applied_once(
        transaction in transactions(), has_buffers: bool, is_refused: bool, plan in prop::collection::vec(cut(), 1..8),
        ways in prop::collection::vec(any::<(bool, bool)>(), 2..8),
    ) {
        let (receipts, held, _) = run(transaction, 1, has_buffers, is_refused, plan, &ways);
        prop_assert_eq!(receipts.len(), ways.len());
        prop_assert!(receipts.iter().all(|r| r.applied && r.reason.is_none()), "{:?}", receipts);
        prop_assert!(held.iter().flatten().all(|w| *w == 1.0), "{:?}", held);
    }

    #[test]
    fn with_two_in_flight_every_push_is_applied_at_most_once_and_its_receipt_says_how(
        transaction in transactions(), has_buffers: bool, is_refused: bool, plan in prop::collection::vec(cut(), 1..8),
        ways in prop::collection::vec(any::<(bool, bool)>(), 2..8),
    ) {
        let (receipts, held, _) = run(transaction, 2, has_buffers, is_refused, plan, &ways);
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

    #[test]
    fn with_two_in_flight_each_call_gives_the_receipt_of_the_push_before_whatever_was_cut(
        transaction in transactions(), incremental: bool, is_refused: bool, plan in prop::collection::vec(cut(), 1..8), num in 3..8_usize,
    ) {
        let (receipts, held, num_flushed) = run(transaction, 2, false, is_refused, plan, &vec![(true, incremental); num]);
        prop_assert_eq!((receipts.len(), num_flushed), (num, 1));
        for (receipt, held) in receipts.iter().zip(held) {
            let due = if !receipt.applied { 0.0 } else if receipt.reason.is_none() { 1.0 } else { continue };
            prop_assert!(held.iter().all(|w| *w == due), "{held:?}: {receipts:?}");
        }
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
        for remedy in ["A new worker can join it", "checkpoint_dir"] {
            assert!(lost.to_string().contains(remedy), "{lost}");
        }
        assert!(held(&other, 1)[0].iter().all(|w| *w == 0.0));
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
