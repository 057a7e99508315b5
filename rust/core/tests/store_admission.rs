//! Who is let in, who is answered from the ledger, and what a cut, a load and the cap on live versions hold back.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod common;

use futures_channel::oneshot;
use offbeat_core::checkpoint::Draft;
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{FragmentKind, Presence};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec, Transaction, Weight};
use offbeat_core::store::book::{Answer, Unfinished};
use offbeat_core::store::log::{self, CommitObserver};
use offbeat_core::store::{
    Admission, Fate, Full, OpenPush, PushHead, Reader, Receipt, RunSpec, StagedFragment, Store, StoreConfig,
    Turn, WorkerKey,
};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_core::values;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Two fragments: 65536 and 4464 elements.
const ELEMENTS: u64 = 70_000;

fn store_with(transaction: Transaction, staleness: StalenessSpec, max_samples: Option<u64>) -> Arc<Store> {
    store_watched(
        StoreConfig { transaction, max_live_versions: 2, ..StoreConfig::default() },
        staleness,
        max_samples,
    )
}

fn store_watched(config: StoreConfig, staleness: StalenessSpec, max_samples: Option<u64>) -> Arc<Store> {
    store_of(vec![tensor("w", ELEMENTS, Role::Parameter)], config, staleness, max_samples)
}

fn tensor(name: &str, elements: u64, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: vec![elements], dtype: Dtype::F32, role }
}

fn store_of(
    tensors: Vec<TensorSpec>,
    config: StoreConfig,
    staleness: StalenessSpec,
    max_samples: Option<u64>,
) -> Arc<Store> {
    let table = Arc::new(TensorTable::new(tensors).unwrap());
    let store = Store::new(table, config, 1, &mut |_, bytes| bytes.fill(0));
    let rule =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let optimizer = OptimizerSpec {
        groups: vec![Group { pattern: "*".into(), lr: 1.0, rule }],
        momentum_correction: false,
    };
    store.configure(RunSpec { optimizer, staleness, schedule: Schedule::default(), max_samples });
    store
}

/// A process of its own, with this name.
fn enter(store: &Store, worker_id: &str) -> Result<WorkerKey, Full> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    store.register(worker_id, LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

fn store() -> Arc<Store> {
    store_with(Transaction::Fragment, StalenessSpec::default(), None)
}

fn head(store: &Store, worker: WorkerKey, sequence: u64) -> PushHead {
    PushHead {
        worker,
        sequence,
        term: store.term(),
        base: store.version(),
        epoch: store.run().map_or(0, |run| run.epoch),
        samples: 10,
        present: Presence::all(store.layout().num_tensors()),
        norm: None,
    }
}

fn open(store: &Arc<Store>, head: &PushHead) -> OpenPush {
    match store.admit(head) {
        Admission::Open(push) => push,
        Admission::Settled(receipt) => panic!("{receipt:?}"),
    }
}

fn refusal(store: &Arc<Store>, head: &PushHead) -> Receipt {
    match store.admit(head) {
        Admission::Open(_) => panic!("admitted"),
        Admission::Settled(receipt) => receipt,
    }
}

/// Submits one fragment of ones; returns whether it was applied.
fn submit(store: &Arc<Store>, push: &OpenPush, fragment: usize) -> bool {
    let base = store.reader().root(fragment).version();
    let mut block = store.staging(store.layout().fragments[fragment].wire_bytes());
    block.floats_mut().fill(1.0);
    let checksum = checksum(block.bytes());
    let mut submission = store.submit(push, fragment, base, block, checksum);
    submission.outcome.try_recv().unwrap().unwrap().applied
}

fn push(store: &Arc<Store>, worker: WorkerKey, sequence: u64) -> Receipt {
    let push = open(store, &head(store, worker, sequence));
    assert!(submit(store, &push, 0) && submit(store, &push, 1));
    push.settle()
}

fn value(store: &Arc<Store>, fragment: usize) -> f32 {
    let root = store.reader().root(fragment);
    bytemuck::pod_read_unaligned(&root.held()[..4])
}

#[test]
fn a_push_is_applied_once_and_a_retry_gets_the_first_answer() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let first = push(&store, worker, 1);
    assert_eq!((first.verdict, first.version, first.weight.to_bits()), (Fate::Admit, 1, 1.0_f64.to_bits()));
    let again = refusal(&store, &head(&store, worker, 1));
    assert_eq!(again, Receipt { duplicate: true, ..first });
    assert_eq!((store.version(), value(&store, 0).to_bits()), (1, (-1.0_f32).to_bits()));
}

#[test]
fn a_retry_keeps_its_ticket_and_completes_what_is_missing() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = open(&store, &head(&store, worker, 1));
    assert!(submit(&store, &started, 0));
    drop(started); // the sender died between two fragments
    let status = store.status();
    assert_eq!((status.tickets.partial, status.tickets.open), (1, 0));

    let retry = open(&store, &head(&store, worker, 1));
    assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
    let receipt = retry.settle();
    assert_eq!((receipt.version, receipt.applied), (1, true));
    assert_eq!(
        (value(&store, 0).to_bits(), value(&store, 1).to_bits()),
        ((-1.0_f32).to_bits(), (-1.0_f32).to_bits())
    );
    let tickets = store.status().tickets;
    assert_eq!((tickets.issued, tickets.applied, tickets.partial), (1, 1, 0));
}

