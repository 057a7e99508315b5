//! What outlives the server: it goes on from the newest checkpoint at its start, and a thread of its own writes one from
//! time to time, and the last when all else has ended.

use super::config::{CheckpointConfig, Every, Resume, ServerConfig};
use super::cut;
use super::error::ServerError;
use super::model::Model;
use super::shared::Shared;
use crate::checkpoint::{Directory, DirectoryError};
use offbeat_core::checkpoint::{Agreed, RunRecord};
use offbeat_core::store::book::Answer;
use offbeat_core::store::{Life, Store, StoreState};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Between two looks at whether it is time.
const LOOK: Duration = Duration::from_millis(50);
/// Cuts for one checkpoint, if somebody changes the optimizer again and again.
const TRIES: usize = 8;
/// After a checkpoint that could not be written.
const RETRY: Duration = Duration::from_secs(10);

/// The checkpoints of a running server.
pub(super) struct Checkpoints {
    path: PathBuf,
    every: Every,
    /// Until the server has stopped: then another one may have it.
    directory: Mutex<Option<Directory>>,
    news: Mutex<News>,
}

/// What is told of them.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    last: Option<Written>,
    /// Why the last one that was tried could not be written.
    failed: Option<String>,
}

#[derive(Clone, Debug)]
struct Written {
    path: PathBuf,
    term: u64,
    version: u64,
    /// Whether nothing was under way.
    whole: bool,
    agreed: Agreed,
    at: Instant,
    took: Duration,
}

/// As the status shows it.
#[derive(Serialize)]
pub(super) struct CheckpointStatus {
    directory: String,
    /// The newest; `None` until this server has written one.
    path: Option<String>,
    version: Option<u64>,
    age_s: Option<f64>,
    write_s: Option<f64>,
    /// Why the last one that was tried could not be written.
    failed: Option<String>,
}

/// A directory that was taken.
pub(super) struct Opened {
    pub(super) checkpoints: Checkpoints,
    /// Of the life that has begun.
    pub(super) term: u64,
    pub(super) resumed: Option<Resumed>,
}

/// What a server goes on from.
pub(super) struct Resumed {
    pub(super) path: PathBuf,
    pub(super) run: RunRecord,
    pub(super) store: Arc<Store>,
}

/// Takes a directory, and what there is to go on from, and begins a life.
pub(super) fn open(config: &ServerConfig, kept: &CheckpointConfig) -> Result<Opened, ServerError> {
    let mut directory = Directory::open(&kept.directory)?;
    let found = match kept.resume {
        Resume::Never => {
            directory.set_all_aside()?;
            None
        }
        Resume::Auto | Resume::Must => directory.newest(|checkpoint| {
            let book = &checkpoint.manifest.book;
            let life = directory.next_life(Life { term: book.term, last_incarnation: book.last_incarnation });
            let (path, run) = (checkpoint.path.clone(), checkpoint.manifest.run.clone());
            let store = checkpoint.restore(config.store(), life)?;
            Ok((life, Resumed { path, run, store }))
        })?,
    };
    let (life, resumed) = match found {
        Some((life, resumed)) => (life, Some(resumed)),
        None if kept.resume == Resume::Must => {
            return Err(ServerError::NoCheckpoint { directory: kept.directory.clone() });
        }
        None => (directory.next_life(Life { term: 0, last_incarnation: 0 }), None),
    };
    if let (Some(run_id), Some(resumed)) = (&config.run_id, &resumed)
        && *run_id != resumed.run.run_id
    {
        return Err(ServerError::OtherRun {
            checkpoint: resumed.path.clone(),
            found: resumed.run.run_id.clone(),
            run_id: run_id.clone(),
        });
    }
    directory.begin_life(life)?;
    let checkpoints = Checkpoints {
        path: kept.directory.clone(),
        every: kept.every,
        directory: Mutex::new(Some(directory)),
        news: Mutex::default(),
    };
    Ok(Opened { checkpoints, term: life.term, resumed })
}

