//! Where a server keeps its checkpoints: one folder each, which has its name only when everything in it is on the
//! disk. A crash, a full disk or a lost machine leaves the checkpoint before, or the new one, and never less.

use super::choice::{self, Choice, Contents, Held};
use super::error::DirectoryError;
use super::files;
use super::folder::{self, Checkpoint, DAMAGED, EARLIER, Mark, folders};
use super::lives::Lives;
use super::watch::Watch;
use crate::fork::ClosedInChildren;
use offbeat_core::checkpoint::{Draft, FileEntry, MANIFEST, Manifest, RunRecord};
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Life, Store, StoreState};
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What holds the directory's lock.
pub(super) const LOCK: &str = "lock";
/// A checkpoint that is being written.
const NEW: &str = ".new";
/// One that is being removed.
const OLD: &str = ".old";

/// A run was brought back to one of its checkpoints.
#[derive(Clone, Copy, Debug)]
struct Return {
    to: Mark,
    /// In which the run goes on from there.
    term: u64,
}

impl Return {
    /// Whether a checkpoint is of what was left behind then.
    const fn leaves(self, mark: Mark) -> bool {
        mark.number > self.to.number && mark.term < self.term
    }
}

/// A directory of checkpoints, for one server at a time.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    lives: Lives,
    /// Where this server's run was brought back to, oldest term first.
    returns: Vec<Return>,
    /// A child that is forked must not hold on to it when its parent has died.
    _lock: ClosedInChildren<File>,
}

