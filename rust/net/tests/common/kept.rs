//! A server's checkpoints in a directory of the test's own, and what goes on between them.

use super::{Raw, config, eventually};
use offbeat_core::store::Receipt;
use offbeat_core::wire::Want;
use offbeat_core::wire::message::Joined;
use offbeat_net::Tensors;
use offbeat_net::checkpoint::checkpoints;
use offbeat_net::server::{CheckpointConfig, Every, Resume, Server, ServerConfig};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is gone after the test.
pub struct Place(pub PathBuf);

impl Place {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("offbeat-server-{}-{number}", std::process::id()));
        fs::remove_dir_all(&path).ok(); // of a test that was killed
        Self(path)
    }

    pub fn config(&self) -> ServerConfig {
        self.every(Every::Versions(1_000_000), Resume::Auto)
    }

    pub fn every(&self, every: Every, resume: Resume) -> ServerConfig {
        let directory = self.0.clone();
        ServerConfig { checkpoints: Some(CheckpointConfig { directory, every, resume }), ..config() }
    }

    pub fn numbers(&self) -> Vec<u64> {
        checkpoints(&self.0).unwrap().into_iter().map(|(number, _)| number).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A worker that pushes one value everywhere, step after step.
pub struct Steps {
    pub raw: Raw,
    pub read: (u64, u64),
    pub base: u64,
    pub sequence: u64,
}

impl Steps {
    pub fn of(server: &Server, id: &str) -> Self {
        let (mut raw, Joined { term, .. }) = Raw::joined(server, id);
        let pulled = raw.pull(term, None);
        Self { read: pulled.read, base: pulled.roots[0].0, raw, sequence: 0 }
    }

    pub fn push(&mut self, value: f32) {
        let receipt = self.try_push(value);
        assert!(receipt.applied, "{receipt:?}");
    }

    pub fn try_push(&mut self, value: f32) -> Receipt {
        self.sequence += 1;
        let answer = self.raw.push(self.sequence, self.read, self.base, value, Want::Parameters);
        (self.read, self.base) = (answer.read, answer.roots[0].0);
        answer.receipt().clone()
    }
}

/// Waits for the one with the model as it was given.
pub fn until_the_first(server: &Server) {
    eventually(server, "the first", |s| s["checkpoints"]["version"] == 0);
}

pub fn bytes(server: &Server) -> Vec<Vec<u8>> {
    let (_, tensors): Tensors = server.tensors().unwrap().unwrap();
    tensors
}

/// Copies a folder with all that is in it.
pub fn copy_files(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_files(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}
