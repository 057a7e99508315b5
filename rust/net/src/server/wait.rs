//! Waiting for the run's workers, as the owner of the server does.

use super::Server;
use super::error::ServerError;
use super::membership::{Members, Outcome, Patience};
use std::time::{Duration, Instant};

/// How often a wait asks whether it is interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(100);

impl Server {
    /// Waits until at least `n` workers have come and nobody has been there for the linger. `false`: the time is up.
    ///
    /// # Errors
    /// [`ServerError::AllLost`] if every worker was lost and none finished, [`ServerError::Interrupted`],
    /// [`ServerError::Stopped`], [`ServerError::Forked`].
    pub fn wait_for_workers(
        &self,
        n: usize,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<bool, ServerError> {
        let config = &self.shared.config;
        let patience = Patience { linger: config.linger, rejoin_grace: config.rejoin_grace };
        self.wait(timeout, interrupt, |members, over| {
            match members.outcome(n, patience, over, Instant::now()) {
                Outcome::Waiting => None,
                Outcome::Done => Some(Ok(())),
                Outcome::AllLost(causes) => Some(Err(ServerError::AllLost { causes })),
            }
        })
    }

    /// Waits until `n` workers have come. `false`: the time is up.
    ///
    /// # Errors
    /// [`ServerError::Interrupted`], [`ServerError::Stopped`], [`ServerError::Forked`].
    pub fn wait_until_joined(
        &self,
        n: usize,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<bool, ServerError> {
        self.wait(timeout, interrupt, |members, _| (members.num_joined() >= n).then_some(Ok(())))
    }

    fn wait(
        &self,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
        done: impl Fn(&Members, bool) -> Option<Result<(), ServerError>>,
    ) -> Result<bool, ServerError> {
        self.check()?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let mut wait = INTERRUPT_POLL;
            {
                let members = self.shared.members();
                if let Some(result) = done(&members, self.shared.is_over()) {
                    return result.map(|()| true);
                }
                if self.shared.is_stopping() {
                    return Err(ServerError::Stopped);
                }
                if let Some(deadline) = deadline {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    wait = wait.min(left);
                }
                drop(self.shared.wait_for_change(members, wait));
            }
            // Without a lock: it may run Python's signal handlers, which may ask for our status.
            if interrupt() {
                return Err(ServerError::Interrupted);
            }
        }
    }
}
