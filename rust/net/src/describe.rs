//! What a run obeys, as it is told: to people in a line, to programs as JSON; of a running server and of a checkpoint.

use offbeat_core::pipeline::schedule;
use offbeat_core::spec::{Contribution, OptimizerSpec, Schedule};
use offbeat_core::validate::kind;
use serde::Serialize;
use std::fmt::Write as _;

/// The optimizer, and where it runs.
#[derive(Serialize)]
pub(crate) struct OptimizerTold<'a> {
    /// `server` or `worker`.
    runs_on: &'static str,
    summary: String,
    spec: &'a OptimizerSpec,
}

impl<'a> OptimizerTold<'a> {
    pub(crate) fn of(spec: &'a OptimizerSpec, contribution: Option<Contribution>) -> Self {
        let runs_on = if contribution == Some(Contribution::Delta) { "worker" } else { "server" };
        Self { runs_on, summary: optimizer(spec), spec }
    }
}

/// The schedule, and where it is.
#[derive(Serialize)]
pub(crate) struct ScheduleTold {
    spec: Schedule,
    factor: f64,
    /// Per parameter group, the factor included.
    lr: Vec<f64>,
}

impl ScheduleTold {
    /// As the next push finds it, after so many updates and samples.
    pub(crate) fn at(spec: Schedule, optimizer: Option<&OptimizerSpec>, version: u64, samples: u64) -> Self {
        let factor = schedule::factor(&spec, version, samples);
        let lr = optimizer.map_or_else(Vec::new, |o| o.groups.iter().map(|g| g.lr * factor).collect());
        Self { spec, factor, lr }
    }
}

/// An optimizer as Python writes it: `SGD(lr=0.1, momentum=0.9, …)`, one per group.
pub(crate) fn optimizer(spec: &OptimizerSpec) -> String {
    let mut text = String::new();
    for group in &spec.groups {
        let of = if spec.groups.len() > 1 { format!(" for {:?}", group.pattern) } else { String::new() };
        let comma = if text.is_empty() { "" } else { ", " };
        write!(text, "{comma}{}(lr={}", kind(&group.rule), group.lr).expect("a String takes any text");
        if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(&group.rule) {
            for (name, value) in
                fields.iter().filter(|(name, _)| !["name", "decoupled_weight_decay"].contains(&name.as_str()))
            {
                let value = match value {
                    serde_json::Value::Bool(true) => "True".to_owned(),
                    serde_json::Value::Bool(false) => "False".to_owned(),
                    other => other.to_string(),
                };
                write!(text, ", {name}={value}").expect("a String takes any text");
            }
        }
        write!(text, "){of}").expect("a String takes any text");
    }
    text
}
