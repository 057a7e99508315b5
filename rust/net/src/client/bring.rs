//! The model: the server's, once it has one, or the one that this worker brings.

use super::config::Interrupt;
use super::connection::{Connection, Turn};
use super::error::ClientError;
use super::model::Model;
use super::outgoing::Outgoing;
use super::payload::Content;
use super::session::Inner;
use offbeat_core::table::TensorTable;
use offbeat_core::values::first_nonfinite_parameter;
use offbeat_core::wire::message::{Call, ModelInfo, Replaces, Reply};
use offbeat_core::wire::{Header, Kind};
use std::sync::Arc;

impl Inner {
    pub(super) fn wait_for_model(
        &mut self,
        interrupt: &dyn Interrupt,
    ) -> Result<Arc<TensorTable>, ClientError> {
        match self.call(&Call::WaitModel, interrupt)? {
            Reply::Model { model, run, term, version } => {
                (self.session.term, self.session.version) = (term, version);
                self.set_run(run);
                self.adopt(model)?;
                Ok(self.model()?.table.clone())
            }
            reply => Err(self.unexpected(&reply)),
        }
    }

    pub(super) fn init(
        &mut self,
        table: &TensorTable,
        values: &[&[u8]],
        blueprint: Option<&str>,
        replaces: Option<Replaces>,
        interrupt: &dyn Interrupt,
    ) -> Result<bool, ClientError> {
        ModelInfo::check_size(table, blueprint).map_err(|e| ClientError::bad_input(e.to_string()))?;
        let model = Model::new(Arc::new(table.clone()));
        model.check_count("init", values.len())?;
        for (tensor, value) in values.iter().enumerate() {
            model.check_size("init", tensor, value.len())?;
        }
        if let Some((spec, index, value)) = first_nonfinite_parameter(self.isa, table, values) {
            return Err(ClientError::NonFiniteModel { tensor: spec.name.clone(), index, value });
        }
        let taken = self.bring(table, values, blueprint, replaces, interrupt);
        if taken == Err(ClientError::Interrupted) {
            // The server waits for the rest, and others for the server: only a closed connection tells both.
            let cause = "interrupted while it brought the model".to_owned();
            self.broken = Some(ClientError::Lost { address: self.connection.address.clone(), cause });
            self.connection.hang_up();
        }
        let taken = taken?;
        let theirs = self.wait_for_model(interrupt)?;
        if let Some(difference) = theirs.first_difference(table) {
            return Err(ClientError::ModelMismatch { message: difference.to_string() });
        }
        // Under a later term other values have been loaded since; those are to be pulled.
        let lives = taken && self.session.term == self.way.term;
        if lives && let Some(held) = &mut self.connection.held {
            held.brought(&model, self.session.term, values);
        }
        Ok(taken)
    }

    fn bring(
        &mut self,
        table: &TensorTable,
        values: &[&[u8]],
        blueprint: Option<&str>,
        replaces: Option<Replaces>,
        interrupt: &dyn Interrupt,
    ) -> Result<bool, ClientError> {
        let blueprint = blueprint.map(str::to_owned);
        let call = Call::InitBegin { table: table.clone(), blueprint: blueprint.clone(), replaces };
        match self.call(&call, interrupt)? {
            Reply::Init { taken: true } => {}
            Reply::Init { taken: false } => return Ok(false),
            reply => return Err(self.unexpected(&reply)),
        }
        self.adopt(ModelInfo { table: table.clone(), blueprint })?;
        let outgoing = Outgoing::push(
            None,
            &[],
            Header::new(Kind::Value),
            (0..self.model()?.num_fragments()).collect(),
            Content::Values(values),
            std::mem::take(&mut self.connection.workshop),
        );
        self.turn(Turn::send(0, outgoing), interrupt, &Connection::is_sent)?;
        match self.call(&Call::InitCommit, interrupt)? {
            Reply::Init { taken } => Ok(taken),
            reply => Err(self.unexpected(&reply)),
        }
    }
}
