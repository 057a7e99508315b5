//! What outlives the server: what it goes on from at its start, what it has kept since, and what is told of that. When
//! they are written is up to [`keeper`](super::keeper).

use super::config::{CheckpointConfig, Every, Resume, ServerConfig};
use super::error::ServerError;
use super::membership::Standing;
use crate::checkpoint::{Directory, DirectoryError, Mark, Watch};
use offbeat_core::checkpoint::{Agreed, RunRecord};
use offbeat_core::store::book::{Answer, WorkerPage};
use offbeat_core::store::{Attendance, Life, Store, StoreConfig, StoreState, WorkerKey};
use offbeat_core::table::TensorTable;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Before what the workers have agreed on anew, or that one has gone for good, is worth a checkpoint of its own: it may
/// change once a second.
const CHANGED: Duration = Duration::from_secs(10);
/// And so many times as long as the last one took to write, where that is more.
const TIMES_A_SAVE: u32 = 20;
/// After one that could not be written.
const RETRY: Duration = Duration::from_secs(10);
/// From checkpoint to checkpoint where nobody is there: whoever has gone is not to find his work undone.
const DESERTED: Duration = Duration::from_secs(1);

const NOT_WRITTEN: &str =
    "a checkpoint could not be written: the run goes on, and would be lost from the one before";

const NOT_THE_LAST: &str = "the last checkpoint could not be written: what came after the one before is lost";

const NOT_KEPT: &str = "no checkpoint has the values that are in place now: a server that is killed before one is written goes on from the values before them; it is tried again";

const LOST: &str = "no checkpoint has the values that were put in place last: the next server goes on from the values before them";

/// Where the model's values are those of another version: in a term, until the first push after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Borrowed {
    term: u64,
    version: u64,
    values_of: u64,
}

/// The checkpoints of a running server.
pub(super) struct Checkpoints {
    path: PathBuf,
    every: Every,
    resume: Resume,
    /// Of the checkpoint that is gone on with.
    resumed_version: Option<u64>,
    /// That is to begin, once nothing but the machine can refuse the start any more.
    life: Life,
    /// Changed and read with the model whole.
    borrowed: Mutex<Option<Borrowed>>,
    /// Until the server has stopped: then another one may have it.
    directory: Mutex<Option<Directory>>,
    /// Of those that write one.
    turn: Mutex<()>,
    news: Mutex<News>,
    /// Whether the last one is being written or is. Changed and read with the model whole.
    has_closed: AtomicBool,
}

/// What is told of them.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    last: Option<Written>,
    /// Why the last one that was tried could not be written.
    failed: Option<String>,
    /// Until when it is not tried again then.
    not_before: Option<Instant>,
}

/// Why a checkpoint is written: what it means if it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// It is time for one, in mid-run.
    Due,
    /// All values were replaced.
    Replaced,
    /// Nothing comes after it.
    Last,
}

#[derive(Clone, Debug)]
struct Written {
    path: PathBuf,
    what: What,
    /// Whether nothing was under way.
    whole: bool,
    at: Instant,
    took: Duration,
}

/// What a checkpoint has of the model and of the run, as far as another one may be due for it.
#[derive(Clone, Debug, PartialEq)]
struct What {
    term: u64,
    version: u64,
    agreed: Agreed,
    attendance: Attendance,
    /// Who had not departed, and how many of them had not been given up either.
    present: BTreeSet<String>,
    num_awaited: usize,
    /// How often each worker had pushed, whatever became of that.
    pushes: BTreeMap<String, u64>,
    /// For whom others are to wait in rounds if another life goes on from here.
    roster: BTreeSet<u32>,
}

/// As the status shows it.
#[derive(Serialize)]
pub(super) struct CheckpointStatus {
    directory: String,
    /// What is between two, in words.
    every: String,
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
    pub(super) life: Life,
    pub(super) resumed: Option<Resumed>,
}

/// What a server goes on from.
pub(super) struct Resumed {
    pub(super) path: PathBuf,
    pub(super) run: RunRecord,
    pub(super) store: Arc<Store>,
    /// From that in which its values were made to the checkpoint's; `None`: newer ones were taken away.
    pub(super) from_terms: Option<RangeInclusive<u64>>,
    /// Who was in the run, and how it was last known to stand.
    pub(super) workers: Vec<(String, WorkerKey, Standing)>,
    /// Of those that were there, by incarnation: for whom others waited in rounds.
    pub(super) roster: BTreeSet<u32>,
}

