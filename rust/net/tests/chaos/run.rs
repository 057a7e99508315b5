//! One run: workers on threads of their own, a relay between them and the server, and what the schedule says.

use crate::ledger::{Coverage, Restart, Told, judge, status};
use crate::relay::{Relay, WHOLE};
use crate::schedule::{Before, Fault, MAX_WORKERS, PER_WORKER, Schedule, Work};
use crate::support::{
    DEADLINE, Worker, bytes_of, client_config, config, eventually, filled, never, parameter, sgd, table,
    tensor,
};
use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{OptimizerSpec, Rule};
use offbeat_core::store::Receipt;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::{Parting, RefusalCode};
use offbeat_net::client::{Client, ClientConfig, ClientError};
use offbeat_net::server::{CheckpointConfig, Ending, Every, Resume, Server, ServerConfig, Snapshot};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const CELLS: usize = MAX_WORKERS * 2 * PER_WORKER;
/// A velocity moves a cell that was pushed once by so much again.
const MOMENTUM: f64 = 1.0 / 64.0;

/// Three small fragments of parameters, and one of buffers.
fn model(has_buffers: bool) -> TensorTable {
    let mut tensors = vec![
        parameter("a", CELLS),
        tensor("b", CELLS, Dtype::BF16, Role::Parameter),
        tensor("c", CELLS, Dtype::F16, Role::Parameter),
    ];
    if has_buffers {
        tensors.push(tensor("n", CELLS, Dtype::I64, Role::Buffer));
    }
    table(tensors)
}

/// Several rules that do the same: a change among them is another optimizer all the same.
fn optimizer(schedule: &Schedule, number: usize) -> OptimizerSpec {
    let mut spec = sgd(1.0, if schedule.has_momentum { MOMENTUM } else { 0.0 }, 0.0);
    for group in &mut spec.groups {
        if let Rule::Sgd { dampening, .. } = &mut group.rule
            && number > 0
        {
            *dampening = number as f64 / 1024.0;
        }
    }
    spec
}

/// Where one run keeps its checkpoints; gone after it.
struct Place {
    root: PathBuf,
    number: usize,
}

impl Place {
    fn new(seed: u64) -> Self {
        let root = std::env::temp_dir().join(format!("offbeat-chaos-{}-{seed}", std::process::id()));
        fs::remove_dir_all(&root).ok(); // of a test that was killed
        Self { root, number: 0 }
    }

    fn directory(&self) -> PathBuf {
        self.root.join(self.number.to_string())
    }

