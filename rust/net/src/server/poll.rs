//! How long one turn of a task holds its data thread. The longest is a metric; a task that has held it for a while
//! lets the others run.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// After so long a task offers its thread to others.
const TURN: Duration = Duration::from_millis(1);

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// When the current turn began, or now outside of one.
pub(super) fn began() -> Instant {
    BEGAN.get().unwrap_or_else(Instant::now)
}

/// Runs a task and notes its longest turn, in microseconds.
pub(super) async fn timed<T>(longest_us: impl AsRef<AtomicU64>, task: impl Future<Output = T>) -> T {
    let mut task = pin!(task);
    poll_fn(move |cx| {
        let start = Instant::now();
        BEGAN.set(Some(start));
        let polled = task.as_mut().poll(cx);
        BEGAN.set(None);
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        let longest = longest_us.as_ref();
        // Relaxed: a statistic. The load first, so that the line is written only when there is news.
        if us > longest.load(Ordering::Relaxed) {
            longest.fetch_max(us, Ordering::Relaxed);
        }
        polled
    })
    .await
}

/// Lets others run if this turn has been long.
///
/// # Cancel safety
/// Safe.
pub(super) async fn breathe() {
    if BEGAN.get().is_some_and(|began| began.elapsed() >= TURN) {
        tokio::task::yield_now().await;
    }
}
