//! Pushes that are committed as one: all of it or nothing.

use crate::support::{commit, enter, head, stage, store_of, store_watched, store_with, tensor, value};
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{StalenessSpec, Transaction};
use offbeat_core::store::log::CommitObserver;
use offbeat_core::store::{Admission, StagedFragment, StoreConfig, log};
use offbeat_core::table::{Role, TensorSpec};
use offbeat_core::values;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
