//! What a worker is told about a push.

use crate::pipeline::Reason;
use serde::{Deserialize, Serialize};

/// The three fates of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Applied as it was.
    Admit,
    /// Applied with a weight below 1; 0 where its buffers moved and all its parameters were refused.
    Damp,
    /// Nothing of it was applied.
    Reject,
}

impl Fate {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Damp => "damp",
            Self::Reject => "reject",
        }
    }
}

/// The answer to one push. A retry gets the first answer again, marked as a duplicate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    pub term: u64,
    /// The model's version with this push counted; of a rejected one, the version that rejected it.
    pub version: u64,
    /// The model's version at admission − at the worker's read, in updates.
    pub staleness: u64,
    /// What the push was worth, in [0, 1]: the fragments' weights, averaged over the parameters that it moved, 0 if it
    /// moved none of those that it brought. 1 if it is applied and brought no parameters: no weight touches buffers.
    pub weight: f64,
    pub verdict: Fate,
    /// Whether any fragment moved.
    pub applied: bool,
    /// Whether this answers a sequence number that was answered before.
    pub duplicate: bool,
    /// Why it was rejected, or why some of its fragments were.
    pub reason: Option<Reason>,
    /// The reason in words, with its values.
    pub detail: String,
}
