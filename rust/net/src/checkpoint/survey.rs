//! What lies at a path, for whoever does not own it: nothing is locked or changed, and a server may be at work there.

use super::directory::LOCK;
use super::error::DirectoryError;
use super::folder::{self, folders};
use super::lives::LIFE;
use offbeat_core::checkpoint::MANIFEST;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What lies at a path.
pub(super) enum Survey {
    Directory {
        /// The checkpoints' folders, newest first.
        folders: Vec<PathBuf>,
        /// The names of those that are not gone on with.
        set_aside: Vec<String>,
    },
    /// One checkpoint, as far as its name or its manifest says.
    Checkpoint,
}

impl Survey {
    /// Looks there.
    ///
    /// # Errors
    /// [`DirectoryError::Foreign`] if nothing there is of a server's; [`DirectoryError::Io`].
    pub(super) fn of(path: &Path) -> Result<Self, DirectoryError> {
        if is_there(&path.join(MANIFEST)) {
            return Ok(Self::Checkpoint);
        }
        let (folders, set_aside) = (folders(path)?, folder::set_aside(path)?);
        let is_empty = folders.is_empty() && set_aside.is_empty();
        if !is_empty || [LOCK, LIFE].iter().any(|name| is_there(&path.join(name))) {
            return Ok(Self::Directory { folders, set_aside });
        }
        // By the name that it has where it lies: it may be given as ".".
        let whole = fs::canonicalize(path).map_err(DirectoryError::io("read", path))?;
        if folder::is_named_so(&whole) {
            return Ok(Self::Checkpoint);
        }
        Err(DirectoryError::Foreign { path: path.to_owned() })
    }
}

/// The names of a directory's checkpoints, newest first; `None` if the path leads to a checkpoint itself.
///
/// # Errors
/// [`DirectoryError::Foreign`] if nothing there is of a server's; [`DirectoryError::Io`].
pub fn names(path: &Path) -> Result<Option<Vec<String>>, DirectoryError> {
    match Survey::of(path)? {
        Survey::Directory { folders, set_aside: _ } => {
            Ok(Some(folders.iter().map(|f| folder::short(f)).collect()))
        }
        Survey::Checkpoint => Ok(None),
    }
}

/// Tells a checkpoint that is gone from one that is damaged: of what a server has removed meanwhile each file is missing.
pub(super) fn unless_gone<T>(folder: &Path, read: Result<T, DirectoryError>) -> Result<T, DirectoryError> {
    read.map_err(
        |error| if is_there(folder) { error } else { DirectoryError::Gone { path: folder.to_owned() } },
    )
}

fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(cause) if cause.kind() == io::ErrorKind::NotFound)
}
