//! From a store's state to files.

use super::digest::{Digest, FileEntry};
use super::error::CheckpointError;
use super::manifest::{FORMAT, Manifest, Range, RunRecord};
use super::plan::{self, MODEL, OPTIMIZER};
use super::tensors::{Planned, write_header};
use crate::layout::{Layout, Segment};
use crate::spec::Transaction;
use crate::store::book::Book;
use crate::store::root::OptimizerState;
use crate::store::{Root, Run, StoreState};
use crate::table::TensorTable;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;

/// Bytes gathered before they are written: small tensors are many.
const BUFFER_BYTES: usize = 256 << 10;

/// A checkpoint about to be written.
pub struct Draft<'a> {
    table: &'a TensorTable,
    book: Book,
    ranges: Vec<Range>,
    places: Vec<Vec<(usize, usize, Segment)>>,
    /// Those that are still to be written, in that order.
    files: Vec<Content>,
    fragments: Fragments,
}

/// What a file is to hold.
struct Content {
    file: &'static str,
    tensors: Vec<Planned>,
    /// Where each comes from.
    arrays: Vec<Array>,
}

/// Of a tensor of the model its values, or a slot of what the optimizer remembers of it.
#[derive(Clone, Copy)]
struct Array {
    tensor: usize,
    slot: Option<usize>,
}

impl Content {
    fn of_model(table: &TensorTable) -> Self {
        let array = |(tensor, planned)| (planned, Array { tensor, slot: None });
        let (tensors, arrays) = plan::model(table).into_iter().map(array).unzip();
        Self { file: MODEL, tensors, arrays }
    }

    fn of_optimizer(table: &TensorTable, run: &Run, has_state: impl Fn(usize) -> bool) -> Self {
        let array = |(tensor, slot, planned)| (planned, Array { tensor, slot: Some(slot) });
        let (tensors, arrays) = plan::optimizer(table, run, has_state).into_iter().map(array).unzip();
        Self { file: OPTIMIZER, tensors, arrays }
    }
}

impl<'a> Draft<'a> {
    /// Of the state of a store with this table and layout. Its memory is let go of in step with the writing.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritable`] if no store would go on from it: better now than after a crash.
    pub fn new(table: &'a TensorTable, layout: &Layout, state: StoreState) -> Result<Self, CheckpointError> {
        let unwritable = |e| CheckpointError::Unwritable { what: format!("this book: {e}") };
        state.book.check(layout.fragments.len()).map_err(unwritable)?;
        let StoreState { book, run, roots, .. } = state;
        let places = plan::places(layout);
        let mut fragments = Fragments::new(roots, run.as_ref().map(|run| run.epoch));

        let has_state = |tensor: usize| places[tensor].iter().any(|(f, _, _)| fragments.state(*f).is_some());
        let optimizer = run.map(|run| Content::of_optimizer(table, &run, has_state));
        let mut files = vec![Content::of_model(table)];
        files.extend(optimizer.filter(|content| !content.arrays.is_empty()));
        let ranges = ranges(table, &places, &fragments);
        for array in files.iter().flat_map(|content| &content.arrays) {
            places[array.tensor].iter().for_each(|(fragment, _, _)| fragments.note_part(*fragment));
        }
        Ok(Self { table, book, ranges, places, files, fragments })
    }

