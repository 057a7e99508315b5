//! From Rust's `tracing` to Python's `logging`, without a data thread ever meeting the GIL.
//!
//! An event becomes text where it happens and goes to a bounded queue; a Python thread (`offbeat/log.py`) takes
//! it from there and logs it. A thread of ours that attached itself to the interpreter would race with its end, and
//! a daemon thread would be killed inside our frames; that one is neither, and ends with the main thread.

use arc_swap::ArcSwap;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, Once};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record as Fields};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// Beyond this nobody is reading; later events are counted instead.
const MAX_RECORDS: usize = 4096;

/// (Python's level, target, text).
type Record = (u8, String, String);

#[derive(Default)]
struct Queue {
    waiting: Mutex<(VecDeque<Record>, u64)>,
    filled: Condvar,
}

/// Replaced in a forked child, where a thread that is no more may hold the old one's lock.
static QUEUE: LazyLock<ArcSwap<Queue>> = LazyLock::new(ArcSwap::default);
/// Least of Python's levels that is wanted.
static LEAST: AtomicU8 = AtomicU8::new(20);

/// Sends events to [`QUEUE`]; spans are not used.
struct Forward;

impl Subscriber for Forward {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        python_level(*metadata.level()) >= LEAST.load(Ordering::Relaxed) // Relaxed: a filter, it orders nothing
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let line = on_one_line(text.message + &text.fields);
        put((python_level(*metadata.level()), metadata.target().to_owned(), line));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Fields<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
        debug_assert!(written.is_ok(), "a String takes everything");
    }
}

/// What happened may be told in a peer's words: they make no line of their own, and move no cursor.
fn on_one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

const fn python_level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

fn put(record: Record) {
    let queue = QUEUE.load();
    let Ok(mut waiting) = queue.waiting.lock() else {
        return;
    };
    let (records, dropped) = &mut *waiting;
    if records.len() < MAX_RECORDS {
        records.push_back(record);
    } else {
        *dropped += 1;
    }
    queue.filled.notify_one();
}

/// Sends events to the queue from now on. `tracing` is linked into this extension alone, so no other library's
/// subscriber can be there before.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // Made here, under the GIL: a fork while another thread makes it would leave the child waiting for that thread.
        LazyLock::force(&QUEUE);
        let first = tracing::subscriber::set_global_default(Forward);
        debug_assert!(first.is_ok(), "set once, here");
    });
}

/// In a forked child: begin with an empty queue and free locks. The old queue is never freed.
pub(crate) fn forget() {
    let _old = std::mem::ManuallyDrop::new(QUEUE.swap(Arc::default()));
}

/// Waits up to `timeout_s` for a record, and takes none.
#[pyfunction]
pub(crate) fn wait_for_log_records(py: Python<'_>, timeout_s: f64) {
    py.detach(|| {
        let queue = QUEUE.load_full();
        let Ok(waiting) = queue.waiting.lock() else {
            return;
        };
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        drop(queue.filled.wait_timeout_while(waiting, timeout, |(records, _)| records.is_empty()));
    });
}

/// Takes all waiting records.
#[pyfunction]
pub(crate) fn take_log_records(py: Python<'_>) -> Vec<Record> {
    py.detach(|| {
        let queue = QUEUE.load_full();
        let Ok(mut waiting) = queue.waiting.lock() else {
            return Vec::new();
        };
        let (records, dropped) = &mut *waiting;
        let mut taken: Vec<Record> = records.drain(..).collect();
        if *dropped > 0 {
            taken.push((
                30,
                "offbeat".to_owned(),
                format!("{dropped} log records were dropped: nobody was reading"),
            ));
            *dropped = 0;
        }
        taken
    })
}

/// Says from which of Python's levels on events are wanted.
#[pyfunction]
pub(crate) fn set_log_level(level: u8) {
    LEAST.store(level, Ordering::Relaxed);
}
