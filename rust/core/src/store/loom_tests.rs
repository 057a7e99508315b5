//! loom runs every interleaving of the lock-free kernels with three threads. Each claim is followed by the mutation
//! that breaks it: a kernel with one thing wrong, for which loom must find a failing interleaving. A test that
//! passed on the mutation too would prove nothing.

use super::block::{Block, Pool};
use super::combine::Combiner;
use super::model::ModelRoot;
use super::pins::{Pin, Pins};
use crate::sync::{Queue, RootCell};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a model that must have an interleaving which fails in the way that the mutation invites.
fn must_fail(mutation: &str, symptom: &str, model: impl Fn() + Send + Sync + 'static) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| loom::model(model))) else {
        panic!("loom found nothing wrong with the mutation {mutation:?}");
    };
    let said = panic.downcast_ref::<String>().map(String::as_str);
    let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(
        said.contains(symptom),
        "the mutation {mutation:?} failed in another way than {symptom:?}: {said}"
    );
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
    must_fail(
        "busy flag and a last look at the queue",
        "an item was stranded",
        every_item_is_worked_on_once::<BusyFlag>,
    );
}

#[test]
fn loom_combine_fails_with_relaxed_orderings() {
    must_fail("relaxed counter", "Concurrent write accesses", every_item_is_worked_on_once::<RelaxedCounter>);
}

#[test]
fn loom_combine_fails_when_counting_before_queueing() {
    must_fail(
        "count, then queue",
        "a counted item is in the queue",
        every_item_is_worked_on_once::<CountFirst>,
    );
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
    must_fail("publish without holding the turn", "an update was lost", || {
        every_push_is_in_the_last_root(false)
    });
}

/// Where roots' memory comes from, and what becomes of a root's when the next one has been published.
trait Memory: 'static {
    type Block: 'static;

    fn new() -> Self;
    /// A block with one number all over it.
    fn take(&self, number: u8) -> Self::Block;
    fn read(block: &Self::Block) -> u8;
    /// A root that others may still hold was replaced.
    fn replaced(&self, old: std::sync::Arc<Self::Block>);
    /// How many blocks wait to be reused.
    fn num_idle(&self) -> usize;
}

const BLOCK_BYTES: usize = 64;

struct Pooled(std::sync::Arc<Pool>);

impl Memory for Pooled {
    type Block = Block;

    fn new() -> Self {
        Self(std::sync::Arc::new(Pool::default()))
    }
    fn take(&self, number: u8) -> Block {
        let mut block = self.0.take(BLOCK_BYTES);
        block.bytes_mut().fill(number);
        block
    }
    fn read(block: &Block) -> u8 {
        let bytes = block.bytes();
        assert!(bytes.iter().all(|b| *b == bytes[0]), "a block that two have written");
        bytes[0]
    }
    fn replaced(&self, old: std::sync::Arc<Block>) {
        drop(old);
    }
    fn num_idle(&self) -> usize {
        self.0.idle_bytes() / BLOCK_BYTES
    }
}

/// The mutation: memory goes back at the swap, not with its last holder.
struct FreedAtTheSwap(Mutex<Vec<Arc<UnsafeCell<u8>>>>);

impl Memory for FreedAtTheSwap {
    type Block = Arc<UnsafeCell<u8>>;

    fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }
    fn take(&self, number: u8) -> Self::Block {
        let block = self.0.lock().unwrap().pop().unwrap_or_else(|| Arc::new(UnsafeCell::new(0)));
        block.with_mut(|value| {
            // SAFETY: the claim under test: memory on the free list has no reader.
            #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
            unsafe {
                *value = number;
            }
        });
        block
    }
    fn read(block: &Self::Block) -> u8 {
        block.with(|value| {
            // SAFETY: the claim under test: nobody writes memory that a reader holds.
            #[expect(unsafe_code, reason = "loom's cell checks exactly this access")]
            unsafe {
                *value
            }
        })
    }
    fn replaced(&self, old: std::sync::Arc<Self::Block>) {
        self.0.lock().unwrap().push(Arc::clone(&old));
    }
    fn num_idle(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// A writer replaces the root and reuses whatever memory is free, while two readers look at the root they hold.
fn readers_never_see_reused_memory<M: Memory>() {
    let memory = Arc::new(M::new());
    let root = Arc::new(RootCell::new(std::sync::Arc::new(memory.take(1))));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let root = Arc::clone(&root);
            thread::spawn(move || {
                let held = root.load();
                let before = M::read(&held);
                drop(root.load()); // others may run
                assert_eq!(M::read(&held), before, "memory was reused under a reader");
            })
        })
        .collect();
    for version in 2..4 {
        let next = std::sync::Arc::new(memory.take(version));
        let old = root.load();
        root.store(next);
        memory.replaced(old);
    }
    for reader in readers {
        reader.join().unwrap();
    }
    assert_eq!(M::read(&root.load()), 3);
    assert!((1..=2).contains(&memory.num_idle()), "more blocks wait than were ever replaced");
}

#[test]
fn loom_recycling_waits_for_the_last_reader() {
    loom::model(readers_never_see_reused_memory::<Pooled>);
}

