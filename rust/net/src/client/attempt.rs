//! When this process has tried to join, for a server that may hear of its tries in another order.

use offbeat_core::wire::message::Attempt;
use std::sync::OnceLock;
use std::time::Instant;

/// A clock of this process, and of those that it forks: the system's is the same in all of them.
static CLOCK: OnceLock<([u8; 16], Instant)> = OnceLock::new();

/// A try that is made now.
pub(super) fn now() -> std::io::Result<Attempt> {
    let (clock, begun) = if let Some(clock) = CLOCK.get() {
        *clock
    } else {
        let clock = (crate::handshake::random()?, Instant::now());
        *CLOCK.get_or_init(|| clock)
    };
    let at_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX); // after 584 years
    Ok(Attempt { clock, at_ns })
}
