//! The lock-free store against the mutex store: generated concurrent programs, then the recorded commits replayed one
//! at a time under a lock. Same versions, same parameters, same optimizer state, bit for bit.

use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{FragmentKind, Layout, Presence};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, StalenessSpec, Transaction, Weight};
use offbeat_core::store::book::Answer;
use offbeat_core::store::log::{Commit, CommitObserver};
use offbeat_core::store::oracle::{FragmentStore, MutexStore};
use offbeat_core::store::{
    Admission, PushHead, Receipt, RunSpec, StagedFragment, Store, StoreConfig, WorkerKey,
};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_core::values;
use proptest::prelude::*;
use std::ops::Range;
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Log(Mutex<Vec<Commit>>);

impl CommitObserver for Log {
    fn committed(&self, commit: Commit) {
        self.0.lock().unwrap().push(commit);
    }
}

#[derive(Clone, Debug)]
struct Program {
    tensors: Vec<(u64, Dtype, Role)>,
    rules: (Rule, Rule),
    workers: Vec<Vec<Planned>>,
}

#[derive(Clone, Debug)]
struct Planned {
    /// The seed of its presence.
    presence: u64,
    /// How many versions late it pretends to be.
    late: u64,
    /// The fragment, modulo their number, whose gradient is as large as can be, so that some update overflows.
    huge: Option<usize>,
}

