//! One commit: a root and the pushes that wait on it become the next root. Pure: nothing here knows who else is
//! pushing, and the same arrivals in the same order give the same bits whether combined or one by one.

use super::block::{Block, Pool};
use super::buffers;
use super::ledger::{self, LedgerEntry, Seen};
use super::push::PushRecord;
use super::root::{OptimizerState, Root};
use super::ticket::Run;
use crate::dtype::Dtype;
use crate::layout::{Fragment, FragmentKind, Segment};
use crate::optim::{self, Isa, MAX_STATE, Source, Stepper, Target};
use crate::pipeline::Reason;
use crate::values;
use std::ops::Range;
use std::sync::Arc;

/// Elements worked on by all pushes of a batch before the next: parameters, state and gradients stay in L1.
const CHUNK: usize = 2048;

/// One push's contribution to this fragment.
pub(super) struct Arrival<'a> {
    pub(super) record: &'a PushRecord,
    /// The fragment's version that the worker had read.
    pub(super) base: u64,
    pub(super) payload: &'a [u8],
    pub(super) checksum: u32,
}

/// What became of an arrival.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    Applied {
        tau: u64,
        weight: f64,
    },
    /// An earlier attempt of the same push was applied here.
    Before,
    Refused(Reason, String),
}

/// The unchanging surroundings of a fragment's commits.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) fragment: &'a Fragment,
    pub(super) pool: &'a Arc<Pool>,
    pub(super) isa: Isa,
}

/// Applies arrivals in order. The new root is `None` when none of them moved anything.
pub(super) fn apply(
    place: Place<'_>,
    root: &Root,
    arrivals: &[Arrival<'_>],
) -> (Option<Root>, Vec<Decision>) {
    let mut decisions = Vec::with_capacity(arrivals.len());
    let mut ledger = root.ledger.to_vec();
    let mut moving: Vec<Moving<'_>> = Vec::with_capacity(arrivals.len());
    for arrival in arrivals {
        let version = root.version + moving.len() as u64;
        let decision = decide(root, version, &ledger, arrival);
        if let Decision::Applied { weight, .. } = decision {
            ledger::record(&mut ledger, arrival.record.worker, arrival.record.sequence, arrival.checksum);
            moving.push(Moving { arrival, weight });
        }
        decisions.push(decision);
    }
    if moving.is_empty() {
        return (None, decisions);
    }
    let one_optimizer = moving.windows(2).all(|w| w[0].run().epoch == w[1].run().epoch);
    let next = one_optimizer.then(|| commit(place, root, &moving, ledger)).flatten();
    match next {
        Some(next) => (Some(next), decisions),
        None if arrivals.len() == 1 => (None, vec![nonfinite(place, arrivals[0].payload)]),
        None => one_by_one(place, root, arrivals),
    }
}

/// The way taken when a batch cannot be combined: an optimizer changed within it, or some push's result is not
/// finite and must be refused without harming the others.
fn one_by_one(place: Place<'_>, root: &Root, arrivals: &[Arrival<'_>]) -> (Option<Root>, Vec<Decision>) {
    let mut latest: Option<Root> = None;
    let mut decisions = Vec::with_capacity(arrivals.len());
    for arrival in arrivals {
        let (next, mut decision) =
            apply(place, latest.as_ref().unwrap_or(root), std::slice::from_ref(arrival));
        latest = next.or(latest);
        decisions.append(&mut decision);
    }
    (latest, decisions)
}

