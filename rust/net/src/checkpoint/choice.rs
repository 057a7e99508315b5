//! Which checkpoint of several is gone on with: the newest that is not damaged.

use super::error::DirectoryError;
use std::path::{Path, PathBuf};

/// One that can be used, and the newer ones that cannot.
pub(super) struct Choice<T> {
    pub(super) used: T,
    pub(super) damaged: Vec<(PathBuf, DirectoryError)>,
}

/// Tries a directory's checkpoints, newest first, until `attempt` can use one; `None` where there is none at all.
///
/// # Errors
/// [`DirectoryError::NoneUsable`] where all are damaged. Whatever else keeps one from being used is an error at once: an
/// older one would lose what it holds.
pub(super) fn newest<T>(
    directory: &Path,
    found: Vec<PathBuf>,
    mut attempt: impl FnMut(&Path) -> Result<T, DirectoryError>,
) -> Result<Option<Choice<T>>, DirectoryError> {
    let num_found = found.len();
    let mut damaged = Vec::new();
    for folder in found {
        match attempt(&folder) {
            Ok(used) => return Ok(Some(Choice { used, damaged })),
            Err(error) if error.is_damage() => damaged.push((folder, error)),
            Err(error) => return Err(error),
        }
    }
    match damaged.into_iter().next() {
        None => Ok(None),
        Some((_, newest)) => Err(DirectoryError::NoneUsable {
            path: directory.to_owned(),
            found: num_found,
            newest: Box::new(newest),
        }),
    }
}