fn rule() -> impl Strategy<Value = (Rule, Rule)> {
    let sgd = |momentum, nesterov| Rule::Sgd {
        momentum,
        dampening: 0.0,
        weight_decay: 0.01,
        nesterov,
        maximize: false,
    };
    let adam = |amsgrad| Rule::Adam {
        betas: (0.9, 0.99),
        eps: 1e-8,
        weight_decay: 0.1,
        amsgrad,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let delayed = |delay, activation| Rule::DelayedNesterov { momentum: 0.9, delay, activation };
    prop::sample::select(vec![
        (sgd(0.0, false), sgd(0.0, false)),
        (sgd(0.9, true), sgd(0.0, false)),
        (adam(false), adam(true)),
        (delayed(2, 0.25), delayed(3, 0.0)),
        (Rule::Add, Rule::Add),
    ])
}

fn program() -> impl Strategy<Value = Program> {
    let tensor = (
        prop::sample::select(vec![1_u64, 7, 300, 70_000]),
        prop::sample::select(vec![Dtype::F32, Dtype::BF16, Dtype::F16]),
        prop::sample::select(vec![Role::Parameter, Role::Parameter, Role::Buffer]),
    );
    let huge = prop::option::weighted(0.3, any::<usize>());
    let push =
        (any::<u64>(), 0_u64..3, huge).prop_map(|(presence, late, huge)| Planned { presence, late, huge });
    let pushes = prop::collection::vec(push, 1..8);
    (prop::collection::vec(tensor, 1..5), rule(), prop::collection::vec(pushes, 1..5))
        .prop_map(|(tensors, rules, workers)| Program { tensors, rules, workers })
}

/// Programs in which what is applied does not depend on when.
fn without_overflow() -> impl Strategy<Value = Program> {
    program().prop_map(|mut program| {
        program.workers.iter_mut().flatten().for_each(|planned| planned.huge = None);
        program
    })
}

fn table(program: &Program) -> Arc<TensorTable> {
    let specs = program.tensors.iter().enumerate().map(|(i, &(n, dtype, role))| TensorSpec {
        name: if i % 2 == 0 { format!("even.{i}") } else { format!("odd.{i}") },
        aliases: vec![],
        shape: vec![n],
        dtype,
        role,
    });
    Arc::new(TensorTable::new(specs.collect()).unwrap())
}

fn run_spec(program: &Program) -> RunSpec {
    let group = |pattern: &str, rule: &Rule, lr| Group { pattern: pattern.into(), lr, rule: rule.clone() };
    RunSpec {
        optimizer: OptimizerSpec {
            groups: vec![group("even.*", &program.rules.0, 0.1), group("*", &program.rules.1, 0.03)],
            momentum_correction: false,
        },
        staleness: StalenessSpec {
            weights: vec![Weight::AdaptiveLr { factor: 0.9 }],
            max_staleness: None,
            max_norm: None,
        },
        schedule: offbeat_core::spec::Schedule::default(),
        max_samples: None,
    }
}

/// Small multiples of 1/8, exact in every dtype and different for every (seed, element).
fn fill(dtype: Dtype, seed: u64, bytes: &mut [u8]) {
    let values: Vec<f32> = (0..bytes.len() / dtype.size())
        .map(|i| {
            let mixed = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            (mixed as f32 - 128.0) / 8.0
        })
        .collect();
    values::narrow(dtype, &values, bytes);
}

/// What worker number `slot` sends of a fragment in its push number `sequence`.
fn payload(program: &Program, layout: &Layout, worker: WorkerKey, sequence: u64, f: usize, bytes: &mut [u8]) {
    let fragment = &layout.fragments[f];
    let planned = &program.workers[worker.slot as usize][sequence as usize - 1];
    let is_huge = planned.huge.is_some_and(|huge| huge % layout.fragments.len() == f);
    if is_huge && fragment.kind == FragmentKind::Parameters {
        let huge = match fragment.dtype {
            Dtype::F16 => 65_504.0,
            Dtype::BF16 => f32::from_bits(0x7f7f_0000),
            _ => f32::MAX,
        };
        values::narrow(fragment.dtype, &vec![huge; bytes.len() / fragment.dtype.size()], bytes);
    } else {
        fill(fragment.dtype, seed(worker, sequence, f), bytes);
    }
}

fn seed(worker: WorkerKey, sequence: u64, fragment: usize) -> u64 {
    (u64::from(worker.slot) << 40) ^ (sequence << 20) ^ fragment as u64
}

fn wait<T>(mut receiver: futures_channel::oneshot::Receiver<T>) -> T {
    loop {
        match receiver.try_recv() {
            Ok(Some(value)) => return value,
            Ok(None) => std::thread::yield_now(),
            Err(cancelled) => panic!("{cancelled}"),
        }
    }
}

/// All of one worker's pushes.
fn work(store: &Arc<Store>, key: WorkerKey, program: &Program) -> Vec<Receipt> {
    work_part(store, key, program, 0..program.workers[key.slot as usize].len())
}

/// Some of one worker's pushes, each fragment by fragment as a session would send it.
fn work_part(store: &Arc<Store>, key: WorkerKey, program: &Program, part: Range<usize>) -> Vec<Receipt> {
    let layout = Arc::clone(store.layout());
    let mut receipts = Vec::new();
    for i in part {
        let Planned { presence, late, .. } = program.workers[key.slot as usize][i];
        let num = layout.num_tensors();
        let present = Presence::from_fn(num, |t| (presence >> (t % 64)) & 1 == 1);
        let head = PushHead {
            worker: key,
            sequence: i as u64 + 1,
            term: store.term(),
            base: store.version(),
            epoch: store.run().map_or(0, |run| run.epoch),
            samples: 1,
            present: present.clone(),
            norm: None,
        };
        let reader = store.reader();
        let base = |f: usize| reader.root(f).version().saturating_sub(late);
        if store.transaction() == Transaction::Model {
            let staged: Vec<StagedFragment> = layout
                .present_fragments(&present)
                .map(|f| {
                    let mut block = store.staging(layout.fragments[f].push_bytes(&present));
                    payload(program, &layout, key, head.sequence, f, block.bytes_mut());
                    let checksum = checksum(block.bytes());
                    StagedFragment { fragment: f, base: base(f), payload: block, checksum }
                })
                .collect();
            let commit = store.commit(head, staged);
            let mut role = commit.role;
            while let Some(turn) = role {
                role = turn.step();
            }
            receipts.push(wait(commit.receipt));
            continue;
        }
        let Admission::Open(push) = store.admit(&head) else { panic!("fresh pushes are admitted") };
        if let Some(paused) = store.pause(&push) {
            wait(paused);
        }
        let mut outcomes = Vec::new();
        for f in layout.present_fragments(&present) {
            let mut block = store.staging(layout.fragments[f].push_bytes(&present));
            payload(program, &layout, key, head.sequence, f, block.bytes_mut());
            let checksum = checksum(block.bytes());
            let submission = store.submit(&push, f, base(f), block, checksum);
            let mut role = submission.role;
            while let Some(turn) = role {
                role = turn.drain();
            }
            outcomes.push(submission.outcome);
        }
        for outcome in outcomes {
            let outcome = wait(outcome);
            assert!(outcome.applied != (outcome.reason == Some(Reason::NonfiniteResult)), "{outcome:?}");
        }
        receipts.push(push.settle());
    }
    receipts
}

fn check(program: &Program, transaction: Transaction) {
    let table = table(program);
    let log = Arc::new(Log::default());
    let observer: Arc<dyn CommitObserver> = log.clone();
    let config = StoreConfig { transaction, observer: Some(observer), ..StoreConfig::default() };
    let dtypes: Vec<Dtype> = Layout::of(&table).fragments.iter().map(|f| f.dtype).collect();
    let mut initial = |f: usize, bytes: &mut [u8]| fill(dtypes[f], 0xabcd + f as u64, bytes);
    let store = Store::new(Arc::clone(&table), config, 1, &mut initial);
    let oracle = MutexStore::new(&table, &mut initial);
    store.configure(run_spec(program));

    let receipts: Vec<Receipt> = std::thread::scope(|scope| {
        let threads: Vec<_> = program
            .workers
            .iter()
            .enumerate()
            .map(|(i, _)| {
                let key = store.register(&format!("worker-{i}"), 1 + i as u32).unwrap();
                let store = &store;
                scope.spawn(move || work(store, key, program))
            })
            .collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });

    let total: usize = program.workers.iter().map(Vec::len).sum();
    assert_eq!(receipts.len(), total);
    let whole = |r: &&Receipt| r.applied && r.reason.is_none();
    let overflow = |r: &&Receipt| r.reason == Some(Reason::NonfiniteResult);
    assert!(receipts.iter().all(|r| whole(&r) || overflow(&r)), "{receipts:?}");
    let status = store.status();
    let tickets = &status.tickets;
    assert_eq!(tickets.applied, receipts.iter().filter(whole).count() as u64);
    assert_eq!((tickets.applied + tickets.partial + tickets.dropped, tickets.open), (total as u64, 0));
    assert_eq!(status.version, total as u64);

    let layout = Arc::clone(store.layout());
    let commits = std::mem::take(&mut *log.0.lock().unwrap());
    for Commit { fragment, version, tau, push } in &commits {
        let mut bytes = vec![0; layout.fragments[*fragment].push_bytes(&push.present)];
        payload(program, &layout, push.worker, push.sequence, *fragment, &mut bytes);
        oracle.apply(push, *fragment, version - 1 - tau, &bytes);
    }
    for f in 0..layout.fragments.len() {
        let (ours, theirs) = (store.state(f), oracle.state(f));
        assert_eq!(ours.version, theirs.version, "fragment {f}");
        assert_eq!(ours.version, commits.iter().filter(|c| c.fragment == f).count() as u64);
        assert!(ours == theirs, "fragment {f} differs from the oracle's");
    }
}

/// A program whose workers push in turns, with a restart after each push of one run and with none in the other.
fn check_restarts(program: &Program, transaction: Transaction) {
    let table = table(program);
    let config = StoreConfig { transaction, ..StoreConfig::default() };
    let dtypes: Vec<Dtype> = Layout::of(&table).fragments.iter().map(|f| f.dtype).collect();
    let mut initial = |f: usize, bytes: &mut [u8]| fill(dtypes[f], 0xabcd + f as u64, bytes);
    let mut begin = || {
        let store = Store::new(Arc::clone(&table), config.clone(), 1, &mut initial);
        store.configure(run_spec(program));
        let names = 0..program.workers.len();
        let keys: Vec<_> =
            names.map(|i| store.register(&format!("worker-{i}"), 1 + i as u32).unwrap()).collect();
        (store, keys)
    };
    let ((undisturbed, keys), (mut restarted, _)) = (begin(), begin());
    let longest = program.workers.iter().map(Vec::len).max().unwrap_or(0);
    for i in 0..longest {
        for &key in keys.iter().filter(|key| program.workers[key.slot as usize].len() > i) {
            let receipts = work_part(&undisturbed, key, program, i..i + 1);
            let again = work_part(&restarted, key, program, i..i + 1);
            let in_term = |term| receipts.iter().map(move |r| Receipt { term, ..r.clone() });
            assert!(in_term(restarted.term()).eq(again));
            let state = restarted.begin_cut().unwrap().take().unwrap();
            restarted = crate::common::resumed(&restarted, &state, config.clone());
            assert_eq!(restarted.reader().version(), restarted.version());
        }
    }
    let num_restarts: usize = program.workers.iter().map(Vec::len).sum();
    assert_eq!((undisturbed.term(), restarted.term()), (1, 1 + num_restarts as u64));
    for f in 0..undisturbed.layout().fragments.len() {
        assert!(undisturbed.state(f) == restarted.state(f), "fragment {f} differs");
    }
    let (before, after) = (undisturbed.status(), restarted.status());
    assert_eq!((before.version, before.samples), (after.version, after.samples));
    assert_eq!((before.tickets, before.totals, before.workers), (after.tickets, after.totals, after.workers));
    assert_eq!(before.root_bytes, after.root_bytes);
}

/// How many states are looked at in one program.
const STATES: usize = 4;

/// Cuts are taken while workers push, some before all of their tickets have ended: from each the store goes on as if
/// nothing had happened after it, and a retry of what was under way is applied where it is missing, once.
fn check_cuts(program: &Program, transaction: Transaction) {
    let table = table(program);
    let log = Arc::new(Log::default());
    let observer: Arc<dyn CommitObserver> = log.clone();
    let config = StoreConfig { transaction, observer: Some(observer), ..StoreConfig::default() };
    let dtypes: Vec<Dtype> = Layout::of(&table).fragments.iter().map(|f| f.dtype).collect();
    let mut initial = |f: usize, bytes: &mut [u8]| fill(dtypes[f], 0xabcd + f as u64, bytes);
    let store = Store::new(Arc::clone(&table), config.clone(), 1, &mut initial);
    store.configure(run_spec(program));
    let keys: Vec<_> = (0..program.workers.len())
        .map(|i| store.register(&format!("worker-{i}"), 1 + i as u32).unwrap())
        .collect();
    let take = |waits: bool| {
        let cut = store.begin_cut().unwrap();
        while waits && !cut.open().is_empty() {
            std::thread::yield_now();
        }
        cut.take()
    };
    let mut states = std::thread::scope(|scope| {
        let begin = |&key: &WorkerKey| {
            scope.spawn({
                let store = &store;
                move || work(store, key, program)
            })
        };
        let workers: Vec<_> = keys.iter().map(begin).collect();
        let mut states = Vec::new();
        while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            if states.len() < STATES {
                states.extend(take(states.len() % 2 == 0));
            }
            std::thread::yield_now();
        }
        states
    });
    states.extend(take(true));
    assert!(!states.is_empty());
    let commits = std::mem::take(&mut *log.0.lock().unwrap());
    for state in states {
        let book = &state.book;
        let before = |commit: &&Commit| commit.push.ticket.number <= book.tickets.issued;
        let due = |f: usize| commits.iter().filter(before).filter(|c| c.fragment == f).count() as u64;
        let answered: u64 = book.workers.iter().map(|page| page.last_sequence).sum();
        assert_eq!((book.version, answered), (book.tickets.issued, book.tickets.issued));
        let ended = book.tickets.applied + book.tickets.partial + book.tickets.dropped;
        assert_eq!(ended, book.tickets.issued);
        let resumed =
            crate::common::resumed(&store, &state, StoreConfig { observer: None, ..config.clone() });
        for (f, root) in state.roots.iter().enumerate() {
            assert_eq!(resumed.state(f).held, root.held(), "fragment {f}");
        }
        for page in &book.workers {
            let key = WorkerKey { slot: page.slot, incarnation: page.incarnation };
            for (sequence, answer) in &page.recent {
                if matches!(answer, Answer::Unfinished(_)) {
                    let part = *sequence as usize - 1..*sequence as usize;
                    let receipts = work_part(&resumed, key, program, part);
                    assert!(receipts.iter().all(|receipt| receipt.applied || receipt.reason.is_some()));
                }
            }
        }
        for f in 0..state.roots.len() {
            assert_eq!(resumed.state(f).version, due(f), "fragment {f} at ticket {}", book.tickets.issued);
        }
        assert_eq!(resumed.status().tickets.open, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn concurrent_fragment_commits_equal_the_mutex_store(program in program()) {
        check(&program, Transaction::Fragment);
    }

    #[test]
    fn concurrent_model_commits_equal_the_mutex_store(program in program()) {
        check(&program, Transaction::Model);
    }

    #[test]
    fn restarts_on_checkpoints_leave_every_bit_under_fragment(program in program()) {
        check_restarts(&program, Transaction::Fragment);
    }

    #[test]
    fn restarts_on_checkpoints_leave_every_bit_under_model(program in program()) {
        check_restarts(&program, Transaction::Model);
    }

    #[test]
    fn a_cut_among_fragment_commits_is_a_state_of_the_store(program in without_overflow()) {
        check_cuts(&program, Transaction::Fragment);
    }

    #[test]
    fn a_cut_among_model_commits_is_a_state_of_the_store(program in without_overflow()) {
        check_cuts(&program, Transaction::Model);
    }
}
