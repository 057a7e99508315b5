//! Why a checkpoint could not be kept or used.

use offbeat_core::checkpoint::CheckpointError;
use std::io;
use std::path::{Path, PathBuf};

/// What went wrong in a directory of checkpoints.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("cannot {doing} {}: {cause}", path.display())]
    Io { doing: &'static str, path: PathBuf, cause: io::Error },
    #[error(
        "{} is in use by another server: stop that one, or give this one a directory of its own",
        path.display()
    )]
    Locked { path: PathBuf },
    #[error(
        "checkpoint_dir is {}, and a FaultTolerantTrainer keeps its checkpoints there ({found}): give another directory; or, \
         if no trainer needs them, move all that is called save-… or damaged-save-… away",
        path.display()
    )]
    Trainers { path: PathBuf, found: String },
    #[error(
        "{} is damaged ({what}): see that no worker of the runs before is left, remove it and start again; checkpoints stay \
         as they are",
        path.display()
    )]
    Life { path: PathBuf, what: String },
    #[error("{}: {cause}", path.display())]
    Checkpoint { path: PathBuf, cause: CheckpointError },
    #[error(
        "none of the {found} checkpoints in {} can be used; the newest: {newest}. Move them away to begin anew, or start with \
         resume=\"never\", which sets them aside",
        path.display()
    )]
    NoneUsable { path: PathBuf, found: usize, newest: Box<Self> },
    #[error(
        "{} is no directory of checkpoints, nor a checkpoint: give what a server has as --checkpoint-dir, or one of the \
         folders checkpoint-… in it",
        path.display()
    )]
    Foreign { path: PathBuf },
    #[error("there is no checkpoint in {}: a server writes the first when it has a model", path.display())]
    Empty { path: PathBuf },
    #[error("{} is gone: the server that writes there has removed it, or set it aside; look again", path.display())]
    Gone { path: PathBuf },
}

impl DirectoryError {
    /// Whether a checkpoint is to blame, and will not be better tomorrow.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, Self::Checkpoint { cause, .. } if cause.is_damage())
    }

    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::Io { doing, path: path.to_owned(), cause }
    }

    /// The same where no checkpoint has been touched yet: with the remedy for a full disk.
    pub(crate) fn before_any_change(self) -> Self {
        match self {
            Self::Io { doing, path, cause }
                if matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                let told =
                    format!("{cause}; the checkpoints there are untouched: make room, and start again");
                Self::Io { doing, path, cause: io::Error::new(cause.kind(), told) }
            }
            other => other,
        }
    }

    /// The same where the model's values were to be replaced, and have not been.
    pub(crate) fn before_a_replacement(self) -> Self {
        match self {
            Self::Io { doing, path, cause } => {
                let told = format!(
                    "{cause}; the model's values are as they were: see that the directory can be written, and do it again"
                );
                Self::Io { doing, path, cause: io::Error::new(cause.kind(), told) }
            }
            other => other,
        }
    }

    /// The same where a directory could not be taken.
    pub(crate) fn of_the_directory(self) -> Self {
        match self {
            Self::Io { doing, path, cause } => {
                let told =
                    format!("{cause}; checkpoint_dir has to be a directory that can be written, or made");
                Self::Io { doing, path, cause: io::Error::new(cause.kind(), told) }
            }
            other => other,
        }
    }

    pub(super) fn checkpoint(path: &Path) -> impl FnOnce(CheckpointError) -> Self {
        move |cause| Self::Checkpoint { path: path.to_owned(), cause }
    }
}
