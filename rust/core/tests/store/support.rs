//! What the tests of the store have in common: one of two fragments, and a worker's way through it.

use futures_channel::oneshot;
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Presence;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec, Transaction};
use offbeat_core::store::{
    Admission, Full, OpenPush, PushHead, Receipt, RunSpec, StagedFragment, Store, StoreConfig, WorkerKey,
};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Two fragments: 65536 and 4464 elements.
pub(crate) const ELEMENTS: u64 = 70_000;

pub(crate) fn store_with(
    transaction: Transaction,
    staleness: StalenessSpec,
    max_samples: Option<u64>,
) -> Arc<Store> {
    store_watched(
        StoreConfig { transaction, max_live_versions: 2, ..StoreConfig::default() },
        staleness,
        max_samples,
    )
}

pub(crate) fn store_watched(
    config: StoreConfig,
    staleness: StalenessSpec,
    max_samples: Option<u64>,
) -> Arc<Store> {
    store_of(vec![tensor("w", ELEMENTS, Role::Parameter)], config, staleness, max_samples)
}

pub(crate) fn tensor(name: &str, elements: u64, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: vec![elements], dtype: Dtype::F32, role }
}

pub(crate) fn store_of(
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
pub(crate) fn enter(store: &Store, worker_id: &str) -> Result<WorkerKey, Full> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    store.register(worker_id, LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

pub(crate) fn store() -> Arc<Store> {
    store_with(Transaction::Fragment, StalenessSpec::default(), None)
}

pub(crate) fn head(store: &Store, worker: WorkerKey, sequence: u64) -> PushHead {
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

pub(crate) fn open(store: &Arc<Store>, head: &PushHead) -> OpenPush {
    match store.admit(head) {
        Admission::Open(push) => push,
        Admission::Settled(receipt) => panic!("{receipt:?}"),
    }
}

pub(crate) fn refusal(store: &Arc<Store>, head: &PushHead) -> Receipt {
    match store.admit(head) {
        Admission::Open(_) => panic!("admitted"),
        Admission::Settled(receipt) => receipt,
    }
}

/// Submits one fragment of ones; returns whether it was applied.
pub(crate) fn submit(store: &Arc<Store>, push: &OpenPush, fragment: usize) -> bool {
    let base = store.reader().root(fragment).version();
    let mut block = store.staging(store.layout().fragments[fragment].wire_bytes());
    block.floats_mut().fill(1.0);
    let checksum = checksum(block.bytes());
    let mut submission = store.submit(push, fragment, base, block, checksum);
    submission.outcome.try_recv().unwrap().unwrap().applied
}

pub(crate) fn push(store: &Arc<Store>, worker: WorkerKey, sequence: u64) -> Receipt {
    let push = open(store, &head(store, worker, sequence));
    assert!(submit(store, &push, 0) && submit(store, &push, 1));
    push.settle()
}

pub(crate) fn value(store: &Arc<Store>, fragment: usize) -> f32 {
    let root = store.reader().root(fragment);
    bytemuck::pod_read_unaligned(&root.held()[..4])
}

pub(crate) fn stage(store: &Arc<Store>, fill: f32) -> Vec<StagedFragment> {
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

pub(crate) fn commit(store: &Arc<Store>, worker: WorkerKey, sequence: u64, fill: f32) -> Receipt {
    let commit = store.commit(head(store, worker, sequence), stage(store, fill));
    drop(commit.role); // commits in place
    let mut receipt: oneshot::Receiver<Receipt> = commit.receipt;
    receipt.try_recv().unwrap().unwrap()
}
