//! A session from the inside: one turn on the connection after another, driven by the thread that calls.

use super::config::{Interrupt, Session};
use super::connection::{Connection, Step, Turn, Unsettled};
use super::control::Control;
use super::error::ClientError;
use super::flight::{End, Pending};
use super::held::Held;
use super::model::Model;
use super::momentum::Momentum;
use super::outgoing::Outgoing;
use super::silence::Silence;
use super::stream::LOOK;
use super::way::Way;
use crate::frame::FrameError;
use offbeat_core::optim::Isa;
use offbeat_core::spec::Contribution;
use offbeat_core::store::Receipt;
use offbeat_core::wire::message::{Call, ModelInfo, Parting, Reply, RunConfig};
use offbeat_core::wire::{Header, Kind, encode};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// After the control connection's end the data connection has so long to say why, or to end too.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// This process stood still itself, if it looks up so late: what has come meanwhile is still to be read.
const STANDSTILL: Duration = Duration::from_secs(2);
/// How long an interrupted call goes on with what it had begun.
const GRACE: Duration = Duration::from_millis(500);
/// Receipts of pushes whose call was broken off, kept for `flush`; older ones go.
const MAX_UNCLAIMED: usize = 64;

/// Whether a message that carries what the caller gave fits a frame.
pub(super) fn check_size(kind: Kind, payload: &[u8]) -> Result<(), ClientError> {
    let (bytes, cap) = (payload.len(), kind.cap());
    if bytes > cap as usize {
        return Err(ClientError::bad_input(format!("a {kind:?} of {bytes} bytes; at most {cap} fit")));
    }
    Ok(())
}

/// Everything of a client that is not its fork check.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) session: Session,
    /// What it has told the server that its pushes carry.
    pub(super) contribution: Option<Contribution>,
    pub(super) connection: Connection,
    pub(super) control: Control,
    pub(super) isa: Isa,
    /// Of pushes whose call was broken off.
    pub(super) unclaimed: VecDeque<Receipt>,
    /// What it needs to come back, and is to settle then.
    pub(super) way: Way,
    /// Why the connection is gone, until there is another one.
    pub(super) lost: Option<ClientError>,
    /// What was under way then.
    pub(super) unsettled: Vec<Unsettled>,
    /// Receipts of pushes that a call waits for, which came with a new connection.
    pub(super) told: VecDeque<Receipt>,
    /// Why the session is over.
    pub(super) broken: Option<ClientError>,
}

