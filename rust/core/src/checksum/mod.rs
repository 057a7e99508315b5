//! What tells a damaged payload from a sound one.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// XXH3-64 of no bytes, its low half.
const OF_NOTHING: u32 = 0x38d3_94c2;

/// The low half of XXH3-64 (seed 0), so shifted that it is 0 for no bytes. Of 256 KiB an EPYC takes 54 GB/s with AVX2
/// and 148 with AVX-512, where crc32fast's CRC-32 reaches 26; a fragment is warm in the cache when it is taken.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() > avx512::MAX_SHORT_BYTES
        && let Some(simd) = pulp::x86::V4::try_new()
    {
        return low(avx512::long(simd, bytes));
    }
    low(XxHash3_64::oneshot(bytes))
}

/// The same of a payload that lies in several places, taken one after another.
#[derive(Default)]
pub struct Checksum(XxHash3_64);

impl Checksum {
    /// Counts the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u32 {
        low(self.0.finish())
    }
}

/// What is kept of a hash: any half is as good a checksum as the other.
fn low(hash: u64) -> u32 {
    hash as u32 ^ OF_NOTHING
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By two other implementations, xxHash's own and the crate xxhash-rust.
    #[test]
    fn the_checksum_is_half_of_xxh3() {
        assert_eq!(checksum(b"123456789"), 0x67a1_7dff ^ 0x38d3_94c2);
        assert_eq!(checksum(&[7; 1000]), 0x3954_51ea ^ 0x38d3_94c2);
        assert_eq!(checksum(b""), 0);
    }

    #[test]
    fn a_checksum_of_parts_is_that_of_the_whole() {
        let mut parts = Checksum::default();
        for part in [&b"1234"[..], b"", b"56789"] {
            parts.update(part);
        }
        assert_eq!(parts.finish(), checksum(b"123456789"));
        assert_eq!(Checksum::default().finish(), checksum(b""));
    }

    proptest! {
        /// Where there is no AVX-512 both sides are the same code.
        #[test]
        fn every_instruction_set_gives_the_same_checksum(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            start in 0..64_usize,
        ) {
            let bytes = &bytes[start.min(bytes.len())..];
            prop_assert_eq!(checksum(bytes), low(XxHash3_64::oneshot(bytes)));
        }
    }

    #[test]
    fn a_checksum_is_the_same_at_every_length_around_a_stripe_and_a_block() {
        let bytes: Vec<u8> = (0..70_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in (0..=2200).chain([65_535, 65_536, 65_537, 70_000]) {
            assert_eq!(checksum(&bytes[..len]), low(XxHash3_64::oneshot(&bytes[..len])), "of {len} bytes");
        }
    }
}
