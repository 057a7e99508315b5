//! Every input of the corpus, by every target it is for: what was found once is not found again.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use offbeat_fuzz::memory::Counting;
use offbeat_fuzz::{TARGETS, checkpoint, client, frame, handshake, seeds, session};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

#[global_allocator]
static MEMORY: Counting = Counting;

fn folder(of: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz").join(of)
}

/// The files of a target's corpus.
fn inputs(target: &str) -> BTreeMap<String, Vec<u8>> {
    let read =
        |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    fs::read_dir(folder("corpus").join(target)).unwrap().map(|entry| read(entry.unwrap())).collect()
}

/// Each by its name, which is shown where one breaks a promise.
#[expect(clippy::print_stderr, reason = "a failed test shows it: which input it was")]
fn replay(target: &str, holds: fn(&[u8])) {
    let inputs = inputs(target);
    assert!(inputs.len() >= 10, "{} inputs for {target}", inputs.len());
    for (name, bytes) in inputs {
        eprintln!("{target}/{name}");
        holds(&bytes);
    }
}

#[test]
fn what_is_in_the_corpus_breaks_no_promise_of_the_decoders() {
    replay("frame", frame);
}

#[test]
fn what_is_in_the_corpus_breaks_no_promise_of_a_handshake() {
    replay("handshake", handshake);
}

#[test]
fn what_is_in_the_corpus_breaks_no_promise_of_a_server_to_its_workers() {
    replay("session", session);
}

#[test]
fn what_is_in_the_corpus_breaks_no_promise_of_a_worker_to_its_user() {
    replay("client", client);
}

#[test]
fn what_is_in_the_corpus_breaks_no_promise_of_checkpoints() {
    replay("checkpoint", checkpoint);
}

#[test]
fn the_seeds_in_the_tree_are_those_that_the_tool_writes() {
    for (target, _) in TARGETS {
        let written: BTreeMap<_, _> =
            seeds().into_iter().filter(|s| s.target == target).map(|s| (s.name, s.bytes)).collect();
        let mut found = inputs(target);
        found.retain(|name, _| !name.starts_with("found-"));
        assert!(!written.is_empty());
        assert!(found == written, "cargo run -p offbeat-fuzz --bin seeds writes other seeds for {target}");
    }
}

#[test]
fn every_target_has_its_binary_and_its_corpus_and_there_is_no_other() {
    let stems = |folder: PathBuf| {
        let stem = |entry: fs::DirEntry| {
            let path = entry.path();
            path.file_stem().unwrap().to_str().unwrap().to_owned()
        };
        let mut stems: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| stem(entry.unwrap())).collect();
        stems.sort();
        stems
    };
    let mut names = TARGETS.map(|(name, _)| name.to_owned()).to_vec();
    names.sort();
    assert_eq!(stems(folder("targets")), names);
    assert_eq!(stems(folder("corpus")), names);
}
