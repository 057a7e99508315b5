//! What a pull sees. Under "fragment" each root is loaded as it is next to be sent; under "model" one model root is
//! pinned for the whole pull. No reader waits for a writer.

use super::Store;
use super::model::ModelRoot;
use super::root::Root;
use futures_channel::oneshot;
use std::sync::Arc;

/// A pull in progress.
pub struct Reader {
    store: Arc<Store>,
    pinned: Option<Arc<ModelRoot>>,
    version: u64,
}

/// A pull's turn under the cap on live versions.
pub enum Turn {
    Now(Reader),
    /// Too many versions are pinned and none of them holds the reader's own pushes: ask again after this resolves.
    Wait(oneshot::Receiver<()>),
}

impl Reader {
    pub(super) fn new(store: Arc<Store>, pinned: Option<Arc<ModelRoot>>, version: u64) -> Self {
        Self { store, pinned, version }
    }

    /// The fragment's state: the newest at this call, or the pinned one.
    #[must_use]
    pub fn root(&self, fragment: usize) -> Arc<Root> {
        match &self.pinned {
            Some(model) => Arc::clone(&model.roots[fragment]),
            None => self.store.cells[fragment].root.load_full(),
        }
    }

    /// The model's version: everything ticketed before the reader was made may be missing from a fragment only if it
    /// is still arriving; under "model", exactly the pushes counted are in.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The (term, version) that is kept alive for this pull: none under "fragment".
    #[must_use]
    pub fn pinned(&self) -> Option<(u64, u64)> {
        self.pinned.as_ref().map(|model| (model.term, model.version))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(root) = self.pinned.take() {
            self.store.pins.release(root);
        }
    }
}
