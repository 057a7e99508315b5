//! From a store's state to files.

use super::digest::{Digest, FileEntry};
use super::error::CheckpointError;
use super::manifest::{FORMAT, Manifest, Range, RunRecord};
use super::plan::{self, MODEL, OPTIMIZER};
use super::tensors::{Planned, write_header};
use crate::layout::{Layout, Segment};
use crate::spec::Transaction;
use crate::store::root::OptimizerState;
use crate::store::{Root, StoreState};
use crate::table::TensorTable;
use std::io::{BufWriter, Write};

/// Bytes gathered before they are written: small tensors are many.
const BUFFER_BYTES: usize = 256 << 10;

/// A checkpoint about to be written.
pub struct Draft<'a> {
    table: &'a TensorTable,
    state: &'a StoreState,
    places: Vec<Vec<(usize, usize, Segment)>>,
}

impl<'a> Draft<'a> {
    /// Of the state of a store with this table and layout.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritable`] if no store would go on from it: better now than after a crash.
    pub fn new(
        table: &'a TensorTable,
        layout: &Layout,
        state: &'a StoreState,
    ) -> Result<Self, CheckpointError> {
        let unwritable = |e| CheckpointError::Unwritable { what: format!("this book: {e}") };
        state.book.check(layout.fragments.len()).map_err(unwritable)?;
        Ok(Self { table, state, places: plan::places(layout) })
    }

    /// The files to be written, before the manifest.
    #[must_use]
    pub fn files(&self) -> Vec<&'static str> {
        let has_state = !self.optimizer().is_empty();
        [Some(MODEL), has_state.then_some(OPTIMIZER)].into_iter().flatten().collect()
    }

    /// Writes one of [`Self::files`].
    ///
    /// # Errors
    /// [`CheckpointError`] if writing fails, or the format cannot hold a tensor.
    ///
    /// # Panics
    /// If it is none of them.
    pub fn write(&self, file: &'static str, to: impl Write) -> Result<FileEntry, CheckpointError> {
        let mut to = Digest::new(BufWriter::with_capacity(BUFFER_BYTES, to));
        match file {
            MODEL => self.write_model(&mut to),
            OPTIMIZER => self.write_optimizer(&mut to),
            other => unreachable!("{other} is no file of a checkpoint"),
        }?;
        to.flush().map_err(CheckpointError::writing(file))?;
        Ok(to.finish(file))
    }

    /// The manifest of the files written; `offbeat` is the build that writes it.
    #[must_use]
    pub fn manifest(
        &self,
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
            ranges: self.ranges(),
            book: self.state.book.clone(),
        }
    }

    fn write_model(&self, to: &mut impl Write) -> Result<(), CheckpointError> {
        let (indexes, tensors): (Vec<usize>, Vec<Planned>) = plan::model(self.table).into_iter().unzip();
        write_header(MODEL, &tensors, to)?;
        for (index, tensor) in indexes.into_iter().zip(tensors) {
            let size = tensor.dtype.size();
            for &(fragment, _, segment) in &self.places[index] {
                let bytes = &self.root(fragment).held()[segment.start * size..][..segment.len * size];
                to.write_all(bytes).map_err(CheckpointError::writing(MODEL))?;
            }
        }
        Ok(())
    }

    fn write_optimizer(&self, to: &mut impl Write) -> Result<(), CheckpointError> {
        let planned = self.optimizer();
        let tensors: Vec<Planned> = planned.iter().map(|(_, _, tensor)| tensor.clone()).collect();
        write_header(OPTIMIZER, &tensors, to)?;
        for (index, slot, _) in planned {
            for &(fragment, _, segment) in &self.places[index] {
                // A part that has taken no step yet is zeros here; its range says that they mean nothing.
                let none = || vec![0; segment.len * size_of::<f32>()];
                let state = self.state_of(fragment).and_then(|state| state.slots[slot].as_ref());
                let bytes =
                    state.map(|block| bytemuck::cast_slice(&block.floats()[segment.start..][..segment.len]));
                let written = match bytes {
                    Some(bytes) => to.write_all(bytes),
                    None => to.write_all(&none()),
                };
                written.map_err(CheckpointError::writing(OPTIMIZER))?;
            }
        }
        Ok(())
    }

    fn optimizer(&self) -> Vec<(usize, usize, Planned)> {
        let Some(run) = &self.state.run else { return Vec::new() };
        let has_state =
            |tensor: usize| self.places[tensor].iter().any(|(f, _, _)| self.state_of(*f).is_some());
        plan::optimizer(self.table, run, has_state)
    }

    fn ranges(&self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (spec, places) in self.table.tensors().iter().zip(&self.places) {
            let first = ranges.len();
            for &(fragment, index, segment) in places {
                let (start, end) = (segment.offset as u64, (segment.offset + segment.len) as u64);
                let version = self.root(fragment).version();
                let steps = self.state_of(fragment).map(|state| state.steps[index]);
                match ranges[first..].last_mut() {
                    Some(last) if (last.version, last.steps) == (version, steps) => last.end = end,
                    _ => ranges.push(Range { tensor: spec.name.clone(), start, end, version, steps }),
                }
            }
        }
        ranges
    }

    fn root(&self, fragment: usize) -> &Root {
        &self.state.roots[fragment]
    }

    /// What the run's optimizer remembers of a fragment; what another one did is of no use any more.
    fn state_of(&self, fragment: usize) -> Option<&OptimizerState> {
        let epoch = self.state.run.as_ref()?.epoch;
        self.root(fragment).state().filter(|state| state.epoch == epoch)
    }
}
