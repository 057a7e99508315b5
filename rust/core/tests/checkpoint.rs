//! Checkpoints as files: what is damaged is refused by name, what others read they can read.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod common;

use common::{Files, restored, verified, written};
use offbeat_core::checkpoint::{CheckpointError, Draft, MANIFEST, MODEL, Manifest, OPTIMIZER, restore};
use offbeat_core::checksum::checksum;
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::{FragmentKind, Presence};
use offbeat_core::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec};
use offbeat_core::store::book::{Answer, Reached, Unfinished};
use offbeat_core::store::oracle::FragmentStore;
use offbeat_core::store::{Admission, Life, PushHead, Root, RunSpec, Store, StoreConfig};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{Cursor, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

fn tensor(name: &str, shape: &[u64], dtype: Dtype, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: shape.into(), dtype, role }
}

/// Adam, after one push that brought all but one tensor, and one whose sender died before its first fragment.
fn store() -> Arc<Store> {
    let table = TensorTable::new(vec![
        tensor("seen", &[], Dtype::I64, Role::Buffer),
        tensor("layer.weight", &[300, 240], Dtype::F32, Role::Parameter),
        tensor("layer.bias", &[5], Dtype::F32, Role::Parameter),
        tensor("half", &[3], Dtype::BF16, Role::Parameter),
        tensor("mask", &[3], Dtype::Bool, Role::Buffer),
        tensor("absent", &[2], Dtype::F32, Role::Parameter),
    ]);
    let fill = &mut |_: usize, bytes: &mut [u8]| bytes.fill(1);
    let store = Store::new(Arc::new(table.unwrap()), StoreConfig::default(), 1, fill);
    let rule = Rule::Adam {
        betas: (0.9, 0.99),
        eps: 1e-8,
        weight_decay: 0.1,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }];
    let optimizer = OptimizerSpec { groups, momentum_correction: false };
    let (staleness, schedule) = (StalenessSpec::default(), Schedule::default());
    store.configure(RunSpec { optimizer, staleness, schedule, max_samples: None });
    let layout = Arc::clone(store.layout());
    let present = Presence::from_fn(layout.num_tensors(), |t| t != 5);
    let worker = store.register("a", 1).unwrap();
    let (term, base, samples, norm) = (1, 0, 8, None);
    let head = PushHead { worker, sequence: 1, term, base, epoch: 1, samples, present, norm };
    let Admission::Open(push) = store.admit(&head) else { panic!("a first push is admitted") };
    for index in layout.present_fragments(&head.present) {
        let mut block = store.staging(layout.fragments[index].push_bytes(&head.present));
        block.bytes_mut().fill(1);
        let checksum = checksum(block.bytes());
        drop(store.submit(&push, index, 0, block, checksum));
    }
    assert!(push.settle().applied);
    drop(store.admit(&PushHead { sequence: 2, base: 1, ..head }));
    store
}

fn files() -> Files {
    let store = store();
    let state = store.begin_cut().unwrap().take().unwrap();
    written(&store, &state)
}

#[test]
fn any_tool_reads_the_tensors_by_name() {
    let store = store();
    let state = store.begin_cut().unwrap().take().unwrap();
    let files = written(&store, &state);
    let model = SafeTensors::deserialize(&files[MODEL]).unwrap();
    let mut names = model.names();
    names.sort_unstable();
    assert_eq!(names, ["absent", "half", "layer.bias", "layer.weight", "mask", "seen"]);
    let half = model.tensor("half").unwrap();
    assert_eq!((half.dtype(), half.shape()), (safetensors::Dtype::F32, &[3][..]), "as the store keeps it");
    assert_eq!(model.tensor("seen").unwrap().shape(), &[] as &[usize]);
    assert_eq!(model.tensor("mask").unwrap().dtype(), safetensors::Dtype::BOOL);
    let weight = model.tensor("layer.weight").unwrap();
    let held: Vec<u8> = state.roots[..2].iter().flat_map(|root| root.held().to_vec()).collect();
    assert_eq!(weight.data(), &held[..weight.data().len()], "it spans two fragments");
    let header = files[MODEL].len() - model.iter().map(|(_, view)| view.data().len()).sum::<usize>();
    assert_eq!(header % 64, 0);
    let optimizer = SafeTensors::deserialize(&files[OPTIMIZER]).unwrap();
    for state in ["exp_avg", "exp_avg_sq"] {
        for name in ["layer.weight", "layer.bias", "half"] {
            assert!(optimizer.tensor(&format!("{state}.{name}")).is_ok(), "{:?}", optimizer.names());
        }
        assert!(optimizer.tensor(&format!("{state}.mask")).is_err());
    }
}

