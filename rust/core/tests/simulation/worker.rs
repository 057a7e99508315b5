//! A worker by the rules of the client: what it keeps of its pushes, what it says when it is back, what it sends again.

use crate::dice::Dice;
use crate::network::{Down, Head, Up, Wire};
use offbeat_core::layout::Presence;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Claim, NoWayBack, Receipt, Unsettled};
use std::collections::VecDeque;

pub(crate) const SAMPLES: u64 = 8;

/// A push under way.
#[derive(Clone, Debug)]
struct Push {
    sequence: u64,
    cell: usize,
    present: Presence,
    wants: bool,
    /// Fragments whose answer has come: they lie where the push was made from. And those that had when it was last sent.
    answered: usize,
    from: usize,
    /// The fragment whose answer comes next.
    due: usize,
    /// The versions that it says it was made at.
    bases: Vec<u64>,
    /// Nobody reads its answer.
    is_abandoned: bool,
    /// It cannot be sent again.
    is_gone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Out,
    Joining,
    In,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Idle,
    Pull {
        is_sent: bool,
    },
    /// With the frames that were sent of it.
    Push {
        sequence: u64,
        num_sent: usize,
    },
    Flush,
}

/// What a worker does next, where it is free to choose.
#[derive(Clone, Debug)]
pub(crate) enum Wish {
    Push {
        cell: usize,
        present: Presence,
        wants: bool,
    },
    Pull,
    /// Settles what is under way, reads once more and leaves.
    Finish,
}

/// What a worker has come to know.
#[derive(Debug)]
pub(crate) enum Heard {
    Told { cell: usize, receipt: Receipt },
    NoWayBack(NoWayBack),
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) name: usize,
    pub(crate) incarnation: u32,
    pub(crate) wire: Option<Wire>,
    in_flight: usize,
    /// Whether what was sent a call before can be made again at all.
    is_repeatable: bool,
    transaction: Transaction,
    term: u64,
    epoch: u32,
    settled: u64,
    applied: u64,
    read: (u64, u64),
    versions: Vec<u64>,
    is_ready: bool,
    flight: VecDeque<Push>,
    stage: Stage,
    call: Call,
    is_finishing: bool,
}

