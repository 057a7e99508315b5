//! The one gate that every spec passes, whoever sent it: each number in the range where its rule means something.
//!
//! Ranges are torch.optim's where torch has the parameter. Errors name the field as Python knows it.

use crate::spec::{Group, OptimizerSpec, Rule, Schedule, ScheduleShape, SpecError, StalenessSpec, Weight};

/// A group's index travels as u16.
pub const MAX_GROUPS: usize = 65_535;

impl OptimizerSpec {
    /// Checks every group and what they must have in common.
    ///
    /// # Errors
    /// The first field that is out of its range, with its value and the remedy.
    pub fn validate(&self) -> Result<(), SpecError> {
        let Some((last, earlier)) = self.groups.split_last() else {
            return refuse("groups", "[]", "give at least one group, the last with the pattern \"*\"");
        };
        if self.groups.len() > MAX_GROUPS {
            return refuse(
                "groups",
                format!("{} groups", self.groups.len()),
                format!("use at most {MAX_GROUPS}"),
            );
        }
        if last.pattern != "*" {
            let remedy = "end with a group for the rest, whose pattern is \"*\"";
            return refuse(&field(earlier.len(), "pattern"), format!("{:?}", last.pattern), remedy);
        }
        for (index, group) in self.groups.iter().enumerate() {
            group.validate(index)?;
            if kind(&group.rule) != kind(&last.rule) {
                let remedy =
                    format!("use one optimizer for all groups; the last one's is {}", kind(&last.rule));
                return refuse(&field(index, "rule"), kind(&group.rule), remedy);
            }
        }
        if self.momentum_correction { self.validate_momentum_correction() } else { Ok(()) }
    }

    fn validate_momentum_correction(&self) -> Result<(), SpecError> {
        let remedy = "use SGD with momentum > 0 and dampening 0, or momentum_correction=False";
        let mut any = false;
        for group in &self.groups {
            match group.rule {
                Rule::Sgd { momentum, dampening: 0.0, .. } => any |= momentum > 0.0,
                Rule::Sgd { dampening, .. } => {
                    return refuse("momentum_correction", format!("True with dampening {dampening}"), remedy);
                }
                ref other => {
                    return refuse("momentum_correction", format!("True with {}", kind(other)), remedy);
                }
            }
        }
        if any { Ok(()) } else { refuse("momentum_correction", "True with momentum 0", remedy) }
    }
}

impl Group {
    fn validate(&self, index: usize) -> Result<(), SpecError> {
        let at = |name: &str| field(index, name);
        if self.pattern.is_empty() {
            return refuse(
                &at("pattern"),
                "\"\"",
                "give a pattern over tensor names, as \"*.bias\" or \"*\"",
            );
        }
        not_negative(&at("lr"), self.lr)?;
        match self.rule {
            Rule::Sgd { momentum, dampening, weight_decay, nesterov, maximize: _ } => {
                not_negative(&at("momentum"), momentum)?;
                finite(&at("dampening"), dampening)?;
                not_negative(&at("weight_decay"), weight_decay)?;
                if nesterov && (momentum <= 0.0 || dampening != 0.0) {
                    let value = format!("True with momentum {momentum} and dampening {dampening}");
                    return refuse(&at("nesterov"), value, "Nesterov needs momentum > 0 and dampening 0");
                }
                Ok(())
            }
            Rule::Adam { betas, eps, weight_decay, amsgrad: _, maximize: _, decoupled_weight_decay: _ } => {
                below_one(&at("betas[0]"), betas.0)?;
                below_one(&at("betas[1]"), betas.1)?;
                not_negative(&at("eps"), eps)?;
                not_negative(&at("weight_decay"), weight_decay)
            }
            Rule::Adagrad { lr_decay, weight_decay, initial_accumulator_value, eps, maximize: _ } => {
                not_negative(&at("lr_decay"), lr_decay)?;
                not_negative(&at("weight_decay"), weight_decay)?;
                not_negative(&at("initial_accumulator_value"), initial_accumulator_value)?;
                not_negative(&at("eps"), eps)
            }
            Rule::RmsProp { alpha, eps, weight_decay, momentum, centered: _, maximize: _ } => {
                not_negative(&at("alpha"), alpha)?;
                not_negative(&at("eps"), eps)?;
                not_negative(&at("weight_decay"), weight_decay)?;
                not_negative(&at("momentum"), momentum)
            }
            Rule::DelayedNesterov { momentum, delay, activation } => {
                below_one(&at("momentum"), momentum)?;
                at_least_one(&at("delay"), delay)?;
                let most = 1.0 / delay as f64;
                let remedy = format!("give a number from 0 to 1/delay, which is {most}");
                check((0.0..=most).contains(&activation), &at("activation"), activation, &remedy)
            }
            Rule::Add => Ok(()),
        }
    }
}

