//! Who is let in, who is answered from the ledger, and what a push is worth.

use crate::support::{
    ELEMENTS, enter, head, open, push, refusal, stage, store, store_of, store_with, submit, tensor, value,
};
use futures_channel::oneshot;
use offbeat_core::checksum::checksum;
use offbeat_core::layout::{FragmentKind, Presence};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Rule, StalenessSpec, Transaction, Weight};
use offbeat_core::store::{Fate, PushHead, Receipt, RunSpec, Store, StoreConfig};
use offbeat_core::table::Role;
use std::sync::Arc;

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
fn nothing_more_is_applied_of_a_push_whose_worker_was_replaced() {
    let store = store();
    let old = enter(&store, "a").unwrap();
    let under_way = open(&store, &head(&store, old, 1));
    assert!(submit(&store, &under_way, 0));
    enter(&store, "a").unwrap();
    assert!(!submit(&store, &under_way, 1), "before the newer process has pushed anything");
    let receipt = under_way.settle();
    assert_eq!((receipt.applied, receipt.reason), (true, Some(Reason::Fenced)));
    assert_eq!((value(&store, 0).to_bits(), value(&store, 1).to_bits()), ((-1.0_f32).to_bits(), 0));
    assert_eq!(store.status().tickets.partial, 1);
}

#[test]
fn a_retry_of_a_plain_gradient_goes_on_under_the_optimizer_of_its_first_try() {
    let store = store();
    let worker = enter(&store, "a").unwrap();
    let under_way = open(&store, &head(&store, worker, 1));
    assert!(submit(&store, &under_way, 0));
    drop(under_way);
    let mut run = store.run().unwrap().spec.clone();
    run.optimizer.groups[0].rule = Rule::Add;
    store.configure(run);
    let retry = open(&store, &head(&store, worker, 1));
    assert!(submit(&store, &retry, 0) && submit(&store, &retry, 1));
    assert!(retry.settle().applied);
    assert_eq!(
        (value(&store, 0).to_bits(), value(&store, 1).to_bits()),
        ((-1.0_f32).to_bits(), (-1.0_f32).to_bits())
    );
}

#[test]
fn a_retry_made_for_another_optimizer_than_its_first_try_finishes_nothing() {
    for num_applied in 0..=2 {
        let store = store();
        let worker = enter(&store, "a").unwrap();
        let first = head(&store, worker, 1);
        let under_way = open(&store, &first);
        assert!((0..num_applied).all(|fragment| submit(&store, &under_way, fragment)));
        drop(under_way);
        let mut run = store.run().unwrap().spec.clone();
        run.optimizer.momentum_correction = true;
        run.optimizer.groups[0].rule =
            Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
        store.configure(run);
        let retry = head(&store, worker, 1);
        assert_ne!(retry.epoch, first.epoch);
        let answer = refusal(&store, &retry);
        let why = (num_applied < 2).then_some(Reason::OptimizerChanged);
        assert_eq!((answer.applied, answer.reason), (num_applied > 0, why), "what was applied stays");
        let told =
            ["nothing of it was applied before the run's optimizer", "parts of it were applied before", ""];
        assert!(answer.detail.starts_with(told[num_applied]), "{answer:?}");
        let tickets = store.status().tickets;
        let due = [(0, 0, 1), (0, 1, 0), (1, 0, 0)];
        assert_eq!((tickets.applied, tickets.partial, tickets.dropped), due[num_applied]);
        let again = refusal(&store, &retry);
        assert_eq!((again.applied, again.reason, again.duplicate), (num_applied > 0, why, true));
        assert!(push(&store, worker, 2).applied);
    }
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
