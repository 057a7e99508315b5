//! A model's values as its owner gives them, before there is a store for them.

use super::error::ServerError;
use crate::tensors::gather;
use offbeat_core::layout::Layout;
use offbeat_core::optim::Isa;
use offbeat_core::table::TensorTable;
use offbeat_core::values::first_nonfinite_parameter;

/// A model at rest: its table and its values, fragment by fragment as they travel, so that the store can take them over
/// one at a time and both together need little more than one model.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) table: TensorTable,
    pub(super) fragments: Vec<Vec<u8>>,
}

impl Snapshot {
    /// Copies tensors, each given as its bytes (own dtype, little-endian, C order).
    ///
    /// # Errors
    /// [`ServerError::NumTensors`], [`ServerError::Values`]: these are not the table's. [`ServerError::NonFinite`]: a
    /// parameter is NaN or infinite.
    pub fn of(table: TensorTable, tensors: &[impl AsRef<[u8]>]) -> Result<Self, ServerError> {
        check_values(&table, tensors)?;
        let layout = Layout::of(&table);
        let fragment = |(i, f): (usize, &offbeat_core::layout::Fragment)| {
            let mut payload = vec![0; f.wire_bytes()];
            gather(&layout, tensors, i, &mut payload);
            payload
        };
        let fragments = layout.fragments.iter().enumerate().map(fragment).collect();
        Ok(Self { table, fragments })
    }
}

/// Whether each tensor was given as many bytes as its shape and dtype make, and each parameter is finite.
pub(super) fn check_values(table: &TensorTable, tensors: &[impl AsRef<[u8]>]) -> Result<(), ServerError> {
    if tensors.len() != table.len() {
        return Err(ServerError::NumTensors { expected: table.len(), found: tensors.len() });
    }
    for (spec, bytes) in table.tensors().iter().zip(tensors) {
        let (expected, found) = (spec.num_elements() * spec.dtype.size() as u64, bytes.as_ref().len() as u64);
        if expected != found {
            return Err(ServerError::Values { name: spec.name.clone(), expected, found });
        }
    }
    if let Some((spec, index, value)) = first_nonfinite_parameter(Isa::detect(), table, tensors) {
        return Err(ServerError::NonFinite { name: spec.name.clone(), index, value });
    }
    Ok(())
}
