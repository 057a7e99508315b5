//! A worker brings the model, the first one most often: table, blueprint, and the values fragment by fragment. Nothing is
//! visible until all of it has come; whoever else wants to bring one waits, and is told when it is not needed any more.

use super::end::End;
use super::error::ServerError;
use super::model::Model;
use super::shared::Shared;
use super::snapshot::Snapshot;
use super::values;
use crate::frame::{FrameReader, Socket};
use offbeat_core::checksum::checksum;
use offbeat_core::layout::{Fragment, FragmentKind, Layout};
use offbeat_core::optim::Isa;
use offbeat_core::table::TensorTable;
use offbeat_core::values::all_finite;
use offbeat_core::wire::Header;
use offbeat_core::wire::header::CODEC_RAW;
use offbeat_core::wire::message::{RefusalCode, Replaces};
use std::sync::atomic::Ordering;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;

/// A model on its way.
pub(super) struct Init {
    table: TensorTable,
    blueprint: Option<String>,
    layout: Layout,
    /// Wire bytes of the fragments that have come; grows with them.
    values: Vec<Vec<u8>>,
    /// As [`Call::InitBegin`](offbeat_core::wire::message::Call::InitBegin) has it.
    replaces: Option<Replaces>,
    right: OwnedSemaphorePermit,
}

impl Init {
    /// Begins with what is known before the values; `right` is the right to bring a model.
    pub(super) fn new(
        table: TensorTable,
        blueprint: Option<String>,
        replaces: Option<Replaces>,
        right: OwnedSemaphorePermit,
    ) -> Self {
        let layout = Layout::of(&table);
        Self { table, blueprint, layout, values: Vec::new(), replaces, right }
    }

    /// Takes one fragment's initial values.
    pub(super) async fn value(
        &mut self,
        header: &Header,
        reader: &mut FrameReader,
        socket: &Socket,
    ) -> Result<(), End> {
        let index = self.values.len();
        let expected = self.layout.fragments.get(index).map(Fragment::wire_bytes);
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
        reader.payload(socket, &mut bytes).await?;
        if checksum(&bytes) != header.payload_checksum {
            return Err(End::refused(
                header,
                RefusalCode::Checksum,
                format!("the values of fragment {index} are damaged"),
            ));
        }
        let fragment = &self.layout.fragments[index];
        if fragment.kind == FragmentKind::Parameters && !all_finite(Isa::detect(), fragment.dtype, &bytes) {
            let message = format!("the values of fragment {index} hold NaN or infinite parameters");
            return Err(End::refused(header, RefusalCode::Malformed, message));
        }
        self.values.push(bytes);
        Ok(())
    }

    /// Whether all values have come.
    pub(super) fn is_whole(&self) -> bool {
        self.values.len() == self.layout.fragments.len()
    }

    /// Puts it there; gives whether it is the model's: pushes may have come since it began. Blocks; `runtime` is to wait by.
    pub(super) fn put(self, shared: &Shared, runtime: &Handle) -> Result<bool, ServerError> {
        let Self { table, blueprint, mut values, replaces, right: _right, .. } = self;
        let Some(model) = shared.model.get() else {
            shared.set_model(Snapshot { table, fragments: values }, blueprint)?;
            return Ok(true);
        };
        let fill = &mut |i: usize, to: &mut [u8]| to.copy_from_slice(&std::mem::take(&mut values[i]));
        let gives_way = |term, version| gives_way(model, (term, version), replaces);
        values::replace(shared, model, runtime, gives_way, fill)
    }
}

/// Whether a model of a term and version gives way, as one that a worker brings asks it to: nothing that was trained is lost
/// by that.
pub(super) fn gives_way(model: &Model, at: (u64, u64), replaces: Option<Replaces>) -> bool {
    match replaces {
        None => false,
        // Relaxed: it changes under `whole`, and is asked there once more.
        Some(Replaces::Untrained) => model.is_initial.load(Ordering::Relaxed) && at.1 == 0,
        // What a checkpoint of that term has, who had that version has too.
        Some(Replaces::At { term, version }) => {
            at == (term, version)
                || model.resumed.as_ref().is_some_and(|resumed| {
                    at == (resumed.term, resumed.version)
                        && resumed.from_terms.contains(&term)
                        && resumed.version <= version
                })
        }
    }
}