#[test]
fn loom_recycling_fails_when_done_at_the_swap() {
    must_fail(
        "recycle at the swap",
        "Concurrent read and write accesses",
        readers_never_see_reused_memory::<FreedAtTheSwap>,
    );
}

fn version(number: u64) -> std::sync::Arc<ModelRoot> {
    std::sync::Arc::new(ModelRoot { term: 1, version: number, roots: Vec::new() })
}

/// How readers pin versions: the orders that [`super::pins`] keeps.
trait Pinning: Send + Sync + 'static {
    fn publish(pins: &Pins, newest: &RootCell<ModelRoot>, root: std::sync::Arc<ModelRoot>) {
        pins.publish(newest, root);
    }
    fn pin(pins: &Pins) -> Pin {
        pins.pin(1, 2)
    }
    fn release(pins: &Pins, root: std::sync::Arc<ModelRoot>) {
        pins.release(root);
    }
}

struct InOrder;

impl Pinning for InOrder {}

/// The mutation: looks, then gets on the list (against PIN-1).
struct LookThenEnlist;

impl Pinning for LookThenEnlist {
    fn pin(pins: &Pins) -> Pin {
        match pins.look(1, 2) {
            Some(root) => Pin::Now(root),
            None => Pin::Wait(pins.enlist()),
        }
    }
}

/// The mutation: tells, then lets go (against PIN-2).
struct TellThenLetGo;

impl Pinning for TellThenLetGo {
    fn release(pins: &Pins, root: std::sync::Arc<ModelRoot>) {
        pins.tell();
        thread::yield_now();
        drop(root);
    }
}

/// The mutation: a look holds what it finds, and lets go of it in silence (against PIN-2).
struct HoldingLook;

impl Pinning for HoldingLook {
    fn pin(pins: &Pins) -> Pin {
        let told = pins.enlist();
        let held = pins.live();
        let root = pins.look(1, 2);
        drop(held);
        root.map_or(Pin::Wait(told), Pin::Now)
    }
}

/// One version is pinned and a newer one published; two readers need the newer one, and may have it when the first
/// has gone.
fn a_waiting_reader_is_told<P: Pinning>() {
    let pins = Arc::new(Pins::default());
    let (old, newest) = (version(0), version(1));
    pins.add(&old);
    pins.add(&newest);
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let pins = Arc::clone(&pins);
            thread::spawn(move || match P::pin(&pins) {
                Pin::Now(root) => {
                    assert_eq!(root.version, 1);
                    P::release(&pins, root);
                    None
                }
                Pin::Wait(told) => Some(told),
            })
        })
        .collect();
    let holder = thread::spawn({
        let pins = Arc::clone(&pins);
        move || P::release(&pins, old)
    });
    holder.join().unwrap();
    for reader in readers {
        if let Some(mut told) = reader.join().unwrap() {
            assert_eq!(told.try_recv(), Ok(Some(())), "a reader waits for ever");
        }
    }
    assert!(
        matches!(pins.pin(1, 2), Pin::Now(root) if root.version == 1),
        "the old version is held for ever"
    );
}

/// The mutation: the newest takes the place of the one before, which nobody hears of (against PIN-2).
struct SilentPublisher;

impl Pinning for SilentPublisher {
    fn publish(pins: &Pins, newest: &RootCell<ModelRoot>, root: std::sync::Arc<ModelRoot>) {
        pins.add(&root);
        thread::yield_now(); // loom does not see that a look before the replacement differs from one after it
        newest.store(root);
    }
}

/// A version is published while two readers want it; only the store holds the one before.
fn the_publisher_tells<P: Pinning>() {
    let old = version(0);
    let shared = Arc::new((Pins::default(), RootCell::new(std::sync::Arc::clone(&old))));
    shared.0.add(&old);
    drop(old);
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || match P::pin(&shared.0) {
                Pin::Now(root) => {
                    P::release(&shared.0, root);
                    None
                }
                Pin::Wait(told) => Some(told),
            })
        })
        .collect();
    P::publish(&shared.0, &shared.1, version(1));
    for reader in readers {
        if let Some(mut told) = reader.join().unwrap() {
            assert_eq!(told.try_recv(), Ok(Some(())), "a reader waits for ever");
        }
    }
}

#[test]
fn loom_pins_tell_when_a_version_is_replaced() {
    loom::model(the_publisher_tells::<InOrder>);
}

#[test]
fn loom_pins_fail_when_the_publisher_is_silent() {
    must_fail("a silent publisher", "a reader waits for ever", the_publisher_tells::<SilentPublisher>);
}

#[test]
fn loom_pins_let_no_reader_wait_for_ever() {
    loom::model(a_waiting_reader_is_told::<InOrder>);
}

#[test]
fn loom_pins_fail_when_looking_before_enlisting() {
    must_fail("look, then enlist", "a reader waits for ever", a_waiting_reader_is_told::<LookThenEnlist>);
}

#[test]
fn loom_pins_fail_when_telling_before_letting_go() {
    must_fail("tell, then let go", "a reader waits for ever", a_waiting_reader_is_told::<TellThenLetGo>);
}

#[test]
fn loom_pins_fail_when_a_look_holds() {
    must_fail(
        "a look that holds what it finds",
        "a reader waits for ever",
        a_waiting_reader_is_told::<HoldingLook>,
    );
}