impl Worker {
    pub(crate) fn new(
        name: usize,
        in_flight: usize,
        transaction: Transaction,
        num_fragments: usize,
        has_buffers: bool,
    ) -> Self {
        Self {
            name,
            incarnation: 0,
            wire: None,
            in_flight,
            is_repeatable: in_flight == 1 || !has_buffers,
            transaction,
            term: 0,
            epoch: 0,
            settled: 0,
            applied: 0,
            read: (0, 0),
            versions: vec![0; num_fragments],
            is_ready: false,
            flight: VecDeque::new(),
            stage: Stage::Out,
            call: Call::Idle,
            is_finishing: false,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Whether a call is to begin.
    pub(crate) fn is_free(&self) -> bool {
        self.stage == Stage::In && self.call == Call::Idle
    }

    /// Whether it has to read before it may push.
    pub(crate) fn must_pull(&self) -> bool {
        !self.is_ready
    }

    pub(crate) fn next_sequence(&self) -> u64 {
        self.settled + self.flight.len() as u64 + 1
    }

    /// The process is no more.
    pub(crate) fn die(&mut self, dice: &mut Dice) {
        if let Some(wire) = &self.wire {
            wire.borrow_mut().cut(dice);
        }
        self.stage = Stage::Over;
    }

    /// Begins a call.
    pub(crate) fn begin(&mut self, wish: Wish) {
        self.call = match wish {
            Wish::Push { cell, present, wants } => {
                if !wants {
                    self.abandon();
                }
                let sequence = self.next_sequence();
                let (bases, is_abandoned, is_gone) = (self.versions.clone(), false, false);
                let (answered, from, due) = (0, 0, 0);
                self.flight.push_back(Push {
                    sequence,
                    cell,
                    present,
                    wants,
                    answered,
                    from,
                    due,
                    bases,
                    is_abandoned,
                    is_gone,
                });
                Call::Push { sequence, num_sent: 0 }
            }
            Wish::Pull => self.pull(),
            Wish::Finish if !self.flight.is_empty() => Call::Flush,
            Wish::Finish if !self.is_finishing => {
                self.is_finishing = true;
                self.pull()
            }
            Wish::Finish => {
                self.send(Up::Goodbye { finished: true });
                self.stage = Stage::Over;
                Call::Idle
            }
        };
    }

    fn pull(&mut self) -> Call {
        self.abandon();
        Call::Pull { is_sent: false }
    }

    fn abandon(&mut self) {
        for push in &mut self.flight {
            push.is_abandoned = true;
        }
    }

    /// Goes on by one message. Returns what it heard, and a connection that it has opened.
    pub(crate) fn step(&mut self, dice: &mut Dice) -> (Vec<Heard>, Option<Wire>) {
        if self.stage == Stage::Out {
            return (Vec::new(), Some(self.connect()));
        }
        let Some(wire) = self.wire.clone().filter(|_| self.stage != Stage::Over) else {
            return (Vec::new(), None);
        };
        if dice.once_in(2)
            && let Some(message) = wire.borrow_mut().down.pop_front()
        {
            return (self.hear(message), None);
        }
        // Who is not in a call looks at nothing.
        if wire.borrow().is_lost() && (self.stage == Stage::Joining || self.call != Call::Idle) {
            self.lose();
        } else if self.stage == Stage::In {
            self.go_on();
        }
        (Vec::new(), None)
    }

    fn connect(&mut self) -> Wire {
        let wire = Wire::default();
        let hello = if self.incarnation == 0 { Up::Join } else { Up::Back(self.claim()) };
        wire.borrow_mut().send_up(hello);
        (self.stage, self.wire) = (Stage::Joining, Some(wire.clone()));
        wire
    }

    fn claim(&self) -> Claim {
        let unsettled =
            |push: &Push| Unsettled { sequence: push.sequence, samples: SAMPLES, gone: push.is_gone };
        Claim {
            incarnation: self.incarnation,
            term: self.term,
            settled: self.settled,
            applied: self.applied,
            unsettled: self.flight.iter().map(unsettled).collect(),
        }
    }

    fn send(&self, message: Up) {
        if let Some(wire) = &self.wire {
            wire.borrow_mut().send_up(message);
        }
    }

    /// What was sent by a call before is gone; this call's push can be sent again.
    fn lose(&mut self) {
        self.stage = Stage::Out;
        let here = match self.call {
            Call::Push { sequence, .. } => sequence,
            _ => 0,
        };
        for push in &mut self.flight {
            // What was committed whole and answered in parts is in the server's book, or of a life that is over.
            let is_old = self.transaction == Transaction::Model && push.answered > 0;
            push.is_gone |= push.sequence != here || push.is_abandoned || !self.is_repeatable || is_old;
        }
        self.call = match self.call {
            Call::Pull { .. } => Call::Pull { is_sent: false },
            Call::Push { sequence, .. } => Call::Push { sequence, num_sent: 0 },
            call => call,
        };
    }

    /// Sends what is next, or ends the call.
    fn go_on(&mut self) {
        match self.call {
            Call::Pull { is_sent: false } => {
                self.send(Up::Pull);
                self.call = Call::Pull { is_sent: true };
            }
            Call::Push { sequence, num_sent } => self.push_on(sequence, num_sent),
            Call::Flush if self.flight.is_empty() => self.call = Call::Idle,
            Call::Idle | Call::Pull { .. } | Call::Flush => {}
        }
    }

    fn push_on(&mut self, sequence: u64, num_sent: usize) {
        let two = self.in_flight == 2;
        let is_last = |push: &Push| push.sequence == sequence;
        let Some(push) = self.flight.iter_mut().find(|push| is_last(push)) else {
            self.call = Call::Idle;
            return;
        };
        if num_sent == 0 {
            (push.from, push.due, push.bases) = (push.answered, 0, self.versions.clone());
        }
        let mut fragments = (push.from..push.bases.len()).filter(|&f| push.present.has(f));
        let message = match num_sent {
            0 => Some(Up::Push(Head {
                sequence,
                cell: push.cell,
                term: self.read.0,
                base: self.read.1,
                epoch: self.epoch,
                present: push.present.clone(),
                answered: push.from,
                wants: push.wants,
            })),
            n => fragments.nth(n - 1).map(|fragment| Up::Fragment { fragment, base: push.bases[fragment] }),
        };
        let wants = push.wants;
        if let Some(message) = message {
            self.send(message);
            self.call = Call::Push { sequence, num_sent: num_sent + 1 };
        } else if two && wants && self.flight.len() == 1 {
            self.call = Call::Idle; // its answer is the next call's
        }
    }

    fn hear(&mut self, message: Down) -> Vec<Heard> {
        match message {
            Down::Refused(why) => {
                self.stage = Stage::Over;
                vec![Heard::NoWayBack(why)]
            }
            Down::Joined { incarnation, term, epoch, answers } => {
                (self.incarnation, self.term, self.epoch) = (incarnation, term, epoch);
                self.stage = Stage::In;
                let mut heard = Vec::new();
                for (sequence, receipt) in answers {
                    let wanted = self.flight.iter().find(|p| p.sequence == sequence).map(|p| p.wants);
                    let is_own = matches!(self.call, Call::Push { sequence: own, .. } if own == sequence);
                    heard.push(self.told(sequence, receipt));
                    if is_own && wanted == Some(true) {
                        self.call = self.pull();
                    }
                }
                heard
            }
            Down::Root { sequence, fragment, version } => {
                let push = self.flight.iter_mut().find(|push| push.sequence == sequence);
                if let Some(push) = push.filter(|push| !push.is_abandoned) {
                    assert_eq!(push.due, fragment, "answers come in order, each once");
                    push.due = fragment + 1;
                    push.answered = push.answered.max(push.due);
                    self.versions[fragment] = version;
                }
                Vec::new()
            }
            Down::Receipt { sequence, receipt, read } => {
                let push = self.flight.iter().find(|push| push.sequence == sequence);
                if push.is_some_and(|push| push.wants && !push.is_abandoned) {
                    self.read = read;
                }
                vec![self.told(sequence, receipt)]
            }
            Down::Pulled { read, epoch, versions } => {
                (self.read, self.epoch, self.versions, self.is_ready) = (read, epoch, versions, true);
                self.call = Call::Idle;
                Vec::new()
            }
        }
    }

    fn told(&mut self, sequence: u64, receipt: Receipt) -> Heard {
        assert_eq!(sequence, self.settled + 1, "pushes are answered in order, each once");
        let push = self.flight.pop_front().expect("it is under way");
        assert_eq!(push.sequence, sequence);
        self.settled = sequence;
        self.applied += u64::from(receipt.applied);
        if receipt.reason == Some(Reason::OptimizerChanged) {
            self.is_ready = false; // it asks for the run
        }
        Heard::Told { cell: push.cell, receipt }
    }
}
