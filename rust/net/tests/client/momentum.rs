//! Momentum in the worker: one worker is torch's SGD(nesterov=True), and a rejected push leaves the velocity.

use crate::support::{Worker, bytes_of, config, filled, never, parameter, sgd, table, tensor};
use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Contribution, Group, OptimizerSpec, Rule, StalenessSpec, Transaction};
use offbeat_core::table::Role;
use offbeat_net::server::{Server, ServerConfig, Snapshot};

const LR: f32 = 0.1;

/// torch.optim.SGD(nesterov=True) on one tensor, in torch's own roundings.
#[derive(Clone)]
struct Oracle {
    p: Vec<f32>,
    v: Option<Vec<f32>>,
    momentum: f32,
    weight_decay: f32,
}

impl Oracle {
    fn step(&mut self, grad: &[f32]) {
        let Self { p, v, momentum, weight_decay } = self;
        let d: Vec<f32> = grad.iter().zip(&*p).map(|(g, p)| p.mul_add(*weight_decay, *g)).collect();
        let v = match v {
            None => v.insert(d.clone()),
            Some(v) => {
                v.iter_mut().zip(&d).for_each(|(v, d)| *v = *v * *momentum + d);
                v
            }
        };
        for ((p, v), d) in p.iter_mut().zip(v).zip(&d) {
            let ahead = v.mul_add(*momentum, *d);
            *p = ahead.mul_add(-LR, *p);
        }
    }
}

/// Some gradient of its own for every tensor and step.
fn gradient(len: usize, tensor: usize, step: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + tensor * 7 + step * 13) % 101) as f32 / 50.0 - 1.0).collect()
}

fn two_groups() -> OptimizerSpec {
    let group = |pattern: &str, momentum, weight_decay| Group {
        pattern: pattern.into(),
        lr: f64::from(LR),
        rule: Rule::Sgd { momentum, dampening: 0.0, weight_decay, nesterov: false, maximize: false },
    };
    OptimizerSpec { groups: vec![group("bias*", 0.5, 0.0), group("*", 0.9, 0.01)], momentum_correction: true }
}

#[test]
fn one_worker_is_nesterov_bit_for_bit() {
    let sizes = [70_000, 3, 40];
    for transaction in [Transaction::Fragment, Transaction::Model] {
        for incremental in [true, false] {
            let table = table(vec![
                parameter("w", sizes[0]),
                parameter("bias", sizes[1]),
                parameter("late", sizes[2]),
            ]);
            let start: Vec<Vec<f32>> = sizes.iter().enumerate().map(|(t, &n)| gradient(n, t, 99)).collect();
            let config = ServerConfig { transaction, ..config(two_groups()) };
            let values: Vec<_> = start.iter().map(|v| bytes_of(v)).collect();
            let server = Server::with_model(config, Snapshot::of(table, &values).unwrap()).unwrap();
            let mut worker = Worker::ready(&server, 1);
            let mut oracles: Vec<Oracle> = start
                .into_iter()
                .zip([(0.9, 0.01), (0.5, 0.0), (0.9, 0.01)])
                .map(|(p, (momentum, weight_decay))| Oracle { p, v: None, momentum, weight_decay })
                .collect();
            for step in 0..6 {
                // The last tensor has no gradient at first, and none in between.
                let has = |t: usize| t != 2 || (step != 0 && step != 3);
                let gradients: Vec<Vec<f32>> =
                    sizes.iter().enumerate().map(|(t, &n)| gradient(n, t, step)).collect();
                let mut values: Vec<Option<Vec<u8>>> =
                    gradients.iter().enumerate().map(|(t, g)| has(t).then(|| bytes_of(g))).collect();
                worker.push_pull(&mut values, incremental).unwrap();
                for (t, oracle) in oracles.iter_mut().enumerate().filter(|(t, _)| has(*t)) {
                    oracle.step(&gradients[t]);
                }
                for (t, oracle) in oracles.iter().enumerate() {
                    assert_eq!(worker.floats(t), oracle.p, "{transaction:?} step {step} tensor {t}");
                }
            }
        }
    }
}

