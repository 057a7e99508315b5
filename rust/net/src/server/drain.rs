//! A server stops: everybody is told, and pushes that are under way have a while to end.

use super::connection::Phase;
use super::shared::Shared;
use std::collections::HashMap;
use std::net::Shutdown;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// A stopping server waits so long for pushes that are under way, in all and while nothing of one moves that should.
const DRAIN: Duration = Duration::from_secs(10);
const DRAIN_PROGRESS: Duration = Duration::from_secs(1);
/// Between two looks at them.
const DRAIN_LOOK: Duration = Duration::from_millis(2);

/// How a push or a pull that is under way got on while the server stops.
struct Pace {
    /// Bytes, both ways.
    moved: u64,
    since: Instant,
}

impl Pace {
    /// Whether it still does. What a checkpoint's cut pauses, or the store holds up, is not stuck: that ends by itself.
    fn gets_on(&mut self, phase: Phase, moved: u64, now: Instant) -> bool {
        if phase == Phase::Waiting || moved != self.moved {
            (self.moved, self.since) = (moved, now);
        }
        now.duration_since(self.since) < DRAIN_PROGRESS
    }
}

/// Tells everybody that the server stops, and ends what is waiting. Pushes that are under way have a while to end, as
/// long as something moves.
pub(super) async fn dismiss(shared: &Shared) {
    shared.members().tell_all(&shared.farewell());
    let refused = shared.refusal();
    let begun = Instant::now();
    let mut paces: HashMap<u64, Pace> = HashMap::new();
    loop {
        let now = Instant::now();
        let mut num_busy = 0;
        for (number, connection) in shared.connections() {
            if connection.thread.is_none() {
                continue;
            }
            let moved = connection.socket.received() + connection.socket.sent();
            let pace = paces.entry(number).or_insert(Pace { moved, since: now });
            let gets_on = connection.exchanging().is_some_and(|phase| pace.gets_on(phase, moved, now));
            if gets_on && now.duration_since(begun) < DRAIN {
                num_busy += 1;
            } else {
                connection.close(refused.code, &refused.message, Shutdown::Read);
            }
        }
        if num_busy == 0 {
            break;
        }
        sleep(DRAIN_LOOK).await;
    }
    shared.notify();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_that_waits_for_the_server_is_not_stuck_while_that_stops() {
        let begun = Instant::now();
        let mut pace = Pace { moved: 7, since: begun };
        let later = begun + DRAIN_PROGRESS * 3;
        assert!(pace.gets_on(Phase::Waiting, 7, later));
        assert!(
            pace.gets_on(Phase::Receiving, 7, later + DRAIN_PROGRESS / 2),
            "its peer has a second from then"
        );
        assert!(pace.gets_on(Phase::Receiving, 8, later + DRAIN_PROGRESS), "a byte came");
        assert!(!pace.gets_on(Phase::Receiving, 8, later + DRAIN_PROGRESS * 2));
    }
}
