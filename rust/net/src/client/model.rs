//! The server's model as a client handles it: which bytes of which tensor a fragment is made of, and whether the
//! memory a caller gives fits.

use super::error::ClientError;
use super::memory::{Memory, check_disjoint};
use offbeat_core::layout::{Fragment, FragmentKind, Layout, Presence};
use offbeat_core::table::{Role, TensorTable};
use std::ops::Range;
use std::sync::Arc;

/// A table and the layout that follows from it.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) table: Arc<TensorTable>,
    pub(super) layout: Layout,
    /// What most pushes bring.
    all: (Arc<Presence>, Arc<[usize]>),
    pub(super) has_buffers: bool,
}

impl Model {
    pub(super) fn new(table: Arc<TensorTable>) -> Self {
        let layout = Layout::of(&table);
        let all = (Arc::new(Presence::all(table.len())), (0..layout.fragments.len()).collect());
        let has_buffers = table.tensors().iter().any(|t| t.role == Role::Buffer);
        Self { table, layout, all, has_buffers }
    }

    /// Every tensor, so every fragment.
    pub(super) fn all(&self) -> (Arc<Presence>, Arc<[usize]>) {
        self.all.clone()
    }

    /// Whether this is every tensor.
    pub(super) fn is_all(&self, present: &Arc<Presence>) -> bool {
        Arc::ptr_eq(present, &self.all.0) || **present == *self.all.0
    }

    pub(super) fn num_fragments(&self) -> usize {
        self.layout.fragments.len()
    }

    pub(super) fn is_buffers(&self, fragment: usize) -> bool {
        self.layout.fragments[fragment].kind == FragmentKind::Buffers
    }

    pub(super) fn tensor_bytes(&self, tensor: usize) -> usize {
        let t = &self.table.tensors()[tensor];
        usize::try_from(t.num_elements()).unwrap_or(usize::MAX).saturating_mul(t.dtype.size())
    }

    /// The memory of a whole fragment, in order.
    pub(super) fn runs<'m>(
        &self,
        fragment: usize,
        memories: &'m [Memory<'m>],
    ) -> impl Iterator<Item = (&'m Memory<'m>, Range<usize>)> {
        let fragment = &self.layout.fragments[fragment];
        fragment.segments.iter().map(|s| (&memories[s.tensor], bytes_of(fragment, s.offset, s.len)))
    }

    /// The memory of the tensors of a fragment that a push brings, in order.
    pub(super) fn present_runs<'a, 'm>(
        &'a self,
        fragment: usize,
        present: &'a Presence,
        memories: &'m [Option<Memory<'m>>],
    ) -> impl Iterator<Item = (&'m Memory<'m>, Range<usize>)> + use<'a, 'm> {
        let fragment = &self.layout.fragments[fragment];
        let runs = fragment.present_segments(present);
        runs.filter_map(|s| Some((memories[s.tensor].as_ref()?, bytes_of(fragment, s.offset, s.len))))
    }

    /// Copies a fragment's bytes into the memory it belongs to.
    pub(super) fn scatter(&self, fragment: usize, bytes: &[u8], memories: &[Memory<'_>]) {
        let mut rest = bytes;
        for (memory, range) in self.runs(fragment, memories) {
            let (head, tail) = rest.split_at(range.len());
            memory.write(range, |to| to.copy_from_slice(head));
            rest = tail;
        }
    }

    /// Whether `out` is one memory per tensor, each of its size, none twice.
    pub(super) fn check_out(&self, out: &[Memory<'_>]) -> Result<(), ClientError> {
        self.check_count("out", out.len())?;
        for (tensor, memory) in out.iter().enumerate() {
            self.check_size("out", tensor, memory.len())?;
        }
        if let Some((a, b)) = check_disjoint(out) {
            let name = |i: usize| &self.table.tensors()[i].name;
            let message = format!("out gives the same memory to tensors {:?} and {:?}", name(a), name(b));
            return Err(ClientError::bad_input(message));
        }
        Ok(())
    }

    /// Whether the values of a push are one per tensor, each absent or of its size, and not all absent.
    pub(super) fn check_values(&self, values: &[Option<Memory<'_>>]) -> Result<(), ClientError> {
        self.check_count("a push", values.len())?;
        for (tensor, memory) in values.iter().enumerate() {
            if let Some(memory) = memory {
                self.check_size("a push", tensor, memory.len())?;
            }
        }
        if values.iter().all(Option::is_none) {
            return Err(ClientError::bad_input(
                "a push without any gradient: give that of one parameter at least (in torch, call backward() first)",
            ));
        }
        Ok(())
    }

    pub(super) fn check_count(&self, what: &str, given: usize) -> Result<(), ClientError> {
        if given == self.table.len() {
            return Ok(());
        }
        let message = format!("{what} has {given} tensors, the model has {}", self.table.len());
        Err(ClientError::bad_input(message))
    }

    pub(super) fn check_size(&self, what: &str, tensor: usize, given: usize) -> Result<(), ClientError> {
        let due = self.tensor_bytes(tensor);
        if given == due {
            return Ok(());
        }
        let t = &self.table.tensors()[tensor];
        Err(ClientError::bad_input(format!("{what} gives {given} bytes to tensor {t}, which has {due}")))
    }
}

/// A run of elements of a tensor, in bytes.
pub(super) fn bytes_of(fragment: &Fragment, offset: usize, len: usize) -> Range<usize> {
    let size = fragment.dtype.size();
    offset * size..(offset + len) * size
}
