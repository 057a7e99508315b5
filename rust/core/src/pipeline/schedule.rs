//! The learning rate over a run, as a factor of each group's base rate: a warm-up, then a shape.
//!
//! Positions are counted by the server, in updates ticketed or in samples, so one schedule serves any number of
//! workers at any speeds, and never moves for a push that was rejected.

use crate::spec::{Schedule, ScheduleShape, ScheduleUnit};
use std::f64::consts::PI;

/// The factor for the push that finds the model at `version`, with `samples` in the pushes before it.
///
/// The first push of a run is at position 0. At its total and ever after, a cosine or a line stays at its end.
#[must_use]
pub fn factor(schedule: &Schedule, version: u64, samples: u64) -> f64 {
    let position = match schedule.unit {
        ScheduleUnit::Version => version,
        ScheduleUnit::Samples => samples,
    };
    match position.checked_sub(schedule.warmup) {
        None => {
            let start = schedule.warmup_start_factor;
            start + (1.0 - start) * (position as f64 / schedule.warmup as f64)
        }
        Some(position) => shape(&schedule.shape, position),
    }
}

fn shape(shape: &ScheduleShape, position: u64) -> f64 {
    match *shape {
        ScheduleShape::Constant => 1.0,
        ScheduleShape::Step { step_size, gamma } => gamma.powf((position / step_size.max(1)) as f64),
        // Both are written as what is lost from 1, so that they start at exactly 1.
        ScheduleShape::Cosine { total, end_factor } => {
            towards(end_factor, position, total, |done| (1.0 - (PI * done).cos()) / 2.0)
        }
        ScheduleShape::Linear { total, end_factor } => towards(end_factor, position, total, |done| done),
    }
}

/// From 1 to `end`: `lost` says which part of the way is behind after a fraction of the total.
fn towards(end: f64, position: u64, total: u64, lost: impl Fn(f64) -> f64) -> f64 {
    if position >= total { end } else { 1.0 - (1.0 - end) * lost(position as f64 / total as f64) }
}
