//! The thread that writes checkpoints: the first when the model is in place, then when it is time, and the last when all
//! else has ended.

use super::cut;
use super::error::ServerError;
use super::model::Model;
use super::shared::Shared;
use offbeat_core::checkpoint::RunRecord;
use offbeat_core::store::StoreState;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Between two looks at whether it is time.
const LOOK: Duration = Duration::from_millis(50);
/// After a checkpoint that could not be written.
const RETRY: Duration = Duration::from_secs(10);

pub(super) struct Keeper {
    end: Sender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Starts it.
    pub(super) fn start(shared: &Arc<Shared>) -> Result<Self, ServerError> {
        let (end, ends) = channel();
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new()
            .name("offbeat-checkpoints".to_owned())
            .spawn(move || keep(&shared, &ends))
            .map_err(ServerError::System)?;
        Ok(Self { end, thread })
    }

    /// Writes the last one, when nothing changes any more.
    pub(super) fn finish(self) {
        let Self { end, thread } = self;
        drop(end);
        if thread.join().is_err() {
            tracing::error!("the thread that writes checkpoints had panicked");
        }
    }
}

fn keep(shared: &Shared, ends: &Receiver<()>) {
    let Some(checkpoints) = &shared.checkpoints else { return };
    let mut not_before = Instant::now();
    let mut is_last = false;
    loop {
        let is_time = is_last || Instant::now() >= not_before;
        let is_due = |model: &&Arc<Model>| {
            let agreed = shared.agreement().agreed();
            checkpoints.is_due(&model.store, &agreed, is_last)
        };
        if let Some(model) = shared.model.get().filter(|_| is_time).filter(is_due) {
            if is_last {
                tracing::info!("the last checkpoint is being written");
            }
            let (state, run) = now(shared, model);
            if !checkpoints.save(&model.store, state, run, is_last) {
                not_before = Instant::now() + RETRY;
            }
        }
        if is_last {
            return checkpoints.release();
        }
        is_last = !matches!(ends.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout));
    }
}

/// The store's state and the run's, which belong together: who changes the run holds its lock until the store obeys.
fn now(shared: &Shared, model: &Model) -> (StoreState, RunRecord) {
    let _whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
    let (state, agreed) = cut::take_by(&model.store, shared.config.cut_deadline, |cut| {
        let agreement = shared.agreement();
        cut.take().map(|state| (state, agreement.agreed()))
    });
    let (run_id, port, blueprint) = (shared.run_id.clone(), shared.address.port(), model.blueprint.clone());
    (state, RunRecord { run_id, port, blueprint, agreed })
}
