//! Which checkpoint of several is gone on with, the newest that is not damaged; and which are kept.

use super::error::DirectoryError;
use std::path::{Path, PathBuf};

/// How many are kept, besides copies.
pub const KEPT: usize = 3;

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

/// Which checkpoints are not kept, by their places among what they hold, newest first: all but the newest [`KEPT`] that
/// differ, and the newest of those that are the same. A server writes what it goes on from again, so that one that fails at
/// every start would leave nothing else. The newest two are kept whatever they hold: of what was written last, nobody has
/// read what the disk gives back. `None`: it is damaged, and like no other; of these as many are kept beside the others, for
/// their owner to look at.
pub(super) fn superfluous<T: PartialEq>(held: &[Option<T>]) -> Vec<usize> {
    let (mut kept, mut num_damaged) = (Vec::new(), 0);
    let mut superfluous = Vec::new();
    for (place, one) in held.iter().enumerate() {
        let is_kept = match one {
            None => num_damaged < KEPT,
            Some(one) => !kept.contains(&one) && kept.len() < KEPT,
        };
        if is_kept {
            match one {
                None => num_damaged += 1,
                Some(one) => kept.push(one),
            }
        } else if place >= 2 {
            superfluous.push(place);
        }
    }
    superfluous
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_do_not_push_out_what_is_older() {
        let superfluous = |versions: &[u64]| {
            let versions: Vec<_> = versions.iter().copied().map(Some).collect();
            superfluous(&versions)
        };
        assert!(superfluous(&[]).is_empty());
        assert_eq!(superfluous(&[4, 3, 2, 1]), [3]);
        assert_eq!(superfluous(&[4, 4, 3, 2, 1]), [4], "the copy is of three");
        assert_eq!(superfluous(&[4, 4, 4, 3, 2]), [2]);
        assert_eq!(superfluous(&[5, 4, 4, 3]), [2]);
        assert_eq!(superfluous(&[9, 10, 9, 8, 7]), [2, 4], "gone on with from an older one");
        let damaged = [None, None, None, None, Some(1)];
        assert_eq!(super::superfluous(&damaged), [3], "the only one that can be used stays");
        let between = [Some(4), None, None, Some(3), None, None, Some(2), Some(1)];
        assert_eq!(super::superfluous(&between), [5, 7]);
    }
}
