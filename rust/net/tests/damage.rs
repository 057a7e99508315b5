//! A checkpoint of a server with one bit wrong, or cut short: it is refused by its file's name, it is set aside, and the
//! one before is gone on with. Each time both is logged.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test fails")]

mod common;

use common::kept::copy_files;
use common::{Raw, config, eventually, floats, start_with, tensor};
use offbeat_core::checkpoint::{MANIFEST, MODEL, OPTIMIZER};
use offbeat_core::spec::{Group, OptimizerSpec, Rule};
use offbeat_core::store::{Life, StoreConfig};
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::Want;
use offbeat_core::wire::message::Joined;
use offbeat_net::checkpoint::{Checkpoint, Directory, Watch};
use offbeat_net::server::{CheckpointConfig, Every, Resume, Server, ServerConfig};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

const FILES: [&str; 3] = [MANIFEST, MODEL, OPTIMIZER];
const ELEMENTS: usize = 1000;
/// How often the server's worker pushes, and so how often it saves after the first time.
const PUSHES: u64 = 3;

/// A directory in which a server has kept three checkpoints.
struct Place {
    path: PathBuf,
    directory: Directory,
    /// The files of the newest, as they were written.
    good: BTreeMap<&'static str, Vec<u8>>,
    heard: Heard,
}

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("offbeat-{name}-{}", std::process::id()));
        fs::remove_dir_all(&path).ok(); // of a test that was killed
        serve(&path);
        let folder = path.join("checkpoint-000004");
        let good = FILES.map(|file| (file, fs::read(folder.join(file)).unwrap())).into();
        let directory = Directory::open(&path).unwrap();
        let place = Self { path, directory, good, heard: Heard::default() };
        assert_eq!(place.version(), PUSHES, "as it is, the newest is used");
        assert_eq!(place.heard.taken(), [] as [String; 0]);
        place
    }

    fn newest(&self) -> PathBuf {
        self.path.join("checkpoint-000004")
    }

    /// The version that a server would go on from.
    fn version(&self) -> u64 {
        let restored = self.heard.during(|| {
            self.directory.newest(|checkpoint| {
                let book = &checkpoint.manifest.book;
                let after = Life { term: book.term, last_incarnation: book.last_incarnation };
                let store = checkpoint.restore(
                    StoreConfig::default(),
                    self.directory.next_life(after),
                    &Watch::none(),
                )?;
                Ok(store.version())
            })
        });
        restored.unwrap().unwrap()
    }

    /// Looks that the newest is refused with such a file in it, and returns what is said of that; then all is as before.
    fn refused(&self, file: &str, wrong: &[u8]) -> String {
        fs::write(self.newest().join(file), wrong).unwrap();
        assert_eq!(self.version(), PUSHES - 1, "the one before is used");
        let heard = self.heard.taken();
        let [refused, aside] = heard.as_slice() else { panic!("{file}: {heard:?}") };
        let folder = self.newest();
        let due = format!(
            "ERROR a checkpoint cannot be used: the one before it is tried error={}: {file} is damaged: ",
            folder.display()
        );
        let what = refused.strip_prefix(&due).unwrap_or_else(|| panic!("{refused}")).to_owned();
        let to = self.path.join("damaged-checkpoint-000004");
        let due = format!("WARN a checkpoint is set aside from={} to={}", folder.display(), to.display());
        assert_eq!(*aside, due);
        assert_eq!(fs::read(to.join(file)).unwrap(), wrong, "it is kept as it was found");
        fs::rename(&to, &folder).unwrap();
        fs::write(folder.join(file), &self.good[file]).unwrap();
        what
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.path).ok();
    }
}

/// What is logged.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Heard {
    fn during<R>(&self, what: impl FnOnce() -> R) -> R {
        tracing::dispatcher::with_default(&Dispatch::new(self.clone()), what)
    }

    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Subscriber for Heard {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        }
        .unwrap();
    }
}

/// Runs a server with a small model and Adam, whose worker pushes; it saves after each push.
fn serve(path: &Path) {
    let rule = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.01,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }];
    let optimizer = Some(OptimizerSpec { groups, momentum_correction: false });
    let table = TensorTable::new(vec![tensor("w", ELEMENTS, Role::Parameter)]).unwrap();
    let server = start_with(ServerConfig { optimizer, ..keeping(path) }, table, &[floats(ELEMENTS, 0.5)]);
    let saved = |version: u64| eventually(&server, "a save", |s| s["checkpoints"]["version"] == version);
    saved(0);
    let (mut raw, Joined { term, .. }) = Raw::joined(&server, "a");
    let pulled = raw.pull(term, None);
    let (mut read, mut base) = (pulled.read, pulled.roots[0].0);
    for sequence in 1..=PUSHES {
        raw.push_head(sequence, read, Want::Parameters, None);
        raw.fragment(sequence, 0, base, &floats(ELEMENTS, 1.5));
        let answer = raw.answer();
        assert!(answer.receipt().applied);
        (read, base) = (answer.read, answer.roots[0].0);
        saved(sequence);
    }
    server.stop();
}

