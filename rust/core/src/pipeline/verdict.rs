//! What became of a push, and why, in words that do not change: they are in receipts, logs and metrics.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The outcome of a decision about a push. Damping is not among them: an admitted push has a weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    Admit,
    /// Nothing moves: no version, momentum, schedule, buffer or error-feedback residual.
    Reject {
        reason: Reason,
        /// The values, and what to do.
        detail: String,
    },
}

impl Verdict {
    /// A rejection.
    #[must_use]
    pub fn reject(reason: Reason, detail: impl Into<String>) -> Self {
        Self::Reject { reason, detail: detail.into() }
    }
}

/// Declares [`Reason`] with each variant's public name in one place, for serde, `Display` and `ALL` alike.
macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// Why a push was rejected, whole or in some of its fragments.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Reason {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)*
            /// A reason of a newer build; the receipt's detail has its words. No server of this build gives it.
            #[serde(rename = "unknown", other)]
            Unknown,
        }

        impl Reason {
            /// Every reason that this build gives, for counters and tests.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Unknown => "unknown",
                }
            }
        }
    };
}

reasons! {
    /// More updates were ticketed since the worker's read than `max_staleness` allows.
    Stale = "stale",
    /// The gradient holds NaN or an infinity.
    NonFinite = "non_finite",
    /// The gradient's L2 norm exceeds `max_norm`.
    Norm = "norm",
    /// It was based on a term that is over: the server restarted, was rolled back or loaded another state.
    ServerRolledBack = "server_rolled_back",
    /// It was read before its worker was given up as lost.
    Slept = "slept",
    /// A policy needs the parameters it was read from, and they are no longer kept.
    BaseEvicted = "base_evicted",
    /// The server has no optimizer yet.
    NoOptimizer = "no_optimizer",
    /// The optimizer was replaced while the push was under way, or before its worker had heard of the new one.
    OptimizerChanged = "optimizer_changed",
    /// Applying it would have made a parameter (in its own type) or a moment NaN or infinite.
    NonfiniteResult = "nonfinite_result",
    /// Applying it went wrong inside the server; the old state stands.
    Failed = "failed",
    /// The run's `max_samples` are used up.
    Budget = "budget",
    /// A newer incarnation of the worker has taken its place, or one sequence number came with two contents.
    Fenced = "fenced",
    /// The connection was lost while it was on its way, and the worker no longer had it to send again.
    ConnectionLost = "connection_lost",
    /// Its sequence number was settled before and the first answer is no longer kept.
    AlreadySettled = "already_settled",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
