//! A server's side of a connection: what the sessions of `rust/net` do with the store, a message at a time.

use crate::network::{Down, Head, Up, Wire};
use crate::worker::SAMPLES;
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::FragmentKind;
use offbeat_core::spec::Transaction;
use offbeat_core::store::{
    Admission, Block, ModelRole, PushHead, Receipt, StagedFragment, Store, Turn, WorkerKey,
};
use std::sync::Arc;

/// A receiver of the store's.
type Hear<T> = futures_channel::oneshot::Receiver<T>;

pub(crate) struct Session {
    pub(crate) wire: Wire,
    pub(crate) name: usize,
    pub(crate) key: WorkerKey,
    own: u64,
    state: State,
}

enum State {
    Idle,
    Streaming(Box<Streaming>),
    Staging { head: Box<Head>, fragments: Vec<StagedFragment> },
    Committing { head: Box<Head>, receipt: Hear<Receipt> },
}

struct Streaming {
    head: Head,
    admission: Admission,
    /// The version that was there when it was admitted.
    version: u64,
    next: usize,
    term: Option<u64>,
    /// A fragment that has come, and waits for a cut.
    held: Option<u64>,
    paused: Option<Hear<()>>,
}

/// What a step leads to.
pub(crate) enum Did {
    Nothing,
    Something,
    Drive(Box<ModelRole>),
    /// The connection is at its end, or the worker has said so.
    End,
}

impl Session {
    pub(crate) fn new(wire: Wire, name: usize, key: WorkerKey, own: u64) -> Self {
        Self { wire, name, key, own, state: State::Idle }
    }

    fn next(&self) -> Option<Up> {
        self.wire.borrow_mut().up.pop_front()
    }

    fn tell(&self, message: Down) {
        self.wire.borrow_mut().send_down(message);
    }

    /// Without a message to go on with: whether there will be none.
    fn starve(&self) -> Did {
        let link = self.wire.borrow();
        if link.is_cut && link.is_heard && link.up.is_empty() { Did::End } else { Did::Nothing }
    }

