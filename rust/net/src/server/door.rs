//! Who stands at the door: connections that have not proved themselves yet. Only so many are heard at a time. Where all
//! places are taken, whoever has had one for longest, and for long enough, gives it to the next: else a thousand idle
//! connections would keep an honest worker waiting until each has used up its time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// What nobody takes from a connection: a round trip across an ocean, and some. A full queue of the listener's (1024)
/// passes 64 places in 4 s, so that who stands at its end is heard while he still waits for it (5 s an attempt).
const LEAST: Duration = Duration::from_millis(250);

/// The places at the door.
#[derive(Debug)]
pub(super) struct Door {
    free: Arc<Semaphore>,
    /// Who has one, in the order in which they came; and some who had.
    taken: VecDeque<(Instant, oneshot::Sender<()>)>,
}

/// A place at the door, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    _permit: OwnedSemaphorePermit,
    wanted: oneshot::Receiver<()>,
}

impl Door {
    pub(super) fn new(num_places: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(num_places)), taken: VecDeque::new() }
    }

    /// Takes a place as soon as there is one.
    ///
    /// # Cancel safety
    /// Safe, but somebody may have been asked to go for nobody.
    pub(super) async fn enter(&mut self) -> Place {
        self.taken.retain(|(_, ask)| !ask.is_closed());
        let patience = self.taken.front().map(|(since, _)| *since + LEAST);
        let free = match patience {
            None => Some(self.next().await),
            Some(end) => timeout_at(end, self.next()).await.ok(),
        };
        let permit = if let Some(permit) = free {
            permit
        } else {
            if let Some((_, ask)) = self.taken.pop_front() {
                ask.send(()).ok(); // it may have gone meanwhile, which is as good
            }
            self.next().await
        };
        let (ask, wanted) = oneshot::channel();
        self.taken.push_back((Instant::now(), ask));
        Place { _permit: permit, wanted }
    }

    async fn next(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed")
    }
}

impl Place {
    /// Resolves when somebody else is to have it.
    pub(super) async fn wanted(&mut self) {
        if (&mut self.wanted).await.is_err() {
            std::future::pending::<()>().await; // the door is gone, and nobody comes any more
        }
    }
}
