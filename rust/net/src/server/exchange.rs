//! Pushes and pulls with `transaction = fragment`: each fragment is applied and sent back while the next one is
//! arriving in the kernel's buffer. This is the path that has to be fast: no allocation that can be reused, no timer,
//! no log line per push.

use super::connection::{Answer, Phase};
use super::end::End;
use super::outbox::Addressed;
use super::place::Place;
use super::poll;
use super::session::Session;
use super::shared::Shared;
use offbeat_core::checksum::checksum;
use offbeat_core::layout::{Fragment, Presence};
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Admission, FragmentOutcome, PushHead, Reader, Receipt, Root, Submission, Turn};
use offbeat_core::wire::header::CODEC_RAW;
use offbeat_core::wire::message::RefusalCode;
use offbeat_core::wire::{Header, Kind, PullRequest, PushRequest, Versions, Want};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A push whose head has been read: what is asked for, and what the worker has.
pub(super) struct Asked {
    pub(super) head: PushHead,
    pub(super) want: Want,
    /// Fragments below this one were answered on a connection before, and do not come again.
    pub(super) answered: usize,
    /// Versions of the fragments that are not in the push; `None`: the worker wants all of them anew.
    pub(super) have: Option<Vec<u64>>,
}

impl Asked {
    /// What the worker has of a fragment that is not in its push; `nth` counts those.
    pub(super) fn has(&self, nth: usize) -> Option<(u64, u64)> {
        Some((self.head.term, *self.have.as_ref()?.get(nth)?))
    }

    /// The same of one that is, with the version its frame carried.
    pub(super) fn has_base(&self, base: u64) -> Option<(u64, u64)> {
        self.have.as_ref().map(|_| (self.head.term, base))
    }
}

/// The lowest term among the roots handed out: while values are replaced, some are still those of the life before,
/// and a gradient at them must not pass for one of the new life.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LowestTerm(Option<u64>);

impl LowestTerm {
    pub(super) fn see(&mut self, root: &Root) {
        self.0 = Some(self.0.map_or(root.term(), |lowest| lowest.min(root.term())));
    }

    /// What was seen, or `otherwise` if nothing was.
    pub(super) fn or(self, otherwise: u64) -> u64 {
        self.0.unwrap_or(otherwise)
    }
}

/// A push of which something is still to come: counted, if its session ends before, whatever ends that.
pub(super) struct Coming<'a>(Option<&'a Shared>);

impl<'a> Coming<'a> {
    pub(super) const fn of(shared: &'a Shared) -> Self {
        Self(Some(shared))
    }