#[test]
fn two_retries_at_once_are_one() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let head = head(&store, worker, 1);
    drop(open(&store, &head));
    let retry = open(&store, &head);
    let second = refusal(&store, &head);
    assert_eq!(second.reason, Some(Reason::Fenced));
    assert!(second.detail.contains("still arriving"), "{}", second.detail);
    assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
    assert!(retry.settle().applied);
    let tickets = store.status().tickets;
    assert_eq!((tickets.issued, tickets.applied, tickets.dropped, tickets.open), (1, 1, 0, 0));
}

#[test]
fn a_retry_that_brings_other_tensors_is_refused_and_the_true_one_goes_on() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let head = head(&store, worker, 1);
    drop(open(&store, &head));
    let other = refusal(&store, &PushHead { present: Presence::from_fn(1, |_| false), ..head.clone() });
    assert_eq!(other.reason, Some(Reason::Fenced));
    assert!(other.detail.contains("other tensors"), "{}", other.detail);
    let retry = open(&store, &head);
    assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
    assert!(retry.settle().applied);
}

#[test]
fn a_push_whose_sender_died_before_its_first_fragment_moves_nothing() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    drop(open(&store, &head(&store, worker, 1)));
    assert_eq!(store.status().tickets.dropped, 1);
    assert_eq!(store.reader().root(0).version(), 0);
}

#[test]
fn the_same_sequence_with_other_bytes_is_refused() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = open(&store, &head(&store, worker, 1));
    assert!(submit(&store, &started, 0));
    drop(started);
    let retry = open(&store, &head(&store, worker, 1));
    let mut other = store.staging(store.layout().fragments[0].wire_bytes());
    other.floats_mut().fill(2.0);
    let checksum = checksum(other.bytes());
    let outcome = store.submit(&retry, 0, 0, other, checksum).outcome.try_recv().unwrap().unwrap();
    assert_eq!((outcome.applied, outcome.reason), (false, Some(Reason::Fenced)));
    assert_eq!(value(&store, 0).to_bits(), (-1.0_f32).to_bits());
}

#[test]
fn a_push_is_worth_what_its_parameters_are() {
    // A fragment with a large and a small tensor, one with the rest of the small one, and a buffer.
    let tensors = vec![
        tensor("large", 65_436, Role::Parameter),
        tensor("small", 200, Role::Parameter),
        tensor("buffer", 1000, Role::Buffer),
    ];
    let weights = vec![Weight::Inverse];
    let staleness = StalenessSpec { weights, ..StalenessSpec::default() };
    let store = store_of(tensors, StoreConfig::default(), staleness, None);
    let push = |id: &str, present: [bool; 3], bases: [u64; 3]| {
        let worker = enter(&store, id).unwrap();
        let present = Presence::from_fn(3, |tensor| present[tensor]);
        let push = open(&store, &PushHead { present: present.clone(), ..head(&store, worker, 1) });
        for fragment in store.layout().present_fragments(&present) {
            let mut block = store.staging(store.layout().fragments[fragment].push_bytes(&present));
            block.bytes_mut().fill(0);
            let checksum = checksum(block.bytes());
            let submission = store.submit(&push, fragment, bases[fragment], block, checksum);
            drop(submission.role);
        }
        push.settle()
    };
    let worth = |receipt: &Receipt| (receipt.verdict, receipt.weight.to_bits());
    let full = (Fate::Admit, 1.0_f64.to_bits());
    assert_eq!(worth(&push("a", [false, false, true], [0; 3])), full);
    assert_eq!(worth(&push("b", [false, false, true], [0; 3])), full, "late for a buffer alone");
    assert_eq!(worth(&push("c", [true; 3], [0; 3])), full, "late for its buffer alone");
    assert_eq!(store.status().totals.damped, 0);
    // Late for one of its two fragments, each of which it fills with 100 elements.
    let half = push("d", [false, true, false], [0, 1, 0]);
    assert_eq!(worth(&half), (Fate::Damp, 0.75_f64.to_bits()), "a mean of 1/2 and 1");
}

#[test]
fn a_push_whose_parameters_were_all_refused_is_worth_nothing_though_its_buffers_moved() {
    let tensors = vec![tensor("w", ELEMENTS, Role::Parameter), tensor("buffer", 1000, Role::Buffer)];
    let store = store_of(tensors, StoreConfig::default(), StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    let push = open(&store, &head(&store, worker, 1));
    for (index, fragment) in store.layout().fragments.iter().enumerate() {
        let mut block = store.staging(fragment.push_bytes(&Presence::all(2)));
        block.bytes_mut().fill(if fragment.kind == FragmentKind::Parameters { 0xff } else { 0 }); // NaN
        let checksum = checksum(block.bytes());
        drop(store.submit(&push, index, 0, block, checksum).role);
    }
    let receipt = push.settle();
    assert_eq!((receipt.applied, receipt.reason), (true, Some(Reason::NonFinite)));
    assert_eq!((receipt.verdict, receipt.weight.to_bits()), (Fate::Damp, 0));
    assert_eq!(store.status().totals.damped, 1);
}

#[test]
fn a_gap_in_the_sequence_is_refused() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    assert_eq!(refusal(&store, &head(&store, worker, 2)).reason, Some(Reason::Fenced));
}

