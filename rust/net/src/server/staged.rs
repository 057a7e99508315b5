//! Pushes with `transaction = model`: staging for all of it is reserved before its first byte is asked for, and what
//! has come whole is committed by a task of its own, so that no session works on another's push.

use super::connection::{Answer, Phase};
use super::end::End;
use super::exchange::{Asked, Coming, LowestTerm, is_in};
use super::place::Place;
use super::poll;
use super::session::Session;
use offbeat_core::store::{ModelRole, Receipt, StagedFragment};
use offbeat_core::wire::message::RefusalCode;
use offbeat_core::wire::{Header, Kind, Want};
use std::sync::Arc;

/// The term of no life: the first is [`FIRST_TERM`].
///
/// [`FIRST_TERM`]: offbeat_core::wire::message::FIRST_TERM
const NO_TERM: u64 = 0;

impl Session {
    pub(super) async fn push_staged(
        &mut self,
        header: &Header,
        place: &Place,
        asked: Asked,
    ) -> Result<(), End> {
        let store = &place.model.store;
        let layout = Arc::clone(store.layout());
        let (connection, shared) = (Arc::clone(&self.connection), Arc::clone(&self.shared));
        let mut coming = Coming::of(&shared);
        let present = asked.head.present.clone();
        let all = layout.present_fragments(&present);
        let indices: Vec<usize> = all.filter(|&index| index >= asked.answered).collect();
        let bytes = indices.iter().map(|&i| layout.fragments[i].push_bytes(&present) as u64).sum();
        connection.enter(Phase::Waiting);
        let reserved = self.or_closed(place.model.staging.reserve(bytes)).await?;
        connection.enter(Phase::Sending);
        let grant = Header { request: header.request, sequence: header.sequence, ..Header::new(Kind::Grant) };
        connection.socket.write_frame(&grant, &[]).await?;
        connection.enter(Phase::Receiving);
        let mut fragments = Vec::with_capacity(indices.len());
        let mut bases = Vec::with_capacity(indices.len());
        for &fragment in &indices {
            let frame = self.fragment_header(header, fragment, &layout.fragments[fragment], &present).await?;
            let mut payload = store.staging(frame.payload_len as usize);
            self.fragment_payload(&frame, payload.bytes_mut()).await?;
            bases.push(frame.version);
            fragments.push(StagedFragment {
                fragment,
                base: frame.version,
                payload,
                checksum: frame.payload_checksum,
            });
            poll::breathe().await;
        }
        coming.is_whole();
        let receipt = self.commit(header, place, &asked, fragments).await?;
        drop(reserved);
        if receipt.applied {
            // Before the turn: what is sent in answer holds this push.
            self.own_version = self.own_version.max(receipt.version);
        }
        let (mut term, mut read) = (LowestTerm::default(), receipt.version);
        if asked.want == Want::Parameters {
            let reader = self.turn(place).await?;
            read = reader.version();
            let (mut next, mut num_absent) = (0, 0);
            for index in 0..layout.fragments.len() {
                let has = if indices.get(next) == Some(&index) {
                    next += 1;
                    asked.has_base(bases[next - 1])
                } else if is_in(&layout.fragments[index], &present) {
                    None
                } else {
                    num_absent += 1;
                    asked.has(num_absent - 1)
                };
                let root = reader.root(index);
                term.see(&root);
                self.send_root(header, index, has, root).await?;
            }
            drop(reader);
            connection.answers(Answer::Exchange { pinned: None });
        }
        let term = term.or(receipt.term);
        self.finish(header, &receipt, (term, read), asked.head.samples).await
    }

    /// Hands a staged push over and waits for its receipt.
    async fn commit(
        &mut self,
        header: &Header,
        place: &Place,
        asked: &Asked,
        fragments: Vec<StagedFragment>,
    ) -> Result<Receipt, End> {
        let mut head = asked.head.clone();
        if asked.answered > 0 {
            // Nothing is answered before all of it was committed, so that the life which did that is over; if this one
            // has not heard of it, what has come is but a part.
            head.term = NO_TERM;
        }
        let commit = place.model.store.commit(head, fragments);
        if let Some(role) = commit.role {
            tokio::spawn(poll::timed(self.meter(), drive(role)));
        }
        self.connection.enter(Phase::Waiting);
        let receipt = commit.receipt.await;
        self.connection.enter(Phase::Receiving);
        // Canceled has nothing to say beyond its name.
        receipt
            .ok()
            .ok_or_else(|| End::refused(header, RefusalCode::Unknown, "the push was lost inside the server"))
    }
}

/// Commits what is queued, a fragment at a time.
async fn drive(role: ModelRole) {
    let mut role = Some(role);
    while let Some(held) = role {
        role = held.step();
        tokio::task::yield_now().await;
    }
}
