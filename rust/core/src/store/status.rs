//! The store's numbers, for people and for tests.

use super::Store;
use super::model::ModelRoot;
use super::root::Root;
use super::tally::{Tally, TicketCounts};
use serde::Serialize;
use std::sync::Arc;

/// The store's numbers.
#[derive(Clone, Debug, Serialize)]
pub struct StoreStatus {
    pub term: u64,
    pub version: u64,
    pub samples: u64,
    pub tickets: TicketCounts,
    /// Updates of which workers had been told, and which the checkpoint that the store went on from did not have.
    pub lost_updates: u64,
    pub totals: Tally,
    /// (worker id, incarnation, counts), in slot order.
    pub workers: Vec<(String, u32, Tally)>,
    /// Bytes of the newest roots: parameters, buffers and optimizer state.
    pub root_bytes: usize,
    /// Bytes of their ledgers.
    pub ledger_bytes: usize,
    /// Bytes that only older model versions hold, which readers still pin.
    pub pinned_bytes: usize,
    /// Recycled memory waiting for the next root or push.
    pub idle_bytes: usize,
    pub live_versions: usize,
}

impl Store {
    /// Counts and bytes as they are now.
    #[must_use]
    pub fn status(self: &Arc<Self>) -> StoreStatus {
        let reader = self.reader();
        let roots = || (0..self.cells.len()).map(|i| reader.root(i));
        let root_bytes = roots().map(|root| root.bytes()).sum();
        let ledger_bytes = roots().map(|root| root.ledger_bytes()).sum();
        let newest = self.model();
        let (live_versions, pinned_bytes) = self.pins.with_live(|live| (live.len(), pinned(live, &newest)));
        let registry = self.registry();
        let tickets = TicketCounts { open: registry.num_open(), ..registry.tickets.clone() };
        StoreStatus {
            term: registry.term,
            version: registry.version,
            samples: registry.samples,
            tickets,
            lost_updates: registry.lost_updates,
            totals: registry.totals.clone(),
            workers: registry.tallies(),
            root_bytes,
            ledger_bytes,
            pinned_bytes,
            idle_bytes: self.pool.idle_bytes(),
            live_versions,
        }
    }
}

/// Versions share the roots of the fragments in which they do not differ. Without an allocation: the versions are held
/// alive meanwhile.
fn pinned(live: &[Arc<ModelRoot>], newest: &ModelRoot) -> usize {
    let bytes = |(n, version): (usize, &Arc<ModelRoot>)| -> usize {
        let roots = version.roots.iter().enumerate();
        let is_counted = |&(i, root): &(usize, &Arc<Root>)| {
            let mut others = live[..n].iter().map(Arc::as_ref).chain([newest]);
            others.any(|other| Arc::ptr_eq(&other.roots[i], root))
        };
        roots.filter(|root| !is_counted(root)).map(|(_, root)| root.bytes()).sum()
    };
    live.iter().enumerate().map(bytes).sum()
}
