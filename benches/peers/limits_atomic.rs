//! What "Hogwild" costs in Rust: a plain slice update beside relaxed atomics of 32 and 64 bits, unrolled and not, and
//! compare-and-swap; and what it costs to read such a vector. Standard library only, one thread.
//!
//!     rustc --edition 2024 -C opt-level=3 -C target-cpu=native limits_atomic.rs -o limits_atomic
//!
//! One JSON line each, the median of 7; `gb_per_s` counts bytes read and written.
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

const NUM_RUNS: usize = 7;
const PARAMS_PER_RUN: usize = 100_000_000;
const LEARNING_RATE: f32 = 1e-6;

#[inline(never)]
fn plain(params: &mut [f32], gradient: &[f32], lr: f32) {
    for (p, g) in params.iter_mut().zip(gradient) {
        *p -= lr * *g;
    }
}

#[inline(never)]
fn relaxed_32(params: &[AtomicU32], gradient: &[f32], lr: f32) {
    for (p, g) in params.iter().zip(gradient) {
        p.store((f32::from_bits(p.load(Relaxed)) - lr * *g).to_bits(), Relaxed);
    }
}

/// Loads 16, computes 16, stores 16, so that the compiler may vectorize the arithmetic at least.
#[inline(never)]
fn relaxed_32_unrolled(params: &[AtomicU32], gradient: &[f32], lr: f32) {
    for (p, g) in params.chunks_exact(16).zip(gradient.chunks_exact(16)) {
        let mut t = [0f32; 16];
        for i in 0..16 {
            t[i] = f32::from_bits(p[i].load(Relaxed));
        }
        for i in 0..16 {
            t[i] -= lr * g[i];
        }
        for i in 0..16 {
            p[i].store(t[i].to_bits(), Relaxed);
        }
    }
}

/// Two floats an access.
#[inline(never)]
fn relaxed_64(params: &[AtomicU64], gradient: &[f32], lr: f32) {
    for (p, g) in params.iter().zip(gradient.chunks_exact(2)) {
        let bits = p.load(Relaxed);
        let x = f32::from_bits(bits as u32) - lr * g[0];
        let y = f32::from_bits((bits >> 32) as u32) - lr * g[1];
        p.store(u64::from(x.to_bits()) | u64::from(y.to_bits()) << 32, Relaxed);
    }
}

#[inline(never)]
fn compare_and_swap(params: &[AtomicU32], gradient: &[f32], lr: f32) {
    for (p, g) in params.iter().zip(gradient) {
        let _ = p.fetch_update(Relaxed, Relaxed, |bits| {
            Some((f32::from_bits(bits) - lr * *g).to_bits())
        });
    }
}

#[inline(never)]
fn read_32(params: &[AtomicU32], out: &mut [f32]) {
    for (p, o) in params.iter().zip(out) {
        *o = f32::from_bits(p.load(Relaxed));
    }
}

#[inline(never)]
fn read_64(params: &[AtomicU64], out: &mut [u64]) {
    for (p, o) in params.iter().zip(out) {
        *o = p.load(Relaxed);
    }
}

const WAYS: [&str; 8] = [
    "plain",
    "relaxed32",
    "relaxed32_unroll16",
    "relaxed64",
    "cas",
    "read32",
    "read64",
    "copy",
];

fn measure_size(n: usize) {
    let repetitions = (PARAMS_PER_RUN / n).max(1);
    let gradient = vec![1f32; n];
    let mut floats = vec![1f32; n];
    let cells_64: Vec<AtomicU64> = (0..n / 2).map(|_| AtomicU64::new(0)).collect();
    // SAFETY: n is even, so both are 4 n bytes; AtomicU64 is aligned for AtomicU32, and any bits are one. The two
    // views are never used by two threads at once.
    let cells_32: &[AtomicU32] = unsafe { std::slice::from_raw_parts(cells_64.as_ptr().cast(), n) };
    let mut out_32 = vec![0f32; n];
    let mut out_64 = vec![0u64; n / 2];
    for way in WAYS {
        let mut rates = [0f64; NUM_RUNS];
        for rate in &mut rates {
            let start = Instant::now();
            for _ in 0..repetitions {
                match way {
                    "plain" => plain(black_box(&mut floats), black_box(&gradient), LEARNING_RATE),
                    "relaxed32" => relaxed_32(black_box(cells_32), black_box(&gradient), LEARNING_RATE),
                    "relaxed32_unroll16" => {
                        relaxed_32_unrolled(black_box(cells_32), black_box(&gradient), LEARNING_RATE)
                    }
                    "relaxed64" => relaxed_64(black_box(&cells_64), black_box(&gradient), LEARNING_RATE),
                    "cas" => compare_and_swap(black_box(cells_32), black_box(&gradient), LEARNING_RATE),
                    "read32" => read_32(black_box(cells_32), black_box(&mut out_32)),
                    "read64" => read_64(black_box(&cells_64), black_box(&mut out_64)),
                    _ => out_32.copy_from_slice(black_box(&floats)),
                }
                black_box(&out_32);
            }
            *rate = (n * repetitions) as f64 / start.elapsed().as_secs_f64();
        }
        rates.sort_by(f64::total_cmp);
        let median = rates[NUM_RUNS / 2];
        let bytes_per_param = if way.starts_with("read") || way == "copy" {
            8.0
        } else {
            12.0
        };
        println!(
            "{{\"system\":\"limit:rust:{way}\",\"n_params\":{n},\"workers\":1,\"updates_per_s\":{:.1},\
             \"gb_per_s\":{:.2},\"gparams_per_s\":{:.3},\"gparams_min\":{:.3},\"gparams_max\":{:.3}}}",
            median / n as f64,
            median * bytes_per_param / 1e9,
            median / 1e9,
            rates[0] / 1e9,
            rates[NUM_RUNS - 1] / 1e9
        );
    }
}

fn main() {
    for n in [10_000, 1_000_000, 25_000_000] {
        measure_size(n);
    }
}
