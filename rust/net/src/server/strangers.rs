//! What the log says of connections that did not get in: some, and how many more there were. Whoever reaches the port
//! could else fill the disk that the log is on.
//!
//! Each kind by itself, so that whoever scans the port hides no worker whose token is wrong. What kinds there are is
//! said here and not by a peer.

use crate::frame::FrameError;
use crate::handshake::HandshakeError;
use offbeat_core::wire::HeaderError;
use offbeat_core::wire::message::{RefusalCode, Refused};
use std::time::{Duration, Instant};

/// Told one by one of each kind and spell.
const TOLD: u32 = 20;
const SPELL: Duration = Duration::from_secs(60);

/// Why a connection did not get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// A worker's, mostly: no token, or another one.
    Token,
    /// A worker's of another version.
    Protocol,
    /// What came is not what a worker says.
    Foreign,
    /// Too little came, or nothing.
    Unproved,
}

impl Cause {
    const ALL: [Self; 4] = [Self::Token, Self::Protocol, Self::Foreign, Self::Unproved];

    pub(super) const fn of(error: &HandshakeError) -> Self {
        match error {
            HandshakeError::Authentication(_)
            | HandshakeError::Refused(Refused { code: RefusalCode::Authentication, .. }) => Self::Token,
            HandshakeError::Refused(Refused { code: RefusalCode::Protocol, .. })
            | HandshakeError::Frame(FrameError::Header(HeaderError::Protocol(_))) => Self::Protocol,
            HandshakeError::Frame(FrameError::Io(_) | FrameError::Closed { .. }) => Self::Unproved,
            HandshakeError::Refused(_)
            | HandshakeError::OutOfPlace(_)
            | HandshakeError::Foreign { .. }
            | HandshakeError::Unreadable { .. }
            | HandshakeError::Frame(
                FrameError::Header(_) | FrameError::Checksum { .. } | FrameError::Message(_),
            ) => Self::Foreign,
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Token => "no token, or another one",
            Self::Protocol => "another version of Offbeat",
            Self::Foreign => "what came is not what a worker says",
            Self::Unproved => "they closed, or said too little",
        }
    }
}

/// How one that did not get in is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Telling {
    Told,
    /// Those that follow are counted until their spell is over.
    Last,
    Counted,
}

/// Those of one kind, of the spell that began with the first of them.
#[derive(Clone, Copy, Debug, Default)]
struct Spell {
    began: Option<Instant>,
    told: u32,
    untold: u64,
}

#[derive(Debug, Default)]
pub(super) struct Strangers([Spell; Cause::ALL.len()]);

impl Strangers {
    /// One more.
    pub(super) fn came(&mut self, cause: Cause, now: Instant) -> Telling {
        let spell = &mut self.0[cause as usize];
        spell.began.get_or_insert(now);
        if spell.told == TOLD {
            spell.untold += 1;
            return Telling::Counted;
        }
        spell.told += 1;
        if spell.told == TOLD { Telling::Last } else { Telling::Told }
    }

    /// How many of each kind were not told, once its spell is over.
    pub(super) fn untold(&mut self, now: Instant) -> Untold {
        self.taken(|began| now.duration_since(began) >= SPELL)
    }

    /// The same when nobody comes any more.
    pub(super) fn rest(&mut self) -> Untold {
        self.taken(|_| true)
    }

    fn taken(&mut self, is_over: impl Fn(Instant) -> bool) -> Untold {
        let take = |cause| {
            let spell = &mut self.0[cause as usize];
            let over =
                if spell.began.is_some_and(&is_over) { std::mem::take(spell) } else { Spell::default() };
            (cause, over.untold)
        };
        Untold(Cause::ALL.map(take))
    }
}

/// How many of each kind were not told.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Untold([(Cause, u64); Cause::ALL.len()]);

impl Untold {
    pub(super) fn tell(self) {
        for (cause, connections) in self.0 {
            if connections > 0 {
                tracing::warn!(connections, cause = cause.words(), "more connections did not get in");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(untold: &Untold, cause: Cause) -> u64 {
        untold.0.iter().find(|(one, _)| *one == cause).unwrap().1
    }

    #[test]
    fn some_of_many_are_told_and_the_others_counted() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let came: Vec<_> = (0..1000).map(|_| strangers.came(Cause::Foreign, start)).collect();
        let (told, others) = came.split_at(TOLD as usize);
        let (last, before) = told.split_last().unwrap();
        assert!(before.iter().all(|one| *one == Telling::Told));
        assert_eq!(*last, Telling::Last, "silence follows, and it says so");
        assert!(others.iter().all(|one| *one == Telling::Counted));
        let mut at = |after| of(&strangers.untold(start + after), Cause::Foreign);
        assert_eq!(at(SPELL / 2), 0, "it goes on");
        assert_eq!(at(SPELL), 1000 - u64::from(TOLD));
        assert_eq!(at(SPELL * 2), 0, "said once");
        assert_eq!(strangers.came(Cause::Foreign, start + SPELL * 2), Telling::Told, "a new spell");
        assert_eq!(of(&strangers.untold(start + SPELL * 3), Cause::Foreign), 0, "all of that one were told");
    }

    #[test]
    fn one_kind_hides_no_other_and_is_counted_by_itself() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        let later = start + SPELL / 2;
        for _ in 0..1000 {
            strangers.came(Cause::Foreign, start);
        }
        assert!((0..TOLD - 1).all(|_| strangers.came(Cause::Token, later) == Telling::Told));
        assert_eq!(strangers.came(Cause::Token, later), Telling::Last);
        assert_eq!(strangers.came(Cause::Token, later), Telling::Counted);
        let untold = strangers.untold(start + SPELL);
        assert_eq!(Cause::ALL.map(|cause| of(&untold, cause)), [0, 0, 1000 - u64::from(TOLD), 0]);
        assert_eq!(of(&strangers.untold(later + SPELL), Cause::Token), 1, "its spell began later");
    }

    #[test]
    fn what_is_counted_is_told_at_the_end_of_all_too() {
        let (mut strangers, start) = (Strangers::default(), Instant::now());
        for _ in 0..TOLD + 3 {
            strangers.came(Cause::Unproved, start);
        }
        assert_eq!(of(&strangers.rest(), Cause::Unproved), 3);
        assert_eq!(of(&strangers.rest(), Cause::Unproved), 0, "said once");
    }
}
