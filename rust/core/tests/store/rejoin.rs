//! A worker process that is back: what it and the registry know of its pushes is brought together, and none counts twice.

use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Presence;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec};
use offbeat_core::store::{
    Admission, Claim, NoWayBack, OpenPush, PushHead, Receipt, Rejoin, RunSpec, Standing, Store, StoreConfig,
    Unsettled, WorkerKey,
};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use proptest::prelude::*;
use std::sync::Arc;

/// Of two fragments.
const ELEMENTS: u64 = 70_000;
const SAMPLES: u64 = 8;

fn store() -> Arc<Store> {
    let (name, dtype, role) = ("w".into(), Dtype::F32, Role::Parameter);
    let tensor = TensorSpec { name, aliases: vec![], shape: vec![ELEMENTS], dtype, role };
    let table = Arc::new(TensorTable::new(vec![tensor]).unwrap());
    let config = StoreConfig { max_workers: 2, ..StoreConfig::default() };
    let store = Store::new(table, config, 1, &mut |_, bytes| bytes.fill(0));
    let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule: Rule::Add }];
    let optimizer = OptimizerSpec { groups, momentum_correction: false };
    let (staleness, schedule) =
        (StalenessSpec { max_staleness: Some(5), ..StalenessSpec::default() }, Schedule::default());
    store.configure(RunSpec { optimizer, staleness, schedule, max_samples: None });
    store
}

fn head(store: &Arc<Store>, worker: WorkerKey, sequence: u64) -> PushHead {
    let (term, base, epoch, samples) = (store.term(), store.version(), 1, SAMPLES);
    PushHead { worker, sequence, term, base, epoch, samples, present: Presence::all(1), norm: None }
}

fn open(store: &Arc<Store>, head: &PushHead) -> OpenPush {
    match store.admit(head) {
        Admission::Open(push) => push,
        Admission::Settled(receipt) => panic!("{receipt:?}"),
    }
}

fn answer(store: &Arc<Store>, head: &PushHead) -> Receipt {
    match store.admit(head) {
        Admission::Open(push) => {
            submit(store, &push, 0);
            submit(store, &push, 1);
            push.settle()
        }
        Admission::Settled(receipt) => receipt,
    }
}

fn submit(store: &Arc<Store>, push: &OpenPush, fragment: usize) {
    let base = store.reader().root(fragment).version();
    let mut block = store.staging(store.layout().fragments[fragment].wire_bytes());
    block.floats_mut().fill(1.0);
    let checksum = checksum(block.bytes());
    assert!(store.submit(push, fragment, base, block, checksum).outcome.try_recv().unwrap().unwrap().applied);
}

fn value(store: &Arc<Store>, fragment: usize) -> f32 {
    let root = store.reader().root(fragment);
    bytemuck::pod_read_unaligned(&root.held()[..4])
}

fn claim(worker: WorkerKey, settled: u64, applied: u64, gone: &[bool]) -> Claim {
    let unsettled = gone.iter().zip(settled + 1..);
    let unsettled = unsettled.map(|(&gone, sequence)| Unsettled { sequence, samples: SAMPLES, gone });
    Claim { incarnation: worker.incarnation, term: 1, settled, applied, unsettled: unsettled.collect() }
}

fn back(store: &Arc<Store>, claim: &Claim) -> Standing {
    match store.rejoin("a", claim).unwrap() {
        Rejoin::Back(standing) => standing,
        Rejoin::Busy(_) => panic!("nothing is under way"),
    }
}

/// Another life, from what the store is now.
fn another_life(store: &Arc<Store>) -> Arc<Store> {
    let state = store.begin_cut().unwrap().take().unwrap();
    let config = StoreConfig { max_workers: 2, ..StoreConfig::default() };
    crate::common::resumed(store, &state, config)
}

#[test]
fn a_push_whose_answer_was_lost_is_answered_and_one_that_never_came_is_asked_for() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let receipt = answer(&store, &head(&store, worker, 1));
    let standing = back(&store, &claim(worker, 0, 0, &[false]));
    assert_eq!(standing.answers, [(1, Receipt { duplicate: true, ..receipt })]);
    assert_eq!((standing.key, standing.lost_updates, standing.own_version), (worker, 0, 1));
    let status = store.status();
    assert_eq!((status.totals.duplicates, status.workers[0].2.duplicates), (1, 1));
    let standing = back(&store, &claim(worker, 1, 1, &[false]));
    assert_eq!(standing.answers, []);
    assert!(answer(&store, &head(&store, worker, 2)).applied);
}

