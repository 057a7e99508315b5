//! Why a checkpoint cannot be written or used.

use crate::spec::SpecError;
use crate::store::book::BookError;
use std::io;

/// What is wrong with a checkpoint, by the file in which it is.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{file} cannot be read: {cause}")]
    Read { file: &'static str, cause: io::Error },
    #[error("{file} cannot be written: {cause}")]
    Write { file: &'static str, cause: io::Error },
    #[error("{file} is damaged: {what}")]
    Damaged { file: &'static str, what: String },
    #[error(
        "{file} is of format {found}, this Offbeat reads format {}: use Offbeat {writer}, which wrote it",
        super::FORMAT
    )]
    Format { file: &'static str, found: u32, writer: String },
    #[error("{file} does not hold together: {what}")]
    Malformed { file: &'static str, what: String },
    #[error("a checkpoint cannot hold {what}")]
    Unwritable { what: String },
}

impl CheckpointError {
    pub(super) fn reading(file: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| match cause.kind() {
            io::ErrorKind::UnexpectedEof => Self::Damaged { file, what: "it ends too early".to_owned() },
            io::ErrorKind::NotFound => Self::Damaged { file, what: "it is not there".to_owned() },
            _ => Self::Read { file, cause },
        }
    }

    pub(super) fn writing(file: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Write { file, cause }
    }

    /// Whether it is not as it was written. Else the machine is to blame, or this build, and an older checkpoint would
    /// only lose what this one holds.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    pub(super) fn malformed(file: &'static str, what: impl Into<String>) -> Self {
        Self::Malformed { file, what: what.into() }
    }
}

impl From<BookError> for CheckpointError {
    fn from(error: BookError) -> Self {
        Self::malformed(super::MANIFEST, format!("book: {error}"))
    }
}

impl From<SpecError> for CheckpointError {
    fn from(error: SpecError) -> Self {
        Self::malformed(super::MANIFEST, error.to_string())
    }
}
