//! One seed, one run: who goes on next, what breaks, and the oracle. Everything happens on one thread, a message at a
//! time, so that a seed gives the same run for ever.

use crate::common::{self, Files};
use crate::dice::Dice;
use crate::network::{Down, Up, Wire};
use crate::session::{Did, Session};
use crate::worker::{Heard, Wish, Worker};
use offbeat_core::checkpoint;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{FragmentKind, Presence};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec, Transaction};
use offbeat_core::store::book::Answer;
use offbeat_core::store::{
    Book, Claim, Cut, Life, ModelRole, NoWayBack, Receipt, Rejoin, RunSpec, Standing, Store, StoreConfig,
};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Pushes of a run, each with a cell of its own in every tensor; none may touch the rest.
const CELLS: usize = 96;
/// A run that takes more steps hangs.
const MOST_STEPS: usize = 200_000;
const KEPT: usize = 3;

/// How often a run came to what the tests are for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage(pub(crate) BTreeMap<&'static str, u64>);

impl Coverage {
    fn hit(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }
}

/// One push, as far as its worker was told of it.
struct Told {
    incarnation: u32,
    sequence: u64,
    present: Presence,
    receipt: Option<Receipt>,
}

/// A store that another went on from.
struct Restart {
    first_term: u64,
    version: u64,
    /// Worker and sequence number of pushes of which it holds parts alone or nothing, and says so.
    in_parts: BTreeSet<(u32, u64)>,
}

struct Kept {
    files: Files,
    counted: BTreeMap<u32, u64>,
}

/// A process that is at the door.
struct Entering {
    wire: Wire,
    name: usize,
    busy: Option<futures_channel::oneshot::Receiver<()>>,
    hello: Option<Up>,
}

pub(crate) struct World {
    dice: Dice,
    transaction: Transaction,
    has_buffers: bool,
    store: Arc<Store>,
    workers: Vec<Worker>,
    sessions: Vec<Session>,
    entering: Vec<Entering>,
    roles: Vec<ModelRole>,
    cut: Option<Cut>,
    kept: Vec<Kept>,
    /// Updates that were counted as lost, by incarnation, in what the store goes on from.
    counted: BTreeMap<u32, u64>,
    restarts: Vec<Restart>,
    last_incarnation: u32,
    replaced: BTreeSet<u32>,
    pushes: Vec<Told>,
    /// Whose each incarnation is.
    names: BTreeMap<u32, usize>,
    goal: usize,
    is_calm: bool,
    rules: usize,
    trace: u64,
    pub(crate) coverage: Coverage,
}

fn config(transaction: Transaction) -> StoreConfig {
    StoreConfig { transaction, max_workers: 4, ..StoreConfig::default() }
}