#[test]
fn what_a_worker_no_longer_has_ends_as_it_is() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let push = open(&store, &head(&store, worker, 1));
    submit(&store, &push, 0);
    drop(push);
    let standing = back(&store, &claim(worker, 0, 0, &[true, true]));
    let [(1, partly), (2, not)] = &standing.answers[..] else { panic!("{standing:?}") };
    assert_eq!((partly.applied, partly.reason), (true, Some(Reason::ConnectionLost)));
    assert_eq!((not.applied, not.reason), (false, Some(Reason::ConnectionLost)));
    let status = store.status();
    assert_eq!((status.tickets.partial, status.tickets.applied, status.tickets.open), (1, 0, 0));
    assert_eq!(status.totals.rejected["connection_lost"], 1);
    assert_eq!((value(&store, 0).to_bits(), value(&store, 1).to_bits()), (1.0_f32.to_bits(), 0));
    // Said again, it is answered again, and nothing is counted twice.
    let again = back(&store, &claim(worker, 0, 0, &[true, true]));
    assert!(again.answers.iter().all(|(_, receipt)| receipt.duplicate));
    assert_eq!(store.status().tickets, status.tickets);
    assert!(answer(&store, &head(&store, worker, 3)).applied, "its numbers go on");
}

#[test]
fn a_worker_waits_for_what_is_being_committed() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let push = open(&store, &head(&store, worker, 1));
    let Rejoin::Busy(mut told) = store.rejoin("a", &claim(worker, 0, 0, &[false])).unwrap() else {
        panic!("it is under way");
    };
    submit(&store, &push, 0);
    assert_eq!(told.try_recv(), Ok(None));
    drop(push);
    assert_eq!(told.try_recv(), Ok(Some(())));
    assert_eq!(back(&store, &claim(worker, 0, 0, &[false])).answers, []);
    assert!(answer(&store, &head(&store, worker, 1)).applied);
    assert_eq!(
        (value(&store, 0).to_bits(), value(&store, 1).to_bits()),
        (1.0_f32.to_bits(), 1.0_f32.to_bits())
    );
}

#[test]
fn who_says_what_cannot_be_changes_nothing() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    assert!(answer(&store, &head(&store, worker, 1)).applied);
    let rejected = answer(&store, &PushHead { base: 99, ..head(&store, worker, 2) });
    assert!(!rejected.applied);
    let before = store.status();
    for (settled, applied, gone) in [
        (3, 1, &[][..]),             // more than ever came
        (2, 2, &[]),                 // more applied than were
        (0, 0, &[]),                 // less sent than came
        (0, 0, &[true, true, true]), // more under way than may be
        (0, 0, &[false, true]),      // what is to come again has to be the last
        (1, 2, &[false]),            // more applied than answered
    ] {
        let refused = store.rejoin("a", &claim(worker, settled, applied, gone)).unwrap_err();
        assert!(matches!(refused, NoWayBack::Impossible { .. }), "{refused}");
    }
    let gap = Claim {
        unsettled: vec![Unsettled { sequence: 4, samples: 1, gone: true }],
        ..claim(worker, 2, 1, &[])
    };
    assert!(matches!(store.rejoin("a", &gap), Err(NoWayBack::Impossible { .. })));
    let after = store.status();
    assert_eq!((before.tickets, before.totals, before.workers), (after.tickets, after.totals, after.workers));
    assert_eq!(back(&store, &claim(worker, 2, 1, &[])).lost_updates, 0);
}

#[test]
fn who_was_replaced_or_forgotten_cannot_come_back() {
    let store = store();
    let old = store.register("a", 1).unwrap();
    assert!(answer(&store, &head(&store, old, 1)).applied);
    store.register("a", 2).unwrap();
    assert!(matches!(store.rejoin("a", &claim(old, 1, 1, &[])), Err(NoWayBack::Fenced { .. })));
    let unknown = WorkerKey { slot: 0, incarnation: 3 };
    let told = store.rejoin("b", &claim(unknown, 1, 1, &[])).unwrap_err();
    assert!(matches!(told, NoWayBack::Forgotten { incarnation: 3, .. }), "{told}");
    let Rejoin::Back(standing) = store.rejoin("b", &claim(unknown, 0, 0, &[])).unwrap() else { panic!() };
    assert!(
        answer(&store, &head(&store, standing.key, 1)).applied,
        "who has pushed nothing has lost nothing"
    );
    let third = WorkerKey { slot: 0, incarnation: 4 };
    assert!(matches!(store.rejoin("c", &claim(third, 0, 0, &[])), Err(NoWayBack::Full(_))));
}

