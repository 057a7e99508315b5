//! loom runs every interleaving of the lock-free kernels with three threads. Each claim is followed by the mutation
//! that breaks it: a kernel with one thing wrong, for which loom must find a failing interleaving. A test that
//! passed on the mutation too would prove nothing.

use super::combine::Combiner;
use crate::sync::{Queue, RootCell};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a model that must have a failing interleaving.
fn must_fail(mutation: &str, model: impl Fn() + Send + Sync + 'static) {
    let result = catch_unwind(AssertUnwindSafe(|| loom::model(model)));
    assert!(result.is_err(), "loom found nothing wrong with the mutation {mutation:?}");
}

/// How items get from many threads to one worker at a time.
trait HandOver: Send + Sync + 'static {
    fn new() -> Self;
    /// Queues an item; the caller works if it gets the turn.
    fn submit(&self, item: usize, work: &mut dyn FnMut(usize));
}

struct Counted(Combiner<usize>);

impl HandOver for Counted {
    fn new() -> Self {
        Self(Combiner::new())
    }
    fn submit(&self, item: usize, work: &mut dyn FnMut(usize)) {
        if !self.0.enqueue(item) {
            return;
        }
        let mut counted = 1;
        while counted > 0 {
            for _ in 0..counted {
                work(self.0.take());
            }
            counted = self.0.finish(counted);
        }
    }
}

/// The mutation: a flag for the turn, and a last look at the queue before leaving.
struct BusyFlag {
    queue: Queue<usize>,
    busy: AtomicBool,
}

impl HandOver for BusyFlag {
    fn new() -> Self {
        Self { queue: Queue::new(), busy: AtomicBool::new(false) }
    }
    fn submit(&self, item: usize, work: &mut dyn FnMut(usize)) {
        self.queue.push(item);
        if self.busy.swap(true, Ordering::AcqRel) {
            return;
        }
        while let Some(item) = self.queue.pop() {
            work(item);
        }
        self.busy.store(false, Ordering::Release);
    }
}

/// The mutation: the counter, without the orderings that hand the fragment's memory over.
struct RelaxedCounter {
    queue: Queue<usize>,
    pending: AtomicUsize,
}

impl HandOver for RelaxedCounter {
    fn new() -> Self {
        Self { queue: Queue::new(), pending: AtomicUsize::new(0) }
    }
    fn submit(&self, item: usize, work: &mut dyn FnMut(usize)) {
        self.queue.push(item);
        if self.pending.fetch_add(1, Ordering::Relaxed) != 0 {
            return;
        }
        loop {
            // Works before it looks at the queue's lock, which would hide the missing ordering.
            work(0);
            self.queue.pop().expect("a counted item is in the queue");
            if self.pending.fetch_sub(1, Ordering::Relaxed) == 1 {
                return;
            }
        }
    }
}

/// The mutation: counts before the item is in the queue.
struct CountFirst {
    queue: Queue<usize>,
    pending: AtomicUsize,
}

impl HandOver for CountFirst {
    fn new() -> Self {
        Self { queue: Queue::new(), pending: AtomicUsize::new(0) }
    }
    fn submit(&self, item: usize, work: &mut dyn FnMut(usize)) {
        let first = self.pending.fetch_add(1, Ordering::AcqRel) == 0;
        self.queue.push(item);
        if !first {
            return;
        }
        loop {
            work(self.queue.pop().expect("a counted item is in the queue"));
            if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
                return;
            }
        }
    }
}

/// Three submitters; the work is an unsynchronised read-modify-write, which loom reports if two overlap.
fn every_item_is_worked_on_once<H: HandOver>() {
    let shared = Arc::new((H::new(), UnsafeCell::new(0_usize)));
    let submit = |shared: &(H, UnsafeCell<usize>), item| {
        shared.0.submit(item, &mut |_| {
            shared.1.with_mut(|count| {
                // SAFETY: the claim under test: only the turn's holder is here; loom fails the model if not.
                #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
                unsafe {
                    *count += 1;
                }
            });
        });
    };
    let threads: Vec<_> = (1..3)
        .map(|item| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || submit(&shared, item))
        })
        .collect();
    submit(&shared, 3);
    for thread in threads {
        thread.join().unwrap();
    }
    let worked = shared.1.with(|count| {
        // SAFETY: every thread has been joined.
        #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
        unsafe {
            *count
        }
    });
    assert_eq!(worked, 3, "an item was stranded");
}

#[test]
fn loom_combine_strands_nothing_and_never_overlaps() {
    loom::model(every_item_is_worked_on_once::<Counted>);
}

#[test]
fn loom_combine_fails_with_a_busy_flag() {
    must_fail("busy flag and a last look at the queue", every_item_is_worked_on_once::<BusyFlag>);
}

#[test]
fn loom_combine_fails_with_relaxed_orderings() {
    must_fail("relaxed counter", every_item_is_worked_on_once::<RelaxedCounter>);
}

#[test]
fn loom_combine_fails_when_counting_before_queueing() {
    must_fail("count, then queue", every_item_is_worked_on_once::<CountFirst>);
}

