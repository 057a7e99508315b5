//! One switch between the real primitives and loom's. Under `--cfg offbeat_loom` (a private name: tokio drops its
//! sockets under plain `loom`) atomics and mutexes are loom's and the two foreign containers are models of what their
//! documentation promises: a linearizable queue and a cell whose load returns some whole stored value.

#[cfg(not(offbeat_loom))]
mod real {
    pub(crate) use arc_swap::ArcSwap as RootCell;
    pub(crate) use crossbeam_queue::SegQueue as Queue;
    pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

#[cfg(offbeat_loom)]
mod model {
    pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    use std::collections::VecDeque;
    use std::sync::Arc;

    /// `crossbeam_queue::SegQueue` as documented: an unbounded linearizable FIFO.
    pub(crate) struct Queue<T>(Mutex<VecDeque<T>>);

    impl<T> Queue<T> {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(VecDeque::new()))
        }
        pub(crate) fn push(&self, item: T) {
            self.0.lock().expect("no panic under the lock").push_back(item);
        }
        pub(crate) fn pop(&self) -> Option<T> {
            self.0.lock().expect("no panic under the lock").pop_front()
        }
    }

    /// `arc_swap::ArcSwap` as documented: a load returns some whole value that was stored, never one older than a
    /// load of the same thread returned before.
    pub(crate) struct RootCell<T>(Mutex<Arc<T>>);

    impl<T> RootCell<T> {
        pub(crate) fn new(value: Arc<T>) -> Self {
            Self(Mutex::new(value))
        }
        pub(crate) fn load(&self) -> Arc<T> {
            Arc::clone(&self.0.lock().expect("no panic under the lock"))
        }
        pub(crate) fn load_full(&self) -> Arc<T> {
            self.load()
        }
        pub(crate) fn store(&self, value: Arc<T>) {
            *self.0.lock().expect("no panic under the lock") = value;
        }
    }
}

#[cfg(offbeat_loom)]
pub(crate) use model::*;
#[cfg(not(offbeat_loom))]
pub(crate) use real::*;
