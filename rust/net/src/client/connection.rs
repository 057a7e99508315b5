//! The data connection, driven by the thread that calls: it sends and receives at once, so that full socket buffers on
//! both sides never wait for each other, and what a broken-off call leaves behind is finished by the next one.

use super::error::ClientError;
use super::flight::{End, Flight, PushPart};
use super::held::Held;
use super::inbound::Inbound;
use super::memory::Memory;
use super::model::Model;
use super::momentum::{Keep, Momentum};
use super::outgoing::{Outgoing, Workshop, frame};
use super::payload::Makings;
use super::silence::Silence;
use super::stream::Stream;
use crate::frame::FrameError;
use offbeat_core::store::Receipt;
use offbeat_core::wire::message::{Call, Parting};
use offbeat_core::wire::{Kind, encode};
use std::io::IoSlice;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Instant;

/// Frames that a call that was broken off still owes to the server.
#[derive(Debug, Default)]
struct Owed {
    request: u32,
    /// The rest of what may leave at once, and what may leave when the request is granted.
    first: Vec<u8>,
    rest: Vec<u8>,
    sent: usize,
}

/// A push that was under way when its connection was lost.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub(super) push: PushPart,
    /// Fragments below this one have been answered.
    pub(super) answered: usize,
    /// Whether it cannot be sent again.
    pub(super) gone: bool,
    /// Whether a call waits for its end.
    pub(super) awaited: bool,
}

/// What one call does with the connection.
#[derive(Debug)]
pub(super) struct Turn<'m> {
    /// What it sends, under which request.
    pub(super) outgoing: Option<(u32, Outgoing<'m>)>,
    /// Where parameters go.
    pub(super) out: Option<&'m [Memory<'m>]>,
    /// The request whose parameters go there; others' are early.
    pub(super) target: Option<u32>,
    /// The call sends values that lie where parameters are to go, or reads these while it sends.
    pub(super) overlaps: Overlap,
}

/// Which fragments of `out` must not be written before they have been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlap {
    Buffers,
    Everything,
    /// What is sent lies anywhere in `out`: nothing may be written before all of it has been sent.
    Anywhere,
}

impl<'m> Turn<'m> {
    /// Sends nothing, writes nowhere.
    pub(super) fn wait() -> Self {
        Self { outgoing: None, out: None, target: None, overlaps: Overlap::Buffers }
    }

    pub(super) fn send(request: u32, outgoing: Outgoing<'m>) -> Self {
        Self { outgoing: Some((request, outgoing)), ..Self::wait() }
    }

    /// Whether the caller's memory of a fragment may be written now.
    pub(super) fn may_write(&self, model: &Model, fragment: usize) -> bool {
        let Some((_, outgoing)) = &self.outgoing else {
            return true;
        };
        match self.overlaps {
            Overlap::Buffers => !model.is_buffers(fragment) || outgoing.is_past(fragment),
            Overlap::Everything => outgoing.is_past(fragment),
            Overlap::Anywhere => outgoing.is_done(),
        }
    }
}

/// How far a turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Done,
    More,
}

/// The data connection and everything that is known through it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) address: String,
    pub(super) stream: Stream,
    pub(super) inbound: Inbound,
    pub(super) flight: Flight,
    /// When a push counts.
    pub(super) keep: Keep,
    owed: Option<Owed>,
    pub(super) model: Option<Arc<Model>>,
    pub(super) held: Option<Held>,
    pub(super) momentum: Option<Momentum>,
    /// Whether a push was rejected because the run has another optimizer by now.
    pub(super) outdated: bool,
    pub(super) workshop: Workshop,
    /// Memory for what comes early.
    pub(super) pool: Vec<Vec<u8>>,
    /// Why the server no longer takes anything; it may have said more, which is read first.
    unsendable: Option<ClientError>,
}

impl Connection {
    pub(super) fn new(address: String, stream: Stream, keep: Keep) -> Self {
        Self {
            address,
            stream,
            inbound: Inbound::default(),
            flight: Flight::default(),
            keep,
            owed: None,
            model: None,
            held: None,
            momentum: None,
            outdated: false,
            workshop: Workshop::default(),
            pool: Vec::new(),
            unsendable: None,
        }
    }

    /// Whether nothing is left of a call that was broken off.
    pub(super) fn is_settled(&self) -> bool {
        self.owed.is_none() && self.flight.is_settled()
    }

    /// Whether all that a turn sends has left.
    pub(super) fn is_sent(&self, turn: &Turn<'_>) -> bool {
        self.owed.is_none() && turn.outgoing.as_ref().is_none_or(|(_, outgoing)| outgoing.is_done())
    }