#[test]
fn a_replaced_worker_is_fenced_even_for_what_it_has_under_way() {
    let store = store();
    let old = enter(&store, "a").unwrap();
    let under_way = open(&store, &head(&store, old, 1));
    let new = enter(&store, "a").unwrap();
    assert_eq!((new.slot, new.incarnation > old.incarnation), (old.slot, true));
    assert_eq!(refusal(&store, &head(&store, old, 2)).reason, Some(Reason::Fenced));
    assert!(push(&store, new, 1).applied);
    assert!(!submit(&store, &under_way, 0), "the fragment saw the newer incarnation");
}

#[test]
fn a_rejection_moves_nothing_and_is_settled() {
    let store = store_with(
        Transaction::Fragment,
        StalenessSpec { max_staleness: Some(0), ..StalenessSpec::default() },
        None,
    );
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let stale = head(&store, b, 1);
    assert!(push(&store, a, 1).applied);
    let receipt = refusal(&store, &stale);
    assert_eq!((receipt.reason, receipt.staleness, receipt.applied), (Some(Reason::Stale), 1, false));
    assert_eq!((store.version(), store.samples()), (1, 10));
    assert!(refusal(&store, &stale).duplicate);
    assert!(push(&store, b, 2).applied, "the rejection took its sequence number");
    assert_eq!(store.status().totals.rejected.get("stale"), Some(&1));
}

#[test]
fn the_run_ends_when_its_samples_are_used_up() {
    let store = store_with(Transaction::Fragment, StalenessSpec::default(), Some(20));
    let worker = enter(&store, "a").unwrap();
    assert!(push(&store, worker, 1).applied && push(&store, worker, 2).applied);
    assert_eq!(refusal(&store, &head(&store, worker, 3)).reason, Some(Reason::Budget));
}

#[test]
fn a_lost_worker_must_pull_before_it_pushes_again() {
    let store = store();
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let read_before = head(&store, a, 1);
    assert!(push(&store, b, 1).applied);
    store.lost(a);
    assert_eq!(refusal(&store, &read_before).reason, Some(Reason::Slept));
    assert!(push(&store, a, 2).applied, "having pulled, it goes on with its incarnation");
}

#[test]
fn a_departed_workers_slot_is_given_away_when_all_are_taken() {
    let table = Arc::clone(store().table());
    let config = StoreConfig { max_workers: 1, ..StoreConfig::default() };
    let store = Store::new(table, config, 1, &mut |_, bytes| bytes.fill(0));
    let a = enter(&store, "a").unwrap();
    assert_eq!(enter(&store, "b").unwrap_err().max_workers, 1);
    store.depart(a, false);
    assert_eq!(enter(&store, "b").unwrap().slot, a.slot);
    assert_eq!(refusal(&store, &head(&store, a, 1)).reason, Some(Reason::Fenced));
}

#[test]
fn a_cut_waits_for_what_began_before_it_and_holds_back_what_began_after() {
    let store = store();
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let before = open(&store, &head(&store, a, 1));
    assert!(submit(&store, &before, 0));
    let cut = store.begin_cut().unwrap();
    assert!(store.begin_cut().is_none(), "one at a time");
    let after = open(&store, &head(&store, b, 1));
    assert!(store.pause(&before).is_none());
    let mut paused = store.pause(&after).unwrap();
    assert_eq!(cut.open(), vec![1]);
    assert!(submit(&store, &before, 1));
    assert!(before.settle().applied);
    assert_eq!(cut.open(), Vec::<u64>::new());
    assert_eq!(cut.take().unwrap().roots.iter().map(|r| r.version()).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(paused.try_recv(), Ok(None));
    drop(cut);
    assert_eq!(paused.try_recv(), Ok(Some(())));
    assert!(store.pause(&after).is_none());
}

fn resumed_at_once(store: &Arc<Store>) -> Arc<Store> {
    let state = store.begin_cut().unwrap().take().unwrap();
    common::resumed(store, &state, StoreConfig::default())
}

#[test]
fn another_life_answers_a_retry_as_this_one_would() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let first = push(&store, worker, 1);
    let late = PushHead { base: 9, ..head(&store, worker, 2) };
    let rejected = refusal(&store, &late);
    assert_eq!(rejected.reason, Some(Reason::ServerRolledBack));
    let store = resumed_at_once(&store);
    for (sequence, answer) in [(1, first), (2, rejected)] {
        let again = refusal(&store, &head(&store, worker, sequence));
        assert_eq!(again, Receipt { duplicate: true, ..answer });
    }
    assert!(push(&store, worker, 3).applied, "nobody is fenced");
    assert_eq!((store.version(), value(&store, 0).to_bits()), (2, (-2.0_f32).to_bits()));
    let other = enter(&store, "b").unwrap();
    assert_ne!(other.slot, worker.slot);
    let fresh = enter(&store, "a").unwrap();
    assert_eq!(fresh.slot, worker.slot, "the same name, the same place");
    assert_eq!(refusal(&store, &head(&store, worker, 4)).reason, Some(Reason::Fenced));
}

