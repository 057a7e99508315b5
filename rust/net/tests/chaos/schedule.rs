//! What goes wrong when, as a seed says: a pure function of it.

use crate::dice::Dice;
use crate::relay::Cut;
use offbeat_core::spec::Transaction;

/// Pushes of one worker, at most; each has a cell of its own.
pub(crate) const PER_WORKER: usize = 24;
pub(crate) const MAX_WORKERS: usize = 4;

#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) transaction: Transaction,
    pub(crate) has_buffers: bool,
    /// Momentum that the workers keep, so small that it moves no cell by half.
    pub(crate) has_momentum: bool,
    /// Whether a copy waits for pushes under way.
    pub(crate) is_patient: bool,
    pub(crate) checkpoint_every: u64,
    pub(crate) workers: Vec<Work>,
    /// What happens, and how many pushes were made by then.
    pub(crate) faults: Vec<(usize, Fault)>,
}

#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) in_flight: usize,
    pub(crate) incremental: bool,
    pub(crate) steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) pulls: bool,
    pub(crate) before: Before,
}

/// What a worker does before a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    Nothing,
    Pull,
    /// It says goodbye, and a new process takes its name.
    Anew,
    /// A new process takes its name, and then it pushes once more.
    Zombie,
}

#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// All connections are cut, and the next after so many bytes.
    Cuts(Vec<Cut>),
    /// Of the next answer so much gets through.
    LostReply(usize),
    HangUp,
    Crash,
    /// The server is started again in good order.
    Drain,
    Load,
    Optimizer,
    LearningRate,
}

impl Schedule {
    pub(crate) fn of(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let transaction = if dice.once_in(2) { Transaction::Model } else { Transaction::Fragment };
        let has_momentum = dice.once_in(4);
        let restarts = !dice.once_in(3);
        let workers: Vec<Work> = (0..=dice.below(MAX_WORKERS)).map(|_| work(&mut dice)).collect();
        let num_steps: usize = workers.iter().map(|work| work.steps.len()).sum();
        let mut faults: Vec<(usize, Fault)> =
            (0..=dice.below(4)).map(|_| (dice.below(num_steps), fault(&mut dice, restarts))).collect();
        faults.sort_by_key(|(at, _)| *at);
        Self {
            transaction,
            has_buffers: dice.once_in(2),
            has_momentum,
            is_patient: dice.once_in(2),
            checkpoint_every: 1 + dice.below(4) as u64,
            workers,
            faults,
        }
    }
}

fn work(dice: &mut Dice) -> Work {
    let num_steps = 4 + dice.below(PER_WORKER - 4);
    let step = |dice: &mut Dice| Step {
        pulls: !dice.once_in(4),
        before: match dice.below(40) {
            0 => Before::Anew,
            1 => Before::Zombie,
            2..6 => Before::Pull,
            _ => Before::Nothing,
        },
    };
    Work {
        in_flight: 1 + dice.below(2),
        incremental: dice.once_in(2),
        steps: (0..num_steps).map(|_| step(dice)).collect(),
    }
}

fn fault(dice: &mut Dice, restarts: bool) -> Fault {
    match dice.below(16) {
        0..5 => Fault::Cuts((0..=dice.below(6)).map(|_| cut(dice)).collect()),
        5..7 => Fault::LostReply(dice.below(3000)),
        7 => Fault::HangUp,
        8..11 if restarts => Fault::Crash,
        11..13 if restarts => Fault::Drain,
        13 => Fault::Load,
        14 => Fault::Optimizer,
        15 => Fault::LearningRate,
        _ => Fault::Cuts(vec![cut(dice), cut(dice)]),
    }
}

/// Of data and control connections alike, in the order in which they come.
fn cut(dice: &mut Dice) -> Cut {
    let budget = |dice: &mut Dice| match dice.below(3) {
        0 => dice.below(700),
        1 => dice.below(20_000),
        _ => usize::MAX,
    };
    Cut { up: budget(dice), down: budget(dice), is_heard: !dice.once_in(3) }
}
