//! A checkpoint's folder, and those of a directory.

use super::error::DirectoryError;
use super::files;
use super::watch::{Watch, Watched};
use offbeat_core::checkpoint::{self, CheckpointError, MANIFEST, MAX_MANIFEST_BYTES, Manifest};
use offbeat_core::store::{Life, Store, StoreConfig};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PREFIX: &str = "checkpoint-";

/// The name of a directory's checkpoint by its number, which counts the saves, whatever was saved: one version of the
/// store may be saved twice, with what was under way the first time.
pub(super) fn name(number: u64) -> String {
    format!("{PREFIX}{number:06}")
}

fn number(name: &str) -> Option<u64> {
    let number = name.strip_prefix(PREFIX)?.parse().ok()?;
    // No number leads to the end of all numbers.
    (self::name(number) == name && number < u64::MAX).then_some(number)
}

/// Before the name of one that cannot be used, which is kept for its owner to look at.
pub(super) const DAMAGED: &str = "damaged-";
/// Before the name of one of a run that was not to be gone on with.
pub(super) const EARLIER: &str = "earlier-";

/// The checkpoints of a directory by their numbers, newest first.
///
/// # Errors
/// [`DirectoryError::Io`].
pub fn checkpoints(directory: &Path) -> Result<Vec<(u64, PathBuf)>, DirectoryError> {
    let found = named(directory, "")?.into_iter().filter(|(.., is_folder)| *is_folder);
    let mut found: Vec<(u64, PathBuf)> = found.map(|(number, path, _)| (number, path)).collect();
    found.sort_unstable();
    found.reverse();
    Ok(found)
}

/// Their folders.
///
/// # Errors
/// [`DirectoryError::Io`].
pub(super) fn folders(directory: &Path) -> Result<Vec<PathBuf>, DirectoryError> {
    Ok(checkpoints(directory)?.into_iter().map(|(_, folder)| folder).collect())
}

/// The names of those that are not gone on with: damaged, or of a run before.
///
/// # Errors
/// [`DirectoryError::Io`].
pub(super) fn set_aside(directory: &Path) -> Result<Vec<String>, DirectoryError> {
    let mut names = Vec::new();
    for prefix in [DAMAGED, EARLIER] {
        let mut found = named(directory, prefix)?;
        found.sort_unstable();
        names.extend(found.iter().rev().map(|(_, path, _)| short(path)));
    }
    Ok(names)
}

/// A checkpoint of a `FaultTolerantTrainer` in a directory, also one that it has set aside, by its name.
///
/// # Errors
/// [`DirectoryError::Io`].
pub(super) fn of_a_trainer(directory: &Path) -> Result<Option<String>, DirectoryError> {
    let is_number =
        |text: &str, len: usize| text.len() >= len && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_one = |name: &str| {
        let told = name.strip_prefix(DAMAGED).unwrap_or(name).strip_prefix("save-")?.split_once("-step-")?;
        (is_number(told.0, 6) && is_number(told.1, 1)).then_some(())
    };
    let names = files::names(directory).map_err(DirectoryError::io("read", directory))?;
    let mut found: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
    found.sort_unstable();
    Ok(found.into_iter().rev().find(|name| is_one(name).is_some()))
}

/// The name alone.
pub(super) fn short(folder: &Path) -> String {
    folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned()
}

/// Whether a folder is called as a checkpoint is, or was before it was set aside.
pub(super) fn is_named_so(folder: &Path) -> bool {
    let name = short(folder);
    ["", DAMAGED, EARLIER].into_iter().any(|prefix| name.strip_prefix(prefix).and_then(number).is_some())
}

/// The number of the next one: above all that were ever given, also to those that were set aside.
pub(super) fn next_number(directory: &Path) -> Result<u64, DirectoryError> {
    let mut found = Vec::new();
    for prefix in ["", DAMAGED, EARLIER] {
        found.extend(named(directory, prefix)?);
    }
    Ok(found.into_iter().map(|(number, ..)| number).max().map_or(1, |last| last + 1))
}

