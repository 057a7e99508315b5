//! What can be told of checkpoints without reading their tensors, as JSON: of one, or of all in a directory.

use super::choice::{self, Choice};
use super::error::DirectoryError;
use super::folder::{self, Checkpoint};
use super::proof::verify_lives;
use super::survey::{Survey, unless_gone};
use crate::describe::{OptimizerTold, ScheduleTold};
use offbeat_core::checkpoint::{FileEntry, MANIFEST, Manifest};
use offbeat_core::spec::{Contribution, StalenessSpec, Transaction};
use offbeat_core::store::book::{Answer, WorkerPage};
use offbeat_core::store::tally::TicketCounts;
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// What a path leads to.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Told<'a> {
    Directory(DirectoryTold<'a>),
    Checkpoint(Box<CheckpointTold<'a>>),
}

#[derive(Serialize)]
struct DirectoryTold<'a> {
    /// Newest first.
    checkpoints: Vec<EntryTold<'a>>,
    /// Names of those that are not gone on with.
    set_aside: Vec<String>,
    /// The one that a server would go on from, if what its files hold is as it was written.
    next: Option<String>,
    /// Why a server would not start; `None` too where it would begin with none.
    refusal: Option<String>,
}

#[derive(Serialize)]
struct EntryTold<'a> {
    name: &'a str,
    /// Why it cannot be used, or read.
    error: Option<&'a str>,
    /// A server has removed it since it was found.
    is_gone: bool,
    checkpoint: Option<CheckpointTold<'a>>,
}

#[derive(Serialize)]
struct CheckpointTold<'a> {
    name: String,
    /// Seconds since 1970, of the manifest, which is written last. A copy may have its own.
    written_unix_s: Option<f64>,
    format: u32,
    /// The build that wrote it.
    offbeat: &'a str,
    run_id: &'a str,
    port: u16,
    term: u64,
    version: u64,
    /// The version whose values they are, where the run was brought back to another.
    gone_back_to: Option<u64>,
    samples: u64,
    max_samples: Option<u64>,
    transaction: Transaction,
    contribution: Option<Contribution>,
    contribution_of: &'a str,
    optimizer: Option<OptimizerTold<'a>>,
    momentum_correction: bool,
    staleness: Option<&'a StalenessSpec>,
    schedule: Option<ScheduleTold>,
    tickets: &'a TicketCounts,
    rejected: &'a BTreeMap<String, u64>,
    num_tensors: usize,
    /// Elements of parameters, and of buffers.
    num_parameters: u64,
    num_buffer_elements: u64,
    /// Of the files named.
    bytes: u64,
    files: &'a [FileEntry],
    workers: Vec<WorkerTold<'a>>,
}

#[derive(Serialize)]
struct WorkerTold<'a> {
    id: &'a str,
    incarnation: u32,
    /// Whether it had not departed.
    present: bool,
    /// The number of the last push that was answered for.
    last_push: u64,
    pushes: u64,
    applied: u64,
    samples: u64,
    rejected: &'a BTreeMap<String, u64>,
    /// Those that have a ticket and had not come whole.
    unfinished: Vec<UnfinishedTold>,
}

#[derive(Serialize)]
struct UnfinishedTold {
    push: u64,
    ticket: u64,
    samples: u64,
    /// Fragments that hold it.
    num_applied: usize,
}

/// What was found of a directory's checkpoint, and is told.
struct Entry {
    name: String,
    error: Option<String>,
    is_gone: bool,
    checkpoint: Option<Checkpoint>,
}