#[test]
fn the_manifest_says_what_happened_to_each_range() {
    let manifest = verified(&files()).unwrap();
    let of = |name: &str| -> Vec<(u64, u64, u64, Option<u64>)> {
        let ranges = manifest.ranges.iter().filter(|range| range.tensor == name);
        ranges.map(|range| (range.start, range.end, range.version, range.steps)).collect()
    };
    assert_eq!(of("layer.weight"), [(0, 72_000, 1, Some(1))]);
    assert_eq!(of("absent"), [(0, 2, 1, Some(0))], "it shares a fragment");
    assert_eq!(of("mask"), [(0, 3, 1, None)]);
    assert_eq!((manifest.book.version, manifest.book.samples), (2, 16));
}

#[test]
fn a_manifest_is_read_as_it_was_written_and_each_wrong_byte_is_refused() {
    let files = files();
    let bytes = &files[MANIFEST];
    let manifest = Manifest::decode(bytes).unwrap();
    assert_eq!(manifest.encode().unwrap(), *bytes);
    for end in 0..bytes.len() {
        assert!(Manifest::decode(&bytes[..end]).is_err(), "cut at {end}");
    }
    for place in 0..bytes.len() {
        let mut wrong = bytes.clone();
        wrong[place] ^= 1 << (place % 8);
        assert!(Manifest::decode(&wrong).is_err(), "byte {place}");
    }
    let mut wrong = bytes.clone();
    let digit = wrong.len() - 4; // of the digest
    wrong[digit] = if wrong[digit] == b'0' { b'1' } else { b'0' };
    let told = Manifest::decode(&wrong).unwrap_err().to_string();
    let digests: Vec<&str> = told.split([' ', ',']).filter(|word| word.len() == 64).collect();
    assert!(digests.len() == 2 && digests[0] != digests[1], "{told}");
    let mut longer = bytes.clone();
    longer.push(b' ');
    assert!(matches!(Manifest::decode(&longer), Err(CheckpointError::Damaged { file: MANIFEST, .. })));
}

#[test]
fn each_wrong_bit_of_a_file_is_refused_by_its_name() {
    let files = files();
    for name in [MODEL, OPTIMIZER] {
        let bits = files[name].len() * 8;
        for n in 0..500 {
            let bit = (n * 2_654_435_761) % bits;
            let mut wrong = files.clone();
            wrong.get_mut(name).unwrap()[bit / 8] ^= 1 << (bit % 8);
            let refused = restored(&wrong, StoreConfig::default()).err().unwrap();
            assert!(matches!(refused, CheckpointError::Damaged { file, .. } if file == name), "{refused}");
        }
        for length in [0, 7, 8, 100, files[name].len() - 1] {
            let mut wrong = files.clone();
            wrong.get_mut(name).unwrap().truncate(length);
            let refused = restored(&wrong, StoreConfig::default()).err().unwrap().to_string();
            assert!(refused.starts_with(&format!("{name} is damaged: it has {length} bytes")), "{refused}");
        }
        let mut wrong = files.clone();
        wrong.get_mut(name).unwrap().push(0);
        let refused = restored(&wrong, StoreConfig::default()).err().unwrap().to_string();
        assert!(refused.starts_with(&format!("{name} is damaged: it has more than")), "{refused}");
    }
}

