//! Asking for memory before it is needed.
//!
//! A step reads a fragment that was last touched a whole model ago, and the hardware's own prefetcher starts anew at
//! every page of 4 KiB. An update in place forgives that; one that writes elsewhere was some 8 % slower for it (25 M
//! parameters, AMD Zen 5).

/// Elements (8 KiB) between what is computed and what is asked for: the best of 1 to 32 KiB, 4 KiB nearly as good.
///
/// A batch of several pushes goes over the fragment in chunks no longer than this, so there nothing is asked for.
pub(super) const AHEAD: usize = 2048;

/// Elements of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 16;

/// Asks for the cache lines of `values`; changes nothing but the time until they are read.
#[inline(always)]
pub(super) fn prefetch(values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    if let Some(sse) = pulp::core_arch::x86::Sse::try_new() {
        for line in values.chunks(LINE) {
            sse._mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast());
        }
    }
    // Elsewhere the standard library has no stable way to ask.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}
