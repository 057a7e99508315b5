//! The door: whether a push may be applied at all, decided once, from facts about it.

use super::verdict::{Reason, Verdict};
use crate::spec::StalenessSpec;

/// What is known of a push when it asks to be let in. The default is a fresh, finite one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PushFacts {
    /// Updates ticketed between the worker's read and now.
    pub staleness: u64,
    /// Whether it was read in the term that the store is in; staleness has no meaning across terms.
    pub same_term: bool,
    /// Whether its worker was never given up as lost between read and push.
    pub awake: bool,
    /// Whether all of its values are finite, as far as they are known yet.
    pub finite: bool,
    /// The L2 norm of the whole gradient; `None` as long as it has not arrived.
    pub norm: Option<f64>,
}

impl Default for PushFacts {
    fn default() -> Self {
        Self { staleness: 0, same_term: true, awake: true, finite: true, norm: None }
    }
}

/// Judges a push. Where several things are wrong, the one that explains the others is named: a push from another
/// term has no staleness, and one with NaN has no norm.
///
/// A norm that is not known yet is not judged: a spec that limits it [needs](super::need) the whole push, and asks
/// once that is there.
#[must_use]
pub fn admit(spec: &StalenessSpec, facts: &PushFacts) -> Verdict {
    if !facts.same_term {
        let detail = "after it had read, the server was started again or the model's values were replaced: pull and go on";
        return Verdict::reject(Reason::ServerRolledBack, detail);
    }
    if !facts.awake {
        let detail = "the worker was given up as lost after it had read: pull and go on";
        return Verdict::reject(Reason::Slept, detail);
    }
    if !facts.finite {
        let detail =
            "the gradient holds NaN or an infinity: look at the loss, the learning rate and the inputs";
        return Verdict::reject(Reason::NonFinite, detail);
    }
    if let Some(limit) = spec.max_staleness.filter(|&limit| facts.staleness > limit) {
        let late = facts.staleness;
        let detail =
            format!("{late} updates were made since its read, max_staleness is {limit}: pull and go on");
        return Verdict::reject(Reason::Stale, detail);
    }
    if let (Some(limit), Some(norm)) = (spec.max_norm, facts.norm)
        && exceeds(norm, limit)
    {
        let detail = format!("the gradient's L2 norm is {norm:.6e}, max_norm is {limit:.6e}");
        return Verdict::reject(Reason::Norm, detail);
    }
    Verdict::Admit
}

/// NaN exceeds everything.
fn exceeds(norm: f64, limit: f64) -> bool {
    norm.is_nan() || norm > limit
}
