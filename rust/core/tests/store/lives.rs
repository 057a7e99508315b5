//! What a cut holds of pushes that are under way, and how the next life goes on with them.

use crate::support::{enter, head, open, push, refusal, store, submit, value};
use offbeat_core::checkpoint::Draft;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec, Transaction};
use offbeat_core::store::book::{Answer, Unfinished};
use offbeat_core::store::{PushHead, Receipt, RunSpec, Store, StoreConfig};
use std::sync::Arc;

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
    crate::common::resumed(store, &state, StoreConfig::default())
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
    let store = crate::common::resumed(&store, &state, config);
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
    let store = crate::common::resumed(&store, &state, config.clone());
    assert_eq!(enter(&store, "c").unwrap().slot, b.slot);
    assert!(push(&store, a, 2).applied);
    let again = store.begin_cut().unwrap().take().unwrap();
    let store = crate::common::resumed(&store, &again, config);
    assert!(push(&store, a, 3).applied, "two lives later as well");
    store.absent(b); // whose place "c" has: nobody of now
    let c = enter(&store, "c").unwrap();
    store.absent(c);
    assert_eq!(
        enter(&store, "d").unwrap().slot,
        b.slot,
        "who has been away for long goes before who is expected"
    );
    assert_eq!(enter(&store, "e").unwrap().slot, a.slot, "where nobody else is, it may have gone");
    assert!(enter(&store, "f").is_err());
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

type Change = fn(&mut [(u64, Answer)]);

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
        assert!(
            crate::common::restored(&crate::common::written(&store, &state), StoreConfig::default()).is_ok()
        );
        change(&mut state.book.workers[0].recent);
        crate::common::restored(&crate::common::written(&store, &state), StoreConfig::default())
            .err()
            .unwrap()
            .to_string()
    };
    let changes: [Change; 5] = [
        |recent| under_way(recent).ticket = 3,
        |recent| under_way(recent).version = 3,
        |recent| under_way(recent).progress.elements = 0.0,
        // And a fragment has it: no cut would ever fit such a book.
        |recent| under_way(recent).progress.applied = 0,
        // As the push before says.
        |recent| {
            let one = under_way(recent).clone();
            let reached = std::mem::take(&mut under_way(recent).reached);
            under_way(recent).progress.applied = 0;
            recent[0].1 = Answer::Unfinished(Unfinished { ticket: 1, reached, ..one });
        },
    ];
    for change in changes {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        change(&mut state.book.workers[0].recent);
        let draft = Draft::new(store.table(), store.layout(), state);
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
    let store = crate::common::resumed(&store, &state, StoreConfig::default());
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
    assert!(crate::common::written(&store, &state).contains_key("optimizer.safetensors"));
    store.configure(spec(Rule::Add));
    let state = store.begin_cut().unwrap().take().unwrap();
    let files = crate::common::written(&store, &state);
    assert!(!files.contains_key("optimizer.safetensors"));
    let resumed = crate::common::restored(&files, StoreConfig::default()).unwrap();
    assert_eq!(resumed.run().unwrap().epoch, 3);
    assert!(resumed.reader().root(0).state().is_none());
    let again = refusal(&resumed, &started);
    assert_eq!((again.reason, again.duplicate, again.applied), (Some(Reason::OptimizerChanged), true, true));
}