#[test]
fn the_slot_of_a_newer_process_is_not_given_to_an_older_one() {
    let store = store();
    let (old, other) = (store.register("old", 1).unwrap(), store.register("other", 2).unwrap());
    store.depart(old, false);
    let newer = store.register("newer", 3).unwrap();
    assert_eq!(newer.slot, old.slot);
    assert!(answer(&store, &head(&store, newer, 1)).applied);
    for gone in [newer, other] {
        store.depart(gone, true);
        // To what the fragments have seen it would have been replaced.
        assert!(matches!(store.rejoin("old", &claim(old, 0, 0, &[])), Err(NoWayBack::Forgotten { .. })));
    }
    let newest = store.register("newest", 4).unwrap();
    assert!(answer(&store, &head(&store, newest, 1)).applied);
}

#[test]
fn whom_a_life_has_forgotten_of_its_own_says_nothing_of_who_came_after_the_checkpoint() {
    let store = store();
    let a = store.register("a", 1).unwrap();
    let state = store.begin_cut().unwrap().take().unwrap();
    let late = store.register("late", 2).unwrap();
    assert!(answer(&store, &head(&store, late, 1)).applied);
    let config = StoreConfig { max_workers: 3, ..StoreConfig::default() };
    let later = crate::common::resumed(&store, &state, config);
    for (n, name) in (1..).zip(["x", "y", "z", "u"]) {
        let own = later.register(name, crate::common::LAST_INCARNATION + n).unwrap();
        assert!(answer(&later, &head(&later, own, 1)).applied);
        later.depart(own, true);
    }
    later.absent(a); // whose place is the only one that no newer process has had
    let told = later.rejoin("late", &claim(late, 1, 1, &[])).unwrap();
    assert!(matches!(&told, Rejoin::Back(s) if s.lost_updates == 1 && s.answers.is_empty()), "{told:?}");
}

#[test]
fn who_was_replaced_under_its_name_and_has_lost_its_slot_with_it_is_not_taken_for_one_who_came_after() {
    let store = store();
    let _first = store.register("z", 1).unwrap();
    let worker = store.register("a", 2).unwrap();
    assert!(answer(&store, &head(&store, worker, 1)).applied);
    let later = another_life(&store); // which holds that push
    let newer = later.register("a", crate::common::LAST_INCARNATION + 1).unwrap();
    later.depart(newer, false);
    later.register("b", crate::common::LAST_INCARNATION + 2).unwrap();
    let told = later.rejoin("a", &claim(worker, 0, 0, &[false]));
    assert!(matches!(told, Err(NoWayBack::Forgotten { .. })), "{told:?}");
}

#[test]
fn who_finds_room_for_newer_ones_only_is_to_be_started_again() {
    let store = store();
    let older = store.register("a", 1).unwrap();
    let state = store.begin_cut().unwrap().take().unwrap();
    let late = store.register("late", 2).unwrap();
    assert!(answer(&store, &head(&store, late, 1)).applied);
    let config = StoreConfig { max_workers: 2, ..StoreConfig::default() };
    let later = crate::common::resumed(&store, &state, config);
    later.register("x", crate::common::LAST_INCARNATION + 1).unwrap();
    back(&later, &claim(older, 0, 0, &[]));
    let rejoin = || later.rejoin("late", &claim(late, 1, 1, &[]));
    assert!(matches!(rejoin(), Err(NoWayBack::Full(_))), "the older one may leave");
    later.depart(older, true);
    later.register("y", crate::common::LAST_INCARNATION + 2).unwrap();
    assert!(matches!(rejoin(), Err(NoWayBack::Forgotten { .. })));
}