#[test]
fn lengths_are_held_against_the_manifest_without_a_look_into_the_files() {
    let files = files();
    let manifest = verified(&files).unwrap();
    assert_eq!(manifest.bytes(), (files[MODEL].len() + files[OPTIMIZER].len()) as u64);
    let length = |name: &str| files[name].len() as u64;
    manifest.check_lengths(|name| Ok(length(name))).unwrap();
    for name in [MODEL, OPTIMIZER] {
        let told = |found: u64| {
            let other = |file| Ok(if file == name { found } else { length(file) });
            manifest.check_lengths(other).unwrap_err().to_string()
        };
        let due = length(name);
        let short = due - 1;
        assert_eq!(
            told(short),
            format!("{name} is damaged: it has {short} bytes where the manifest says {due}")
        );
        assert!(told(due + 1).ends_with(&format!("it has more than the {due} bytes that the manifest says")));
        let absent = manifest.check_lengths(|_| Err(ErrorKind::NotFound.into())).unwrap_err();
        assert!(absent.is_damage() && absent.to_string().ends_with("it is not there"), "{absent}");
    }
}

/// A manifest that was changed by somebody who can make its digest anew.
fn forged(change: impl FnOnce(&mut Manifest)) -> String {
    let mut files = files();
    let mut manifest = verified(&files).unwrap();
    change(&mut manifest);
    files.insert(MANIFEST.to_owned(), manifest.encode().unwrap());
    restored(&files, StoreConfig::default()).err().unwrap().to_string()
}

type Change = fn(&mut Manifest);

const AS_IT_CANNOT_BE: &str = "the worker in slot 0 has push 2 under way, as it cannot be";

fn under_way(manifest: &mut Manifest) -> &mut Unfinished {
    match &mut manifest.book.workers[0].recent[1].1 {
        Answer::Unfinished(unfinished) => unfinished,
        Answer::Settled(receipt) => panic!("{receipt:?}"),
    }
}

