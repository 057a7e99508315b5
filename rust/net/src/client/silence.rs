//! A server that owes an answer and sends nothing: nothing has failed, so that all there is to do is to say so.

use std::time::{Duration, Instant};

/// Before it is said for the first time. Each time after that takes twice as long.
const FIRST: Duration = Duration::from_secs(10);
const MOST: Duration = Duration::from_secs(600);

/// How long the server has been silent in one turn.
#[derive(Debug)]
pub(super) struct Silence {
    since: Instant,
    /// After so much more it is to be said.
    pause: Duration,
    said: Option<Instant>,
}

impl Silence {
    pub(super) fn since(now: Instant) -> Self {
        Self { since: now, pause: FIRST, said: None }
    }

    pub(super) fn is_said(&self) -> bool {
        self.said.is_some()
    }

    /// Something has come or gone. For how long there was silence, if that was said.
    pub(super) fn end(&mut self, now: Instant) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.since);
        let was_said = self.is_said();
        *self = Self::since(now);
        was_said.then_some(silent)
    }

    /// For how long there has been silence, if it is to be said now.
    pub(super) fn due(&mut self, now: Instant) -> Option<Duration> {
        if now.saturating_duration_since(self.said.unwrap_or(self.since)) < self.pause {
            return None;
        }
        if self.said.replace(now).is_some() {
            self.pause = (self.pause * 2).min(MOST);
        }
        Some(now.saturating_duration_since(self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_ever_more_rarely_and_its_end_once() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut silence = Silence::since(begun);
        assert_eq!(silence.end(at(9)), None);
        let said: Vec<u64> = (9..200).filter(|&s| silence.due(at(s)).is_some()).collect();
        assert_eq!(said, [19, 29, 49, 89, 169]);
        assert_eq!(silence.due(at(5000)), Some(Duration::from_secs(4991)));
        assert_eq!(silence.end(at(5001)), Some(Duration::from_secs(4992)));
        assert_eq!(silence.end(at(5020)), None);
        assert_eq!(silence.due(at(5029)), None);
        assert_eq!(silence.due(at(5030)), Some(Duration::from_secs(10)));
    }
}