#[test]
fn a_push_that_the_cut_holds_in_part_is_finished_by_its_retry_in_another_life() {
    for is_abandoned in [false, true] {
        let store = store();
        let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
        let started = head(&store, a, 1);
        let under_way = open(&store, &started);
        assert!(submit(&store, &under_way, 0));
        let mut under_way = Some(under_way);
        if is_abandoned {
            under_way = None;
        }
        assert!(push(&store, b, 1).applied);
        let store = resumed_at_once(&store);
        drop(under_way);
        let counts = |store: &Arc<Store>| {
            let tickets = store.status().tickets;
            (tickets.issued, tickets.applied, tickets.partial, tickets.dropped, tickets.open)
        };
        assert_eq!(counts(&store), (2, 1, 1, 0, 0));
        let retry = open(&store, &started);
        assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
        let receipt = retry.settle();
        assert_eq!((receipt.version, receipt.applied, receipt.term), (1, true, 2));
        assert_eq!(counts(&store), (2, 2, 0, 0, 0));
        assert_eq!(
            (value(&store, 0).to_bits(), value(&store, 1).to_bits()),
            ((-2.0_f32).to_bits(), (-2.0_f32).to_bits())
        );
    }
}

#[test]
fn what_was_under_way_when_all_values_were_replaced_is_not_finished_in_another_life() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = head(&store, worker, 1);
    assert!(submit(&store, &open(&store, &started), 0));
    drop(store.load(&mut |_, bytes| bytes.fill(0)));
    let store = resumed_at_once(&store);
    let again = refusal(&store, &started);
    assert_eq!((again.reason, again.applied, again.duplicate), (Some(Reason::ServerRolledBack), true, true));
    assert_eq!((value(&store, 0).to_bits(), value(&store, 1).to_bits()), (0, 0));
}

#[test]
fn what_was_under_way_is_not_finished_where_whole_pushes_are_committed() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = head(&store, worker, 1);
    assert!(submit(&store, &open(&store, &started), 0));
    let state = store.begin_cut().unwrap().take().unwrap();
    let config = StoreConfig { transaction: Transaction::Model, ..StoreConfig::default() };
    let store = common::resumed(&store, &state, config);
    assert_eq!(refusal(&store, &started).reason, Some(Reason::ServerRolledBack));
}

#[test]
fn a_later_push_does_not_finish_the_one_before_it() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = head(&store, worker, 1);
    assert!(submit(&store, &open(&store, &started), 0));
    assert!(push(&store, worker, 2).applied);
    for store in [resumed_at_once(&store), store] {
        let retry = open(&store, &started);
        assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
        drop(retry);
        let tickets = store.status().tickets;
        assert_eq!((tickets.issued, tickets.applied, tickets.partial), (2, 1, 1));
        assert_eq!(
            (value(&store, 0).to_bits(), value(&store, 1).to_bits()),
            ((-2.0_f32).to_bits(), (-1.0_f32).to_bits()),
            "what it skipped is not made up for behind a later push"
        );
    }
}

#[test]
fn who_was_there_keeps_its_slot_while_another_is_free() {
    let store = store();
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    assert!(push(&store, a, 1).applied);
    store.depart(b, false);
    let state = store.begin_cut().unwrap().take().unwrap();
    let config = StoreConfig { max_workers: 2, ..StoreConfig::default() };
    let store = common::resumed(&store, &state, config.clone());
    assert_eq!(enter(&store, "c").unwrap().slot, b.slot);
    assert!(push(&store, a, 2).applied);
    let again = store.begin_cut().unwrap().take().unwrap();
    let store = common::resumed(&store, &again, config);
    assert!(push(&store, a, 3).applied, "two lives later as well");
    assert_eq!(enter(&store, "d").unwrap().slot, a.slot, "where none is, it may have gone");
    enter(&store, "c").unwrap();
    assert!(enter(&store, "e").is_err());
}

#[test]
fn a_push_that_is_applied_but_not_settled_is_answered_in_another_life() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let started = head(&store, worker, 1);
    let under_way = open(&store, &started);
    assert!(submit(&store, &under_way, 0) && submit(&store, &under_way, 1));
    let resumed = resumed_at_once(&store);
    let counts = |store: &Arc<Store>| {
        let tickets = store.status().tickets;
        (tickets.issued, tickets.applied, tickets.partial, tickets.dropped)
    };
    assert_eq!(counts(&resumed), (1, 1, 0, 0));
    let retry = open(&resumed, &started);
    assert!(submit(&resumed, &retry, 0) && submit(&resumed, &retry, 1));
    assert_eq!((retry.settle().applied, counts(&resumed)), (true, (1, 1, 0, 0)));
    assert_eq!(value(&resumed, 1).to_bits(), (-1.0_f32).to_bits());
    assert!(under_way.settle().applied);
}

fn under_way(recent: &mut [(u64, Answer)]) -> &mut Unfinished {
    match &mut recent[1].1 {
        Answer::Unfinished(unfinished) => unfinished,
        Answer::Settled(receipt) => panic!("{receipt:?}"),
    }
}

#[test]
fn a_book_that_no_registry_has_written_is_refused() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    assert!(push(&store, worker, 1).applied);
    assert!(submit(&store, &open(&store, &head(&store, worker, 2)), 0));
    let refused = |change: fn(&mut Vec<(u64, Answer)>)| {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        assert!(common::restored(&common::written(&store, &state), StoreConfig::default()).is_ok());
        change(&mut state.book.workers[0].recent);
        common::restored(&common::written(&store, &state), StoreConfig::default()).err().unwrap().to_string()
    };
    let changes: [fn(&mut Unfinished); 3] =
        [|push| push.ticket = 3, |push| push.version = 3, |push| push.progress.elements = 0.0];
    for change in changes {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        change(under_way(&mut state.book.workers[0].recent));
        let draft = Draft::new(store.table(), store.layout(), &state);
        let told = draft.err().unwrap().to_string();
        assert!(told.ends_with("the worker in slot 0 has push 2 under way, as it cannot be"), "{told}");
    }
    let told = refused(|recent| under_way(recent).present = vec![3]);
    assert!(told.ends_with("of other tensors than the model's"), "{told}");
    let told = refused(|recent| under_way(recent).learning_rates.clear());
    assert!(told.ends_with("with other groups than the optimizer's"), "{told}");
}

