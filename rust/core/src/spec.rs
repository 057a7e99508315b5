//! What a user chose, as plain serialisable values: the optimizer, the weight of a late push, what is
//! admitted, the learning-rate schedule. Python builds these, the wire carries them, the pipeline obeys them.
//!
//! Nothing here computes. Validation (the `validate` methods (in [`crate::validate`])) is the one gate every spec passes, whoever sent it.

use serde::{Deserialize, Serialize};

/// What the pushes of a run carry; one kind a run, fixed by the first worker that says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contribution {
    /// Gradient of the mean loss; the server's optimizer turns it into a step.
    Gradient,
    /// Difference that a worker-side optimizer made; the server adds weight × delta.
    Delta,
}

/// When a push becomes visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transaction {
    /// Each fragment commits as it arrives: streamed, the fast path.
    #[default]
    Fragment,
    /// The push is staged whole, admitted after its last byte and committed as one.
    Model,
}

/// An update rule, with torch.optim's names and meaning where torch has it; hyper-parameters are those of one group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name")]
pub enum Rule {
    #[serde(rename = "SGD")]
    Sgd {
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        nesterov: bool,
        maximize: bool,
    },
    /// `decoupled_weight_decay` makes it AdamW; Python's `AdamW` sends that flag.
    Adam {
        betas: (f64, f64),
        eps: f64,
        weight_decay: f64,
        amsgrad: bool,
        maximize: bool,
        decoupled_weight_decay: bool,
    },
    Adagrad {
        lr_decay: f64,
        weight_decay: f64,
        initial_accumulator_value: f64,
        eps: f64,
        maximize: bool,
    },
    #[serde(rename = "RMSprop")]
    RmsProp {
        alpha: f64,
        eps: f64,
        weight_decay: f64,
        momentum: f64,
        centered: bool,
        maximize: bool,
    },
    /// SGD whose Nesterov momentum steps once in `delay` updates (Liu et al., 2024); torch has no such rule.
    DelayedNesterov {
        momentum: f64,
        /// N of the paper, from 1.
        delay: u64,
        /// c of the paper, 0 to 1/N: how much of the momentum each update is given at once.
        activation: f64,
    },
    /// p ← p + weight × delta: what a worker-side optimizer leaves to the server. Has no learning rate.
    Add,
}

/// One parameter group: the tensors whose name matches `pattern` and no earlier group's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Shell-style pattern over tensor names (`*`, `?`); the last group's is `*`.
    pub pattern: String,
    /// Base learning rate; the schedule and `set_lr` multiply it.
    pub lr: f64,
    pub rule: Rule,
}

/// The whole server-side optimizer: groups in order, first match wins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    pub groups: Vec<Group>,
    /// SGD's momentum lives in the workers (DANA-Slim) and the server runs plain SGD.
    pub momentum_correction: bool,
}

/// What a push that is τ updates late is worth; every one is exactly 1 at τ = 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Weight {
    Constant,
    /// factor^τ
    AdaptiveLr {
        factor: f64,
    },
    /// 1 / (1 + τ)
    Inverse,
    /// (1 + τ)^−a
    Polynomial {
        a: f64,
    },
    /// 1 up to b, then 1 / (a (τ − b) + 1)
    Hinge {
        a: f64,
        b: u64,
    },
}

/// Which pushes get in, and what late ones are worth.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StalenessSpec {
    /// Multiplied together.
    #[serde(default)]
    pub weights: Vec<Weight>,
    /// A push staler than this is rejected at admission.
    #[serde(default)]
    pub max_staleness: Option<u64>,
    /// A push whose gradient's L2 norm exceeds this is rejected; needs the whole push (`transaction = model`).
    #[serde(default)]
    pub max_norm: Option<f64>,
}

/// What a schedule counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleUnit {
    /// Updates ticketed.
    #[default]
    Version,
    /// Samples in the pushes ticketed.
    Samples,
}

/// The learning rate's factor as a function of the position x (in `unit`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum ScheduleShape {
    Constant,
    /// gamma^⌊x / step_size⌋
    Step {
        step_size: u64,
        gamma: f64,
    },
    /// From 1 down to `end_factor` over `total`, half a cosine.
    Cosine {
        total: u64,
        end_factor: f64,
    },
    /// From 1 to `end_factor` over `total`, straight.
    Linear {
        total: u64,
        end_factor: f64,
    },
}

/// Warm-up from `warmup_start_factor` to 1 over the first `warmup` units, then the shape, from its own 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    #[serde(default)]
    pub unit: ScheduleUnit,
    pub shape: ScheduleShape,
    #[serde(default)]
    pub warmup: u64,
    #[serde(default)]
    pub warmup_start_factor: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            unit: ScheduleUnit::Version,
            shape: ScheduleShape::Constant,
            warmup: 0,
            warmup_start_factor: 0.0,
        }
    }
}

/// A spec that cannot be run: which field, with which value, and what would be right.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}: {remedy}")]
pub struct SpecError {
    pub field: String,
    pub value: String,
    pub remedy: String,
}