impl Directory {
    /// Takes a directory, which is made if it is not there, and removes what a server that was killed left half done.
    ///
    /// # Errors
    /// [`DirectoryError::Trainers`] where one that trains without a server has its own; [`DirectoryError::Locked`] while
    /// another server has it; [`DirectoryError::Io`].
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        files::create_directories(path)?;
        if let Some(found) = folder::of_a_trainer(path)? {
            return Err(DirectoryError::Trainers { path: path.to_owned(), found });
        }
        let lock = ClosedInChildren::new(lock(path)?);
        for half_done in [NEW, OLD] {
            files::remove(&path.join(half_done))?;
        }
        Ok(Self { path: path.to_owned(), lives: Lives::open(path)?, returns: Vec::new(), _lock: lock })
    }

    /// The life of a server that begins now, after all that have begun here and `after`, which a checkpoint knows of.
    #[must_use]
    pub fn next_life(&self, after: Life) -> Life {
        self.lives.next(after)
    }

    /// Begins a life; no other will have its term or its incarnations, up to the one that this returns.
    ///
    /// # Errors
    /// [`DirectoryError::Io`], [`DirectoryError::Life`] after the last one; it must not be used then.
    pub fn begin_life(&mut self, life: Life) -> Result<u32, DirectoryError> {
        self.lives.begin(life)
    }

    /// Makes incarnations after `last` the life's own, up to the one that this returns.
    ///
    /// # Errors
    /// As [`Self::begin_life`].
    pub fn reserve_incarnations(&mut self, last: u32) -> Result<u32, DirectoryError> {
        self.lives.reserve_incarnations(last)
    }

    /// Makes a term the life's own, before all of the model's values are replaced.
    ///
    /// # Errors
    /// As [`Self::begin_life`].
    pub fn reserve_term(&mut self, term: u64) -> Result<(), DirectoryError> {
        self.lives.reserve_term(term)
    }

    /// The run goes on from one of these checkpoints in a term: what was written since that one, in other terms, is the
    /// first to make room. That is known as long as the directory is held.
    pub fn went_back(&mut self, to: Mark, term: u64) {
        // Where one is gone back to that had been left behind, it counts again, and what led to it.
        self.returns.retain(|before| before.to.number < to.number && !before.leaves(to));
        self.returns.push(Return { to, term });
    }

    /// Whether newer ones than this were saved here, and taken away: not where the last of them is damaged. So it is taken
    /// to be where nobody has noted which is the last, as in a copy.
    ///
    /// # Errors
    /// [`DirectoryError::Io`].
    pub fn lacks_newer_than(&self, checkpoint: &Checkpoint) -> Result<bool, DirectoryError> {
        let last = self.lives.last_saved();
        if last == 0 || checkpoint.mark().number >= last {
            return Ok(last == 0);
        }
        let is_there = |prefix: &str| {
            let path = self.path.join(format!("{prefix}{}", folder::name(last)));
            path.try_exists().map_err(DirectoryError::io("look for", &path))
        };
        Ok(!(is_there("")? || is_there(DAMAGED)?))
    }

    /// Writes a checkpoint, and returns its folder when it is on the disk; then those that are
    /// [not kept](super::KEPT) are removed.
    ///
    /// # Errors
    /// [`DirectoryError`]; the checkpoints before are as they were.
    pub fn save(
        &mut self,
        store: &Store,
        state: StoreState,
        run: RunRecord,
    ) -> Result<PathBuf, DirectoryError> {
        let number = folder::next_number(&self.path)?;
        let folder = self.path.join(folder::name(number));
        let new = self.path.join(NEW);
        let draft = Draft::new(store.table(), store.layout(), state);
        let draft = draft.map_err(DirectoryError::checkpoint(&folder))?;
        let written = write(&new, draft, run, store.transaction()).and_then(|()| self.name(&new, &folder));
        if let Err(error) = written {
            // What is half done needs its room; the next save or start tries again to remove it.
            let left =
                |left: &DirectoryError| tracing::warn!(error = %left, "an unfinished checkpoint is left");
            files::remove(&new).inspect_err(left).ok();
            return Err(error);
        }
        if let Err(error) = self.lives.note_saved(number) {
            tracing::warn!(%error, "it is not noted which checkpoint is the newest");
        }
        if let Err(error) = self.prune(&folder) {
            tracing::warn!(%error, "older checkpoints could not be removed");
        }
        Ok(folder)
    }

    /// Gives a checkpoint its name, and takes it back if the name does not get to the disk: one that the next crash may
    /// undo is not to be counted among the newest, nor to stay beside those that follow.
    fn name(&self, new: &Path, folder: &Path) -> Result<(), DirectoryError> {
        fs::rename(new, folder).map_err(DirectoryError::io("rename", new))?;
        files::sync_names(&self.path).inspect_err(|_| {
            if let Err(error) = fs::rename(folder, new).map_err(DirectoryError::io("rename", folder)) {
                tracing::warn!(%error, "a checkpoint is left that a crash of the machine may undo");
            }
        })
    }

    /// The newest checkpoint that is as it was written and that `restore` can use; `None` where there is none at all. One
    /// that is damaged is named in the log and set aside under another name, and the one before it is tried.
    ///
    /// # Errors
    /// [`DirectoryError::NoneUsable`] where there are some and all are damaged. Whatever else keeps one from being read
    /// (another format, no permission, a disk that fails) is an error at once: an older one would lose what it holds.
    pub fn newest<T>(
        &self,
        mut restore: impl FnMut(Checkpoint) -> Result<T, DirectoryError>,
    ) -> Result<Option<T>, DirectoryError> {
        let found = folders(&self.path)?;
        let attempt = |folder: &Path| {
            let used = Checkpoint::verified(folder, &Watch::none()).and_then(&mut restore);
            used.inspect_err(|error| {
                if error.is_damage() {
                    tracing::error!(%error, "a checkpoint cannot be used: the one before it is tried");
                }
            })
        };
        let Some(Choice { used, damaged }) = choice::newest(&self.path, found, attempt)? else {
            return Ok(None);
        };
        damaged.iter().try_for_each(|(folder, _)| self.set_aside(DAMAGED, folder))?;
        Ok(Some(used))
    }

    /// The newest checkpoint, or the newest with the values of a version, once its files are found to be as they were
    /// written; else what there is. Where a version is given, checkpoints whose manifest cannot be read are passed over,
    /// with a warning; so is a damaged one of the version, where another of the same term, or with the same files, is
    /// there: in an older term the values of a version may have been others.
    ///
    /// # Errors
    /// As [`Checkpoint::verified`]: of the newest where no version is given; of the newest of the version where none of it
    /// can be used.
    pub fn find(&self, version: Option<u64>) -> Result<Result<Checkpoint, Others>, DirectoryError> {
        let mut others = Others::default();
        let mut damaged: Option<(u64, Vec<FileEntry>, DirectoryError)> = None;
        for folder in folders(&self.path)? {
            let checkpoint = match Checkpoint::unverified(&folder) {
                Ok(checkpoint) => checkpoint,
                Err(error) if version.is_some() => {
                    tracing::warn!(%error, "a checkpoint cannot be read, and is passed over");
                    others.unread.push(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let (term, found) = (checkpoint.manifest.book.term, checkpoint.manifest.values_of());
            let files = &checkpoint.manifest.files;
            let is_other = damaged.as_ref().is_some_and(|(of, same, _)| *of != term && same != files);
            if version.is_none_or(|wanted| wanted == found) && !is_other {
                match checkpoint.verify(&Watch::none()) {
                    Ok(()) => return Ok(Ok(checkpoint)),
                    Err(error) if version.is_none() => return Err(error),
                    Err(error) => {
                        tracing::warn!(%error, "a checkpoint of the version cannot be used");
                        damaged.get_or_insert((term, files.clone(), error));
                    }
                }
            }
            others.versions.push(found);
        }
        damaged.map_or(Ok(Err(others)), |(.., error)| Err(error))
    }

    /// Gives every checkpoint another name: a run that begins anew neither goes on from them nor removes them.
    ///
    /// # Errors
    /// [`DirectoryError::Io`].
    pub fn set_all_aside(&mut self) -> Result<(), DirectoryError> {
        folders(&self.path)?.iter().try_for_each(|folder| self.set_aside(EARLIER, folder))
    }

    fn set_aside(&self, prefix: &str, folder: &Path) -> Result<(), DirectoryError> {
        let aside = self.path.join(format!("{prefix}{}", folder::short(folder)));
        fs::rename(folder, &aside).map_err(DirectoryError::io("rename", folder))?;
        tracing::warn!(from = %folder.display(), to = %aside.display(), "a checkpoint is set aside");
        Ok(())
    }

    /// Removes what is not kept, but never what has just been written: one that was begun before the run was brought back
    /// is left behind as soon as it is there, and its caller tells of it.
    fn prune(&mut self, written: &Path) -> Result<(), DirectoryError> {
        let old = self.path.join(OLD);
        let (mut found, mut held, mut marks) = (Vec::new(), Vec::new(), Vec::new());
        let mut is_all_read = true;
        for folder in folders(&self.path)? {
            held.push(match Checkpoint::unverified(&folder) {
                Ok(checkpoint) => {
                    let mark = checkpoint.mark();
                    marks.push(mark);
                    let is_left = self.returns.iter().any(|one| one.leaves(mark));
                    let Manifest { book, files, .. } = checkpoint.manifest;
                    let contents = Contents { term: book.term, version: book.version, files };
                    if is_left { Held::LeftBehind(contents) } else { Held::Whole(contents) }
                }
                Err(error) if error.is_damage() => Held::Damaged,
                Err(error) => {
                    tracing::warn!(%error, "a checkpoint that cannot be read is left where it is");
                    is_all_read = false;
                    continue;
                }
            });
            found.push(folder);
        }
        let superfluous =
            choice::superfluous(&held, Contents::is_copy).into_iter().map(|place| &found[place]);
        for folder in superfluous.filter(|folder| *folder != written) {
            files::remove(&old)?;
            // First its name: what is removed in part is not taken for a checkpoint.
            fs::rename(folder, &old).map_err(DirectoryError::io("remove", folder))?;
            files::remove(&old)?;
        }
        if is_all_read {
            // What comes later is of later terms: a return that leaves nothing of these leaves nothing any more.
            self.returns.retain(|one| marks.iter().any(|&mark| one.leaves(mark)));
        }
        Ok(())
    }
}

/// What is in a directory in place of the checkpoint that was looked for.
#[derive(Debug, Default)]
pub struct Others {
    /// Of which they have the values, newest first.
    pub versions: Vec<u64>,
    /// Why it is not known of which version others are.
    pub unread: Vec<DirectoryError>,
}

impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there are those of versions {:?}", self.versions)?;
        match self.unread.as_slice() {
            [] => Ok(()),
            [first] => write!(f, ", and one that cannot be read: {first}"),
            [first, ..] => write!(f, ", and {} that cannot be read, the first: {first}", self.unread.len()),
        }
    }
}

