//! Workers, their connections and a server's sessions around the real store, on one thread: whatever breaks when, every
//! push counts once, its receipt says how, and what a crash has undone is counted. A seed gives the same run for ever.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod common;
#[path = "common/dice.rs"]
mod dice;
#[path = "simulation/network.rs"]
mod network;
#[path = "simulation/session.rs"]
mod session;
#[path = "simulation/worker.rs"]
mod worker;
#[path = "simulation/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::World;

/// Runs a seed, and says which it was if it fails.
fn run(seed: u64) -> (u64, World) {
    let mut world = World::new(seed);
    match catch_unwind(AssertUnwindSafe(|| world.run())) {
        Ok(trace) => (trace, world),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            panic!("OFFBEAT_SEED={seed} OFFBEAT_SEEDS=1: {said}");
        }
    }
}

#[test]
fn whatever_breaks_every_push_counts_once_and_what_is_lost_is_counted() {
    let seeds = dice::seeds(2000);
    let is_whole = seeds.end - seeds.start >= 2000;
    let mut coverage: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in seeds {
        for (what, times) in run(seed).1.coverage.0 {
            *coverage.entry(what).or_default() += times;
        }
    }
    let due = [
        "whole",
        "in parts",
        "answered again",
        "connection_lost",
        "server_rolled_back",
        "slept",
        "stale",
        "optimizer_changed",
        "lost updates",
        "crash",
        "load",
        "fenced",
        "waited for a commit",
        "copied with pushes under way",
    ];
    let missing: Vec<_> = due.iter().filter(|what| !coverage.contains_key(*what)).collect();
    assert!(!is_whole || missing.is_empty(), "no run came to {missing:?}: {coverage:?}");
    println!("{coverage:#?}");
}

#[test]
fn a_seed_gives_the_same_run_again() {
    let mut traces = Vec::new();
    for seed in 0..50 {
        let trace = run(seed).0;
        assert_eq!(run(seed).0, trace, "seed {seed}");
        traces.push(trace);
    }
    traces.sort_unstable();
    traces.dedup();
    assert_eq!(traces.len(), 50, "seeds differ");
}