/// Tells what a path leads to: a checkpoint, or a directory of them. Manifests are read, and of the other files it is
/// looked whether they are there and as long as they should be.
///
/// # Errors
/// [`DirectoryError`]: of one checkpoint, what is wrong with it.
pub fn inspect(path: &Path) -> Result<String, DirectoryError> {
    let Survey::Directory { folders, set_aside } = Survey::of(path)? else {
        let checkpoint = unless_gone(path, looked_at(path))?;
        return Ok(json(&Told::Checkpoint(Box::new(CheckpointTold::of(&checkpoint)))));
    };
    let looked_at = |folder: &PathBuf| Entry::of(folder, unless_gone(folder, looked_at(folder)));
    let (entries, verdicts): (Vec<_>, Vec<_>) = folders.iter().map(looked_at).unzip();
    let (next, refusal) = match next(path, folders.into_iter().zip(verdicts)) {
        Ok(next) => (next, None),
        Err(refusal) => (None, Some(refusal.to_string())),
    };
    let checkpoints = entries.iter().map(EntryTold::of).collect();
    Ok(json(&Told::Directory(DirectoryTold { checkpoints, set_aside, next, refusal })))
}

fn looked_at(folder: &Path) -> Result<Checkpoint, DirectoryError> {
    let checkpoint = Checkpoint::unverified(folder)?;
    checkpoint.check_lengths()?;
    Ok(checkpoint)
}

/// The name of the one that a server would go on from, or why it would not start. What is gone it would not find.
fn next(
    directory: &Path,
    found: impl Iterator<Item = (PathBuf, Result<(), DirectoryError>)>,
) -> Result<Option<String>, DirectoryError> {
    verify_lives(directory)?;
    let is_there =
        |(_, verdict): &(_, Result<(), DirectoryError>)| !matches!(verdict, Err(DirectoryError::Gone { .. }));
    let (folders, verdicts): (Vec<_>, Vec<_>) = found.filter(is_there).unzip();
    let mut verdicts = verdicts.into_iter();
    let attempt = |folder: &Path| verdicts.next().expect("one each").map(|()| folder::short(folder));
    Ok(choice::newest(directory, folders, attempt)?.map(|Choice { used, damaged: _ }| used))
}

fn json(told: &Told<'_>) -> String {
    serde_json::to_string(told).expect("every key is a string")
}

impl Entry {
    /// With the verdict on it.
    fn of(
        folder: &Path,
        looked_at: Result<Checkpoint, DirectoryError>,
    ) -> (Self, Result<(), DirectoryError>) {
        let error = looked_at.as_ref().err();
        let (told, is_gone) =
            (error.map(ToString::to_string), matches!(error, Some(DirectoryError::Gone { .. })));
        let (checkpoint, verdict) = match looked_at {
            Ok(checkpoint) => (Some(checkpoint), Ok(())),
            Err(error) => (None, Err(error)),
        };
        (Self { name: folder::short(folder), error: told, is_gone, checkpoint }, verdict)
    }
}

impl<'a> EntryTold<'a> {
    fn of(entry: &'a Entry) -> Self {
        let Entry { name, error, is_gone, checkpoint } = entry;
        Self {
            name,
            error: error.as_deref(),
            is_gone: *is_gone,
            checkpoint: checkpoint.as_ref().map(CheckpointTold::of),
        }
    }
}

impl<'a> CheckpointTold<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Self {
        let Checkpoint { path, manifest } = checkpoint;
        let Manifest { format, offbeat, run, transaction, table, files, ranges: _, book } = manifest;
        let (agreed, spec) = (&run.agreed, book.run.as_ref().map(|page| &page.spec));
        let optimizer = agreed.optimizer.as_ref();
        Self {
            name: folder::short(path),
            written_unix_s: written_unix_s(&path.join(MANIFEST)),
            format: *format,
            offbeat,
            run_id: &run.run_id,
            port: run.port,
            term: book.term,
            version: book.version,
            gone_back_to: run.gone_back_to,
            samples: book.samples,
            max_samples: spec.and_then(|spec| spec.max_samples),
            transaction: *transaction,
            contribution: agreed.contribution,
            contribution_of: &agreed.contribution_of,
            optimizer: optimizer.map(|optimizer| OptimizerTold::of(optimizer, agreed.contribution)),
            momentum_correction: spec.is_some_and(|spec| spec.optimizer.momentum_correction),
            staleness: spec.map(|spec| &spec.staleness),
            schedule: spec.map(|spec| ScheduleTold::at(spec.schedule, optimizer, book.version, book.samples)),
            tickets: &book.tickets,
            rejected: &book.totals.rejected,
            num_tensors: table.len(),
            num_parameters: num_elements(table, Role::Parameter),
            num_buffer_elements: num_elements(table, Role::Buffer),
            bytes: manifest.bytes(),
            files,
            workers: book.workers.iter().map(WorkerTold::of).collect(),
        }
    }
}

