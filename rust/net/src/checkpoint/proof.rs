//! A checkpoint put to the proof: everything is done that a server's start would do with it, whatever the settings that
//! the server is given, and nothing on the disk is changed.

use super::choice::{self, Choice};
use super::error::DirectoryError;
use super::folder::{self, Checkpoint};
use super::lives::Lives;
use super::survey::{Survey, unless_gone};
use super::watch::Watch;
use crate::tensors::{Tensors, copied};
use offbeat_core::store::{Life, Store, StoreConfig};
use std::path::Path;
use std::sync::Arc;

/// How often a directory is looked at anew, where its server removes what is being read.
const LOOKS: usize = 3;

/// Whether a checkpoint is still there; it is good then. The files are read twice, as at a start: for their digests, and
/// into a store.
///
/// # Errors
/// [`DirectoryError::Checkpoint`] with what is wrong, and in which file.
pub fn verify(folder: &Path, watch: &Watch<'_>) -> Result<bool, DirectoryError> {
    match unless_gone(folder, proved(folder, watch)) {
        Ok(_) => Ok(true),
        Err(DirectoryError::Gone { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads what the lives of a directory's servers have reserved, which a start does before all else.
///
/// # Errors
/// [`DirectoryError::Life`], [`DirectoryError::Io`].
pub fn verify_lives(directory: &Path) -> Result<(), DirectoryError> {
    Lives::open(directory).map(drop)
}

/// The model of a good checkpoint.
pub struct Model {
    /// The name of its folder.
    pub name: String,
    pub version: u64,
    pub tensors: Tensors,
    /// What is wrong with each newer one.
    pub passed_over: Vec<String>,
}

/// The model of the checkpoint at a path, or of the newest good one there.
///
/// # Errors
/// [`DirectoryError`]: what is wrong with that one, or with all, or that there is none.
pub fn model(path: &Path, watch: &Watch<'_>) -> Result<Model, DirectoryError> {
    let attempt = |folder: &Path| unless_gone(folder, model_of(folder, watch));
    let mut looks = 1;
    loop {
        let Survey::Directory { folders, .. } = Survey::of(path)? else { return attempt(path) };
        match choice::newest(path, folders, attempt) {
            Ok(None) => return Err(DirectoryError::Empty { path: path.to_owned() }),
            Ok(Some(Choice { used, damaged })) => {
                let passed_over = damaged.into_iter().map(|(_, error)| error.to_string()).collect();
                return Ok(Model { passed_over, ..used });
            }
            // There are newer ones.
            Err(DirectoryError::Gone { .. }) if looks < LOOKS => looks += 1,
            Err(error) => return Err(error),
        }
    }
}

fn model_of(folder: &Path, watch: &Watch<'_>) -> Result<Model, DirectoryError> {
    let store = proved(folder, watch)?;
    let reader = store.reader();
    let tensors = copied(&store, (0..store.layout().fragments.len()).map(|i| reader.root(i)));
    let (name, version) = (folder::short(folder), store.version());
    Ok(Model { name, version, tensors, passed_over: Vec::new() })
}

/// The store of a good checkpoint.
fn proved(folder: &Path, watch: &Watch<'_>) -> Result<Arc<Store>, DirectoryError> {
    let checkpoint = Checkpoint::unverified(folder)?;
    watch.begin(checkpoint.manifest.bytes().saturating_mul(2));
    checkpoint.verify(watch)?;
    let (book, transaction) = (&checkpoint.manifest.book, checkpoint.manifest.transaction);
    // A life that nobody lives: any later term would do.
    let life = Life { term: book.term.saturating_add(1), last_incarnation: book.last_incarnation };
    let config = StoreConfig { transaction, ..StoreConfig::default() };
    checkpoint.restore(config, life, watch)
}
