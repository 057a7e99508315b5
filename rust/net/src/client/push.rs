//! Pushes and pulls as the session makes them: what is checked before a byte leaves, what a request says, and where
//! the answer goes.

use super::config::{Interrupt, Pulled, PushInput};
use super::connection::{Connection, Overlap, Turn};
use super::error::ClientError;
use super::finite;
use super::flight::{Before, End, Pending, PushPart};
use super::held::Held;
use super::memory::{Memory, overlap};
use super::model::Model;
use super::momentum::{Keep, Momentum};
use super::outgoing::Outgoing;
use super::payload::Content;
use super::session::Inner;
use offbeat_core::layout::Presence;
use offbeat_core::spec::Transaction;
use offbeat_core::store::Receipt;
use offbeat_core::table::Role;
use offbeat_core::wire::push::MAX_SAMPLES;
use offbeat_core::wire::{Header, Kind, PullRequest, PushRequest, Versions, Want};
use std::sync::Arc;

/// Where a call's parameters go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Destination<'m> {
    pub(super) out: &'m [Memory<'m>],
    /// Whether `out` holds what the last call wrote into it.
    pub(super) incremental: bool,
}

impl Inner {
    pub(super) fn pull(
        &mut self,
        to: Destination<'_>,
        interrupt: &dyn Interrupt,
    ) -> Result<Pulled, ClientError> {
        let pulled = self.again(interrupt, &mut |inner| inner.try_pull(to, interrupt));
        self.give_up_waiting();
        pulled
    }

    fn try_pull(&mut self, to: Destination<'_>, interrupt: &dyn Interrupt) -> Result<Pulled, ClientError> {
        let model = self.model()?;
        model.check_out(to.out)?;
        self.settle(interrupt)?;
        self.abandon();
        let request = self.connection.flight.next_request();
        let copies = self.reads_parameters() && !to.incremental;
        let held = held_of(&mut self.connection.held, &model);
        held.keep_parameters(&model, copies);
        let have = Some(&held.versions[..]).filter(|_| to.incremental && held.is_whole());
        let mut payload = Vec::new();
        PullRequest { have: have.map(Versions::Numbers) }.encode(&mut payload);
        let header = Header { request, term: held.term, version: held.version, ..Header::new(Kind::Pull) };
        self.connection.flight.begin(Pending {
            due: 0..model.num_fragments(),
            incremental: have.is_some(),
            ..Pending::new(request, Kind::PullEnd)
        });
        let outgoing = Outgoing::frame(header, &payload, std::mem::take(&mut self.connection.workshop));
        let turn = Turn { out: Some(to.out), target: Some(request), ..Turn::send(request, outgoing) };
        match self.end_of(request, turn, interrupt)? {
            End::Pulled { term, version } => {
                self.has_read(term, version);
                Ok(Pulled { term, version })
            }
            end @ (End::Receipt { .. } | End::Reply(_) | End::Refused(_)) => Err(self.unexpected(&end)),
        }
    }

    /// Pushes; with `to` and one in flight, brings the parameters that follow from it; with two, those of the push
    /// before. The receipt is that of the parameters.
    pub(super) fn push(
        &mut self,
        input: &PushInput<'_>,
        to: Option<Destination<'_>>,
        interrupt: &dyn Interrupt,
    ) -> Result<Option<Receipt>, ClientError> {
        let model = self.model()?;
        model.check_values(input.values)?;
        if let Some(to) = to {
            model.check_out(to.out)?;
        }
        if input.samples > MAX_SAMPLES {
            let message = format!("samples is {}: a push is of at most {MAX_SAMPLES}", input.samples);
            return Err(ClientError::bad_input(message));
        }
        let mut has_begun = false;
        self.session.came = false;
        let pushed = self.again(interrupt, &mut |inner| {
            if to.is_none() && !has_begun {
                inner.keep_told_for_flush(); // those of pushes before
            }
            let makings = match (inner.take_repeatable(), inner.told.front().cloned()) {
                (Some(unsettled), _) => {
                    if let Err(error) = inner.x_read(&model, to) {
                        inner.give_up(unsettled, &error);
                        return Err(error);
                    }
                    PushMakings::again(unsettled.push, unsettled.answered)
                }
                (None, Some(receipt)) if has_begun => return inner.told_of(&model, receipt, to, interrupt),
                (None, _) => inner.new_push(&model, input, interrupt)?,
            };
            has_begun = true;
            inner.send_push(&model, input, makings, to, interrupt)
        });
        if pushed.is_err() && has_begun {
            self.give_up_waiting(); // what was refused before has changed nothing
        }
        pushed
    }

