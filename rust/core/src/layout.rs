//! How a model's tensors are cut into fragments: the one unit of work, version, sharing, checksum and placement.
//! A pure function of the tensor table, so both ends compute the same cut and neither has to send it.

use crate::dtype::Dtype;
use crate::table::{MAX_ELEMENTS, Role, TensorTable};

/// Most elements of a fragment: 64 Ki f32 are 256 KiB, so that staging, source and target stay in L2 together.
pub const FRAGMENT_ELEMENTS: u64 = 64 * 1024;

/// Parameters and buffers of each dtype: a fragment that is not full ends each.
const MAX_CLASSES: usize = 2 * Dtype::ALL.len();
/// Most fragments of a model.
pub const MAX_FRAGMENTS: usize = (MAX_ELEMENTS / FRAGMENT_ELEMENTS) as usize + MAX_CLASSES;

/// A run of consecutive elements of one tensor inside a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position of the tensor in the table.
    pub tensor: usize,
    /// First element of the run, in the tensor's logical (C) order.
    pub offset: usize,
    /// Elements in the run, at least 1.
    pub len: usize,
    /// First element of the run inside the fragment.
    pub start: usize,
}

/// What a fragment holds; parameters and buffers never share one, nor do two element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FragmentKind {
    /// Held as f32, whatever `dtype` travels; moved by the optimizer.
    Parameters,
    /// Held in its own dtype; moved by the difference a worker's forward pass made.
    Buffers,
}

/// One fragment of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    pub kind: FragmentKind,
    pub dtype: Dtype,
    pub segments: Vec<Segment>,
    /// Elements in all segments together.
    pub len: usize,
}

impl Fragment {
    /// Bytes of a pull's payload.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Bytes of a push's payload when every tensor is present: a gradient for parameters; for buffers the
    /// worker's value followed, segment by segment, by the value it had pulled.
    #[must_use]
    pub fn push_bytes(&self, present: &Presence) -> usize {
        self.present_segments(present).map(|s| s.len).sum::<usize>() * self.dtype.size() * self.push_copies()
    }

    /// How many values of each element a push carries: one gradient, or a buffer's new and old value.
    #[must_use]
    pub const fn push_copies(&self) -> usize {
        match self.kind {
            FragmentKind::Parameters => 1,
            FragmentKind::Buffers => 2,
        }
    }

    /// Bytes of one root's data: f32 for parameters, the own dtype for buffers.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        match self.kind {
            FragmentKind::Parameters => self.len * 4,
            FragmentKind::Buffers => self.wire_bytes(),
        }
    }

    /// The segments whose tensor a push brought, in order; their elements follow each other in its payload.
    pub fn present_segments<'a>(&'a self, present: &'a Presence) -> impl Iterator<Item = &'a Segment> {
        self.segments.iter().filter(|s| present.has(s.tensor))
    }
}

/// All fragments of a model: parameters first (by dtype, in table order), then buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub fragments: Vec<Fragment>,
    num_tensors: usize,
}

impl Layout {
    /// Cuts a table. Small tensors share a fragment; a large one spans several.
    #[must_use]
    pub fn of(table: &TensorTable) -> Self {
        let mut fragments = Vec::new();
        let mut classes: Vec<(Role, Dtype)> = Vec::new();
        for t in table.tensors() {
            if !classes.contains(&(t.role, t.dtype)) {
                classes.push((t.role, t.dtype));
            }
        }
        classes.sort_by_key(|&(role, _)| role == Role::Buffer); // stable: keeps the table's order within a role
        for (role, dtype) in classes {
            let kind = if role == Role::Parameter { FragmentKind::Parameters } else { FragmentKind::Buffers };
            let mut open = Fragment { kind, dtype, segments: Vec::new(), len: 0 };
            for (tensor, t) in
                table.tensors().iter().enumerate().filter(|(_, t)| t.role == role && t.dtype == dtype)
            {
                let total = usize::try_from(t.num_elements()).unwrap_or(usize::MAX);
                let mut offset = 0;
                while offset < total {
                    let room = FRAGMENT_ELEMENTS as usize - open.len;
                    let len = room.min(total - offset);
                    open.segments.push(Segment { tensor, offset, len, start: open.len });
                    open.len += len;
                    offset += len;
                    if open.len == FRAGMENT_ELEMENTS as usize {
                        let full = std::mem::replace(
                            &mut open,
                            Fragment { kind, dtype, segments: Vec::new(), len: 0 },
                        );
                        fragments.push(full);
                    }
                }
            }
            if open.len > 0 {
                fragments.push(open);
            }
        }
        Self { fragments, num_tensors: table.len() }
    }

