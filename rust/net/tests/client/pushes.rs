//! What is pushed and what comes back.

use crate::support::{
    Worker, bytes_of, client_config, config, eventually, filled, memories, never, parameter, sgd, table,
    tensor,
};
use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::table::Role;
use offbeat_core::wire::message::RefusalCode;
use offbeat_net::client::{Client, ClientError, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use serde_json::Value;
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

/// Large enough for two fragments, and a crowd of small tensors that no vectored call takes at once.
fn crowded() -> offbeat_core::table::TensorTable {
    let mut specs = vec![parameter("big", 70_000)];
    specs.extend((0..40).map(|i| parameter(&format!("small{i}"), 1 + i % 7)));
    specs.push(parameter("empty", 0));
    table(specs)
}

#[test]
fn a_pull_after_init_equals_what_was_brought() {
    let mut specs = crowded().tensors().to_vec();
    specs.push(tensor("half", 1000, Dtype::F16, Role::Parameter));
    specs.push(tensor("brain", 1001, Dtype::BF16, Role::Parameter));
    specs.push(tensor("mean", 33, Dtype::F64, Role::Buffer));
    specs.push(tensor("count", 1, Dtype::I64, Role::Buffer));
    specs.push(tensor("mask", 7, Dtype::Bool, Role::Buffer));
    let table = table(specs);
    let mut values = filled(&table, 0);
    for (t, value) in values.iter_mut().enumerate() {
        for (i, byte) in value.iter_mut().enumerate() {
            *byte = if table.tensors()[t].dtype == Dtype::Bool { 1 } else { ((i * 7 + t) % 59) as u8 };
        }
    }
    let server = Server::start(config(sgd(1.0, 0.0, 0.0))).unwrap();
    let mut bringer = Client::connect(client_config(server.address(), 1), Some(&table), &never).unwrap();
    assert_eq!(bringer.session().unwrap().table, None);
    let slices: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
    assert_eq!(bringer.init(&table, &slices, Some("how to build it"), &never), Ok(true));

    let mut late = Client::connect(client_config(server.address(), 1), None, &never).unwrap();
    assert_eq!(late.wait_for_model(&never).unwrap().as_ref(), &table);
    assert_eq!(late.session().unwrap().blueprint.as_deref(), Some("how to build it"));
    assert_eq!(late.init(&table, &slices, None, &never), Ok(false), "there is one already");
    let mut out = filled(&table, 0xff);
    let out_memories: Vec<Memory<'_>> = out.iter_mut().map(|o| Memory::of(o)).collect();
    assert_eq!(late.pull(&out_memories, false, &never).unwrap().version, 0);
    assert_eq!(out, values);

    let mut gradient: Vec<_> = values.into_iter().map(Some).collect();
    let input = PushInput { values: &memories(&mut gradient), samples: 1 };
    assert!(bringer.push(input, &never).unwrap().applied, "what was brought was read");
}

#[test]
fn pushes_follow_the_closed_form_under_both_transactions() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        for in_flight in [1, 2] {
            for incremental in [false, true] {
                let table = crowded();
                let config = ServerConfig { transaction, ..config(sgd(0.5, 0.0, 0.0)) };
                let server =
                    Server::with_model(config, Snapshot::of(table.clone(), &filled(&table, 0)).unwrap())
                        .unwrap();
                let mut worker = Worker::ready(&server, in_flight);
                for step in 1..=5_u64 {
                    let mut gradient = worker.gradient(2.0);
                    let receipt = worker.push_pull(&mut gradient, incremental).unwrap();
                    let read = step + 1 - in_flight as u64; // pushes whose answer is here
                    assert_eq!(receipt.as_ref().map(|r| r.version), Some(read).filter(|&v| v > 0));
                    assert!(
                        worker.floats(0).iter().all(|&p| p == -(read as f32)),
                        "{transaction:?} {in_flight}"
                    );
                }
                let receipts = worker.flush().unwrap();
                assert_eq!(receipts.len(), in_flight - 1);
                for tensor in 0..worker.table.len() {
                    assert!(worker.floats(tensor).iter().all(|&p| p == -5.0));
                }
            }
        }
    }
}

