//! From files to a store. Whoever calls has [verified](Manifest::verify) them: what is checked here is that they belong
//! together.

use super::error::CheckpointError;
use super::manifest::{MANIFEST, Manifest, Range};
use super::plan::{self, MODEL, OPTIMIZER};
use super::tensors::TensorFile;
use crate::layout::{Fragment, FragmentKind, Segment};
use crate::optim::{self, Isa, MAX_STATE};
use crate::store::book::MOST;
use crate::store::root::OptimizerState;
use crate::store::{Life, Pool, ResumeError, ResumedFragment, Run, Store, StoreConfig};
use crate::table::TensorTable;
use crate::values::stay_finite;
use std::collections::HashMap;
use std::io::{self, Read, Seek};
use std::sync::Arc;

/// The store that a checkpoint describes, in a life of its own. `open` opens a file beside the manifest.
///
/// # Errors
/// [`CheckpointError`] if the files cannot be read or do not hold together, or a parameter is not finite.
pub fn restore<F: Read + Seek>(
    manifest: Manifest,
    mut open: impl FnMut(&'static str) -> io::Result<F>,
    config: StoreConfig,
    life: Life,
) -> Result<Arc<Store>, CheckpointError> {
    let Manifest { table, files, ranges, book, run, .. } = manifest;
    run.agreed.validate()?;
    if let Some(page) = &book.run {
        page.spec.optimizer.validate()?;
        page.spec.staleness.validate()?;
        page.spec.schedule.validate()?;
    }
    let run = book.resolve(&table);
    let histories = Histories::of(&table, ranges)?;
    let has_state = |tensor| histories.has_state(tensor);
    let optimizer = run.as_ref().map_or_else(Vec::new, |run| plan::optimizer(&table, run, has_state));
    let named = |name| files.iter().any(|entry| entry.name == name);
    if !named(MODEL) || named(OPTIMIZER) == optimizer.is_empty() {
        let names: Vec<&str> = files.iter().map(|entry| &*entry.name).collect();
        return Err(CheckpointError::malformed(MANIFEST, format!("the files that it names are {names:?}")));
    }
    let mut file = |name, tensors| {
        let file = open(name).map_err(CheckpointError::reading(name))?;
        TensorFile::open(name, file, tensors)
    };
    let model = file(MODEL, plan::model(&table).into_iter().map(|(_, tensor)| tensor).collect())?;
    let optimizer = if optimizer.is_empty() {
        None
    } else {
        Some(file(OPTIMIZER, optimizer.into_iter().map(|(_, _, tensor)| tensor).collect())?)
    };
    let table = Arc::new(table);
    let isa = Isa::detect();
    let mut reader = Reader { table: Arc::clone(&table), histories, model, optimizer, run: run.clone(), isa };
    let give = |fragment: &Fragment, pool: &Arc<Pool>| reader.fragment(fragment, pool);
    Store::resume(table, config, life, book, run, give).map_err(|error| match error {
        ResumeError::Book(error) => error.into(),
        ResumeError::Fragment(error) => error,
    })
}

/// Every tensor's ranges, by its position in the table: from its first element to its last.
struct Histories(Vec<Vec<Range>>);

impl Histories {
    fn of(table: &TensorTable, ranges: Vec<Range>) -> Result<Self, CheckpointError> {
        let malformed = |what: String| CheckpointError::malformed(MANIFEST, what);
        let names: HashMap<&str, usize> =
            table.tensors().iter().enumerate().map(|(i, spec)| (spec.name.as_str(), i)).collect();
        let mut histories: Vec<Vec<Range>> = vec![Vec::new(); table.len()];
        for range in ranges {
            let Some(&tensor) = names.get(range.tensor.as_str()) else {
                return Err(malformed(format!("a range of {:?}, which is no tensor", range.tensor)));
            };
            let due = histories[tensor].last().map_or(0, |before| before.end);
            let counts = [range.version, range.steps.unwrap_or(0)];
            if range.start != due || range.end <= range.start || counts.iter().any(|&count| count > MOST) {
                return Err(malformed(format!(
                    "{range:?}, which does not go on from {due}, or counts too far"
                )));
            }
            histories[tensor].push(range);
        }
        for (spec, ranges) in table.tensors().iter().zip(&histories) {
            let (end, due) = (ranges.last().map_or(0, |last| last.end), spec.num_elements());
            if end != due {
                return Err(malformed(format!("the ranges of {:?} end at {end}, not at {due}", spec.name)));
            }
        }
        Ok(Self(histories))
    }

    fn has_state(&self, tensor: usize) -> bool {
        self.0[tensor].iter().any(|range| range.steps.is_some())
    }

    /// (version, steps) of a segment.
    fn of_segment(&self, segment: &Segment) -> Option<(u64, Option<u64>)> {
        let (start, end) = (segment.offset as u64, (segment.offset + segment.len) as u64);
        let ranges = &self.0[segment.tensor];
        let range = ranges.get(ranges.partition_point(|range| range.end <= start))?;
        (range.end >= end).then_some((range.version, range.steps))
    }
}

/// A fragment's version, and the steps of each segment if it has optimizer state.
struct History {
    version: u64,
    steps: Option<Box<[u64]>>,
}

/// What fragments are read from.
struct Reader<F> {
    table: Arc<TensorTable>,
    histories: Histories,
    model: TensorFile<F>,
    optimizer: Option<TensorFile<F>>,
    run: Option<Arc<Run>>,
    isa: Isa,
}

impl<F: Read + Seek> Reader<F> {
    fn fragment(
        &mut self,
        fragment: &Fragment,
        pool: &Arc<Pool>,
    ) -> Result<ResumedFragment, CheckpointError> {
        let History { version, steps } = self.history(fragment)?;
        let mut data = pool.take(fragment.held_bytes());
        for segment in &fragment.segments {
            let spec = &self.table.tensors()[segment.tensor];
            let size = plan::model_tensor(spec).dtype.size();
            let to = &mut data.bytes_mut()[segment.start * size..][..segment.len * size];
            self.model.read(&spec.name, (segment.offset * size) as u64, to)?;
            if fragment.kind == FragmentKind::Parameters
                && !stay_finite(self.isa, spec.dtype, &data.floats()[segment.start..][..segment.len])
            {
                let what = format!(
                    "parameter {:?} holds NaN or an infinity, or what is one as {}",
                    spec.name,
                    spec.dtype.name()
                );
                return Err(CheckpointError::malformed(MODEL, what));
            }
        }
        let state = match steps {
            Some(steps) => Some(self.state(fragment, steps, pool)?),
            None => None,
        };
        Ok(ResumedFragment { version, data, state })
    }

    /// One fragment has one history.
    fn history(&self, fragment: &Fragment) -> Result<History, CheckpointError> {
        let torn = || {
            let segment = &fragment.segments[0];
            let name = &self.table.tensors()[segment.tensor].name;
            let what =
                format!("the ranges around element {} of {name:?} do not fit its fragment", segment.offset);
            CheckpointError::malformed(MANIFEST, what)
        };
        let histories = fragment.segments.iter().map(|segment| self.histories.of_segment(segment));
        let histories = histories.collect::<Option<Vec<_>>>().ok_or_else(torn)?;
        let version = histories[0].0;
        let steps: Vec<u64> = histories.iter().filter_map(|(_, steps)| *steps).collect();
        let has_state = steps.len() == histories.len();
        let is_parameters = fragment.kind == FragmentKind::Parameters && self.run.is_some();
        if histories.iter().any(|(other, _)| *other != version)
            || !(steps.is_empty() || has_state && is_parameters)
        {
            return Err(torn());
        }
        Ok(History { version, steps: has_state.then_some(steps.into()) })
    }

    fn state(
        &mut self,
        fragment: &Fragment,
        steps: Box<[u64]>,
        pool: &Arc<Pool>,
    ) -> Result<OptimizerState, CheckpointError> {
        let run = self.run.as_ref().expect("a history has steps only where there is a run");
        let rule = |segment: &Segment| &run.group(segment.tensor).rule;
        let num_slots = fragment.segments.iter().map(|s| optim::state_slots(rule(s))).max().unwrap_or(0);
        let mut slots = [const { None }; MAX_STATE];
        for (slot, place) in slots.iter_mut().enumerate().take(num_slots) {
            let mut block = pool.take(fragment.len * size_of::<f32>());
            for segment in &fragment.segments {
                let to = &mut block.floats_mut()[segment.start..][..segment.len];
                let Some(name) = optim::state_names(rule(segment)).get(slot) else {
                    to.fill(optim::initial_state(rule(segment), slot)); // of another group; never looked at
                    continue;
                };
                let name = plan::state_tensor(&self.table.tensors()[segment.tensor], name).name;
                let file = self.optimizer.as_mut().expect("it is open where there is state");
                file.read(&name, (segment.offset * size_of::<f32>()) as u64, bytemuck::cast_slice_mut(to))?;
                if !optim::all_finite(self.isa, to) {
                    let what = format!("{name:?} holds NaN or an infinity");
                    return Err(CheckpointError::malformed(OPTIMIZER, what));
                }
            }
            *place = Some(block);
        }
        Ok(OptimizerState { epoch: run.epoch, slots, steps })
    }
}