#[test]
fn a_manifest_that_does_not_hold_together_is_refused() {
    let told = forged(|m| m.format = 2);
    let due = "manifest.json is of format 2, this Offbeat reads format 1: use Offbeat test, which wrote it";
    assert_eq!(told, due);
    let told = forged(|m| m.files.retain(|entry| entry.name != MODEL));
    assert!(told.ends_with("it does not name model.safetensors"), "{told}");
    let told = forged(|m| m.files.retain(|entry| entry.name != OPTIMIZER));
    assert!(told.ends_with("the files that it names are [\"model.safetensors\"]"), "{told}");
    let told = forged(|m| m.files[1].name = "../optimizer.safetensors".into());
    assert!(told.ends_with("it names a file \"../optimizer.safetensors\""), "{told}");
    let told = forged(|m| m.ranges.retain(|range| range.tensor != "half"));
    assert!(told.ends_with("the ranges of \"half\" end at 0, not at 3"), "{told}");
    let told = forged(|m| m.ranges[0].tensor = "other".into());
    assert!(told.ends_with("a range of \"other\", which is no tensor"), "{told}");
    let told = forged(|m| m.ranges.iter_mut().for_each(|range| range.version = range.end));
    assert!(told.contains("do not fit its fragment"), "{told}");
    let told =
        forged(|m| m.ranges.iter_mut().filter(|r| r.tensor == "layer.bias").for_each(|r| r.steps = None));
    assert!(told.starts_with("optimizer.safetensors does not hold together: its header"), "{told}");
    let told = forged(|m| {
        let whole = m.ranges.iter().position(|range| range.tensor == "layer.weight").unwrap();
        let mut second = m.ranges[whole].clone();
        (second.start, m.ranges[whole].end, m.ranges[whole].version) = (100, 100, 2);
        m.ranges.insert(whole + 1, second);
    });
    assert!(told.contains("do not fit its fragment"), "{told}");
    let told = forged(|m| m.book.run.as_mut().unwrap().spec.optimizer.groups[0].lr = -1.0);
    assert!(told.contains("lr"), "{told}");
    let of_run = |m: &Manifest| m.book.run.as_ref().unwrap().spec.optimizer.clone();
    let told = forged(|m| {
        let mut bad = of_run(m);
        (m.run.agreed.optimizer, bad.groups[0].lr) = (Some(of_run(m)), -1.0);
        m.run.agreed.as_set = Some(bad);
    });
    assert!(told.starts_with("manifest.json does not hold together: ") && told.contains("lr"), "{told}");
    let told = forged(|m| m.run.agreed.optimizer = Some(of_run(m)));
    assert!(told.ends_with("agreed: 0 groups were set, and 1 are in force"), "{told}");
    let told = forged(|m| m.book.totals.staleness_histogram.clear());
    assert!(told.contains("totals has a histogram of 0 buckets"), "{told}");
    let changes: [(Change, &str); 17] = [
        (|m| m.book.run.as_mut().unwrap().epoch = u32::MAX, "run has epoch 4294967295"),
        (|m| under_way(m).ticket = 9, AS_IT_CANNOT_BE),
        (|m| under_way(m).ticket = 0, AS_IT_CANNOT_BE),
        (|m| under_way(m).reached.push(Reached(99, 2, 0)), AS_IT_CANNOT_BE),
        (|m| under_way(m).reached.push(Reached(0, 3, 0)), AS_IT_CANNOT_BE),
        (|m| under_way(m).progress.applied = usize::MAX, AS_IT_CANNOT_BE),
        (|m| under_way(m).present = vec![0xff], "of other tensors than the model's"),
        (|m| m.book.workers[0].recent.reverse(), "answers pushes [2, 1], and the last that came is 2"),
        (|m| m.book.version = u64::MAX, "counts to 18446744073709551615"),
        (|m| m.book.totals.applied = u64::MAX, "totals counts to"),
        (|m| m.book.last_incarnation = u32::MAX, "last_incarnation is 4294967295"),
        (|m| m.book.last_incarnation = 0, "has incarnation 1, not issued"),
        (|m| m.book.workers.push(m.book.workers[0].clone()), "the worker in slot 0 is out of order"),
        (|m| m.book.workers[0].slot = 65_536, "the worker in slot 65536 is out of order, or one too many"),
        (|m| m.book.workers[0].last_sequence = 0, "answers pushes [1, 2], and the last that came is 0"),
        (|m| m.book.workers[0].recent[0].0 = 0, "answers pushes [0, 2], and the last that came is 2"),
        (|m| m.ranges[0].version = u64::MAX, "counts too far"),
    ];
    for (change, due) in changes {
        let told = forged(change);
        assert!(told.contains(due), "{told}");
    }
    let told = forged(|m| {
        let mut second = m.book.workers[0].clone();
        second.slot = 1;
        m.book.workers.push(second);
    });
    assert!(told.contains("the worker in slot 1 is a second \"a\""), "{told}");
    let told = forged(|m| {
        let other = tensor("layer.bias", &[7], Dtype::F32, Role::Parameter);
        let tensors = m.table.tensors().iter().cloned();
        let changed = tensors.map(|t| if t.name == other.name { other.clone() } else { t });
        m.table = TensorTable::new(changed.collect()).unwrap();
        m.ranges.iter_mut().filter(|range| range.tensor == other.name).for_each(|range| range.end = 7);
    });
    assert!(told.contains("its header does not say the tensors that the manifest says"), "{told}");
}

/// A file that was changed by somebody who can make its digest anew.
fn forged_file(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut files = files();
    let mut manifest = verified(&files).unwrap();
    let bytes = files.get_mut(name).unwrap();
    change(bytes);
    let entry = manifest.files.iter_mut().find(|entry| entry.name == name).unwrap();
    entry.bytes = bytes.len() as u64;
    entry.sha256.clear();
    for byte in Sha256::digest(bytes.as_slice()) {
        write!(entry.sha256, "{byte:02x}").unwrap();
    }
    files.insert(MANIFEST.to_owned(), manifest.encode().unwrap());
    restored(&files, StoreConfig::default()).err().unwrap().to_string()
}