    /// Ends a push whose receipt came with a new connection: its parameters have not.
    fn told_of(
        &mut self,
        model: &Model,
        receipt: Receipt,
        to: Option<Destination<'_>>,
        interrupt: &dyn Interrupt,
    ) -> Result<Option<Receipt>, ClientError> {
        if let Some(to) = to {
            self.try_pull(to, interrupt)?;
        }
        self.told.pop_front(); // what is told of a later one is the next call's
        self.read_run_anew(model, receipt, to, interrupt).map(Some)
    }

    /// What is found out about a push before a byte of it leaves.
    fn new_push(
        &mut self,
        model: &Model,
        input: &PushInput<'_>,
        interrupt: &dyn Interrupt,
    ) -> Result<PushMakings, ClientError> {
        self.settle(interrupt)?;
        if self.connection.outdated {
            self.refresh_run(interrupt)?;
        }
        let Some(held) = self.connection.held.as_ref().filter(|held| held.ready) else {
            let message = "pull before the first push: a gradient belongs to parameters that were read";
            return Err(ClientError::out_of_order(message));
        };
        let (present, fragments) = held.presence(model, input.values);
        finite::check(self.isa, model, &present, input.values)?;
        let norm = self.norm(model, &present, input.values);
        let (before, buffers_sent) = Default::default();
        Ok(PushMakings { present, fragments, norm, before, buffers_sent })
    }

    fn send_push(
        &mut self,
        model: &Arc<Model>,
        input: &PushInput<'_>,
        makings: PushMakings,
        to: Option<Destination<'_>>,
        interrupt: &dyn Interrupt,
    ) -> Result<Option<Receipt>, ClientError> {
        let x_read = self.x_read(model, to)?;
        if to.is_none() {
            self.abandon(); // the answers to older pushes have nowhere to go
        }
        let before = self.connection.flight.oldest_push();
        self.check_pair(before, to)?;
        if let Some(to) = to {
            let copies = self.reads_parameters() && !to.incremental;
            held_of(&mut self.connection.held, model).keep_parameters(model, copies);
        }
        let (request, mut outgoing) = self.begin_push(model, input, makings, to, x_read);
        if self.connection.flight.get(request).is_some_and(|p| p.granted) {
            self.connection.join_first(request, &mut outgoing);
        }
        let target = if self.connection.keep == Keep::Sent && to.is_some() { before } else { Some(request) };
        let turn = Turn {
            out: to.map(|to| to.out),
            target,
            overlaps: self.overlaps(model, input, to),
            ..Turn::send(request, outgoing)
        };
        if let Some(target) = target {
            let receipt = self.receipt_of(target, turn, to.is_some(), interrupt)?;
            self.read_run_anew(model, receipt, to, interrupt).map(Some)
        } else {
            self.turn(turn, interrupt, &Connection::is_sent)?;
            let before = self.told.pop_front(); // that of a push which was lost with its connection
            self.keep_told_for_flush();
            Ok(before)
        }
    }

    /// After a push that was made for an optimizer of before: learns of the run's.
    fn read_run_anew(
        &mut self,
        model: &Model,
        receipt: Receipt,
        to: Option<Destination<'_>>,
        interrupt: &dyn Interrupt,
    ) -> Result<Receipt, ClientError> {
        if self.connection.outdated
            && let Err(error) = self.catch_up(model, to, interrupt)
        {
            if self.is_lost() {
                return Ok(receipt); // the run is told anew with the next connection
            }
            self.keep_for_flush([receipt]); // the push has ended, whatever became of this
            return Err(error);
        }
        Ok(receipt)
    }

    /// Learns which optimizer the run has by now, while the parameters that the next push is based on still lie in the
    /// caller's memory as they came.
    fn catch_up(
        &mut self,
        model: &Model,
        to: Option<Destination<'_>>,
        interrupt: &dyn Interrupt,
    ) -> Result<(), ClientError> {
        self.refresh_run(interrupt)?;
        if let Some(to) = to.filter(|to| self.reads_parameters() && !to.incremental) {
            held_of(&mut self.connection.held, model).copy_parameters(model, to.out);
        }
        Ok(())
    }

