//! How a model's buffers (`BatchNorm`'s statistics, counters, masks) take a worker's change.
//!
//! A push brings a buffer's value after the worker's forward passes and the value the worker had pulled. Element by
//! element: where nobody wrote since, the worker's value is stored, bit for bit; where somebody did, the worker's
//! change is added. A bool, or a float of which any of the three values is not finite (an "infinity so far"
//! sentinel), is overwritten: there a difference means nothing.
//!
//! A float's sum goes no further than the worker's own value: it stays between what is held and what is brought. Floats
//! are averages, each change of one a step towards what the batches have; steps of the same way from an old base,
//! taken by all workers, would go past it, further each time once workers × batches × momentum exceed about 1.5,
//! and make a variance negative on the way. Integers count, and counts add up.

use crate::dtype::Dtype;
use bytemuck::Pod;
use half::{bf16, f16};

/// Merges one run of elements, all slices `len * dtype.size()` bytes.
pub(super) fn merge(dtype: Dtype, held: &mut [u8], value: &[u8], base: &[u8]) {
    match dtype {
        Dtype::F32 => each(held, value, base, |h: f32, v, b| {
            if h.is_finite() && v.is_finite() && b.is_finite() {
                (h + (v - b)).clamp(h.min(v), h.max(v))
            } else {
                v
            }
        }),
        Dtype::F64 => each(held, value, base, |h: f64, v, b| {
            if h.is_finite() && v.is_finite() && b.is_finite() {
                (h + (v - b)).clamp(h.min(v), h.max(v))
            } else {
                v
            }
        }),
        Dtype::F16 => each(held, value, base, |h: f16, v, b| {
            if h.is_finite() && v.is_finite() && b.is_finite() {
                f16::from_f32(h.to_f32() + (v.to_f32() - b.to_f32())).clamp(h.min(v), h.max(v))
            } else {
                v
            }
        }),
        Dtype::BF16 => each(held, value, base, |h: bf16, v, b| {
            if h.is_finite() && v.is_finite() && b.is_finite() {
                bf16::from_f32(h.to_f32() + (v.to_f32() - b.to_f32())).clamp(h.min(v), h.max(v))
            } else {
                v
            }
        }),
        Dtype::I8 => each(held, value, base, |h: i8, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::U8 => each(held, value, base, |h: u8, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I16 => each(held, value, base, |h: i16, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I32 => each(held, value, base, |h: i32, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::I64 => each(held, value, base, |h: i64, v, b| h.wrapping_add(v.wrapping_sub(b))),
        Dtype::Bool => each(held, value, base, |h: u8, v, b| if v == b { h } else { v }),
    }
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
    use proptest::prelude::*;

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
        assert_eq!(merged(Dtype::F64, 2.0, 5.0, 4.0_f64), 3.0);
        assert_eq!(merged(Dtype::I64, 10, 3, 1_i64), 12);
        assert_eq!(merged(Dtype::U8, 250, 10, 0_u8), 4);
        assert_eq!(
            merged(Dtype::BF16, bf16::from_f32(2.0), bf16::from_f32(3.5), bf16::from_f32(3.0)),
            bf16::from_f32(2.5)
        );
    }

    #[test]
    fn an_average_goes_no_further_than_the_worker_s_value() {
        assert_eq!(merged(Dtype::F64, 2.0, 1.0, 8.0_f64), 1.0);
        assert_eq!(merged(Dtype::F32, 2.0, 5.0, 6.0_f32), 2.0, "it has come further already");
        let [h, v, b] = [2.0, 1.0, 8.0].map(f16::from_f32);
        assert_eq!(merged(Dtype::F16, h, v, b), v);
        assert_eq!(merged(Dtype::F64, f64::MAX, f64::MIN, f64::MAX / 2.0), f64::MIN, "nor to infinity");
    }

    proptest! {
        /// Moving averages, each worker's from the value it last saw, in any order of turns.
        #[test]
        fn averages_stay_between_the_values_that_were_averaged(
            num_workers in 2..20_usize,
            batches in 1..10_i32,
            turns in prop::collection::vec((0..20_usize, 0.01..0.02_f32), 50..400),
        ) {
            let keep = 0.9_f32.powi(batches);
            let mut held = 1.0_f32;
            let mut bases = vec![held; num_workers];
            for (worker, target) in turns {
                let base = bases[worker % num_workers];
                held = merged(Dtype::F32, held, keep * base + (1.0 - keep) * target, base);
                bases[worker % num_workers] = held;
                prop_assert!((0.01..=1.0).contains(&held), "{held}");
            }
        }
    }

    #[test]
    fn a_bool_or_a_sentinel_is_overwritten() {
        assert_eq!(merged(Dtype::Bool, 1, 0, 1_u8), 0);
        assert_eq!(merged(Dtype::Bool, 0, 1, 1_u8), 0, "unchanged by this worker: the other's value stays");
        assert_eq!(merged(Dtype::F32, 5.0, 4.0, f32::INFINITY), 4.0);
    }
}
