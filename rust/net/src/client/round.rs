//! Rounds as a worker sees them: it enters with what it has made, is told its share, pushes its part, and gathers with
//! the others. Both calls wait for other workers, and are asked again on another connection if theirs is lost.

use super::config::Interrupt;
use super::error::ClientError;
use super::session::Inner;
use offbeat_core::wire::message::{Call, MOST_TERMS_BYTES, New, Reply, is_printable};
use std::time::Duration;

/// With what a worker enters a round.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// A finite number, 0 or more: what its share is measured by.
    pub samples: f64,
    /// Whether it goes on after this; else it only waits for the others' end.
    pub at_work: bool,
    /// How long it would have the round wait, from when the first has entered, for those who have not.
    pub grace: Option<Duration>,
    /// How many it would have in the round, itself among them, unless the grace has passed.
    pub at_least: Option<u32>,
    /// How long it would have the round wait, where all in it have ended, for each worker that is there and has entered none
    /// yet.
    pub linger: Option<Duration>,
    /// By what it takes part, in up to [`MOST_TERMS_BYTES`]: refused where others do by something else.
    pub terms: Option<String>,
    /// By what it would from the next round on, if all would.
    pub wish: Option<String>,
    /// What of its push is in a round for the first time, and has a share of its own where all say the same.
    pub new: Option<New>,
}

impl Entry {
    /// With so many samples, at work, and nothing else to say.
    #[must_use]
    pub const fn of(samples: f64) -> Self {
        Self {
            samples,
            at_work: true,
            grace: None,
            at_least: None,
            linger: None,
            terms: None,
            wish: None,
            new: None,
        }
    }
}

/// A round that this worker is in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entered {
    /// Counted from 1, in each life of the server.
    pub round: u64,
    /// Of all samples in the round, 0 to 1; 0 for everybody where nobody has any.
    pub share: f64,
    pub members: u32,
    /// How many of these go on after it.
    pub at_work: u32,
    /// Whether what it wished for holds from now on: all who take part were in the round and wished for the same, or it
    /// had come into force while this worker was away, whose share is 0 then.
    pub agreed: bool,
    /// Of the samples of what is [new](Entry::new), 0 to 1. `None`: not all say the same of that, and `share` is of all.
    pub new_share: Option<f64>,
}

/// A round that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// Shares of workers that were lost or went before they had gathered.
    pub missing: u64,
    /// The model's, when the server said so.
    pub version: u64,
}

impl Inner {
    pub(super) fn enter(&mut self, entry: &Entry, interrupt: &dyn Interrupt) -> Result<Entered, ClientError> {
        let Entry { samples, at_work, grace, at_least, linger, terms, wish, new } = entry.clone();
        let mut counts = [("samples", Some(samples)), ("new", new.map(|new| new.samples))].into_iter();
        if let Some((name, Some(samples))) =
            counts.find(|(_, n)| n.is_some_and(|n| !n.is_finite() || n < 0.0))
        {
            let message = format!("{name} is {samples}: it is a finite number, 0 or more");
            return Err(ClientError::bad_input(message));
        }
        for (name, words) in [("terms", &terms), ("wish", &wish)] {
            let Some(words) = words.as_ref().filter(|words| !is_printable(words, MOST_TERMS_BYTES)) else {
                continue;
            };
            let bytes = words.len();
            return Err(ClientError::bad_input(if bytes > MOST_TERMS_BYTES {
                format!("{name} has {bytes} bytes: give {MOST_TERMS_BYTES} at most")
            } else {
                format!("{name} is {words:?}: give words without control characters")
            }));
        }
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (grace_ms, linger_ms) = (grace.map(ms), linger.map(ms));
        let call = Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new };
        self.again(interrupt, &mut |inner| match inner.call(&call, interrupt)? {
            Reply::Entered { round, share, members, at_work, agreed, new_share }
                if [share, new_share.unwrap_or(0.0)].iter().all(|share| (0.0..=1.0).contains(share)) =>
            {
                Ok(Entered { round, share, members, at_work, agreed, new_share })
            }
            reply => Err(inner.unexpected(&reply)),
        })
    }

    pub(super) fn gather(&mut self, round: u64, interrupt: &dyn Interrupt) -> Result<Gathered, ClientError> {
        self.again(interrupt, &mut |inner| match inner.call(&Call::Gather { round }, interrupt)? {
            Reply::Gathered { missing, version } => Ok(Gathered { missing, version }),
            reply => Err(inner.unexpected(&reply)),
        })
    }
}
