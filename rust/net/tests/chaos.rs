//! The real client and the real server over sockets that break as a seed says: workers that come and go, replies that are
//! lost, servers that crash, drain and load. At the end of each run every push is looked for in what the server holds.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test fails")]

#[path = "../../core/tests/common/dice.rs"]
mod dice;
#[path = "chaos/ledger.rs"]
mod ledger;
#[expect(dead_code, reason = "the client's tests use the rest")]
#[path = "client/relay.rs"]
mod relay;
#[path = "chaos/run.rs"]
mod run;
#[path = "chaos/schedule.rs"]
mod schedule;
#[expect(dead_code, reason = "the client's tests use the rest")]
#[path = "client/support.rs"]
mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

/// Runs at a time: most of the time each waits for a server that is away.
const AT_ONCE: usize = 6;
/// A run that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(50);
/// So many seeds come to everything.
const MANY: u64 = 500;

/// Runs a seed on a thread of its own; what it came to, or how it failed.
fn run(seed: u64) -> Result<ledger::Coverage, String> {
    let (tell, told) = mpsc::channel();
    let running = std::thread::Builder::new().name(format!("seed-{seed}"));
    let thread = running.spawn(move || tell.send(run::run(seed)).unwrap()).unwrap();
    match told.recv_timeout(DEADLINE) {
        Ok(coverage) => {
            thread.join().unwrap();
            Ok(coverage)
        }
        Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("OFFBEAT_SEED={seed} OFFBEAT_SEEDS=1: it hangs")),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            let panic = thread.join().unwrap_err();
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a worker panicked");
            Err(format!("OFFBEAT_SEED={seed} OFFBEAT_SEEDS=1: {said}"))
        }
    }
}

#[test]
fn whatever_breaks_every_push_is_there_once_or_its_worker_was_told() {
    let seeds = dice::seeds(60);
    let is_long = seeds.end - seeds.start >= MANY;
    let next = AtomicU64::new(seeds.start);
    let coverage: Mutex<BTreeMap<&str, u64>> = Mutex::default();
    let failures: Mutex<Vec<String>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failures.lock().unwrap().len() > 10 {
                        return;
                    }
                    match run(seed) {
                        Ok(hit) => {
                            let mut coverage = coverage.lock().unwrap();
                            for what in hit {
                                *coverage.entry(what).or_default() += 1;
                            }
                        }
                        Err(failure) => failures.lock().unwrap().push(failure),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let coverage = coverage.into_inner().unwrap();
    let due = ledger::COVERED.iter().filter(|what| !coverage.contains_key(*what));
    let missing: Vec<_> = due.collect();
    assert!(!is_long || missing.is_empty(), "no run came to {missing:?}: {coverage:?}");
    println!("{} runs, of which so many came to: {coverage:#?}", seeds.end - seeds.start);
}
