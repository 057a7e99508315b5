//! What the server sends, frame by frame, with the state of a half-read frame kept here: a call that is broken off
//! leaves the connection in order, and the next one reads on.
//!
//! A payload is received where it belongs, without a copy: `readv` into the segments of a parameter's memory, with a
//! little read-ahead behind it for the next header.

use super::error::ClientError;
use super::memory::{MAX_RUNS, Memory, checksum_of, with_slices_mut};
use super::model::Model;
use super::stream::Stream;
use crate::frame::{AHEAD_BYTES, FrameError, MESSAGE_STEP_BYTES, ReadAhead};
use offbeat_core::checksum::checksum;
use offbeat_core::wire::header::CODEC_RAW;
use offbeat_core::wire::{HEADER_BYTES, Header, Kind, flags};
use std::io::IoSliceMut;
use std::task::{Poll, ready};

/// An answer of at most this much is read ahead whole: a copy inside the cache costs less than a second system call.
const SMALL_ANSWER_BYTES: usize = 64 << 10;

/// Where the parameters of a fragment go.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Straight into the caller's memory.
    Out,
    /// Into memory of our own, of the fragment's size.
    Own(Vec<u8>),
    Nowhere,
}

/// A frame that is complete.
#[derive(Debug)]
pub(super) enum Arrived {
    /// A fragment's parameters, where they were to go; [`None`]: as the worker has them.
    Root(Header, Option<Place>),
    /// Any other frame; [`Inbound::message`] has its payload.
    Other(Header),
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Head,
    Root {
        header: Header,
        got: usize,
        place: Place,
    },
    Message {
        header: Header,
    },
}

/// What a frame is read with.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) address: &'a str,
    pub(super) stream: &'a Stream,
    /// `None` until the server has a model.
    pub(super) model: Option<&'a Model>,
    pub(super) out: Option<&'a [Memory<'a>]>,
}

/// The receiving half of a connection.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// Has room for more than [`AHEAD_BYTES`] only where small answers are expected.
    ahead: ReadAhead,
    state: State,
    message: Vec<u8>,
    sink: Vec<u8>,
}

impl Inbound {
    /// Roots of a model come from now on, so many bytes in all.
    pub(super) fn expect(&mut self, model: &Model) {
        let bytes: usize = model.layout.fragments.iter().map(|f| f.wire_bytes() + HEADER_BYTES).sum();
        if bytes + AHEAD_BYTES <= SMALL_ANSWER_BYTES {
            self.ahead.reserve(bytes + AHEAD_BYTES);
        }
    }

    /// The payload of the frame that arrived last, if it was no root.
    pub(super) fn message(&self) -> &[u8] {
        &self.message
    }

    /// The caller's memory is about to go. Returns the fragment that is left half written in it.
    pub(super) fn leave_out(&mut self) -> Option<usize> {
        match &mut self.state {
            State::Root { header, place: place @ Place::Out, got } => {
                *place = Place::Nowhere;
                (*got > 0).then_some(header.fragment as usize)
            }
            State::Head | State::Root { .. } | State::Message { .. } => None,
        }
    }

    /// Whether a root is half read into the caller's memory.
    pub(super) fn is_in_out(&self) -> bool {
        matches!(self.state, State::Root { place: Place::Out, .. })
    }

    /// Reads on, at most to the end of one frame. `place` says where a root goes, nowhere ([`None`]) if the worker has
    /// it; or what is wrong with it, before a byte of it is written.
    pub(super) fn poll_frame(
        &mut self,
        with: Surroundings<'_>,
        place: &mut dyn FnMut(&Header) -> Result<Option<Place>, String>,
    ) -> Poll<Result<Arrived, ClientError>> {
        let failed = |error: FrameError| ClientError::from_frame(with.address, &error);
        loop {
            match &mut self.state {
                State::Head => {
                    let header = ready!(self.poll_header(with.stream)).map_err(failed)?;
                    self.state = if header.kind == Kind::Root {
                        check_root(with, &header)?;
                        match place(&header).map_err(|cause| broke(with, cause))? {
                            Some(place) => State::Root { header, got: 0, place },
                            None => return Poll::Ready(Ok(Arrived::Root(header, None))),
                        }
                    } else {
                        self.message.clear();
                        State::Message { header }
                    };
                }
                State::Message { header } => {
                    let header = *header;
                    ready!(self.poll_message(with.stream, &header)).map_err(failed)?;
                    self.state = State::Head;
                    let computed = checksum(&self.message);
                    if computed != header.payload_checksum {
                        let (kind, found) = (header.kind, header.payload_checksum);
                        return Poll::Ready(Err(failed(FrameError::Checksum { kind, found, computed })));
                    }
                    return Poll::Ready(Ok(Arrived::Other(header)));
                }
                State::Root { header, .. } => {
                    let header = *header;
                    ready!(self.poll_root(with)).map_err(failed)?;
                    let State::Root { place, .. } = std::mem::replace(&mut self.state, State::Head) else {
                        unreachable!("a root was read")
                    };
                    let computed = checksum_at(with, &header, &place);
                    if let Some(computed) = computed.filter(|&c| c != header.payload_checksum) {
                        let (kind, found) = (header.kind, header.payload_checksum);
                        return Poll::Ready(Err(failed(FrameError::Checksum { kind, found, computed })));
                    }
                    return Poll::Ready(Ok(Arrived::Root(header, Some(place))));
                }
            }
        }
    }