    /// Makes a call's first fragment, to leave with its head.
    pub(super) fn join_first(&mut self, request: u32, outgoing: &mut Outgoing<'_>) {
        outgoing.join_first(&mut self.makings(request).1);
    }

    /// A turn has ended; its memory serves the next.
    pub(super) fn tidy(&mut self, turn: Turn<'_>) {
        // The next turn's memory is another; see `Flight::awaits`.
        assert!(!self.inbound.is_in_out(), "a turn ended while a root was read into its memory");
        if let Some((_, outgoing)) = turn.outgoing {
            self.workshop = outgoing.into_workshop();
        }
    }

    /// The connection is gone, and the caller's memory about to go. What is left to settle, and the ends that are known
    /// already, of pushes that somebody waits for, or not.
    pub(super) fn lose(&mut self, turn: Turn<'_>) -> (Vec<Unsettled>, Vec<(bool, Receipt)>) {
        let torn = self.inbound.leave_out();
        if let (Some(fragment), Some(held)) = (torn, &mut self.held) {
            held.tear(fragment);
        }
        (self.owed, self.unsendable) = (None, None);
        self.inbound = Inbound::default();
        if let Some(model) = &self.model {
            self.inbound.expect(model);
        }
        // A velocity that was taken, or a buffer's change that was counted, when it was sent, is not made twice.
        let counts_at_once = self.momentum.is_some() || self.model.as_ref().is_some_and(|m| m.has_buffers);
        let is_repeatable = self.keep == Keep::Settled || !counts_at_once;
        let (mut unsettled, mut ends) = (Vec::new(), Vec::new());
        for pending in self.flight.take_all() {
            // Calls and pulls are made again.
            let Some(mut push) = pending.push else { continue };
            match pending.end {
                Some(End::Receipt { receipt, .. }) => ends.push((!pending.abandoned, receipt)),
                Some(_) => {} // it was refused, and has not used its number
                None => {
                    let due = pending.due.start;
                    // The next root, half read: its fragment was answered, and lies there no more.
                    let begun = usize::from(torn == Some(due) && turn.target == Some(pending.request));
                    let answered = push.before.answered.max(due + begun);
                    let outgoing = turn.outgoing.as_ref().filter(|(request, _)| *request == pending.request);
                    if let Some((_, outgoing)) = outgoing {
                        let made = push.fragments.len() - outgoing.num_unmade();
                        push.made = made.max(push.before.made);
                    }
                    // Once all of it has left, the answer to the push before may have come where it lies.
                    let of_another = turn.target != Some(pending.request)
                        && outgoing.is_some_and(|(_, outgoing)| outgoing.is_done());
                    let is_overwritten = turn.overlaps == Overlap::Anywhere && (answered > 0 || of_another);
                    let is_here = outgoing.is_some() && !pending.abandoned;
                    let gone = !(is_here && is_repeatable) || is_overwritten;
                    unsettled.push(Unsettled { push, answered, gone, awaited: !pending.abandoned });
                }
            }
        }
        (unsettled, ends)
    }

    /// Goes on with another stream.
    pub(super) fn renew(&mut self, stream: Stream) {
        self.stream = stream;
    }

    /// Ends the connection; the server notices.
    pub(super) fn hang_up(&self) {
        if let Err(error) = self.stream.shutdown() {
            tracing::debug!(address = self.address, %error, "the connection had ended already");
        }
    }

    /// Says that the server owes an answer for long, or that it has answered after all.
    pub(super) fn tell_of_silence(&self, silence: &mut Silence, is_silent: bool, now: Instant) {
        let address = &self.address;
        if !is_silent {
            if let Some(silent) = silence.end(now) {
                tracing::warn!("{address} answers again, after {:.0} s", silent.as_secs_f64());
            }
        } else if self.flight.owes_parameters()
            && let Some(silent) = silence.due(now)
        {
            tracing::warn!(
                "no answer from {address} for {:.0} s, though it is connected: its process may be stopped, or busy; \
                 waiting on (Ctrl-C ends the wait)",
                silent.as_secs_f64()
            );
        }
    }

