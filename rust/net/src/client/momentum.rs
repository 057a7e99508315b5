//! This worker's own velocity (DANA-Slim, see [`offbeat_core::velocity`]): which tensors have one, what is sent in a
//! gradient's place, and when the next velocity becomes the velocity.
//!
//! With one push in flight the next velocity waits beside the old one until the push has settled: it is taken if any
//! of the push was applied, else forgotten, and nothing has moved. That is two f32 per parameter. With two in flight
//! the second push is made before the first has settled, so the next velocity is taken when it is sent: one f32 per
//! parameter, and a rejection costs it its exactness.

use super::model::Model;
use bytemuck::try_cast_slice;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{Presence, Segment};
use offbeat_core::optim::Isa;
use offbeat_core::pipeline::groups;
use offbeat_core::spec::{OptimizerSpec, Rule};
use offbeat_core::values::widen;
use offbeat_core::velocity;

/// When what a push does to its worker counts: a next velocity is taken, a buffer's change is no longer news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// One push in flight: when the push has settled as applied.
    Settled,
    /// Two: when it is sent.
    Sent,
}

/// A group's part of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Group {
    mu: f64,
    weight_decay: f64,
    maximize: bool,
}

/// The velocities of a worker's parameters.
#[derive(Debug)]
pub(super) struct Momentum {
    isa: Isa,
    keep: Keep,
    /// Per tensor; `None` for one whose group has another rule than SGD, and for buffers.
    groups: Vec<Option<Group>>,
    /// Per tensor: whether it has a velocity. Its first push makes it, as torch's first step does.
    has: Vec<bool>,
    /// Per fragment, elements in the fragment's order; empty until needed.
    velocity: Vec<Vec<f32>>,
    /// With [`Keep::Settled`]; with [`Keep::Sent`] one fragment's memory serves all.
    next: Vec<Vec<f32>>,
    next_of_one: Vec<f32>,
    work: Work,
}

/// Memory for a segment that does not lie as f32.
#[derive(Debug, Default)]
struct Work {
    grad: Vec<f32>,
    x_read: Vec<f32>,
}

impl Momentum {
    pub(super) fn new(model: &Model, optimizer: &OptimizerSpec, keep: Keep) -> Self {
        let group_of = groups::assign(&optimizer.groups, &model.table);
        let group = |index: &u16| match optimizer.groups.get(usize::from(*index))?.rule {
            Rule::Sgd { momentum, weight_decay, maximize, dampening: _, nesterov: _ } => {
                Some(Group { mu: momentum, weight_decay, maximize })
            }
            Rule::Adam { .. }
            | Rule::Adagrad { .. }
            | Rule::RmsProp { .. }
            | Rule::DelayedNesterov { .. }
            | Rule::Add => None,
        };
        Self {
            isa: Isa::detect(),
            keep,
            groups: group_of.iter().map(group).collect(),
            has: vec![false; model.table.len()],
            velocity: vec![Vec::new(); model.num_fragments()],
            next: vec![Vec::new(); model.num_fragments()],
            next_of_one: Vec::new(),
            work: Work::default(),
        }
    }

    /// Whether the formula asks for the parameters that were read.
    pub(super) fn reads_parameters(&self) -> bool {
        self.groups.iter().flatten().any(|g| g.weight_decay != 0.0)
    }

    /// Corrects a whole fragment of a push. `read` gives a segment's gradient, and its parameters as they were read
    /// where they are asked for, to its closure; the results are appended to `out`, as f32.
    pub(super) fn correct(
        &mut self,
        model: &Model,
        fragment: usize,
        present: &Presence,
        mut read: impl FnMut(&Segment, bool, &mut dyn FnMut(&[u8], &[u8])),
        out: &mut Vec<f32>,
    ) {
        let index = fragment;
        let fragment = &model.layout.fragments[index];
        let velocity = &mut self.velocity[index];
        velocity.resize(fragment.len, 0.0);
        let next = match self.keep {
            Keep::Settled => &mut self.next[index],
            Keep::Sent => &mut self.next_of_one,
        };
        if fragment.present_segments(present).count() < fragment.segments.len() {
            next.clone_from(velocity); // what the push does not bring keeps its velocity
        } else {
            next.resize(fragment.len, 0.0);
        }
        for segment in fragment.present_segments(present) {
            let from = out.len();
            out.resize(from + segment.len, 0.0);
            let out = &mut out[from..];
            let Some(group) = self.groups[segment.tensor] else {
                read(segment, false, &mut |grad, _| widen(fragment.dtype, grad, out));
                continue;
            };
            let at = segment.start..segment.start + segment.len;
            let first = !self.has[segment.tensor];
            let Work { grad: grad_work, x_read: x_work } = &mut self.work;
            read(segment, group.weight_decay != 0.0, &mut |grad, x_read| {
                let grad = as_f32(fragment.dtype, grad, grad_work);
                let x_read = as_f32(fragment.dtype, x_read, x_work);
                let (v, next) = (&velocity[at.clone()], &mut next[at.clone()]);
                let Group { mu, weight_decay, maximize } = group;
                // A result that overflows is refused by the server; the gradient itself was found finite.
                velocity::correct(self.isa, mu, weight_decay, maximize, first, grad, x_read, v, next, out);
            });
        }
        if self.keep == Keep::Sent {
            std::mem::swap(velocity, next);
        }
    }

    /// All fragments of a push are made.
    pub(super) fn sent(&mut self, present: &Presence) {
        if self.keep == Keep::Sent {
            self.mark(present);
        }
    }

    /// A push has settled, and some of it was applied.
    pub(super) fn applied(&mut self, fragments: &[usize], present: &Presence) {
        if self.keep == Keep::Settled {
            for &fragment in fragments {
                std::mem::swap(&mut self.velocity[fragment], &mut self.next[fragment]);
            }
            self.mark(present);
        }
    }

    fn mark(&mut self, present: &Presence) {
        for (tensor, has) in self.has.iter_mut().enumerate() {
            *has |= present.has(tensor);
        }
    }
}

/// Bytes as f32: in place where they are that, else converted into `work`.
fn as_f32<'a>(dtype: Dtype, bytes: &'a [u8], work: &'a mut Vec<f32>) -> &'a [f32] {
    if dtype == Dtype::F32
        && cfg!(target_endian = "little")
        && let Ok(values) = try_cast_slice(bytes)
    {
        return values;
    }
    work.resize(bytes.len() / dtype.size(), 0.0);
    widen(dtype, bytes, work);
    work
}
