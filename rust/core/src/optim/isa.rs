//! Which instructions the loops are compiled for, chosen once at run time.
//!
//! A wheel is built for the oldest CPU of its platform, where a fused multiply-add is a call to libm for each
//! element. So every loop is compiled for several instruction sets and the widest that runs here is taken.

use std::fmt;

/// An instruction set that this CPU has; proof that code compiled for it may run.
#[derive(Clone, Copy)]
pub struct Isa(pulp::Arch);

impl Isa {
    /// The widest that this CPU has.
    #[must_use]
    pub fn detect() -> Self {
        Self(pulp::Arch::new())
    }

    /// No vector instructions: what runs everywhere, and what the oracle computes with.
    #[must_use]
    pub fn scalar() -> Self {
        Self(pulp::Arch::Scalar)
    }

    /// All that this CPU has, narrowest first. Their results are the same bits; tests hold them against each other.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self(pulp::Arch::Scalar)];
        #[cfg(target_arch = "x86_64")]
        all.extend(pulp::x86::V3::try_new().map(|v3| Self(pulp::Arch::V3(v3))));
        if !all.contains(&Self::detect()) {
            all.push(Self::detect());
        }
        all
    }

    /// The instruction set's name, as status and benches print it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            pulp::Arch::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V3(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V4(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            pulp::Arch::Neon(_) => "neon",
            _ => "other",
        }
    }

    /// Runs `f` compiled for this instruction set. Everything that `f` calls must be `#[inline(always)]`: code that
    /// is not inlined is compiled for the oldest CPU.
    #[inline(always)]
    pub(crate) fn run<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.dispatch(f)
    }
}

impl PartialEq for Isa {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Isa {}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Default for Isa {
    fn default() -> Self {
        Self::detect()
    }
}
