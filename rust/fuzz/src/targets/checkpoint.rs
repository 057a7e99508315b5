//! Reading a checkpoint that somebody has changed: any manifest, with the files that belong to it or others.

use crate::input::Input;
use crate::memory::within;
use offbeat_core::checkpoint::{Draft, MODEL, Manifest, OPTIMIZER, RunRecord, restore};
use offbeat_core::layout::Presence;
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Life, MAX_WORKERS, PushHead, Store, StoreConfig};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::io::{Cursor, Error, ErrorKind};
use std::sync::Arc;

/// Manifest, model, optimizer: as version 1 of the format was first written.
pub(crate) const GOLDEN: [&[u8]; 3] = [
    include_bytes!("../../../core/tests/golden/checkpoint-format-1/manifest.json"),
    include_bytes!("../../../core/tests/golden/checkpoint-format-1/model.safetensors"),
    include_bytes!("../../../core/tests/golden/checkpoint-format-1/optimizer.safetensors"),
];

/// Bytes of memory for a byte of the files, as with messages; for any of them, what a store is without its model; and for
/// a place among the workers, which the last one may have.
const BYTES_A_BYTE: usize = 100;
const BYTES_MORE: usize = 1 << 20;
const BYTES_A_SLOT: usize = 1 << 10;
/// Most changes to a manifest.
const MAX_CHANGES: usize = 8;

/// A checkpoint is refused, or becomes a store that can be used and written again.
///
/// # Panics
/// If one of that is not so.
pub fn checkpoint(bytes: &[u8]) {
    is_read(bytes);
}

fn is_read(bytes: &[u8]) -> bool {
    let mut input = Input::new(bytes);
    let (way, model, optimizer) = (input.byte(), input.byte(), input.byte());
    let files = [damaged(GOLDEN[1], model), damaged(GOLDEN[2], optimizer)];
    let manifest = match way % 3 {
        0 => input.rest().to_vec(),
        1 => sealed(input.rest()),
        _ => changed(input),
    };
    let Some(store) = read(&manifest, &files) else { return false };
    use_it(&store);
    write_again(&store);
    true
}

fn read(manifest: &[u8], files: &[Option<Vec<u8>>; 2]) -> Option<Arc<Store>> {
    let given = manifest.len() + files.iter().flatten().map(Vec::len).sum::<usize>();
    let manifest = within(given, BYTES_A_BYTE, BYTES_MORE, || Manifest::decode(manifest)).ok()?;
    let again = Manifest::decode(&manifest.encode().expect("it was short enough to be read"));
    assert_eq!(again.expect("what we write, we read"), manifest);
    let open = |name: &'static str| {
        let file = if name == MODEL { &files[0] } else { &files[1] };
        let bytes = file.as_deref().ok_or_else(|| Error::from(ErrorKind::NotFound))?;
        Ok(Cursor::new(bytes))
    };
    // Whoever can write files can write their digests, too; what verifying says is of no interest here.
    drop(manifest.verify(open));
    let config = StoreConfig { transaction: manifest.transaction, ..StoreConfig::default() };
    let life = Life { term: manifest.book.term.saturating_add(1), last_incarnation: 1000 };
    let slots = manifest.book.workers.iter().map(|page| page.slot as usize + 1).max().unwrap_or_default();
    let more = BYTES_MORE + slots.min(MAX_WORKERS) * BYTES_A_SLOT;
    within(given, BYTES_A_BYTE, more, || restore(manifest, open, config, life)).ok()
}

/// A worker comes and pushes.
fn use_it(store: &Arc<Store>) {
    let Ok(worker) = store.register("who was not there", u32::MAX) else { return };
    let present = Presence::all(store.table().len());
    let (term, base, epoch, samples, norm) = (store.term(), store.version(), 1, 1, None);
    drop(store.admit(&PushHead { worker, sequence: 1, term, base, epoch, samples, present, norm }));
}

