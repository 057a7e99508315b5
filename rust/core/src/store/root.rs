//! A root: one immutable, complete state of a fragment. Publishing a root is the commit; holding one is a read.

use super::block::{Block, Pool};
use super::ledger::LedgerEntry;
use crate::checksum::checksum;
use crate::dtype::Dtype;
use crate::layout::{Fragment, FragmentKind};
use crate::optim::MAX_STATE;
use crate::values;
use std::sync::{Arc, OnceLock};

/// The optimizer's memory of a fragment.
#[derive(Debug)]
pub struct OptimizerState {
    /// Which optimizer made it ([`super::ticket::Run::epoch`]).
    pub epoch: u32,
    /// f32 arrays as long as the fragment; the rule says how many.
    pub slots: [Option<Block>; MAX_STATE],
    /// Steps taken, per segment: as in torch, a tensor without a gradient takes none.
    pub steps: Box<[u64]>,
}

/// One version of one fragment.
#[derive(Debug)]
pub struct Root {
    pub(super) term: u64,
    pub(super) version: u64,
    kind: FragmentKind,
    dtype: Dtype,
    pub(super) data: Block,
    pub(super) state: Option<OptimizerState>,
    pub(super) ledger: Box<[LedgerEntry]>,
    checksum: OnceLock<u32>,
}

impl Root {
    pub(super) fn new(
        fragment: &Fragment,
        (term, version): (u64, u64),
        data: Block,
        state: Option<OptimizerState>,
        ledger: Box<[LedgerEntry]>,
    ) -> Self {
        Self {
            term,
            version,
            kind: fragment.kind,
            dtype: fragment.dtype,
            data,
            state,
            ledger,
            checksum: OnceLock::new(),
        }
    }

    /// A root from wire bytes, without optimizer state.
    pub(super) fn from_wire(
        fragment: &Fragment,
        at: (u64, u64),
        wire: Block,
        ledger: Box<[LedgerEntry]>,
        pool: &Arc<Pool>,
    ) -> Self {
        let data = match (fragment.kind, fragment.dtype) {
            (FragmentKind::Buffers, _) | (FragmentKind::Parameters, Dtype::F32) => wire,
            (FragmentKind::Parameters, dtype) => {
                let mut held = pool.take(fragment.held_bytes());
                values::widen(dtype, wire.bytes(), held.floats_mut());
                held
            }
        };
        Self::new(fragment, at, data, None, ledger)
    }

    /// Updates applied to the fragment.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The life of the store in which the version counts.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The fragment as it travels. Float32 and buffers are sent from where they lie; f16 and bf16 are rounded from
    /// the f32 master into `scratch` first.
    #[must_use]
    pub fn payload<'a>(&'a self, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        if self.sent_as_held() {
            return self.data.bytes();
        }
        scratch.resize(self.data.bytes().len() / 4 * self.dtype.size(), 0);
        values::narrow(self.dtype, self.data.floats(), scratch);
        scratch
    }

    /// Checksum of [`Self::payload`], taken once for all the pulls of this version.
    #[must_use]
    pub fn payload_checksum(&self, scratch: &mut Vec<u8>) -> u32 {
        *self.checksum.get_or_init(|| checksum(self.payload(scratch)))
    }

    /// The parameters' f32 masters, or the buffers' raw bytes, as held.
    #[must_use]
    pub fn held(&self) -> &[u8] {
        self.data.bytes()
    }

    /// The optimizer's state, if the fragment has taken a step that left one.
    #[must_use]
    pub fn state(&self) -> Option<&OptimizerState> {
        self.state.as_ref()
    }

    /// Bytes of values and optimizer state that this root keeps alive.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let state =
            self.state.iter().flat_map(|s| s.slots.iter().flatten()).map(|b| b.bytes().len()).sum::<usize>();
        self.data.bytes().len() + state
    }

    /// Bytes of its memory of who has pushed what: 16 for each worker slot.
    pub(super) fn ledger_bytes(&self) -> usize {
        size_of_val(&*self.ledger)
    }

    fn sent_as_held(&self) -> bool {
        self.kind == FragmentKind::Buffers || self.dtype == Dtype::F32
    }
}