/// Nothing is left half changed by a panic: what is on the disk is whole whenever it has its name.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checkpoints {
    pub(super) fn directory(&self) -> &Path {
        &self.path
    }

    /// Makes a term this life's, before all values are replaced.
    pub(super) fn reserve_term(&self, term: u64) -> Result<(), DirectoryError> {
        // Without a directory the server has stopped, and nobody hears of the term.
        lock(&self.directory).as_mut().map_or(Ok(()), |directory| directory.reserve_term(term))
    }

    pub(super) fn status(&self, now: Instant) -> CheckpointStatus {
        let News { last, failed } = lock(&self.news).clone();
        let last = last.as_ref();
        CheckpointStatus {
            directory: self.path.display().to_string(),
            path: last.map(|last| last.path.display().to_string()),
            version: last.map(|last| last.version),
            age_s: last.map(|last| now.saturating_duration_since(last.at).as_secs_f64()),
            write_s: last.map(|last| last.took.as_secs_f64()),
            failed,
        }
    }

    /// Whether it is time for the next one: also when the workers have agreed on something else, which is rare.
    fn is_due(&self, store: &Store, agreed: &Agreed, is_last: bool) -> bool {
        let news = lock(&self.news);
        let Some(last) = &news.last else { return true };
        let (term, version) = (store.term(), store.version());
        let is_new = (term, version) != (last.term, last.version);
        match self.every {
            _ if is_last && (is_new || !last.whole) => true,
            _ if term != last.term || *agreed != last.agreed => true,
            _ if is_last => false,
            Every::Versions(number) => version.saturating_sub(last.version) >= number,
            Every::Time(time) => is_new && last.at.elapsed() >= time,
        }
    }

    /// Writes one; what goes wrong is told, and the run goes on.
    fn write(&self, shared: &Shared, model: &Model, is_last: bool) {
        let begun = Instant::now();
        // Until what is agreed on is what the store obeyed at the cut: it may change while that waits.
        let mut tries = 0..TRIES;
        let (state, agreed) = loop {
            let state = {
                let _whole = lock(&model.whole);
                cut::take(&model.store, shared.config.cut_deadline)
            };
            let agreed = shared.agreement().agreed();
            let obeyed = state.run.as_ref().map(|run| &run.spec.optimizer);
            if obeyed == agreed.optimizer.as_ref() || tries.next().is_none() {
                break (state, agreed);
            }
        };
        let run = RunRecord {
            run_id: shared.run_id.clone(),
            port: shared.address.port(),
            blueprint: model.blueprint.clone(),
            agreed: agreed.clone(),
        };
        let (term, version, whole) = (state.book.term, state.book.version, is_whole(&state));
        let mut directory = lock(&self.directory);
        let Some(directory) = directory.as_mut() else { return };
        let saved = directory.save(&model.store, &state, run);
        drop(state); // its memory, before anything else
        let mut news = lock(&self.news);
        match saved {
            Ok(path) => {
                let took = begun.elapsed();
                tracing::info!(
                    path = %path.display(),
                    version,
                    seconds = took.as_secs_f64(),
                    "a checkpoint is written"
                );
                *news = News {
                    last: Some(Written { path, term, version, whole, agreed, at: Instant::now(), took }),
                    failed: None,
                };
            }
            Err(error) => {
                let what = if is_last {
                    "the last checkpoint could not be written: what came after the one before is lost"
                } else {
                    "a checkpoint could not be written: the run goes on, and would be lost from the one before"
                };
                tracing::error!(%error, version, "{what}");
                news.failed = Some(error.to_string());
            }
        }
    }
}

fn is_whole(state: &StoreState) -> bool {
    let mut answers = state.book.workers.iter().flat_map(|page| &page.recent);
    !answers.any(|(_, answer)| matches!(answer, Answer::Unfinished(_)))
}

/// The thread that writes checkpoints.
pub(super) struct Keeper {
    end: Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Starts it.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Self, ServerError> {
        let (end, ends) = channel();
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new()
            .name("offbeat-checkpoints".to_owned())
            .spawn(move || keep(&shared, &ends))
            .map_err(ServerError::System)?;
        Ok(Self { end, thread })
    }

    /// Writes the last one, when nothing changes any more.
    pub(super) fn finish(self) {
        let Self { end, thread } = self;
        drop(end);
        if thread.join().is_err() {
            tracing::error!("the thread that writes checkpoints had panicked");
        }
    }
}

fn keep(shared: &Shared, ends: &Receiver<()>) {
    let Some(checkpoints) = &shared.checkpoints else { return };
    let mut not_before = Instant::now();
    let mut is_last = false;
    loop {
        let is_time = is_last || Instant::now() >= not_before;
        let is_due = |model: &&Arc<Model>| {
            let agreed = shared.agreement().agreed();
            checkpoints.is_due(&model.store, &agreed, is_last)
        };
        if let Some(model) = shared.model.get().filter(|_| is_time).filter(is_due) {
            if is_last {
                tracing::info!("the last checkpoint is being written");
            }
            checkpoints.write(shared, model, is_last);
            if lock(&checkpoints.news).failed.is_some() {
                not_before = Instant::now() + RETRY;
            }
        }
        if is_last {
            drop(lock(&checkpoints.directory).take());
            return;
        }
        is_last = !matches!(ends.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout));
    }
}