    fn poll_header(&mut self, stream: &Stream) -> Poll<Result<Header, FrameError>> {
        loop {
            if let Some(header) = self.ahead.take_header() {
                return Poll::Ready(Ok(header?));
            }
            let n = ready!(stream.read(&mut [IoSliceMut::new(self.ahead.room())]))?;
            if n == 0 {
                return Poll::Ready(Err(FrameError::Closed { inside: !self.ahead.is_empty() }));
            }
            self.ahead.came(n);
        }
    }

    fn poll_message(&mut self, stream: &Stream, header: &Header) -> Poll<Result<(), FrameError>> {
        let len = header.payload_len as usize;
        while self.message.len() < len {
            let ahead = self.ahead.take(len - self.message.len());
            if !ahead.is_empty() {
                self.message.extend_from_slice(ahead);
                continue;
            }
            let from = self.message.len();
            let rest = (len - from).min(MESSAGE_STEP_BYTES);
            self.message.resize(from + rest, 0);
            let target = &mut self.message[from..];
            let tail = &mut self.ahead.room()[..AHEAD_BYTES];
            let read = stream.read(&mut [IoSliceMut::new(target), IoSliceMut::new(tail)]);
            let n = match read {
                Poll::Ready(Ok(n)) => n,
                Poll::Ready(Err(_)) | Poll::Pending => 0,
            };
            self.message.truncate(from + n.min(rest));
            self.ahead.came(n.saturating_sub(rest));
            if ready!(read)? == 0 {
                return Poll::Ready(Err(FrameError::Closed { inside: true }));
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_root(&mut self, with: Surroundings<'_>) -> Poll<Result<(), FrameError>> {
        loop {
            let State::Root { header, got, .. } = &self.state else { unreachable!("a root is being read") };
            let (fragment, got) = (header.fragment as usize, *got);
            let left = header.payload_len as usize - got;
            if left == 0 {
                return Poll::Ready(Ok(()));
            }
            let ahead = self.ahead.take(left);
            let State::Root { place, .. } = &mut self.state else { unreachable!("a root is being read") };
            let read = if ahead.is_empty() {
                let tail = &mut self.ahead.room()[..AHEAD_BYTES];
                let stream = with.stream;
                let total = match place {
                    Place::Own(bytes) => {
                        let room = &mut [IoSliceMut::new(&mut bytes[got..]), IoSliceMut::new(tail)];
                        ready!(stream.read(room))?
                    }
                    Place::Nowhere => {
                        self.sink.resize(MESSAGE_STEP_BYTES, 0);
                        let sink = &mut self.sink[..left.min(MESSAGE_STEP_BYTES)];
                        ready!(stream.read(&mut [IoSliceMut::new(sink)]))?
                    }
                    Place::Out => {
                        let (model, out) = with.of_out();
                        let runs = model.runs(fragment, out);
                        ready!(with_slices_mut(runs, got, tail, |slices| stream.read(slices)))?
                    }
                };
                if total == 0 {
                    return Poll::Ready(Err(FrameError::Closed { inside: true }));
                }
                self.ahead.came(total.saturating_sub(left));
                total.min(left)
            } else {
                match place {
                    Place::Own(bytes) => bytes[got..got + ahead.len()].copy_from_slice(ahead),
                    Place::Nowhere => {}
                    Place::Out => {
                        let (model, out) = with.of_out();
                        let mut rest = ahead;
                        with_slices_mut(model.runs(fragment, out), got, &mut [], |slices| {
                            for slice in slices {
                                let n = slice.len().min(rest.len());
                                slice[..n].copy_from_slice(&rest[..n]);
                                rest = &rest[n..];
                            }
                        });
                    }
                }
                ahead.len()
            };
            let State::Root { got, .. } = &mut self.state else { unreachable!("a root is being read") };
            *got += read;
        }
    }
}

impl<'a> Surroundings<'a> {
    fn of_out(self) -> (&'a Model, &'a [Memory<'a>]) {
        let out = self.out.expect("a root was placed in memory that was given");
        (self.model.expect("a root has a model"), out)
    }
}

/// Whether a fragment's segments are few enough to be received where they lie.
pub(super) fn fits_runs(model: &Model, fragment: usize) -> bool {
    model.layout.fragments[fragment].segments.len() <= MAX_RUNS
}

/// A root's length follows from the model; what the header says must be that.
fn check_root(with: Surroundings<'_>, header: &Header) -> Result<(), ClientError> {
    let fragment = with.model.and_then(|m| m.layout.fragments.get(header.fragment as usize));
    let due = match fragment {
        Some(_) if header.flags & flags::UNCHANGED != 0 => Some(0),
        Some(fragment) => Some(fragment.wire_bytes()),
        None => None,
    };
    if due == Some(header.payload_len as usize) && header.codec == CODEC_RAW {
        return Ok(());
    }
    let Header { fragment, payload_len, codec, .. } = header;
    let cause =
        format!("a root of fragment {fragment} with {payload_len} bytes in codec {codec} fits no model here");
    Err(broke(with, cause))
}

fn broke(with: Surroundings<'_>, cause: String) -> ClientError {
    ClientError::Protocol { address: with.address.to_owned(), cause }
}

/// The checksum of what was received, while it is warm; `None` for what was not kept.
fn checksum_at(with: Surroundings<'_>, header: &Header, place: &Place) -> Option<u32> {
    match place {
        Place::Own(bytes) => Some(checksum(bytes)),
        Place::Nowhere => None,
        Place::Out => {
            let (model, out) = with.of_out();
            Some(checksum_of(model.runs(header.fragment as usize, out)))
        }
    }
}
