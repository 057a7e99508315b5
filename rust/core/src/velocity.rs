//! SGD's momentum where it belongs in asynchronous training: in the workers, one velocity each.
//!
//! A velocity shared by stale gradients diverges. So a worker keeps its own and sends the direction in which
//! Nesterov would step, and the server runs SGD without momentum on it:
//!
//! > d = ±g + λ·x_read;  v' = μv + d;  send d + μv'
//!
//! Source: Hakimi et al. 2019, DANA-Slim. Rounding is torch's (2.15, `torch/optim/sgd.py`), so that one worker is
//! bit for bit `torch.optim.SGD(nesterov=True, momentum=μ, weight_decay=λ)`. There is no dampening.
//!
//! **When v' becomes v** is the caller's, which knows what became of the push. One in flight: when it settles as
//! applied, even in part; a rejected push leaves v, as it leaves everything. Two in flight: the second push is
//! made before the first has settled, so v' becomes v when it is sent, and a rejection costs that velocity its
//! exactness. A retry sends the bytes of the first attempt and does not come here again. A new incarnation of a
//! worker starts without velocity.

use crate::optim::kernel::{self, Element};
use crate::optim::sgd::{Direction, Velocity};
use crate::optim::{Isa, Source, Target};
use crate::spec::Rule;

/// One tensor's correction: writes the next velocity and what to send.
///
/// Args:
/// * `mu`, `wd`, `maximize`: the group's momentum, weight decay and direction.
/// * `first`: the tensor has no velocity yet: v' is d.
/// * `grad`: the gradient.
/// * `x_read`: the parameters it was taken at; empty if `wd` is 0.
/// * `v`: the velocity that settled last; empty if `first`.
///
/// Returns whether everything written is finite; a push that is not will be refused.
///
/// # Panics
/// If the slices differ in length.
#[expect(clippy::too_many_arguments, reason = "one formula's operands; a struct would only rename them")]
pub fn correct(
    isa: Isa,
    mu: f64,
    wd: f64,
    maximize: bool,
    first: bool,
    grad: &[f32],
    x_read: &[f32],
    v: &[f32],
    v_next: &mut [f32],
    out: &mut [f32],
) -> bool {
    let ahead = Ahead {
        direction: Direction::new(1.0, wd, maximize),
        velocity: Velocity::new(mu, 0.0, first),
        has_momentum: mu != 0.0,
    };
    // What the formula does not look at may be any slice of the right length.
    let x_read = if wd == 0.0 { grad } else { x_read };
    let v = if first { grad } else { v };
    let source = Source { param: x_read, state: [v, &[], &[]] };
    let target = Target { param: out, state: [v_next, &mut [], &mut []] };
    kernel::out_of_place(isa, ahead, grad, &source, target)
}

/// What the server runs on corrected pushes of a group with `rule`: SGD without momentum, decay or direction of
/// its own, since what arrives has all three. Any other rule is its own.
#[must_use]
pub fn server_rule(rule: &Rule) -> Rule {
    match rule {
        Rule::Sgd { .. } => {
            Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false }
        }
        other => other.clone(),
    }
}

/// (x, v) ↦ (what to send, v'): an update rule whose "next parameter" goes on the wire.
#[derive(Clone, Copy)]
struct Ahead {
    direction: Direction,
    velocity: Velocity,
    /// False in a group without momentum: −0 + 0·v' would lose its sign.
    has_momentum: bool,
}

impl Element<1> for Ahead {
    #[inline(always)]
    fn apply(&self, grad: f32, x_read: f32, [v]: [f32; 1]) -> (f32, [f32; 1]) {
        let d = self.direction.of(grad, x_read);
        let next = self.velocity.next(v, d);
        (if self.has_momentum { self.velocity.ahead(next, d) } else { d }, [next])
    }
}
