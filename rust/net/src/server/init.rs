//! The first worker brings the model: table, blueprint, and the values fragment by fragment. Nothing is visible until
//! all of it has come; whoever else wants to bring one waits, and is told when it is not needed any more.

use super::session::{End, Session, refused_model};
use super::snapshot::Snapshot;
use offbeat_core::checksum::checksum;
use offbeat_core::layout::Layout;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::Header;
use offbeat_core::wire::header::CODEC_RAW;
use offbeat_core::wire::message::{RefusalCode, Reply};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// A model on its way.
pub(super) struct Init {
    table: TensorTable,
    blueprint: Option<String>,
    layout: Layout,
    /// Wire bytes of the fragments that have come; grows with them.
    values: Vec<Vec<u8>>,
    _right: OwnedSemaphorePermit,
}

impl Session {
    pub(super) async fn init_begin(
        &mut self,
        header: &Header,
        table: TensorTable,
        blueprint: Option<String>,
    ) -> Result<Reply, End> {
        if self.init.is_some() {
            return Err(End::refused(header, RefusalCode::State, "this worker is bringing a model already"));
        }
        let right = self.or_closed(self.shared.model.claim()).await?;
        if let Some(model) = self.shared.model.get() {
            if let Some(difference) = model.store.table().first_difference(&table) {
                let message = format!("this worker's model is not the server's: {difference}");
                return Err(End::refused(header, RefusalCode::ModelMismatch, message));
            }
            self.place(header)?;
            return Ok(Reply::Init { taken: false });
        }
        let layout = Layout::of(&table);
        self.init = Some(Init { table, blueprint, layout, values: Vec::new(), _right: right });
        Ok(Reply::Init { taken: true })
    }

    /// One fragment's initial values.
    pub(super) async fn value(&mut self, header: &Header) -> Result<(), End> {
        let Some(init) = &mut self.init else { return Err(End::out_of_place(header, "a Call")) };
        let index = init.values.len();
        let expected = init.layout.fragments.get(index).map(offbeat_core::layout::Fragment::wire_bytes);
        if header.fragment as usize != index
            || header.codec != CODEC_RAW
            || expected != Some(header.payload_len as usize)
        {
            let message = format!(
                "the values of fragment {index} ({expected:?} bytes) were due, {} bytes of fragment {} came",
                header.payload_len, header.fragment
            );
            return Err(End::refused(header, RefusalCode::Malformed, message));
        }
        let mut bytes = vec![0; header.payload_len as usize];
        self.reader.payload(&self.connection.socket, &mut bytes).await?;
        if checksum(&bytes) != header.payload_checksum {
            return Err(End::refused(
                header,
                RefusalCode::Checksum,
                format!("the values of fragment {index} are damaged"),
            ));
        }
        init.values.push(bytes);
        Ok(())
    }

    pub(super) fn init_commit(&mut self, header: &Header) -> Result<Reply, End> {
        let Some(init) = self.init.take_if(|init| init.values.len() == init.layout.fragments.len()) else {
            return Err(End::refused(header, RefusalCode::State, "the model's values have not all come"));
        };
        let Init { table, blueprint, layout: _, values, _right } = init;
        let shared = Arc::clone(&self.shared);
        shared
            .set_model(Snapshot { table, fragments: values }, blueprint)
            .map_err(|e| refused_model(header, &e))?;
        tracing::info!(worker = self.worker_id, "the worker brought the model");
        self.place(header)?;
        Ok(Reply::Init { taken: true })
    }
}
