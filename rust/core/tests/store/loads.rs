//! Other values and other runs: what they hold back, and what they refuse.

use crate::support::{enter, head, open, push, refusal, store, store_of, store_with, submit, tensor, value};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, StalenessSpec, Transaction};
use offbeat_core::store::StoreConfig;
use offbeat_core::table::Role;

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
fn a_load_that_may_not_be_changes_nothing_and_one_that_may_is_as_any() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let store = store_with(transaction, StalenessSpec::default(), None);
        let seen = std::cell::Cell::new((0, 0));
        let refused = store.load_if(
            |term, version| {
                seen.set((term, version));
                false
            },
            &mut |_, _| panic!("nothing is asked for"),
        );
        assert!(refused.is_none());
        assert_eq!(seen.get(), (store.term(), store.version()));
        assert_eq!(store.term(), 1);
        let mut load = store.load_if(|term, _| term == 1, &mut |_, bytes| bytes.fill(0)).unwrap();
        let mut role = load.model_role.take();
        while let Some(held) = role {
            role = held.step();
        }
        assert_eq!((store.term(), value(&store, 0).to_bits()), (2, 0));
    }
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
