//! The network between a worker and its session: two queues, which a cut leaves in the middle of anything.

use crate::dice::Dice;
use offbeat_core::layout::Presence;
use offbeat_core::store::{Claim, NoWayBack, Receipt};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// What a worker sends.
#[derive(Clone, Debug)]
pub(crate) enum Up {
    /// A new process.
    Join,
    /// One that was here.
    Back(Claim),
    Push(Head),
    Fragment {
        fragment: usize,
        base: u64,
    },
    Pull,
    Goodbye {
        finished: bool,
    },
}

/// What a push says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) sequence: u64,
    pub(crate) cell: usize,
    pub(crate) term: u64,
    pub(crate) base: u64,
    pub(crate) epoch: u32,
    pub(crate) present: Presence,
    pub(crate) answered: usize,
    pub(crate) wants: bool,
}

/// What a session sends.
#[derive(Clone, Debug)]
pub(crate) enum Down {
    Joined { incarnation: u32, term: u64, epoch: u32, answers: Vec<(u64, Receipt)> },
    Refused(NoWayBack),
    Root { sequence: u64, fragment: usize, version: u64 },
    Receipt { sequence: u64, receipt: Receipt, read: (u64, u64) },
    Pulled { read: (u64, u64), epoch: u32, versions: Vec<u64> },
}

/// One connection.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) up: VecDeque<Up>,
    pub(crate) down: VecDeque<Down>,
    pub(crate) is_cut: bool,
    /// Whether the server's side hears of the cut.
    pub(crate) is_heard: bool,
}

pub(crate) type Wire = Rc<RefCell<Link>>;

impl Link {
    /// Of what is under way some arrives, and nothing that is sent from now on.
    pub(crate) fn cut(&mut self, dice: &mut Dice) {
        if self.is_cut {
            return;
        }
        let (up, down) = (dice.below(self.up.len() + 1), dice.below(self.down.len() + 1));
        self.up.truncate(up);
        self.down.truncate(down);
        (self.is_cut, self.is_heard) = (true, !dice.once_in(3));
    }

    pub(crate) fn send_up(&mut self, message: Up) {
        if !self.is_cut {
            self.up.push_back(message);
        }
    }

    pub(crate) fn send_down(&mut self, message: Down) {
        if !self.is_cut {
            self.down.push_back(message);
        }
    }

    /// Whether the worker sees that it is cut.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_cut && self.down.is_empty()
    }
}
