//! How much of a push the stages must have seen before they can decide, and what that makes of the transaction.

use crate::spec::{StalenessSpec, Transaction};
use serde::{Deserialize, Serialize};

/// The least that a stage must see, from a little to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// The header: who, based on what, how many samples.
    Header,
    /// One fragment of the gradient at a time.
    Fragment,
    /// Whole tensors: their fragments commit together.
    Tensor,
    /// The whole gradient.
    Push,
}

/// What the chosen policies need: a norm is the whole gradient's, all else is in the header.
#[must_use]
pub fn need(spec: &StalenessSpec) -> Need {
    if spec.max_norm.is_some() { Need::Push } else { Need::Header }
}

/// The transaction that serves both the user's choice and the stages' need.
#[must_use]
pub fn transaction(requested: Transaction, need: Need) -> Transaction {
    if need == Need::Push { Transaction::Model } else { requested }
}