fn write_again(store: &Arc<Store>) {
    if store.transaction() == Transaction::Model {
        return; // a cut would wait for the push that was just begun
    }
    let Some(cut) = store.begin_cut() else { return };
    let Some(state) = cut.take() else { return };
    // Counts that were as high as can be are too high by now.
    let Ok(mut draft) = Draft::new(store.table(), store.layout(), state) else { return };
    let mut entries = vec![];
    let mut files = [None, None];
    for name in draft.files() {
        let mut bytes = vec![];
        entries.push(draft.write(name, &mut bytes).expect("what was read can be written"));
        files[usize::from(name == OPTIMIZER)] = Some(bytes);
    }
    let manifest = draft.manifest(entries, RunRecord::default(), store.transaction(), "again");
    let manifest = manifest.encode().expect("it was short enough to be read");
    assert!(read(&manifest, &files).is_some(), "what was written again cannot be read");
}

/// A file as it is, or without its end, with a byte changed, with more behind it, or none.
fn damaged(file: &[u8], how: u8) -> Option<Vec<u8>> {
    let mut file = file.to_vec();
    let at = usize::from(how) * file.len() / 256;
    match how % 8 {
        0..=3 => {}
        4 => file.truncate(at),
        5 => file[at] ^= 0x40,
        6 => file.push(how),
        _ => return None,
    }
    Some(file)
}

/// A manifest's body closed with its digest, as [`Manifest::encode`] closes it.
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    let digest = Sha256::digest(body).iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes any text");
        text
    });
    [body, b",\"sha256\":\"", digest.as_bytes(), b"\"}\n"].concat()
}

/// The golden manifest with some of its values changed: what a fuzzer of JSON as text would rarely reach.
fn changed(mut input: Input<'_>) -> Vec<u8> {
    let mut manifest: Value = serde_json::from_slice(GOLDEN[0]).expect("it is JSON");
    if let Some(fields) = manifest.as_object_mut() {
        fields.remove("sha256");
    }
    for _ in 0..MAX_CHANGES {
        if input.is_empty() {
            break;
        }
        let (to, from) = (input.byte(), input.index(1 << 16));
        let all = count(&manifest);
        let other = nth(&mut manifest, &mut (from % all)).map(|value| value.clone()).unwrap_or_default();
        let at = input.index(all);
        let number = u64::from_le_bytes(input.array());
        let Some(value) = nth(&mut manifest, &mut { at }) else { continue };
        match (to % 12, &mut *value) {
            (0, _) => *value = number.into(),
            (1, _) => *value = (number as u32).into(),
            (2, _) => *value = (number % 8).into(),
            (3, _) => *value = f64::from_bits(number).into(),
            (4, _) => *value = Value::Null,
            (5, Value::Array(values)) => values.push(other),
            (6, Value::Array(values)) => drop(values.pop()),
            (7, Value::Array(values)) => values.extend(values.clone()),
            (8, Value::Array(values)) => values.reverse(),
            (9, Value::Number(n)) => *value = n.as_u64().unwrap_or_default().wrapping_add(1).into(),
            (10, Value::String(text)) => text.push(char::from(number as u8)),
            _ => *value = other,
        }
    }
    let mut body = manifest.to_string();
    body.pop(); // the brace that comes behind the digest
    sealed(body.as_bytes())
}

/// How many values there are in it, with itself.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(values) => values.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value with this number, counted from the outside in.
fn nth<'a>(value: &'a mut Value, left: &mut usize) -> Option<&'a mut Value> {
    if *left == 0 {
        return Some(value);
    }
    *left -= 1;
    match value {
        Value::Array(values) => values.iter_mut().find_map(|inner| nth(inner, left)),
        Value::Object(fields) => fields.values_mut().find_map(|inner| nth(inner, left)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::seed_of;

    #[test]
    fn what_is_as_it_was_written_is_read() {
        for name in ["golden", "golden-sealed", "golden-unchanged"] {
            assert!(is_read(&seed_of("checkpoint", name)), "{name}");
        }
        for name in
            ["model-cut", "model-missing", "attack-shape", "attack-large", "attack-slot", "attack-path"]
        {
            assert!(!is_read(&seed_of("checkpoint", name)), "{name}");
        }
    }
}
