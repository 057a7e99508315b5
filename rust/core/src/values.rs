//! Tensor values as they travel (little-endian bytes of their own dtype) and as the store computes on them (f32).

use crate::dtype::Dtype;
use crate::optim::{self, Isa};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Reads f32, f16 or bf16 bytes as f32.
///
/// # Panics
/// If the lengths differ, or the dtype is none of the three (a table refuses such parameters).
pub fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        bytes.len(),
        out.len() * dtype.size(),
        "one value out per value in"
    );
    match dtype {
        Dtype::F32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
        Dtype::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(halves) => halves.convert_to_f32_slice(out),
            Err(_) => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        },
        Dtype::BF16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        other => unreachable!("parameters are never {}", other.name()),
    }
}

fn each(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; 2]) -> f32) {
    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = read([b[0], b[1]]);
    }
}

/// Rounds f32 to nearest even into f32, f16 or bf16 bytes.
///
/// # Panics
/// As [`widen`].
pub fn narrow(dtype: Dtype, values: &[f32], out: &mut [u8]) {
    assert_eq!(
        out.len(),
        values.len() * dtype.size(),
        "one value out per value in"
    );
    match dtype {
        Dtype::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        Dtype::F16 => match bytemuck::try_cast_slice_mut::<u8, f16>(out) {
            Ok(halves) => halves.convert_from_f32_slice(values),
            Err(_) => unreachable!("callers give memory that is at least 2-aligned"),
        },
        Dtype::BF16 => {
            for (o, v) in out.chunks_exact_mut(2).zip(values) {
                o.copy_from_slice(&bf16::from_f32(*v).to_le_bytes());
            }
        }
        other => unreachable!("parameters are never {}", other.name()),
    }
}

/// CRC-32/ISCSI of raw values; 0 for none. Processors have an instruction for it, and a fragment is warm in the cache
/// when it is taken.
#[must_use]
pub fn crc(bytes: &[u8]) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a 32-bit checksum in a 64-bit return type"
    )]
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    crc
}

/// Whether f32, f16 or bf16 bytes hold neither NaN nor infinity.
#[must_use]
pub fn all_finite(isa: Isa, dtype: Dtype, bytes: &[u8]) -> bool {
    match (dtype, bytemuck::try_cast_slice::<u8, f32>(bytes)) {
        (Dtype::F32, Ok(values)) => optim::all_finite(isa, values),
        (Dtype::F32, Err(_)) => bytes
            .chunks_exact(4)
            .all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite()),
        // An all-ones exponent is what NaN and infinity have in common.
        (Dtype::F16, _) => bytes.chunks_exact(2).all(|b| b[1] & 0x7c != 0x7c),
        (Dtype::BF16, _) => bytes
            .chunks_exact(2)
            .all(|b| u16::from_le_bytes([b[0], b[1]]) & 0x7f80 != 0x7f80),
        (other, _) => unreachable!("parameters are never {}", other.name()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sixteen_bit_values_survive_a_round_trip(bits in prop::collection::vec(any::<u16>(), 0..100)) {
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

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let mut out = [0; 2];
        narrow(Dtype::BF16, &[1.0 + 1.0 / 256.0], &mut out);
        assert_eq!(bf16::from_le_bytes(out).to_f32(), 1.0);
    }
}
