//! SHA-256 of what is written and read: as `sha256sum` prints it.

use super::error::CheckpointError;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::cmp::Ordering;
use std::fmt::Write as _;
use std::io::{self, Read, Write};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// A file beside the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    pub name: String,
    pub bytes: u64,
    /// In hex.
    pub sha256: String,
}

/// Counts what goes through it on the way to a file.
pub(super) struct Digest<W> {
    to: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Digest<W> {
    pub(super) fn new(to: W) -> Self {
        Self { to, hash: Sha256::new(), bytes: 0 }
    }

    /// How the file is named in the manifest.
    pub(super) fn finish(self, name: &str) -> FileEntry {
        FileEntry { name: name.to_owned(), bytes: self.bytes, sha256: hex(&self.hash.finalize()) }
    }
}

impl<W: Write> Write for Digest<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Reads a file to its end and holds it against the manifest.
///
/// # Errors
/// [`CheckpointError::Damaged`] with both lengths or digests; [`CheckpointError::Read`].
pub(super) fn verify(
    file: &'static str,
    entry: &FileEntry,
    mut from: impl Read,
) -> Result<(), CheckpointError> {
    let mut sink = Digest::new(io::sink());
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let read = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => read,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
            Err(cause) => return Err(CheckpointError::reading(file)(cause)),
        };
        sink.write_all(&chunk[..read]).map_err(CheckpointError::reading(file))?;
        if sink.bytes > entry.bytes {
            break; // whatever it is, it is not read to its end
        }
    }
    let found = sink.finish(file);
    check_length(file, entry, found.bytes)?;
    if found.sha256 == entry.sha256 {
        return Ok(());
    }
    let what = format!("its SHA-256 is {}, the manifest says {}", found.sha256, entry.sha256);
    Err(CheckpointError::Damaged { file, what })
}

/// Holds a file's length against the manifest; of one that is longer, any length above that.
///
/// # Errors
/// [`CheckpointError::Damaged`] with both.
pub(super) fn check_length(file: &'static str, entry: &FileEntry, found: u64) -> Result<(), CheckpointError> {
    let what = match found.cmp(&entry.bytes) {
        Ordering::Equal => return Ok(()),
        Ordering::Greater => format!("it has more than the {} bytes that the manifest says", entry.bytes),
        Ordering::Less => format!("it has {found} bytes where the manifest says {}", entry.bytes),
    };
    Err(CheckpointError::Damaged { file, what })
}

/// SHA-256 of bytes, in hex.
pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Whether a text is a SHA-256 in hex, whatever it is of.
pub(super) fn is_sha256(text: &str) -> bool {
    text.len() == 2 * Sha256::output_size() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes any text");
        text
    })
}
