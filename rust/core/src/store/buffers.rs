//! How a model's buffers (`BatchNorm`'s statistics, counters, masks) take a worker's change.
//!
//! A push brings a buffer's value after the worker's forward passes and the value the worker had pulled. Element by
//! element: where nobody wrote since, the worker's value is stored, bit for bit; where somebody did, the worker's
//! change is added. A bool, or a float of which any of the three values is not finite (an "infinity so far"
//! sentinel), is overwritten: there a difference means nothing.

use crate::dtype::Dtype;
use bytemuck::Pod;
use half::{bf16, f16};

/// Merges one run of elements, all slices `len * dtype.size()` bytes.
pub(super) fn merge(dtype: Dtype, held: &mut [u8], value: &[u8], base: &[u8]) {
    match dtype {
        Dtype::F32 => each(held, value, base, |h: f32, v, b| {
            finite_or(v, h + (v - b), [h, v, b].iter().all(|x| x.is_finite()))
        }),
        Dtype::F64 => each(held, value, base, |h: f64, v, b| {
            finite_or(v, h + (v - b), [h, v, b].iter().all(|x| x.is_finite()))
        }),
        Dtype::F16 => each(held, value, base, |h: f16, v, b| {
            let sum = f16::from_f32(h.to_f32() + (v.to_f32() - b.to_f32()));
            finite_or(v, sum, [h, v, b].iter().all(|x| x.is_finite()))
        }),
        Dtype::BF16 => each(held, value, base, |h: bf16, v, b| {
            let sum = bf16::from_f32(h.to_f32() + (v.to_f32() - b.to_f32()));
            finite_or(v, sum, [h, v, b].iter().all(|x| x.is_finite()))
        }),
        Dtype::I8 => each(held, value, base, |h: i8, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::U8 => each(held, value, base, |h: u8, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I16 => each(held, value, base, |h: i16, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I32 => each(held, value, base, |h: i32, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I64 => each(held, value, base, |h: i64, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::Bool => each(held, value, base, |h: u8, v, b| if v == b { h } else { v }),
    }
}

fn finite_or<T>(value: T, sum: T, finite: bool) -> T {
    if finite { sum } else { value }
}

/// Payloads come straight off the wire, at any alignment.
fn each<T: Pod>(held: &mut [u8], value: &[u8], base: &[u8], add: impl Fn(T, T, T) -> T) {
    let size = size_of::<T>();
    for ((h, v), b) in held.chunks_exact_mut(size).zip(value.chunks_exact(size)).zip(base.chunks_exact(size))
    {
        if h == b {
            h.copy_from_slice(v);
        } else {
            let read = bytemuck::pod_read_unaligned::<T>;
            h.copy_from_slice(bytemuck::bytes_of(&add(read(h), read(v), read(b))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged<T: Pod>(dtype: Dtype, held: T, value: T, base: T) -> T {
        let mut out = held;
        merge(dtype, bytemuck::bytes_of_mut(&mut out), bytemuck::bytes_of(&value), bytemuck::bytes_of(&base));
        out
    }

    #[test]
    fn where_nobody_wrote_the_value_is_stored_bit_for_bit() {
        let (base, value) = (0.1_f32, 0.3_f32);
        assert_ne!((base + (value - base)).to_bits(), (0.1_f32 + 0.3_f32).to_bits());
        assert_eq!(merged(Dtype::F32, base, value, base).to_bits(), value.to_bits());
        assert_eq!(merged(Dtype::F32, 1.0, f32::NEG_INFINITY, 1.0_f32), f32::NEG_INFINITY);
    }

    #[test]
    fn where_somebody_wrote_the_change_is_added() {
        assert_eq!(merged(Dtype::F64, 10.0, 3.0, 1.0_f64), 12.0);
        assert_eq!(merged(Dtype::I64, 10, 3, 1_i64), 12);
        assert_eq!(merged(Dtype::U8, 250, 10, 0_u8), 4);
        assert_eq!(
            merged(Dtype::BF16, bf16::from_f32(2.0), bf16::from_f32(1.5), bf16::from_f32(1.0)),
            bf16::from_f32(2.5)
        );
    }

    #[test]
    fn a_bool_or_a_sentinel_is_overwritten() {
        assert_eq!(merged(Dtype::Bool, 1, 0, 1_u8), 0);
        assert_eq!(merged(Dtype::Bool, 0, 1, 1_u8), 0, "unchanged by this worker: the other's value stays");
        assert_eq!(merged(Dtype::F32, 5.0, 4.0, f32::INFINITY), 4.0);
    }
}