    /// Waits for everything in flight; the last parameters go to `to`.
    pub(super) fn flush(
        &mut self,
        out: Option<&[Memory<'_>]>,
        interrupt: &dyn Interrupt,
    ) -> Result<Vec<Receipt>, ClientError> {
        if let Some(out) = out {
            self.model()?.check_out(out)?;
        } else {
            self.abandon();
        }
        let flushed = self.again(interrupt, &mut |inner| inner.try_flush(out, interrupt));
        if flushed.is_err() {
            self.give_up_waiting();
        }
        flushed?;
        Ok(self.unclaimed.drain(..).collect())
    }

    fn try_flush(
        &mut self,
        out: Option<&[Memory<'_>]>,
        interrupt: &dyn Interrupt,
    ) -> Result<(), ClientError> {
        if let (Some(out), false) = (out, self.told.is_empty()) {
            self.try_pull(Destination { out, incremental: false }, interrupt)?;
        }
        self.keep_told_for_flush();
        self.settle(interrupt)?;
        while let Some(request) = self.connection.flight.oldest_push() {
            let turn = Turn { out, target: Some(request), ..Turn::wait() };
            let receipt = self.receipt_of(request, turn, true, interrupt)?;
            self.keep_for_flush([receipt]);
        }
        Ok(())
    }

    fn receipt_of(
        &mut self,
        request: u32,
        turn: Turn<'_>,
        reads: bool,
        interrupt: &dyn Interrupt,
    ) -> Result<Receipt, ClientError> {
        match self.end_of(request, turn, interrupt) {
            Ok(End::Receipt { receipt, term, version }) => {
                if reads {
                    self.has_read(term, version);
                }
                Ok(receipt)
            }
            Ok(end @ (End::Pulled { .. } | End::Reply(_) | End::Refused(_))) => Err(self.unexpected(&end)),
            Err(error) => {
                self.abandon(); // what follows a refused push is refused too
                Err(error)
            }
        }
    }

    /// The gradient's norm, where the run limits it and what is sent is not the gradient.
    fn norm(&self, model: &Model, present: &Presence, values: &[Option<Memory<'_>>]) -> Option<f64> {
        let asked = self.session.run.staleness.max_norm.is_some() && self.connection.momentum.is_some();
        asked.then(|| finite::norm(self.isa, model, present, values))
    }

    /// Whether momentum correction asks for the parameters that a gradient was taken at.
    fn reads_parameters(&self) -> bool {
        self.connection.momentum.as_ref().is_some_and(Momentum::reads_parameters)
    }

    /// What of `to` must not be written yet while a push is sent.
    fn overlaps(&self, model: &Model, input: &PushInput<'_>, to: Option<Destination<'_>>) -> Overlap {
        let two = self.connection.keep == Keep::Sent;
        let in_the_way = |to: Destination<'_>| {
            let gradients = input.values.iter().enumerate().filter_map(|(tensor, value)| {
                let value =
                    value.as_ref().filter(|_| model.table.tensors()[tensor].role == Role::Parameter)?;
                // With one in flight a root answers the very fragment that lies there, which has been sent by then.
                (two || !value.is_same(&to.out[tensor])).then_some(value)
            });
            overlap(gradients, to.out)
        };
        if to.is_some_and(in_the_way) {
            Overlap::Anywhere
        } else if self.reads_parameters() {
            Overlap::Everything
        } else {
            Overlap::Buffers
        }
    }

    /// Where these parameters lie, if it asks; `None`: in our own copy, or nobody asks.
    fn x_read<'m>(
        &self,
        model: &Model,
        to: Option<Destination<'m>>,
    ) -> Result<Option<&'m [Memory<'m>]>, ClientError> {
        if !self.reads_parameters() {
            return Ok(None);
        }
        match to {
            Some(to) if to.incremental => Ok(Some(to.out)),
            Some(_) | None if self.connection.held.as_ref().is_some_and(|h| h.has_parameters(model)) => {
                Ok(None)
            }
            Some(_) | None => Err(ClientError::out_of_order(
                "momentum correction with weight_decay needs the parameters that were read, and no copy of them was \
                 kept; pull once more, or push and pull into the same memory",
            )),
        }
    }

