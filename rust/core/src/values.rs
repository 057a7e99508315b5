//! Tensor values as they travel (little-endian bytes of their own dtype) and as they are computed on (f32): the two
//! half precisions, finiteness.

use crate::dtype::Dtype;
use crate::optim::{self, Isa};
use crate::table::{Role, TensorSpec, TensorTable};
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Reads little-endian f16, bf16 or f32 into f32; as many elements as both sides have.
///
/// # Panics
/// If `dtype` is not one a parameter may have, which a table excludes.
pub fn widen(dtype: Dtype, wire: &[u8], to: &mut [f32]) {
    match dtype {
        Dtype::F16 => widen_halves(wire, to, f16::from_le_bytes, <[f16]>::convert_to_f32_slice),
        Dtype::BF16 => widen_halves(wire, to, bf16::from_le_bytes, <[bf16]>::convert_to_f32_slice),
        Dtype::F32 => {
            for (to, from) in to.iter_mut().zip(wire.as_chunks().0) {
                *to = f32::from_le_bytes(*from);
            }
        }
        other => unreachable!("{} is not a parameter's type", other.name()),
    }
}

/// Writes f32 as little-endian f16, bf16 (rounded to nearest, ties to even, as torch does) or f32.
///
/// # Panics
/// If `dtype` is not one a parameter may have, which a table excludes.
pub fn narrow(dtype: Dtype, from: &[f32], wire: &mut [u8]) {
    match dtype {
        Dtype::F16 => narrow_halves(
            from,
            wire,
            |x| f16::from_f32(x).to_le_bytes(),
            |halves: &mut [f16], from| {
                halves.convert_from_f32_slice(from);
            },
        ),
        Dtype::BF16 => narrow_halves(
            from,
            wire,
            |x| bf16::from_f32(x).to_le_bytes(),
            |halves: &mut [bf16], from| {
                halves.convert_from_f32_slice(from);
            },
        ),
        Dtype::F32 => {
            for (to, from) in wire.as_chunks_mut().0.iter_mut().zip(from) {
                *to = from.to_le_bytes();
            }
        }
        other => unreachable!("{} is not a parameter's type", other.name()),
    }
}

/// Whether f32, f16 or bf16 bytes hold neither NaN nor infinity.
#[must_use]
pub fn all_finite(isa: Isa, dtype: Dtype, bytes: &[u8]) -> bool {
    match (dtype, bytemuck::try_cast_slice::<u8, f32>(bytes)) {
        (Dtype::F32, Ok(values)) => optim::all_finite(isa, values),
        (Dtype::F32, Err(_)) => {
            bytes.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite())
        }
        // An all-ones exponent is what NaN and infinity have in common.
        (Dtype::F16, _) => bytes.chunks_exact(2).all(|b| b[1] & 0x7c != 0x7c),
        (Dtype::BF16, _) => {
            bytes.chunks_exact(2).all(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7f80 != 0x7f80)
        }
        (other, _) => unreachable!("parameters are never {}", other.name()),
    }
}

/// The smallest magnitudes that are infinite as f16 and as bf16, rounded to nearest: half a step above their largest.
const F16_INFINITY: f32 = 65_520.0;
const BF16_INFINITY: f32 = f32::from_bits(0x7f7f_8000);

/// Whether f32 values are finite, and stay so where they are [narrowed](narrow): a half's largest value is smaller.
#[must_use]
pub fn stay_finite(isa: Isa, dtype: Dtype, values: &[f32]) -> bool {
    let limit = match dtype {
        Dtype::F16 => F16_INFINITY,
        Dtype::BF16 => BF16_INFINITY,
        _ => f32::INFINITY,
    };
    optim::all_smaller(isa, values, limit.to_bits())
}

/// The first element that is NaN or infinite, and its place.
#[must_use]
pub fn first_nonfinite(isa: Isa, dtype: Dtype, bytes: &[u8]) -> Option<(usize, f64)> {
    if all_finite(isa, dtype, bytes) {
        return None;
    }
    let mut wide = [0.0];
    bytes.chunks_exact(dtype.size()).enumerate().find_map(|(index, element)| {
        widen(dtype, element, &mut wide);
        (!wide[0].is_finite()).then(|| (index, f64::from(wide[0])))
    })
}

/// The first value of a model's parameters that is NaN or infinite, and its place; buffers may hold any.
#[must_use]
pub fn first_nonfinite_parameter<'t>(
    isa: Isa,
    table: &'t TensorTable,
    tensors: &[impl AsRef<[u8]>],
) -> Option<(&'t TensorSpec, usize, f64)> {
    let mut parameters = table.tensors().iter().zip(tensors).filter(|(spec, _)| spec.role == Role::Parameter);
    parameters.find_map(|(spec, bytes)| {
        first_nonfinite(isa, spec.dtype, bytes.as_ref()).map(|(index, value)| (spec, index, value))
    })
}