    #[must_use]
    pub fn num_tensors(&self) -> usize {
        self.num_tensors
    }

    /// The fragments a push with these tensors touches, in order.
    pub fn present_fragments<'a>(&'a self, present: &'a Presence) -> impl Iterator<Item = usize> + 'a {
        (0..self.fragments.len()).filter(|&i| self.fragments[i].present_segments(present).next().is_some())
    }
}

/// Which tensors a push brings: one bit per tensor of the table. An absent one (frozen, `grad is None`) has no
/// step, no decay and no momentum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Presence {
    bits: Vec<u8>,
    num_tensors: usize,
}

impl Presence {
    /// Every tensor.
    #[must_use]
    pub fn all(num_tensors: usize) -> Self {
        Self::from_fn(num_tensors, |_| true)
    }

    /// The tensors for which `has` says so.
    #[must_use]
    pub fn from_fn(num_tensors: usize, has: impl Fn(usize) -> bool) -> Self {
        let mut bits = vec![0; num_tensors.div_ceil(8)];
        for i in (0..num_tensors).filter(|&i| has(i)) {
            bits[i / 8] |= 1 << (i % 8);
        }
        Self { bits, num_tensors }
    }

    /// Reads the wire's form; `None` if the length is not that of the table or a bit beyond it is set.
    #[must_use]
    pub fn from_bytes(num_tensors: usize, bytes: &[u8]) -> Option<Self> {
        let read = Self { bits: bytes.to_vec(), num_tensors };
        let exact = Self::from_fn(num_tensors, |i| i / 8 < bytes.len() && read.has(i));
        (exact == read).then_some(read)
    }

    /// The wire's form: little-endian bits, ⌈n/8⌉ bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bits
    }

    #[must_use]
    pub fn has(&self, tensor: usize) -> bool {
        self.bits.get(tensor / 8).is_some_and(|b| b >> (tensor % 8) & 1 == 1)
    }

    /// How many tensors are present.
    #[must_use]
    pub fn count(&self) -> usize {
        (0..self.num_tensors).filter(|&i| self.has(i)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::TensorSpec;
    use proptest::prelude::*;

    fn table(sizes: &[(u64, Dtype, Role)]) -> TensorTable {
        let specs = sizes.iter().enumerate().map(|(i, &(n, dtype, role))| TensorSpec {
            name: format!("t{i}"),
            aliases: vec![],
            shape: vec![n],
            dtype,
            role,
        });
        TensorTable::new(specs.collect()).unwrap()
    }

    proptest! {
        #[test]
        fn every_element_is_in_exactly_one_fragment(sizes in prop::collection::vec(
            (0_u64..200_000, prop::sample::select(vec![Dtype::F32, Dtype::BF16]),
             prop::sample::select(vec![Role::Parameter, Role::Buffer])), 1..12)) {
            let table = table(&sizes);
            let layout = Layout::of(&table);
            let mut seen = vec![0_u64; table.len()];
            for f in &layout.fragments {
                prop_assert!(f.len > 0 && f.len <= FRAGMENT_ELEMENTS as usize);
                let mut start = 0;
                for s in &f.segments {
                    prop_assert_eq!(s.start, start);
                    prop_assert_eq!(s.offset as u64, seen[s.tensor]);
                    seen[s.tensor] += s.len as u64;
                    start += s.len;
                }
                prop_assert_eq!(start, f.len);
            }
            for (t, n) in table.tensors().iter().zip(seen) {
                prop_assert_eq!(t.num_elements(), n);
            }
        }

        #[test]
        fn presence_survives_the_wire(bits in prop::collection::vec(any::<bool>(), 1..70)) {
            let p = Presence::from_fn(bits.len(), |i| bits[i]);
            prop_assert_eq!(Presence::from_bytes(bits.len(), p.as_bytes()), Some(p.clone()));
            prop_assert_eq!(p.count(), bits.iter().filter(|b| **b).count());
            prop_assert_eq!(Presence::from_bytes(bits.len() + 8, p.as_bytes()), None);
        }
    }

    #[test]
    fn a_bit_beyond_the_table_is_refused() {
        assert_eq!(Presence::from_bytes(3, &[0b1000]), None);
    }

    #[test]
    fn a_25_million_model_has_382_fragments() {
        let layout = Layout::of(&table(&[(25_000_000, Dtype::F32, Role::Parameter)]));
        assert_eq!(layout.fragments.len(), 382);
    }
}