#[test]
fn who_was_away_for_long_is_expected_by_the_next_life_and_who_is_gone_is_not() {
    let store = store();
    let [away, gone] = [("away", 1), ("gone", 2)].map(|(name, n)| store.register(name, n).unwrap());
    store.absent(away);
    store.depart(gone, false);
    let state = store.begin_cut().unwrap().take().unwrap();
    let present: Vec<_> =
        state.book.workers.iter().map(|page| (page.worker_id.as_str(), page.present, page.away)).collect();
    assert_eq!(present, [("away", true, true), ("gone", false, false)]);
    // Whose slot is given away first.
    let newer = store.register("newer", 3).unwrap();
    assert_eq!(newer.slot, gone.slot);
}

#[test]
fn a_life_that_goes_on_from_before_counts_what_is_lost_and_goes_on_from_there() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    for sequence in 1..=3 {
        assert!(answer(&store, &head(&store, worker, sequence)).applied);
    }
    let later = another_life(&store);
    // Told of 5 since, one of which was rejected; the sixth was under way, and comes again.
    let standing = back(&later, &claim(worker, 8, 7, &[false]));
    assert_eq!((standing.lost_updates, standing.answers), (4, vec![]));
    let of_the_life_before = PushHead { term: 1, ..head(&later, worker, 9) };
    assert_eq!(answer(&later, &of_the_life_before).reason, Some(Reason::ServerRolledBack));
    assert!(answer(&later, &head(&later, worker, 10)).applied);
    assert_eq!(later.status().lost_updates, 4);
    // Once it knows of this life, it can have been told of no more than this life knows.
    let known = Claim { term: 2, ..claim(worker, 10, 8, &[]) };
    assert_eq!(back(&later, &known).lost_updates, 0);
    let more = Claim { term: 2, ..claim(worker, 11, 9, &[]) };
    assert!(matches!(later.rejoin("a", &more), Err(NoWayBack::Impossible { .. })));
    assert_eq!(another_life(&later).status().lost_updates, 4, "the count outlives the life");
}

#[test]
fn who_came_after_the_checkpoint_goes_on_and_who_was_there_before_it_and_is_forgotten_does_not() {
    let store = store();
    for (gone, incarnation) in [("gone", 3), ("also gone", 4)] {
        let gone = store.register(gone, incarnation).unwrap();
        assert!(answer(&store, &head(&store, gone, 1)).applied);
        store.depart(gone, false);
    }
    let present = store.register("a", 5).unwrap();
    assert!(answer(&store, &head(&store, present, 1)).applied);
    let later = another_life(&store);
    let after = claim(WorkerKey { slot: 0, incarnation: 6 }, 3, 2, &[false]);
    let Rejoin::Back(standing) = later.rejoin("late", &after).unwrap() else { panic!() };
    assert_eq!((standing.lost_updates, standing.key.incarnation), (2, 6));
    assert!(answer(&later, &head(&later, standing.key, 4)).applied);
    let forgotten = claim(WorkerKey { slot: 0, incarnation: 3 }, 3, 2, &[]);
    assert!(matches!(later.rejoin("gone", &forgotten), Err(NoWayBack::Forgotten { .. })));
    let replacing = claim(WorkerKey { slot: 0, incarnation: 7 }, 1, 1, &[]);
    assert_eq!(back(&later, &replacing).key.slot, present.slot, "it had taken the name after the checkpoint");
    assert!(matches!(later.rejoin("a", &claim(present, 1, 1, &[])), Err(NoWayBack::Fenced { .. })));
}

#[test]
fn who_came_after_the_checkpoint_and_was_away_for_a_whole_life_goes_on() {
    let store = store();
    store.register("a", 1).unwrap();
    let state = store.begin_cut().unwrap().take().unwrap();
    let late = store.register("late", 2).unwrap();
    assert!(answer(&store, &head(&store, late, 1)).applied);
    let config = || StoreConfig { max_workers: 2, ..StoreConfig::default() };
    let missed = crate::common::resumed(&store, &state, config());
    let later = another_life(&missed);
    let Rejoin::Back(standing) = later.rejoin("late", &claim(late, 1, 1, &[])).unwrap() else { panic!() };
    assert_eq!(standing.lost_updates, 1);
    assert!(answer(&later, &head(&later, standing.key, 2)).applied);
}

#[test]
fn a_push_of_which_all_has_come_is_whole_though_its_worker_has_it_no_more() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let push = open(&store, &head(&store, worker, 1));
    submit(&store, &push, 0);
    submit(&store, &push, 1);
    drop(push);
    let standing = back(&store, &claim(worker, 0, 0, &[true]));
    let [(1, receipt)] = &standing.answers[..] else { panic!("{standing:?}") };
    assert_eq!((receipt.applied, receipt.reason), (true, None));
    assert_eq!(store.status().tickets.applied, 1);
}

