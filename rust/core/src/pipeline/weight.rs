//! What a late push is worth: the product of the chosen policies, each a function of the staleness τ alone.
//!
//! | policy | weight | source |
//! |---|---|---|
//! | `constant` | 1 | |
//! | `adaptive_lr` | factor^τ | Chan & Lane 2014, exponential damping |
//! | `inverse` | 1 / (1 + τ) | Jiang et al. 2017, DynSGD |
//! | `polynomial` | (1 + τ)^−a | Xie et al. 2019, FedAsync |
//! | `hinge` | 1 while τ ≤ b, then 1 / (a (τ − b) + 1) | Xie et al. 2019, FedAsync |
//!
//! Differs from FedAsync's published code in that weights never compound: each is computed anew from its τ.

use crate::spec::Weight;

/// Weight in [0, 1] of a push that is `tau` updates late; exactly 1 at τ = 0 and without policies.
#[must_use]
pub fn weight(policies: &[Weight], tau: u64) -> f64 {
    policies.iter().map(|policy| one(policy, tau)).product()
}

fn one(policy: &Weight, tau: u64) -> f64 {
    let late = tau as f64;
    match *policy {
        Weight::Constant => 1.0,
        // IEEE 754 has pow(x, ±0) = 1 for every x, and pow(1, y) = 1 for every y: the law holds without a branch.
        Weight::AdaptiveLr { factor } => factor.powf(late),
        Weight::Inverse => 1.0 / (1.0 + late),
        Weight::Polynomial { a } => (1.0 + late).powf(-a),
        Weight::Hinge { a, b } => match tau.checked_sub(b) {
            None | Some(0) => 1.0,
            Some(beyond) => 1.0 / (a * beyond as f64 + 1.0),
        },
    }
}