struct Version {
    number: usize,
    /// Equal to `number` in every whole root.
    mirror: usize,
}

/// Two pushers and a reader on one fragment: read the root, write the next, publish.
fn every_push_is_in_the_last_root(with_turn: bool) {
    let start = std::sync::Arc::new(Version { number: 0, mirror: 0 });
    let shared = Arc::new((RootCell::new(start), Combiner::<()>::new()));
    let publish = |shared: &(RootCell<Version>, Combiner<()>)| {
        let number = shared.0.load().number + 1;
        shared.0.store(std::sync::Arc::new(Version { number, mirror: number }));
    };
    let push = move |shared: &(RootCell<Version>, Combiner<()>)| {
        if !with_turn {
            publish(shared);
        } else if shared.1.enqueue(()) {
            let mut counted = 1;
            while counted > 0 {
                shared.1.take();
                publish(shared);
                counted = shared.1.finish(1);
            }
        }
    };
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || push(&shared))
        })
        .collect();
    let (first, second) = (shared.0.load(), shared.0.load());
    assert_eq!((first.number, second.number), (first.mirror, second.mirror));
    assert!(first.number <= second.number, "a reader went back in time");
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(shared.0.load().number, 2, "an update was lost");
}

#[test]
fn loom_publish_loses_no_update() {
    loom::model(|| every_push_is_in_the_last_root(true));
}

#[test]
fn loom_publish_fails_without_the_turn() {
    must_fail("publish without holding the turn", || every_push_is_in_the_last_root(false));
}

/// A block's memory, and the list it goes back to when its last holder lets go.
struct Recycled {
    memory: Option<Arc<UnsafeCell<usize>>>,
    free: Arc<Mutex<Vec<Arc<UnsafeCell<usize>>>>>,
}

impl Drop for Recycled {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.free.lock().unwrap().push(memory);
        }
    }
}

/// A writer replaces the root and reuses whatever memory is free, while two readers look at the root they hold.
fn readers_never_see_reused_memory(wait_for_the_last_holder: bool) {
    let free = Arc::new(Mutex::new(Vec::new()));
    let block = |memory| Arc::new(Recycled { memory: Some(memory), free: Arc::clone(&free) });
    let root = Arc::new(Mutex::new(block(Arc::new(UnsafeCell::new(1)))));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let root = Arc::clone(&root);
            thread::spawn(move || {
                let held = Arc::clone(&root.lock().unwrap());
                if let Some(memory) = &held.memory {
                    memory.with(|value| {
                        // SAFETY: the claim under test: nobody writes memory that a reader holds.
                        #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
                        unsafe {
                            assert!(*value >= 1);
                        }
                    });
                }
            })
        })
        .collect();
    for version in 2..4 {
        let reused = free.lock().unwrap().pop().unwrap_or_else(|| Arc::new(UnsafeCell::new(0)));
        reused.with_mut(|value| {
            // SAFETY: the claim under test: memory on the free list has no reader.
            #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
            unsafe {
                *value = version;
            }
        });
        let old = std::mem::replace(&mut *root.lock().unwrap(), block(reused));
        if !wait_for_the_last_holder && let Some(memory) = &old.memory {
            free.lock().unwrap().push(Arc::clone(memory));
        }
        drop(old);
    }
    for reader in readers {
        reader.join().unwrap();
    }
}

#[test]
fn loom_recycling_waits_for_the_last_reader() {
    loom::model(|| readers_never_see_reused_memory(true));
}

#[test]
fn loom_recycling_fails_when_done_at_the_swap() {
    must_fail("recycle at the swap", || readers_never_see_reused_memory(false));
}

/// A reader that must wait for a pin to be released, and two holders that release. `enlist_first` is the order that
/// [`super::Store::turn`] keeps: first onto the list of those to be told, then a look at the pins.
fn a_waiting_reader_is_told(enlist_first: bool) {
    let pins = Arc::new((Mutex::new(2_usize), Mutex::new(Vec::<Arc<AtomicBool>>::new())));
    let holders: Vec<_> = (0..2)
        .map(|_| {
            let pins = Arc::clone(&pins);
            thread::spawn(move || {
                *pins.0.lock().unwrap() -= 1;
                for told in pins.1.lock().unwrap().drain(..) {
                    told.store(true, Ordering::Release);
                }
            })
        })
        .collect();
    let told = Arc::new(AtomicBool::new(false));
    let enlist = || pins.1.lock().unwrap().push(Arc::clone(&told));
    if enlist_first {
        enlist();
    }
    let must_wait = *pins.0.lock().unwrap() > 0;
    if !enlist_first {
        enlist();
    }
    for holder in holders {
        holder.join().unwrap();
    }
    assert!(!must_wait || told.load(Ordering::Acquire), "a reader waits for ever");
}

#[test]
fn loom_wake_up_misses_no_release() {
    loom::model(|| a_waiting_reader_is_told(true));
}

#[test]
fn loom_wake_up_fails_when_looking_before_enlisting() {
    must_fail("look, then enlist", || a_waiting_reader_is_told(false));
}
