//! The payload of one fragment: found where it lies, or made, in the moment before it leaves.

use super::held::Held;
use super::memory::{MAX_RUNS, Memory, checksum_of, with_slices};
use super::model::{Model, bytes_of};
use super::momentum::Momentum;
use bytemuck::cast_slice;
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{Presence, Segment};
use offbeat_core::values::narrow;
use std::io::IoSlice;
use std::sync::Arc;

/// What the fragments of a call are made of.
#[derive(Debug)]
pub(super) enum Content<'m> {
    /// The call has none.
    Nothing,
    /// Gradients (or deltas) and changed buffers.
    Push {
        values: &'m [Option<Memory<'m>>],
        present: Arc<Presence>,
        /// The version of every fragment that the worker has read.
        versions: Vec<u64>,
        /// Where the parameters as they were read lie, if they still lie in the caller's memory.
        x_read: Option<&'m [Memory<'m>]>,
    },
    /// A new model's values.
    Values(&'m [&'m [u8]]),
}

/// What making a fragment needs of the client, and changes in it.
#[derive(Debug)]
pub(super) struct Makings<'c> {
    /// `None` until there is a model; then no call has fragments.
    pub(super) model: Option<&'c Model>,
    pub(super) held: Option<&'c mut Held>,
    pub(super) momentum: Option<&'c mut Momentum>,
    /// The values of buffers as they were sent, where that counts once the push has settled; `None`: it counts at
    /// once.
    pub(super) buffers_sent: Option<&'c mut Vec<(usize, Vec<u8>)>>,
}

/// Where a payload lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// There is none.
    #[default]
    Nowhere,
    /// In the caller's memory.
    Runs { fragment: usize },
    /// In `bytes`.
    Bytes,
    /// In `wide`.
    Wide,
}

/// One payload at a time. Its memory is used again.
#[derive(Debug, Default)]
pub(super) struct Payload {
    place: Place,
    len: usize,
    bytes: Vec<u8>,
    wide: Vec<f32>,
}

impl Payload {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn clear(&mut self) {
        (self.place, self.len) = (Place::Nowhere, 0);
        self.bytes.clear();
        self.wide.clear();
    }

    /// The checksum, while what was made is warm.
    pub(super) fn checksum(&self, content: &Content<'_>, with: &Makings<'_>) -> u32 {
        match (self.place, content, with.model) {
            (Place::Runs { fragment }, Content::Push { values, present, .. }, Some(model)) => {
                checksum_of(model.present_runs(fragment, present, values))
            }
            (Place::Wide, _, _) => checksum(cast_slice(&self.wide)),
            (Place::Nowhere | Place::Runs { .. } | Place::Bytes, _, _) => checksum(&self.bytes),
        }
    }

