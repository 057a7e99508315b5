//! A cut: a consistent state of the store, taken while pushes go on. Under "fragment", commits of tickets issued after
//! the cut began pause; those issued before finish, unless their senders take longer than the caller is willing to
//! wait. Under "model" nobody pauses: every model root is one.

use super::Store;
use super::bookkeeping::Line;
use super::push::OpenPush;
use super::resume::StoreState;
use super::root::Root;
use crate::spec::Transaction;
use futures_channel::oneshot;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// No cut is being taken.
const NONE: u64 = u64::MAX;

#[derive(Default)]
struct Paused(Vec<oneshot::Sender<()>>);

/// The store's side of cuts: at most one at a time.
pub(super) struct Gate {
    /// Tickets above this one pause.
    last: AtomicU64,
    paused: Mutex<Paused>,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self { last: AtomicU64::new(NONE), paused: Mutex::default() }
    }
}

/// A cut under way. Dropping it lets the paused pushes go on.
pub struct Cut {
    store: Arc<Store>,
    line: Line,
}

impl Store {
    /// Begins a cut, or `None` while another is being taken.
    #[must_use]
    pub fn begin_cut(self: &Arc<Self>) -> Option<Cut> {
        // Under the registry's lock no ticket is issued, so every later one sees the gate closed.
        let registry = self.registry();
        let line = registry.line();
        // SeqCst: the gate is closed before any later ticket's holder looks (it looks after taking the same lock).
        self.gate.last.compare_exchange(NONE, line.last, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        drop(registry);
        Some(Cut { store: Arc::clone(self), line })
    }

    /// To be asked before a fragment of `push` is submitted: if something comes back, a cut is being taken that the
    /// push must not be part of; await it first.
    #[must_use]
    pub fn pause(&self, push: &OpenPush) -> Option<oneshot::Receiver<()>> {
        let number = push.record().ticket.number;
        if number <= self.gate.last.load(Ordering::SeqCst) {
            return None;
        }
        let mut paused = self.gate.paused.lock().unwrap_or_else(PoisonError::into_inner);
        if number <= self.gate.last.load(Ordering::SeqCst) {
            return None; // ended between the two looks; its waiters are woken under this lock
        }
        let (tell, hear) = oneshot::channel();
        paused.0.push(tell);
        Some(hear)
    }
}

impl Cut {
    /// Tickets of the cut whose fragments are still arriving. Empty: the cut is whole.
    #[must_use]
    pub fn open(&self) -> Vec<u64> {
        match self.store.transaction() {
            Transaction::Fragment => self.store.registry().open_until(self.line.last),
            Transaction::Model => Vec::new(),
        }
    }

    /// The state of the store. A ticket that is still [open](Self::open) is in some roots, and the book says in which.
    /// `None` for the moment in which a commit is being told or an open ticket goes on, and while a load is under way: to
    /// be asked again.
    #[must_use]
    pub fn take(&self) -> Option<StoreState> {
        let store = &self.store;
        let fragments = 0..store.layout.fragments.len();
        let reader; // let go of after the registry's lock
        let registry = store.registry();
        let (run, attendance) = (registry.run.clone(), registry.attendance());
        let mut book = match store.transaction() {
            Transaction::Fragment => {
                let book = registry.book(self.line);
                drop(registry);
                // After the book: what has ended there is in the roots.
                reader = store.reader();
                book
            }
            Transaction::Model => {
                reader = store.reader();
                registry.book(registry.line_at(reader.version())?)
            }
        };
        let roots: Vec<Arc<Root>> = fragments.map(|i| reader.root(i)).collect();
        if roots.iter().any(|root| root.term != book.term) {
            return None;
        }
        book.note_reached(&store.layout, &roots).then_some(StoreState { book, attendance, run, roots })
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let mut paused = self.store.gate.paused.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.gate.last.store(NONE, Ordering::SeqCst);
        for waiter in paused.0.drain(..) {
            // A session that died while it waited needs no word.
            waiter.send(()).ok();
        }
    }
}
