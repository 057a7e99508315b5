//! Bytes that were read before they were asked for: the next header mostly comes with the payload before it.

use offbeat_core::wire::{HEADER_BYTES, Header, HeaderError, check_beginning};

/// A few headers and a small message. More would only be copied twice.
pub(crate) const AHEAD_BYTES: usize = 1024;

/// A connection's bytes between the last one that was taken and the last one that has come.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self { bytes: vec![0; AHEAD_BYTES], start: 0, end: 0 }
    }
}

impl ReadAhead {
    /// Makes room for `bytes` in all; never gives room up.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        self.bytes.resize(self.bytes.len().max(bytes), 0);
    }

    /// Bytes that lie ahead.
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the next bytes are to be read to: all of the room, where nothing lies ahead. What lies ahead moves to the
    /// front. [`Self::came`] says how many there were.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// So many bytes have been read to [`Self::room`].
    pub(crate) fn came(&mut self, n: usize) {
        self.end += n;
        debug_assert!(self.end <= self.bytes.len(), "more came than there was room for");
    }

    /// Takes what lies ahead, at most `wanted` bytes.
    pub(crate) fn take(&mut self, wanted: usize) -> &[u8] {
        let taken = self.start..self.end.min(self.start + wanted);
        self.start = taken.end;
        &self.bytes[taken]
    }

    /// Takes a header; `None`: it has not come whole.
    pub(crate) fn take_header(&mut self) -> Option<Result<Header, HeaderError>> {
        let came = &self.bytes[self.start..self.end];
        let Some(bytes) = came.first_chunk() else {
            return check_beginning(came).err().map(Err);
        };
        self.start += HEADER_BYTES;
        Some(Header::decode(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::wire::Kind;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_are_taken_in_the_order_in_which_they_came(
            turns in prop::collection::vec((0..=AHEAD_BYTES, 0..=AHEAD_BYTES), 1..20),
        ) {
            let mut ahead = ReadAhead::default();
            let (mut came, mut taken) = ((0..=u8::MAX).cycle(), (0..=u8::MAX).cycle());
            for (come, take) in turns {
                let room = ahead.room();
                let n = come.min(room.len());
                room[..n].fill_with(|| came.next().unwrap_or_default());
                ahead.came(n);
                let (due, len) = (take.min(ahead.len()), ahead.len());
                let bytes = ahead.take(take);
                prop_assert_eq!(bytes.len(), due);
                prop_assert!(bytes.iter().eq(taken.by_ref().take(due).collect::<Vec<_>>().iter()));
                prop_assert_eq!(ahead.len(), len - due);
            }
        }
    }

    #[test]
    fn a_header_is_taken_whole_or_not_at_all() {
        let header = Header::new(Kind::Call);
        let mut ahead = ReadAhead::default();
        let bytes = header.encode();
        ahead.room()[..HEADER_BYTES - 1].copy_from_slice(&bytes[..HEADER_BYTES - 1]);
        ahead.came(HEADER_BYTES - 1);
        assert_eq!((ahead.take_header(), ahead.len()), (None, HEADER_BYTES - 1));
        ahead.room()[0] = bytes[HEADER_BYTES - 1];
        ahead.came(1);
        assert_eq!((ahead.take_header(), ahead.len()), (Some(Ok(header)), 0));
    }
}
