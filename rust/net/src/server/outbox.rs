//! What a session sends, gathered so that it costs few system calls: header-only frames wait for the next payload,
//! and the last fragment of a reply travels with the receipt that follows it.

use super::connection::{Connection, Phase};
use super::end::End;
use offbeat_core::store::{Receipt, Root};
use offbeat_core::wire::{Header, Kind, encode, flags};
use std::io::IoSlice;
use std::sync::Arc;

/// Header-only frames that wait for no payload longer than this.
const MAX_WAITING_BYTES: usize = 16 << 10;

/// Frames on their way out, in order: `head`, one root's payload, `tail`. The memory is reused.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    head: Vec<u8>,
    root: Option<Arc<Root>>,
    tail: Vec<u8>,
    /// Where half precision is rounded to before it travels.
    scratch: Vec<u8>,
    message: Vec<u8>,
}

/// Which reply a root belongs to, and what the worker has of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addressed {
    pub(super) request: u32,
    pub(super) sequence: u64,
    pub(super) fragment: usize,
    /// (term, version) that need not be sent again.
    pub(super) has: Option<(u64, u64)>,
}

impl Outbox {
    /// Queues one fragment's parameters; at most one payload waits, so an earlier one is to be flushed before.
    pub(super) fn root(&mut self, to: Addressed, root: Arc<Root>) {
        debug_assert!(self.root.is_none(), "one payload at a time");
        let mut header = Header {
            request: to.request,
            sequence: to.sequence,
            term: root.term(),
            version: root.version(),
            fragment: u32::try_from(to.fragment).unwrap_or(u32::MAX),
            ..Header::new(Kind::Root)
        };
        if to.has == Some((root.term(), root.version())) {
            header.flags = flags::UNCHANGED;
            self.head.extend_from_slice(&header.encode());
            return;
        }
        header.payload_len = u32::try_from(root.payload(&mut self.scratch).len()).unwrap_or(u32::MAX);
        header.payload_checksum = root.payload_checksum(&mut self.scratch);
        self.head.extend_from_slice(&header.encode());
        self.root = Some(root);
    }

    /// Queues the end of a push.
    pub(super) fn receipt(&mut self, header: Header, receipt: &Receipt) {
        self.message.clear();
        encode(receipt, &mut self.message);
        let header = header.with_payload(&self.message);
        self.tail.extend_from_slice(&header.encode());
        self.tail.extend_from_slice(&self.message);
    }

    /// Queues a frame that is a header alone.
    pub(super) fn header(&mut self, header: &Header) {
        self.tail.extend_from_slice(&header.encode());
    }

    /// Sends what waits, if a payload does or enough of the rest.
    pub(super) async fn flush_some(&mut self, connection: &Connection) -> Result<(), End> {
        if self.root.is_some() || self.head.len() > MAX_WAITING_BYTES {
            self.flush(connection).await
        } else {
            Ok(())
        }
    }

    /// Sends all that waits.
    ///
    /// # Cancel safety
    /// Not safe, see [`crate::frame::Socket::write_all`].
    pub(super) async fn flush(&mut self, connection: &Connection) -> Result<(), End> {
        let payload = self.root.as_ref().map_or(&[][..], |root| root.payload(&mut self.scratch));
        connection.enter(Phase::Sending);
        let slices = &mut [IoSlice::new(&self.head), IoSlice::new(payload), IoSlice::new(&self.tail)];
        connection.socket.write_all(slices).await?;
        connection.enter(Phase::Receiving);
        self.head.clear();
        self.tail.clear();
        self.root = None;
        Ok(())
    }
}