impl StalenessSpec {
    /// Checks every policy and limit.
    ///
    /// # Errors
    /// The first field that is out of its range, with its value and the remedy.
    pub fn validate(&self) -> Result<(), SpecError> {
        for weight in &self.weights {
            match *weight {
                Weight::Constant | Weight::Inverse => {}
                Weight::AdaptiveLr { factor } => fraction("staleness_lr_factor", factor)?,
                Weight::Polynomial { a } | Weight::Hinge { a, b: _ } => not_negative("a", a)?,
            }
        }
        match self.max_norm {
            Some(norm) if !(norm.is_finite() && norm > 0.0) => {
                refuse("max_norm", norm, "give a finite number > 0, or None for no limit")
            }
            _ => Ok(()),
        }
    }
}

impl Schedule {
    /// Checks warm-up and shape.
    ///
    /// # Errors
    /// The first field that is out of its range, with its value and the remedy.
    pub fn validate(&self) -> Result<(), SpecError> {
        if !(0.0..=1.0).contains(&self.warmup_start_factor) {
            return refuse("warmup_start_factor", self.warmup_start_factor, "give a number from 0 to 1");
        }
        match self.shape {
            ScheduleShape::Constant => Ok(()),
            ScheduleShape::Step { step_size, gamma } => {
                at_least_one("step_size", step_size)?;
                fraction("gamma", gamma)
            }
            ScheduleShape::Cosine { total, end_factor } | ScheduleShape::Linear { total, end_factor } => {
                at_least_one("total", total)?;
                not_negative("end_factor", end_factor)
            }
        }
    }
}

/// The rule's name as Python has it. AdamW is a rule of its own there.
#[must_use]
pub fn kind(rule: &Rule) -> &'static str {
    match rule {
        Rule::Sgd { .. } => "SGD",
        Rule::Adam { decoupled_weight_decay: false, .. } => "Adam",
        Rule::Adam { decoupled_weight_decay: true, .. } => "AdamW",
        Rule::Adagrad { .. } => "Adagrad",
        Rule::RmsProp { .. } => "RMSprop",
        Rule::DelayedNesterov { .. } => "DelayedNesterov",
        Rule::Add => "Add",
    }
}

fn field(index: usize, name: &str) -> String {
    format!("groups[{index}].{name}")
}

fn refuse(field: &str, value: impl ToString, remedy: impl Into<String>) -> Result<(), SpecError> {
    Err(SpecError { field: field.to_owned(), value: value.to_string(), remedy: remedy.into() })
}

fn check(good: bool, field: &str, value: impl ToString, remedy: &str) -> Result<(), SpecError> {
    if good { Ok(()) } else { refuse(field, value, remedy) }
}

/// Kernels compute in f32: what is infinite there is infinite here.
fn in_f32(value: f64) -> bool {
    (value as f32).is_finite()
}

fn finite(field: &str, value: f64) -> Result<(), SpecError> {
    check(in_f32(value), field, value, "give a finite number")
}

fn not_negative(field: &str, value: f64) -> Result<(), SpecError> {
    check(in_f32(value) && value >= 0.0, field, value, "give a finite number >= 0")
}

fn below_one(field: &str, value: f64) -> Result<(), SpecError> {
    check((0.0..1.0).contains(&value), field, value, "give a number >= 0 and < 1")
}

fn fraction(field: &str, value: f64) -> Result<(), SpecError> {
    check(value > 0.0 && value <= 1.0, field, value, "give a number > 0 and <= 1")
}

fn at_least_one(field: &str, value: u64) -> Result<(), SpecError> {
    check(value >= 1, field, value, "give a number >= 1")
}