/// Several rules that do the same here: a change among them is another optimizer all the same.
fn run(number: usize, max_staleness: Option<u64>) -> RunSpec {
    let dampening = number as f64 / 1024.0;
    let rule = Rule::Sgd { momentum: 0.0, dampening, weight_decay: 0.0, nesterov: false, maximize: false };
    let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule }];
    RunSpec {
        optimizer: OptimizerSpec { groups, momentum_correction: false },
        staleness: StalenessSpec { max_staleness, ..StalenessSpec::default() },
        schedule: Schedule::default(),
        max_samples: None,
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let transaction = if dice.once_in(2) { Transaction::Model } else { Transaction::Fragment };
        let has_buffers = dice.once_in(2);
        let tensor = |name: &str, dtype, role| TensorSpec {
            name: name.into(),
            aliases: vec![],
            shape: vec![CELLS as u64],
            dtype,
            role,
        };
        let mut tensors = vec![
            tensor("a", Dtype::F32, Role::Parameter),
            tensor("b", Dtype::BF16, Role::Parameter),
            tensor("c", Dtype::F16, Role::Parameter),
        ];
        if has_buffers {
            tensors.push(tensor("n", Dtype::I64, Role::Buffer));
        }
        let table = Arc::new(TensorTable::new(tensors).unwrap());
        let store = Store::new(table, config(transaction), 1, &mut |_, bytes| bytes.fill(0));
        store.configure(run(0, Some(4)));
        let num_fragments = store.layout().fragments.len();
        let workers = (0..=dice.below(4))
            .map(|name| Worker::new(name, 1 + dice.below(2), transaction, num_fragments, has_buffers))
            .collect();
        let goal = 4 + dice.below(CELLS / 2);
        Self {
            dice,
            transaction,
            has_buffers,
            store,
            workers,
            sessions: Vec::new(),
            entering: Vec::new(),
            roles: Vec::new(),
            cut: None,
            kept: Vec::new(),
            counted: BTreeMap::new(),
            restarts: Vec::new(),
            last_incarnation: 0,
            replaced: BTreeSet::new(),
            pushes: Vec::new(),
            names: BTreeMap::new(),
            goal,
            is_calm: false,
            rules: 0,
            trace: seed,
            coverage: Coverage::default(),
        }
    }

    /// Runs to the end and looks whether all is as it should be. Gives what the run was like in one number.
    pub(crate) fn run(&mut self) -> u64 {
        self.save();
        for _ in 0..MOST_STEPS {
            if self.workers.iter().all(Worker::is_over) {
                self.judge();
                return self.trace;
            }
            self.is_calm |= self.pushes.len() >= self.goal;
            if !self.is_calm && self.dice.once_in(40) {
                self.disturb();
            } else {
                self.go_on();
            }
        }
        panic!("it hangs: {:?}", self.workers.iter().filter(|w| !w.is_over()).collect::<Vec<_>>());
    }

    fn note(&mut self, what: &str) {
        for byte in what.bytes() {
            self.trace = (self.trace ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(5);
        }
    }

    /// Somebody does one thing.
    fn go_on(&mut self) {
        let counts = [self.workers.len(), self.sessions.len(), self.entering.len(), self.roles.len(), 1];
        let mut at = self.dice.below(counts.iter().sum());
        let kind = counts
            .iter()
            .position(|&n| {
                if at < n {
                    true
                } else {
                    at -= n;
                    false
                }
            })
            .unwrap();
        match kind {
            0 => self.step_worker(at),
            1 => match self.sessions[at].step(&self.store) {
                Did::Nothing => {}
                Did::Something => self.note("session"),
                Did::Drive(role) => self.roles.push(*role),
                Did::End => drop(self.sessions.remove(at)),
            },
            2 => self.enter(at),
            3 => {
                let role = self.roles.remove(at);
                self.roles.extend(role.step());
            }
            _ => self.copy(),
        }
    }

    fn step_worker(&mut self, at: usize) {
        if self.workers[at].is_free() && self.dice.once_in(2) {
            let wish = self.wish(at);
            self.note(&format!("{at} {wish:?}"));
            self.workers[at].begin(wish);
            return;
        }
        let (heard, connected) = self.workers[at].step(&mut self.dice);
        let name = self.workers[at].name;
        if let Some(wire) = connected {
            self.entering.push(Entering { wire, name, busy: None, hello: None });
        }
        for heard in heard {
            self.note(&format!("{at} {heard:?}"));
            match heard {
                Heard::Told { cell, receipt } => self.told(cell, receipt),
                Heard::NoWayBack(NoWayBack::Fenced { .. }) => {
                    self.coverage.hit("fenced");
                    let incarnation = self.workers[at].incarnation;
                    assert!(self.replaced.contains(&incarnation), "nobody has replaced {incarnation}");
                }
                Heard::NoWayBack(why) => panic!("{why}"),
            }
        }
    }

    fn wish(&mut self, at: usize) -> Wish {
        if self.is_calm {
            return Wish::Finish;
        }
        if self.workers[at].must_pull() || self.dice.once_in(6) {
            return Wish::Pull;
        }
        let num_tensors = self.store.layout().num_tensors();
        let left_out = self.dice.below(3 * num_tensors);
        let present = Presence::from_fn(num_tensors, |tensor| tensor != left_out);
        let cell = self.pushes.len();
        let incarnation = self.workers[at].incarnation;
        let sequence = self.workers[at].next_sequence();
        self.pushes.push(Told { incarnation, sequence, present: present.clone(), receipt: None });
        Wish::Push { cell, present, wants: !self.dice.once_in(4) }
    }

    fn told(&mut self, cell: usize, receipt: Receipt) {
        let held = self.cells(cell);
        let told = &mut self.pushes[cell];
        assert_eq!(told.receipt, None, "push {cell} was answered twice");
        assert!(receipt.applied || held.iter().all(|&n| n == 0), "{receipt:?}, {held:?}");
        let reason = receipt.reason;
        let is_plain = matches!(
            reason,
            None | Some(
                Reason::Stale
                    | Reason::Slept
                    | Reason::ServerRolledBack
                    | Reason::OptimizerChanged
                    | Reason::ConnectionLost
            )
        );
        assert!(is_plain, "push {cell}: {receipt:?}");
        if receipt.duplicate {
            self.coverage.hit("answered again");
        }
        match (receipt.applied, reason) {
            (true, Some(_)) => {
                assert_eq!(self.transaction, Transaction::Fragment, "{receipt:?}");
                self.coverage.hit("in parts");
            }
            (true, None) => self.coverage.hit("whole"),
            (false, reason) => self.coverage.hit(reason.unwrap().name()),
        }
        told.receipt = Some(receipt);
    }

    /// What each fragment holds of a push.
    fn cells(&self, cell: usize) -> Vec<u64> {
        let reader = self.store.reader();
        let fragments = self.store.layout().fragments.iter().enumerate();
        let held = fragments.map(|(f, fragment)| {
            let root = reader.root(f);
            let at = |size: usize| &root.held()[cell * size..][..size];
            match fragment.kind {
                FragmentKind::Buffers => u64::from_le_bytes(at(8).try_into().unwrap()),
                FragmentKind::Parameters => {
                    let value = f32::from_le_bytes(at(4).try_into().unwrap());
                    (0..4).find(|&n| value == n as f32).unwrap_or_else(|| panic!("{value} of push {cell}"))
                }
            }
        });
        held.collect()
    }

    /// Goes on with whoever is at the door.
    fn enter(&mut self, at: usize) {
        let Entering { wire, name, mut busy, hello } = self.entering.remove(at);
        if wire.borrow().is_cut && wire.borrow().is_heard {
            return;
        }
        let hello = hello.or_else(|| wire.borrow_mut().up.pop_front());
        let Some(hello) = hello else {
            if !wire.borrow().is_cut {
                self.entering.push(Entering { wire, name, busy, hello: None });
            }
            return; // it never came
        };
        if let Some(told) = &mut busy
            && told.try_recv() == Ok(None)
        {
            self.entering.push(Entering { wire, name, busy, hello: Some(hello) });
            return;
        }
        let id = format!("w{name}");
        match &hello {
            Up::Join => {
                self.hang_up(|session| session.name == name);
                self.last_incarnation += 1;
                let key = self.store.register(&id, self.last_incarnation).unwrap();
                let others = 1..self.last_incarnation;
                self.replaced.extend(others.filter(|i| self.names.get(i) == Some(&name)));
                self.names.insert(self.last_incarnation, name);
                self.seat(
                    wire,
                    name,
                    key,
                    Standing { key, answers: vec![], lost_updates: 0, own_version: 0 },
                );
            }
            Up::Back(claim) => {
                self.hang_up(|s| s.name == name && s.key.incarnation == claim.incarnation);
                match self.store.rejoin(&id, claim) {
                    Ok(Rejoin::Busy(told)) => {
                        self.coverage.hit("waited for a commit");
                        self.entering.push(Entering { wire, name, busy: Some(told), hello: Some(hello) });
                    }
                    Ok(Rejoin::Back(standing)) => self.back(wire, name, claim.clone(), standing),
                    Err(why) => wire.borrow_mut().send_down(Down::Refused(why)),
                }
            }
            hello => panic!("{hello:?} at the door"),
        }
    }

    /// Ends sessions whose worker is here again, or another in its place.
    fn hang_up(&mut self, is_old: impl Fn(&Session) -> bool) {
        for session in self.sessions.extract_if(.., |session| is_old(session)) {
            let mut link = session.wire.borrow_mut();
            link.up.clear();
            (link.is_cut, link.is_heard) = (true, true);
        }
    }

    fn back(&mut self, wire: Wire, name: usize, claim: Claim, standing: Standing) {
        self.hang_up(|session| session.name == name);
        let incarnation = claim.incarnation;
        // Of what it was told, that is lost of which no cell holds anything.
        let own = |told: &&Told| told.incarnation == incarnation;
        let mut lost = 0;
        for (cell, told) in self.pushes.iter().enumerate().filter(|(_, told)| own(told)) {
            let is_applied = told.receipt.as_ref().is_some_and(|receipt| receipt.applied);
            lost += u64::from(is_applied && self.cells(cell).iter().all(|&n| n == 0));
        }
        let counted = self.counted.entry(incarnation).or_default();
        assert_eq!(standing.lost_updates, lost - *counted, "lost of incarnation {incarnation}: {standing:?}");
        *counted = lost;
        if standing.lost_updates > 0 {
            self.coverage.hit("lost updates");
        }
        if self.dice.once_in(8) {
            self.store.lost(standing.key); // it was silent for long
        }
        self.note(&format!("{standing:?}"));
        self.seat(wire, name, standing.key, standing);
    }

    fn seat(&mut self, wire: Wire, name: usize, key: offbeat_core::store::WorkerKey, standing: Standing) {
        let Standing { answers, own_version, .. } = standing;
        let epoch = self.store.run().map_or(0, |run| run.epoch);
        let (incarnation, term) = (key.incarnation, self.store.term());
        wire.borrow_mut().send_down(Down::Joined { incarnation, term, epoch, answers });
        self.sessions.push(Session::new(wire, name, key, own_version));
    }

    /// Begins a copy, or takes one that was begun.
    fn copy(&mut self) {
        match &self.cut {
            None => {
                if self.dice.once_in(8) {
                    self.cut = self.store.begin_cut();
                }
            }
            Some(cut) if cut.open().is_empty() || self.dice.once_in(4) => {
                if !cut.open().is_empty() {
                    self.coverage.hit("copied with pushes under way");
                }
                self.save();
            }
            Some(_) => {}
        }
    }

    /// Keeps what there is, if it can be taken now.
    fn save(&mut self) {
        let Some(cut) = self.cut.take().or_else(|| self.store.begin_cut()) else { return };
        let Some(state) = cut.take() else {
            self.cut = Some(cut);
            return;
        };
        let files = common::written(&self.store, &state);
        self.kept.push(Kept { files, counted: self.counted.clone() });
        if self.kept.len() > KEPT {
            self.kept.remove(0);
        }
        self.note("kept");
    }

    fn disturb(&mut self) {
        let at = self.dice.below(self.workers.len());
        match self.dice.below(16) {
            0..8 => {
                if let Some(wire) = &self.workers[at].wire {
                    wire.borrow_mut().cut(&mut self.dice);
                    self.note("cut");
                }
            }
            8..10 => self.replace(at),
            10..12 => self.crash(),
            12 => self.load(),
            13 => {
                self.rules += 1;
                let max_staleness = [None, Some(0), Some(4)][self.dice.below(3)];
                self.store.configure(run(self.rules, max_staleness));
            }
            14 => {
                let run = self.store.run().unwrap();
                self.store.configure(run.spec.clone()); // other tickets, the same optimizer
            }
            _ => self.save(),
        }
    }

    /// A new process takes a worker's name; the old one may go on for a while.
    fn replace(&mut self, at: usize) {
        let (name, lives_on) = (self.workers[at].name, self.dice.once_in(2));
        if self.workers.len() >= 8 || self.workers[at].is_over() {
            return;
        }
        if !lives_on {
            self.workers[at].die(&mut self.dice);
        }
        let num_fragments = self.store.layout().fragments.len();
        let in_flight = 1 + self.dice.below(2);
        self.workers.push(Worker::new(name, in_flight, self.transaction, num_fragments, self.has_buffers));
        self.note("replaced");
    }

    /// The server dies; another goes on from a checkpoint, most often the newest.
    fn crash(&mut self) {
        if self.kept.is_empty() {
            return;
        }
        self.coverage.hit("crash");
        for worker in &self.workers {
            if let Some(wire) = &worker.wire {
                wire.borrow_mut().cut(&mut self.dice);
            }
        }
        self.cut = None;
        self.sessions.clear();
        self.entering.clear();
        self.roles.clear();
        if self.dice.once_in(4) && self.kept.len() > 1 {
            self.kept.pop();
        }
        let Kept { files, counted } = self.kept.last().unwrap();
        let manifest = common::verified(files).unwrap();
        let (term, last_incarnation) = (self.store.term() + 1, self.last_incarnation);
        self.restarts.push(Restart {
            first_term: term,
            version: manifest.book.version,
            in_parts: in_parts(&manifest.book),
        });
        let life = Life { term, last_incarnation };
        let opening = common::opening(files);
        self.store = checkpoint::restore(manifest, opening, config(self.transaction), life).unwrap();
        self.counted = counted.clone();
        self.note("crash");
    }

    /// The values are replaced by themselves, in a term of their own.
    fn load(&mut self) {
        // A commit that is under way would come between the copy and the load.
        if self.cut.is_some() || !self.roles.is_empty() {
            return;
        }
        self.coverage.hit("load");
        let reader = self.store.reader();
        let load = self.store.load(&mut |fragment, to| {
            let mut scratch = Vec::new();
            to.copy_from_slice(reader.root(fragment).payload(&mut scratch));
        });
        let mut role = load.model_role;
        while let Some(held) = role {
            role = held.step();
        }
        self.note("load");
    }

    /// What was told against what is there.
    fn judge(&mut self) {
        drop(self.cut.take());
        while let Some(role) = self.roles.pop() {
            self.roles.extend(role.step());
        }
        self.sessions.clear();
        let (mut whole, mut parts) = (0, 0);
        for cell in 0..CELLS {
            let held = self.cells(cell);
            assert!(held.iter().all(|&n| n <= 1), "push {cell} counts more than once: {held:?}");
            let Some(told) = self.pushes.get(cell) else {
                assert!(held.iter().all(|&n| n == 0), "nobody has pushed {cell}: {held:?}");
                continue;
            };
            let is_in = |&(f, _): &(usize, &u64)| told.present.has(f);
            assert!(held.iter().enumerate().all(|at| is_in(&at) || *at.1 == 0), "{cell}: {held:?}");
            let (num_due, num_held) = (told.present.count() as u64, held.iter().sum::<u64>());
            whole += u64::from(num_held == num_due);
            parts += u64::from(num_held > 0 && num_held < num_due);
            assert!(self.transaction == Transaction::Fragment || num_held == 0 || num_held == num_due);
            let Some(receipt) = &told.receipt else { continue };
            let after = || self.restarts.iter().filter(|r| receipt.term < r.first_term);
            let is_undone = after().any(|r| receipt.version > r.version);
            let is_named = after().any(|r| r.in_parts.contains(&(told.incarnation, told.sequence)));
            let fits = match (receipt.applied, receipt.reason) {
                (false, _) => num_held == 0,
                _ if is_undone => num_held == 0,
                _ if is_named => true,
                (true, None) => num_held == num_due,
                // A retry of what was whole is refused after a load or a change of the optimizer, and says so.
                (true, Some(Reason::ServerRolledBack | Reason::OptimizerChanged)) => num_held > 0,
                (true, Some(_)) => num_held > 0 && num_held < num_due,
            };
            assert!(
                fits,
                "push {cell}: {receipt:?}, of {num_due} {held:?}, restarts {}",
                self.restarts.len()
            );
        }
        let status = self.store.status();
        let tickets = &status.tickets;
        assert_eq!((tickets.applied, tickets.partial, tickets.open), (whole, parts, 0), "{tickets:?}");
        assert_eq!(tickets.issued, tickets.applied + tickets.partial + tickets.dropped, "{tickets:?}");
        assert_eq!(status.lost_updates, self.counted.values().sum::<u64>());
        self.note(&format!("{:?} {:?} {}", status.tickets, status.totals, status.lost_updates));
    }
}

fn in_parts(book: &Book) -> BTreeSet<(u32, u64)> {
    let mut all = BTreeSet::new();
    for page in &book.workers {
        for (sequence, answer) in &page.recent {
            let is_in_parts = match answer {
                Answer::Unfinished(_) => true,
                Answer::Settled(receipt) => !receipt.applied || receipt.reason.is_some(),
            };
            if is_in_parts {
                all.insert((page.incarnation, *sequence));
            }
        }
    }
    all
}
