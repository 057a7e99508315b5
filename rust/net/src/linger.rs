//! Staying awake for a moment instead of going to sleep. Being woken costs some ten microseconds, about as much as all
//! the rest of a push of a small model; a peer that answers at once is not worth it, and one that does not answers
//! later anyway.

use std::time::{Duration, Instant};

/// How long to stay awake.
const LIMIT: Duration = Duration::from_micros(50);
/// After this many losses in a row, 2^this − 1 waits go to sleep at once before the next try.
const MAX_LOSSES: u32 = 6;

/// One side's habit: it stays awake where that has paid, and asks again now and then where it has not.
#[derive(Debug, Default)]
pub(crate) struct Linger {
    since: Option<Instant>,
    losses: u32,
    skip: u32,
}

impl Linger {
    /// A wait begins.
    pub(crate) fn begin(&mut self) {
        self.since = if self.skip == 0 {
            Some(Instant::now())
        } else {
            self.skip -= 1;
            None
        };
    }

    /// Whether to look again at once; false: to sleep.
    pub(crate) fn again(&mut self) -> bool {
        let Some(since) = self.since else { return false };
        if since.elapsed() < LIMIT {
            return true;
        }
        self.losses = (self.losses + 1).min(MAX_LOSSES);
        self.skip = (1 << self.losses) - 1;
        self.since = None;
        false
    }

    /// What was waited for has come.
    pub(crate) fn end(&mut self) {
        if self.since.take().is_some() {
            self.losses = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the next `n` waits stay awake, if each lasts too long.
    fn tries(linger: &mut Linger, n: u32) -> u32 {
        let mut tried = 0;
        for _ in 0..n {
            linger.begin();
            tried += u32::from(linger.since.is_some());
            while linger.again() {}
        }
        tried
    }

    #[test]
    fn what_does_not_pay_is_tried_ever_less() {
        let mut linger = Linger::default();
        assert_eq!(tries(&mut linger, (1 + 1) + (1 + 3) + (1 + 7) + (1 + 15) + (1 + 31) + (1 + 63)), 6);
        assert_eq!(tries(&mut linger, 10 * 64), 10);
    }

    #[test]
    fn one_wait_that_paid_brings_it_back() {
        let mut linger = Linger::default();
        tries(&mut linger, 1000);
        while linger.since.is_none() {
            linger.begin();
        }
        linger.end();
        linger.begin();
        assert!(linger.again());
    }
}
