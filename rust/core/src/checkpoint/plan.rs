//! Which tensors the files hold, under which names and in which order: the same for whoever writes and whoever reads.

use super::tensors::Planned;
use crate::dtype::Dtype;
use crate::layout::{Layout, Segment};
use crate::optim;
use crate::store::Run;
use crate::table::{Role, TensorSpec, TensorTable};

/// Parameters and buffers.
pub const MODEL: &str = "model.safetensors";
/// What the optimizer remembers; absent where it remembers nothing.
pub const OPTIMIZER: &str = "optimizer.safetensors";

/// The model file's tensors, each with its position in the table: the widest first, so that all are aligned.
pub(super) fn model(table: &TensorTable) -> Vec<(usize, Planned)> {
    let mut tensors: Vec<_> = table.tensors().iter().map(model_tensor).enumerate().collect();
    tensors.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.size()));
    tensors
}

/// A tensor as the model file holds it.
pub(super) fn model_tensor(spec: &TensorSpec) -> Planned {
    let dtype = match spec.role {
        Role::Parameter => Dtype::F32,
        Role::Buffer => spec.dtype,
    };
    Planned { name: spec.name.clone(), dtype, shape: shape(spec) }
}

/// The optimizer file's tensors, each with its position in the table and its slot; `has_state` says of which
/// parameters there is state.
pub(super) fn optimizer(
    table: &TensorTable,
    run: &Run,
    has_state: impl Fn(usize) -> bool,
) -> Vec<(usize, usize, Planned)> {
    let mut tensors = Vec::new();
    for (index, spec) in table.tensors().iter().enumerate().filter(|(index, _)| has_state(*index)) {
        for (slot, name) in optim::state_names(&run.group(index).rule).iter().enumerate() {
            tensors.push((index, slot, state_tensor(spec, name)));
        }
    }
    tensors
}

/// One array of a parameter's optimizer state.
pub(super) fn state_tensor(spec: &TensorSpec, state: &str) -> Planned {
    Planned { name: format!("{state}.{}", spec.name), dtype: Dtype::F32, shape: shape(spec) }
}

fn shape(spec: &TensorSpec) -> Vec<usize> {
    spec.shape.iter().map(|&n| n as usize).collect()
}

/// Where each tensor lies: the fragments' numbers with their segments, in the order of its elements.
pub(super) fn places(layout: &Layout) -> Vec<Vec<(usize, usize, Segment)>> {
    let mut places = vec![Vec::new(); layout.num_tensors()];
    for (number, fragment) in layout.fragments.iter().enumerate() {
        for (index, segment) in fragment.segments.iter().enumerate() {
            places[segment.tensor].push((number, index, *segment));
        }
    }
    places
}
