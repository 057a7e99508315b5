//! What became of pushes, in numbers.

use super::receipt::Receipt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How tickets ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketCounts {
    pub issued: u64,
    pub applied: u64,
    /// Admitted, but nothing of it was applied.
    pub dropped: u64,
    /// Some fragments were applied and others were not.
    pub partial: u64,
    pub open: u64,
}

/// How many updates late: exact up to 63, then one bucket.
pub const STALENESS_BUCKETS: usize = 65;

/// Counts of a worker's pushes (or of all workers').
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub pushes: u64,
    pub samples: u64,
    pub applied: u64,
    pub damped: u64,
    pub rejected: BTreeMap<String, u64>,
    pub duplicates: u64,
    pub staleness_sum: u64,
    pub staleness_max: u64,
    /// `staleness_histogram[τ]` for τ ≤ 63; the last bucket holds all above.
    pub staleness_histogram: Vec<u64>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            pushes: 0,
            samples: 0,
            applied: 0,
            damped: 0,
            rejected: BTreeMap::new(),
            duplicates: 0,
            staleness_sum: 0,
            staleness_max: 0,
            staleness_histogram: vec![0; STALENESS_BUCKETS],
        }
    }
}

impl Tally {
    pub(super) fn count(&mut self, receipt: &Receipt, samples: u64) {
        self.pushes += 1;
        if let (false, Some(reason)) = (receipt.applied, receipt.reason) {
            *self.rejected.entry(reason.to_string()).or_default() += 1;
            return;
        }
        self.samples = self.samples.saturating_add(samples);
        self.applied += 1;
        self.damped += u64::from(receipt.weight < 1.0);
        self.staleness_sum = self.staleness_sum.saturating_add(receipt.staleness);
        self.staleness_max = self.staleness_max.max(receipt.staleness);
        let bucket = usize::try_from(receipt.staleness).unwrap_or(usize::MAX).min(STALENESS_BUCKETS - 1);
        self.staleness_histogram[bucket] += 1;
    }
}