fn decide(root: &Root, version: u64, ledger: &[LedgerEntry], arrival: &Arrival<'_>) -> Decision {
    let (record, ticket) = (arrival.record, &arrival.record.ticket);
    if ticket.term != root.term {
        let detail =
            format!("the push was admitted in term {}, the store is in term {}", ticket.term, root.term);
        return Decision::Refused(Reason::ServerRolledBack, detail);
    }
    match ledger::seen(ledger, record.worker, record.sequence, arrival.checksum) {
        Seen::New if record.is_revoked() => {
            let detail = "its worker's place was given to a newer process while it was under way";
            return Decision::Refused(Reason::Fenced, detail.to_owned());
        }
        Seen::New => {}
        Seen::Before => return Decision::Before,
        Seen::Conflict => {
            let detail = format!("sequence {} came again with other bytes", record.sequence);
            return Decision::Refused(Reason::Fenced, detail);
        }
    }
    if root.state.as_ref().is_some_and(|s| s.epoch > ticket.run.epoch) {
        let detail = "the optimizer was replaced while the push was under way".to_owned();
        return Decision::Refused(Reason::OptimizerChanged, detail);
    }
    let Some(tau) = version.checked_sub(arrival.base) else {
        let detail = format!("the push says it read version {}, the fragment is at {version}", arrival.base);
        return Decision::Refused(Reason::Failed, detail);
    };
    Decision::Applied { tau, weight: ticket.run.weight(tau) }
}

fn nonfinite(place: Place<'_>, payload: &[u8]) -> Decision {
    if values::all_finite(place.isa, place.fragment.dtype, payload) {
        let detail = "applying it would have made a parameter, in its own type, or an optimizer moment infinite or NaN";
        Decision::Refused(Reason::NonfiniteResult, detail.to_owned())
    } else {
        Decision::Refused(Reason::NonFinite, "the push holds NaN or infinite values".to_owned())
    }
}

struct Moving<'a> {
    arrival: &'a Arrival<'a>,
    weight: f64,
}

impl Moving<'_> {
    fn run(&self) -> &Run {
        &self.arrival.record.ticket.run
    }
}

/// Writes the next root, or `None` if any value of it would not be finite.
fn commit(place: Place<'_>, root: &Root, moving: &[Moving<'_>], ledger: Vec<LedgerEntry>) -> Option<Root> {
    let version = root.version + moving.len() as u64;
    let (data, state) = match place.fragment.kind {
        FragmentKind::Parameters => optimize(place, root, moving)?,
        FragmentKind::Buffers => (add_differences(place, root, moving), None),
    };
    Some(Root::new(place.fragment, (root.term, version), data, state, ledger.into_boxed_slice()))
}

fn add_differences(place: Place<'_>, root: &Root, moving: &[Moving<'_>]) -> Block {
    let (fragment, size) = (place.fragment, place.fragment.dtype.size());
    let mut data = place.pool.take(root.data.bytes().len());
    data.bytes_mut().copy_from_slice(root.data.bytes());
    for m in moving {
        let mut rest = m.arrival.payload;
        for segment in fragment.present_segments(&m.arrival.record.present) {
            let bytes = segment.len * size;
            let (value, after) = rest.split_at(bytes);
            let (base, after) = after.split_at(bytes);
            rest = after;
            let held = &mut data.bytes_mut()[segment.start * size..][..bytes];
            buffers::merge(fragment.dtype, held, value, base);
        }
    }
    data
}

fn optimize(place: Place<'_>, root: &Root, moving: &[Moving<'_>]) -> Option<(Block, Option<OptimizerState>)> {
    let fragment = place.fragment;
    let epoch = moving[0].run().epoch;
    let rules = || fragment.segments.iter().map(|s| &group(moving[0].run(), s).rule);
    let num_slots = rules().map(optim::state_slots).max().unwrap_or(0);
    let fresh;
    let source_state = match &root.state {
        Some(state) if state.epoch == epoch => state,
        _ => {
            fresh = initial_state(place, moving[0].run(), num_slots);
            &fresh
        }
    };
    let mut data = place.pool.take(root.data.bytes().len());
    let mut slots: [Option<Block>; MAX_STATE] =
        std::array::from_fn(|i| (i < num_slots).then(|| place.pool.take(fragment.len * 4)));
    let mut steps = source_state.steps.clone();
    let widened: Vec<Option<Block>> = moving.iter().map(|m| widen(place, m.arrival.payload)).collect();
    let mut cursors = vec![0_usize; moving.len()];
    for (index, segment) in fragment.segments.iter().enumerate() {
        let mut pushes: Vec<(Stepper, &[f32])> = Vec::with_capacity(moving.len());
        for (m, (wide, cursor)) in moving.iter().zip(widened.iter().zip(&mut cursors)) {
            if !m.arrival.record.present.has(segment.tensor) {
                continue;
            }
            let values = wide.as_ref().map_or_else(|| bytemuck::cast_slice(m.arrival.payload), Block::floats);
            steps[index] += 1;
            let number = m.run().group_of(segment.tensor);
            let lr = m.arrival.record.ticket.learning_rates[number];
            let stepper = Stepper::new(&group(m.run(), segment).rule, lr, m.weight, steps[index]);
            pushes.push((stepper, &values[*cursor..*cursor + segment.len]));
            *cursor += segment.len;
        }
        let chunk = if pushes.len() > 1 { CHUNK } else { segment.len };
        for start in (0..segment.len).step_by(chunk) {
            let part = start..segment.len.min(start + chunk);
            let held = segment.start + part.start..segment.start + part.end;
            let source =
                Source { param: &root.data.floats()[held.clone()], state: parts(&source_state.slots, &held) };
            if !step(place, &pushes, part, &source, target(&mut data, &mut slots, &held)) {
                return None;
            }
        }
    }
    Some((data, Some(OptimizerState { epoch, slots, steps })))
}

