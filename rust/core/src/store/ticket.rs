//! What an admitted push may do: its number, its learning rates, its hyper-parameters. A plain value, issued by one
//! place (the registry) and obeyed wherever the push's fragments commit.

use crate::pipeline::{groups, schedule, weight};
use crate::spec::{Group, OptimizerSpec, Rule, Schedule, StalenessSpec};
use crate::table::TensorTable;
use crate::velocity::server_rule;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Everything a user may change between two pushes; takes effect by ticket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// As the user has set it: with momentum correction the workers run a part of it, and the store the rest.
    pub optimizer: OptimizerSpec,
    #[serde(default)]
    pub staleness: StalenessSpec,
    #[serde(default)]
    pub schedule: Schedule,
    /// The run ends once tickets cover this many samples.
    #[serde(default)]
    pub max_samples: Option<u64>,
}

/// A run spec resolved against a model: which group each tensor belongs to.
#[derive(Clone, Debug)]
pub struct Run {
    pub spec: RunSpec,
    /// Counts optimizers, from 1: state made under another epoch belongs to another rule, and so does a push.
    pub epoch: u32,
    /// The optimizer's groups with the part of their rules that the store runs.
    groups: Vec<Group>,
    group_of: Arc<[u16]>,
}

impl Run {
    /// What follows `before`. The epoch stays unless the rules have changed; nor are the tensors' names held against
    /// the same patterns again.
    pub(super) fn after(before: Option<&Self>, spec: RunSpec, table: &TensorTable) -> Self {
        let epoch = match before {
            None => 1,
            Some(before) if same_rules(&before.spec, &spec) => before.epoch,
            Some(before) => before.epoch + 1,
        };
        let group_of = match before {
            Some(before) if patterns(&before.spec).eq(patterns(&spec)) => Arc::clone(&before.group_of),
            _ => groups::assign(&spec.optimizer.groups, table).into(),
        };
        let mut groups = spec.optimizer.groups.clone();
        if spec.optimizer.momentum_correction {
            for group in &mut groups {
                group.rule = server_rule(&group.rule);
            }
        }
        Self { spec, epoch, groups, group_of }
    }

    /// As it was in another life of the store.
    pub(crate) fn resumed(spec: RunSpec, epoch: u32, table: &TensorTable) -> Self {
        Self { epoch, ..Self::after(None, spec, table) }
    }

    /// The group of a tensor.
    #[must_use]
    pub fn group_of(&self, tensor: usize) -> usize {
        usize::from(self.group_of[tensor])
    }

    /// Patterns of the groups that no tensor is in, but for the last, which takes what is left.
    pub fn idle_patterns(&self) -> impl Iterator<Item = &str> {
        let groups = self.groups.iter().enumerate().take(self.groups.len().saturating_sub(1));
        groups.filter(|(i, _)| !self.group_of.iter().any(|g| usize::from(*g) == *i)).map(|(_, g)| &*g.pattern)
    }

    /// What the store runs on a tensor.
    pub(crate) fn group(&self, tensor: usize) -> &Group {
        &self.groups[self.group_of(tensor)]
    }

    /// Each group's learning rate for the push that finds the model at `version`, with `samples` seen before it.
    #[must_use]
    pub fn learning_rates(&self, version: u64, samples: u64) -> Arc<[f64]> {
        let factor = schedule::factor(&self.spec.schedule, version, samples);
        self.spec.optimizer.groups.iter().map(|g| g.lr * factor).collect()
    }

    /// What an update that is `tau` late is worth.
    #[must_use]
    pub fn weight(&self, tau: u64) -> f64 {
        weight::weight(&self.spec.staleness.weights, tau)
    }
}

fn patterns(spec: &RunSpec) -> impl Iterator<Item = &str> {
    spec.optimizer.groups.iter().map(|group| &*group.pattern)
}

fn rules(spec: &RunSpec) -> impl Iterator<Item = &Rule> {
    spec.optimizer.groups.iter().map(|group| &group.rule)
}

/// Whether workers and store go on as before: the parts of both are compared.
pub(super) fn same_rules(a: &RunSpec, b: &RunSpec) -> bool {
    a.optimizer.momentum_correction == b.optimizer.momentum_correction
        && patterns(a).eq(patterns(b))
        && rules(a).eq(rules(b))
}

/// The right to commit, with the terms of it.
#[derive(Clone, Debug)]
pub struct Ticket {
    pub number: u64,
    pub term: u64,
    /// The model's version once this push is counted.
    pub version: u64,
    /// Updates ticketed between the worker's read and this push.
    pub staleness: u64,
    /// One learning rate per group, the schedule's factor included.
    pub learning_rates: Arc<[f64]>,
    pub run: Arc<Run>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::table::{Role, TensorSpec};

    #[test]
    fn only_other_patterns_are_held_against_the_names_again() {
        let (name, aliases, shape) = ("a".to_owned(), vec![], vec![1]);
        let tensor = TensorSpec { name, aliases, shape, dtype: Dtype::F32, role: Role::Parameter };
        let table = TensorTable::new(vec![tensor]).unwrap();
        let rule =
            Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
        let spec = |lr: f64, pattern: &str| {
            let group = |pattern: &str| Group { pattern: pattern.into(), lr, rule: rule.clone() };
            let optimizer =
                OptimizerSpec { groups: vec![group(pattern), group("*")], momentum_correction: false };
            let (staleness, schedule) = (StalenessSpec::default(), Schedule::default());
            RunSpec { optimizer, staleness, schedule, max_samples: None }
        };
        let first = Run::after(None, spec(0.1, "b"), &table);
        assert_eq!(first.group_of(0), 1);
        let slower = Run::after(Some(&first), spec(0.01, "b"), &table);
        assert!(Arc::ptr_eq(&first.group_of, &slower.group_of));
        let other = Run::after(Some(&slower), spec(0.01, "a"), &table);
        assert_eq!(other.group_of(0), 0);
    }
}
