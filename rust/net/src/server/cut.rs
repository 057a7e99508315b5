//! A state of the store whose parts belong together, for whoever copies it while the run goes on.

use offbeat_core::store::{Cut, Store, StoreState};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Between two looks at what is still under way.
const LOOK: Duration = Duration::from_millis(1);

/// Takes a cut. Pushes that come later pause until those under way have ended, or `deadline` is over. To be called by
/// one thread at a time, with the model [whole](super::model::Model::whole).
pub(super) fn take(store: &Arc<Store>, deadline: Duration) -> StoreState {
    take_by(store, deadline, Cut::take)
}

/// The same with what belongs to the state: `take` takes the cut, and is called again until it gives something.
pub(super) fn take_by<R>(
    store: &Arc<Store>,
    deadline: Duration,
    mut take: impl FnMut(&Cut) -> Option<R>,
) -> R {
    let deadline = Instant::now() + deadline;
    let (_never, clock) = mpsc::channel::<()>();
    // Nobody sends: this is a short wait.
    let wait = || clock.recv_timeout(LOOK).ok();
    let cut = loop {
        match store.begin_cut() {
            Some(cut) => break cut,
            None => wait(),
        };
    };
    while !cut.open().is_empty() && Instant::now() < deadline {
        wait();
    }
    let open = cut.open();
    if !open.is_empty() {
        tracing::info!(?open, "a copy of the model was taken with pushes still under way");
    }
    loop {
        match take(&cut) {
            Some(taken) => return taken,
            None => wait(),
        };
    }
}
