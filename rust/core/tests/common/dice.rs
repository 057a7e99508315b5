//! What a seed decides, and which seeds are run: `OFFBEAT_SEEDS` says how many, `OFFBEAT_SEED` from which on.

use std::ops::Range;

/// Numbers that follow from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.roll() % n as u64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The seeds to run: `default` of them unless the environment says how many.
pub(crate) fn seeds(default: u64) -> Range<u64> {
    let said = |name: &str| {
        #[expect(clippy::disallowed_methods, reason = "which seeds a test runs is said where it is started")]
        let value = std::env::var(name);
        value.ok().map(|value| value.parse::<u64>().unwrap_or_else(|e| panic!("{name}: {e}")))
    };
    let first = said("OFFBEAT_SEED").unwrap_or(0);
    first..first + said("OFFBEAT_SEEDS").unwrap_or(default)
}
