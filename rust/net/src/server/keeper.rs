//! The thread that writes checkpoints: the first when the model is in place, then when it is time, and the last when all
//! else has ended.

use super::checkpoints::{Checkpoints, Occasion};
use super::cut;
use super::error::ServerError;
use super::model::{Model, ResumedAt};
use super::shared::Shared;
use offbeat_core::checkpoint::RunRecord;
use offbeat_core::store::StoreState;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Between two looks at whether it is time.
const LOOK: Duration = Duration::from_millis(50);

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
    let mut is_last = false;
    loop {
        let is_due = |model: &&Arc<Model>| {
            let agreed = shared.agreement().agreed();
            checkpoints.is_due(&model.store, agreed, shared.roster(), is_last)
        };
        if let Some(model) = shared.model.get().filter(is_due) {
            if is_last {
                tracing::info!("the last checkpoint is being written");
            }
            let turn = checkpoints.turn();
            // It may have been another's turn since the first look.
            if is_due(&model) {
                let occasion = if is_last { Occasion::Last } else { Occasion::Due };
                save(shared, checkpoints, model, occasion);
            }
            drop(turn);
        }
        if is_last {
            return checkpoints.release();
        }
        is_last = !matches!(ends.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout));
        if let Some(model) = shared.model.get().filter(|_| is_last) {
            // Whoever replaces all values has done so, and the last one has them, or is told that it is too late.
            let _whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
            checkpoints.close();
        }
    }
}

/// Keeps the values of a term, which have just replaced all others, before the caller goes on: who is told that they are in
/// place is to find them in whatever comes after a crash. Beside the thread, which may be waiting to try again. Where it
/// fails, that is told; they are in place all the same, and the thread goes on trying.
pub(super) fn keep_term(shared: &Shared, checkpoints: &Checkpoints, model: &Model, term: u64) {
    let _turn = checkpoints.turn();
    if !checkpoints.has_term(term) {
        save(shared, checkpoints, model, Occasion::Replaced);
    }
}

/// Saves what there is now, in its [turn](Checkpoints::turn). What goes wrong is told.
fn save(shared: &Shared, checkpoints: &Checkpoints, model: &Model, occasion: Occasion) {
    let saved = unless_it_panics(|| {
        let (state, run) = now(shared, checkpoints, model);
        checkpoints.save(&model.store, state, run, occasion);
    });
    if let Err(what) = saved {
        let error = format!("the save in {} broke off: {what}", checkpoints.directory().display());
        checkpoints.tell_failure(error, model.store.version(), occasion);
    }
}

/// A panic is a failure too, and not the end of the thread: nobody would hear that no checkpoint is written any more.
fn unless_it_panics<T>(save: impl FnOnce() -> T) -> Result<T, String> {
    // Nothing is left half changed: what is on the disk is whole whenever it has its name.
    catch_unwind(AssertUnwindSafe(save)).map_err(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it does not say why").to_owned()
    })
}

/// The store's state and the run's, which belong together: who changes the run holds its lock until the store obeys.
fn now(shared: &Shared, checkpoints: &Checkpoints, model: &Model) -> (StoreState, RunRecord) {
    let _whole = model.whole.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut state, agreed) = cut::take_by(&model.store, shared.config.cut_deadline, |cut| {
        let agreement = shared.agreement();
        cut.take().map(|state| (state, agreement.agreed()))
    });
    let roster = shared.roster();
    for page in &mut state.book.workers {
        page.in_rounds = roster.contains(&page.incarnation);
    }
    let (run_id, port, blueprint) = (shared.run_id.clone(), shared.address.port(), model.blueprint.clone());
    let gone_back_to = checkpoints.gone_back_to((state.book.term, state.book.version));
    let is_as_resumed =
        |resumed: &&ResumedAt| (resumed.term, resumed.version) == (state.book.term, state.book.version);
    let from_term = model.resumed.as_ref().filter(is_as_resumed).map(|resumed| *resumed.from_terms.start());
    (state, RunRecord { run_id, port, blueprint, agreed, gone_back_to, from_term })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_that_panics_is_a_failure_with_its_words() {
        assert_eq!(unless_it_panics(|| true), Ok(true));
        let panics = |text: &str| -> Result<bool, String> { unless_it_panics(|| panic!("{text}")) };
        assert_eq!(
            unless_it_panics(|| -> bool { panic!("as it cannot be") }),
            Err("as it cannot be".to_owned())
        );
        assert_eq!(panics("fragment 7"), Err("fragment 7".to_owned()));
        assert!(unless_it_panics(|| -> bool { std::panic::panic_any(7) }).is_err());
    }
}