#[test]
fn what_came_after_a_cut_has_left_no_trace_in_it() {
    let store = store();
    let (a, b, c) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap(), enter(&store, "c").unwrap());
    assert!(push(&store, a, 1).applied);
    let cut = store.begin_cut().unwrap();
    let late = head(&store, a, 2);
    let open_after = open(&store, &late);
    let dropped_after = open(&store, &head(&store, b, 1));
    drop(dropped_after);
    let stale = PushHead { base: 99, ..head(&store, c, 1) };
    assert_eq!(refusal(&store, &stale).reason, Some(Reason::ServerRolledBack));
    let state = cut.take().unwrap();
    drop(open_after);
    let book = &state.book;
    assert_eq!((book.version, book.samples), (1, 10));
    assert_eq!((book.tickets.issued, book.tickets.applied, book.tickets.dropped), (1, 1, 0));
    let taken: Vec<u64> = book.workers.iter().map(|page| page.last_sequence).collect();
    assert_eq!(taken, [1, 0, 0]);
    let store = common::resumed(&store, &state, StoreConfig::default());
    assert_eq!(refusal(&store, &late).reason, Some(Reason::ServerRolledBack));
    assert!(push(&store, a, 3).applied);
}

#[test]
fn what_an_optimizer_of_before_remembers_is_not_kept() {
    let store = store();
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let optimizer = |rule| OptimizerSpec {
        groups: vec![Group { pattern: "*".into(), lr: 1.0, rule }],
        momentum_correction: false,
    };
    let (staleness, schedule) = (StalenessSpec::default(), Schedule::default());
    let adagrad = Rule::Adagrad {
        lr_decay: 0.0,
        weight_decay: 0.0,
        initial_accumulator_value: 0.0,
        eps: 1e-8,
        maximize: false,
    };
    let spec = |rule| RunSpec {
        optimizer: optimizer(rule),
        staleness: staleness.clone(),
        schedule,
        max_samples: None,
    };
    store.configure(spec(adagrad));
    assert!(push(&store, b, 1).applied);
    let started = head(&store, a, 1);
    assert!(submit(&store, &open(&store, &started), 0));
    let state = store.begin_cut().unwrap().take().unwrap();
    assert!(common::written(&store, &state).contains_key("optimizer.safetensors"));
    store.configure(spec(Rule::Add));
    let state = store.begin_cut().unwrap().take().unwrap();
    let files = common::written(&store, &state);
    assert!(!files.contains_key("optimizer.safetensors"));
    let resumed = common::restored(&files, StoreConfig::default()).unwrap();
    assert_eq!(resumed.run().unwrap().epoch, 3);
    assert!(resumed.reader().root(0).state().is_none());
    let again = refusal(&resumed, &started);
    assert_eq!((again.reason, again.duplicate, again.applied), (Some(Reason::OptimizerChanged), true, true));
}

#[test]
fn a_cut_waits_for_a_load() {
    let store = store_with(Transaction::Model, StalenessSpec::default(), None);
    let mut load = store.load(&mut |_, bytes| bytes.fill(0));
    let cut = store.begin_cut().unwrap();
    assert!(cut.take().is_none());
    let mut role = load.model_role.take();
    while let Some(held) = role {
        role = held.step();
    }
    assert_eq!(cut.take().unwrap().book.term, 2);
}

#[test]
fn a_load_begins_a_new_term_and_refuses_what_was_computed_before_it() {
    let store = store();
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let computed_before = head(&store, a, 1);
    let under_way = open(&store, &head(&store, b, 1));
    let load =
        store.load(&mut |_, bytes| bytes.copy_from_slice(&7.0_f32.to_le_bytes().repeat(bytes.len() / 4)));
    for mut done in load.done {
        assert_eq!(done.try_recv(), Ok(Some(())));
    }
    assert_eq!((store.term(), value(&store, 1).to_bits()), (2, 7.0_f32.to_bits()));
    assert!(!submit(&store, &under_way, 0));
    assert_eq!(under_way.settle().reason, Some(Reason::ServerRolledBack));
    assert_eq!(refusal(&store, &computed_before).reason, Some(Reason::ServerRolledBack));
    assert!(push(&store, a, 2).applied);
}

#[test]
fn a_new_learning_rate_takes_effect_with_the_next_ticket() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let ticketed_before = open(&store, &head(&store, worker, 1));
    let mut spec = store.run().unwrap().spec.clone();
    spec.optimizer.groups[0].lr = 0.5;
    store.configure(spec);
    assert!(submit(&store, &ticketed_before, 0) && submit(&store, &ticketed_before, 1));
    assert!(ticketed_before.settle().applied);
    assert!(push(&store, worker, 2).applied);
    assert_eq!(value(&store, 0).to_bits(), (-1.5_f32).to_bits());
}