    /// Goes on in a copy of what is there now, as a crash would leave it.
    fn crash(&mut self) {
        let from = self.directory();
        self.number += 1;
        let to = self.directory();
        eventually("a copy", || {
            fs::remove_dir_all(&to).ok(); // one from which a checkpoint was removed meanwhile
            copy(&from, &to).is_ok()
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.root).ok();
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

fn start(schedule: &Schedule, place: &Place) -> Server {
    let every = Every::Versions(schedule.checkpoint_every);
    let kept = CheckpointConfig { directory: place.directory(), every, resume: Resume::Auto };
    let cut_deadline = Duration::from_millis(if schedule.is_patient { 1000 } else { 0 });
    let config = ServerConfig {
        transaction: schedule.transaction,
        checkpoints: Some(kept),
        cut_deadline,
        ..config(optimizer(schedule, 0))
    };
    let table = model(schedule.has_buffers);
    let values = filled(&table, 0);
    Server::with_model(config, Snapshot::of(table, &values).unwrap()).unwrap()
}

/// What the threads of a run share.
struct Shared<'a> {
    relay: &'a Relay,
    num_pushed: &'a AtomicUsize,
    /// Nothing goes wrong any more.
    is_calm: &'a AtomicBool,
}

/// Runs what a seed says, and looks whether all is as it should be.
pub(crate) fn run(seed: u64) -> Coverage {
    let schedule = Schedule::of(seed);
    let mut coverage = Coverage::new();
    let mut place = Place::new(seed);
    let mut server = start(&schedule, &place);
    eventually("the first checkpoint", || status(&server)["checkpoints"]["version"] == 0);
    let relay = Relay::new(server.address(), []);
    let (num_pushed, is_calm) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (mut restarts, mut loads) = (Vec::new(), Vec::new());
    let told = std::thread::scope(|scope| {
        let shared = || Shared { relay: &relay, num_pushed: &num_pushed, is_calm: &is_calm };
        let workers = schedule.workers.iter().enumerate();
        let threads: Vec<_> = workers
            .map(|(number, work)| {
                let shared = shared();
                scope.spawn(move || Life::new(shared, number, work).live())
            })
            .collect();
        for (number, (at, fault)) in schedule.faults.iter().enumerate() {
            let is_time = || num_pushed.load(Ordering::SeqCst) >= *at;
            eventually("some pushes", || {
                is_time() || threads.iter().any(std::thread::ScopedJoinHandle::is_finished)
            });
            match fault {
                Fault::Cuts(cuts) => relay.disturb(cuts.clone()),
                Fault::LostReply(bytes) => relay.cut_answer_after(*bytes),
                Fault::HangUp => relay.disturb([WHOLE]),
                Fault::Crash => {
                    relay.go_down();
                    place.crash();
                    server.stop();
                    let restart = Restart::read(&place.directory());
                    server = start(&schedule, &place);
                    restarts.push(restart.into(&server));
                    relay.come_up(server.address());
                    coverage.insert("crash");
                }
                Fault::Drain => {
                    server.end(Ending::Restarting);
                    let restart = Restart::read(&place.directory());
                    server = start(&schedule, &place);
                    restarts.push(restart.into(&server));
                    relay.come_up(server.address());
                    coverage.insert("drain");
                }
                Fault::Load => {
                    server.load_tensors(&filled(&model(schedule.has_buffers), 0)).unwrap();
                    loads.push(status(&server)["term"].as_u64().unwrap());
                    coverage.insert("load");
                }
                Fault::Optimizer => server.set_optimizer(optimizer(&schedule, number + 1)).unwrap(),
                Fault::LearningRate => server.set_lr(1.0, None).unwrap(),
            }
        }
        is_calm.store(true, Ordering::SeqCst);
        let mut all = Vec::new();
        for thread in threads {
            let (told, hit) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all.extend(told);
            coverage.extend(hit);
        }
        all
    });
    if relay.num_cut() > 0 {
        coverage.insert("a push that was cut");
    }
    judge(&server, &schedule, &told, &restarts, &loads, &mut coverage);
    coverage
}

/// One worker's name, and the processes that bear it.
struct Life<'a> {
    shared: Shared<'a>,
    name: String,
    work: &'a Work,
    next_cell: usize,
    told: Vec<Told>,
    coverage: Coverage,
}

/// One process.
struct Process {
    worker: Worker,
    incarnation: u32,
    num_pushed: u64,
    /// Those that have not been answered.
    open: Vec<Told>,
    receipts: Vec<Receipt>,
}

impl Process {
    /// Its pushes with their receipts, once all have been answered.
    fn settle(&mut self, in_flight: usize) -> Vec<Told> {
        let (open, mut receipts) = (std::mem::take(&mut self.open), std::mem::take(&mut self.receipts));
        assert_eq!(open.len(), receipts.len(), "{open:?}, {receipts:?}");
        if in_flight == 2 {
            // Those of lost connections come with a flush, and do not say whose they are. Tickets grow with sequence
            // numbers, and a rejection has the version of the ticket before it.
            receipts.sort_by_key(|receipt| (receipt.term, receipt.version, !receipt.applied));
        }
        let pairs = open.into_iter().zip(receipts);
        pairs.map(|(told, receipt)| Told { receipt: Some(receipt), ..told }).collect()
    }
}

impl<'a> Life<'a> {
    fn new(shared: Shared<'a>, number: usize, work: &'a Work) -> Self {
        let next_cell = number * 2 * PER_WORKER;
        let name = format!("w{number}");
        Self { shared, name, work, next_cell, told: Vec::new(), coverage: Coverage::new() }
    }