    /// Whether this call may take what the push before it has asked for.
    fn check_pair(&self, before: Option<u32>, to: Option<Destination<'_>>) -> Result<(), ClientError> {
        let before = before.and_then(|request| self.connection.flight.get(request));
        if before.is_some_and(|p| p.incremental) && to.is_some_and(|to| !to.incremental) {
            let message = "the push in flight asked for changes to the memory of the call before; give the same, or flush";
            return Err(ClientError::out_of_order(message));
        }
        Ok(())
    }

    /// The caller's memory holds what these say.
    fn has_read(&mut self, term: u64, version: u64) {
        (self.session.term, self.session.version, self.session.came) = (term, version, true);
        let Some(held) = &mut self.connection.held else { return };
        let replaced = held.ready && held.term != term;
        (held.term, held.version, held.ready) = (term, version, true);
        if replaced {
            self.reset_momentum(); // the velocity was gathered on the way to the values before
        }
    }

    fn begin_push<'m>(
        &mut self,
        model: &Model,
        input: &PushInput<'m>,
        makings: PushMakings,
        to: Option<Destination<'m>>,
        x_read: Option<&'m [Memory<'m>]>,
    ) -> (u32, Outgoing<'m>) {
        let PushMakings { present, fragments, norm, before, buffers_sent } = makings;
        let held = held_of(&mut self.connection.held, model);
        let flight = &mut self.connection.flight;
        let (request, sequence) = (flight.next_request(), flight.next_sequence());
        let incremental = to.is_some_and(|to| to.incremental) && held.is_whole();
        let mut other = Vec::new();
        if incremental && fragments.len() < model.num_fragments() {
            let mut mine = fragments.iter().copied().peekable();
            let rest = (0..model.num_fragments()).filter(|&f| mine.next_if_eq(&f).is_none());
            other.extend(rest.map(|f| held.versions[f]));
        }
        let head = PushRequest {
            epoch: self.session.run.epoch,
            samples: input.samples,
            norm,
            want: if to.is_some() { Want::Parameters } else { Want::Receipt },
            answered: u32::try_from(before.answered).unwrap_or(u32::MAX), // there are at most MAX_FRAGMENTS
            present: Some(present.as_bytes()).filter(|_| !model.is_all(&present)),
            have: incremental.then_some(Versions::Numbers(&other)),
        };
        let mut payload = Vec::with_capacity(64);
        head.encode(&mut payload);
        let header =
            Header { request, sequence, term: held.term, version: held.version, ..Header::new(Kind::Push) };
        let (of_push, of_content) = (present.clone(), present);
        flight.begin(Pending {
            push: Some(PushPart {
                sequence,
                samples: input.samples,
                norm,
                present: of_push,
                fragments: fragments.clone(),
                made: fragments.len(),
                before,
                buffers_sent,
            }),
            due: 0..if to.is_some() { model.num_fragments() } else { 0 },
            granted: self.session.run.transaction == Transaction::Fragment,
            incremental,
            ..Pending::new(request, Kind::Receipt)
        });
        let (values, versions) = (input.values, held.versions.clone());
        let content = Content::Push { values, present: of_content, versions, x_read };
        let template = Header { kind: Kind::Fragment, ..header };
        let fragments = match before.answered {
            0 => fragments,
            answered => fragments.iter().copied().filter(|&f| f >= answered).collect(),
        };
        let workshop = std::mem::take(&mut self.connection.workshop);
        (request, Outgoing::push(Some(header), &payload, template, fragments, content, workshop))
    }
}

/// What a push is made of besides its values.
#[derive(Debug)]
struct PushMakings {
    present: Arc<Presence>,
    fragments: Arc<[usize]>,
    norm: Option<f64>,
    before: Before,
    /// The values of buffers as they were sent before, of those that have not been answered.
    buffers_sent: Vec<(usize, Vec<u8>)>,
}

impl PushMakings {
    /// Those that it had: its buffers and gradients may lie where the answer has come since.
    fn again(push: PushPart, answered: usize) -> Self {
        let PushPart { present, fragments, norm, made, buffers_sent, .. } = push;
        Self { present, fragments, norm, before: Before { answered, made }, buffers_sent }
    }
}

fn held_of<'h>(held: &'h mut Option<Held>, model: &Model) -> &'h mut Held {
    held.get_or_insert_with(|| Held::new(model))
}