    pub(super) const fn is_whole(&mut self) {
        self.0 = None;
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            // Relaxed: a statistic.
            shared.cut_short.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Session {
    pub(super) async fn push(&mut self, header: &Header) -> Result<(), End> {
        let place = self.place(header)?.clone();
        let asked = self.push_head(header, &place).await?;
        match place.model.store.transaction() {
            Transaction::Fragment => self.push_streamed(header, &place, asked).await,
            Transaction::Model => self.push_staged(header, &place, asked).await,
        }
    }

    async fn push_head(&mut self, header: &Header, place: &Place) -> Result<Asked, End> {
        let bytes = self.reader.message(&self.connection.socket, header).await?;
        let request = PushRequest::decode(bytes).map_err(|e| End::malformed(header, &e))?;
        let layout = place.model.store.layout();
        let present = match request.present {
            None => place.all.clone(),
            Some(_) => request.presence(layout.num_tensors()).map_err(|e| End::malformed(header, &e))?,
        };
        let absent = || layout.fragments.len() - layout.present_fragments(&present).count();
        let have = match request.have {
            None => None,
            Some(have) if request.present.is_none() && have.is_empty() => Some(Vec::new()),
            Some(have) if have.len() == absent() => Some(numbers(&have)),
            Some(have) => {
                let message = format!(
                    "{} versions came for {} fragments that are not in the push",
                    have.len(),
                    absent()
                );
                return Err(End::refused(header, RefusalCode::Malformed, message));
            }
        };
        let head = PushHead {
            worker: place.key,
            sequence: header.sequence,
            term: header.term,
            base: header.version,
            epoch: request.epoch,
            samples: request.samples,
            present,
            norm: request.norm,
        };
        Ok(Asked { head, want: request.want, answered: request.answered as usize, have })
    }

    async fn push_streamed(&mut self, header: &Header, place: &Place, asked: Asked) -> Result<(), End> {
        let store = &place.model.store;
        let layout = Arc::clone(store.layout());
        let (connection, shared) = (Arc::clone(&self.connection), Arc::clone(&self.shared));
        let mut coming = Coming::of(&shared);
        let admission = store.admit(&asked.head);
        // Made after admission: the version it states is one whose tickets the worker may not have seen applied.
        let reader = store.reader();
        let mut num_absent = 0;
        let mut term = LowestTerm::default();
        for (index, fragment) in layout.fragments.iter().enumerate() {
            let is_in = is_in(fragment, &asked.head.present);
            let (root, has) = if is_in && index < asked.answered {
                (reader.root(index), None)
            } else if is_in {
                let frame = self.fragment_header(header, index, fragment, &asked.head.present).await?;
                let root = match &admission {
                    Admission::Open(push) => {
                        let mut payload = store.staging(frame.payload_len as usize);
                        self.fragment_payload(&frame, payload.bytes_mut()).await?;
                        if let Some(paused) = store.pause(push) {
                            connection.enter(Phase::Waiting);
                            // An error says that the cut is gone, which is as good.
                            paused.await.ok();
                            connection.enter(Phase::Receiving);
                        }
                        let submission =
                            store.submit(push, index, frame.version, payload, frame.payload_checksum);
                        let outcome = self.outcome(submission).await;
                        outcome.map_or_else(|| reader.root(index), |outcome| outcome.root)
                    }
                    Admission::Settled(_) => {
                        self.reader.skip(&connection.socket, &frame).await?;
                        reader.root(index)
                    }
                };
                (root, asked.has_base(frame.version))
            } else {
                num_absent += 1;
                (reader.root(index), asked.has(num_absent - 1))
            };
            term.see(&root);
            if asked.want == Want::Parameters {
                let to =
                    Addressed { request: header.request, sequence: header.sequence, fragment: index, has };
                self.outbox.root(to, root);
                if index + 1 < layout.fragments.len() {
                    self.outbox.flush_some(&connection).await?;
                }
            }
            poll::breathe().await;
        }
        coming.is_whole();
        let (receipt, read) = match admission {
            Admission::Open(push) => {
                if let Some(paused) = store.pause(&push) {
                    // It is of no fragment, so that it has not been asked yet.
                    connection.enter(Phase::Waiting);
                    paused.await.ok();
                    connection.enter(Phase::Receiving);
                }
                let receipt = push.settle();
                let read = (term.or(receipt.term), receipt.version);
                (receipt, read)
            }
            Admission::Settled(receipt) => (receipt, (term.or(store.term()), reader.version())),
        };
        self.finish(header, &receipt, read, asked.head.samples).await
    }

    /// Sends what is left of a push's answer, with its receipt at the end. `read` is the term and version that the
    /// worker's next push is to name.
    pub(super) async fn finish(
        &mut self,
        header: &Header,
        receipt: &Receipt,
        read: (u64, u64),
        samples: u64,
    ) -> Result<(), End> {
        if receipt.applied {
            self.own_version = self.own_version.max(receipt.version);
            if !receipt.duplicate {
                // Relaxed: a statistic.
                self.traffic.samples.fetch_add(samples, Ordering::Relaxed);
            }
        }
        let since_start = poll::began().saturating_duration_since(self.shared.started).as_millis();
        self.traffic
            .last_push_ms
            .store(u64::try_from(since_start).unwrap_or(u64::MAX).max(1), Ordering::Relaxed);
        let answer = Header {
            request: header.request,
            sequence: header.sequence,
            term: read.0,
            version: read.1,
            ..Header::new(Kind::Receipt)
        };
        self.outbox.receipt(answer, receipt);
        self.shared.after_push(receipt);
        self.outbox.flush(&self.connection).await
    }

    /// Takes the header of the fragment that is due; its length is what the layout and the presence make, whatever
    /// the peer would like.
    pub(super) async fn fragment_header(
        &mut self,
        push: &Header,
        index: usize,
        fragment: &Fragment,
        present: &Presence,
    ) -> Result<Header, End> {
        let frame = self.reader.header(&self.connection.socket).await?;
        let expected = fragment.push_bytes(present);
        if frame.kind != Kind::Fragment || frame.fragment as usize != index || frame.sequence != push.sequence
        {
            let due = format!("fragment {index} of push {}", push.sequence);
            return Err(End::out_of_place(&frame, &due));
        }
        if frame.payload_len as usize != expected || frame.codec != CODEC_RAW {
            let message = format!(
                "fragment {index} came with {} bytes in codec {}; this model makes {expected} in codec {CODEC_RAW}",
                frame.payload_len, frame.codec
            );
            return Err(End::refused(&frame, RefusalCode::Malformed, message));
        }
        Ok(frame)
    }

    /// Takes its payload and holds it against its checksum.
    pub(super) async fn fragment_payload(&mut self, frame: &Header, to: &mut [u8]) -> Result<(), End> {
        self.reader.payload(&self.connection.socket, to).await?;
        let computed = checksum(to);
        if computed != frame.payload_checksum {
            let message = format!(
                "fragment {} of push {} was damaged on its way, or its gradient changed while it was sent",
                frame.fragment, frame.sequence
            );
            return Err(End::refused(frame, RefusalCode::Checksum, message));
        }
        Ok(())
    }

    /// What became of a fragment: often known at once, since the submitter applies it. `None` if it was lost, which
    /// only a bug can do.
    async fn outcome(&mut self, mut submission: Submission) -> Option<FragmentOutcome> {
        if let Some(role) = submission.role.take() {
            tokio::spawn(poll::timed(self.meter(), async move {
                let mut role = Some(role);
                while let Some(held) = role {
                    role = held.drain();
                    tokio::task::yield_now().await;
                }
            }));
        }
        match submission.outcome.try_recv() {
            Ok(Some(outcome)) => Some(outcome),
            Ok(None) => {
                self.connection.enter(Phase::Waiting);
                let outcome = submission.outcome.await.ok();
                self.connection.enter(Phase::Receiving);
                outcome
            }
            Err(_) => None,
        }
    }

    pub(super) async fn pull(&mut self, header: &Header) -> Result<(), End> {
        let place = self.place(header)?.clone();
        let layout = Arc::clone(place.model.store.layout());
        let bytes = self.reader.message(&self.connection.socket, header).await?;
        let request = PullRequest::decode(bytes).map_err(|e| End::malformed(header, &e))?;
        let have = match request.have {
            None => None,
            Some(have) if have.len() == layout.fragments.len() => Some(numbers(&have)),
            Some(have) => {
                let message =
                    format!("{} versions came for {} fragments", have.len(), layout.fragments.len());
                return Err(End::refused(header, RefusalCode::Malformed, message));
            }
        };
        let mut term = LowestTerm::default();
        let reader = self.turn(&place).await?;
        for index in 0..layout.fragments.len() {
            let has = have.as_ref().map(|have| (header.term, have[index]));
            let root = reader.root(index);
            term.see(&root);
            self.send_root(header, index, has, root).await?;
        }
        let term = term.or(place.model.store.term());
        let end =
            Header { request: header.request, term, version: reader.version(), ..Header::new(Kind::PullEnd) };
        self.outbox.header(&end);
        self.outbox.flush(&self.connection).await
    }

    pub(super) async fn send_root(
        &mut self,
        header: &Header,
        fragment: usize,
        has: Option<(u64, u64)>,
        root: Arc<Root>,
    ) -> Result<(), End> {
        // The payload before this one goes now; the last waits for the end of the reply.
        self.outbox.flush_some(&self.connection).await?;
        self.outbox
            .root(Addressed { request: header.request, sequence: header.sequence, fragment, has }, root);
        poll::breathe().await;
        Ok(())
    }

    /// A reader, when it is our turn for one.
    pub(super) async fn turn(&mut self, place: &Place) -> Result<Reader, End> {
        loop {
            match place.model.store.turn(place.key, self.own_version) {
                Turn::Now(reader) => {
                    self.connection.answers(Answer::Exchange { pinned: reader.pinned() });
                    return Ok(reader);
                }
                Turn::Wait(released) => {
                    self.connection.enter(Phase::Waiting);
                    // An error says that somebody else was told; ask again.
                    self.or_closed(released).await?.ok();
                    self.connection.enter(Phase::Receiving);
                }
            }
        }
    }
}

pub(super) fn is_in(fragment: &Fragment, present: &Presence) -> bool {
    fragment.present_segments(present).next().is_some()
}

fn numbers(versions: &Versions<'_>) -> Vec<u64> {
    (0..versions.len()).filter_map(|i| versions.get(i)).collect()
}
