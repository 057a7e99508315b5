//! Reading that takes its time: whoever waits for it is told how far it is, and may break it off.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// Bytes that are read between two words.
const TOLD_BYTES: u64 = 1 << 20;

/// Is told how many bytes were read, and of how many, and says whether to go on.
pub type Tell<'a> = dyn Fn(u64, u64) -> bool + 'a;

/// Counts what is read of a checkpoint.
pub struct Watch<'a> {
    tell: &'a Tell<'a>,
    read: Cell<u64>,
    told: Cell<u64>,
    all: Cell<u64>,
}

impl<'a> Watch<'a> {
    #[must_use]
    pub fn new(tell: &'a Tell<'a>) -> Self {
        Self { tell, read: Cell::new(0), told: Cell::new(0), all: Cell::new(0) }
    }

    /// By nobody.
    #[must_use]
    pub fn none() -> Self {
        Self::new(&|_, _| true)
    }

    /// Begins to count anew, with so many bytes to be read.
    pub(super) fn begin(&self, bytes: u64) {
        self.read.set(0);
        self.told.set(0);
        self.all.set(bytes);
    }

    fn has_read(&self, bytes: usize) -> io::Result<()> {
        self.read.set(self.read.get() + bytes as u64);
        let read = self.read.get();
        if read - self.told.get() < TOLD_BYTES {
            return Ok(());
        }
        self.told.set(read);
        if (self.tell)(read, self.all.get()) { Ok(()) } else { Err(io::Error::other("it was broken off")) }
    }
}

/// A file that is watched.
pub(super) struct Watched<'a> {
    pub(super) file: File,
    pub(super) watch: &'a Watch<'a>,
}

impl Read for Watched<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(to)?;
        self.watch.has_read(read)?;
        Ok(read)
    }
}

impl Seek for Watched<'_> {
    fn seek(&mut self, place: SeekFrom) -> io::Result<u64> {
        self.file.seek(place)
    }
}
