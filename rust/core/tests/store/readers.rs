//! Who reads while others commit: which versions are held for it, and what it may push on.

use crate::support::{commit, enter, head, stage, store_of, store_watched, store_with, tensor};
use futures_channel::oneshot;
use offbeat_core::layout::Presence;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{StalenessSpec, Transaction};
use offbeat_core::store::{PushHead, Reader, Receipt, Store, StoreConfig, Turn, WorkerKey};
use offbeat_core::table::Role;
use std::sync::Arc;

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