#[test]
fn a_push_that_ends_with_the_life_that_had_begun_it_counts_as_told() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let push = open(&store, &head(&store, worker, 1));
    submit(&store, &push, 0);
    let run = store.run().unwrap();
    let (momentum, dampening, weight_decay, nesterov, maximize) = (0.0, 0.0, 0.0, false, false);
    let rule = Rule::Sgd { momentum, dampening, weight_decay, nesterov, maximize };
    let group = Group { rule, ..run.spec.optimizer.groups[0].clone() };
    let optimizer = OptimizerSpec { groups: vec![group], momentum_correction: false };
    store.configure(RunSpec { optimizer, ..run.spec.clone() });
    let later = another_life(&store);
    drop(push);
    // Of the life before it was told nothing; of this one, that a part of it was applied.
    let standing = back(&later, &claim(worker, 0, 0, &[false]));
    let [(1, receipt)] = &standing.answers[..] else { panic!("{standing:?}") };
    assert_eq!((receipt.applied, receipt.reason), (true, Some(Reason::OptimizerChanged)));
    let known = Claim { term: 2, ..claim(worker, 1, 1, &[]) };
    assert_eq!(back(&later, &known).lost_updates, 0);
    // Had it been told so in the life before, nothing would be lost either.
    assert_eq!(back(&another_life(&store), &claim(worker, 1, 1, &[])).lost_updates, 0);
}

#[test]
fn a_retry_without_what_a_life_before_had_answered_is_told_that_it_is_not_whole() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let push = open(&store, &head(&store, worker, 1));
    submit(&store, &push, 0);
    let later = another_life(&store);
    submit(&store, &push, 1); // and is answered, so that it does not come again
    drop(push);
    assert_eq!(back(&later, &claim(worker, 0, 0, &[false])).answers, []);
    let retried = PushHead { term: 1, ..head(&later, worker, 1) };
    let receipt = open(&later, &retried).settle();
    assert_eq!((receipt.applied, receipt.reason), (true, Some(Reason::ServerRolledBack)));
    assert_eq!(later.status().tickets.partial, 1);
}

/// What a program does to a worker and its store.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A push, of which the first so many fragments arrive, the rest after a loss; and whether its answer does.
    Push {
        arrive: usize,
        is_answered: bool,
        is_kept: bool,
    },
    /// A push that is too old.
    Late {
        is_answered: bool,
    },
    Checkpoint,
    /// The store goes on from the last checkpoint.
    Crash,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => (0..=2_usize, any::<bool>(), any::<bool>())
            .prop_map(|(arrive, is_answered, is_kept)| Event::Push { arrive, is_answered, is_kept }),
        1 => any::<bool>().prop_map(|is_answered| Event::Late { is_answered }),
        2 => Just(Event::Checkpoint),
        1 => Just(Event::Crash),
    ];
    prop::collection::vec(event, 1..30)
}

/// A worker as the client keeps it.
struct Worker {
    key: WorkerKey,
    term: u64,
    settled: u64,
    /// Of which it was told that they were applied in full, and those that it was told of in parts.
    applied: u64,
    lost: u64,
}

impl Worker {
    fn told(&mut self, sequence: u64, receipt: &Receipt) {
        assert_eq!(sequence, self.settled + 1);
        self.settled = sequence;
        self.applied += u64::from(receipt.applied);
    }

    /// The connection is lost with a push under way, or none; it comes back, and sends again what it still has.
    fn come_back(&mut self, store: &Arc<Store>, under_way: Option<bool>) {
        let gone: Vec<bool> = under_way.iter().map(|is_kept| !is_kept).collect();
        let claim = Claim { term: self.term, ..claim(self.key, self.settled, self.applied, &gone) };
        let standing = back(store, &claim);
        self.lost += standing.lost_updates;
        let is_open = under_way.is_some() && standing.answers.is_empty();
        for (sequence, receipt) in &standing.answers {
            self.told(*sequence, receipt);
        }
        if is_open {
            // With the term that it has read.
            let again = PushHead { term: self.term, ..head(store, self.key, self.settled + 1) };
            let receipt = answer(store, &again);
            self.told(again.sequence, &receipt);
        }
        self.term = store.term();
    }
}

