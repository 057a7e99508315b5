//! The oracle: what workers were told of each push against what the server holds of it.

use crate::schedule::Schedule;
use crate::support::floats;
use offbeat_core::checkpoint::{MANIFEST, Manifest};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::Receipt;
use offbeat_core::store::book::Answer;
use offbeat_net::checkpoint::checkpoints;
use offbeat_net::server::Server;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// What a run came to.
pub(crate) type Coverage = BTreeSet<&'static str>;

/// What many runs have to come to.
pub(crate) const COVERED: [&str; 12] = [
    "a lost reply",
    "a push that was cut",
    "in parts",
    "connection_lost",
    "server_rolled_back",
    "optimizer_changed",
    "crash",
    "lost updates",
    "drain",
    "load",
    "fenced",
    "a new process",
];

/// A server that another went on from.
#[derive(Debug)]
pub(crate) struct Restart {
    first_term: u64,
    version: u64,
    term: u64,
    /// Incarnation and sequence number of pushes of which it holds parts alone or nothing, and says so.
    in_parts: BTreeSet<(u32, u64)>,
}

impl Restart {
    /// From the newest checkpoint in a directory.
    pub(crate) fn read(directory: &Path) -> Self {
        let (_, folder) = checkpoints(directory).unwrap().into_iter().max().unwrap();
        let book = Manifest::decode(&fs::read(folder.join(MANIFEST)).unwrap()).unwrap().book;
        let mut in_parts = BTreeSet::new();
        for page in &book.workers {
            for (sequence, answer) in &page.recent {
                let is_in_parts = match answer {
                    Answer::Unfinished(_) => true,
                    Answer::Settled(receipt) => !receipt.applied || receipt.reason.is_some(),
                };
                if is_in_parts {
                    in_parts.insert((page.incarnation, *sequence));
                }
            }
        }
        Self { first_term: 0, version: book.version, term: book.term, in_parts }
    }

    pub(crate) fn into(mut self, server: &Server) -> Self {
        self.first_term = number(&status(server)["term"]);
        self
    }
}

/// A push as its worker knows it.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) cell: usize,
    pub(crate) who: (u32, u64),
    /// `None`: its worker was fenced before it heard.
    pub(crate) receipt: Option<Receipt>,
    /// Whether its process lived to the end.
    pub(crate) is_of_last: bool,
}

pub(crate) fn status(server: &Server) -> Value {
    serde_json::from_str(&server.status_json().unwrap()).unwrap()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// Holds what was told against what is there.
pub(crate) fn judge(
    server: &Server,
    schedule: &Schedule,
    told: &[Told],
    restarts: &[Restart],
    loads: &[u64],
    coverage: &mut Coverage,
) {
    let (_, tensors) = server.tensors().unwrap().unwrap();
    // Parameters as a server sends them; half precision is exact to more than a half.
    let wide = |bytes: &[u8], is_brain: bool| -> Vec<f32> {
        let half = |b: &[u8; 2]| {
            if is_brain {
                half::bf16::from_le_bytes(*b).to_f32()
            } else {
                half::f16::from_le_bytes(*b).to_f32()
            }
        };
        bytes.as_chunks().0.iter().map(half).collect()
    };
    let params = [floats(&tensors[0]), wide(&tensors[1], true), wide(&tensors[2], false)];
    // The loads that are in what the server holds.
    let in_force = |load: &&u64| restarts.iter().all(|r| **load >= r.first_term || **load <= r.term);
    let last_load = loads.iter().filter(in_force).max().copied().unwrap_or(0);
    let mut due: BTreeMap<usize, &Told> = BTreeMap::new();
    for told in told {
        assert!(due.insert(told.cell, told).is_none(), "push {} was answered twice", told.cell);
    }
    let (mut whole, mut parts, mut open, mut lost, mut unheard) = (0, 0, 0, 0, 0);
    for cell in 0..params[0].len() {
        let held = params.each_ref().map(|p| p[cell].round());
        for (values, held) in params.iter().zip(held) {
            assert!((values[cell] - held).abs() < 0.1, "cell {cell} is torn: {}", values[cell]);
            assert!(held == 0.0 || held == 1.0, "push {cell} counts {held} times");
        }
        let sum: f32 = held.iter().sum();
        let Some(told) = due.get(&cell) else {
            assert_eq!(sum, 0.0, "nobody has pushed {cell}");
            continue;
        };
        let is_model = schedule.transaction == Transaction::Model;
        assert!(!is_model || sum == 0.0 || sum == 3.0, "push {cell} is there in parts: {held:?}");
        let Some(receipt) = &told.receipt else {
            open += 1;
            continue;
        };
        let after = || restarts.iter().filter(|r| receipt.term < r.first_term);
        let is_undone = after().any(|r| receipt.version > r.version);
        let is_named = after().any(|r| r.in_parts.contains(&told.who));
        let is_loaded_over = receipt.term < last_load;
        let fits = match (receipt.applied, receipt.reason) {
            (false, _) => sum == 0.0,
            _ if is_undone || is_loaded_over => sum == 0.0,
            _ if is_named => true,
            (true, None) => sum == 3.0,
            // Of one in parts it may be the buffers alone that have come, or have not.
            (true, Some(_)) => !is_model && (sum < 3.0 || schedule.has_buffers),
        };
        assert!(fits, "push {cell} {told:?}: {held:?}, {restarts:?}, loads {loads:?}");
        if receipt.applied {
            let counts = if is_undone {
                &mut lost
            } else if is_named {
                &mut open
            } else {
                &mut whole
            };
            *counts += 1;
            unheard += u64::from(is_undone && !told.is_of_last);
            parts += u64::from(receipt.reason.is_some());
        }
        if receipt.duplicate {
            coverage.insert("a lost reply");
        }
        if receipt.applied && receipt.reason.is_some() {
            coverage.insert("in parts");
        }
        if let Some(reason) = receipt.reason {
            let is_plain = matches!(
                reason,
                Reason::ServerRolledBack | Reason::OptimizerChanged | Reason::ConnectionLost
            );
            // A process that was replaced may be told so before its connection ends.
            let is_replaced = reason == Reason::Fenced && !told.is_of_last;
            assert!(is_plain || is_replaced, "push {cell}: {receipt:?}");
            coverage.insert(reason.name());
        }
    }
    let status = status(server);
    let tickets = &status["tickets"];
    assert_eq!(tickets["open"], 0, "{tickets}");
    let applied = number(&tickets["applied"]) + number(&tickets["partial"]);
    assert!((whole..=whole + open).contains(&applied), "{whole} and {open} in doubt: {tickets}");
    assert!(number(&tickets["partial"]) <= parts + open, "{parts} in parts, {open} in doubt: {tickets}");
    let issued = number(&tickets["issued"]);
    assert_eq!(issued, applied + number(&tickets["dropped"]), "{tickets}");
    let counted = number(&status["lost_updates"]);
    // Of a process that ended before the crash nobody says what it had been told.
    let range = lost - unheard..=lost + open;
    assert!(range.contains(&counted), "{counted} lost, due {range:?}: {told:?} {restarts:?}");
    if counted > 0 {
        coverage.insert("lost updates");
    }
}