/// Takes a directory, and what there is to go on from.
pub(super) fn open(config: &ServerConfig, kept: &CheckpointConfig) -> Result<Opened, ServerError> {
    let none = || ServerError::NoCheckpoint { directory: kept.directory.clone() };
    if kept.resume == Resume::Must && matches!(kept.directory.try_exists(), Ok(false)) {
        return Err(none()); // a mistyped one is not made
    }
    let directory = Directory::open(&kept.directory).map_err(DirectoryError::of_the_directory)?;
    let found = match kept.resume {
        Resume::Never => None, // what there is is set aside when the life begins
        Resume::Auto | Resume::Must => directory.newest(|checkpoint| {
            let book = &checkpoint.manifest.book;
            let life = directory.next_life(Life { term: book.term, last_incarnation: book.last_incarnation });
            let made_in = checkpoint.manifest.run.from_term.unwrap_or(book.term);
            let from_terms = (!directory.lacks_newer_than(&checkpoint)?).then_some(made_in..=book.term);
            let (path, run) = (checkpoint.path.clone(), checkpoint.manifest.run.clone());
            let workers = book.workers.iter().map(standing).collect();
            let roster = roster(&book.workers);
            let store = checkpoint.restore(config.store(), life, &Watch::none())?;
            Ok((life, Resumed { path, run, store, from_terms, workers, roster }))
        })?,
    };
    let (life, resumed) = match found {
        Some((life, resumed)) => (life, Some(resumed)),
        None if kept.resume == Resume::Must => return Err(none()),
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
    let borrowed = resumed.as_ref().and_then(|resumed| {
        let values_of = resumed.run.gone_back_to?;
        Some(Borrowed { term: life.term, version: resumed.store.version(), values_of })
    });
    let checkpoints = Checkpoints {
        path: kept.directory.clone(),
        every: kept.every,
        resume: kept.resume,
        resumed_version: resumed.as_ref().map(|resumed| resumed.store.version()),
        life,
        borrowed: Mutex::new(borrowed),
        directory: Mutex::new(Some(directory)),
        turn: Mutex::default(),
        news: Mutex::default(),
        has_closed: AtomicBool::new(false),
    };
    Ok(Opened { checkpoints, life, resumed })
}

fn standing(page: &WorkerPage) -> (String, WorkerKey, Standing) {
    let standing = match (page.present, page.away, page.finished) {
        (true, false, _) => Standing::There,
        (true, true, _) => Standing::Away,
        (false, _, true) => Standing::Finished,
        (false, _, false) => Standing::Left,
    };
    (page.worker_id.clone(), WorkerKey { slot: page.slot, incarnation: page.incarnation }, standing)
}

fn roster(pages: &[WorkerPage]) -> BTreeSet<u32> {
    let is_in = |page: &&WorkerPage| page.in_rounds && page.present && !page.away;
    pages.iter().filter(is_in).map(|page| page.incarnation).collect()
}

/// Nothing is left half changed by a panic: what is on the disk is whole whenever it has its name.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checkpoints {
    pub(super) fn directory(&self) -> &Path {
        &self.path
    }

    /// Begins the server's life, and gives what it does not go on from another name. The last incarnation that is its own.
    pub(super) fn begin(&self) -> Result<u32, ServerError> {
        let mut directory = lock(&self.directory);
        let directory = directory.as_mut().ok_or(ServerError::Stopped)?;
        let last = directory.begin_life(self.life).map_err(DirectoryError::before_any_change)?;
        if self.resume == Resume::Never {
            directory.set_all_aside()?;
        }
        Ok(last)
    }

    /// Makes more incarnations this life's own, after the last that is. The last of them. Waits for a save that is under way.
    pub(super) fn reserve_incarnations(&self, last: u32) -> Result<u32, ServerError> {
        let mut directory = lock(&self.directory);
        Ok(directory.as_mut().ok_or(ServerError::Stopped)?.reserve_incarnations(last)?)
    }

    /// From here on no values are replaced, since nothing would keep them. To be called with the model
    /// [whole](super::model::Model::whole).
    pub(super) fn close(&self) {
        self.has_closed.store(true, Ordering::Relaxed); // that lock's
    }

    /// Makes a term this life's, before all values are replaced; the model is to be whole from here to their end. Where it
    /// is too late for the last checkpoint, they are not.
    pub(super) fn reserve_term(&self, term: u64) -> Result<(), ServerError> {
        let mut directory = lock(&self.directory);
        let directory = directory.as_mut().filter(|_| !self.has_closed.load(Ordering::Relaxed));
        let directory = directory.ok_or(ServerError::Stopped)?;
        Ok(directory.reserve_term(term).map_err(DirectoryError::before_a_replacement)?)
    }

    /// The model's values are those of a checkpoint, in the term that was reserved for them and from a version on; it is
    /// still whole.
    pub(super) fn went_back(&self, to: Mark, (term, version): (u64, u64)) {
        *lock(&self.borrowed) = Some(Borrowed { term, version, values_of: to.values_of });
        if let Some(directory) = lock(&self.directory).as_mut() {
            directory.went_back(to, term);
        }
    }

    /// The version whose values the model has in a term at a version, if it is another. To be called with the model
    /// [whole](super::model::Model::whole).
    pub(super) fn gone_back_to(&self, (term, version): (u64, u64)) -> Option<u64> {
        let borrowed = *lock(&self.borrowed);
        let is_it = |one: &Borrowed| (one.term, one.version) == (term, version) && one.values_of != version;
        borrowed.filter(is_it).map(|one| one.values_of)
    }

    /// A checkpoint of this model, the newest or that of a version, and the store that it describes.
    pub(super) fn recall(
        &self,
        version: Option<u64>,
        table: &TensorTable,
        config: StoreConfig,
    ) -> Result<(Mark, Arc<Store>), ServerError> {
        // Held, so that it is not removed meanwhile.
        let directory = lock(&self.directory);
        let directory = directory.as_ref().ok_or(ServerError::Stopped)?;
        let found = directory.find(version).map_err(|cause| match version {
            None if cause.is_damage() => ServerError::DamagedNewest { cause },
            _ => cause.into(),
        })?;
        let found = found.map_err(|others| ServerError::NoSuchCheckpoint {
            directory: self.path.clone(),
            version,
            others,
        })?;
        if let Some(difference) = table.first_difference(&found.manifest.table) {
            // A server of another model has written it, and somebody has put it there.
            let remedy = "It is another run's: take it out of the directory, or give another version";
            return Err(ServerError::other_model(found.path, &difference, remedy));
        }
        let book = &found.manifest.book;
        // A life that nobody hears of. After the last term there is none, and the restoring says so.
        let life = Life { term: book.term.saturating_add(1), last_incarnation: book.last_incarnation };
        let mark = found.mark();
        Ok((mark, found.restore(config, life, &Watch::none())?))
    }

    /// Held from the look at what there is to keep until that is kept, so that what was looked at first is not written
    /// last.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    /// Whether a checkpoint has the values of this term or of a later one.
    pub(super) fn has_term(&self, term: u64) -> bool {
        lock(&self.news).last.as_ref().is_some_and(|last| last.what.term >= term)
    }

    pub(super) fn status(&self, now: Instant) -> CheckpointStatus {
        let News { last, failed, .. } = lock(&self.news).clone();
        let last = last.as_ref();
        CheckpointStatus {
            directory: self.path.display().to_string(),
            every: self.every.to_string(),
            path: last.map(|last| last.path.display().to_string()),
            version: last.map(|last| last.what.version),
            age_s: last.map(|last| now.saturating_duration_since(last.at).as_secs_f64()),
            write_s: last.map(|last| last.took.as_secs_f64()),
            failed,
        }
    }

    /// Whether it is time for the next one.
    pub(super) fn is_due(&self, store: &Store, agreed: Agreed, roster: BTreeSet<u32>, is_last: bool) -> bool {
        let news = lock(&self.news);
        if !is_last && news.not_before.is_some_and(|not_before| Instant::now() < not_before) {
            return false;
        }
        let Some(last) = &news.last else { return true };
        let now = Now {
            term: store.term(),
            version: store.version(),
            agreed,
            attendance: store.attendance(),
            roster,
        };
        if is_last {
            return !last.whole || now.differs(&last.what) || now.has_other_visits(&last.what);
        }
        let whereabouts = if now.has_other_visits(&last.what) {
            let has_lost_work = store.has_departed_with_more(&last.what.pushes);
            Whereabouts::since(&last.what, store.those_left_of(&last.what.present), has_lost_work)
        } else {
            Whereabouts::AsTheyWere
        };
        is_due(self.every, &now, last, whereabouts, last.at.elapsed())
    }

    /// Saves a state; what goes wrong is told, and the run goes on.
    pub(super) fn save(&self, store: &Store, state: StoreState, run: RunRecord, occasion: Occasion) {
        let (term, version, whole) = (state.book.term, state.book.version, is_whole(&state));
        let (agreed, roster) = (run.agreed.clone(), roster(&state.book.workers));
        let present = || state.book.workers.iter().filter(|page| page.present);
        let num_awaited = present().filter(|page| !page.away).count();
        let present = present().map(|page| page.worker_id.clone()).collect();
        let pushes =
            state.book.workers.iter().map(|page| (page.worker_id.clone(), page.tally.pushes)).collect();
        let attendance = state.attendance;
        let what = What { term, version, agreed, attendance, present, num_awaited, pushes, roster };
        let mut directory = lock(&self.directory);
        // Without the wait for whoever reads one there.
        let begun = Instant::now();
        let saved = match directory.as_mut() {
            // Whoever writes the last one has left; what it could not write it has told.
            None if occasion != Occasion::Replaced => return,
            None => {
                let directory = self.path.display();
                return tracing::warn!(%directory, error = "the server has stopped", version, "{LOST}");
            }
            Some(directory) => directory.save(store, state, run),
        };
        drop(directory);
        match saved {
            Ok(path) => {
                let (at, took) = (Instant::now(), begun.elapsed());
                tracing::info!(
                    path = %path.display(),
                    version,
                    took = ?Duration::from_millis(u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
                    "a checkpoint is written"
                );
                let last = Some(Written { path, what, whole, at, took });
                *lock(&self.news) = News { last, ..News::default() };
            }
            Err(error) => self.tell_failure(error.to_string(), version, occasion),
        }
    }

    /// Tells that one could not be written, and lets it be tried again after a while.
    pub(super) fn tell_failure(&self, error: String, version: u64, occasion: Occasion) {
        let directory = self.path.display();
        let mut news = lock(&self.news);
        let kept = news.last.as_ref().map(|last| last.what.version).or(self.resumed_version);
        match occasion {
            Occasion::Last => tracing::error!(%error, version, kept, "{NOT_THE_LAST}"),
            Occasion::Due => tracing::error!(%error, version, "{NOT_WRITTEN}"),
            Occasion::Replaced => tracing::warn!(%directory, %error, version, "{NOT_KEPT}"),
        }
        (news.failed, news.not_before) = (Some(error), Some(Instant::now() + RETRY));
    }

    /// Leaves the directory to others.
    pub(super) fn release(&self) {
        drop(lock(&self.directory).take());
    }
}

/// What a checkpoint would have now.
#[derive(Clone, Debug)]
struct Now {
    term: u64,
    version: u64,
    agreed: Agreed,
    attendance: Attendance,
    roster: BTreeSet<u32>,
}

impl Now {
    /// Whether it would have something that the last one has not, apart from who came and went.
    fn differs(&self, last: &What) -> bool {
        (self.term, self.version) != (last.term, last.version)
            || self.agreed != last.agreed
            || self.roster != last.roster
    }

    /// Whether anybody came or went since.
    fn has_other_visits(&self, last: &What) -> bool {
        self.attendance.comings_and_goings != last.attendance.comings_and_goings
    }
}

/// What has become of the workers that the last checkpoint has as present, and of those that came since and have pushed: a
/// life that goes on from it would wait for them, and nobody would make what they have pushed again. Of others that came and
/// went nothing would be missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    AsTheyWere,
    /// Some were given up, or have come back since they were.
    Changed,
    /// Some have departed.
    SomeLeft,
}