proptest! {
    #[test]
    fn what_is_told_is_there_or_counted_as_lost_and_nothing_counts_twice(events in events()) {
        let mut store = store();
        let key = store.register("a", 1).unwrap();
        let mut worker = Worker { key, term: 1, settled: 0, applied: 0, lost: 0 };
        let mut kept = store.begin_cut().unwrap().take().unwrap();
        for event in events {
            let next = worker.settled + 1;
            match event {
                Event::Push { arrive, is_answered, is_kept } => {
                    let push = open(&store, &head(&store, key, next));
                    for fragment in 0..arrive {
                        submit(&store, &push, fragment);
                    }
                    if arrive == 2 && is_answered {
                        let receipt = push.settle();
                        worker.told(next, &receipt);
                    } else if arrive == 2 {
                        prop_assert!(push.settle().applied);
                        worker.come_back(&store, Some(is_kept));
                    } else {
                        drop(push);
                        worker.come_back(&store, Some(is_kept));
                    }
                }
                Event::Late { is_answered } => {
                    let late = PushHead { base: store.version() + 1, ..head(&store, key, next) };
                    let receipt = answer(&store, &late);
                    prop_assert!(!receipt.applied);
                    if is_answered {
                        worker.told(next, &receipt);
                    } else {
                        worker.come_back(&store, Some(true));
                    }
                }
                Event::Checkpoint => kept = store.begin_cut().unwrap().take().unwrap(),
                Event::Crash => {
                    let config = StoreConfig { max_workers: 2, ..StoreConfig::default() };
                    store = crate::common::resumed(&store, &kept, config);
                    worker.come_back(&store, None);
                    kept = store.begin_cut().unwrap().take().unwrap();
                }
            }
        }
        let status = store.status();
        prop_assert_eq!(status.lost_updates, worker.lost);
        // Each fragment holds each ticket's one at most, and all of what was told that no crash has undone.
        let values = [value(&store, 0), value(&store, 1)];
        let tickets = &status.tickets;
        prop_assert_eq!(tickets.applied + tickets.partial, worker.applied - worker.lost, "{:?} {:?}", tickets, values);
        prop_assert!(values[0] >= values[1], "fragments arrive in order");
        prop_assert_eq!(values[1], tickets.applied as f32);
        prop_assert_eq!(values[0] - values[1], tickets.partial as f32);
    }
}

#[test]
fn a_number_that_no_worker_reaches_is_taken_over_by_no_life() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    assert!(answer(&store, &head(&store, worker, 1)).applied);
    let later = another_life(&store);
    for settled in [1 << 59, 1 << 60, u64::MAX - 1, u64::MAX] {
        let settled = settled + u64::from(settled < u64::MAX);
        for gone in [&[][..], &[false]] {
            let unsettled = gone.iter().map(|&gone| Unsettled {
                sequence: settled.saturating_add(1),
                samples: SAMPLES,
                gone,
            });
            let unsettled = unsettled.collect();
            let claim = Claim { settled, applied: settled, unsettled, ..claim(worker, 0, 0, &[]) };
            let refused = later.rejoin("a", &claim).unwrap_err();
            assert!(matches!(refused, NoWayBack::Impossible { .. }), "{refused}");
        }
    }
    // Those that lie within what can be are not added up beyond it.
    let most = 1 << 59;
    for incarnation in 2..6 {
        let who = WorkerKey { slot: 0, incarnation };
        assert!(matches!(later.rejoin("a", &claim(who, most, most, &[])), Ok(Rejoin::Back(_))));
    }
    assert_eq!(later.status().lost_updates, 1 << 60);
    assert_eq!(another_life(&later).status().lost_updates, 1 << 60, "it can be gone on from");
}

#[test]
fn a_receipt_tells_of_a_part_that_was_answered_and_is_not_there() {
    let store = store();
    let worker = store.register("a", 1).unwrap();
    let first = head(&store, worker, 1);
    let push = open(&store, &first);
    drop(push);
    let later = another_life(&store);
    // What the life before had applied and answered after the cut, the worker does not send again.
    let again = open(&later, &first);
    submit(&later, &again, 1);
    let receipt = again.settle();
    assert_eq!((receipt.applied, receipt.reason), (true, Some(Reason::ServerRolledBack)), "{receipt:?}");
    assert_eq!(later.status().tickets.partial, 1);
}
