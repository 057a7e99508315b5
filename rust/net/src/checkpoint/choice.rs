//! Which checkpoint of several is gone on with, the newest that is not damaged; and which are kept.

use super::error::DirectoryError;
use offbeat_core::checkpoint::FileEntry;
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

/// What is in the place of a checkpoint, as far as it matters for which are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held<T> {
    /// So much of it that one that is the same is a copy.
    Whole(T),
    /// The same, of a stretch that the run was brought back from.
    LeftBehind(T),
    /// It is like no other.
    Damaged,
}

/// What a whole checkpoint has, so far as it tells whether another one is its copy.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    pub(super) term: u64,
    pub(super) version: u64,
    /// With their digests.
    pub(super) files: Vec<FileEntry>,
}

impl Contents {
    /// Whether nothing would be missed of another one where this is kept. Values that are gone back to have a later version
    /// in their new term; within a term another version is other work, though it moved nothing.
    pub(super) fn is_copy(&self, other: &Self) -> bool {
        self.files == other.files && (self.version == other.version || self.term != other.term)
    }
}

/// Which checkpoints are not kept, by their places among what they hold, newest first: all but the newest [`KEPT`] that
/// differ, and the newest of those that are the same, as `is_copy` tells. A server writes what it goes on from, or back to,
/// again, so that one that fails at every start would leave nothing else. The newest two are kept whatever they hold: of
/// what was written last, nobody has read what the disk gives back. Those that were left behind are the first to go, and
/// have what room the others leave: whoever brings the run back is to find something older when that was not far enough.
/// What room is left then is the copies'. Of damaged ones as many are kept beside the others, for their owner to look at.
pub(super) fn superfluous<T>(held: &[Held<T>], is_copy: impl Fn(&T, &T) -> bool) -> Vec<usize> {
    let mut is_kept = vec![false; held.len()];
    let (mut differing, mut num_damaged, mut num_seen) = (Vec::new(), 0, 0);
    let has_room = |differing: &[&T], one: &T| {
        differing.len() < KEPT && !differing.iter().any(|other| is_copy(other, one))
    };
    for (one, is_kept) in held.iter().zip(&mut is_kept) {
        *is_kept = match one {
            Held::LeftBehind(_) => continue,
            Held::Damaged if num_damaged < KEPT => {
                num_damaged += 1;
                true
            }
            Held::Whole(one) if has_room(&differing, one) => {
                differing.push(one);
                true
            }
            Held::Whole(_) | Held::Damaged => num_seen < 2,
        };
        num_seen += 1;
    }
    for (one, is_kept) in held.iter().zip(&mut is_kept) {
        if let Held::LeftBehind(one) = one
            && has_room(&differing, one)
        {
            differing.push(one);
            *is_kept = true;
        }
    }
    let num_whole =
        held.iter().zip(&is_kept).filter(|(one, kept)| **kept && !matches!(one, Held::Damaged)).count();
    let copies = held.iter().zip(&mut is_kept).filter(|(one, kept)| !**kept && matches!(one, Held::Whole(_)));
    copies.take(KEPT.saturating_sub(num_whole)).for_each(|(_, is_kept)| *is_kept = true);
    (0..held.len()).filter(|&place| !is_kept[place]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superfluous(held: &[Held<u64>]) -> Vec<usize> {
        super::superfluous(held, PartialEq::eq)
    }

    #[test]
    fn copies_do_not_push_out_what_is_older() {
        let of = |versions: &[u64]| {
            let versions: Vec<_> = versions.iter().copied().map(Held::Whole).collect();
            superfluous(&versions)
        };
        assert!(of(&[]).is_empty());
        assert_eq!(of(&[4, 3, 2, 1]), [3]);
        assert_eq!(of(&[4, 4, 3, 2, 1]), [4], "the copy is of three");
        assert_eq!(of(&[4, 4, 4, 3, 2]), [2]);
        assert_eq!(of(&[5, 4, 4, 3]), [2]);
        assert_eq!(of(&[9, 10, 9, 8, 7]), [2, 4], "gone on with from an older one");
        assert!(of(&[5, 4, 4]).is_empty(), "there is room");
        assert_eq!(of(&[4, 4, 4, 4]), [3], "for three, copies or not");
        assert_eq!(of(&[5, 4, 4, 4]), [3]);
        let (some, none) = (Held::Whole, Held::Damaged);
        let damaged = [none, none, none, none, some(1)];
        assert_eq!(superfluous(&damaged), [3], "the only one that can be used stays");
        let between = [some(4), none, none, some(3), none, none, some(2), some(1)];
        assert_eq!(superfluous(&between), [5, 7]);
    }

    #[test]
    fn what_was_gone_back_from_goes_first_and_has_the_room_that_is_left() {
        let (some, left) = (Held::Whole, Held::LeftBehind);
        assert_eq!(
            superfluous(&[some(8), left(7), some(4), some(0)]),
            [1],
            "though it is among the newest two"
        );
        assert!(superfluous(&[some(8), left(7), some(4)]).is_empty());
        assert_eq!(superfluous(&[some(8), left(7), left(6), some(0)]), [2]);
        assert_eq!(superfluous(&[some(8), left(8), left(6), some(0)]), [1], "a copy");
        assert_eq!(superfluous(&[some(9), some(8), some(8), left(7), left(6)]), [2, 4]);
        assert_eq!(
            superfluous(&[left(7), some(6), some(6), some(6)]),
            [3],
            "the newest two of those that count"
        );
        let damaged = Held::Damaged;
        assert_eq!(superfluous(&[damaged, left(7), some(6), some(5), some(4)]), [1]);
    }

    #[test]
    fn what_was_gone_back_to_is_a_copy_in_its_new_term_and_work_that_moved_nothing_is_none() {
        let files = |digest: &str| {
            vec![FileEntry { name: "model.safetensors".into(), bytes: 1, sha256: digest.into() }]
        };
        let of = |term, version, digest| Contents { term, version, files: files(digest) };
        let at_six = of(1, 6, "a");
        assert!(of(2, 6, "a").is_copy(&at_six), "a restart");
        assert!(of(2, 7, "a").is_copy(&at_six), "gone back to");
        assert!(!of(1, 7, "a").is_copy(&at_six), "a push that moved nothing");
        assert!(!of(2, 6, "b").is_copy(&at_six), "other values");
    }
}
