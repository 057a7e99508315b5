//! What a step costs beside the cheapest loop that could do it, and what a look at a gradient costs.
//!
//! `cargo bench --bench pipeline`. Throughput counts the bytes that the formula reads and writes: 12 a parameter for
//! SGD, 28 for Adam. A fragment of 64 Ki parameters is what the store works on; 4 Mi is a model that no cache holds.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_core::optim::{self, Isa, MAX_STATE, Source, Stepper, Target};
use offbeat_core::spec::Rule;
use offbeat_core::velocity;
use std::array;
use std::hint::black_box;
use std::time::Duration;

const FRAGMENT: usize = 64 * 1024;
const MODEL: usize = 4 * 1024 * 1024;

const BARE: Rule =
    Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };

fn rules() -> [(&'static str, Rule, f64); 8] {
    let sgd = |momentum, nesterov, weight_decay| Rule::Sgd {
        momentum,
        dampening: 0.0,
        weight_decay,
        nesterov,
        maximize: false,
    };
    let adam = |amsgrad, decoupled_weight_decay| Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: if decoupled_weight_decay { 0.01 } else { 0.0 },
        amsgrad,
        maximize: false,
        decoupled_weight_decay,
    };
    [
        ("sgd", BARE, 1.0),
        ("sgd damped", BARE, 0.5),
        ("sgd decay", sgd(0.0, false, 0.01), 1.0),
        ("sgd nesterov decay", sgd(0.9, true, 0.01), 1.0),
        ("adam", adam(false, false), 1.0),
        ("adamw amsgrad", adam(true, true), 1.0),
        (
            "adagrad",
            Rule::Adagrad {
                lr_decay: 0.0,
                weight_decay: 0.0,
                initial_accumulator_value: 0.0,
                eps: 1e-10,
                maximize: false,
            },
            1.0,
        ),
        (
            "rmsprop centered momentum",
            Rule::RmsProp {
                alpha: 0.99,
                eps: 1e-8,
                weight_decay: 0.0,
                momentum: 0.9,
                centered: true,
                maximize: false,
            },
            1.0,
        ),
    ]
}

fn noise(n: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1_u32 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// One tensor's memory, twice: where a step reads and where it writes.
struct Memory {
    grad: Vec<f32>,
    from: [Vec<f32>; 1 + MAX_STATE],
    to: [Vec<f32>; 1 + MAX_STATE],
}

impl Memory {
    fn new(n: usize, slots: usize) -> Self {
        let arrays = || array::from_fn(|i| if i <= slots { vec![0.1; n] } else { Vec::new() });
        Self { grad: noise(n), from: arrays(), to: arrays() }
    }

    fn step_into(&mut self, isa: Isa, stepper: &Stepper) -> bool {
        let [param, s0, s1, s2] = &self.from;
        let source = Source { param, state: [s0, s1, s2] };
        let [param, s0, s1, s2] = &mut self.to;
        optim::step_into(isa, stepper, &self.grad, &source, Target { param, state: [s0, s1, s2] })
    }

    fn step_in_place(&mut self, isa: Isa, stepper: &Stepper) -> bool {
        let [param, s0, s1, s2] = &mut self.to;
        optim::step_in_place(isa, stepper, &self.grad, Target { param, state: [s0, s1, s2] })
    }
}

fn steps(c: &mut Criterion) {
    for (size, n) in [("fragment", FRAGMENT), ("model", MODEL)] {
        let mut group = c.benchmark_group(format!("step/{size}"));
        for (name, rule, weight) in rules() {
            let slots = optim::state_slots(&rule);
            group.throughput(Throughput::Bytes((4 * n * (3 + 2 * slots)) as u64));
            let mut memory = Memory::new(n, slots);
            let stepper = Stepper::new(&rule, 1e-6, weight, 1000);
            for isa in Isa::available() {
                if isa.name() == "scalar" && n == MODEL {
                    continue;
                }
                group.bench_function(BenchmarkId::new(format!("{name}/into"), isa.name()), |b| {
                    b.iter(|| black_box(memory.step_into(isa, &stepper)));
                });
                group.bench_function(BenchmarkId::new(format!("{name}/in place"), isa.name()), |b| {
                    b.iter(|| black_box(memory.step_in_place(isa, &stepper)));
                });
            }
        }
        group.finish();
    }
}

fn scans(c: &mut Criterion) {
    let mut group = c.benchmark_group("scan");
    for (size, n) in [("fragment", FRAGMENT), ("100 MB", 25_000_000)] {
        let x = noise(n);
        group.throughput(Throughput::Bytes(4 * n as u64));
        for isa in Isa::available() {
            group.bench_function(BenchmarkId::new(format!("all_finite/{size}"), isa.name()), |b| {
                b.iter(|| black_box(optim::all_finite(isa, black_box(&x))));
            });
            group.bench_function(BenchmarkId::new(format!("sum_squares/{size}"), isa.name()), |b| {
                b.iter(|| black_box(optim::sum_squares(isa, black_box(&x))));
            });
        }
    }
    group.finish();
}

fn velocity(c: &mut Criterion) {
    let mut group = c.benchmark_group("velocity");
    let (grad, x, v) = (noise(MODEL), noise(MODEL), noise(MODEL));
    let (mut next, mut out) = (vec![0.0; MODEL], vec![0.0; MODEL]);
    for (name, wd, arrays) in [("plain", 0.0, 4), ("decay", 1e-4, 5)] {
        group.throughput(Throughput::Bytes((4 * arrays * MODEL) as u64));
        let x = if wd == 0.0 { &[][..] } else { &x };
        group.bench_function(name, |b| {
            b.iter(|| {
                let isa = Isa::detect();
                velocity::correct(isa, 0.9, wd, false, false, &grad, x, &v, &mut next, &mut out)
            });
        });
    }
    group.finish();
}

fn stepper(c: &mut Criterion) {
    let mut group = c.benchmark_group("stepper");
    for (name, rule, weight) in rules() {
        group.bench_function(name, |b| {
            b.iter(|| Stepper::new(black_box(&rule), 0.1, weight, black_box(1000)));
        });
    }
    group.finish();
}

/// Short looks at many things: all of `cargo bench` is to take minutes. `--measurement-time` and its like say otherwise.
fn short() -> Criterion {
    let second = Duration::from_secs(1);
    Criterion::default().warm_up_time(second / 2).measurement_time(second).sample_size(30)
}

criterion_group! {
    name = benches;
    config = short();
    targets = steps, scans, velocity, stepper
}
criterion_main!(benches);