    pub(crate) fn step(&mut self, store: &Arc<Store>) -> Did {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => self.idle(store),
            State::Streaming(streaming) => self.stream(store, streaming),
            State::Staging { head, fragments } => self.stage(store, head, fragments),
            State::Committing { head, mut receipt } => match receipt.try_recv() {
                Ok(Some(receipt)) => {
                    self.answer(store, &head, receipt);
                    Did::Something
                }
                Ok(None) => {
                    self.state = State::Committing { head, receipt };
                    Did::Nothing
                }
                Err(canceled) => panic!("a push was lost inside the store: {canceled}"),
            },
        }
    }

    fn idle(&mut self, store: &Arc<Store>) -> Did {
        match self.next() {
            None => return self.starve(),
            Some(Up::Push(head)) if store.transaction() == Transaction::Model => {
                assert_eq!(head.answered, 0, "a push that is taken whole comes whole");
                self.state = State::Staging { head: Box::new(head), fragments: Vec::new() };
            }
            Some(Up::Push(head)) => {
                let admission = store.admit(&push_head(self.key, &head));
                let version = store.reader().version();
                let (next, term, held, paused) = (0, None, None, None);
                let streaming = Streaming { head, admission, version, next, term, held, paused };
                self.state = State::Streaming(Box::new(streaming));
            }
            Some(Up::Pull) => {
                let reader = self.turn(store);
                let roots: Vec<_> = (0..store.layout().fragments.len()).map(|f| reader.root(f)).collect();
                let term = roots.iter().map(|root| root.term()).min().unwrap_or(store.term());
                let versions = roots.iter().map(|root| root.version()).collect();
                let epoch = store.run().map_or(0, |run| run.epoch);
                self.tell(Down::Pulled { read: (term, reader.version()), epoch, versions });
            }
            Some(Up::Goodbye { finished }) => {
                store.depart(self.key, finished);
                return Did::End;
            }
            Some(message) => panic!("{message:?} in the middle of a session"),
        }
        Did::Something
    }

    fn turn(&self, store: &Arc<Store>) -> offbeat_core::store::Reader {
        match store.turn(self.key, self.own) {
            Turn::Now(reader) => reader,
            Turn::Wait(_) => panic!("no reader holds on to a version"),
        }
    }

    fn stream(&mut self, store: &Arc<Store>, mut s: Box<Streaming>) -> Did {
        if let Some(mut paused) = s.paused.take()
            && paused.try_recv() == Ok(None)
        {
            s.paused = Some(paused);
            self.state = State::Streaming(s);
            return Did::Nothing;
        }
        let fragment = s.next;
        if fragment == store.layout().fragments.len() {
            return self.end_stream(store, s);
        }
        let root = if s.head.present.has(fragment) && fragment >= s.head.answered {
            let base = match s.held.take() {
                Some(base) => base,
                None => match self.next() {
                    Some(Up::Fragment { fragment: came, base }) => {
                        assert_eq!(came, fragment);
                        base
                    }
                    Some(message) => panic!("{message:?} where fragment {fragment} was due"),
                    None => {
                        self.state = State::Streaming(s);
                        return self.starve();
                    }
                },
            };
            match &s.admission {
                Admission::Open(push) => {
                    if let Some(paused) = store.pause(push) {
                        (s.held, s.paused) = (Some(base), Some(paused));
                        self.state = State::Streaming(s);
                        return Did::Something;
                    }
                    let (payload, sum) = payload(store, fragment, s.head.cell);
                    let mut submission = store.submit(push, fragment, base, payload, sum);
                    submission.outcome.try_recv().unwrap().expect("nobody else applies").root
                }
                Admission::Settled(_) => store.reader().root(fragment),
            }
        } else {
            store.reader().root(fragment)
        };
        s.term = Some(s.term.map_or(root.term(), |term| term.min(root.term())));
        if s.head.wants {
            self.tell(Down::Root { sequence: s.head.sequence, fragment, version: root.version() });
        }
        s.next += 1;
        self.state = State::Streaming(s);
        Did::Something
    }

    fn end_stream(&mut self, store: &Arc<Store>, mut s: Box<Streaming>) -> Did {
        if let Admission::Open(push) = &s.admission
            && let Some(paused) = store.pause(push)
        {
            s.paused = Some(paused);
            self.state = State::Streaming(s);
            return Did::Something;
        }
        let Streaming { head, admission, version, term, .. } = *s;
        let (receipt, read) = match admission {
            Admission::Open(push) => {
                let receipt = push.settle();
                let read = (term.unwrap_or(receipt.term), receipt.version);
                (receipt, read)
            }
            Admission::Settled(receipt) => (receipt, (term.unwrap_or(store.term()), version)),
        };
        self.finish(&head, receipt, read);
        Did::Something
    }

    fn stage(&mut self, store: &Arc<Store>, head: Box<Head>, mut fragments: Vec<StagedFragment>) -> Did {
        if fragments.len() == head.present.count() {
            let commit = store.commit(push_head(self.key, &head), fragments);
            self.state = State::Committing { head, receipt: commit.receipt };
            return commit.role.map_or(Did::Something, |role| Did::Drive(Box::new(role)));
        }
        let did = match self.next() {
            Some(Up::Fragment { fragment, base }) => {
                let (payload, checksum) = payload(store, fragment, head.cell);
                fragments.push(StagedFragment { fragment, base, payload, checksum });
                Did::Something
            }
            Some(message) => panic!("{message:?} where a fragment was due"),
            None => self.starve(),
        };
        self.state = State::Staging { head, fragments };
        did
    }

    fn answer(&mut self, store: &Arc<Store>, head: &Head, receipt: Receipt) {
        if receipt.applied {
            self.own = self.own.max(receipt.version);
        }
        let mut read = (receipt.term, receipt.version);
        if head.wants {
            let reader = self.turn(store);
            for fragment in 0..store.layout().fragments.len() {
                let root = reader.root(fragment);
                read = (root.term(), reader.version());
                self.tell(Down::Root { sequence: head.sequence, fragment, version: root.version() });
            }
        }
        self.finish(head, receipt, read);
    }

    fn finish(&mut self, head: &Head, receipt: Receipt, read: (u64, u64)) {
        if receipt.applied {
            self.own = self.own.max(receipt.version);
        }
        self.tell(Down::Receipt { sequence: head.sequence, receipt, read });
    }
}

fn push_head(worker: WorkerKey, head: &Head) -> PushHead {
    PushHead {
        worker,
        sequence: head.sequence,
        term: head.term,
        base: head.base,
        epoch: head.epoch,
        samples: SAMPLES,
        present: head.present.clone(),
        norm: None,
    }
}

/// What moves one cell of a fragment by one.
fn payload(store: &Arc<Store>, fragment: usize, cell: usize) -> (Block, u32) {
    let layout = &store.layout().fragments[fragment];
    let size = layout.dtype.size();
    let mut block = store.staging(layout.wire_bytes() * layout.push_copies());
    let bytes = block.bytes_mut();
    bytes.fill(0);
    let one: &[u8] = match (layout.kind, layout.dtype) {
        (FragmentKind::Buffers, _) => &1_i64.to_le_bytes(),
        (_, Dtype::BF16) => &[0x80, 0xbf], // −1
        (_, Dtype::F16) => &[0x00, 0xbc],
        _ => &(-1.0_f32).to_le_bytes(),
    };
    bytes[cell * size..][..size].copy_from_slice(one);
    let sum = checksum(block.bytes());
    (block, sum)
}
