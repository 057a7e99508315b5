//! What a module's forward pass moves: a push carries the change since the pull.

use crate::support::{Worker, bytes_of, config, filled, floats, parameter, sgd, table, tensor};
use offbeat_core::dtype::Dtype;
use offbeat_core::table::{Role, TensorTable};
use offbeat_net::server::{Server, Snapshot};

fn model() -> TensorTable {
    table(vec![
        parameter("w", 4),
        tensor("mean", 3, Dtype::F32, Role::Buffer),
        tensor("count", 1, Dtype::I64, Role::Buffer),
        tensor("mask", 2, Dtype::F32, Role::Buffer),
    ])
}

fn start(in_flight: usize) -> (Server, Worker, Worker) {
    let mut values = filled(&model(), 0);
    values[3] = bytes_of(&[f32::NEG_INFINITY, 0.0]);
    let server =
        Server::with_model(config(sgd(1.0, 0.0, 0.0)), Snapshot::of(model(), &values).unwrap()).unwrap();
    let (a, b) = (Worker::ready(&server, in_flight), Worker::ready(&server, in_flight));
    (server, a, b)
}

/// A forward pass: the mean moves by `by`, the count by one.
fn forward(worker: &mut Worker, by: f32) -> Vec<Option<Vec<u8>>> {
    let mean: Vec<f32> = worker.floats(1).iter().map(|m| m + by).collect();
    worker.params[1] = bytes_of(&mean);
    let count = count(worker) + 1;
    worker.params[2] = count.to_le_bytes().to_vec();
    let mut values = worker.gradient(1.0);
    for (value, param) in values.iter_mut().zip(&worker.params).skip(1) {
        *value = Some(param.clone());
    }
    values
}

fn count(worker: &Worker) -> i64 {
    i64::from_le_bytes(worker.params[2][..].try_into().unwrap())
}

#[test]
fn two_workers_changes_are_merged() {
    let (server, mut a, mut b) = start(1);
    for _ in 0..3 {
        let (mut of_a, mut of_b) = (forward(&mut a, 1.0), forward(&mut b, 0.25));
        a.push_pull(&mut of_a, true).unwrap();
        b.push_pull(&mut of_b, true).unwrap();
    }
    // Each round b's change is smaller than what a's has moved meanwhile, and from the same base.
    assert_eq!(b.floats(1), [3.0; 3]);
    assert_eq!(count(&b), 6);
    a.pull(true).unwrap();
    assert_eq!((a.floats(1), count(&a)), (b.floats(1), 6));
    assert_eq!(a.floats(3), [f32::NEG_INFINITY, 0.0], "a constant is no part of a push");
    let (_, tensors) = server.tensors().unwrap().unwrap();
    assert_eq!(floats(&tensors[1]), [3.0; 3]);
}

#[test]
fn pushes_without_pulls_count_each_change_once() {
    let (_server, mut a, mut b) = start(1);
    for _ in 0..3 {
        let mut of_a = forward(&mut a, 1.0);
        a.push(&mut of_a).unwrap();
    }
    b.pull(true).unwrap();
    assert_eq!((b.floats(1), count(&b)), (vec![3.0; 3], 3));
}

#[test]
fn two_in_flight_count_each_change_once() {
    let (_server, mut a, mut b) = start(2);
    for _ in 0..5 {
        let (mut of_a, mut of_b) = (forward(&mut a, 1.0), forward(&mut b, 0.25));
        a.push_pull(&mut of_a, true).unwrap();
        b.push_pull(&mut of_b, true).unwrap();
    }
    a.flush().unwrap();
    b.flush().unwrap();
    a.pull(true).unwrap();
    assert_eq!(count(&a), 10);
    assert!(a.floats(1).iter().all(|m| (1.0..=6.25).contains(m)), "{:?}", a.floats(1));
}

#[test]
fn buffers_that_the_server_did_not_take_go_back() {
    let (_server, mut a, _b) = start(1);
    drop(forward(&mut a, 1.0));
    a.pull(true).unwrap();
    assert_eq!(
        (a.floats(1), count(&a)),
        (vec![0.0; 3], 0),
        "what was never pushed is gone, unchanged or not"
    );
}