/// What is called as checkpoints are, after a prefix, and whether it is a folder.
fn named(directory: &Path, prefix: &str) -> Result<Vec<(u64, PathBuf, bool)>, DirectoryError> {
    let io = || DirectoryError::io("read", directory);
    let mut found = Vec::new();
    for name in files::names(directory).map_err(io())? {
        let Ok(name) = name.to_str() else { continue };
        if let Some(number) = name.strip_prefix(prefix).and_then(number) {
            let path = directory.join(name);
            let is_folder = fs::symlink_metadata(&path).map_err(io())?.is_dir();
            found.push((number, path, is_folder));
        }
    }
    Ok(found)
}

/// Which of a directory's checkpoints it is, of which term of the run, and the values of which version it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub(super) number: u64,
    pub(super) term: u64,
    pub(crate) values_of: u64,
}

/// A checkpoint whose every byte is as it was written.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub manifest: Manifest,
}

impl Checkpoint {
    pub(crate) fn mark(&self) -> Mark {
        // By another name it is none of a directory's, and before all of them.
        let number = number(&short(&self.path)).unwrap_or(0);
        Mark { number, term: self.manifest.book.term, values_of: self.manifest.values_of() }
    }

    /// Reads a folder's manifest, and holds its files against it.
    ///
    /// # Errors
    /// [`DirectoryError::Checkpoint`] with what is wrong, and in which file.
    pub fn verified(path: &Path, watch: &Watch<'_>) -> Result<Self, DirectoryError> {
        let checkpoint = Self::unverified(path)?;
        checkpoint.verify(watch)?;
        Ok(checkpoint)
    }

    /// Holds its files against its manifest.
    ///
    /// # Errors
    /// As [`Self::verified`].
    pub(super) fn verify(&self, watch: &Watch<'_>) -> Result<(), DirectoryError> {
        let open = |name| watched(&self.path, name, watch);
        self.manifest.verify(open).map_err(DirectoryError::checkpoint(&self.path))
    }

    /// Looks whether its files are there and as long as they should be.
    ///
    /// # Errors
    /// As [`Self::verified`].
    pub(super) fn check_lengths(&self) -> Result<(), DirectoryError> {
        let length = |name| Ok(files::open(&self.path.join(name))?.metadata()?.len());
        self.manifest.check_lengths(length).map_err(DirectoryError::checkpoint(&self.path))
    }

    /// Reads a folder's manifest, and nothing else.
    ///
    /// # Errors
    /// As [`Self::verified`].
    pub fn unverified(path: &Path) -> Result<Self, DirectoryError> {
        let read = || {
            let mut bytes = Vec::new();
            // One more than it may have, so that a longer one is not taken for one that ends there.
            files::open(&path.join(MANIFEST))?.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|cause: io::Error| match cause.kind() {
            io::ErrorKind::NotFound => {
                CheckpointError::Damaged { file: MANIFEST, what: "it is not there".to_owned() }
            }
            _ => CheckpointError::Read { file: MANIFEST, cause },
        });
        let manifest = bytes.and_then(|bytes| Manifest::decode(&bytes));
        let manifest = manifest.map_err(DirectoryError::checkpoint(path))?;
        Ok(Self { path: path.to_owned(), manifest })
    }

    /// The store that it describes, in a life of its own.
    ///
    /// # Errors
    /// As [`Self::verified`].
    pub fn restore(
        self,
        config: StoreConfig,
        life: Life,
        watch: &Watch<'_>,
    ) -> Result<Arc<Store>, DirectoryError> {
        let Self { path, manifest } = self;
        let open = |name| watched(&path, name, watch);
        checkpoint::restore(manifest, open, config, life).map_err(DirectoryError::checkpoint(&path))
    }
}

fn watched<'a>(folder: &Path, name: &str, watch: &'a Watch<'a>) -> io::Result<Watched<'a>> {
    Ok(Watched { file: files::open(&folder.join(name))?, watch })
}