    /// Goes on with a turn, by a frame or two. Pending: the stream has neither bytes nor room.
    ///
    /// # Cancel safety
    /// A turn may be given up between two steps, if [`Self::break_off`] follows while its memory is still there.
    pub(super) fn step(
        &mut self,
        turn: &mut Turn<'_>,
        until: &dyn Fn(&Self, &Turn<'_>) -> bool,
    ) -> Poll<Result<Step, ClientError>> {
        if until(self, turn) {
            return Poll::Ready(Ok(Step::Done));
        }
        let mut progress = false;
        if self.unsendable.is_none() {
            match self.poll_send(turn) {
                Poll::Ready(Ok(some)) => progress |= some,
                Poll::Ready(Err(error)) => {
                    self.unsendable = Some(ClientError::from_frame(&self.address, &FrameError::Io(error)));
                }
                Poll::Pending => {}
            }
        }
        progress |= self.deliver_early(turn);
        if until(self, turn) {
            return Poll::Ready(Ok(Step::Done));
        }
        match self.poll_receive(turn) {
            Poll::Ready(Ok(())) => progress = true,
            Poll::Ready(Err(error @ ClientError::Lost { .. })) => {
                return Poll::Ready(Err(self.unsendable.take().unwrap_or(error)));
            }
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            Poll::Pending => {}
        }
        if progress { Poll::Ready(Ok(Step::More)) } else { Poll::Pending }
    }

    /// The caller goes, and its memory with it: what must still be sent is copied, what comes is dropped.
    pub(super) fn break_off(&mut self, turn: Turn<'_>) {
        if let (Some(fragment), Some(held)) = (self.inbound.leave_out(), &mut self.held) {
            held.tear(fragment);
        }
        if let Some((request, outgoing)) = turn.outgoing.filter(|(_, outgoing)| !outgoing.is_done()) {
            let (first, rest) = outgoing.into_owned(&mut self.makings(request).1);
            self.owed = Some(Owed { request, first, rest, sent: 0 });
        }
        self.flight.abandon_all();
    }

    /// The last word of a client that is dropped.
    pub(super) fn last_word(&mut self, parting: Parting) {
        if self.owed.is_none() {
            last_word(&self.stream, &self.address, self.flight.next_request(), parting);
        }
    }

    /// What a request's fragments are made with, and the socket they leave by.
    fn makings(&mut self, request: u32) -> (&Stream, Makings<'_>) {
        let push = self.flight.get_mut(request).and_then(|p| p.push.as_mut());
        let makings = Makings {
            model: self.model.as_deref(),
            held: self.held.as_mut(),
            momentum: self.momentum.as_mut(),
            buffers_sent: push.map(|push| &mut push.buffers_sent).filter(|_| self.keep == Keep::Settled),
        };
        (&self.stream, makings)
    }

    /// Sends a part of what is owed or of what the turn sends. Ready(false): there is nothing, or it may not leave yet.
    fn poll_send(&mut self, turn: &mut Turn<'_>) -> Poll<std::io::Result<bool>> {
        if let Some(owed) = &mut self.owed {
            let pending = self.flight.get(owed.request);
            let part = if owed.first.is_empty() {
                let ended = pending.is_none_or(|p| p.end.is_some());
                if pending.is_some_and(|p| !p.granted) && !ended {
                    return Poll::Ready(Ok(false));
                }
                if owed.rest.is_empty() || pending.is_none_or(|p| !p.granted) {
                    self.owed = None;
                    return Poll::Ready(Ok(true));
                }
                &mut owed.rest
            } else {
                &mut owed.first
            };
            let left = &part[owed.sent..];
            owed.sent += ready!(self.stream.write(&[IoSlice::new(left)]))?;
            if owed.sent == part.len() {
                (*part, owed.sent) = (Vec::new(), 0);
            }
            return Poll::Ready(Ok(true));
        }
        let Some((request, outgoing)) = &mut turn.outgoing else {
            return Poll::Ready(Ok(false));
        };
        if outgoing.is_done() {
            return Poll::Ready(Ok(false));
        }
        if outgoing.is_at_fragments()
            && let Some(pending) = self.flight.get(*request).filter(|p| !p.granted)
        {
            if pending.end.is_some() {
                turn.outgoing = None; // rejected by its head alone
                return Poll::Ready(Ok(true));
            }
            return Poll::Ready(Ok(false));
        }
        let (stream, mut with) = self.makings(*request);
        ready!(outgoing.poll(stream, &mut with))?;
        Poll::Ready(Ok(true))
    }
}

/// Says goodbye if the socket takes it whole at once, and waits for nothing.
pub(super) fn last_word(stream: &Stream, address: &str, request: u32, parting: Parting) {
    let mut payload = Vec::new();
    encode(&Call::Goodbye { parting }, &mut payload);
    if !matches!(stream.try_write_all(&frame(Kind::Call, request, &payload)), Ok(true)) {
        tracing::debug!(address, "the server did not hear the goodbye");
    }
}