/// Sum of squares, over a fixed tree: the same bits on every machine.
#[must_use]
pub fn sum_squares(isa: Isa, dtype: Dtype, bytes: &[u8]) -> f64 {
    if let (Dtype::F32, Ok(values)) = (dtype, bytemuck::try_cast_slice(bytes)) {
        return optim::sum_squares(isa, values);
    }
    let mut wide = vec![0.0; bytes.len() / dtype.size()];
    widen(dtype, bytes, &mut wide);
    optim::sum_squares(isa, &wide)
}

/// By the slice where memory lies so that it can be read as halves, which uses the processor's conversion; else one
/// by one.
fn widen_halves<H: bytemuck::Pod + Copy + Into<f32>>(
    wire: &[u8],
    to: &mut [f32],
    one: fn([u8; 2]) -> H,
    all: fn(&[H], &mut [f32]),
) {
    match bytemuck::try_cast_slice(wire) {
        Ok(halves) if cfg!(target_endian = "little") && halves.len() == to.len() => all(halves, to),
        _ => {
            for (to, from) in to.iter_mut().zip(wire.as_chunks().0) {
                *to = one(*from).into();
            }
        }
    }
}

fn narrow_halves<H: bytemuck::Pod>(
    from: &[f32],
    wire: &mut [u8],
    one: fn(f32) -> [u8; 2],
    all: fn(&mut [H], &[f32]),
) {
    if cfg!(target_endian = "little")
        && let Ok(halves) = bytemuck::try_cast_slice_mut(wire)
        && halves.len() == from.len()
    {
        all(halves, from);
        return;
    }
    for (to, from) in wire.as_chunks_mut().0.iter_mut().zip(from) {
        *to = one(*from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_half_comes_back_from_f32() {
        for bits in 0..=u16::MAX {
            for dtype in [Dtype::F16, Dtype::BF16] {
                let (mut wide, mut back) = ([0.0], [0; 2]);
                widen(dtype, &bits.to_le_bytes(), &mut wide);
                narrow(dtype, &wide, &mut back);
                assert!(wide[0].is_nan() || back == bits.to_le_bytes(), "{dtype:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn what_stays_finite_is_finite_when_it_is_narrowed() {
        let isa = Isa::detect();
        for (dtype, first) in
            [(Dtype::F16, F16_INFINITY), (Dtype::BF16, BF16_INFINITY), (Dtype::F32, f32::INFINITY)]
        {
            for (value, stays) in [(first.next_down(), true), (first, false), (first.next_up(), false)] {
                for value in [value, -value] {
                    let mut bytes = vec![0; dtype.size()];
                    narrow(dtype, &[value], &mut bytes);
                    assert_eq!(all_finite(isa, dtype, &bytes), stays, "{value} as {dtype:?}");
                    assert_eq!(stay_finite(isa, dtype, &[0.0, value]), stays, "{value} as {dtype:?}");
                }
            }
            assert!(!stay_finite(isa, dtype, &[f32::NAN]));
        }
    }

    proptest! {
        #[test]
        fn alignment_changes_no_bit(values in prop::collection::vec(any::<f32>(), 1..40)) {
            for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32] {
                let bytes = values.len() * dtype.size();
                let (mut a, mut b) = (vec![0; bytes + 1], vec![0; bytes + 1]);
                narrow(dtype, &values, &mut a[..bytes]);
                narrow(dtype, &values, &mut b[1..]);
                prop_assert_eq!(&a[..bytes], &b[1..]);
                let (mut x, mut y) = (vec![0.0; values.len()], vec![0.0; values.len()]);
                widen(dtype, &a[..bytes], &mut x);
                widen(dtype, &b[1..], &mut y);
                prop_assert!(x.iter().zip(&y).all(|(x, y)| x.to_bits() == y.to_bits()));
            }
        }

        #[test]
        fn finiteness_of_halves_is_that_of_their_f32(bits in prop::collection::vec(any::<u16>(), 0..100)) {
            for dtype in [Dtype::F16, Dtype::BF16] {
                let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
                let finite = all_finite(Isa::detect(), dtype, &bytes);
                let mut wide = vec![0.0; bits.len()];
                widen(dtype, &bytes, &mut wide);
                prop_assert_eq!(finite, wide.iter().all(|v| v.is_finite()));
                if finite {
                    let mut back = vec![0; bytes.len()];
                    narrow(dtype, &wide, &mut back);
                    prop_assert_eq!(back, bytes);
                }
            }
        }
    }
}
