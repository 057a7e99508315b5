//! A model's values as whole tensors, and as the fragments in which a store holds them and a connection carries them.

use offbeat_core::layout::Layout;
use offbeat_core::store::{Root, Store};
use offbeat_core::table::{TensorSpec, TensorTable};
use std::sync::Arc;

/// A model's table and each tensor's bytes (own dtype, little-endian, C order).
pub type Tensors = (Arc<TensorTable>, Vec<Vec<u8>>);

/// Copies the model that these roots of a store are, fragment by fragment.
pub(crate) fn copied(store: &Store, roots: impl IntoIterator<Item = Arc<Root>>) -> Tensors {
    let (table, layout) = (Arc::clone(store.table()), store.layout());
    let bytes = |t: &TensorSpec| t.num_elements() as usize * t.dtype.size();
    let mut tensors: Vec<Vec<u8>> = table.tensors().iter().map(|t| vec![0; bytes(t)]).collect();
    let mut scratch = Vec::new();
    for (index, root) in roots.into_iter().enumerate() {
        scatter(layout, index, root.payload(&mut scratch), &mut tensors);
    }
    (table, tensors)
}

/// Copies tensors into the payload of fragment `index`.
pub(crate) fn gather(layout: &Layout, tensors: &[impl AsRef<[u8]>], index: usize, payload: &mut [u8]) {
    let fragment = &layout.fragments[index];
    let size = fragment.dtype.size();
    for s in &fragment.segments {
        let from = &tensors[s.tensor].as_ref()[s.offset * size..][..s.len * size];
        payload[s.start * size..][..s.len * size].copy_from_slice(from);
    }
}

/// Copies the payload of fragment `index` into tensors.
fn scatter(layout: &Layout, index: usize, payload: &[u8], tensors: &mut [Vec<u8>]) {
    let fragment = &layout.fragments[index];
    let size = fragment.dtype.size();
    for s in &fragment.segments {
        let to = &mut tensors[s.tensor][s.offset * size..][..s.len * size];
        to.copy_from_slice(&payload[s.start * size..][..s.len * size]);
    }
}