impl<'a> WorkerTold<'a> {
    fn of(page: &'a WorkerPage) -> Self {
        let unfinished = |(push, answer): &(u64, Answer)| match answer {
            Answer::Settled(_) => None,
            Answer::Unfinished(unfinished) => Some(UnfinishedTold {
                push: *push,
                ticket: unfinished.ticket,
                samples: unfinished.samples,
                num_applied: unfinished.progress.applied,
            }),
        };
        Self {
            id: &page.worker_id,
            incarnation: page.incarnation,
            present: page.present,
            last_push: page.last_sequence,
            pushes: page.tally.pushes,
            applied: page.tally.applied,
            samples: page.tally.samples,
            rejected: &page.tally.rejected,
            unfinished: page.recent.iter().filter_map(unfinished).collect(),
        }
    }
}

fn num_elements(table: &TensorTable, role: Role) -> u64 {
    table.tensors().iter().filter(|spec| spec.role == role).map(TensorSpec::num_elements).sum()
}

fn written_unix_s(file: &Path) -> Option<f64> {
    let modified = fs::metadata(file).and_then(|file| file.modified()).ok()?;
    Some(modified.duration_since(UNIX_EPOCH).ok()?.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::checkpoint::CheckpointError;

    #[test]
    fn the_next_is_the_newest_that_is_neither_gone_nor_damaged_and_what_is_no_damage_stops_a_start() {
        let place = Path::new("/nowhere");
        let folders: Vec<PathBuf> = (1..5).map(|number| place.join(folder::name(number))).collect();
        let [first, second, third, fourth] = &folders[..] else { unreachable!("there are four") };
        let gone = || Err(DirectoryError::Gone { path: fourth.clone() });
        let told = |cause| Err(DirectoryError::Checkpoint { path: third.clone(), cause });
        let damaged =
            || told(CheckpointError::Damaged { file: MANIFEST, what: "it is not there".to_owned() });
        let other = || told(CheckpointError::Format { file: MANIFEST, found: 9, writer: "9.0".to_owned() });
        let next = |found: Vec<(&PathBuf, _)>| {
            next(place, found.into_iter().map(|(folder, verdict)| (folder.clone(), verdict)))
                .map_err(|error| error.to_string())
        };
        let good = vec![(fourth, gone()), (third, damaged()), (second, Ok(())), (first, Ok(()))];
        assert_eq!(next(good), Ok(Some(folder::name(2))));
        assert_eq!(next(vec![(fourth, gone())]), Ok(None));
        let refusal = next(vec![(fourth, gone()), (third, damaged())]).unwrap_err();
        assert!(refusal.starts_with("none of the 1 checkpoints in /nowhere can be used; "), "{refusal}");
        assert!(refusal.ends_with("which sets them aside"), "{refusal}");
        let refusal = next(vec![(third, other()), (second, Ok(()))]).unwrap_err();
        assert!(refusal.contains("is of format 9") && refusal.contains("use Offbeat 9.0"), "{refusal}");
        let looked_at = unless_gone(fourth, looked_at(fourth));
        let (Entry { is_gone, checkpoint, error, .. }, _) = Entry::of(fourth, looked_at);
        assert!(is_gone && checkpoint.is_none() && error.is_some_and(|error| error.contains("is gone")));
    }
}