impl Whereabouts {
    /// `has_lost_work`: whether somebody has departed of whose pushes the last checkpoint does not have all. Its name may be
    /// another process's by then.
    fn since(last: &What, (num_present, num_awaited): (usize, usize), has_lost_work: bool) -> Self {
        if num_present < last.present.len() || has_lost_work {
            Self::SomeLeft
        } else if num_awaited != last.num_awaited {
            Self::Changed
        } else {
            Self::AsTheyWere
        }
    }
}

/// Whether a checkpoint is due in mid-run, so long after the last one. Besides those that were asked for: at once when all
/// values were replaced; soon when workers have agreed on something else, or one has gone for good, whom the next life is
/// not to wait for; and when nobody is there, so that what was done is kept although nothing more comes.
fn is_due(every: Every, now: &Now, last: &Written, whereabouts: Whereabouts, elapsed: Duration) -> bool {
    let Written { what: last, took, .. } = last;
    let has_changed = now.agreed != last.agreed || whereabouts == Whereabouts::SomeLeft;
    let has_news = now.differs(last) || whereabouts != Whereabouts::AsTheyWere;
    let is_deserted = !now.attendance.is_anybody_here && has_news;
    now.term != last.term
        || has_changed && elapsed >= CHANGED.max(took.saturating_mul(TIMES_A_SAVE))
        || is_deserted && elapsed >= DESERTED
        || match every {
            Every::Versions(number) => now.version.saturating_sub(last.version) >= number,
            Every::Time(time) => now.version != last.version && elapsed >= time,
        }
}