    /// The files that are still to be written, before the manifest.
    #[must_use]
    pub fn files(&self) -> Vec<&'static str> {
        self.files.iter().map(|content| content.file).collect()
    }

    /// Writes one of [`Self::files`].
    ///
    /// # Errors
    /// [`CheckpointError`] if writing fails, or the format cannot hold a tensor; then the draft is of no more use.
    ///
    /// # Panics
    /// If it is none of them.
    pub fn write(&mut self, file: &'static str, to: impl Write) -> Result<FileEntry, CheckpointError> {
        let Some(at) = self.files.iter().position(|content| content.file == file) else {
            unreachable!("{file} is no file that is still to be written")
        };
        let Content { tensors, arrays, .. } = self.files.remove(at);
        let mut to = Digest::new(BufWriter::with_capacity(BUFFER_BYTES, to));
        write_header(file, &tensors, &mut to)?;
        for (array, tensor) in arrays.into_iter().zip(tensors) {
            for &(fragment, _, segment) in &self.places[array.tensor] {
                let size = tensor.dtype.size();
                let written = self.fragments.write_part(fragment, segment, size, array.slot, &mut to);
                written.map_err(CheckpointError::writing(file))?;
            }
        }
        to.flush().map_err(CheckpointError::writing(file))?;
        Ok(to.finish(file))
    }

    /// The manifest of the files written; `offbeat` is the build that writes it.
    #[must_use]
    pub fn manifest(
        self,
        files: Vec<FileEntry>,
        run: RunRecord,
        transaction: Transaction,
        offbeat: &str,
    ) -> Manifest {
        Manifest {
            format: FORMAT,
            offbeat: offbeat.to_owned(),
            run,
            transaction,
            table: self.table.clone(),
            files,
            ranges: self.ranges,
            book: self.book,
        }
    }
}

fn ranges(table: &TensorTable, places: &[Vec<(usize, usize, Segment)>], fragments: &Fragments) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for (spec, places) in table.tensors().iter().zip(places) {
        let first = ranges.len();
        for &(fragment, index, segment) in places {
            let (start, end) = (segment.offset as u64, (segment.offset + segment.len) as u64);
            let version = fragments.root(fragment).version();
            let steps = fragments.state(fragment).map(|state| state.steps[index]);
            match ranges[first..].last_mut() {
                Some(last) if (last.version, last.steps) == (version, steps) => last.end = end,
                _ => ranges.push(Range { tensor: spec.name.clone(), start, end, version, steps }),
            }
        }
    }
    ranges
}

/// The roots of a state, each for as long as something of it is still to be written: a root that pushes have
/// replaced meanwhile is memory beside that of the model.
struct Fragments {
    /// The run's optimizer; what another one did is of no use any more.
    epoch: Option<u32>,
    /// By fragment, with how many of its parts are still to be written.
    roots: Vec<(Option<Arc<Root>>, usize)>,
}

impl Fragments {
    fn new(roots: Vec<Arc<Root>>, epoch: Option<u32>) -> Self {
        Self { epoch, roots: roots.into_iter().map(|root| (Some(root), 0)).collect() }
    }

    fn note_part(&mut self, fragment: usize) {
        self.roots[fragment].1 += 1;
    }

    /// Writes one of the parts that were noted, of values or of a slot, each of `size` bytes; lets go of the root with
    /// its last.
    fn write_part(
        &mut self,
        fragment: usize,
        segment: Segment,
        size: usize,
        slot: Option<usize>,
        to: &mut impl Write,
    ) -> io::Result<()> {
        match slot {
            None => to.write_all(&self.root(fragment).held()[segment.start * size..][..segment.len * size]),
            Some(slot) => match self.state(fragment).and_then(|state| state.slots[slot].as_ref()) {
                Some(block) => {
                    to.write_all(bytemuck::cast_slice(&block.floats()[segment.start..][..segment.len]))
                }
                // A part that has taken no step yet is zeros here; its range says that they mean nothing.
                None => to.write_all(&vec![0; segment.len * size]),
            },
        }?;
        let (root, num_parts) = &mut self.roots[fragment];
        *num_parts -= 1;
        if *num_parts == 0 {
            *root = None;
        }
        Ok(())
    }

    fn root(&self, fragment: usize) -> &Root {
        match &self.roots[fragment] {
            (Some(root), _) => root,
            (None, _) => unreachable!("all of fragment {fragment} is written"),
        }
    }

    /// What the run's optimizer remembers of a fragment.
    fn state(&self, fragment: usize) -> Option<&OptimizerState> {
        let epoch = self.epoch?;
        self.root(fragment).state().filter(|state| state.epoch == epoch)
    }
}