#[test]
fn a_parameter_that_would_be_infinite_as_a_half_is_refused() {
    let told = forged_file(MODEL, |bytes| {
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let at = tensors.tensor("half").unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
        bytes[at..at + 4].copy_from_slice(&f32::MAX.to_le_bytes());
    });
    assert!(told.contains("\"half\" holds") && told.contains("bfloat16"), "{told}");
}

#[test]
fn tensors_that_no_store_has_written_are_refused() {
    for name in [MODEL, OPTIMIZER] {
        let told = forged_file(name, |bytes| {
            let end = bytes.len();
            bytes[end - 200..].fill(0xff);
        });
        assert!(told.contains("holds NaN or an infinity"), "{told}");
        let told = forged_file(name, |bytes| bytes.push(0));
        assert!(told.contains("bytes where its tensors make"), "{told}");
        for place in [0, 7, 8, 100] {
            let told = forged_file(name, |bytes| bytes[place] ^= 1);
            assert!(told.ends_with("its header does not say the tensors that the manifest says"), "{told}");
        }
        let told = forged_file(name, Vec::clear);
        assert!(told.ends_with("it ends too early"), "{told}");
    }
}

/// A file that writes down how many roots a draft still holds at each write; the store holds each once.
struct Witness<'a> {
    roots: &'a [Weak<Root>],
    seen: Vec<usize>,
}

impl Write for Witness<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.seen.push(self.roots.iter().filter(|root| root.strong_count() > 1).count());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// How many roots are held while each file is written, and after it.
fn held_while_written(store: &Arc<Store>) -> Vec<Vec<usize>> {
    let state = store.begin_cut().unwrap().take().unwrap();
    let roots: Vec<Weak<Root>> = state.roots.iter().map(Arc::downgrade).collect();
    let mut draft = Draft::new(store.table(), store.layout(), state).unwrap();
    let files = draft.files();
    let write = |file| {
        let mut witness = Witness { roots: &roots, seen: vec![] };
        draft.write(file, &mut witness).unwrap();
        assert_eq!(witness.write(&[]).unwrap(), 0);
        witness.seen
    };
    files.into_iter().map(write).collect()
}

#[test]
fn a_draft_lets_go_of_a_fragment_as_soon_as_all_of_it_is_written() {
    let store = store();
    let num_buffers = store.layout().fragments.iter().filter(|f| f.kind == FragmentKind::Buffers).count();
    let [model, optimizer] = held_while_written(&store).try_into().unwrap();
    let with_state = store.layout().fragments.len() - num_buffers;
    assert_eq!(model.last(), Some(&with_state), "what the optimizer remembers is not written yet");
    assert_eq!(optimizer.last(), Some(&0));

    let table = TensorTable::new(vec![tensor("large", &[1 << 20], Dtype::F32, Role::Parameter)]).unwrap();
    let store = Store::new(Arc::new(table), StoreConfig::default(), 1, &mut |_, bytes| bytes.fill(0));
    let [model] = held_while_written(&store).try_into().unwrap();
    let fewer: BTreeSet<usize> = model.into_iter().collect();
    let num_fragments = store.layout().fragments.len();
    assert!(fewer.contains(&0) && fewer.len() > num_fragments / 2, "{fewer:?} of {num_fragments}");
}

#[test]
fn a_name_that_the_format_keeps_is_refused_before_anything_is_written() {
    let table = TensorTable::new(vec![tensor("__metadata__", &[1], Dtype::F32, Role::Parameter)]).unwrap();
    let store = Store::new(Arc::new(table), StoreConfig::default(), 1, &mut |_, bytes| bytes.fill(0));
    let state = store.begin_cut().unwrap().take().unwrap();
    let mut draft = Draft::new(store.table(), store.layout(), state).unwrap();
    assert_eq!(draft.files(), [MODEL], "nothing remembers, so there is no second file");
    let mut bytes = Vec::new();
    let refused = draft.write(MODEL, &mut bytes).unwrap_err();
    assert!(refused.to_string().contains("__metadata__") && bytes.is_empty(), "{refused}");
}