#[test]
fn a_rejected_push_leaves_the_velocity() {
    let table = table(vec![parameter("w", 5)]);
    let staleness = StalenessSpec { max_staleness: Some(0), ..StalenessSpec::default() };
    let config = ServerConfig { staleness, ..config(sgd(f64::from(LR), 0.9, 0.0)) };
    let server =
        Server::with_model(config, Snapshot::of(table.clone(), &filled(&table, 0)).unwrap()).unwrap();
    let (mut one, mut other) = (Worker::ready(&server, 1), Worker::ready(&server, 1));
    let mut of_one = Oracle { p: vec![0.0; 5], v: None, momentum: 0.9, weight_decay: 0.0 };
    let mut of_other = of_one.clone();
    for step in 0..4 {
        let g = gradient(5, 0, step);
        assert!(one.push_pull(&mut [Some(bytes_of(&g))], true).unwrap().unwrap().applied);
        of_one.step(&g);
        // Twice: too late, since `one` was faster, and then in time.
        let stale = other.push_pull(&mut [Some(bytes_of(&gradient(5, 1, step)))], true).unwrap().unwrap();
        assert!(!stale.applied);
        of_other.p.clone_from(&of_one.p);
        assert!(other.push_pull(&mut [Some(bytes_of(&g))], true).unwrap().unwrap().applied);
        of_other.step(&g);
        assert_eq!(other.floats(0), of_other.p, "step {step}");
        one.pull(true).unwrap();
        of_one.p.clone_from(&of_other.p);
    }
}

#[test]
fn values_that_are_loaded_start_the_velocity_anew() {
    let loaded = gradient(N, 1, 2);
    for transaction in [Transaction::Fragment, Transaction::Model] {
        for hears_by_pull in [true, false] {
            let spec = sgd(f64::from(LR), 0.9, 0.0);
            let server = server_of(&gradient(N, 1, 1), ServerConfig { transaction, ..config(spec) });
            let mut worker = Worker::ready(&server, 1);
            for number in 0..2 {
                assert_eq!(step(&mut worker, number, true), None);
            }
            server.load_tensors(&[bytes_of(&loaded)]).unwrap();
            if hears_by_pull {
                worker.pull(true).unwrap();
            } else {
                assert_eq!(step(&mut worker, 50, true), Some(Reason::ServerRolledBack));
            }
            let mut oracle = Oracle { p: loaded.clone(), v: None, momentum: 0.9, weight_decay: 0.0 };
            for number in 0..3 {
                assert_eq!(step(&mut worker, number, true), None);
                oracle.step(&gradient(N, 0, number));
                assert_eq!(worker.floats(0), oracle.p, "{transaction:?} step {number}");
            }
        }
    }
}

