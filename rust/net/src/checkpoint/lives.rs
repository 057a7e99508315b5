//! What no two lives of a server may share, so that a worker of one is never taken for a worker of another: terms and
//! incarnations. They are reserved on the disk before the first of them is used. And which checkpoint was saved last: an
//! owner who goes back moves the newer ones away.

use super::error::DirectoryError;
use super::files;
use offbeat_core::store::Life;
use offbeat_core::store::book::{MOST, MOST_INCARNATIONS};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

pub(super) const LIFE: &str = "life.json";
/// Incarnations are reserved so many at a time.
const BLOCK: u32 = 1 << 12;
/// The file is some 60 bytes long.
const MAX_BYTES: u64 = 1024;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Reserved {
    term: u64,
    last_incarnation: u32,
    /// Number of the checkpoint that was saved last; 0: none was, or by a build that did not note it.
    #[serde(default)]
    saved: u64,
}

/// The terms and incarnations of a directory's server.
#[derive(Debug)]
pub(super) struct Lives {
    path: PathBuf,
    reserved: Reserved,
}

impl Lives {
    /// Reads what the lives before have reserved.
    pub(super) fn open(directory: &Path) -> Result<Self, DirectoryError> {
        let path = directory.join(LIFE);
        let mut bytes = Vec::new();
        let read = files::open(&path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
        let reserved = match read {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Reserved::default(),
            Err(cause) => return Err(DirectoryError::io("read", &path)(cause)),
            Ok(_) => serde_json::from_slice(&bytes)
                .map_err(|e| DirectoryError::Life { path: path.clone(), what: e.to_string() })?,
        };
        let lives = Self { path, reserved };
        lives.check(reserved)?;
        Ok(lives)
    }

    /// No life could go on from a checkpoint that says more.
    fn check(&self, Reserved { term, last_incarnation, .. }: Reserved) -> Result<(), DirectoryError> {
        let what = if term > MOST {
            format!("term {term} is above {MOST}")
        } else if last_incarnation > MOST_INCARNATIONS {
            format!("incarnation {last_incarnation} is above {MOST_INCARNATIONS}")
        } else {
            return Ok(());
        };
        Err(DirectoryError::Life { path: self.path.clone(), what })
    }

    /// The next life, after those that are known here and `after`, which a checkpoint knows of.
    pub(super) fn next(&self, after: Life) -> Life {
        Life {
            term: self.reserved.term.max(after.term).saturating_add(1),
            last_incarnation: self.reserved.last_incarnation.max(after.last_incarnation),
        }
    }

    /// Begins a life: its term and its first incarnations are nobody else's any more. The last of these.
    pub(super) fn begin(&mut self, life: Life) -> Result<u32, DirectoryError> {
        let last_incarnation = life.last_incarnation.saturating_add(BLOCK);
        self.reserve(Reserved { term: life.term, last_incarnation, ..self.reserved })?;
        Ok(last_incarnation)
    }

    /// Reserves more incarnations, unless there are some after `last` already. The last of them.
    pub(super) fn reserve_incarnations(&mut self, last: u32) -> Result<u32, DirectoryError> {
        if self.reserved.last_incarnation <= last {
            let last_incarnation = self.reserved.last_incarnation.saturating_add(BLOCK);
            self.reserve(Reserved { last_incarnation, ..self.reserved })?;
        }
        Ok(self.reserved.last_incarnation)
    }

    /// Reserves a term, for values that replace all of the model's.
    pub(super) fn reserve_term(&mut self, term: u64) -> Result<(), DirectoryError> {
        self.reserve(Reserved { term: self.reserved.term.max(term), ..self.reserved })
    }

    /// A checkpoint of this number is on the disk, and is the newest.
    pub(super) fn note_saved(&mut self, number: u64) -> Result<(), DirectoryError> {
        self.reserve(Reserved { saved: number, ..self.reserved })
    }

    /// The number of the one that was saved last.
    pub(super) const fn last_saved(&self) -> u64 {
        self.reserved.saved
    }

    fn reserve(&mut self, reserved: Reserved) -> Result<(), DirectoryError> {
        self.check(reserved)?;
        let new = self.path.with_extension("new");
        let text = serde_json::to_vec(&reserved).expect("numbers have a text");
        match fs::remove_file(&new) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                return Err(DirectoryError::io("remove", &new)(cause));
            }
            _ => {}
        }
        files::write_new(&new, |mut file| file.write_all(&text).map_err(DirectoryError::io("write", &new)))?;
        fs::rename(&new, &self.path).map_err(DirectoryError::io("rename", &new))?;
        files::sync_names(self.path.parent().unwrap_or(Path::new(".")))?;
        self.reserved = reserved;
        Ok(())
    }
}
