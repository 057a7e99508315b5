//! Rounds as a worker sees them: it enters with what it has made, is told its share, pushes its part, and gathers with
//! the others. Both calls wait for other workers, and are asked again on another connection if theirs is lost.

use super::config::Interrupt;
use super::error::ClientError;
use super::session::Inner;
use offbeat_core::wire::message::{Call, Reply};
use std::time::Duration;

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
    pub(super) fn enter(
        &mut self,
        samples: f64,
        at_work: bool,
        grace: Option<Duration>,
        interrupt: &dyn Interrupt,
    ) -> Result<Entered, ClientError> {
        if !samples.is_finite() || samples < 0.0 {
            let message = format!("samples is {samples}: it is a finite number, 0 or more");
            return Err(ClientError::bad_input(message));
        }
        let grace_ms = grace.map(|grace| u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        let call = Call::Enter { samples, at_work, grace_ms };
        self.again(interrupt, &mut |inner| match inner.call(&call, interrupt)? {
            Reply::Entered { round, share, members, at_work } if (0.0..=1.0).contains(&share) => {
                Ok(Entered { round, share, members, at_work })
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