/// Where a checkpoint of format 1 lies, as the first build with that format wrote it.
fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint-format-1")
}

/// A small store after two pushes, the second of which has reached its parameters only.
fn golden_store() -> Arc<Store> {
    let table = TensorTable::new(vec![
        tensor("layer.weight", &[2, 2], Dtype::F32, Role::Parameter),
        tensor("layer.bias", &[2], Dtype::F16, Role::Parameter),
        tensor("num_batches_tracked", &[], Dtype::I64, Role::Buffer),
    ]);
    let fill = &mut |_: usize, bytes: &mut [u8]| bytes.fill(1);
    let store = Store::new(Arc::new(table.unwrap()), StoreConfig::default(), 1, fill);
    let rule =
        Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 0.01, nesterov: true, maximize: false };
    let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }];
    let optimizer = OptimizerSpec { groups, momentum_correction: false };
    let (staleness, schedule) = (StalenessSpec::default(), Schedule::default());
    store.configure(RunSpec { optimizer, staleness, schedule, max_samples: Some(1000) });
    let layout = Arc::clone(store.layout());
    let worker = store.register("worker-0", 1).unwrap();
    for (sequence, fragments) in [(1, 3), (2, 1)] {
        let (term, base, samples, norm) = (1, sequence - 1, 8, None);
        let present = Presence::all(layout.num_tensors());
        let head = PushHead { worker, sequence, term, base, epoch: 1, samples, present, norm };
        let Admission::Open(push) = store.admit(&head) else { panic!("it is admitted") };
        for index in 0..fragments {
            let mut block = store.staging(layout.fragments[index].push_bytes(&head.present));
            block.bytes_mut().fill(1);
            let checksum = checksum(block.bytes());
            drop(store.submit(&push, index, base, block, checksum));
        }
        if fragments == 3 {
            assert!(push.settle().applied);
        }
    }
    store
}

fn golden_files() -> Files {
    let store = golden_store();
    let state = store.begin_cut().unwrap().take().unwrap();
    written(&store, &state)
}

#[test]
#[ignore = "writes the golden checkpoint of a new format; one that is there is never to change"]
fn write_the_golden_checkpoint() {
    fs::create_dir_all(golden()).unwrap();
    for (name, bytes) in golden_files() {
        fs::write(golden().join(name), bytes).unwrap();
    }
}

#[test]
fn a_checkpoint_of_the_first_build_with_this_format_can_be_used() {
    let read = |name: &str| (name.to_owned(), fs::read(golden().join(name)).unwrap());
    let kept: Files = [MANIFEST, MODEL, OPTIMIZER].map(read).into();
    assert_eq!(kept[MODEL], golden_files()[MODEL], "a header is compared byte by byte");
    let (store, now) = (restored(&kept, StoreConfig::default()).unwrap(), golden_store());
    for fragment in 0..3 {
        assert_eq!(store.state(fragment), now.state(fragment));
    }
    let (store, now) = (store.status(), now.status());
    assert_eq!((store.version, store.samples, store.term), (2, 16, 2));
    assert_eq!((store.tickets, store.totals, store.workers), (now.tickets, now.totals, now.workers));
}

#[test]
fn a_life_in_a_term_of_before_is_refused() {
    let files = files();
    let manifest = verified(&files).unwrap();
    let life = Life { term: manifest.book.term, last_incarnation: 0 };
    let open = |name: &'static str| Ok(Cursor::new(files[name].as_slice()));
    let told = restore(manifest, open, StoreConfig::default(), life).err().unwrap().to_string();
    assert!(told.contains("term is 1, and the life that goes on from there would be 1"), "{told}");
}