/// Writes a checkpoint's files into a new folder, the manifest last.
fn write(
    folder: &Path,
    mut draft: Draft<'_>,
    run: RunRecord,
    transaction: Transaction,
) -> Result<(), DirectoryError> {
    files::remove(folder)?;
    fs::create_dir(folder).map_err(DirectoryError::io("create", folder))?;
    let mut entries = Vec::new();
    for name in draft.files() {
        let written = |file: &File| draft.write(name, file).map_err(DirectoryError::checkpoint(folder));
        entries.push(files::write_new(&folder.join(name), written)?);
    }
    let manifest = draft.manifest(entries, run, transaction, env!("CARGO_PKG_VERSION")).encode();
    let manifest = manifest.map_err(DirectoryError::checkpoint(folder))?;
    let path = folder.join(MANIFEST);
    files::write_new(&path, |mut file| {
        file.write_all(&manifest).map_err(DirectoryError::io("write", &path))
    })?;
    files::sync_names(folder)
}

/// Locks a directory for as long as the file is open.
fn lock(directory: &Path) -> Result<File, DirectoryError> {
    let path = directory.join(LOCK);
    let file = files::open_lock(&path).map_err(DirectoryError::io("lock", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DirectoryError::Locked { path: directory.to_owned() }),
        Err(TryLockError::Error(cause)) => Err(DirectoryError::io("lock", &path)(cause)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::folder::checkpoints;
    use super::*;
    use offbeat_core::checkpoint::CheckpointError;
    use offbeat_core::dtype::Dtype;
    use offbeat_core::store::StoreConfig;
    use offbeat_core::store::book::MOST;
    use offbeat_core::table::{Role, TensorSpec, TensorTable};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that is gone after the test.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new() -> Self {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("offbeat-test-{}-{number}", std::process::id()));
            fs::remove_dir_all(&path).ok(); // of a test that was killed
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn store() -> Arc<Store> {
        store_of(1)
    }

    fn store_of(byte: u8) -> Arc<Store> {
        let (name, dtype, role) = ("w".into(), Dtype::F32, Role::Parameter);
        let table =
            TensorTable::new(vec![TensorSpec { name, aliases: vec![], shape: vec![1000], dtype, role }]);
        Store::new(Arc::new(table.unwrap()), StoreConfig::default(), 1, &mut |_, bytes| bytes.fill(byte))
    }

    /// Saves the store as if so many updates had been made.
    fn save(directory: &mut Directory, store: &Arc<Store>, version: u64) -> PathBuf {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        state.book.version = version;
        directory.save(store, state, RunRecord::default()).unwrap()
    }

    #[test]
    fn of_a_version_whose_newest_is_damaged_an_older_one_is_found_in_the_same_term_alone() {
        for (term, is_found) in [(2, true), (1, false)] {
            let place = Temporary::new();
            let mut directory = Directory::open(&place.0).unwrap();
            for (of, store) in [(term, store()), (2, store_of(2)), (2, store_of(3))] {
                let mut state = store.begin_cut().unwrap().take().unwrap();
                (state.book.term, state.book.version) = (of, 10);
                directory.save(&store, state, RunRecord::default()).unwrap();
            }
            let folders: Vec<PathBuf> = folders(&place.0).unwrap();
            for folder in &folders[..2] {
                fs::write(folder.join("model.safetensors"), "damaged").unwrap();
            }
            match directory.find(Some(10)) {
                Ok(Ok(found)) => assert!(is_found && found.path == folders[2]),
                Ok(Err(others)) => panic!("{others}"),
                Err(error) => assert!(!is_found && error.is_damage(), "{error}"),
            }
        }
    }

    #[test]
    fn what_is_there_in_place_of_a_version_is_told_with_what_cannot_be_read() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let folders: Vec<PathBuf> =
            [7, 8, 9].map(|version| save(&mut directory, &store, version)).into_iter().collect();
        let told = || directory.find(Some(77)).unwrap().map(|found| found.path).unwrap_err().to_string();
        assert_eq!(told(), "there are those of versions [9, 8, 7]");
        fs::write(folders[0].join(MANIFEST), "{").unwrap();
        let one = told();
        assert!(
            one.starts_with("there are those of versions [9, 8], and one that cannot be read: "),
            "{one}"
        );
        fs::write(folders[2].join(MANIFEST), "{").unwrap();
        let two = told();
        assert!(
            two.starts_with("there are those of versions [8], and 2 that cannot be read, the first: "),
            "{two}"
        );
    }

    #[test]
    fn the_newest_three_versions_are_kept_and_the_newest_is_used() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0.join("is/made")).unwrap();
        assert!(directory.newest(Ok).unwrap().is_none());
        for version in [1, 2, 10, 10, 9] {
            save(&mut directory, &store, version);
        }
        let kept = checkpoints(&place.0.join("is/made")).unwrap();
        let numbers: Vec<_> = kept.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [5, 4, 2], "the third is a copy of the fourth");
        let newest = directory.newest(Ok).unwrap().unwrap();
        assert_eq!(newest.manifest.book.version, 9, "the last that was saved, whatever its version");
        assert!(newest.path.ends_with("checkpoint-000005"), "{:?}", newest.path);
        let life = Life { term: 2, last_incarnation: 0 };
        let restored = newest.restore(StoreConfig::default(), life, &Watch::none()).unwrap();
        assert_eq!((restored.term(), restored.version()), (2, 9));
        assert_eq!(restored.reader().root(0).held(), store.reader().root(0).held());
    }

    /// Saves the store as if so many updates had been made in this term.
    fn save_in(directory: &mut Directory, store: &Arc<Store>, term: u64, version: u64) -> PathBuf {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        (state.book.term, state.book.version) = (term, version);
        directory.save(store, state, RunRecord::default()).unwrap()
    }

    #[test]
    fn what_was_just_written_stays_though_the_run_was_brought_back_meanwhile() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let numbers = || checkpoints(&place.0).unwrap().iter().map(|(number, _)| *number).collect::<Vec<_>>();
        for version in 1..=3 {
            save_in(&mut directory, &store, 1, version);
        }
        let mark = directory.find(None).unwrap().unwrap().mark();
        directory.went_back(mark, 2);
        let late = save_in(&mut directory, &store, 1, 4);
        assert!(late.exists());
        assert_eq!(numbers(), [4, 3, 2, 1]);
        save_in(&mut directory, &store_of(2), 2, 5);
        assert_eq!(numbers(), [5, 3, 2], "it goes with the next");
    }

    #[test]
    fn a_return_is_forgotten_when_there_is_nothing_that_it_has_left_behind() {
        let place = Temporary::new();
        let mut directory = Directory::open(&place.0).unwrap();
        save_in(&mut directory, &store(), 1, 1);
        for term in 2..=9 {
            let mark = directory.find(None).unwrap().unwrap().mark();
            directory.went_back(mark, term);
            save_in(&mut directory, &store(), term, term);
            assert!(directory.returns.is_empty(), "of the newest nothing is left");
        }
        let before = directory.find(None).unwrap().unwrap().mark();
        save_in(&mut directory, &store_of(2), 9, 10);
        directory.went_back(before, 10);
        save_in(&mut directory, &store(), 10, 10);
        assert_eq!(directory.returns.len(), 1, "the newest of before is there");
    }

    #[test]
    fn a_return_to_the_newest_again_and_again_pushes_out_nothing_older() {
        let place = Temporary::new();
        let mut directory = Directory::open(&place.0).unwrap();
        for version in 1..=3 {
            save_in(&mut directory, &store_of(version), 1, version.into());
        }
        for term in 2..=5 {
            let mark = directory.find(None).unwrap().unwrap().mark();
            directory.went_back(mark, term);
            save_in(&mut directory, &store_of(3), term, 2 + term);
        }
        let kept = checkpoints(&place.0).unwrap();
        assert_eq!(kept.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [7, 6, 2, 1]);
    }

    #[test]
    fn what_was_gone_back_to_stays_under_its_version_while_there_is_room() {
        let place = Temporary::new();
        let mut directory = Directory::open(&place.0).unwrap();
        save_in(&mut directory, &store(), 1, 0);
        let mark = directory.find(Some(0)).unwrap().unwrap().mark();
        directory.went_back(mark, 2);
        save_in(&mut directory, &store(), 2, 1);
        let newest = save_in(&mut directory, &store_of(2), 2, 3);
        let kept = checkpoints(&place.0).unwrap();
        assert_eq!(kept.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [3, 2, 1]);
        assert_eq!(directory.find(Some(3)).unwrap().unwrap().path, newest);
    }

    /// Saves the store at a term and version, with the values of another version.
    fn save_again(
        directory: &mut Directory,
        store: &Arc<Store>,
        (term, version): (u64, u64),
        values_of: u64,
    ) -> PathBuf {
        let mut state = store.begin_cut().unwrap().take().unwrap();
        (state.book.term, state.book.version) = (term, version);
        let run = RunRecord { gone_back_to: Some(values_of), ..RunRecord::default() };
        directory.save(store, state, run).unwrap()
    }

    #[test]
    fn a_checkpoint_is_found_by_the_version_of_its_values_and_one_with_those_of_another_is_not() {
        let place = Temporary::new();
        let mut directory = Directory::open(&place.0).unwrap();
        let three = save_in(&mut directory, &store_of(3), 1, 3);
        let five = save_in(&mut directory, &store_of(5), 1, 5);
        let find = |directory: &Directory, version| directory.find(Some(version)).unwrap().unwrap().path;
        let again = save_again(&mut directory, &store_of(3), (2, 5), 3);
        assert_eq!((find(&directory, 5), find(&directory, 3)), (five, again.clone()));
        fs::write(again.join("model.safetensors"), "damaged").unwrap();
        assert_eq!(find(&directory, 3), three, "it has the same files, of another term");
        fs::remove_dir_all(again).unwrap();
        let again = save_again(&mut directory, &store_of(3), (3, 5), 3);
        fs::remove_dir_all(three).unwrap();
        assert_eq!(find(&directory, 3), again, "its values are kept");
    }

    #[test]
    fn values_that_were_replaced_are_no_copy() {
        let place = Temporary::new();
        let (store, replaced) = (store(), store_of(2));
        let mut directory = Directory::open(&place.0).unwrap();
        for (store, version) in [(&store, 1), (&store, 2), (&replaced, 2), (&replaced, 2), (&replaced, 3)] {
            save(&mut directory, store, version);
        }
        let kept = checkpoints(&place.0).unwrap();
        assert_eq!(kept.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [5, 4, 2]);
    }

    #[test]
    fn one_that_cannot_be_read_is_left_and_keeps_no_other() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let first = save(&mut directory, &store, 1);
        fs::rename(first.join(MANIFEST), first.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", first.join(MANIFEST)).unwrap(); // a link is not followed
        for version in 2..8 {
            save(&mut directory, &store, version);
        }
        let kept = checkpoints(&place.0).unwrap();
        assert_eq!(kept.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [7, 6, 5, 1]);
    }

    #[test]
    fn a_damaged_one_is_set_aside_once_another_is_found_and_all_damaged_is_an_error() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let (first, second) = (save(&mut directory, &store, 1), save(&mut directory, &store, 2));
        fs::remove_file(second.join(MANIFEST)).unwrap();
        assert_eq!(directory.newest(Ok).unwrap().unwrap().path, first);
        assert_eq!(place.names(), ["checkpoint-000001", "damaged-checkpoint-000002", "life.json", "lock"]);
        let second = save(&mut directory, &store, 2);
        assert!(second.ends_with("checkpoint-000003"), "no number is given twice");
        fs::remove_file(second.join(MANIFEST)).unwrap();
        let refuse = |path: &Path| {
            let cause = CheckpointError::Damaged { file: MANIFEST, what: "it is ours to say".into() };
            DirectoryError::checkpoint(path)(cause)
        };
        let told = directory.newest(|c| Err::<(), _>(refuse(&c.path))).unwrap_err().to_string();
        assert!(told.starts_with("none of the 2 checkpoints in"), "{told}");
        let folder = second.display();
        assert!(told.contains(&format!("{folder}: manifest.json is damaged: it is not there")), "{told}");
        assert_eq!(place.names().len(), 5, "nothing is set aside, so that the next start says the same");
        let model = first.join("model.safetensors");
        let mut bytes = fs::read(&model).unwrap();
        bytes[500] ^= 1;
        fs::write(&model, bytes).unwrap();
        let told = Checkpoint::verified(&first, &Watch::none()).unwrap_err().to_string();
        assert!(told.contains("model.safetensors is damaged: its SHA-256 is"), "{told}");
        assert_eq!(directory.newest(Ok).unwrap_err().to_string().matches("none of the 2").count(), 1);
    }

    #[test]
    fn a_trainer_s_directory_is_refused_and_stays_as_it_is() {
        for (name, is_refused) in [
            ("save-000012-step-80", true),
            ("damaged-save-1000000-step-0", true),
            ("save-000012-step-", false),
            ("save-12-step-80", false),
            ("save-best-step-80", false),
            ("my-save-000012-step-80", false),
        ] {
            let place = Temporary::new();
            fs::create_dir_all(place.0.join(name)).unwrap();
            let told = Directory::open(&place.0).map(drop).map_err(|error| error.to_string());
            assert_eq!(told.is_err(), is_refused, "{name}");
            if let Err(told) = told {
                assert!(
                    told.contains(&format!("a FaultTolerantTrainer keeps its checkpoints there ({name})"))
                );
                assert_eq!(place.names(), [name]);
            }
        }
    }

    #[test]
    fn no_term_and_no_incarnation_is_given_to_two_lives() {
        let place = Temporary::new();
        let none = Life { term: 0, last_incarnation: 0 };
        let mut directory = Directory::open(&place.0).unwrap();
        let first = directory.next_life(none);
        assert_eq!((first.term, first.last_incarnation), (1, 0));
        assert_eq!(directory.next_life(none).term, 1, "nothing has begun yet");
        let block = directory.begin_life(first).unwrap();
        assert_eq!(directory.reserve_incarnations(block - 1).unwrap(), block, "one is left");
        assert_eq!(directory.reserve_incarnations(block).unwrap(), 2 * block);
        directory.reserve_term(5).unwrap();
        drop(directory);
        let mut directory = Directory::open(&place.0).unwrap();
        let second = directory.next_life(none);
        assert_eq!(second.term, 6);
        assert_eq!(second.last_incarnation, 2 * block);
        let moved_here = Life { term: 40, last_incarnation: 3_000_000 };
        let after = directory.next_life(moved_here);
        assert_eq!((after.term, after.last_incarnation), (41, 3_000_000));
        directory.begin_life(after).unwrap();
        assert_eq!(place.names(), ["life.json", "lock"]);
        drop(directory);
        for (text, what) in [
            ("{", "EOF"),
            (r#"{"term":18446744073709551615,"last_incarnation":1}"#, "term 18446744073709551615 is above"),
            (r#"{"term":1,"last_incarnation":4294967295}"#, "incarnation 4294967295 is above"),
        ] {
            fs::write(place.0.join("life.json"), text).unwrap();
            let told = Directory::open(&place.0).unwrap_err().to_string();
            assert!(told.contains("life.json is damaged") && told.contains("remove it"), "{told}");
            assert!(told.contains(what), "{told}");
        }
        fs::write(place.0.join("life.json"), format!(r#"{{"term":{MOST},"last_incarnation":0}}"#)).unwrap();
        let mut directory = Directory::open(&place.0).unwrap();
        let beyond = directory.next_life(none);
        assert!(directory.begin_life(beyond).is_err() && directory.reserve_term(MOST + 1).is_err());
    }

    #[test]
    fn what_is_no_damage_is_an_error_and_nothing_older_is_taken() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let (_, second) = (save(&mut directory, &store, 1), save(&mut directory, &store, 2));
        let model = second.join("model.safetensors");
        fs::rename(&model, place.0.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("../elsewhere", &model).unwrap();
        let told = directory.newest(Ok).unwrap_err().to_string();
        assert!(told.contains("model.safetensors cannot be read: "), "{told}");
        fs::remove_file(&model).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &model, rustix::fs::Mode::RUSR).unwrap();
        let told = directory.newest(Ok).unwrap_err().to_string();
        assert!(told.contains("it is no plain file"), "{told}");
        fs::remove_file(&model).unwrap();
        fs::rename(place.0.join("elsewhere"), &model).unwrap();
        assert_eq!(directory.newest(Ok).unwrap().unwrap().path, second);
    }

    #[test]
    fn other_names_are_no_checkpoints() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let folder = save(&mut directory, &store, 1);
        std::os::unix::fs::symlink(&folder, place.0.join("checkpoint-000002")).unwrap();
        assert!(
            save(&mut directory, &store, 2).ends_with("checkpoint-000003"),
            "beside whatever has the name"
        );
        fs::remove_dir_all(place.0.join("checkpoint-000003")).unwrap();
        for stranger in
            ["checkpoint-3", "checkpoint-", "notes", "checkpoint-00000x", "damaged-checkpoint-000009"]
        {
            fs::create_dir(place.0.join(stranger)).unwrap();
        }
        assert_eq!(checkpoints(&place.0).unwrap(), [(1, folder)]);
    }

    #[test]
    fn one_server_has_a_directory_and_what_it_left_half_done_is_removed() {
        let place = Temporary::new();
        let directory = Directory::open(&place.0).unwrap();
        fs::create_dir_all(place.0.join(NEW)).unwrap();
        let refused = Directory::open(&place.0).unwrap_err().to_string();
        assert!(refused.ends_with(
            "is in use by another server: stop that one, or give this one a directory of its own"
        ));
        assert!(place.0.join(NEW).exists(), "the other one's");
        drop(directory);
        drop(Directory::open(&place.0).unwrap());
        assert!(!place.0.join(NEW).exists());
        let precious = place.0.join("precious");
        fs::write(&precious, "to be kept").unwrap();
        fs::remove_file(place.0.join(LOCK)).unwrap();
        std::os::unix::fs::symlink(&precious, place.0.join(LOCK)).unwrap();
        assert!(Directory::open(&place.0).unwrap_err().to_string().starts_with("cannot lock"));
        assert_eq!(fs::read(&precious).unwrap(), b"to be kept");
    }

    #[test]
    fn a_directory_may_be_a_link_and_what_is_removed_may_hold_directories_but_no_link_is_followed() {
        let place = Temporary::new();
        let (elsewhere, link) = (place.0.join("elsewhere"), place.0.join("link"));
        fs::create_dir_all(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        let store = store();
        let mut directory = Directory::open(&link).unwrap();
        let precious = place.0.join("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), "to be kept").unwrap();
        let first = save(&mut directory, &store, 1);
        fs::create_dir_all(first.join("within/another")).unwrap();
        std::os::unix::fs::symlink(&precious, first.join("within/link")).unwrap();
        for version in 2..=4 {
            save(&mut directory, &store, version);
        }
        let kept: Vec<u64> = checkpoints(&link).unwrap().into_iter().map(|(number, _)| number).collect();
        assert_eq!(kept, [4, 3, 2]);
        assert!(!elsewhere.join(OLD).exists());
        assert_eq!(fs::read(precious.join("file")).unwrap(), b"to be kept");
        std::os::unix::fs::symlink(&precious, elsewhere.join(NEW)).unwrap();
        let state = store.begin_cut().unwrap().take().unwrap();
        let refused = directory.save(&store, state, RunRecord::default()).unwrap_err().to_string();
        assert!(refused.starts_with("cannot remove"), "{refused}");
        assert_eq!(fs::read(precious.join("file")).unwrap(), b"to be kept");
    }

    #[test]
    fn a_save_that_fails_leaves_what_was_there() {
        let place = Temporary::new();
        let store = store();
        let mut directory = Directory::open(&place.0).unwrap();
        let first = save(&mut directory, &store, 1);
        fs::write(place.0.join(NEW), "in the way").unwrap();
        let state = store.begin_cut().unwrap().take().unwrap();
        let refused = directory.save(&store, state, RunRecord::default()).unwrap_err().to_string();
        assert!(refused.starts_with("cannot remove"), "{refused}");
        assert_eq!(directory.newest(Ok).unwrap().unwrap().path, first);
        assert_eq!(place.names(), [".new", "checkpoint-000001", "life.json", "lock"]);
    }
}