/// All pushes' steps on one run of elements; false if a value written is not finite, or would not be where it is sent.
fn step(
    place: Place<'_>,
    pushes: &[(Stepper, &[f32])],
    part: Range<usize>,
    source: &Source<'_>,
    mut to: Target<'_>,
) -> bool {
    let Some(((first, gradient), later)) = pushes.split_first() else {
        to.param.copy_from_slice(source.param);
        for (to, from) in to.state.iter_mut().zip(source.state) {
            to.copy_from_slice(from);
        }
        return true;
    };
    let Place { fragment: Fragment { dtype, .. }, isa, .. } = place;
    // Looked at after each push, so that a batch ends as its pushes one by one.
    let stays = |param: &[f32]| *dtype == Dtype::F32 || values::stay_finite(isa, *dtype, param);
    let mut finite = optim::step_into(isa, first, &gradient[part.clone()], source, to.reborrow());
    finite &= stays(to.param);
    for (stepper, gradient) in later {
        finite &= optim::step_in_place(isa, stepper, &gradient[part.clone()], to.reborrow());
        finite &= stays(to.param);
    }
    finite
}

fn group<'a>(run: &'a Run, segment: &Segment) -> &'a crate::spec::Group {
    run.group(segment.tensor)
}

fn initial_state(place: Place<'_>, run: &Run, num_slots: usize) -> OptimizerState {
    let fragment = place.fragment;
    let slots = std::array::from_fn(|slot| {
        (slot < num_slots).then(|| {
            let mut block = place.pool.take(fragment.len * 4);
            for segment in &fragment.segments {
                let value = optim::initial_state(&group(run, segment).rule, slot);
                block.floats_mut()[segment.start..segment.start + segment.len].fill(value);
            }
            block
        })
    });
    OptimizerState { epoch: run.epoch, slots, steps: vec![0; fragment.segments.len()].into() }
}

/// A 16-bit payload as f32; `None` for f32, which is used where it lies.
fn widen(place: Place<'_>, payload: &[u8]) -> Option<Block> {
    let dtype = place.fragment.dtype;
    (dtype != Dtype::F32).then(|| {
        let mut wide = place.pool.take(payload.len() / dtype.size() * 4);
        values::widen(dtype, payload, wide.floats_mut());
        wide
    })
}

fn parts<'a>(slots: &'a [Option<Block>; MAX_STATE], held: &Range<usize>) -> [&'a [f32]; MAX_STATE] {
    slots.each_ref().map(|slot| slot.as_ref().map_or(&[][..], |b| &b.floats()[held.clone()]))
}

fn target<'a>(
    data: &'a mut Block,
    slots: &'a mut [Option<Block>; MAX_STATE],
    held: &Range<usize>,
) -> Target<'a> {
    let state =
        slots.each_mut().map(|slot| slot.as_mut().map_or(&mut [][..], |b| &mut b.floats_mut()[held.clone()]));
    Target { param: &mut data.floats_mut()[held.clone()], state }
}
