//! The first worker brings the model: table, blueprint, and the values fragment by fragment. Nothing is visible until
//! all of it has come; whoever else wants to bring one waits, and is told when it is not needed any more.

use super::end::End;
use super::snapshot::Snapshot;
use crate::frame::{FrameReader, Socket};
use offbeat_core::checksum::checksum;
use offbeat_core::layout::{Fragment, FragmentKind, Layout};
use offbeat_core::optim::Isa;
use offbeat_core::table::TensorTable;
use offbeat_core::values::all_finite;
use offbeat_core::wire::Header;
use offbeat_core::wire::header::CODEC_RAW;
use offbeat_core::wire::message::RefusalCode;
use tokio::sync::OwnedSemaphorePermit;

/// A model on its way.
pub(super) struct Init {
    table: TensorTable,
    blueprint: Option<String>,
    layout: Layout,
    /// Wire bytes of the fragments that have come; grows with them.
    values: Vec<Vec<u8>>,
    right: OwnedSemaphorePermit,
}

impl Init {
    /// Begins with what is known before the values; `right` is the right to bring a model.
    pub(super) fn new(table: TensorTable, blueprint: Option<String>, right: OwnedSemaphorePermit) -> Self {
        let layout = Layout::of(&table);
        Self { table, blueprint, layout, values: Vec::new(), right }
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

    /// The model with its blueprint, and the right to bring it, which is given back when it stands.
    pub(super) fn into_parts(self) -> (Snapshot, Option<String>, OwnedSemaphorePermit) {
        (Snapshot { table: self.table, fragments: self.values }, self.blueprint, self.right)
    }
}