#[test]
fn staleness_counts_own_pushes_in_flight() {
    let table = table(vec![parameter("w", 100)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 2);
    let mut staleness = vec![];
    for _ in 0..4 {
        let mut gradient = worker.gradient(1.0);
        staleness.extend(worker.push_pull(&mut gradient, true).unwrap().map(|r| r.staleness));
    }
    staleness.extend(worker.flush().unwrap().iter().map(|r| r.staleness));
    assert_eq!(staleness, [0, 1, 1, 1], "the first push is exact, then each is one late");
    let mut gradient = worker.gradient(1.0);
    assert_eq!(worker.push(&mut gradient).unwrap().staleness, 0, "a flush has read them all");
    assert_eq!(worker.push(&mut gradient).unwrap().staleness, 1, "a push alone reads nothing");
}

#[test]
fn what_other_workers_did_since_the_read_is_staleness() {
    let table = table(vec![parameter("w", 100)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let (mut slow, mut fast) = (Worker::ready(&server, 1), Worker::ready(&server, 1));
    for _ in 0..3 {
        let mut gradient = fast.gradient(1.0);
        fast.push_pull(&mut gradient, true).unwrap();
    }
    let mut gradient = slow.gradient(1.0);
    assert_eq!(slow.push_pull(&mut gradient, true).unwrap().unwrap().staleness, 3);
    assert_eq!(slow.push_pull(&mut gradient, true).unwrap().unwrap().staleness, 0);
    assert_eq!(slow.floats(0), vec![-5.0; 100]);
}

#[test]
fn an_absent_gradient_leaves_its_tensor() {
    let table = table(vec![parameter("a", 10), parameter("frozen", 20), parameter("big", 70_000)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    for incremental in [false, true] {
        let mut worker = Worker::ready(&server, 1);
        let before = worker.floats(2)[0];
        let mut gradient = worker.gradient(1.0);
        gradient[1] = None;
        worker.push_pull(&mut gradient, incremental).unwrap();
        gradient[0] = None;
        worker.push_pull(&mut gradient, incremental).unwrap();
        assert_eq!(worker.floats(1), [0.0; 20]);
        assert!(worker.floats(2).iter().all(|&p| p == before - 2.0));
        let mut nothing = vec![None, None, None];
        assert!(matches!(worker.push(&mut nothing), Err(ClientError::BadInput { .. })));
    }
}

#[test]
fn an_incremental_pull_brings_only_what_changed() {
    let table = table(vec![parameter("a", 70_000), tensor("h", 5, Dtype::F16, Role::Parameter)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let (mut reader, mut writer) = (Worker::ready(&server, 1), Worker::ready(&server, 1));
    let mut gradient = vec![None, Some(vec![0, 0x3c, 0, 0x3c, 0, 0x3c, 0, 0x3c, 0, 0x3c])]; // 1.0 in float16
    writer.push(&mut gradient).unwrap();
    reader.params[0].fill(7); // what did not change must not be written
    assert_eq!(reader.pull(true).unwrap().version, 1);
    assert!(reader.params[0].iter().all(|&b| b == 7));
    assert_eq!(reader.params[1], [0, 0xbc].repeat(5));
    reader.pull(false).unwrap();
    assert!(reader.params[0].iter().all(|&b| b == 0));
}

#[test]
fn a_gradient_that_is_not_finite_is_named_and_nothing_is_sent() {
    let table = table(vec![parameter("a", 10), parameter("b", 70_000)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 1);
    let mut bad = worker.gradient(1.0);
    let mut values = vec![1.0; 70_000];
    values[69_999] = f32::NAN;
    bad[1] = Some(bytes_of(&values));
    match worker.push_pull(&mut bad, true) {
        Err(ClientError::NonFinite { tensor, index, value }) => {
            assert_eq!((tensor.as_str(), index), ("b", 69_999));
            assert!(value.is_nan());
        }
        other => panic!("{other:?}"),
    }
    let status: Value = serde_json::from_str(&server.status_json().unwrap()).unwrap();
    assert_eq!(status["version"], 0);
    let mut good = worker.gradient(1.0);
    let receipt = worker.push_pull(&mut good, true).unwrap().unwrap();
    assert_eq!((receipt.version, receipt.staleness), (1, 0));
}

#[test]
fn memory_that_does_not_fit_is_refused_by_name() {
    let table = table(vec![parameter("a", 10), parameter("b", 20)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::join(&server, 1);
    let text = |error: ClientError| match error {
        ClientError::BadInput { message } | ClientError::OutOfOrder { message } => message,
        other => panic!("{other:?}"),
    };
    let mut gradient = worker.gradient(1.0);
    assert!(text(worker.push(&mut gradient).unwrap_err()).contains("pull before the first push"));
    worker.pull(false).unwrap();
    gradient[1] = Some(vec![0; 79]);
    let message = text(worker.push(&mut gradient).unwrap_err());
    assert!(message.contains("79 bytes to tensor b float32 [20], which has 80"), "{message}");
    assert!(text(worker.push(&mut [None]).unwrap_err()).contains("1 tensors, the model has 2"));
    let mut one = vec![0; 120];
    let start = one.as_mut_ptr();
    #[expect(unsafe_code, reason = "only so can two memories overlap")]
    // SAFETY: inside `one`, which nobody else touches.
    let overlapping = unsafe { [Memory::from_raw(start, 40), Memory::from_raw(start.add(30), 80)] };
    let message = text(worker.client.pull(&overlapping, false, &never).unwrap_err());
    assert!(message.contains("\"a\" and \"b\""), "{message}");
    assert_eq!(worker.pull(true).unwrap().version, 0, "nothing has happened");
}

#[test]
fn a_push_without_an_optimizer_moves_nothing() {
    let table = table(vec![parameter("w", 10)]);
    let server =
        Server::with_model(ServerConfig::default(), Snapshot::of(table.clone(), &filled(&table, 0)).unwrap())
            .unwrap();
    let mut worker = Worker::ready(&server, 1);
    let mut gradient = worker.gradient(1.0);
    let receipt = worker.push_pull(&mut gradient, true).unwrap().unwrap();
    assert!(!receipt.applied);
    let spec = sgd(1.0, 0.0, 0.0);
    worker.client.configure(offbeat_core::spec::Contribution::Gradient, Some(&spec), &never).unwrap();
    assert!(worker.push_pull(&mut gradient, true).unwrap().unwrap().applied, "sequence numbers go on");
    let other = sgd(1.0, 0.0, 0.1);
    let refused = worker.client.configure(offbeat_core::spec::Contribution::Gradient, Some(&other), &never);
    assert!(matches!(refused, Err(ClientError::Refused { code: RefusalCode::Optimizer, .. })), "{refused:?}");
    assert!(worker.push_pull(&mut gradient, true).unwrap().unwrap().applied, "a refusal leaves the session");
}

#[test]
fn a_push_of_a_life_that_is_over_is_rejected_and_brings_the_new_one() {
    let table = table(vec![parameter("w", 10)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 1);
    server.load_tensors(&[bytes_of(&[5.0; 10])]).unwrap();
    let mut gradient = worker.gradient(1.0);
    let receipt = worker.push_pull(&mut gradient, true).unwrap().unwrap();
    assert!(!receipt.applied);
    assert_eq!(receipt.reason.map(Reason::name), Some("server_rolled_back"));
    assert_eq!(worker.floats(0), [5.0; 10]);
    assert!(worker.push_pull(&mut gradient, true).unwrap().unwrap().applied);
    assert_eq!(worker.floats(0), [4.0; 10]);
    eventually("the new term", || worker.client.events().unwrap().term == Some(receipt.term));
}

#[test]
fn half_precision_travels_as_itself() {
    let table = table(vec![
        tensor("h", 70_001, Dtype::F16, Role::Parameter),
        tensor("b", 3, Dtype::BF16, Role::Parameter),
    ]);
    let server = Server::with_model(
        config(sgd(0.5, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 1);
    let mut gradient = vec![Some([0, 0x40].repeat(70_001)), Some([0, 0x40].repeat(3))]; // 2.0 in both
    worker.push_pull(&mut gradient, false).unwrap();
    assert_eq!(worker.params[0], [0, 0xbc].repeat(70_001));
    assert_eq!(worker.params[1], [0x80, 0xbf].repeat(3));
    let mut one = worker.gradient(0.0);
    one[1] = Some(vec![0x80, 0x7f, 0, 0, 0, 0]); // infinity in bfloat16
    one[0] = None;
    assert!(matches!(worker.push(&mut one), Err(ClientError::NonFinite { index: 0, .. })));
}

#[test]
fn gradients_may_be_pulled_over() {
    // Whoever needs a gradient no more may have the parameters written where it was.
    let table = table(vec![parameter("big", 200_000), parameter("b", 5)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.0, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 1);
    let mut both = [bytes_of(&vec![1.0; 200_000]), bytes_of(&[1.0; 5])];
    {
        #[expect(unsafe_code, reason = "only so can the same memory be sent and written")]
        // SAFETY: `both` outlives these, and nobody else touches it.
        let memory = |m: &mut Vec<u8>| unsafe { Memory::from_raw(m.as_mut_ptr(), m.len()) };
        let values: Vec<Option<Memory<'_>>> = both.iter_mut().map(|m| Some(memory(m))).collect();
        let out: Vec<Memory<'_>> = both.iter_mut().map(memory).collect();
        worker.client.push_pull(PushInput { values: &values, samples: 1 }, &out, false, &never).unwrap();
    }
    assert!(both.iter().all(|m| crate::support::floats(m).iter().all(|&p| p == -1.0)));
}

/// A server of a model that no socket's buffers hold, which soon finds a peer too slow.
fn large_and_impatient(transaction: Transaction) -> Server {
    let (progress_timeout, handshake_timeout) = (Duration::from_millis(500), Duration::from_millis(2500));
    let base = config(sgd(1.0, 0.0, 0.0));
    let config = ServerConfig { transaction, progress_timeout, handshake_timeout, ..base };
    let table = table(vec![parameter("w", 8 << 20)]);
    Server::with_model(config, Snapshot::of(table.clone(), &filled(&table, 0)).unwrap()).unwrap()
}

/// As long as the server has patience with a connection that never proves itself: five times what it has with a peer
/// that takes nothing.
fn compute(server: &Server) {
    let mut silent = TcpStream::connect(server.address()).unwrap();
    silent.read_to_end(&mut vec![]).ok();
}

fn status(server: &Server) -> Value {
    serde_json::from_str(&server.status_json().unwrap()).unwrap()
}

#[test]
fn a_worker_that_computes_for_long_while_its_answer_waits_is_not_cut_off() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let server = large_and_impatient(transaction);
        let mut worker = Worker::ready(&server, 2);
        let mut gradient = worker.gradient(1.0);
        for before in 0..2 {
            let receipt = worker.push_pull(&mut gradient, true).unwrap();
            assert_eq!(receipt.map(|r| r.version), Some(before).filter(|&v| v > 0));
            compute(&server);
        }
        assert!(worker.flush().unwrap().iter().all(|r| r.applied && r.version == 2));
        assert!(worker.floats(0).iter().all(|&p| p == -2.0));
    }
}

#[test]
fn workers_that_compute_for_long_while_their_answers_wait_hold_nobody_up() {
    let server = large_and_impatient(Transaction::Model);
    let mut workers: Vec<_> = (0..3).map(|_| Worker::ready(&server, 2)).collect();
    let mut gradient = workers[0].gradient(1.0);
    for (version, worker) in (1..).zip(&mut workers) {
        assert_eq!(worker.push_pull(&mut gradient, true).unwrap(), None);
        // The first two keep theirs alive, and more may not be.
        eventually("the commit", || {
            let status = status(&server);
            status["version"] == version && status["memory"]["live_versions"] == version
        });
    }
    let last = workers.last_mut().unwrap();
    for version in 3..5 {
        assert_eq!(last.push_pull(&mut gradient, true).unwrap().unwrap().version, version);
    }
}
