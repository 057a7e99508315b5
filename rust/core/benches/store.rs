//! The store beside what bounds it, in one run: an update of a 25 M model against the same arithmetic done in place,
//! and four pushes that wait on one fragment against four that come one by one. Rounds alternate, so that a machine
//! that changes speed changes both; medians and spread of the ratios are printed as JSON lines.
//!
//!     cargo bench -p offbeat-core --bench store

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench may panic and prints its figures")]

use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Presence;
use offbeat_core::optim::{self, Isa, MAX_STATE, Stepper, Target};
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec};
use offbeat_core::store::log::{Commit, CommitObserver};
use offbeat_core::store::{Admission, OpenPush, PushHead, RunSpec, Store, StoreConfig, WorkerKey};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

const RULE: Rule =
    Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

fn store(elements: u64, observer: Option<Arc<dyn CommitObserver>>) -> Arc<Store> {
    let tensor = TensorSpec {
        name: "w".into(),
        aliases: vec![],
        shape: vec![elements],
        dtype: Dtype::F32,
        role: Role::Parameter,
    };
    let table = Arc::new(TensorTable::new(vec![tensor]).unwrap());
    let config = StoreConfig { observer, ..StoreConfig::default() };
    let store = Store::new(table, config, 1, &mut |_, bytes| bytes.fill(0));
    let groups = vec![Group { pattern: "*".into(), lr: 1e-6, rule: RULE }];
    let optimizer = OptimizerSpec { groups, momentum_correction: false };
    store.configure(RunSpec {
        optimizer,
        staleness: StalenessSpec::default(),
        schedule: Schedule::default(),
        max_samples: None,
    });
    store
}

fn open(store: &Arc<Store>, worker: WorkerKey, sequence: u64) -> OpenPush {
    let head = PushHead {
        worker,
        sequence,
        term: store.term(),
        base: store.version(),
        epoch: store.run().map_or(0, |run| run.epoch),
        samples: 1,
        present: Presence::all(1),
        norm: None,
    };
    let Admission::Open(push) = store.admit(&head) else { unreachable!("nothing is refused here") };
    push
}

fn submit(store: &Arc<Store>, push: &OpenPush, fragment: usize) {
    let block = store.staging(store.layout().fragments[fragment].wire_bytes());
    let submission = store.submit(push, fragment, 0, block, 0);
    drop(black_box(submission));
}

/// Median, minimum and maximum.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

fn report(name: &str, unit: &str, ours: Vec<f64>, theirs: Vec<f64>) {
    let ratio = spread(theirs.iter().zip(&ours).map(|(t, o)| t / o).collect());
    let (ours, theirs) = (spread(ours), spread(theirs));
    println!(
        "{{\"bench\":\"{name}\",\"unit\":\"{unit}\",\"ours\":{:.3},\"reference\":{:.3},\
         \"reference_over_ours\":{:.3},\"min\":{:.3},\"max\":{:.3}}}",
        ours.0, theirs.0, ratio.0, ratio.1, ratio.2
    );
}

/// One update of 25 M parameters: the whole store against the bare loop, in place, with a gradient that is warm.
fn whole_updates() {
    const ELEMENTS: usize = 25_000_000;
    let store = store(ELEMENTS as u64, None);
    let worker = store.register("a", 1).unwrap();
    let isa = Isa::detect();
    let stepper = Stepper::new(&RULE, 1e-6, 1.0, 1);
    let mut params = vec![0.0_f32; ELEMENTS];
    let gradient = vec![1.0_f32; 65_536];
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..40 {
        let push = open(&store, worker, round + 1);
        let start = Instant::now();
        for fragment in 0..store.layout().fragments.len() {
            submit(&store, &push, fragment);
        }
        let took = start.elapsed();
        drop(push.settle());
        let start = Instant::now();
        for param in params.chunks_mut(65_536) {
            let state: [&mut [f32]; MAX_STATE] = Default::default();
            let gradient = &gradient[..param.len()];
            black_box(optim::step_in_place(isa, &stepper, gradient, Target { param, state }));
        }
        if round > 2 {
            ours.push(took.as_secs_f64() * 1e3);
            theirs.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    report("update_25M_vs_in_place_simd", "ms", ours, theirs);
}

/// Submits four pushes from inside a commit: they find the turn taken, so they wait together.
struct Queue4 {
    armed: AtomicBool,
    store: OnceLock<Arc<Store>>,
    waiting: Mutex<Vec<OpenPush>>,
}

impl CommitObserver for Queue4 {
    fn committed(&self, _: Commit) {
        if self.armed.swap(false, Ordering::Relaxed) {
            let store = self.store.get().unwrap();
            for push in self.waiting.lock().unwrap().iter() {
                submit(store, push, 0);
            }
        }
    }
}

/// Four pushes on one fragment, queued together or one after the other.
fn four_on_one_fragment() {
    let queue =
        Arc::new(Queue4 { armed: AtomicBool::new(false), store: OnceLock::new(), waiting: Mutex::default() });
    let observer: Arc<dyn CommitObserver> = queue.clone();
    let store = store(65_536, Some(observer));
    drop(queue.store.set(Arc::clone(&store)));
    let workers: Vec<WorkerKey> = (0..5).map(|i| store.register(&i.to_string(), i + 1).unwrap()).collect();
    let (mut combined, mut separate) = (Vec::new(), Vec::new());
    for round in 0..2000 {
        let pushes: Vec<OpenPush> = workers.iter().map(|&w| open(&store, w, 2 * round + 1)).collect();
        let mut pushes = pushes.into_iter();
        let trigger = pushes.next().unwrap();
        *queue.waiting.lock().unwrap() = pushes.collect();
        queue.armed.store(true, Ordering::Relaxed);
        let block = store.staging(store.layout().fragments[0].wire_bytes());
        let role = store.submit(&trigger, 0, 0, block, 0).role.unwrap();
        let start = Instant::now();
        assert!(role.drain().is_none(), "all four in one drain");
        let took = start.elapsed();
        drop(trigger.settle());
        for push in queue.waiting.lock().unwrap().drain(..) {
            drop(push.settle());
        }

        let pushes: Vec<OpenPush> = workers.iter().map(|&w| open(&store, w, 2 * round + 2)).collect();
        let start = Instant::now();
        for push in &pushes[..4] {
            submit(&store, push, 0);
        }
        let one_by_one = start.elapsed();
        submit(&store, &pushes[4], 0);
        for push in pushes {
            drop(push.settle());
        }
        if round > 100 {
            combined.push(took.as_secs_f64() * 1e6);
            separate.push(one_by_one.as_secs_f64() * 1e6);
        }
    }
    report("four_queued_vs_four_separate", "us", combined, separate);
}

fn main() {
    whole_updates();
    four_on_one_fragment();
}