#[test]
fn two_in_flight_keep_the_velocity_as_they_send() {
    let table = table(vec![parameter("w", 70_000)]);
    let server = Server::with_model(
        config(sgd(f64::from(LR), 0.9, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 2);
    let mut oracle = Oracle { p: vec![0.0; 70_000], v: None, momentum: 0.9, weight_decay: 0.0 };
    for step in 0..5 {
        let g = gradient(70_000, 0, step);
        worker.push_pull(&mut [Some(bytes_of(&g))], true).unwrap();
        oracle.step(&g); // without weight decay the parameters do not enter, so being late changes nothing
    }
    assert_eq!(worker.flush().unwrap().len(), 1);
    assert_eq!(worker.floats(0), oracle.p);
}

#[test]
fn half_precision_is_corrected_in_f32_and_rounded_once() {
    let table = table(vec![tensor("h", 3, Dtype::BF16, Role::Parameter)]);
    let server = Server::with_model(
        config(sgd(1.0, 0.5, 0.0)),
        Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    )
    .unwrap();
    let mut worker = Worker::ready(&server, 1);
    let one = [0x80, 0x3f].repeat(3);
    // d = 1: v = 1, sends 1.5; v = 1.5, sends 1.75.
    worker.push_pull(&mut [Some(one.clone())], true).unwrap();
    assert_eq!(worker.params[0], [0xc0, 0xbf].repeat(3));
    worker.push_pull(&mut [Some(one)], true).unwrap();
    assert_eq!(worker.params[0], [0x50, 0xc0].repeat(3), "-3.25");
}

#[test]
fn a_push_alone_finds_the_parameters_it_read() {
    let table = table(vec![parameter("w", 10)]);
    let spec = sgd(f64::from(LR), 0.9, 0.1);
    let server =
        Server::with_model(config(spec), Snapshot::of(table, &[bytes_of(&[1.0; 10])]).unwrap()).unwrap();
    let mut worker = Worker::ready(&server, 1);
    let mut oracle = Oracle { p: vec![1.0; 10], v: None, momentum: 0.9, weight_decay: 0.1 };
    for step in 0..3 {
        let g = gradient(10, 0, step);
        worker.params[0].fill(0); // not what was read
        worker.push(&mut [Some(bytes_of(&g))]).unwrap();
        worker.pull(false).unwrap();
        oracle.step(&g);
        assert_eq!(worker.floats(0), oracle.p);
    }
    worker.pull(true).unwrap();
    let refused = worker.push(&mut [Some(bytes_of(&[0.0; 10]))]).unwrap_err().to_string();
    assert!(refused.contains("pull once more"), "{refused}");
}

fn adam() -> OptimizerSpec {
    let rule = Rule::Adam {
        betas: (0.9, 0.99),
        eps: 1e-8,
        weight_decay: 0.0,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: false,
    };
    OptimizerSpec { groups: vec![Group { pattern: "*".into(), lr: 0.1, rule }], momentum_correction: false }
}

const N: usize = 70_000;

fn server_of(start: &[f32], config: ServerConfig) -> Server {
    let table = table(vec![parameter("w", start.len())]);
    Server::with_model(config, Snapshot::of(table, &[bytes_of(start)]).unwrap()).unwrap()
}

fn step(worker: &mut Worker, number: usize, incremental: bool) -> Option<Reason> {
    let receipt = worker.push_pull(&mut [Some(bytes_of(&gradient(N, 0, number)))], incremental).unwrap();
    receipt.unwrap().reason
}

/// Steps as torch's with a new velocity; the first is rejected, which is how the worker hears of the optimizer.
fn steps_as_new(worker: &mut Worker, (momentum, weight_decay): (f32, f32), incremental: bool) {
    let p = worker.floats(0);
    assert_eq!(step(worker, 50, incremental), Some(Reason::OptimizerChanged));
    assert_eq!(worker.floats(0), p, "a rejection moves nothing");
    let mut oracle = Oracle { p, v: None, momentum, weight_decay };
    for number in 0..3 {
        assert_eq!(step(worker, number, incremental), None);
        oracle.step(&gradient(N, 0, number));
        assert_eq!(worker.floats(0), oracle.p, "step {number}");
    }
}

#[test]
fn an_optimizer_that_is_replaced_is_replaced_in_the_workers_too() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        for incremental in [true, false] {
            let start = gradient(N, 1, 1);
            let server =
                server_of(&start, ServerConfig { transaction, ..config(sgd(f64::from(LR), 0.9, 0.0)) });
            let mut worker = Worker::ready(&server, 1);
            for number in 0..2 {
                assert_eq!(step(&mut worker, number, incremental), None);
            }
            // The server runs the same plain SGD on both.
            server.set_optimizer(sgd(f64::from(LR), 0.5, 0.01)).unwrap();
            steps_as_new(&mut worker, (0.5, 0.01), incremental);
            server.set_lr(f64::from(LR), None).unwrap();
            server.set_optimizer(sgd(f64::from(LR), 0.5, 0.01)).unwrap();
            assert_eq!(step(&mut worker, 7, incremental), None, "the same rules: nothing is lost");

            server.set_optimizer(adam()).unwrap();
            let fresh = server_of(&worker.floats(0), config(adam()));
            let mut plain = Worker::ready(&fresh, 1);
            assert_eq!(step(&mut worker, 50, incremental), Some(Reason::OptimizerChanged));
            for number in 0..3 {
                assert_eq!(
                    (step(&mut worker, number, incremental), step(&mut plain, number, true)),
                    (None, None)
                );
                assert_eq!(worker.floats(0), plain.floats(0), "Adam is fed the gradient");
            }
            server.set_optimizer(sgd(f64::from(LR), 0.9, 0.1)).unwrap();
            steps_as_new(&mut worker, (0.9, 0.1), incremental);
        }
    }
}

