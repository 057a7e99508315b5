//! Waiting for the run's workers, as the owner of the server does.

use super::Server;
use super::error::ServerError;
use super::membership::{Members, Outcome, Patience, Pause};
use std::time::{Duration, Instant};

/// How often a wait asks whether it is interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(100);

impl Server {
    /// Waits until at least `n` workers have come and nobody has been there for the linger. `false`: the time is up.
    ///
    /// # Errors
    /// [`ServerError::NoneFinished`] if all workers are lost or have left, and none finished, [`ServerError::Interrupted`],
    /// [`ServerError::Stopped`], [`ServerError::Forked`].
    pub fn wait_for_workers(
        &self,
        n: usize,
        timeout: Option<Duration>,
        interrupt: &dyn Fn() -> bool,
    ) -> Result<bool, ServerError> {
        let config = &self.shared.config;
        let patience = Patience { linger: config.linger, rejoin_grace: config.rejoin_grace };
        let mut told = Pause::None;
        self.wait(timeout, interrupt, |members, over| {
            let now = members.looked()?;
            match members.outcome(n, patience, over, now) {
                Outcome::Waiting => {
                    let pause = members.pause(n, patience, now);
                    if pause != told {
                        announce(pause);
                        told = pause;
                    }
                    None
                }
                Outcome::Done => {
                    for (worker, cause) in members.missing().filter(|_| !over) {
                        tracing::warn!(worker, cause, "the work is done without a worker that was lost");
                    }
                    Some(Ok(()))
                }
                Outcome::NoneFinished(causes) => Some(Err(ServerError::NoneFinished { causes })),
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
        mut done: impl FnMut(&Members, bool) -> Option<Result<(), ServerError>>,
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

/// Says what is waited for when nobody is there, so that the wait does not look like a hang.
fn announce(pause: Pause) {
    match pause {
        Pause::None => {}
        Pause::Linger { linger } => tracing::info!(
            "all workers have gone: the wait is over in {} s unless one comes",
            linger.as_secs_f64()
        ),
        Pause::Grace { num_lost, grace, linger: Duration::ZERO } => tracing::info!(
            "nobody is there, {num_lost} lost: waiting up to {} s for them",
            grace.as_secs_f64()
        ),
        Pause::Grace { num_lost, grace, linger } => tracing::info!(
            "nobody is there, {num_lost} lost: waiting up to {} s for them, then {} s for anybody",
            grace.as_secs_f64(),
            linger.as_secs_f64()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Socket;
    use crate::server::ServerConfig;
    use crate::server::connection::Connection;
    use offbeat_core::store::WorkerKey;
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, mpsc};

    #[test]
    fn a_wait_that_wakes_from_a_standstill_first_takes_it_for_nobodys_grace() {
        let (grace, lease) = (Duration::from_secs(1), Duration::from_millis(400));
        let config =
            ServerConfig { rejoin_grace: grace, linger: Duration::ZERO, lease, ..ServerConfig::default() };
        let server = Server::start(config).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connection = {
            let _on_its_runtime = server.control.enter();
            Arc::new(Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
        };
        let (go_on, halted) = mpsc::channel::<()>();
        let (halts, has_halted) = mpsc::channel();
        server.control.spawn(async move {
            halts.send(()).unwrap();
            halted.recv().ok(); // blocks the thread, as SIGSTOP would: there is no look at the clock
        });
        has_halted.recv().unwrap();
        {
            let mut members = server.shared.members();
            let joined =
                members.join(Some("a".into()), (String::new(), None), [7; 16], connection, Instant::now());
            members.register::<()>(joined.incarnation, |_| Ok(WorkerKey { slot: 0, incarnation: 1 }));
            members.answered(joined.incarnation);
            members.lost(joined.incarnation, "killed", Instant::now());
        }
        let wait = |timeout| server.wait_for_workers(1, Some(timeout), &|| false);
        assert!(matches!(wait(grace * 2), Ok(false)), "nobody has looked at the clock");
        go_on.send(()).unwrap();
        assert!(matches!(wait(grace * 20), Err(ServerError::NoneFinished { .. })));
    }
}