#[test]
fn a_run_that_takes_long_to_resolve_holds_nobody_up() {
    let tensors = (0..1000).map(|i| tensor(&format!("{}{i}", "ab".repeat(50)), 1, Role::Parameter));
    let store = store_of(tensors.collect(), StoreConfig::default(), StalenessSpec::default(), None);
    let mut spec = store.run().unwrap().spec.clone();
    let last = spec.optimizer.groups[0].clone();
    spec.optimizer.groups = (0..600).map(|_| Group { pattern: "*a*a*c".into(), ..last.clone() }).collect();
    spec.optimizer.groups.push(last);
    std::thread::scope(|scope| {
        let configuring = scope.spawn(|| store.configure(spec));
        let mut num_answers = 0_u64;
        while !configuring.is_finished() {
            assert_eq!(store.version(), 0);
            num_answers += 1;
        }
        configuring.join().unwrap();
        // Behind the lock there would be one or two.
        assert!(num_answers > 50, "who asked for the version had {num_answers} answers meanwhile");
    });
}

fn stage(store: &Arc<Store>, fill: f32) -> Vec<StagedFragment> {
    (0..2)
        .map(|fragment| {
            let mut payload = store.staging(store.layout().fragments[fragment].wire_bytes());
            payload.floats_mut().fill(fill);
            let checksum = checksum(payload.bytes());
            let base = store.reader().root(fragment).version();
            StagedFragment { fragment, base, payload, checksum }
        })
        .collect()
}

fn commit(store: &Arc<Store>, worker: WorkerKey, sequence: u64, fill: f32) -> Receipt {
    let commit = store.commit(head(store, worker, sequence), stage(store, fill));
    drop(commit.role); // commits in place
    let mut receipt: oneshot::Receiver<Receipt> = commit.receipt;
    receipt.try_recv().unwrap().unwrap()
}

#[test]
fn a_whole_push_is_refused_for_its_norm_or_a_nan_and_nothing_moves() {
    let staleness = StalenessSpec { max_norm: Some(300.0), ..StalenessSpec::default() };
    let store = store_with(Transaction::Model, staleness, None);
    let worker = enter(&store, "a").unwrap();
    assert_eq!(commit(&store, worker, 1, 2.0).reason, Some(Reason::Norm)); // 2·√70000 = 529
    assert_eq!(commit(&store, worker, 2, f32::NAN).reason, Some(Reason::NonFinite));
    assert_eq!((store.version(), store.reader().root(0).version()), (0, 0));
    assert!(commit(&store, worker, 3, 1.0).applied); // 264.6
    assert_eq!(value(&store, 1).to_bits(), (-1.0_f32).to_bits());
}

