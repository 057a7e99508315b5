//! A checkpoint's folder, and those of a directory.

use super::error::DirectoryError;
use super::files;
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
    for entry in fs::read_dir(directory).map_err(io())? {
        let entry = entry.map_err(io())?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix)).and_then(number);
        if let Some(number) = number {
            let is_folder = entry.file_type().map_err(io())?.is_dir();
            found.push((number, entry.path(), is_folder));
        }
    }
    Ok(found)
}

/// A checkpoint whose every byte is as it was written.
#[derive(Debug)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub manifest: Manifest,
}

impl Checkpoint {
    /// Reads a folder's manifest, and holds its files against it.
    ///
    /// # Errors
    /// [`DirectoryError::Checkpoint`] with what is wrong, and in which file.
    pub fn verified(path: &Path) -> Result<Self, DirectoryError> {
        let checkpoint = Self::unverified(path)?;
        let files = checkpoint.manifest.verify(|name| files::open(&path.join(name)));
        files.map_err(DirectoryError::checkpoint(path))?;
        Ok(checkpoint)
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
    pub fn restore(self, config: StoreConfig, life: Life) -> Result<Arc<Store>, DirectoryError> {
        let Self { path, manifest } = self;
        let open = |name| files::open(&path.join(name));
        checkpoint::restore(manifest, open, config, life).map_err(DirectoryError::checkpoint(&path))
    }
}
