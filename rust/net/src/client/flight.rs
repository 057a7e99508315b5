//! What this worker has asked for and not yet seen the end of.

use offbeat_core::layout::Presence;
use offbeat_core::store::Receipt;
use offbeat_core::wire::message::{Refused, Reply};
use offbeat_core::wire::{Header, Kind, flags};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A fragment's parameters that have come before the caller's memory may be written: its place in the model, its
/// version, its bytes; no bytes: as the worker has it.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) fragment: usize,
    pub(super) version: u64,
    pub(super) bytes: Option<Vec<u8>>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
    /// A push settled. Term and version are those of the parameters that came with it.
    Receipt {
        receipt: Receipt,
        term: u64,
        version: u64,
    },
    /// A pull is complete.
    Pulled {
        term: u64,
        version: u64,
    },
    Reply(Reply),
    Refused(Refused),
}

/// How far a push had come on the connections that were lost with it under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Before {
    /// Fragments below this one were answered.
    pub(super) answered: usize,
    /// So many of its fragments were made.
    pub(super) made: usize,
}

/// What a push leaves to do until it has settled.
#[derive(Debug)]
pub(super) struct PushPart {
    pub(super) sequence: u64,
    pub(super) samples: u64,
    pub(super) norm: Option<f64>,
    pub(super) present: Arc<Presence>,
    pub(super) fragments: Arc<[usize]>,
    /// How many of them were made, on this connection or one before: all, unless the connection was lost.
    pub(super) made: usize,
    pub(super) before: Before,
    /// The values of buffers as sent, per fragment, until the server's have come.
    pub(super) buffers_sent: Vec<(usize, Vec<u8>)>,
}

/// A request on its way.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) request: u32,
    /// What ends it, unless it is refused.
    pub(super) ends_with: Kind,
    pub(super) push: Option<PushPart>,
    /// Fragments whose roots must still come before the end, in this order: all of the model's, where the request says
    /// so.
    pub(super) due: Range<usize>,
    pub(super) early: VecDeque<Early>,
    /// Whether it asked for changes only, so that a root may be answered by "unchanged".
    pub(super) incremental: bool,
    /// Whether its fragments may be sent.
    pub(super) granted: bool,
    pub(super) end: Option<End>,
    /// Nobody waits for it any more; its end is noted, its parameters are dropped.
    pub(super) abandoned: bool,
}

impl Pending {
    pub(super) fn new(request: u32, ends_with: Kind) -> Self {
        Self {
            request,
            ends_with,
            push: None,
            due: 0..0,
            early: VecDeque::new(),
            incremental: false,
            granted: true,
            end: None,
            abandoned: false,
        }
    }
}

/// Requests in the order they were sent; two or three at most.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pending: VecDeque<Pending>,
    last_request: u32,
    /// Sequence of the newest push with a receipt.
    pub(super) settled: u64,
    /// How many of the pushes with a receipt were applied.
    pub(super) applied: u64,
}

impl Flight {
    /// The next request's number. 0 is never one: the server uses it for what answers nothing.
    pub(super) fn next_request(&mut self) -> u32 {
        self.last_request = self.last_request.checked_add(1).unwrap_or(1);
        self.last_request
    }

    /// The next push's number: no gaps, and a push that was refused did not use its own.
    pub(super) fn next_sequence(&self) -> u64 {
        let open = self.pending.iter().filter(|p| p.push.is_some() && p.end.is_none()).count();
        self.settled + open as u64 + 1
    }

    /// Whether a push or a pull is not answered. Other calls may take as long as other workers do.
    pub(super) fn owes_parameters(&self) -> bool {
        self.pending.iter().any(|p| p.end.is_none() && p.ends_with != Kind::Reply)
    }

    pub(super) fn begin(&mut self, pending: Pending) {
        self.pending.push_back(pending);
    }

    pub(super) fn get(&self, request: u32) -> Option<&Pending> {
        self.pending.iter().find(|p| p.request == request)
    }

    pub(super) fn get_mut(&mut self, request: u32) -> Option<&mut Pending> {
        self.pending.iter_mut().find(|p| p.request == request)
    }

    /// The request that a root answers, if it is due there; else what is wrong with it. A server that sends what nobody
    /// waits for could else have it written where the next call's parameters go. `term`: of what the worker has read.
    pub(super) fn awaits(&self, root: &Header, term: Option<u64>) -> Result<&Pending, String> {
        let Header { request, fragment, .. } = *root;
        let Some(pending) = self.get(request).filter(|p| p.end.is_none()) else {
            return Err(format!("a root for request {request} came unasked"));
        };
        let due = pending.due.clone().next();
        if due != Some(fragment as usize) {
            let due = due.map_or("none".to_owned(), |due| format!("that of fragment {due}"));
            return Err(format!("a root of fragment {fragment} came where {due} was due"));
        }
        // Only a worker that has read the whole model asks for changes.
        let unchanged = root.flags & flags::UNCHANGED != 0;
        if unchanged && !(pending.incremental && term == Some(root.term)) {
            return Err(format!("fragment {fragment} is \"unchanged\", and was never read"));
        }
        Ok(pending)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Pending> {
        self.pending.iter_mut()
    }

    /// The oldest push that somebody waits for.
    pub(super) fn oldest_push(&self) -> Option<u32> {
        self.pending.iter().find(|p| p.push.is_some() && !p.abandoned).map(|p| p.request)
    }

    /// Whether a request has ended and all that came early with it has been delivered.
    pub(super) fn is_complete(&self, request: u32) -> bool {
        self.get(request).is_none_or(|p| p.end.is_some() && p.early.is_empty())
    }

    /// Takes a request that has ended.
    pub(super) fn take(&mut self, request: u32) -> Option<End> {
        let at = self.pending.iter().position(|p| p.request == request && p.end.is_some())?;
        self.pending.remove(at)?.end
    }

    /// Whether a call has not been answered yet, and no push or pull, which the server would not go on from.
    pub(super) fn is_only_calling(&self) -> bool {
        self.pending.iter().any(|p| p.end.is_none()) && !self.owes_parameters()
    }

    /// Nobody waits for anything any more.
    pub(super) fn abandon_all(&mut self) {
        for pending in &mut self.pending {
            pending.abandoned = true;
            pending.early.clear();
        }
    }

    /// Whether everything that was abandoned has ended.
    pub(super) fn is_settled(&self) -> bool {
        self.pending.iter().all(|p| !p.abandoned || p.end.is_some())
    }

    /// Takes everything: the connection is gone.
    pub(super) fn take_all(&mut self) -> Vec<Pending> {
        self.pending.drain(..).collect()
    }

    /// Takes the ends of what was abandoned.
    pub(super) fn take_abandoned(&mut self) -> Vec<End> {
        let mut ends = Vec::new();
        self.pending.retain_mut(|p| {
            let ended = p.abandoned && p.end.is_some();
            if ended {
                ends.extend(p.end.take());
            }
            !ended
        });
        ends
    }
}
