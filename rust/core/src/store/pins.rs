//! Which versions of the model are alive under `transaction = "model"`, and who waits for one to go: readers may keep
//! only so many alive, since each is as large as what the pushes since then have changed.
//!
//! * **PIN-1** A reader that may have to wait is on the list of those to be told before it looks at what is alive.
//! * **PIN-2** Whoever holds a version lets go of it first and tells then, every holder, the store with its newest
//!   among them: one that let go in silence could be the last that a reader waits for. So a look takes no hold.

use super::model::ModelRoot;
use crate::sync::{Mutex, MutexGuard, RootCell};
use futures_channel::oneshot;
use std::sync::{Arc, PoisonError, Weak};

/// A version that was published.
struct Published {
    term: u64,
    version: u64,
    root: Weak<ModelRoot>,
    /// Held by a reader that has paused; nobody waits for it.
    discounted: bool,
}

impl Published {
    fn is_alive(&self) -> bool {
        self.root.strong_count() > 0
    }
}

#[derive(Default)]
pub(super) struct Pins {
    /// Oldest first; the last is the newest, which the store itself keeps alive.
    published: Mutex<Vec<Published>>,
    waiting: Mutex<Vec<oneshot::Sender<()>>>,
}

/// What a reader gets.
pub(super) enum Pin {
    /// To be given to [`Pins::release`].
    Now(Arc<ModelRoot>),
    /// Resolves when a reader has let go; then it is time to ask again.
    Wait(oneshot::Receiver<()>),
}

/// Both lists are whole at every point where their owner could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pins {
    /// Makes a version the newest, and lets go of the one before.
    pub(super) fn publish(&self, newest: &RootCell<ModelRoot>, root: Arc<ModelRoot>) {
        self.add(&root);
        newest.store(root); // PIN-2
        self.tell();
    }

    /// Remembers a version that is being published.
    pub(super) fn add(&self, root: &Arc<ModelRoot>) {
        let mut published = lock(&self.published);
        published.retain(Published::is_alive);
        let (term, version, root) = (root.term, root.version, Arc::downgrade(root));
        published.push(Published { term, version, root, discounted: false });
    }

    /// Pins the newest version if at most `max_live` are alive then; else shares the newest that others pin, unless
    /// that is older than the reader needs: older than `least`.
    pub(super) fn pin(&self, least: u64, max_live: usize) -> Pin {
        let told = self.enlist(); // PIN-1
        match self.look(least, max_live) {
            Some(root) => Pin::Now(root),
            None => Pin::Wait(told),
        }
    }

    /// From now on a version counts for nothing, though it may live on, and those that wait look again.
    pub(super) fn discount(&self, (term, version): (u64, u64)) {
        for published in lock(&self.published).iter_mut().filter(|p| (p.term, p.version) == (term, version)) {
            published.discounted = true;
        }
        self.tell();
    }

    /// Gets on the list of those that are told when a reader lets go.
    pub(super) fn enlist(&self) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        lock(&self.waiting).push(tell);
        told
    }

    /// What a reader may have now, see [`Self::pin`].
    pub(super) fn look(&self, least: u64, max_live: usize) -> Option<Arc<ModelRoot>> {
        let published = lock(&self.published);
        let (newest, older) = published.split_last()?;
        let mut older = older.iter().filter(|p| p.is_alive() && !p.discounted);
        // Pinning the newest costs nothing now, but makes one more older version at the next commit.
        let chosen = if older.clone().count() + 1 < max_live.max(2) {
            newest
        } else {
            older.next_back().filter(|p| p.version >= least && p.term == newest.term)?
        };
        chosen.root.upgrade() // it may have gone by now; whoever let go of it tells
    }

    /// Lets go of a version, and tells those that wait.
    pub(super) fn release(&self, root: Arc<ModelRoot>) {
        drop(root); // PIN-2
        self.tell();
    }

    /// Runs `f` on the versions alive, oldest first.
    pub(super) fn with_live<R>(&self, f: impl FnOnce(&[Arc<ModelRoot>]) -> R) -> R {
        let live = self.live();
        let result = f(&live);
        drop(live); // PIN-2
        self.tell();
        result
    }

    /// Holds every version that is alive.
    pub(super) fn live(&self) -> Vec<Arc<ModelRoot>> {
        lock(&self.published).iter().filter_map(|p| p.root.upgrade()).collect()
    }

    pub(super) fn tell(&self) {
        for waiter in lock(&self.waiting).drain(..) {
            // A reader that gave up waiting needs no word.
            waiter.send(()).ok();
        }
    }
}
