//! Who has gone, when and why: status tells it long after the members have come back or been replaced.

use super::member::State;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Instant;

/// Departures that status remembers.
const MAX_DEPARTURES: usize = 1000;

/// A departure, for status.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Departure {
    pub(crate) worker: String,
    pub(crate) incarnation: u32,
    pub(crate) state: State,
    pub(crate) cause: String,
    #[serde(skip)]
    pub(crate) at: Instant,
}

/// The last departures, oldest first.
#[derive(Debug, Default)]
pub(super) struct Departures(VecDeque<Departure>);

impl Departures {
    /// Adds one; beyond [`MAX_DEPARTURES`] the oldest goes.
    pub(super) fn remember(&mut self, id: &str, incarnation: u32, state: State, cause: &str, at: Instant) {
        if self.0.len() == MAX_DEPARTURES {
            self.0.pop_front();
        }
        let (worker, cause) = (id.to_owned(), cause.to_owned());
        self.0.push_back(Departure { worker, incarnation, state, cause, at });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Departure> {
        self.0.iter()
    }
}