#[test]
fn a_worker_that_pushed_before_there_was_an_optimizer_takes_up_its_momentum() {
    let server = server_of(&vec![0.0; N], ServerConfig { optimizer: None, ..config(adam()) });
    let mut early = Worker::ready(&server, 1);
    early.client.configure(Contribution::Gradient, None, &never).unwrap();
    assert_eq!(step(&mut early, 0, true), Some(Reason::NoOptimizer));
    let mut other = Worker::ready(&server, 1);
    other.client.configure(Contribution::Gradient, Some(&sgd(f64::from(LR), 0.9, 0.1)), &never).unwrap();
    steps_as_new(&mut early, (0.9, 0.1), true);
    assert!(early.client.session().unwrap().run.momentum_correction);
}

#[test]
fn with_two_in_flight_both_pushes_made_for_the_old_optimizer_are_rejected_and_no_more() {
    let server = server_of(&vec![0.0; N], config(sgd(f64::from(LR), 0.9, 0.0)));
    let mut worker = Worker::ready(&server, 2);
    let push = |worker: &mut Worker, number| {
        let receipt = worker.push_pull(&mut [Some(bytes_of(&gradient(N, 0, number)))], false).unwrap();
        receipt.map(|receipt| receipt.reason)
    };
    assert_eq!(push(&mut worker, 0), None);
    assert_eq!(worker.flush().unwrap().len(), 1);
    let p = worker.floats(0);
    server.set_optimizer(sgd(f64::from(LR), 0.5, 0.0)).unwrap();
    assert_eq!(push(&mut worker, 1), None);
    assert_eq!(push(&mut worker, 2), Some(Some(Reason::OptimizerChanged)));
    assert_eq!(push(&mut worker, 3), Some(Some(Reason::OptimizerChanged)), "it was sent with the one before");
    assert_eq!(push(&mut worker, 4), Some(None));
    assert_eq!(worker.flush().unwrap().iter().map(|r| r.reason).collect::<Vec<_>>(), [None]);
    let mut oracle = Oracle { p, v: None, momentum: 0.5, weight_decay: 0.0 };
    oracle.step(&gradient(N, 0, 3));
    oracle.step(&gradient(N, 0, 4));
    assert_eq!(worker.floats(0), oracle.p);
}

#[test]
fn max_norm_is_of_the_gradient_and_not_of_what_momentum_makes_of_it() {
    let staleness = StalenessSpec { max_norm: Some(1.5), ..StalenessSpec::default() };
    let server = server_of(&vec![0.0; N], ServerConfig { staleness, ..config(sgd(f64::from(LR), 0.9, 0.0)) });
    let mut worker = Worker::ready(&server, 1);
    let mut oracle = Oracle { p: vec![0.0; N], v: None, momentum: 0.9, weight_decay: 0.0 };
    let of_norm = |norm: f32| vec![norm / (N as f32).sqrt(); N];
    for _ in 0..10 {
        let receipt = worker.push_pull(&mut [Some(bytes_of(&of_norm(1.0)))], true).unwrap().unwrap();
        assert!(receipt.applied, "{receipt:?}");
        oracle.step(&of_norm(1.0));
    }
    let long = worker.push_pull(&mut [Some(bytes_of(&of_norm(1.6)))], true).unwrap().unwrap();
    assert_eq!(long.reason, Some(Reason::Norm));
    assert!(long.detail.contains("1.6"), "{}", long.detail);
    assert_eq!(worker.floats(0), oracle.p);
}
