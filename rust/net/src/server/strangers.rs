//! What the log says of connections that did not get in: some, and how many more there were. Whoever reaches the port
//! could else fill the disk that the log is on.

use std::time::{Duration, Instant};

/// Told one by one of each spell.
const TOLD: u32 = 20;
const SPELL: Duration = Duration::from_secs(60);

/// Those of the spell that began with the first of them.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    began: Option<Instant>,
    told: u32,
    untold: u64,
}

impl Strangers {
    /// One more; whether it is to be told.
    pub(super) fn tells(&mut self, now: Instant) -> bool {
        self.began.get_or_insert(now);
        if self.told < TOLD {
            self.told += 1;
            return true;
        }
        self.untold += 1;
        false
    }

    /// Once a spell is over: how many were not told, if any.
    pub(super) fn untold(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.began?) < SPELL {
            return None;
        }
        let untold = self.untold;
        *self = Self::default();
        (untold > 0).then_some(untold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_of_many_are_told_and_the_others_counted() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let told = (0..1000).filter(|_| strangers.tells(start)).count();
        assert_eq!(told, TOLD as usize);
        assert_eq!(strangers.untold(start + SPELL / 2), None, "it goes on");
        assert_eq!(strangers.untold(start + SPELL), Some(1000 - u64::from(TOLD)));
        assert_eq!(strangers.untold(start + SPELL * 2), None, "said once");
        assert!(strangers.tells(start + SPELL * 2), "a new spell");
        assert_eq!(strangers.untold(start + SPELL * 3), None, "all of that one were told");
    }
}
