//! How much memory was asked for: an allocator that counts, for the targets and for tests of limits.
#![expect(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// Bytes this thread holds, as far as it got and gave back them itself; and the most since [`peak`] began.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// Bytes all threads hold. Relaxed: a statistic.
static TOTAL: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counted. A program that asks [`peak`] or [`total`] has it as its `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

fn took(bytes: usize) {
    TOTAL.fetch_add(bytes, Ordering::Relaxed);
    let held = HELD.get().wrapping_add_unsigned(bytes);
    HELD.set(held);
    MOST.set(MOST.get().max(held));
}

fn gave(bytes: usize) {
    TOTAL.fetch_sub(bytes, Ordering::Relaxed);
    HELD.set(HELD.get().wrapping_sub_unsigned(bytes));
}

// SAFETY: every call goes to the system's allocator as it is, and what is counted has no destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller upholds what the system's allocator asks for, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        took(bytes); // both may be held while it is copied
        // SAFETY: as above.
        let new = unsafe { System.realloc(old, layout, bytes) };
        gave(if new.is_null() { bytes } else { layout.size() });
        new
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        gave(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

/// What `f` gives, and the most bytes that this thread held at once for it; 0 without [`Counting`].
pub fn peak<R>(f: impl FnOnce() -> R) -> (R, usize) {
    let before = HELD.get();
    MOST.set(before);
    let given = f();
    (given, usize::try_from(MOST.get() - before).unwrap_or_default())
}

/// Bytes that all threads hold; 0 without [`Counting`].
pub fn total() -> usize {
    TOTAL.load(Ordering::Relaxed)
}

/// Runs `f` and holds what it takes against so many bytes a byte of `given`, and some more.
///
/// # Panics
/// If it takes more.
pub fn within<R>(given: usize, a_byte: usize, more: usize, f: impl FnOnce() -> R) -> R {
    let (result, peak) = peak(f);
    assert!(peak <= given * a_byte + more, "{given} bytes were given, and {peak} taken for them");
    result
}
