//! Many workers: at once, and one after the other. The numbers of a long run are asked for with `OFFBEAT_JOINS=10000`.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::{DEADLINE, NEVER, config, eventually, plain_sgd, start_with, tensor};
use offbeat_core::spec::Transaction;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::Parting;
use offbeat_net::client::{Client, ClientConfig, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::fs;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

const LEN: usize = 1000;

/// Clients of one process, with the server in it: some six descriptors each. The usual limit is 1024.
fn raise_the_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit }).unwrap();
}

fn server(changed: ServerConfig) -> Server {
    let table = TensorTable::new(vec![tensor("w", LEN, Role::Parameter)]).unwrap();
    start_with(ServerConfig { optimizer: Some(plain_sgd()), ..changed }, table, &[vec![0; 4 * LEN]])
}

struct Worker {
    client: Client,
    gradient: Vec<u8>,
    parameters: Vec<u8>,
}

impl Worker {
    fn of(server: &Server) -> Self {
        let config = ClientConfig {
            address: server.address().to_string(),
            worker_id: None,
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: DEADLINE * 3,
            patience: Some(Duration::ZERO),
        };
        let mut client = Client::connect(config, None, &NEVER).unwrap();
        let mut parameters = vec![0; 4 * LEN];
        client.pull(&[Memory::of(&mut parameters)], false, &NEVER).unwrap();
        Self { client, gradient: 1_f32.to_le_bytes().repeat(LEN), parameters }
    }

    fn push(&mut self) {
        let values = [Some(Memory::of(&mut self.gradient))];
        let input = PushInput { values: &values, samples: 1 };
        let receipt =
            self.client.push_pull(input, &[Memory::of(&mut self.parameters)], true, &NEVER).unwrap();
        assert!(receipt.unwrap().applied);
    }

    fn finish(mut self) {
        self.client.close(Parting::Finished, &NEVER).unwrap();
    }
}

fn assert_applied(server: &Server, num_pushes: u64) {
    let (_, tensors) = server.tensors().unwrap().unwrap();
    let (values, _) = tensors[0].as_chunks();
    assert!(values.iter().all(|v| f32::from_le_bytes(*v) == -(num_pushes as f32)));
}

#[test]
fn a_server_as_it_is_by_default_serves_256_workers_at_once() {
    const WORKERS: usize = 256;
    const PUSHES: u64 = 5;
    raise_the_limit();
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let server = server(ServerConfig { transaction, ..ServerConfig::default() });
        let all_are_in = Arc::new(Barrier::new(WORKERS));
        thread::scope(|scope| {
            for _ in 0..WORKERS {
                let (server, all_are_in) = (&server, Arc::clone(&all_are_in));
                scope.spawn(move || {
                    let mut worker = Worker::of(server);
                    all_are_in.wait();
                    (0..PUSHES).for_each(|_| worker.push());
                    all_are_in.wait();
                    worker.finish();
                });
            }
        });
        let status = eventually(&server, "nobody is connected", |s| s["connections"] == 0);
        let workers = status["workers"].as_array().unwrap();
        assert!(workers.iter().all(|w| w["state"] == "finished" && w["applied"] == PUSHES), "{status:#}");
        assert_eq!(workers.len(), WORKERS);
        assert_applied(&server, WORKERS as u64 * PUSHES);
    }
}

/// What the process holds: kilobytes that are resident, descriptors.
fn held() -> (usize, usize) {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = resident.trim().trim_end_matches(" kB").parse().unwrap();
    (resident, fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn workers_that_come_and_go_under_fresh_names_leave_nothing_behind() {
    /// Departures, and names of those who are gone: what a status still tells of.
    const REMEMBERED: usize = 1000;
    /// A few pages here and there; a kilobyte for each who was here would be more.
    const MOST_GROWTH_KB: usize = 2 << 10;
    /// Connections whose task has not ended yet when their worker has.
    const CLOSING: usize = 4;
    const LONG: u64 = 4 * REMEMBERED as u64;
    #[expect(clippy::disallowed_methods, reason = "a longer run is asked for where it is started")]
    let num_joins: u64 = std::env::var("OFFBEAT_JOINS").map_or(300, |n| n.parse().unwrap());
    let max_workers = 64;
    let server = server(ServerConfig { max_workers, ..config() });
    let mut half = held();
    for n in 0..num_joins {
        let mut worker = Worker::of(&server);
        worker.push();
        worker.finish();
        if n == num_joins / 2 {
            half = held();
        }
    }
    let (resident, descriptors) = held(); // a status in hand is large
    let status = eventually(&server, "nobody is connected", |s| {
        s["connections"] == 0 && s["workers"].as_array().unwrap().len() <= REMEMBERED
    });
    let threads = status["connections_by_thread"].as_array().unwrap();
    assert!(threads.iter().all(|n| *n == 0) && threads.len() == 2, "{threads:?}");
    assert!(status["departures"].as_array().unwrap().len() <= REMEMBERED);
    assert_eq!(status["tickets"]["applied"], num_joins);
    assert_applied(&server, num_joins);
    if num_joins >= LONG {
        assert!(resident <= half.0 + MOST_GROWTH_KB, "{} kB at half, {resident} kB at the end", half.0);
        assert!(
            descriptors <= half.1 + 2 * CLOSING,
            "{} descriptors at half, {descriptors} at the end",
            half.1
        );
    }
    assert_eq!(common::status(&server)["state"], "running");
}
