//! A connection that is lost is made again: this process comes back as who it is, settles with the server what was under
//! way, and the call that found the loss goes on.

use super::config::Interrupt;
use super::connect::host;
use super::connection::{Turn, Unsettled};
use super::error::ClientError;
use super::join::{self, Entered, unless_interrupted};
use super::session::Inner;
use offbeat_core::store::{self, Claim, Receipt};
use offbeat_core::wire::message::{Back, Call, FINISHED_STOPPED, Join, Joined, RefusalCode, Reply};
use std::time::{Duration, Instant};

/// Connections that one call may lose before it gives up.
const MAX_LOSSES: usize = 100;
/// Of these so many without a pause.
const FREE_LOSSES: usize = 8;
/// Before another try where a server lets nobody in for long, or breaks every connection off.
const PAUSE: Duration = Duration::from_millis(100);
/// What to do where the server is there and has not this session.
const NEXT: &str = "A new worker can join it. A server keeps its run over a restart by its checkpoints: look at whether it was started with \
     the same checkpoint_dir as before, and whether that is still there";

impl ClientError {
    /// Whether another connection may help.
    fn is_of_the_connection(&self) -> bool {
        match self {
            Self::Lost { .. } | Self::Unreachable { .. } | Self::Timeout { .. } => true,
            Self::Refused { code, .. } => {
                matches!(
                    code,
                    RefusalCode::Lost
                        | RefusalCode::Timeout
                        | RefusalCode::Checksum
                        | RefusalCode::Restarting
                )
            }
            _ => false,
        }
    }
}

impl Inner {
    /// Does what needs a connection, again and again as long as that is lost and made again.
    pub(super) fn again<T>(
        &mut self,
        interrupt: &dyn Interrupt,
        call: &mut dyn FnMut(&mut Self) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        self.again_within(self.way.patience(), interrupt, call)
    }

    /// The same with another patience.
    pub(super) fn again_within<T>(
        &mut self,
        patience: Duration,
        interrupt: &dyn Interrupt,
        call: &mut dyn FnMut(&mut Self) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        for num_lost in 1..MAX_LOSSES {
            self.come_back(patience, interrupt)?;
            match call(self) {
                Err(_) if self.is_lost() => {}
                ended => return ended,
            }
            if num_lost > FREE_LOSSES {
                self.pause(interrupt)?;
            }
        }
        self.come_back(patience, interrupt)?;
        call(self)
    }

    fn pause(&self, interrupt: &dyn Interrupt) -> Result<(), ClientError> {
        let nap = unless_interrupted(interrupt, async {
            tokio::time::sleep(PAUSE).await;
            Ok(())
        });
        join::runtime(&self.connection.address)?.block_on(nap)
    }

    /// A turn has ended with an error that is no interrupt.
    pub(super) fn lose(&mut self, turn: Turn<'_>, error: ClientError) {
        let stopped = |reason: &Option<String>| reason.as_deref() == Some(FINISHED_STOPPED);
        let is_over = self.control.look(|events| events.fenced.is_some() || stopped(&events.finished));
        if is_over || self.way.patience().is_zero() || !error.is_of_the_connection() {
            self.broken = Some(error);
            return;
        }
        let (unsettled, ends) = self.connection.lose(turn);
        self.unsettled.extend(unsettled);
        for (awaited, receipt) in ends {
            self.tell(awaited, receipt);
        }
        self.lost = Some(error);
    }

    fn tell(&mut self, awaited: bool, receipt: Receipt) {
        if awaited {
            self.told.push_back(receipt);
        } else {
            self.keep_for_flush([receipt]);
        }
    }

    /// The push that goes on where it was broken off.
    pub(super) fn take_repeatable(&mut self) -> Option<Unsettled> {
        let at = self.unsettled.iter().position(|u| u.awaited && !u.gone)?;
        Some(self.unsettled.remove(at))
    }

    /// Nobody waits for pushes any more: what they were made of is gone, and their receipts come with a flush.
    pub(super) fn give_up_waiting(&mut self) {
        for unsettled in &mut self.unsettled {
            (unsettled.gone, unsettled.awaited) = (true, false);
        }
        self.keep_told_for_flush();
    }

    /// A push that could have been made again cannot be after all: it ends as it is, with the next connection.
    pub(super) fn give_up(&mut self, unsettled: Unsettled, why: &ClientError) {
        self.unsettled.push(Unsettled { gone: true, ..unsettled });
        let address = self.connection.address.clone();
        self.lose(Turn::wait(), ClientError::Lost { address, cause: why.to_string() });
    }

