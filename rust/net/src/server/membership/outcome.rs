//! Whether waiting for the workers is over, what it waits for, and whom it has not seen again.

use super::Members;
use super::member::{Member, State};
use std::time::{Duration, Instant};

/// What became of waiting for the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) enum Outcome {
    Waiting,
    Done,
    /// (worker, cause) of each.
    NoneFinished(Vec<(String, String)>),
}

/// What waiting for the workers waits for while none of them is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum Pause {
    /// Somebody is there, or too few have come yet.
    None,
    /// That nobody comes any more.
    Linger { linger: Duration },
    /// That lost ones come back, the last of them within that of its loss; then, for so long, that anybody comes.
    Grace { num_lost: usize, grace: Duration, linger: Duration },
}

/// Bounds for [`Members::outcome`].
#[derive(Clone, Copy, Debug)]
pub(in crate::server) struct Patience {
    pub(in crate::server) linger: Duration,
    pub(in crate::server) rejoin_grace: Duration,
}

impl Patience {
    fn grace(self, member: &Member) -> Duration {
        member.grace(self.rejoin_grace)
    }
}

impl Members {
    /// Whether waiting for `n` workers is over: enough have come and nobody has been there for the linger, where a
    /// lost one counts as there for its grace. Once the run is over nobody can come back, and nothing is waited for.
    pub(in crate::server) fn outcome(
        &self,
        n: usize,
        patience: Patience,
        over: bool,
        now: Instant,
    ) -> Outcome {
        let there = |m: &Member| {
            let grace = m.state == State::Lost && now.duration_since(m.since) < patience.grace(m);
            m.state.is_present() || grace && !over
        };
        if self.num_joined() < n.max(1) || self.by_id.values().any(there) {
            return Outcome::Waiting;
        }
        if over {
            return Outcome::Done;
        }
        // That of the lost has passed, or they would be there: the sum is a time.
        let gone = |m: &Member| if m.state == State::Lost { m.since + patience.grace(m) } else { m.since };
        let alone = if self.are_all_lost() {
            self.last_withdrawn
        } else {
            self.by_id.values().map(gone).chain(self.last_withdrawn).max()
        };
        if alone.is_some_and(|alone| now.saturating_duration_since(alone) < self.linger(patience)) {
            Outcome::Waiting
        } else if self.bygone.num_finished > 0 || self.by_id.values().any(|m| m.state == State::Finished) {
            Outcome::Done
        } else {
            let cause = |(id, m): (&String, &Member)| (id.clone(), m.cause.clone().unwrap_or_default());
            Outcome::NoneFinished(self.by_id.iter().map(cause).collect())
        }
    }

    /// What is waited for as long as [`Members::outcome`] says `Waiting`.
    pub(in crate::server) fn pause(&self, n: usize, patience: Patience, now: Instant) -> Pause {
        if self.num_joined() < n.max(1) || self.by_id.values().any(|m| m.state.is_present()) {
            return Pause::None;
        }
        let missed = |m: &&Member| m.state == State::Lost && now.duration_since(m.since) < patience.grace(m);
        let graces = || self.by_id.values().filter(missed).map(|m| patience.grace(m));
        let linger = self.linger(patience);
        match graces().max() {
            None => Pause::Linger { linger },
            Some(grace) => {
                let linger = if self.are_all_lost() { Duration::ZERO } else { linger };
                Pause::Grace { num_lost: graces().count(), grace, linger }
            }
        }
    }

    /// Whether all are lost, and somebody is whom it is waited for: then their grace is the wait for one that comes in
    /// their place, too.
    fn are_all_lost(&self) -> bool {
        self.bygone.num_lost == self.bygone.num
            && self.by_id.values().all(|m| m.state == State::Lost)
            && !self.by_id.values().all(|m| m.was_away)
    }

    /// How long nobody must be there. Who is to come after a restart takes longer than the next of those that come and go.
    fn linger(&self, patience: Patience) -> Duration {
        let has_anybody_come = self.by_id.values().any(Member::has_come);
        if has_anybody_come { patience.linger } else { patience.linger.max(patience.rejoin_grace) }
    }

    /// Who was lost and is not back, and why.
    pub(in crate::server) fn missing(&self) -> impl Iterator<Item = (&str, &str)> {
        let lost = self.by_id.iter().filter(|(_, member)| member.state == State::Lost);
        lost.map(|(id, member)| (id.as_str(), member.cause.as_deref().unwrap_or_default()))
    }
}