impl Inner {
    /// Whether the session can go on.
    pub(super) fn check(&self) -> Result<(), ClientError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        match self.control.look(|events| events.fenced.clone()) {
            Some(message) => Err(ClientError::Fenced { message }),
            None => Ok(()),
        }
    }

    /// Whether there is no connection at the moment.
    pub(super) const fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    pub(super) fn model(&self) -> Result<Arc<Model>, ClientError> {
        let none =
            || ClientError::out_of_order("the server has no model yet; bring one with init, or wait for it");
        self.connection.model.clone().ok_or_else(none)
    }

    /// Takes the server's model for ours; nothing of it has been read.
    pub(super) fn adopt(&mut self, info: ModelInfo) -> Result<(), ClientError> {
        let ModelInfo { table, blueprint } = info;
        if self.session.table.as_deref() == Some(&table) {
            return Ok(());
        }
        if self.connection.held.as_ref().is_some_and(|held| held.ready) {
            // What is in flight would be delivered by another layout than it was asked for.
            return Err(self.broke("the server's model has become another".to_owned()));
        }
        let model = Arc::new(Model::new(Arc::new(table)));
        self.session.table = Some(model.table.clone());
        self.session.blueprint = blueprint;
        self.connection.held = Some(Held::new(&model));
        self.connection.inbound.expect(&model);
        self.connection.model = Some(model);
        self.reset_momentum();
        Ok(())
    }

    /// Takes what is in force in the run. A velocity belongs to one optimizer.
    pub(super) fn set_run(&mut self, run: RunConfig) {
        let same = run.epoch == self.session.run.epoch;
        self.session.run = run;
        if !same {
            self.reset_momentum();
        }
    }

    /// Asks for the run anew, after a push was made for an optimizer that is no longer in force.
    pub(super) fn refresh_run(&mut self, interrupt: &dyn Interrupt) -> Result<(), ClientError> {
        let call = match self.contribution {
            Some(contribution) => Call::Configure { contribution, optimizer: None },
            None => Call::WaitModel,
        };
        match self.call(&call, interrupt)? {
            Reply::Configured { run } | Reply::Model { run, .. } => self.set_run(run),
            reply => return Err(self.unexpected(&reply)),
        }
        // Pushes that were in flight were answered before the reply.
        self.connection.outdated = false;
        Ok(())
    }

    pub(super) fn reset_momentum(&mut self) {
        let keep = self.connection.keep;
        let RunConfig { momentum_correction, optimizer, .. } = &self.session.run;
        self.connection.momentum = match (&self.connection.model, optimizer) {
            (Some(model), Some(optimizer)) if *momentum_correction => {
                Some(Momentum::new(model, optimizer, keep))
            }
            (Some(_) | None, Some(_) | None) => None,
        };
    }

    /// Drives the connection until `until` is content. An interrupt leaves the connection in order, any other error
    /// ends the session.
    pub(super) fn turn(
        &mut self,
        mut turn: Turn<'_>,
        interrupt: &dyn Interrupt,
        until: &dyn Fn(&Connection, &Turn<'_>) -> bool,
    ) -> Result<(), ClientError> {
        let result = self.drive(&mut turn, interrupt, until);
        match &result {
            Ok(()) => {
                self.connection.tidy(turn);
                self.control.count_call();
            }
            Err(ClientError::Interrupted) => {
                self.connection.break_off(turn);
                // The server cuts a connection that stands still in the middle of a frame, and the next call may be
                // minutes away: most often what is left takes no time.
                let begun = Instant::now();
                let patience = || begun.elapsed() > GRACE;
                let settled: &dyn Fn(&Connection, &Turn<'_>) -> bool =
                    &|connection, _| connection.is_settled();
                match self.drive(&mut Turn::wait(), &patience, settled) {
                    Ok(()) | Err(ClientError::Interrupted) => {}
                    Err(error) => self.lose(Turn::wait(), error),
                }
            }
            Err(error) => self.lose(turn, error.clone()),
        }
        result
    }

    fn drive(
        &mut self,
        turn: &mut Turn<'_>,
        interrupt: &dyn Interrupt,
        until: &dyn Fn(&Connection, &Turn<'_>) -> bool,
    ) -> Result<(), ClientError> {
        let Self { connection, control, .. } = self;
        let mut looked = Instant::now();
        let (mut silence, mut is_silent) = (Silence::since(looked), true);
        connection.stream.hurry(); // a call that was broken off may have announced a wait
        loop {
            let stuck = match connection.step(turn, until) {
                Poll::Ready(Ok(Step::Done)) => {
                    if !silence.is_said() {
                        return Ok(()); // as nearly always: without a look at the clock
                    }
                    connection.tell_of_silence(&mut silence, false, Instant::now());
                    return Ok(());
                }
                Poll::Ready(Ok(Step::More)) => false,
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => true,
            };
            is_silent &= stuck;
            if stuck {
                let lost = |error| ClientError::from_frame(&connection.address, &FrameError::Io(error));
                connection.stream.wait().map_err(lost)?;
            }
            if connection.stream.take_nudge() || looked.elapsed() >= LOOK {
                if looked.elapsed() >= STANDSTILL {
                    silence = Silence::since(Instant::now());
                }
                looked = Instant::now();
                if interrupt.interrupted() {
                    return Err(ClientError::Interrupted);
                }
                let lost = control.look(|e| e.lost.clone().filter(|(when, _)| when.elapsed() > LAST_WORDS));
                if let Some((_, cause)) = lost {
                    let address = connection.address.clone();
                    let cause = format!("heartbeats failed: {cause}");
                    return Err(ClientError::Lost { address, cause });
                }
                connection.tell_of_silence(&mut silence, std::mem::replace(&mut is_silent, true), looked);
            }
        }
    }

    /// Finishes what calls that were broken off have left behind.
    pub(super) fn settle(&mut self, interrupt: &dyn Interrupt) -> Result<(), ClientError> {
        if !self.connection.is_settled() {
            self.turn(Turn::wait(), interrupt, &|connection, _| connection.is_settled())?;
        }
        self.collect();
        Ok(())
    }

    /// Notes the ends of what was abandoned.
    pub(super) fn collect(&mut self) {
        for end in self.connection.flight.take_abandoned() {
            if let End::Receipt { receipt, .. } = end {
                self.keep_for_flush([receipt]);
            }
        }
    }

    /// Keeps receipts that nobody waits for; beyond [`MAX_UNCLAIMED`] the oldest go.
    pub(super) fn keep_for_flush(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.unclaimed.extend(receipts);
        let num_over = self.unclaimed.len().saturating_sub(MAX_UNCLAIMED);
        self.unclaimed.drain(..num_over);
    }

    /// The same of those that came with a new connection.
    pub(super) fn keep_told_for_flush(&mut self) {
        let told = std::mem::take(&mut self.told);
        self.keep_for_flush(told);
    }

    /// Nobody will ask for the parameters of the pushes in flight; their receipts are kept.
    pub(super) fn abandon(&mut self) {
        self.connection.flight.abandon_all();
    }

    /// Waits for a request's end, with the others' where they come first.
    pub(super) fn end_of(
        &mut self,
        request: u32,
        turn: Turn<'_>,
        interrupt: &dyn Interrupt,
    ) -> Result<End, ClientError> {
        self.turn(turn, interrupt, &|connection, turn| {
            connection.is_sent(turn) && connection.flight.is_complete(request)
        })?;
        self.collect();
        let end = self.connection.flight.take(request);
        match end.expect("the turn has waited for it") {
            End::Refused(refused) => Err(ClientError::from_refused(&self.connection.address, refused)),
            end => Ok(end),
        }
    }

    /// Asks the server for something small.
    pub(super) fn call(&mut self, call: &Call, interrupt: &dyn Interrupt) -> Result<Reply, ClientError> {
        self.settle(interrupt)?;
        let (request, asks) = self.ask(call)?;
        self.reply_to(request, asks, interrupt)
    }

    /// The same of the last call, where others that were given up have not been answered. The server reads nothing while it
    /// answers one, and some wait for other workers; that ends where this side has no more to say.
    fn call_last(&mut self, call: &Call, interrupt: &dyn Interrupt) -> Result<Reply, ClientError> {
        let (request, asks) = self.ask(call)?;
        self.turn(asks, interrupt, &|connection, turn| connection.is_sent(turn))?;
        if let Err(error) = self.connection.stream.end_sending() {
            let error = ClientError::from_frame(&self.connection.address, &FrameError::Io(error));
            self.lose(Turn::wait(), error.clone());
            return Err(error);
        }
        self.reply_to(request, Turn::wait(), interrupt)
    }

    fn ask(&mut self, call: &Call) -> Result<(u32, Turn<'static>), ClientError> {
        let request = self.connection.flight.next_request();
        let mut payload = Vec::new();
        encode(call, &mut payload);
        check_size(Kind::Call, &payload)?;
        let header = Header { request, ..Header::new(Kind::Call) };
        let outgoing = Outgoing::frame(header, &payload, std::mem::take(&mut self.connection.workshop));
        self.connection.flight.begin(Pending::new(request, Kind::Reply));
        Ok((request, Turn::send(request, outgoing)))
    }

    fn reply_to(
        &mut self,
        request: u32,
        turn: Turn<'_>,
        interrupt: &dyn Interrupt,
    ) -> Result<Reply, ClientError> {
        match self.end_of(request, turn, interrupt)? {
            End::Reply(reply) => Ok(reply),
            end @ (End::Receipt { .. } | End::Pulled { .. } | End::Refused(_)) => Err(self.unexpected(&end)),
        }
    }

    /// What an answer of the wrong kind means.
    pub(super) fn unexpected(&mut self, answer: &dyn Debug) -> ClientError {
        self.broke(format!("{answer:?} answers another question"))
    }

    /// Ends the session, for what the server must not send.
    fn broke(&mut self, cause: String) -> ClientError {
        let error = self.connection.broke(cause);
        self.broken = Some(error.clone());
        error
    }

    /// Says goodbye, in at most `limit`. Who has finished comes back to say so, since the server would wait for it.
    pub(super) fn goodbye(&mut self, parting: Parting, interrupt: &dyn Interrupt, limit: Duration) {
        self.abandon();
        if self.broken.is_some() {
            return;
        }
        let has_finished = parting == Parting::Finished;
        let call = Call::Goodbye { parting };
        let mut say = |inner: &mut Self| {
            let begun = Instant::now();
            let out_of_time = || begun.elapsed() > limit || interrupt.interrupted();
            if inner.connection.flight.is_only_calling() {
                inner.call_last(&call, &out_of_time)
            } else {
                inner.call(&call, &out_of_time)
            }
        };
        let said = if has_finished {
            self.again_within(self.way.last_patience(), interrupt, &mut say)
        } else if self.is_lost() {
            return;
        } else {
            say(self)
        };
        if let Err(error) = said {
            tracing::debug!(address = self.connection.address, %error, "the server did not hear the goodbye");
        }
    }

    /// Says goodbye without waiting for anything.
    pub(super) fn last_word(&mut self) {
        if self.broken.is_none() && !self.is_lost() {
            self.connection.last_word(Parting::Left { cause: None });
        }
    }
}
