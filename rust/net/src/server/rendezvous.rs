//! A worker waits for the others of its round. Its session asks anew whenever something may have changed: who is there,
//! who has entered, whether a round is over. So whatever happened to it meanwhile, what it waits for is what is so now.

use super::end::End;
use super::rounds::{Entry, OtherTerms, Part};
use super::session::Session;
use super::shared::Shared;
use offbeat_core::wire::Header;
use offbeat_core::wire::message::{MOST_TERMS_BYTES, RefusalCode, Refused, Reply, cut, is_printable};
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout_at;

/// Of terms that cannot be shown as they are.
const MOST_SHOWN_BYTES: usize = 128;

impl Session {
    /// Waits until its round closes.
    pub(super) async fn enter(&self, header: &Header, entry: Entry) -> Result<Reply, End> {
        let mut counts = [Some(entry.samples), entry.new.map(|new| new.samples)].into_iter().flatten();
        if let Some(samples) = counts.find(|samples| !samples.is_finite() || *samples < 0.0) {
            let message =
                format!("a round was entered with {samples} samples: a finite number is due, 0 or more");
            return Err(End::refused(header, RefusalCode::Malformed, message));
        }
        let mut words = [&entry.terms, &entry.wish].into_iter().flatten();
        if let Some(words) = words.find(|words| !is_printable(words, MOST_TERMS_BYTES)) {
            let message = format!(
                "a round was entered by {:?}, which is not at most {MOST_TERMS_BYTES} bytes of printable text",
                cut(words, MOST_SHOWN_BYTES)
            );
            return Err(End::refused(header, RefusalCode::Malformed, message));
        }
        self.bears(header, &entry)?;
        let shared = &self.shared;
        let closed = until(shared, || shared.enter_round(self.incarnation, entry.clone()));
        match self.or_closed(closed).await? {
            Ok(Part { round, share, members, at_work, agreed, new_share }) => {
                Ok(Reply::Entered { round, share, members, at_work, agreed, new_share })
            }
            Err(OtherTerms(theirs)) => {
                let own = entry.terms.as_deref().unwrap_or_default();
                let message = format!(
                    "this worker takes part in rounds by {own}, and those who are there by {theirs}: all have to \
                     by the same"
                );
                let refused = Refused { code: RefusalCode::State, message, fatal: false };
                Err(End::Refused { request: header.request, refused })
            }
        }
    }

    /// Sees that no share of a mean can be rejected: those of a round come one after the other. From here on no bound on
    /// staleness is [taken](super::Server::set_max_staleness).
    fn bears(&self, header: &Header, entry: &Entry) -> Result<(), End> {
        if entry.terms.is_none() {
            return Ok(()); // of no mean
        }
        let agreement = self.shared.agreement();
        let Some(most) = agreement.config().staleness.max_staleness else {
            // Its answer is asked for again. Before a bound can be set: that looks for members under this lock, too.
            self.shared.enter_round(self.incarnation, entry.clone());
            return Ok(());
        };
        let message = format!(
            "the server's max_staleness is {most}, and of a round's shares each comes later than the one before: those \
             rejected would be missing in the mean; set server.max_staleness = None, or start it without, and make this member anew"
        );
        let refused = Refused { code: RefusalCode::State, message, fatal: false };
        Err(End::Refused { request: header.request, refused })
    }

    /// Waits until all of a round have gathered, or are not to come any more.
    pub(super) async fn gather(&self, round: u64) -> Result<Reply, End> {
        let shared = &self.shared;
        let over = until(shared, || shared.gather_round(self.incarnation, round));
        let missing = self.or_closed(over).await?;
        Ok(Reply::Gathered { missing, version: shared.model.get().map_or(0, |model| model.store.version()) })
    }
}

/// Asks until there is an answer: now, and after every change.
///
/// # Cancel safety
/// Safe; what was said stays said.
async fn until<T>(shared: &Shared, mut ask: impl FnMut() -> Option<T>) -> T {
    let mut changes = shared.round_changes();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        // An error says that the sender is gone, and with it the server; it is in our hands.
        changes.changed().await.ok();
    }
}

/// Closes rounds whose grace has passed, until everything ends.
pub(super) async fn keep_time(shared: Arc<Shared>) {
    let mut changes = shared.round_changes();
    loop {
        let deadline = shared.close_late_round(Instant::now());
        let changed = changes.changed();
        // Either way it looks again; an error says that the sender is gone, which is in our hands.
        match deadline {
            None => changed.await.ok(),
            Some(deadline) => timeout_at(deadline.into(), changed).await.ok().and_then(Result::ok),
        };
    }
}
