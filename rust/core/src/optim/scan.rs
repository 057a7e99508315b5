//! Looking at a gradient without changing it: is it finite, how long is it. Both at the speed of memory.

use super::Isa;

/// Bits of the positive infinity. A float is finite exactly if its bits without the sign are below these.
pub(super) const INFINITY: u32 = 0x7f80_0000;

const WITHOUT_SIGN: u32 = 0x7fff_ffff;

/// Elements between two looks at the verdict (16 KiB): a bad slice is refused early, a good one costs nothing more.
const BLOCK: usize = 4096;

/// Partial sums of [`sum_squares`]: four 256-bit registers of f64, enough to hide an addition's latency.
const LANES: usize = 16;

/// The larger of a magnitude and a value's, as integers: unlike a float maximum it vectorises, and NaN wins.
#[inline(always)]
pub(super) fn larger(largest: u32, value: f32) -> u32 {
    largest.max(value.to_bits() & WITHOUT_SIGN)
}

/// Whether every value is finite. Stops at the first block that is not.
#[must_use]
pub fn all_finite(isa: Isa, x: &[f32]) -> bool {
    all_smaller(isa, x, INFINITY)
}

/// Whether every magnitude is smaller than the float of these bits, of which no NaN is.
#[must_use]
pub(crate) fn all_smaller(isa: Isa, x: &[f32], limit: u32) -> bool {
    isa.run(
        #[inline(always)]
        || {
            for block in x.chunks(BLOCK) {
                let mut largest = 0;
                for &value in block {
                    largest = larger(largest, value);
                }
                if largest >= limit {
                    return false;
                }
            }
            true
        },
    )
}

/// Sum of squares in f64, the same bits on every instruction set.
///
/// Element i goes to partial sum i mod 16, and these are added pairwise in a fixed order. The square of an f32 is
/// exact in f64, so it does not matter whether a compiler fuses it into the addition.
#[must_use]
pub fn sum_squares(isa: Isa, x: &[f32]) -> f64 {
    isa.run(
        #[inline(always)]
        || {
            let mut sums = [0.0_f64; LANES];
            let (chunks, rest) = x.as_chunks::<LANES>();
            for chunk in chunks {
                for (sum, &value) in sums.iter_mut().zip(chunk) {
                    *sum += square(value);
                }
            }
            for (sum, &value) in sums.iter_mut().zip(rest) {
                *sum += square(value);
            }
            let mut width = LANES;
            while width > 1 {
                width /= 2;
                for lane in 0..width {
                    sums[lane] += sums[lane + width];
                }
            }
            sums[0]
        },
    )
}

#[inline(always)]
fn square(value: f32) -> f64 {
    let value = f64::from(value);
    value * value
}