#[test]
fn an_overflowing_update_is_never_published_even_in_part() {
    let store = store_with(Transaction::Model, StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    assert!(commit(&store, worker, 1, f32::MAX).applied);
    let receipt = commit(&store, worker, 2, f32::MAX);
    assert_eq!((receipt.applied, receipt.reason), (false, Some(Reason::NonfiniteResult)));
    assert_eq!(value(&store, 0).to_bits(), f32::MIN.to_bits());
    assert_eq!(store.status().tickets.dropped, 1);
}

#[test]
fn a_half_that_would_be_infinite_where_it_is_sent_is_never_published() {
    // The largest half, and a gradient that takes the float32 behind it past the last value that rounds to it.
    for (dtype, largest, more) in
        [(Dtype::F16, 65_504.0_f32, 32.0_f32), (Dtype::BF16, f32::from_bits(0x7f7f_0000), 1e36)]
    {
        for transaction in [Transaction::Fragment, Transaction::Model] {
            let spec = TensorSpec { dtype, ..tensor("w", 3, Role::Parameter) };
            let config = StoreConfig { transaction, ..StoreConfig::default() };
            let store = store_of(vec![spec], config, StalenessSpec::default(), None);
            let worker = enter(&store, "a").unwrap();
            let push = |sequence, value: f32| {
                let mut block = store.staging(3 * dtype.size());
                values::narrow(dtype, &[value; 3], block.bytes_mut());
                let (head, checksum) = (head(&store, worker, sequence), checksum(block.bytes()));
                if transaction == Transaction::Model {
                    let staged = StagedFragment { fragment: 0, base: 0, payload: block, checksum };
                    let mut commit = store.commit(head, vec![staged]);
                    drop(commit.role);
                    return commit.receipt.try_recv().unwrap().unwrap();
                }
                let Admission::Open(push) = store.admit(&head) else { panic!("it is admitted") };
                drop(store.submit(&push, 0, 0, block, checksum));
                push.settle()
            };
            assert!(push(1, largest).applied);
            let refused = push(2, more);
            assert_eq!((refused.applied, refused.reason), (false, Some(Reason::NonfiniteResult)));
            let mut scratch = vec![];
            let sent = store.reader().root(0).payload(&mut scratch).to_vec();
            let mut due = vec![0; sent.len()];
            values::narrow(dtype, &[-largest; 3], &mut due);
            assert_eq!(sent, due, "{dtype:?}");
            assert!(push(3, -more).applied, "the way back is open");
        }
    }
}

#[test]
fn after_a_commit_that_was_refused_no_reader_is_late() {
    let staleness = StalenessSpec { max_staleness: Some(0), ..StalenessSpec::default() };
    let store = store_with(Transaction::Model, staleness, None);
    let worker = enter(&store, "a").unwrap();
    assert!(commit(&store, worker, 1, f32::MAX).applied);
    assert_eq!(commit(&store, worker, 2, f32::MAX).reason, Some(Reason::NonfiniteResult));
    let read = PushHead { base: store.reader().version(), ..head(&store, worker, 3) };
    let mut commit = store.commit(read, stage(&store, 1.0));
    drop(commit.role);
    let receipt = commit.receipt.try_recv().unwrap().unwrap();
    assert!(receipt.applied, "{receipt:?}");
}

#[test]
fn readers_pin_at_most_the_versions_they_may() {
    let store = store_with(Transaction::Model, StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    let Turn::Now(first) = store.turn(worker, 0) else { panic!("nothing is pinned yet") };
    assert!(commit(&store, worker, 1, 1.0).applied);
    let Turn::Now(shared) = store.turn(worker, 0) else {
        panic!("the pinned version holds everything it needs")
    };
    assert_eq!((shared.version(), shared.root(0).version()), (0, 0));
    let Turn::Wait(mut released) = store.turn(worker, 1) else { panic!("it must see its own push") };
    assert_eq!(released.try_recv(), Ok(None));
    drop(shared);
    drop(first);
    assert_eq!(released.try_recv(), Ok(Some(())));
    let Turn::Now(own) = store.turn(worker, 1) else { panic!("the old version is gone") };
    assert_eq!(own.version(), 1);
}

/// What a worker is shown, if it need not wait.
fn turn(store: &Arc<Store>, worker: WorkerKey) -> Option<Reader> {
    match store.turn(worker, 0) {
        Turn::Now(reader) => Some(reader),
        Turn::Wait(_) => None,
    }
}

#[test]
fn a_worker_that_comes_back_is_not_shown_what_it_may_not_push_on() {
    let config =
        StoreConfig { transaction: Transaction::Model, max_live_versions: 3, ..StoreConfig::default() };
    let store = store_watched(config, StalenessSpec::default(), None);
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|id| enter(&store, id).unwrap());
    let slow = turn(&store, b).unwrap();
    assert!(commit(&store, d, 1, 1.0).applied);
    let slower = turn(&store, c).unwrap();
    assert!(commit(&store, d, 2, 1.0).applied);
    assert_eq!(turn(&store, a).unwrap().version(), 1, "one that was not lost shares");
    store.lost(a);
    assert!(turn(&store, a).is_none(), "on what the others hold its push would be rejected");
    drop(slow);
    let read = turn(&store, a).unwrap().version();
    let returned = store.commit(PushHead { base: read, ..head(&store, a, 1) }, stage(&store, 1.0));
    drop(returned.role);
    let mut receipt: oneshot::Receiver<Receipt> = returned.receipt;
    let receipt = receipt.try_recv().unwrap().unwrap();
    assert!(receipt.applied, "{receipt:?}");
    drop(slower);
}

#[test]
fn a_worker_lost_during_a_commit_may_push_on_what_it_can_read_meanwhile() {
    let store = store_with(Transaction::Model, StalenessSpec::default(), None);
    let (a, b) = (enter(&store, "a").unwrap(), enter(&store, "b").unwrap());
    let under_way = store.commit(head(&store, b, 1), stage(&store, 1.0));
    let mut role = under_way.role;
    while store.version() == 0 {
        role = role.unwrap().step();
    }
    store.lost(a);
    let read = turn(&store, a).unwrap().version();
    let returned = store.commit(PushHead { base: read, ..head(&store, a, 1) }, stage(&store, 1.0));
    drop(role);
    let mut receipt: oneshot::Receiver<Receipt> = returned.receipt;
    let receipt = receipt.try_recv().unwrap().unwrap();
    assert!(receipt.applied, "{receipt:?}");
}

#[test]
fn a_reader_that_has_paused_discounts_what_it_reads_and_not_its_namesake_of_another_life() {
    let store = store_with(Transaction::Model, StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    let paused = turn(&store, worker).unwrap();
    drop(store.load(&mut |_, bytes| bytes.fill(0)).model_role);
    let moving = store.reader();
    assert_eq!((paused.pinned(), moving.pinned()), (Some((1, 0)), Some((2, 0))));
    assert!(commit(&store, worker, 1, 1.0).applied);
    store.discount((1, 0));
    assert_eq!(turn(&store, worker).unwrap().pinned(), Some((2, 0)), "it counts, and is shared");
    store.discount((2, 0));
    assert_eq!(turn(&store, worker).unwrap().pinned(), Some((2, 1)));
}

#[test]
fn pinned_memory_is_what_older_versions_do_not_share() {
    let config =
        StoreConfig { transaction: Transaction::Model, max_live_versions: 4, ..StoreConfig::default() };
    let tensors = vec![tensor("trained", 65_536, Role::Parameter), tensor("frozen", 1000, Role::Parameter)];
    let store = store_of(tensors, config, StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    let push = |sequence, fill| {
        let present = Presence::from_fn(2, |tensor| tensor == 0);
        let mut staged = stage(&store, fill);
        staged.truncate(1);
        let commit = store.commit(PushHead { present, ..head(&store, worker, sequence) }, staged);
        drop(commit.role);
        let mut receipt = commit.receipt;
        receipt.try_recv().unwrap().unwrap()
    };
    let pinned_bytes = || store.status().pinned_bytes;
    assert!(push(1, f32::MAX).applied);
    let first = turn(&store, worker).unwrap();
    assert_eq!(push(2, f32::MAX).reason, Some(Reason::NonfiniteResult));
    assert_eq!(pinned_bytes(), 0, "a push that was refused changed nothing");
    let _same = turn(&store, worker).unwrap();
    assert!(push(3, 0.0).applied);
    assert_eq!(pinned_bytes(), first.root(0).bytes(), "two versions hold the trained tensor's older values");
}

#[test]
fn a_push_made_for_another_optimizer_is_rejected_whatever_the_server_runs_of_both() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let mut run = store.run().unwrap().spec.clone();
    let momentum = |run: &mut RunSpec, momentum| {
        run.optimizer.momentum_correction = momentum > 0.0;
        run.optimizer.groups[0].rule =
            Rule::Sgd { momentum, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    };
    for (sequence, mu) in [(1, 0.9), (3, 0.5), (5, 0.0)] {
        let before = PushHead { epoch: store.run().unwrap().epoch, ..head(&store, worker, sequence) };
        momentum(&mut run, mu);
        store.configure(run.clone());
        assert_eq!(refusal(&store, &before).reason, Some(Reason::OptimizerChanged));
        assert!(push(&store, worker, sequence + 1).applied);
        assert_eq!(
            store.reader().root(0).state().unwrap().slots.iter().flatten().count(),
            0,
            "momentum is the workers'"
        );
    }
    let mut run = store.run().unwrap().spec.clone();
    let known = head(&store, worker, 7);
    run.optimizer.groups[0].lr = 0.5;
    store.configure(run);
    drop(open(&store, &known)); // another rate is not another rule
}

#[test]
fn with_momentum_correction_the_limit_is_for_the_gradient_whose_norm_the_worker_says() {
    let staleness = StalenessSpec { max_norm: Some(300.0), ..StalenessSpec::default() };
    let store = store_with(Transaction::Model, staleness, None);
    let worker = enter(&store, "a").unwrap();
    let commit = |sequence, fill, norm| {
        let commit = store.commit(PushHead { norm, ..head(&store, worker, sequence) }, stage(&store, fill));
        drop(commit.role);
        let mut receipt: oneshot::Receiver<Receipt> = commit.receipt;
        receipt.try_recv().unwrap().unwrap().reason
    };
    assert_eq!(commit(1, 2.0, Some(1.0)), Some(Reason::Norm), "without, what has come is measured");
    let mut run = store.run().unwrap().spec.clone();
    run.optimizer.momentum_correction = true;
    run.optimizer.groups[0].rule =
        Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    store.configure(run);
    assert_eq!(commit(2, 2.0, Some(299.0)), None);
    assert_eq!(commit(3, 1.0, Some(301.0)), Some(Reason::Norm));
    assert_eq!(commit(4, f32::NAN, Some(1.0)), Some(Reason::NonFinite));
    assert_eq!(commit(5, 2.0, None), Some(Reason::Norm), "nothing said: what has come is measured");
}

#[test]
fn samples_without_end_do_not_wrap() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    for sequence in 1..=2 {
        let push = open(&store, &PushHead { samples: u64::MAX, ..head(&store, worker, sequence) });
        assert!(submit(&store, &push, 0) && submit(&store, &push, 1));
        assert!(push.settle().applied);
    }
    assert_eq!((store.samples(), store.status().totals.samples), (u64::MAX, u64::MAX));
}

/// Panics at its first commit.
#[derive(Default)]
struct Clumsy(std::sync::atomic::AtomicBool);

impl CommitObserver for Clumsy {
    fn committed(&self, _: log::Commit) {
        assert!(self.0.swap(true, Ordering::Relaxed), "it is meant to panic");
    }
}

#[test]
fn a_panic_in_a_model_commit_costs_its_push_and_nothing_else() {
    let config = StoreConfig {
        transaction: Transaction::Model,
        observer: Some(Arc::new(Clumsy::default())),
        ..StoreConfig::default()
    };
    let store = store_watched(config, StalenessSpec::default(), None);
    let worker = enter(&store, "a").unwrap();
    let failed = commit(&store, worker, 1, 1.0);
    assert_eq!((failed.applied, failed.reason), (false, Some(Reason::Failed)));
    assert_eq!((store.reader().root(0).version(), value(&store, 0).to_bits()), (0, 0.0_f32.to_bits()));
    // Before it has a ticket: a fragment that the model does not have.
    let mut wrong = stage(&store, 1.0);
    wrong[1].fragment = 99;
    let lost = store.commit(head(&store, worker, 2), wrong);
    let next = store.commit(head(&store, worker, 3), stage(&store, 1.0));
    assert!(next.role.is_none(), "the role is the first one's");
    drop(lost.role);
    for (mut receipt, reason) in [(lost.receipt, Some(Reason::Failed)), (next.receipt, None)] {
        assert_eq!(receipt.try_recv().unwrap().unwrap().reason, reason);
    }
    assert_eq!(value(&store, 1).to_bits(), (-1.0_f32).to_bits());
    let tickets = store.status().tickets;
    assert_eq!((tickets.issued, tickets.applied, tickets.dropped, tickets.open), (2, 1, 1, 0));
}
