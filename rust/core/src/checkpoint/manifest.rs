//! The manifest: everything of a checkpoint but the tensors, and the digests of the files that hold those. JSON, whose
//! last field is the SHA-256 of all before it.

use super::digest::{self, FileEntry, is_sha256, sha256};
use super::error::CheckpointError;
use super::plan::{MODEL, OPTIMIZER};
use crate::spec::{Contribution, OptimizerSpec, Transaction};
use crate::store::Book;
use crate::table::TensorTable;
use serde::{Deserialize, Serialize};
use std::io::{self, Read};

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// What this build writes and reads.
pub const FORMAT: u32 = 1;
/// A longer manifest is neither written nor read.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;

const BEFORE_DIGEST: &str = ",\"sha256\":\"";
const AFTER_DIGEST: &str = "\"}\n";

/// A checkpoint but for its tensors' values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub format: u32,
    /// The build that wrote it.
    pub offbeat: String,
    pub run: RunRecord,
    /// By which pushes were committed. Another life may choose another.
    pub transaction: Transaction,
    /// What the files hold.
    pub table: TensorTable,
    pub files: Vec<FileEntry>,
    /// Every element of every tensor is in one of them.
    pub ranges: Vec<Range>,
    pub book: Book,
}

/// What a server knows of its run beside the store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunRecord {
    pub run_id: String,
    /// Where workers look for it.
    pub port: u16,
    /// How to build the module.
    pub blueprint: Option<String>,
    pub agreed: Agreed,
    /// Where the values are those of another version, to which the run was brought back: which one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_back_to: Option<u64>,
    /// The term in which the values were made, where that was another server's, which this one went on from, and nobody has
    /// pushed or put other values there since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_term: Option<u64>,
}

/// What its workers have agreed on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreed {
    /// What pushes carry, and who has fixed that.
    pub contribution: Option<Contribution>,
    pub contribution_of: String,
    /// As it is now.
    pub optimizer: Option<OptimizerSpec>,
    /// As it was set, before any `set_lr`.
    pub as_set: Option<OptimizerSpec>,
}

impl Agreed {
    /// Whether a run can have agreed on that: on an optimizer that was set, of whose groups only the rates were changed.
    pub(super) fn validate(&self) -> Result<(), CheckpointError> {
        for optimizer in [&self.as_set, &self.optimizer].into_iter().flatten() {
            optimizer.validate()?;
        }
        let num_groups = [&self.as_set, &self.optimizer].map(|o| o.as_ref().map_or(0, |o| o.groups.len()));
        if num_groups[0] == num_groups[1] {
            return Ok(());
        }
        let what = format!("agreed: {} groups were set, and {} are in force", num_groups[0], num_groups[1]);
        Err(CheckpointError::malformed(MANIFEST, what))
    }
}

/// Elements of a tensor with one history. Most tensors are one range; under "fragment" a push that was refused or cut
/// short in some parts of a tensor makes more of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    pub tensor: String,
    /// The first element, in C order.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
    /// Updates applied to the fragments that hold it.
    pub version: u64,
    /// Steps of the optimizer; `None` where it keeps no state yet.
    pub steps: Option<u64>,
}

#[derive(Deserialize)]
struct Versioned {
    format: u32,
    offbeat: String,
}

impl Manifest {
    /// As the file's bytes.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritable`] if it is longer than [`MAX_MANIFEST_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>, CheckpointError> {
        let unwritable = |what: String| CheckpointError::Unwritable { what };
        let mut bytes = serde_json::to_vec(self).map_err(|e| unwritable(e.to_string()))?;
        bytes.truncate(bytes.len() - "}".len());
        let digest = sha256(&bytes);
        for part in [BEFORE_DIGEST, &digest, AFTER_DIGEST] {
            bytes.extend_from_slice(part.as_bytes());
        }
        if bytes.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(unwritable(format!(
                "a manifest of {} bytes, at most {MAX_MANIFEST_BYTES}",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    /// From a file's bytes.
    ///
    /// # Errors
    /// [`CheckpointError`] if a byte is not as it was written, or another version wrote it.
    pub fn decode(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |what: &str| CheckpointError::Damaged { file: MANIFEST, what: what.to_owned() };
        let text = str::from_utf8(bytes).map_err(|e| damaged(&format!("it is not text: {e}")))?;
        let (body, rest) = text
            .rsplit_once(BEFORE_DIGEST)
            .ok_or_else(|| damaged("its last field, the SHA-256, is missing"))?;
        let digest = rest.strip_suffix(AFTER_DIGEST).filter(|digest| is_sha256(digest));
        let digest = digest.ok_or_else(|| damaged("its end, a SHA-256, is missing"))?;
        let found = sha256(body.as_bytes());
        if found != digest {
            return Err(damaged(&format!(
                "the SHA-256 of what stands before its last field is {found}, that says {digest}"
            )));
        }
        let whole = format!("{body}}}");
        let malformed = |e: serde_json::Error| CheckpointError::malformed(MANIFEST, e.to_string());
        let Versioned { format, offbeat } = serde_json::from_str(&whole).map_err(malformed)?;
        if format != FORMAT {
            return Err(CheckpointError::Format { file: MANIFEST, found: format, writer: offbeat });
        }
        serde_json::from_str(&whole).map_err(malformed)
    }

    /// Reads every file that it names to its end, and holds it against its digest. `open` opens a file beside the
    /// manifest.
    ///
    /// # Errors
    /// [`CheckpointError`] if one is not as it was written, or is none of a checkpoint's.
    pub fn verify<F: Read>(
        &self,
        mut open: impl FnMut(&'static str) -> io::Result<F>,
    ) -> Result<(), CheckpointError> {
        self.each_file(|name, entry| {
            let file = open(name).map_err(CheckpointError::reading(name))?;
            digest::verify(name, entry, file)
        })
    }

    /// Looks whether every file that it names is there and as long as it should be, without reading it. `length` gives
    /// a file's length in bytes.
    ///
    /// # Errors
    /// As [`Self::verify`].
    pub fn check_lengths(
        &self,
        mut length: impl FnMut(&'static str) -> io::Result<u64>,
    ) -> Result<(), CheckpointError> {
        self.each_file(|name, entry| {
            let found = length(name).map_err(CheckpointError::reading(name))?;
            digest::check_length(name, entry, found)
        })
    }

    /// The version of which it has the values: its own, unless the run was brought back to another, and no push has come
    /// since.
    #[must_use]
    pub fn values_of(&self) -> u64 {
        self.run.gone_back_to.unwrap_or(self.book.version)
    }

    /// Bytes of the files that it names.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.bytes))
    }

    fn each_file(
        &self,
        mut check: impl FnMut(&'static str, &FileEntry) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        if !self.files.iter().any(|entry| entry.name == MODEL) {
            return Err(CheckpointError::malformed(MANIFEST, format!("it does not name {MODEL}")));
        }
        for entry in &self.files {
            let Some(name) = [MODEL, OPTIMIZER].into_iter().find(|name| *name == entry.name) else {
                return Err(CheckpointError::malformed(
                    MANIFEST,
                    format!("it names a file {:?}", entry.name),
                ));
            };
            check(name, entry)?;
        }
        Ok(())
    }
}
