//! What one call sends, made fragment by fragment while it leaves: headers, checksums and payloads are taken from the
//! caller's memory when the socket has room, and never before.

use super::payload::{Content, Makings, Payload};
use super::stream::Stream;
use offbeat_core::wire::{Header, Kind};
use std::io;
use std::sync::Arc;
use std::task::{Poll, ready};

/// Memory that one call after another uses.
#[derive(Debug, Default)]
pub(super) struct Workshop {
    head: Vec<u8>,
    payload: Payload,
}

/// A call's bytes on their way.
#[derive(Debug)]
pub(super) struct Outgoing<'m> {
    content: Content<'m>,
    /// The header that every fragment's has.
    template: Header,
    fragments: Arc<[usize]>,
    /// Fragments made so far.
    made: usize,
    /// Of the frame that is leaving, head and payload.
    sent: usize,
    head: Vec<u8>,
    payload: Payload,
}

impl<'m> Outgoing<'m> {
    /// A call that is one frame: its header, which gets the payload's length and checksum.
    pub(super) fn frame(header: Header, payload: &[u8], workshop: Workshop) -> Self {
        Self::push(Some(header), payload, header, Arc::from([]), Content::Nothing, workshop)
    }

    /// A call whose frame, if it has one, is followed by these fragments.
    pub(super) fn push(
        header: Option<Header>,
        payload: &[u8],
        template: Header,
        fragments: Arc<[usize]>,
        content: Content<'m>,
        workshop: Workshop,
    ) -> Self {
        let Workshop { mut head, payload: mut body } = workshop;
        head.clear();
        body.clear();
        if let Some(header) = header {
            head.extend_from_slice(&header.with_payload(payload).encode());
            head.extend_from_slice(payload);
        }
        Self { content, template, fragments, made: 0, sent: 0, head, payload: body }
    }

    pub(super) fn into_workshop(self) -> Workshop {
        Workshop { head: self.head, payload: self.payload }
    }

    /// Whether everything has left.
    pub(super) fn is_done(&self) -> bool {
        self.is_between() && self.made == self.fragments.len()
    }

    /// Fragments that are not made yet.
    pub(super) fn num_unmade(&self) -> usize {
        self.fragments.len() - self.made
    }

    /// Whether the frame that was made last has left.
    fn is_between(&self) -> bool {
        self.sent == self.head.len() + self.payload.len()
    }

    /// Whether the caller's memory of a fragment may be overwritten: it is no part of this, or has left.
    pub(super) fn is_past(&self, fragment: usize) -> bool {
        let left = if self.is_between() { self.made } else { self.made.saturating_sub(1) };
        self.fragments.binary_search(&fragment).map_or(true, |at| at < left)
    }

    /// Whether only the first frame has left.
    pub(super) fn is_at_fragments(&self) -> bool {
        self.made == 0 && self.is_between()
    }

    /// Adds the first fragment to the head, so that both leave in one call of the system.
    pub(super) fn join_first(&mut self, with: &mut Makings<'_>) {
        if self.made == 0 {
            self.make(with);
        }
    }

    /// Sends a part: the rest of a frame, or the next one. Ready if something has left; then [`Self::is_done`] says
    /// whether it was all.
    pub(super) fn poll(&mut self, stream: &Stream, with: &mut Makings<'_>) -> Poll<io::Result<()>> {
        if self.is_between() {
            self.next(with);
        }
        let head = &self.head[self.sent.min(self.head.len())..];
        let skip = self.sent.saturating_sub(self.head.len());
        let written =
            self.payload.with_slices(&self.content, with, head, skip, |slices| stream.write(slices));
        self.sent += ready!(written)?;
        Poll::Ready(Ok(()))
    }

    /// Everything that has not left, in bytes, since the caller's memory is about to go: the rest of the first frame,
    /// if no fragment was begun, and what follows.
    pub(super) fn into_owned(mut self, with: &mut Makings<'_>) -> (Vec<u8>, Vec<u8>) {
        let (mut first, mut rest) = (Vec::new(), Vec::new());
        if self.made == 0 {
            first.extend_from_slice(&self.head[self.sent..]);
            self.sent = self.head.len();
        }
        loop {
            if self.is_between() {
                if self.made == self.fragments.len() {
                    return (first, rest);
                }
                self.next(with);
            }
            let head = &self.head[self.sent.min(self.head.len())..];
            let skip = self.sent.saturating_sub(self.head.len());
            self.payload.with_slices(&self.content, with, head, skip, |slices| {
                for slice in slices {
                    rest.extend_from_slice(slice);
                }
            });
            self.sent = self.head.len() + self.payload.len();
        }
    }

    /// Goes on to the next fragment.
    fn next(&mut self, with: &mut Makings<'_>) {
        self.head.clear();
        self.payload.clear();
        self.sent = 0;
        self.make(with);
    }

    /// Makes the next fragment's frame.
    fn make(&mut self, with: &mut Makings<'_>) {
        let Some(&fragment) = self.fragments.get(self.made) else {
            return;
        };
        self.made += 1;
        self.payload.make(&self.content, fragment, with);
        let version = match &self.content {
            Content::Push { versions, .. } => versions[fragment],
            Content::Nothing | Content::Values(_) => 0,
        };
        let header = Header {
            version,
            fragment: u32::try_from(fragment).unwrap_or(u32::MAX),
            payload_len: u32::try_from(self.payload.len()).unwrap_or(u32::MAX),
            payload_checksum: self.payload.checksum(&self.content, with),
            ..self.template
        };
        self.head.extend_from_slice(&header.encode());
        if self.made == self.fragments.len()
            && let (Content::Push { present, .. }, Some(momentum)) = (&self.content, &mut with.momentum)
        {
            momentum.sent(present);
        }
    }
}

/// A frame with a small payload, as bytes.
pub(super) fn frame(kind: Kind, request: u32, payload: &[u8]) -> Vec<u8> {
    Outgoing::frame(Header { request, ..Header::new(kind) }, payload, Workshop::default()).head
}