    /// Makes a connection again, if there is none.
    fn come_back(&mut self, limit: Duration, interrupt: &dyn Interrupt) -> Result<(), ClientError> {
        let Some(loss) = self.lost.clone() else { return Ok(()) };
        let begun = Instant::now();
        let address = self.connection.address.clone();
        tracing::warn!("{loss}; coming back, for up to {} s", limit.as_secs_f64());
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            let error = match self.try_to_come_back(&loss, left, interrupt) {
                Ok(()) => break,
                Err(error) => error,
            };
            if error == ClientError::Interrupted {
                return Err(error);
            }
            // Its places may be taken by connections of before, of whose end it has not heard.
            let is_full = matches!(error, ClientError::Refused { code: RefusalCode::Full, .. });
            if !(error.is_of_the_connection() || is_full) || begun.elapsed() >= limit {
                let error = self.no_way_back(error, &loss, begun.elapsed());
                self.broken = Some(error.clone());
                return Err(error);
            }
            tracing::debug!(%error, address, "the connection was lost again");
            self.pause(interrupt)?;
        }
        let (run, seconds) = (&self.session.run_id, begun.elapsed().as_secs_f64());
        tracing::warn!("back in run {run} at {address} after {seconds:.1} s");
        Ok(())
    }

    /// Why the session is over, where the server was not found again.
    fn no_way_back(&self, error: ClientError, loss: &ClientError, waited: Duration) -> ClientError {
        let address = self.connection.address.clone();
        let lost = |cause| ClientError::Lost { address: address.clone(), cause };
        let loss = match loss {
            ClientError::Lost { cause, .. } => cause.clone(),
            other => other.to_string(),
        };
        match error {
            ClientError::Refused { code: RefusalCode::RunId | RefusalCode::Forgotten, message } => {
                lost(format!("{loss}; the server that is there now has not this session: {message}. {NEXT}"))
            }
            error if error.is_of_the_connection() => {
                let waited = waited.as_secs_f64();
                lost(format!("{loss}; it did not come back within {waited:.1} s: {error}"))
            }
            error => error,
        }
    }

    /// One try: opens both connections, and settles what was under way.
    fn try_to_come_back(
        &mut self,
        loss: &ClientError,
        left: Duration,
        interrupt: &dyn Interrupt,
    ) -> Result<(), ClientError> {
        let unsettled = self.unsettled.iter().map(|u| store::Unsettled {
            sequence: u.push.sequence,
            samples: u.push.samples,
            gone: u.gone,
        });
        let flight = &self.connection.flight;
        let claim = Claim {
            incarnation: self.session.incarnation,
            term: self.way.term,
            settled: flight.settled,
            applied: flight.applied,
            unsettled: unsettled.collect(),
        };
        let join = Join {
            worker_id: Some(self.session.worker_id.clone()),
            run_id: Some(self.session.run_id.clone()),
            table: self.session.table.as_deref().cloned(),
            host: host(),
            in_flight: self.way.in_flight,
            back: Some(Back { claim, secret: self.way.secret }),
            attempt: None,
        };
        let Entered { stream, control, joined } = join::enter(&self.way.target, &join, left, interrupt)?;
        if joined.incarnation != self.session.incarnation {
            let cause = format!(
                "incarnation {} is back, and it says {}",
                self.session.incarnation, joined.incarnation
            );
            return Err(self.connection.broke(cause));
        }
        let Joined { term, model, run, keeps_checkpoints, answers, lost_updates, .. } = joined;
        self.connection.renew(stream);
        self.control = control;
        self.lost = None;
        (self.way.term, self.way.keeps_checkpoints) = (term, keeps_checkpoints);
        if lost_updates > 0 {
            tracing::warn!(
                "{lost_updates} updates of this worker's came after the checkpoint that the server went on from, and are lost"
            );
        }
        for (sequence, receipt) in answers {
            let Some(at) = self.unsettled.iter().position(|u| u.push.sequence == sequence) else { continue };
            let mut ended = self.unsettled.remove(at);
            self.connection.conclude(&mut ended.push, &receipt);
            self.tell(ended.awaited, receipt);
        }
        if let Some(unsaid) = self.unsettled.iter().find(|u| u.gone) {
            let sequence = unsaid.push.sequence;
            return Err(self.connection.broke(format!("it does not say what has become of push {sequence}")));
        }
        let has_optimizer = run.optimizer.is_some();
        self.set_run(run);
        if let Some(model) = model {
            self.adopt(model)?;
        }
        // One that was started again may not have heard of it.
        if let (false, Some((contribution, optimizer))) = (has_optimizer, self.way.configured.clone()) {
            match self.call(&Call::Configure { contribution, optimizer }, interrupt) {
                Ok(Reply::Configured { run }) => self.set_run(run),
                Ok(reply) => return Err(self.unexpected(&reply)),
                Err(ClientError::Interrupted) if !self.is_lost() && self.broken.is_none() => {
                    // Not with this connection: a push that is to go on would be passed over, and its number taken.
                    self.lose(Turn::wait(), loss.clone());
                    return Err(ClientError::Interrupted);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