fn is_whole(state: &StoreState) -> bool {
    let mut answers = state.book.workers.iter().flat_map(|page| &page.recent);
    !answers.any(|(_, answer)| matches!(answer, Answer::Unfinished(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const RARELY: Every = Every::Versions(1000);

    fn now() -> Now {
        let attendance = Attendance { comings_and_goings: 4, is_anybody_here: true };
        Now { term: 2, version: 500, agreed: Agreed::default(), attendance, roster: BTreeSet::from([7]) }
    }

    /// One that has what is so now.
    fn last() -> Written {
        let Now { term, version, agreed, attendance, roster } = now();
        let present = ["a", "b", "away"].map(str::to_owned).into();
        let pushes = BTreeMap::new();
        let what = What { term, version, agreed, attendance, present, num_awaited: 2, pushes, roster };
        Written { path: PathBuf::new(), what, whole: true, at: Instant::now(), took: SECOND / 4 }
    }

    fn pushed(number: u64) -> Now {
        Now { version: now().version + number, ..now() }
    }

    fn is_due(every: Every, now: &Now, elapsed: Duration) -> bool {
        super::is_due(every, now, &last(), Whereabouts::AsTheyWere, elapsed)
    }

    #[test]
    fn it_is_due_as_often_as_was_asked_for() {
        assert!(!is_due(RARELY, &pushed(999), 100 * SECOND));
        assert!(is_due(RARELY, &pushed(1000), Duration::ZERO));
        assert!(!is_due(Every::Time(30 * SECOND), &pushed(1), 29 * SECOND));
        assert!(is_due(Every::Time(30 * SECOND), &pushed(1), 30 * SECOND));
        assert!(!is_due(Every::Time(30 * SECOND), &now(), 100 * SECOND), "nothing is new");
        assert!(is_due(RARELY, &Now { term: 3, ..now() }, Duration::ZERO));
    }

    #[test]
    fn where_nobody_is_there_all_that_is_new_is_kept() {
        let deserted =
            |now: Now| Now { attendance: Attendance { is_anybody_here: false, ..now.attendance }, ..now };
        for every in [RARELY, Every::Time(30 * SECOND)] {
            assert!(!is_due(every, &pushed(1), 20 * SECOND), "somebody is there");
            assert!(is_due(every, &deserted(pushed(1)), SECOND));
            assert!(!is_due(every, &deserted(pushed(1)), SECOND / 2));
            assert!(!is_due(every, &deserted(now()), 100 * SECOND), "nothing is new");
            for whereabouts in [Whereabouts::Changed, Whereabouts::SomeLeft] {
                assert!(
                    super::is_due(every, &deserted(now()), &last(), whereabouts, SECOND),
                    "{whereabouts:?}"
                );
            }
        }
    }

    #[test]
    fn a_goodbye_of_one_that_it_has_is_kept_soon_and_others_with_the_next() {
        let left = |took, elapsed| {
            let last = Written { took, ..last() };
            super::is_due(RARELY, &now(), &last, Whereabouts::SomeLeft, elapsed)
        };
        assert!(left(SECOND / 4, CHANGED));
        assert!(!left(SECOND / 4, CHANGED / 2));
        assert!(!left(3 * SECOND, 59 * SECOND), "writing is to be a small part of the time");
        assert!(left(3 * SECOND, 60 * SECOND));
        assert!(
            !super::is_due(RARELY, &now(), &last(), Whereabouts::Changed, 100 * SECOND),
            "it may come back"
        );
        let came = Attendance { comings_and_goings: 5, ..now().attendance };
        let visited = Now { attendance: came, ..now() };
        assert!(!is_due(RARELY, &visited, 100 * SECOND), "a stranger");
        assert!(
            visited.has_other_visits(&last().what) && !now().has_other_visits(&last().what),
            "the last one has it"
        );
        assert!(
            Now { roster: BTreeSet::new(), ..now() }.differs(&last().what),
            "and who is waited for in rounds"
        );
    }

    #[test]
    fn what_has_become_of_those_that_it_has() {
        let of = |left| Whereabouts::since(&last().what, left, false);
        assert_eq!(of((3, 2)), Whereabouts::AsTheyWere);
        assert_eq!(of((3, 1)), Whereabouts::Changed, "one was given up");
        assert_eq!(of((3, 3)), Whereabouts::Changed, "one is back");
        assert_eq!(of((2, 2)), Whereabouts::SomeLeft, "or another has its place");
        assert_eq!(
            Whereabouts::since(&last().what, (3, 2), true),
            Whereabouts::SomeLeft,
            "one that came since, with what it has pushed"
        );
    }
}
