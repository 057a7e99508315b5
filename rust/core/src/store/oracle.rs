//! The obvious store: one lock around everything, one push at a time, every value computed where it lies by the
//! scalar kernels. It says what the lock-free store must produce for the same commits in the same order, and stays
//! in the tree for that: the same generated programs run over both.

use super::push::PushRecord;
use super::{Root, Store, buffers};
use crate::checksum::checksum;
use crate::dtype::Dtype;
use crate::layout::{FragmentKind, Layout};
use crate::optim::{self, Isa, MAX_STATE, Stepper, Target};
use crate::table::TensorTable;
use crate::values;
use std::sync::{Arc, Mutex, PoisonError};

/// A fragment's whole state, as two stores are compared by it.
#[derive(Clone, Debug, PartialEq)]
pub struct FragmentState {
    pub version: u64,
    pub held: Vec<u8>,
    /// (epoch, arrays, steps per segment); absent before the first step.
    pub optimizer: Option<(u32, Vec<Vec<u8>>, Vec<u64>)>,
}

/// What both stores offer, so that one program can be run over either.
pub trait FragmentStore {
    /// Applies one fragment of an admitted push whose worker had read version `base` of it. `payload`: wire bytes.
    fn apply(&self, push: &Arc<PushRecord>, fragment: usize, base: u64, payload: &[u8]);
    fn state(&self, fragment: usize) -> FragmentState;
}

struct Plain {
    version: u64,
    held: Vec<u8>,
    optimizer: Option<(u32, Vec<Vec<f32>>, Vec<u64>)>,
}

/// One `Mutex` around plain vectors.
pub struct MutexStore {
    layout: Layout,
    fragments: Mutex<Vec<Plain>>,
}

impl MutexStore {
    /// Filled like [`Store::new`].
    pub fn new(table: &TensorTable, fill: &mut dyn FnMut(usize, &mut [u8])) -> Self {
        let layout = Layout::of(table);
        let fragments = layout.fragments.iter().enumerate().map(|(index, fragment)| {
            let mut wire = vec![0; fragment.wire_bytes()];
            fill(index, &mut wire);
            let held = match fragment.kind {
                FragmentKind::Buffers => wire,
                FragmentKind::Parameters => to_bytes(&to_floats(fragment.dtype, &wire)),
            };
            Plain { version: 0, held, optimizer: None }
        });
        let fragments = Mutex::new(fragments.collect());
        Self { layout, fragments }
    }
}

impl FragmentStore for MutexStore {
    fn apply(&self, push: &Arc<PushRecord>, fragment: usize, base: u64, payload: &[u8]) {
        let mut all = self.fragments.lock().unwrap_or_else(PoisonError::into_inner);
        let plain = &mut all[fragment];
        let tau = plain.version - base;
        let fragment = &self.layout.fragments[fragment];
        let run = &push.ticket.run;
        let group = |tensor: usize| run.group(tensor);
        let mut at = 0;
        plain.version += 1;
        if fragment.kind == FragmentKind::Buffers {
            let size = fragment.dtype.size();
            for s in fragment.present_segments(&push.present) {
                let n = s.len * size;
                let held = &mut plain.held[s.start * size..][..n];
                buffers::merge(fragment.dtype, held, &payload[at..at + n], &payload[at + n..at + 2 * n]);
                at += 2 * n;
            }
            return;
        }
        let gradient = to_floats(fragment.dtype, payload);
        let num_slots =
            fragment.segments.iter().map(|s| optim::state_slots(&group(s.tensor).rule)).max().unwrap_or(0);
        if plain.optimizer.as_ref().is_none_or(|(epoch, ..)| *epoch != run.epoch) {
            let mut slots = vec![vec![0.0; fragment.len]; num_slots];
            for (i, slot) in slots.iter_mut().enumerate() {
                for s in &fragment.segments {
                    slot[s.start..s.start + s.len].fill(optim::initial_state(&group(s.tensor).rule, i));
                }
            }
            plain.optimizer = Some((run.epoch, slots, vec![0; fragment.segments.len()]));
        }
        let mut params = to_floats(Dtype::F32, &plain.held);
        let Some((_, slots, steps)) = &mut plain.optimizer else {
            return;
        };
        for (index, s) in fragment.segments.iter().enumerate().filter(|(_, s)| push.present.has(s.tensor)) {
            steps[index] += 1;
            let lr = push.ticket.learning_rates[run.group_of(s.tensor)];
            let stepper = Stepper::new(&group(s.tensor).rule, lr, run.weight(tau), steps[index]);
            let range = s.start..s.start + s.len;
            let mut state: [&mut [f32]; MAX_STATE] = Default::default();
            for (to, slot) in state.iter_mut().zip(slots.iter_mut()) {
                *to = &mut slot[range.clone()];
            }
            let target = Target { param: &mut params[range], state };
            optim::step_in_place(Isa::scalar(), &stepper, &gradient[at..at + s.len], target);
            at += s.len;
        }
        plain.held = to_bytes(&params);
    }

    fn state(&self, fragment: usize) -> FragmentState {
        let all = self.fragments.lock().unwrap_or_else(PoisonError::into_inner);
        let plain = &all[fragment];
        let optimizer = plain.optimizer.as_ref().map(|(epoch, slots, steps)| {
            (*epoch, slots.iter().map(|slot| to_bytes(slot)).collect(), steps.clone())
        });
        FragmentState { version: plain.version, held: plain.held.clone(), optimizer }
    }
}

impl FragmentStore for Arc<Store> {
    fn apply(&self, push: &Arc<PushRecord>, fragment: usize, base: u64, payload: &[u8]) {
        let mut staged = self.staging(payload.len());
        staged.bytes_mut().copy_from_slice(payload);
        // Dropping the submission drains whatever turn came with it.
        drop(self.submit_record(Arc::clone(push), fragment, base, staged, checksum(payload)));
    }

    fn state(&self, fragment: usize) -> FragmentState {
        state_of(&self.reader().root(fragment))
    }
}

fn state_of(root: &Root) -> FragmentState {
    let optimizer = root
        .state()
        .map(|s| (s.epoch, s.slots.iter().flatten().map(|b| b.bytes().to_vec()).collect(), s.steps.to_vec()));
    FragmentState { version: root.version(), held: root.held().to_vec(), optimizer }
}

fn to_floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / dtype.size()];
    values::widen(dtype, bytes, &mut out);
    out
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}
