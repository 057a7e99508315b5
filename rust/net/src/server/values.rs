//! The model's values as its owner copies and replaces them: all at once, while the run goes on.

use super::Server;
use super::cut;
use super::error::ServerError;
use super::keeper;
use super::model::Model;
use super::shared::Shared;
use super::snapshot::check_values;
use crate::tensors::{self, Tensors, gather};
use offbeat_core::store::{Load, Store};
use offbeat_core::wire::message::Event;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use tokio::runtime::Handle;

impl Server {
    /// A consistent copy of the model: its table and each tensor's bytes. `None` while there is no model.
    ///
    /// # Errors
    /// [`ServerError::Forked`].
    pub fn tensors(&self) -> Result<Option<Tensors>, ServerError> {
        self.check()?;
        let Some(model) = self.shared.model.get() else { return Ok(None) };
        let store = &model.store;
        let whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
        let state = cut::take(store, self.shared.config.cut_deadline);
        drop(whole); // the roots stay as they are
        Ok(Some(tensors::copied(store, state.roots)))
    }

    /// Replaces every value of the model. Pushes that were computed on the old ones are rejected. Where checkpoints are kept
    /// one has the new values when this returns; if it cannot be written, a warning says so, and they are in place.
    ///
    /// # Errors
    /// [`ServerError`] if there is no model yet, the bytes are not those of its tensors, a parameter is not finite, or the
    /// server keeps checkpoints and has stopped: no other would have the values.
    pub fn load_tensors(&self, tensors: &[impl AsRef<[u8]>]) -> Result<(), ServerError> {
        self.check()?;
        let model = self.shared.model.get().ok_or(ServerError::NoModel)?;
        check_values(model.store.table(), tensors)?;
        let layout = Arc::clone(model.store.layout());
        replace(&self.shared, model, &self.control, |_, _| true, &mut |i, to| {
            gather(&layout, tensors, i, to);
        })?;
        Ok(())
    }

    /// Goes back to a checkpoint, the newest or that of a version: model and optimizer state are what they were then, in
    /// a new term; counts go on. Gives the version whose values these are, once another one has them: a server that goes on from
    /// that goes on from there. If it cannot be written, a warning says so, and the model stays where it is.
    ///
    /// # Errors
    /// [`ServerError`] if no checkpoints are kept, there is none of that version, it is of another model, or it cannot be
    /// read; nothing has changed then.
    pub fn roll_back(&self, version: Option<u64>) -> Result<u64, ServerError> {
        self.check()?;
        let checkpoints = self.shared.checkpoints.as_ref().ok_or(ServerError::KeepsNone)?;
        let model = self.shared.model.get().ok_or(ServerError::NoModel)?;
        let store = &model.store;
        // Beside the run: it takes a while.
        let (mark, earlier) = checkpoints.recall(version, store.table(), self.shared.config.store())?;
        let whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
        checkpoints.reserve_term(store.term() + 1)?;
        model.is_initial.store(false, Ordering::Relaxed);
        let (term, now) = finish(&self.control, store, store.roll_back(&earlier));
        // Not before: what is saved meanwhile is all there is until one has these values.
        checkpoints.went_back(mark, (term, now));
        drop(whole);
        let then = mark.values_of;
        tracing::warn!(from = now, to = then, term, "the model is back where it was");
        self.shared.members().tell_all(&Event::Term { term });
        drop(earlier); // as large as the model
        keeper::keep_term(&self.shared, checkpoints, model, term);
        Ok(then)
    }
}

/// Replaces every value of the model, each fragment's by what `fill` writes, if it `gives_way` by its term and version: from
/// when that is asked on nobody else replaces any, and no push of that term is applied. Gives whether it did. Blocks;
/// `runtime` is to wait by.
///
/// # Errors
/// [`ServerError`] if the server keeps checkpoints and has stopped; nothing has changed then.
pub(super) fn replace(
    shared: &Shared,
    model: &Model,
    runtime: &Handle,
    gives_way: impl Fn(u64, u64) -> bool,
    fill: &mut dyn FnMut(usize, &mut [u8]),
) -> Result<bool, ServerError> {
    let store = &model.store;
    let whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(checkpoints) = &shared.checkpoints {
        checkpoints.reserve_term(store.term() + 1)?; // one that nothing comes to does no harm
    }
    let Some(load) = store.load_if(gives_way, fill) else { return Ok(false) };
    model.is_initial.store(false, Ordering::Relaxed);
    let (term, _) = finish(runtime, store, load);
    drop(whole);
    tracing::info!(term, "the model's values were replaced");
    shared.members().tell_all(&Event::Term { term });
    if let Some(checkpoints) = &shared.checkpoints {
        keeper::keep_term(shared, checkpoints, model, term);
    }
    Ok(true)
}

/// Drives a load to its end; gives its term, and the version at which it came.
fn finish(runtime: &Handle, store: &Arc<Store>, mut load: Load) -> (u64, u64) {
    let mut role = load.model_role.take();
    while let Some(held) = role {
        role = held.step();
    }
    for done in load.done {
        // Driven by whoever held the turn; an error says that the store is gone.
        runtime.block_on(done).ok();
    }
    (store.term(), load.version)
}
