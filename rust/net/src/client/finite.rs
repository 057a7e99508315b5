//! The look at a whole push before its first byte leaves: under `transaction = fragment` what has left is applied.

use super::error::ClientError;
use super::memory::Memory;
use super::model::Model;
use offbeat_core::layout::Presence;
use offbeat_core::optim::Isa;
use offbeat_core::table::Role;
use offbeat_core::values::{all_finite, first_nonfinite, sum_squares};

/// Bytes looked at in one go; a multiple of every element's size.
const BLOCK_BYTES: usize = 256 << 10;

/// Refuses a push whose gradients hold a NaN or an infinity, naming where. Buffers may: "infinity so far" is a value.
pub(super) fn check(
    isa: Isa,
    model: &Model,
    present: &Presence,
    values: &[Option<Memory<'_>>],
) -> Result<(), ClientError> {
    let brought = |t: &usize| present.has(*t) && model.table.tensors()[*t].role == Role::Parameter;
    // Backwards, so that what leaves first was looked at last and is still in a cache.
    let good = (0..model.table.len()).rev().filter(brought).all(|t| {
        let (spec, Some(memory)) = (&model.table.tensors()[t], &values[t]) else {
            return true;
        };
        memory
            .read(0..memory.len(), |bytes| bytes.rchunks(BLOCK_BYTES).all(|b| all_finite(isa, spec.dtype, b)))
    });
    if good {
        return Ok(());
    }
    for t in (0..model.table.len()).filter(brought) {
        let (spec, Some(memory)) = (&model.table.tensors()[t], &values[t]) else {
            continue;
        };
        if let Some((index, value)) =
            memory.read(0..memory.len(), |bytes| first_nonfinite(isa, spec.dtype, bytes))
        {
            return Err(ClientError::NonFinite { tensor: spec.name.clone(), index, value });
        }
    }
    Ok(())
}

/// The gradient's L2 norm, over all of it that a push brings.
pub(super) fn norm(isa: Isa, model: &Model, present: &Presence, values: &[Option<Memory<'_>>]) -> f64 {
    let tensors = model.table.tensors().iter().zip(values).enumerate();
    let brought = tensors.filter(|(t, (spec, _))| present.has(*t) && spec.role == Role::Parameter);
    let squares = brought.filter_map(|(_, (spec, memory))| {
        let of =
            |bytes: &[u8]| bytes.chunks(BLOCK_BYTES).map(|b| sum_squares(isa, spec.dtype, b)).sum::<f64>();
        memory.as_ref().map(|memory| memory.read(0..memory.len(), of))
    });
    squares.sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::dtype::Dtype;
    use offbeat_core::table::{TensorSpec, TensorTable};
    use std::sync::Arc;

    fn model(dtype: Dtype, role: Role) -> Model {
        let spec = |name: &str, role, dtype| TensorSpec {
            name: name.into(),
            aliases: vec![],
            shape: vec![3],
            dtype,
            role,
        };
        let table = TensorTable::new(vec![spec("a", Role::Parameter, Dtype::F32), spec("b", role, dtype)]);
        Model::new(Arc::new(table.unwrap()))
    }

    fn check_b(model: &Model, present: &Presence, b: &mut [u8]) -> Result<(), ClientError> {
        let mut good = [0; 12];
        check(Isa::detect(), model, present, &[Some(Memory::of(&mut good)), Some(Memory::of(b))])
    }

    #[test]
    fn the_first_bad_gradient_is_named_whatever_its_type() {
        let bits: [(Dtype, Vec<u8>); 3] = [
            (Dtype::F32, [1.0, 2.0, f32::NAN].iter().flat_map(|x| x.to_le_bytes()).collect()),
            (Dtype::F16, [0x3c00_u16, 0x4000, 0x7c00].iter().flat_map(|x| x.to_le_bytes()).collect()),
            (Dtype::BF16, [0x3f80_u16, 0x4000, 0x7fc0].iter().flat_map(|x| x.to_le_bytes()).collect()),
        ];
        for (dtype, mut bytes) in bits {
            let model = model(dtype, Role::Parameter);
            let error = check_b(&model, &Presence::all(2), &mut bytes).unwrap_err();
            assert!(
                matches!(&error, ClientError::NonFinite { tensor, index: 2, .. } if tensor == "b"),
                "{error}"
            );
            assert_eq!(check_b(&model, &Presence::from_fn(2, |t| t == 0), &mut bytes), Ok(()));
        }
    }

    #[test]
    fn a_buffer_may_be_infinite() {
        let mut bytes: Vec<u8> = [f64::INFINITY; 3].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(check_b(&model(Dtype::F64, Role::Buffer), &Presence::all(2), &mut bytes), Ok(()));
    }
}