    fn join(&self) -> Process {
        let config = ClientConfig {
            patience: Some(DEADLINE),
            worker_id: Some(self.name.clone()),
            ..client_config(self.shared.relay.address, self.work.in_flight)
        };
        let client = loop {
            match Client::connect(config.clone(), None, &never) {
                Ok(client) => break client,
                // A new process that cannot begin says so; whoever starts it starts it again.
                Err(
                    ClientError::Lost { .. }
                    | ClientError::Refused { code: RefusalCode::Restarting | RefusalCode::Lost, .. },
                ) => {}
                Err(error) => panic!("{}: {error}", self.name),
            }
        };
        let session = client.session().unwrap();
        let incarnation = session.incarnation;
        let table = session.table.as_deref().unwrap().clone();
        let params = filled(&table, 0xa5);
        let mut worker = Worker { client, table, params };
        worker.pull(false).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        Process { worker, incarnation, num_pushed: 0, open: Vec::new(), receipts: Vec::new() }
    }

    fn live(mut self) -> (Vec<Told>, Coverage) {
        let mut process = self.join();
        for step in &self.work.steps {
            match step.before {
                Before::Nothing => {}
                Before::Pull => {
                    process
                        .worker
                        .pull(self.work.incremental)
                        .unwrap_or_else(|e| panic!("{}: {e}", self.name));
                }
                Before::Anew => {
                    self.flush(&mut process, false);
                    process.worker.client.close(Parting::Finished, &never).unwrap();
                    process = self.join();
                    self.coverage.insert("a new process");
                }
                Before::Zombie => {
                    self.flush(&mut process, false);
                    let new = self.join();
                    self.haunt(process);
                    process = new;
                }
            }
            self.push(&mut process, step.pulls).unwrap_or_else(|e| panic!("{}: {e}", self.name));
            self.shared.num_pushed.fetch_add(1, Ordering::SeqCst);
        }
        let is_calm = || self.shared.is_calm.load(Ordering::SeqCst);
        self.shared.num_pushed.fetch_add(CELLS, Ordering::SeqCst);
        eventually("the last fault", is_calm);
        self.flush(&mut process, true);
        process.worker.client.close(Parting::Finished, &never).unwrap();
        (self.told, self.coverage)
    }

    /// One more push of a process that another has replaced: it is told so, unless a crash has undone that.
    fn haunt(&mut self, mut old: Process) {
        match self.push(&mut old, true).and_then(|()| old.worker.flush()) {
            Ok(receipts) => {
                old.receipts.extend(receipts);
                self.told.extend(old.settle(self.work.in_flight));
            }
            Err(ClientError::Fenced { .. }) => {
                self.told.append(&mut old.open);
                self.coverage.insert("fenced");
            }
            Err(error) => panic!("{}: {error}", self.name),
        }
    }

    /// Settles all, and reads once more.
    fn flush(&mut self, process: &mut Process, is_last: bool) {
        let name = &self.name;
        let receipts = process.worker.flush().unwrap_or_else(|e| panic!("{name}: {e}"));
        process.receipts.extend(receipts);
        self.told.extend(process.settle(self.work.in_flight));
        process.worker.pull(false).unwrap_or_else(|e| panic!("{name}: {e}"));
        for told in &mut self.told {
            told.is_of_last |= is_last && told.who.0 == process.incarnation;
        }
    }

    /// Pushes one cell of every tensor.
    fn push(&mut self, process: &mut Process, pulls: bool) -> Result<(), ClientError> {
        let cell = self.next_cell;
        self.next_cell += 1;
        process.num_pushed += 1;
        let who = (process.incarnation, process.num_pushed);
        process.open.push(Told { cell, who, receipt: None, is_of_last: false });
        let mut gradient = vec![0.0_f32; CELLS];
        gradient[cell] = -1.0;
        let half = |minus_one: u16| {
            let of = |g: &f32| if *g == 0.0 { [0; 2] } else { minus_one.to_le_bytes() };
            Some(gradient.iter().flat_map(of).collect::<Vec<u8>>())
        };
        let mut values = vec![Some(bytes_of(&gradient)), half(0xbf80), half(0xbc00)];
        if let Some(count) = process.worker.params.get_mut(3) {
            count[8 * cell] += 1;
            values.push(Some(count.clone()));
        }
        let receipt = if pulls {
            process.worker.push_pull(&mut values, self.work.incremental)?
        } else {
            Some(process.worker.push(&mut values)?)
        };
        process.receipts.extend(receipt);
        Ok(())
    }
}