fn keeping(path: &Path) -> ServerConfig {
    let kept =
        CheckpointConfig { directory: path.to_owned(), every: Every::Versions(1), resume: Resume::Auto };
    ServerConfig { checkpoints: Some(kept), ..config() }
}

/// Numbers that look random and are the same in every run (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).unwrap()
    }
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

#[test]
fn each_of_a_thousand_wrong_bits_is_refused_by_name_and_the_one_before_is_used() {
    let place = Place::new("bits");
    let mut numbers = Numbers(1);
    let all: usize = place.good.values().map(Vec::len).sum();
    let mut hit: BTreeMap<&str, usize> = BTreeMap::new();
    let mut by_digest_of_the_manifest = 0;
    for _ in 0..1000 {
        let mut bit = numbers.below(all * 8);
        let (file, good) = place
            .good
            .iter()
            .find(|(_, good)| {
                let is_here = bit < good.len() * 8;
                bit -= if is_here { 0 } else { good.len() * 8 };
                is_here
            })
            .unwrap();
        let mut wrong = good.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let said = place.refused(file, &wrong);
        *hit.entry(*file).or_default() += 1;
        if *file == MANIFEST {
            // Some bits make it no text, or hide where its digest is; all others are the digest's to find.
            if said.starts_with("the SHA-256 of what stands before its last field is ") {
                by_digest_of_the_manifest += 1;
                assert!(said.contains(", that says "), "{said}");
            }
        } else {
            let due = format!("its SHA-256 is {}, the manifest says {}", hex(&wrong), hex(good));
            assert_eq!(said, due);
        }
    }
    assert!(FILES.iter().all(|file| hit[file] > 100), "{hit:?}");
    assert!(by_digest_of_the_manifest > hit[MANIFEST] / 2, "{by_digest_of_the_manifest} of {hit:?}");
}

#[test]
fn the_digest_that_a_manifest_has_and_the_one_that_it_should_have_are_both_said() {
    let place = Place::new("digests");
    let good = &place.good[MANIFEST];
    let text = std::str::from_utf8(good).unwrap();
    let end = text.rfind(",\"sha256\":\"").unwrap();
    let mut wrong = good.clone();
    wrong[1] = b'\'';
    let said = place.refused(MANIFEST, &wrong);
    assert_eq!(
        said,
        format!(
            "the SHA-256 of what stands before its last field is {}, that says {}",
            hex(&wrong[..end]),
            hex(&good[..end])
        )
    );
    let long = text.replace(&hex(&good[..end]), &"0".repeat(1000));
    let said = place.refused(MANIFEST, long.as_bytes());
    assert_eq!(said, "its end, a SHA-256, is missing", "nobody's text is told without end");
}

#[test]
fn a_manifest_that_ends_at_any_byte_is_refused_by_name_and_the_one_before_is_used() {
    let place = Place::new("manifest");
    let good = &place.good[MANIFEST];
    assert!(good.len() > 1000);
    for end in 0..good.len() {
        let said = place.refused(MANIFEST, &good[..end]);
        assert!(
            said.ends_with(" is missing") || said.starts_with("where its SHA-256"),
            "cut at {end}: {said}"
        );
    }
}

#[test]
fn data_that_ends_too_early_is_refused_by_name_and_the_one_before_is_used() {
    let place = Place::new("lengths");
    let mut numbers = Numbers(2);
    for file in [MODEL, OPTIMIZER] {
        let good = &place.good[file];
        let whole = good.len();
        let random: Vec<usize> = (0..98).map(|_| numbers.below(whole)).collect();
        for end in [0, whole - 1].into_iter().chain(random) {
            let said = place.refused(file, &good[..end]);
            assert_eq!(said, format!("it has {end} bytes where the manifest says {whole}"));
        }
    }
}

#[test]
fn a_server_goes_on_from_the_one_before_a_damaged_one() {
    let place = Place::new("served");
    let Place { path, good, .. } = &place;
    let mut wrong = good[OPTIMIZER].clone();
    *wrong.last_mut().unwrap() ^= 0x80;
    let another = path.with_extension("copy");
    fs::remove_dir_all(&another).ok(); // of a test that was killed
    copy_files(path, &another);
    fs::write(another.join("checkpoint-000004").join(OPTIMIZER), wrong).unwrap();
    let server = place.heard.during(|| Server::start(keeping(&another)).unwrap());
    assert_eq!(common::status(&server)["version"], PUSHES - 1);
    let heard = place.heard.taken();
    assert!(heard[0].contains("optimizer.safetensors is damaged: its SHA-256 is "), "{heard:?}");
    server.stop();
    let newest = Checkpoint::verified(&another.join("checkpoint-000005"), &Watch::none()).unwrap();
    assert_eq!(newest.manifest.book.version, PUSHES - 1, "which is saved again, under a number of its own");
    fs::remove_dir_all(&another).unwrap();
}
