//! A checkpoint in memory.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and may panic")]

use offbeat_core::checkpoint::{self, CheckpointError, Draft, Manifest, RunRecord};
use offbeat_core::store::{Life, Store, StoreConfig, StoreState};
use std::collections::BTreeMap;
use std::io::{Cursor, Error, ErrorKind};
use std::sync::Arc;

/// Files by name, the manifest among them.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// Of every life after the first.
pub(crate) const LAST_INCARNATION: u32 = 1000;

/// The state of a store as files.
pub(crate) fn written(store: &Store, state: &StoreState) -> Files {
    let mut draft = Draft::new(store.table(), store.layout(), state.clone()).unwrap();
    let mut files = Files::new();
    let mut entries = Vec::new();
    for name in draft.files() {
        let mut bytes = Vec::new();
        entries.push(draft.write(name, &mut bytes).unwrap());
        files.insert(name.to_owned(), bytes);
    }
    let manifest =
        draft.manifest(entries, RunRecord::default(), store.transaction(), "test").encode().unwrap();
    files.insert(checkpoint::MANIFEST.to_owned(), manifest);
    files
}

/// The manifest, once every file is as it says.
pub(crate) fn verified(files: &Files) -> Result<Manifest, CheckpointError> {
    let manifest = Manifest::decode(&files[checkpoint::MANIFEST])?;
    manifest.verify(opening(files))?;
    Ok(manifest)
}

/// The store that files describe.
pub(crate) fn restored(files: &Files, config: StoreConfig) -> Result<Arc<Store>, CheckpointError> {
    let manifest = verified(files)?;
    let life = Life { term: manifest.book.term + 1, last_incarnation: LAST_INCARNATION };
    checkpoint::restore(manifest, opening(files), config, life)
}

pub(crate) fn opening<'a>(files: &'a Files) -> impl FnMut(&'static str) -> std::io::Result<Cursor<&'a [u8]>> {
    move |name| {
        let bytes = files.get(name).ok_or_else(|| Error::from(ErrorKind::NotFound))?;
        Ok(Cursor::new(bytes.as_slice()))
    }
}

/// A store that goes on from the state of another, through files.
pub(crate) fn resumed(store: &Store, state: &StoreState, config: StoreConfig) -> Arc<Store> {
    restored(&written(store, state), config).unwrap()
}