    /// Runs `f` on `head` and what follows the payload's first `skip` bytes.
    pub(super) fn with_slices<R>(
        &self,
        content: &Content<'_>,
        with: &Makings<'_>,
        head: &[u8],
        skip: usize,
        f: impl FnOnce(&[IoSlice<'_>]) -> R,
    ) -> R {
        match (self.place, content, with.model) {
            (Place::Runs { fragment }, Content::Push { values, present, .. }, Some(model)) => {
                with_slices(head, model.present_runs(fragment, present, values), skip, f)
            }
            (Place::Wide, _, _) => f(&[IoSlice::new(head), IoSlice::new(&cast_slice(&self.wide)[skip..])]),
            (Place::Nowhere | Place::Runs { .. } | Place::Bytes, _, _) => {
                f(&[IoSlice::new(head), IoSlice::new(&self.bytes[skip..])])
            }
        }
    }

    /// Finds or makes a fragment's payload.
    pub(super) fn make(&mut self, content: &Content<'_>, fragment: usize, with: &mut Makings<'_>) {
        self.clear();
        let Makings { model: Some(model), held, momentum, buffers_sent } = with else {
            return;
        };
        match content {
            Content::Nothing => {}
            Content::Values(values) => {
                let layout = &model.layout.fragments[fragment];
                for s in &layout.segments {
                    self.bytes.extend_from_slice(&values[s.tensor][bytes_of(layout, s.offset, s.len)]);
                }
                (self.place, self.len) = (Place::Bytes, self.bytes.len());
            }
            Content::Push { values, present, x_read, .. } => match (held, momentum) {
                (Some(held), _) if model.is_buffers(fragment) => {
                    let sent = self.change(model, fragment, present, values, held);
                    match buffers_sent {
                        Some(buffers_sent) => {
                            buffers_sent.retain(|(f, _)| *f != fragment); // on a connection that was lost
                            buffers_sent.push((fragment, sent));
                        }
                        None => held.pushed(model, fragment, present, &sent),
                    }
                }
                (held, Some(momentum)) => {
                    let copy = held.as_ref().and_then(|held| held.parameters(fragment));
                    self.correct(model, fragment, present, values, momentum, *x_read, copy);
                }
                (_, None) => self.find(model, fragment, present, values),
            },
        }
    }

    /// Gradients as they are: where they lie, unless they are scattered too far.
    fn find(&mut self, model: &Model, fragment: usize, present: &Presence, values: &[Option<Memory<'_>>]) {
        let runs = || model.present_runs(fragment, present, values);
        let (count, bytes) = runs().fold((0, 0), |(n, bytes), (_, range)| (n + 1, bytes + range.len()));
        (self.place, self.len) = (Place::Runs { fragment }, bytes);
        if count > MAX_RUNS {
            for (memory, range) in runs() {
                memory.read(range, |bytes| self.bytes.extend_from_slice(bytes));
            }
            self.place = Place::Bytes;
        }
    }

    /// Buffers: new and old value, segment by segment. Returns the new ones.
    fn change(
        &mut self,
        model: &Model,
        fragment: usize,
        present: &Presence,
        values: &[Option<Memory<'_>>],
        held: &Held,
    ) -> Vec<u8> {
        let layout = &model.layout.fragments[fragment];
        let old = held.buffers(fragment);
        let mut sent = Vec::with_capacity(layout.wire_bytes());
        for s in layout.present_segments(present) {
            let Some(memory) = &values[s.tensor] else { continue };
            let from = sent.len();
            memory.read(bytes_of(layout, s.offset, s.len), |new| {
                sent.extend_from_slice(new);
            });
            self.bytes.extend_from_slice(&sent[from..]);
            self.bytes.extend_from_slice(&old[bytes_of(layout, s.start, s.len)]);
        }
        (self.place, self.len) = (Place::Bytes, self.bytes.len());
        sent
    }

    /// Gradients with this worker's momentum.
    #[expect(clippy::too_many_arguments, reason = "one formula's operands; a struct would only rename them")]
    fn correct(
        &mut self,
        model: &Model,
        fragment: usize,
        present: &Presence,
        values: &[Option<Memory<'_>>],
        momentum: &mut Momentum,
        x_read: Option<&[Memory<'_>]>,
        copy: Option<&[u8]>,
    ) {
        let layout = &model.layout.fragments[fragment];
        let read = |s: &Segment, needs_x: bool, to: &mut dyn FnMut(&[u8], &[u8])| {
            let Some(memory) = &values[s.tensor] else { return };
            let range = bytes_of(layout, s.offset, s.len);
            memory.read(range.clone(), |grad| match (needs_x, x_read, copy) {
                (false, _, _) => to(grad, &[]),
                (true, Some(out), _) => out[s.tensor].read(range, |x| to(grad, x)),
                (true, None, Some(x)) => to(grad, &x[bytes_of(layout, s.start, s.len)]),
                (true, None, None) => unreachable!("looked for before the push began"),
            });
        };
        momentum.correct(model, fragment, present, read, &mut self.wide);
        self.len = self.wide.len() * layout.dtype.size();
        self.place = Place::Wide;
        if layout.dtype != Dtype::F32 || cfg!(target_endian = "big") {
            self.bytes.resize(self.len, 0);
            narrow(layout.dtype, &self.wide, &mut self.bytes);
            self.place = Place::Bytes;
        }
    }
}
