//! What arrives on the data connection, and where it goes: into the caller's memory, into memory of our own until that
//! may be written, or nowhere; and what a request's end means.

use super::connection::{Connection, Turn};
use super::error::ClientError;
use super::flight::{Early, End, PushPart};
use super::inbound::{Arrived, Place, Surroundings, fits_runs};
use super::memory::Memory;
use super::model::Model;
use offbeat_core::pipeline::Reason;
use offbeat_core::store::Receipt;
use offbeat_core::wire::message::Refused;
use offbeat_core::wire::{Header, Kind, MessageError, decode, flags};
use std::task::Poll;

impl Connection {
    /// Writes one fragment that came early, if its place is free now.
    pub(super) fn deliver_early(&mut self, turn: &Turn<'_>) -> bool {
        let (Some(target), Some(out), Some(model)) = (turn.target, turn.out, self.model.clone()) else {
            return false;
        };
        let Some(pending) = self.flight.get_mut(target) else {
            return false;
        };
        let Some(at) = pending.early.iter().position(|e| turn.may_write(&model, e.fragment)) else {
            return false;
        };
        let Some(early) = pending.early.remove(at) else {
            return false;
        };
        self.deliver(&model, out, early);
        true
    }

    fn deliver(&mut self, model: &Model, out: &[Memory<'_>], early: Early) {
        let Early { fragment, version, bytes } = early;
        let Some(held) = &mut self.held else { return };
        if let Some(bytes) = bytes {
            model.scatter(fragment, &bytes, out);
            held.arrived(model, fragment, version, Some(&bytes));
            self.pool.push(bytes);
        } else {
            // The server has what was pulled; a module's forward pass may have moved its buffers since.
            held.arrived(model, fragment, version, None);
            if model.is_buffers(fragment) {
                model.scatter(fragment, held.buffers(fragment), out);
            }
        }
        if model.is_buffers(fragment) {
            for push in self.flight.iter_mut().filter_map(|p| p.push.as_mut()) {
                push.buffers_sent.retain(|(f, _)| *f != fragment);
            }
        }
    }

    /// Receives at most one frame.
    pub(super) fn poll_receive(&mut self, turn: &Turn<'_>) -> Poll<Result<(), ClientError>> {
        let model = self.model.clone();
        let with = Surroundings {
            address: &self.address,
            stream: &self.stream,
            model: model.as_deref(),
            out: turn.out,
        };
        let (flight, held, pool) = (&self.flight, self.held.as_ref(), &mut self.pool);
        let arrived = std::task::ready!(self.inbound.poll_frame(with, &mut |header| {
            let pending = flight.awaits(header, held.map(|held| held.term))?;
            if header.flags & flags::UNCHANGED != 0 {
                return Ok(None);
            }
            let (Some(model), Some(held)) = (&model, held) else {
                return Ok(Some(Place::Nowhere));
            };
            let fragment = header.fragment as usize;
            Ok(Some(if pending.abandoned {
                Place::Nowhere
            } else if turn.target == Some(header.request)
                && turn.may_write(model, fragment)
                && !held.wants_bytes(model, fragment)
                && fits_runs(model, fragment)
            {
                Place::Out
            } else {
                let mut bytes = pool.pop().unwrap_or_default();
                bytes.resize(header.payload_len as usize, 0);
                Place::Own(bytes)
            }))
        }))?;
        match arrived {
            Arrived::Root(header, place) => self.root(turn, &header, place),
            Arrived::Other(header) => self.other(&header)?,
        }
        Poll::Ready(Ok(()))
    }

    /// A fragment's parameters are here, which were awaited.
    fn root(&mut self, turn: &Turn<'_>, header: &Header, place: Option<Place>) {
        let (fragment, version) = (header.fragment as usize, header.version);
        let (Some(model), Some(pending)) = (self.model.clone(), self.flight.get_mut(header.request)) else {
            return;
        };
        pending.due.next();
        let bytes = match place {
            Some(Place::Out) => {
                if let Some(held) = &mut self.held {
                    held.arrived(&model, fragment, version, None);
                }
                return;
            }
            Some(Place::Own(bytes)) => Some(bytes),
            Some(Place::Nowhere) => return,
            None => None,
        };
        if pending.abandoned {
            self.pool.extend(bytes);
            return;
        }
        let early = Early { fragment, version, bytes };
        match turn.out.filter(|_| turn.target == Some(header.request) && turn.may_write(&model, fragment)) {
            Some(out) => self.deliver(&model, out, early),
            None => pending.early.push_back(early),
        }
    }

    /// Any other frame is here.
    fn other(&mut self, header: &Header) -> Result<(), ClientError> {
        let payload = self.inbound.message();
        let failed = |error: MessageError| ClientError::from_frame(&self.address, &error.into());
        let Header { term, version, .. } = *header;
        let end = match header.kind {
            Kind::Grant => {
                if let Some(pending) = self.flight.get_mut(header.request) {
                    pending.granted = true;
                }
                return Ok(());
            }
            Kind::Receipt => End::Receipt { receipt: decode(payload).map_err(failed)?, term, version },
            Kind::PullEnd => End::Pulled { term, version },
            Kind::Reply => End::Reply(decode(payload).map_err(failed)?),
            Kind::Refused => {
                let refused: Refused = decode(payload).map_err(failed)?;
                if refused.fatal || self.flight.get(header.request).is_none() {
                    return Err(ClientError::from_refused(&self.address, refused));
                }
                End::Refused(refused)
            }
            kind => return Err(self.broke(format!("a {kind:?} frame came unasked"))),
        };
        let Some(pending) = self.flight.get_mut(header.request).filter(|p| p.end.is_none()) else {
            return Err(self.broke(format!("an answer to request {} came unasked", header.request)));
        };
        if header.kind != Kind::Refused && (header.kind != pending.ends_with || !pending.due.is_empty()) {
            let (kind, due, ends_with) = (header.kind, pending.due.len(), pending.ends_with);
            let cause = format!("{kind:?} ends a request that waits for {due} roots and {ends_with:?}");
            return Err(self.broke(cause));
        }
        let mut push = pending.push.take();
        if let (End::Receipt { receipt, .. }, Some(push)) = (&end, &mut push) {
            self.conclude(push, receipt);
        }
        if let Some(pending) = self.flight.get_mut(header.request) {
            (pending.push, pending.end) = (push, Some(end));
        }
        Ok(())
    }

    /// What a push that has ended means to the next one.
    pub(super) fn conclude(&mut self, push: &mut PushPart, receipt: &Receipt) {
        self.outdated |= receipt.reason == Some(Reason::OptimizerChanged);
        let buffers_sent = std::mem::take(&mut push.buffers_sent);
        if receipt.applied {
            // What was applied in parts before the optimizer was replaced is of a velocity that is no more.
            let is_of_this = receipt.reason != Some(Reason::OptimizerChanged);
            if let Some(momentum) = self.momentum.as_mut().filter(|_| is_of_this) {
                momentum.applied(&push.fragments[..push.made], &push.present);
            }
            if let (Some(model), Some(held)) = (&self.model, &mut self.held) {
                for (fragment, values) in buffers_sent {
                    held.pushed(model, fragment, &push.present, &values);
                }
            }
        }
        if push.sequence > self.flight.settled {
            self.flight.settled = push.sequence;
            self.flight.applied += u64::from(receipt.applied);
        }
    }

    pub(super) fn broke(&self, cause: String) -> ClientError {
        ClientError::Protocol { address: self.address.clone(), cause }
    }
}
