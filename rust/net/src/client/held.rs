//! What this worker has read: the versions its next push is based on, and copies of what that push must be compared
//! with.

use super::memory::Memory;
use super::model::{Model, bytes_of};
use offbeat_core::layout::Presence;
use offbeat_core::table::Role;
use std::sync::Arc;

/// The state of the caller's `out` memory, as far as this client wrote it.
#[derive(Debug)]
pub(super) struct Held {
    /// The life of the store that the versions belong to.
    pub(super) term: u64,
    /// The model's version that was read.
    pub(super) version: u64,
    /// Per fragment, the version that was read.
    pub(super) versions: Vec<u64>,
    /// Whether anything was read: a gradient belongs to parameters that were.
    pub(super) ready: bool,
    /// Fragments of `out` that a broken-off call left half written; their version is the older one, and until they
    /// have come whole nothing may be answered by "unchanged".
    torn: Vec<bool>,
    /// Per fragment of buffers, its bytes as pulled, or as pushed since: what a push's new value is compared with.
    buffers: Vec<Vec<u8>>,
    /// Per fragment of buffers that were pushed since, its bytes as pulled: a push that is rejected leaves them so.
    pulled: Vec<Option<Vec<u8>>>,
    /// Per fragment of parameters, its bytes as pulled, where the next push needs them and cannot find them in `out`.
    parameters: Option<Vec<Vec<u8>>>,
}

impl Held {
    pub(super) fn new(model: &Model) -> Self {
        let n = model.num_fragments();
        Self {
            term: 0,
            version: 0,
            versions: vec![0; n],
            ready: false,
            torn: vec![false; n],
            buffers: vec![Vec::new(); n],
            pulled: vec![None; n],
            parameters: None,
        }
    }

    /// The model is what this worker brought.
    pub(super) fn brought(&mut self, model: &Model, term: u64, values: &[&[u8]]) {
        (self.term, self.version, self.ready) = (term, 0, true);
        for (f, fragment) in model.layout.fragments.iter().enumerate() {
            let segments =
                fragment.segments.iter().map(|s| &values[s.tensor][bytes_of(fragment, s.offset, s.len)]);
            let bytes: Vec<u8> = segments.flatten().copied().collect();
            self.arrived(model, f, 0, Some(&bytes));
        }
    }

    /// Whether a request may say which versions are here already.
    pub(super) fn is_whole(&self) -> bool {
        self.ready && !self.torn.contains(&true)
    }

    /// The fragment in `out` is about to be overwritten, and may stay so.
    pub(super) fn tear(&mut self, fragment: usize) {
        self.torn[fragment] = true;
    }

    /// Keeps copies of parameters from now on, or no longer.
    pub(super) fn keep_parameters(&mut self, model: &Model, keep: bool) {
        if !keep {
            self.parameters = None;
        } else if self.parameters.is_none() {
            self.parameters = Some(vec![Vec::new(); model.num_fragments()]);
        }
    }

    /// Keeps copies of parameters from now on, beginning with those that lie in `out`.
    pub(super) fn copy_parameters(&mut self, model: &Model, out: &[Memory<'_>]) {
        let copies = model.layout.fragments.iter().enumerate().map(|(f, fragment)| {
            let mut bytes = Vec::new();
            for s in fragment.segments.iter().filter(|_| !model.is_buffers(f)) {
                let range = bytes_of(fragment, s.offset, s.len);
                out[s.tensor].read(range, |from| bytes.extend_from_slice(from));
            }
            bytes
        });
        self.parameters = Some(copies.collect());
    }

    /// Whether a fragment's bytes are to be given to [`Self::arrived`], not only its version.
    pub(super) fn wants_bytes(&self, model: &Model, fragment: usize) -> bool {
        model.is_buffers(fragment) || self.parameters.is_some()
    }

    /// A fragment is whole in `out`. Buffers without bytes are as they were pulled, so that what was pushed since was
    /// rejected.
    pub(super) fn arrived(&mut self, model: &Model, fragment: usize, version: u64, bytes: Option<&[u8]>) {
        self.versions[fragment] = version;
        self.torn[fragment] = false;
        let pulled = self.pulled[fragment].take();
        let Some(bytes) = bytes else {
            if let Some(pulled) = pulled {
                self.buffers[fragment] = pulled;
            }
            return;
        };
        let copy = if model.is_buffers(fragment) {
            &mut self.buffers[fragment]
        } else if let Some(parameters) = &mut self.parameters {
            &mut parameters[fragment]
        } else {
            return;
        };
        copy.clear();
        copy.extend_from_slice(bytes);
    }

    /// The parameters of a fragment as they were read, if a copy was kept.
    pub(super) fn parameters(&self, fragment: usize) -> Option<&[u8]> {
        self.parameters.as_ref().map(|p| &p[fragment][..]).filter(|p| !p.is_empty())
    }

    /// Whether a copy of every parameter was kept.
    pub(super) fn has_parameters(&self, model: &Model) -> bool {
        (0..model.num_fragments()).all(|f| model.is_buffers(f) || self.parameters(f).is_some())
    }

    /// A fragment of buffers as pulled, or as pushed since.
    pub(super) fn buffers(&self, fragment: usize) -> &[u8] {
        &self.buffers[fragment]
    }

    /// Buffers were pushed and counted, and the server's values have not come back: the next change starts from what
    /// was pushed.
    pub(super) fn pushed(&mut self, model: &Model, fragment: usize, present: &Presence, values: &[u8]) {
        let old = &mut self.buffers[fragment];
        self.pulled[fragment].get_or_insert_with(|| old.clone());
        let (layout, mut rest) = (&model.layout.fragments[fragment], values);
        for s in layout.present_segments(present) {
            let size = layout.dtype.size();
            let (new, tail) = rest.split_at(s.len * size);
            old[s.start * size..(s.start + s.len) * size].copy_from_slice(new);
            rest = tail;
        }
    }

    /// Which tensors a push brings: what was given, except buffers that nobody has changed; and their fragments.
    pub(super) fn presence(
        &self,
        model: &Model,
        values: &[Option<Memory<'_>>],
    ) -> (Arc<Presence>, Arc<[usize]>) {
        if !model.has_buffers && values.iter().all(Option::is_some) {
            return model.all();
        }
        let changed = self.changed(model, values);
        let tensors = model.table.tensors();
        let brings = |t: usize| values[t].is_some() && (tensors[t].role == Role::Parameter || changed[t]);
        let present = Presence::from_fn(tensors.len(), brings);
        let fragments = model.layout.present_fragments(&present).collect();
        (Arc::new(present), fragments)
    }

    /// Which buffers differ from what was pulled. Constant ones (masks, positions) are no part of a push.
    fn changed(&self, model: &Model, values: &[Option<Memory<'_>>]) -> Vec<bool> {
        let mut changed = vec![false; model.table.len()];
        for (f, fragment) in model.layout.fragments.iter().enumerate().filter(|(f, _)| model.is_buffers(*f)) {
            let size = fragment.dtype.size();
            for s in &fragment.segments {
                if let Some(memory) = &values[s.tensor] {
                    let old = &self.buffers[f][s.start * size..(s.start + s.len) * size];
                    changed[s.tensor] |=
                        memory.read(s.offset * size..(s.offset + s.len) * size, |new| new != old);
                }
            }
        }
        changed
    }
}
