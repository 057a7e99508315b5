//! Where a worker stands in the store, once there is a model.

use super::end::End;
use super::model::Model;
use super::shared::Shared;
use offbeat_core::layout::Presence;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::Header;
use offbeat_core::wire::message::RefusalCode;
use std::sync::Arc;

/// A session's place in the store.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) model: Arc<Model>,
    pub(super) key: WorkerKey,
    /// Every tensor: what most pushes bring.
    pub(super) all: Presence,
}

impl Place {
    /// A worker's place in the store, if there is a model.
    pub(super) fn of(shared: &Shared, incarnation: u32, header: &Header) -> Result<Option<Self>, End> {
        let Some(model) = shared.model.get() else { return Ok(None) };
        match shared.members().register(incarnation, |id| model.store.register(id)) {
            Some(Ok(key)) => {
                let all = Presence::all(model.store.layout().num_tensors());
                Ok(Some(Self { model: Arc::clone(model), key, all }))
            }
            Some(Err(full)) => Err(End::refused(header, RefusalCode::Full, full.to_string())),
            None => Err(End::refused(header, RefusalCode::Fenced, "a newer process has this worker's name")),
        }
    }
}
