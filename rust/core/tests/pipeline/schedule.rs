//! Learning-rate schedules: closed forms, ends and edges.

use offbeat_core::pipeline::schedule::factor;
use offbeat_core::spec::{Schedule, ScheduleShape, ScheduleUnit};
use proptest::prelude::*;
use std::f64::consts::PI;

fn of(shape: ScheduleShape) -> Schedule {
    Schedule { shape, ..Schedule::default() }
}

fn at(schedule: &Schedule, version: u64) -> f64 {
    factor(schedule, version, 0)
}

#[test]
fn no_schedule_is_one() {
    assert_eq!(factor(&Schedule::default(), 0, 0), 1.0);
    assert_eq!(factor(&Schedule::default(), u64::MAX, u64::MAX), 1.0);
}

#[test]
fn steps_fall_where_they_are_said_to() {
    let steps = of(ScheduleShape::Step { step_size: 10, gamma: 0.5 });
    assert_eq!([0, 9, 10, 19, 20, 35].map(|x| at(&steps, x)), [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]);
}

#[test]
fn linear_decay_to_zero_ends_at_zero_and_stays() {
    let line = of(ScheduleShape::Linear { total: 4, end_factor: 0.0 });
    assert_eq!([0, 1, 2, 3, 4, 5, u64::MAX].map(|x| at(&line, x)), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]);
}

#[test]
fn cosine_is_half_way_at_half_time() {
    let cosine = of(ScheduleShape::Cosine { total: 100, end_factor: 0.1 });
    assert_eq!((at(&cosine, 0), at(&cosine, 100), at(&cosine, 101)), (1.0, 0.1, 0.1));
    assert!((at(&cosine, 50) - 0.55).abs() < 1e-12);
}

#[test]
fn warm_up_comes_first_and_the_shape_starts_after_it() {
    let schedule = Schedule {
        warmup: 4,
        warmup_start_factor: 0.2,
        ..of(ScheduleShape::Linear { total: 2, end_factor: 0.0 })
    };
    let expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.0];
    for (x, expected) in expected.into_iter().enumerate() {
        assert!((at(&schedule, x as u64) - expected).abs() < 1e-15, "at {x}");
    }
}

#[test]
fn no_warm_up_has_no_start_factor() {
    let schedule = Schedule { warmup: 0, warmup_start_factor: 0.5, ..Schedule::default() };
    assert_eq!(at(&schedule, 0), 1.0);
}

#[test]
fn positions_count_what_the_unit_says() {
    let shape = ScheduleShape::Linear { total: 100, end_factor: 0.0 };
    assert_eq!(factor(&Schedule { unit: ScheduleUnit::Version, ..of(shape) }, 25, 50), 0.75);
    assert_eq!(factor(&Schedule { unit: ScheduleUnit::Samples, ..of(shape) }, 25, 50), 0.5);
}

#[test]
fn a_total_of_nothing_is_over_at_once() {
    for shape in [
        ScheduleShape::Linear { total: 0, end_factor: 0.25 },
        ScheduleShape::Cosine { total: 0, end_factor: 0.25 },
    ] {
        assert_eq!(at(&of(shape), 0), 0.25);
    }
}

proptest! {
    #[test]
    fn closed_forms(x in 0_u64..400, total in 1_u64..300, end_factor in 0.0..1.5, warmup in 0_u64..50) {
        let schedule = |shape| Schedule { warmup, ..of(shape) };
        let done = |x: u64| (x - warmup).min(total) as f64 / total as f64;
        let difference = |shape, expected: f64| (at(&schedule(shape), x) - expected).abs();
        let (line, cosine) =
            (ScheduleShape::Linear { total, end_factor }, ScheduleShape::Cosine { total, end_factor });
        if x < warmup {
            let expected = x as f64 / warmup as f64;
            for shape in [line, cosine, ScheduleShape::Constant] {
                prop_assert!(difference(shape, expected) <= 1e-12);
            }
        } else {
            let cosine_at = end_factor + (1.0 - end_factor) * (1.0 + (PI * done(x)).cos()) / 2.0;
            prop_assert!(difference(line, 1.0 + (end_factor - 1.0) * done(x)) <= 1e-12);
            prop_assert!(difference(cosine, cosine_at) <= 1e-12);
        }
    }

    #[test]
    fn every_shape_starts_at_exactly_one_and_ends_at_exactly_its_end(
        total in 1_u64..1_000_000, end_factor in 0.0..2.0, after in 0_u64..1000,
    ) {
        for shape in [
            ScheduleShape::Linear { total, end_factor },
            ScheduleShape::Cosine { total, end_factor },
        ] {
            prop_assert_eq!(at(&of(shape), 0), 1.0);
            prop_assert_eq!(at(&of(shape), total + after), end_factor);
        }
    }
}
