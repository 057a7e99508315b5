//! What the workers of a run have to agree on: what their pushes carry and by which optimizer. The server's own
//! settings come first, the first worker's fill what it left open, later ones are compared.

use super::config::ServerConfig;
use super::error::ServerError;
use crate::describe;
use offbeat_core::checkpoint::Agreed;
use offbeat_core::spec::{Contribution, Group, OptimizerSpec, Rule, Schedule, SpecError};
use offbeat_core::store::RunSpec;
use offbeat_core::wire::encode;
use offbeat_core::wire::header::MAX_RUN_BYTES;
use offbeat_core::wire::message::{RefusalCode, Refused, RunConfig};

/// The run's agreement so far.
#[derive(Clone, Debug)]
pub(super) struct Agreement {
    /// As workers see it; the optimizer's flag says whether momentum is corrected.
    config: RunConfig,
    /// The optimizer as it was set, before any `set_lr`.
    as_set: Option<OptimizerSpec>,
    /// What the user said of momentum correction.
    correction: Option<bool>,
    /// Who fixed what the pushes carry.
    contribution_of: String,
}

impl Agreement {
    pub(super) fn new(config: &ServerConfig) -> Result<Self, SpecError> {
        let mut agreement = Self {
            config: RunConfig {
                epoch: 0,
                transaction: config.transaction(),
                contribution: None,
                optimizer: None,
                momentum_correction: false,
                staleness: config.staleness.clone(),
                schedule: config.schedule,
                max_samples: config.max_samples,
            },
            as_set: None,
            correction: config.momentum_correction,
            contribution_of: String::new(),
        };
        if let Some(optimizer) = &config.optimizer {
            agreement.set_optimizer(optimizer.clone())?;
            agreement.config.contribution = Some(Contribution::Gradient);
            "the server's optimizer".clone_into(&mut agreement.contribution_of);
        }
        Ok(agreement)
    }

    /// Its epoch is the store's to count: workers are told [`Shared::run_config`](super::shared::Shared::run_config).
    pub(super) fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Whether SGD's momentum is on the server, one velocity for all workers.
    pub(super) fn shares_velocity(&self) -> bool {
        let heavy = |group: &Group| matches!(group.rule, Rule::Sgd { momentum, .. } if momentum > 0.0);
        let optimizer = self.config.optimizer.as_ref();
        !self.config.momentum_correction && optimizer.is_some_and(|o| o.groups.iter().any(heavy))
    }

    /// What the store is to obey; `None` until an optimizer is set.
    pub(super) fn store_spec(&self) -> Option<RunSpec> {
        Some(RunSpec {
            optimizer: self.config.optimizer.clone()?,
            staleness: self.config.staleness.clone(),
            schedule: self.config.schedule,
            max_samples: self.config.max_samples,
        })
    }

    /// A worker says what its pushes carry, and which optimizer it was given. True if that changed what is in force.
    pub(super) fn join(
        &mut self,
        worker: &str,
        contribution: Contribution,
        optimizer: Option<OptimizerSpec>,
    ) -> Result<bool, Refused> {
        if let Some(fixed) = self.config.contribution.filter(|&fixed| fixed != contribution) {
            let message = format!(
                "this run's pushes carry {} (fixed by {}) and {worker}'s would carry {}: use the same kind of optimizer \
                 on every worker, an offbeat.optim spec (runs on the server) or a live torch optimizer (runs on the worker)",
                carried(fixed),
                self.contribution_of,
                carried(contribution)
            );
            return Err(no(RefusalCode::Contribution, message));
        }
        let changed = match contribution {
            Contribution::Gradient => self.join_gradient(worker, optimizer)?,
            Contribution::Delta => self.join_delta(optimizer.as_ref())?,
        };
        // A worker without an optimizer, where nobody has one, has decided nothing: no push of its is applied yet.
        if self.config.contribution.is_none() && self.config.optimizer.is_some() {
            self.config.contribution = Some(contribution);
            worker.clone_into(&mut self.contribution_of);
        }
        Ok(changed)
    }

    fn join_gradient(&mut self, worker: &str, optimizer: Option<OptimizerSpec>) -> Result<bool, Refused> {
        let Some(given) = optimizer else { return Ok(false) };
        let (Some(as_set), Some(now)) = (&self.as_set, &self.config.optimizer) else {
            self.set_optimizer(given).map_err(|e| no(RefusalCode::Optimizer, e.to_string()))?;
            return Ok(true);
        };
        let rules = |spec: &OptimizerSpec| {
            spec.groups.iter().map(|g| (g.pattern.clone(), g.rule.clone())).collect::<Vec<_>>()
        };
        let rates = |spec: &OptimizerSpec| spec.groups.iter().map(|g| g.lr).collect::<Vec<_>>();
        if rules(as_set) != rules(&given) {
            let message = format!(
                "the run's optimizer is {} and {worker} was given {}: give every worker the same or none, or change the \
                 server's, with server.set_optimizer or, for `offbeat server`, a start with another --optimizer",
                describe::optimizer(now),
                describe::optimizer(&given)
            );
            return Err(no(RefusalCode::Optimizer, message));
        }
        if rates(as_set) != rates(&given) && rates(now) != rates(&given) {
            let message = format!(
                "the run's learning rate is {} and {worker} was given {}: give every worker the same optimizer or none; \
                 use server.set_lr or lr_schedule to change the rate for all, with `offbeat server` a start with \
                 another --optimizer or --lr-schedule",
                list(&rates(now)),
                list(&rates(&given))
            );
            return Err(no(RefusalCode::LearningRate, message));
        }
        Ok(false)
    }

    fn join_delta(&mut self, optimizer: Option<&OptimizerSpec>) -> Result<bool, Refused> {
        let refuse = |what: &str| {
            let message = format!(
                "the optimizer runs on the workers, so {what} has no meaning on the server: leave it out, or use an \
                 offbeat.optim spec, which runs on the server"
            );
            Err(no(RefusalCode::Optimizer, message))
        };
        if optimizer.is_some() {
            return refuse("a second optimizer");
        }
        if self.config.schedule != Schedule::default() {
            return refuse("lr_schedule");
        }
        match self.correction {
            Some(true) => return refuse("momentum_correction=True"),
            Some(false) => return refuse("momentum_correction=False"),
            None => {}
        }
        if self.config.optimizer.is_some() {
            return Ok(false);
        }
        let add = OptimizerSpec {
            groups: vec![Group { pattern: "*".into(), lr: 1.0, rule: Rule::Add }],
            momentum_correction: false,
        };
        self.config.optimizer = Some(add.clone());
        self.as_set = Some(add);
        Ok(true)
    }

    /// What a later server of the run has to know of it.
    pub(super) fn agreed(&self) -> Agreed {
        Agreed {
            contribution: self.config.contribution,
            contribution_of: self.contribution_of.clone(),
            optimizer: self.config.optimizer.clone(),
            as_set: self.as_set.clone(),
        }
    }

    /// Goes on from what was agreed on. What this server was given itself comes first.
    pub(super) fn resume(&mut self, agreed: Agreed) -> Result<(), ServerError> {
        let Agreed { contribution, contribution_of, optimizer, as_set } = agreed;
        if self.config.optimizer.is_some() {
            return Ok(());
        }
        if contribution == Some(Contribution::Delta) {
            return match self.join(&contribution_of, Contribution::Delta, None) {
                Ok(_) => Ok(()),
                Err(refused) => Err(ServerError::OtherContribution { why: refused.message }),
            };
        }
        let Some(as_set) = as_set else { return Ok(()) };
        let could_be = OptimizerSpec { momentum_correction: true, ..as_set.clone() }.validate().is_ok();
        if could_be && !as_set.momentum_correction {
            self.correction.get_or_insert(false);
        }
        self.set_optimizer(as_set)?;
        let rates = optimizer.iter().flat_map(|now| now.groups.iter().map(|group| group.lr));
        for (group, lr) in rates.enumerate() {
            self.set_lr(lr, Some(group))?;
        }
        (self.config.contribution, self.contribution_of) = (contribution, contribution_of);
        Ok(())
    }

    /// Sets or replaces the optimizer, for pushes ticketed from now on.
    pub(super) fn set_optimizer(&mut self, mut optimizer: OptimizerSpec) -> Result<(), SpecError> {
        optimizer.momentum_correction = false;
        optimizer.validate()?;
        let corrected = OptimizerSpec { momentum_correction: true, ..optimizer.clone() };
        match (self.correction, corrected.validate()) {
            (Some(false), _) | (None, Err(_)) => {}
            (Some(true), Err(error)) => return Err(error),
            (Some(true) | None, Ok(())) => optimizer = corrected,
        }
        let config = RunConfig {
            momentum_correction: optimizer.momentum_correction,
            optimizer: Some(optimizer.clone()),
            ..self.config.clone()
        };
        check_size(&config, optimizer.groups.len())?;
        self.config = config;
        self.as_set = Some(optimizer);
        Ok(())
    }

    /// Replaces the optimizer at the owner's wish.
    pub(super) fn replace_optimizer(&mut self, optimizer: OptimizerSpec) -> Result<(), ServerError> {
        if self.config.contribution == Some(Contribution::Delta) {
            return Err(ServerError::WorkerSide);
        }
        self.set_optimizer(optimizer)?;
        if self.config.contribution.is_none() {
            self.config.contribution = Some(Contribution::Gradient);
            "the server's optimizer".clone_into(&mut self.contribution_of);
        }
        Ok(())
    }

    /// Replaces the base learning rate of one group or of all.
    pub(super) fn set_lr(&mut self, lr: f64, group: Option<usize>) -> Result<(), ServerError> {
        if self.config.contribution == Some(Contribution::Delta) {
            return Err(ServerError::WorkerSide);
        }
        let mut optimizer = self.config.optimizer.clone().ok_or(ServerError::NoOptimizer)?;
        let groups = optimizer.groups.len();
        match group {
            None => optimizer.groups.iter_mut().for_each(|g| g.lr = lr),
            Some(group) => {
                optimizer.groups.get_mut(group).ok_or(ServerError::Group { group, groups })?.lr = lr;
            }
        }
        optimizer.validate()?;
        self.config.optimizer = Some(optimizer);
        Ok(())
    }

    /// Replaces the bound on staleness.
    pub(super) fn set_max_staleness(&mut self, most: Option<u64>) -> Result<(), SpecError> {
        let mut config = self.config.clone();
        config.staleness.max_staleness = most;
        check_size(&config, config.optimizer.as_ref().map_or(0, |optimizer| optimizer.groups.len()))?;
        self.config = config;
        Ok(())
    }

    /// One line that says what runs where.
    pub(super) fn announce(&self) {
        if let Some(optimizer) = &self.config.optimizer {
            let runs_on = match self.config.contribution {
                Some(Contribution::Delta) => "the workers",
                _ => "the server",
            };
            let momentum = if self.config.momentum_correction { "each worker" } else { "the server" };
            tracing::info!(
                optimizer = describe::optimizer(optimizer),
                runs_on,
                momentum_in = momentum,
                "the run's optimizer"
            );
        }
    }
}

/// Whether a worker can be told of the run, whatever the model is.
fn check_size(config: &RunConfig, num_groups: usize) -> Result<(), SpecError> {
    let mut bytes = Vec::new();
    encode(config, &mut bytes);
    if bytes.len() <= MAX_RUN_BYTES as usize {
        return Ok(());
    }
    Err(SpecError {
        field: "groups".to_owned(),
        value: format!("{num_groups} groups, with the rest of the run {} bytes", bytes.len()),
        remedy: format!(
            "use fewer groups or shorter patterns: a worker can be told of at most {MAX_RUN_BYTES}"
        ),
    })
}

fn no(code: RefusalCode, message: String) -> Refused {
    Refused { code, message, fatal: false }
}

const fn carried(contribution: Contribution) -> &'static str {
    match contribution {
        Contribution::Gradient => "gradients",
        Contribution::Delta => "deltas of a worker-side optimizer",
    }
}

fn list(values: &[f64]) -> String {
    match values {
        [one] => one.to_string(),
        many => format!("{many:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::spec::{ScheduleShape, StalenessSpec};

    fn sgd(lr: f64, momentum: f64) -> OptimizerSpec {
        let rule =
            Rule::Sgd { momentum, dampening: 0.0, weight_decay: 0.5, nesterov: false, maximize: false };
        OptimizerSpec { groups: vec![Group { pattern: "*".into(), lr, rule }], momentum_correction: false }
    }

    fn adam() -> OptimizerSpec {
        let rule = Rule::Adam {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            maximize: false,
            decoupled_weight_decay: true,
        };
        OptimizerSpec {
            groups: vec![Group { pattern: "*".into(), lr: 1e-3, rule }],
            momentum_correction: false,
        }
    }

    fn fresh() -> Agreement {
        Agreement::new(&ServerConfig::default()).unwrap()
    }

    #[test]
    fn the_first_workers_optimizer_becomes_the_runs() {
        let mut run = fresh();
        assert!(run.store_spec().is_none());
        assert!(run.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap());
        assert!(!run.join("b", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap());
        assert!(!run.join("c", Contribution::Gradient, None).unwrap());
    }

    #[test]
    fn momentum_is_corrected_by_default_where_there_is_some() {
        let mut run = fresh();
        run.set_optimizer(sgd(0.1, 0.9)).unwrap();
        assert!(run.config().momentum_correction);
        assert!(run.store_spec().unwrap().optimizer.momentum_correction, "the store is to leave it out");
        let shown = &run.config().optimizer.as_ref().unwrap().groups[0].rule;
        assert!(matches!(shown, Rule::Sgd { momentum: 0.9, weight_decay: 0.5, .. }));
        run.set_optimizer(sgd(0.1, 0.0)).unwrap();
        assert!(!run.config().momentum_correction);
        run.set_optimizer(adam()).unwrap();
        assert!(!run.config().momentum_correction);
    }

    #[test]
    fn momentum_correction_true_is_refused_without_momentum_and_false_leaves_the_rule() {
        let config = |correction, optimizer| ServerConfig {
            momentum_correction: Some(correction),
            optimizer: Some(optimizer),
            ..ServerConfig::default()
        };
        assert!(
            Agreement::new(&config(true, adam())).unwrap_err().to_string().contains("momentum_correction")
        );
        assert!(Agreement::new(&config(true, sgd(0.1, 0.9))).unwrap().config().momentum_correction);
        let run = Agreement::new(&config(false, sgd(0.1, 0.9))).unwrap();
        assert!(!run.config().momentum_correction);
        assert!(!run.store_spec().unwrap().optimizer.momentum_correction);
    }

    #[test]
    fn another_optimizer_is_refused_with_both_named() {
        let mut run = fresh();
        run.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap();
        let refused = run.join("b", Contribution::Gradient, Some(adam())).unwrap_err();
        assert_eq!(refused.code, RefusalCode::Optimizer);
        assert!(
            refused.message.contains("SGD(lr=0.1") && refused.message.contains("AdamW(lr=0.001"),
            "{refused}"
        );
        assert!(!refused.fatal);
    }

    #[test]
    fn another_learning_rate_is_refused_with_the_remedy() {
        let mut run = fresh();
        run.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap();
        let refused = run.join("b", Contribution::Gradient, Some(sgd(0.2, 0.9))).unwrap_err();
        assert_eq!(refused.code, RefusalCode::LearningRate);
        assert!(refused.message.contains("server.set_lr or lr_schedule"), "{refused}");
        // After set_lr both the rate in force and the one the run began with are the run's.
        run.set_lr(0.2, None).unwrap();
        assert!(run.join("b", Contribution::Gradient, Some(sgd(0.2, 0.9))).is_ok());
        assert!(run.join("c", Contribution::Gradient, Some(sgd(0.1, 0.9))).is_ok());
    }

    #[test]
    fn the_first_worker_fixes_what_pushes_carry() {
        let mut run = fresh();
        run.join("a", Contribution::Delta, None).unwrap();
        assert_eq!(run.store_spec().unwrap().optimizer.groups[0].rule, Rule::Add);
        let refused = run.join("b", Contribution::Gradient, Some(adam())).unwrap_err();
        assert_eq!(refused.code, RefusalCode::Contribution);
        assert!(refused.message.contains("gradients") && refused.message.contains("deltas"), "{refused}");
        assert!(matches!(run.set_lr(0.1, None), Err(ServerError::WorkerSide)));
        assert!(matches!(run.replace_optimizer(adam()), Err(ServerError::WorkerSide)));
    }

    #[test]
    fn a_server_with_an_optimizer_or_a_schedule_takes_no_deltas() {
        let config = ServerConfig { optimizer: Some(adam()), ..ServerConfig::default() };
        let mut run = Agreement::new(&config).unwrap();
        assert_eq!(run.join("a", Contribution::Delta, None).unwrap_err().code, RefusalCode::Contribution);
        let schedule =
            Schedule { shape: ScheduleShape::Linear { total: 9, end_factor: 0.0 }, ..Schedule::default() };
        let mut run = Agreement::new(&ServerConfig { schedule, ..ServerConfig::default() }).unwrap();
        assert!(run.join("a", Contribution::Delta, None).unwrap_err().message.contains("lr_schedule"));
    }

    #[test]
    fn a_worker_without_an_optimizer_where_nobody_has_one_decides_nothing() {
        let mut run = fresh();
        assert!(!run.join("a", Contribution::Gradient, None).unwrap());
        assert_eq!(run.config().contribution, None);
        assert!(run.join("a", Contribution::Delta, None).unwrap());
        assert_eq!(
            run.join("b", Contribution::Gradient, None).unwrap_err().code,
            RefusalCode::Contribution,
            "now it is decided"
        );
        let mut run = fresh();
        run.join("a", Contribution::Gradient, None).unwrap();
        run.replace_optimizer(adam()).unwrap();
        assert_eq!(run.join("b", Contribution::Delta, None).unwrap_err().code, RefusalCode::Contribution);
    }

    #[test]
    fn a_velocity_of_the_servers_stays_one_where_a_later_server_is_told_nothing_of_it() {
        let config = |said| ServerConfig { momentum_correction: said, ..ServerConfig::default() };
        let mut before = Agreement::new(&config(Some(false))).unwrap();
        before.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap();
        let mut run = fresh();
        run.resume(before.agreed()).unwrap();
        assert!(!run.config().momentum_correction);
        assert!(!run.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap(), "it is the run's");
        run.set_optimizer(sgd(0.2, 0.8)).unwrap();
        assert!(!run.config().momentum_correction);
        let mut told = Agreement::new(&config(Some(true))).unwrap();
        told.resume(before.agreed()).unwrap();
        assert!(told.config().momentum_correction);
        let mut corrected = fresh();
        corrected.join("a", Contribution::Gradient, Some(sgd(0.1, 0.9))).unwrap();
        let mut run = fresh();
        run.resume(corrected.agreed()).unwrap();
        assert!(run.config().momentum_correction);
        run.set_optimizer(adam()).unwrap();
        assert!(!run.config().momentum_correction);
    }

    #[test]
    fn momentum_correction_is_refused_together_with_deltas_whichever_it_says() {
        for (said, name) in [(true, "momentum_correction=True"), (false, "momentum_correction=False")] {
            let config = ServerConfig { momentum_correction: Some(said), ..ServerConfig::default() };
            let mut run = Agreement::new(&config).unwrap();
            assert!(run.join("a", Contribution::Delta, None).unwrap_err().message.contains(name));
        }
    }

    #[test]
    fn a_refused_worker_changes_nothing() {
        let mut run = fresh();
        let bad = sgd(-1.0, 0.9);
        assert!(run.join("a", Contribution::Gradient, Some(bad)).is_err());
        assert_eq!(run.config().contribution, None);
        assert!(run.join("b", Contribution::Delta, None).is_ok());
    }

    #[test]
    fn a_learning_rate_for_a_group_that_is_not_there_is_refused() {
        let mut run = fresh();
        assert!(matches!(run.set_lr(0.1, None), Err(ServerError::NoOptimizer)));
        run.set_optimizer(sgd(0.1, 0.0)).unwrap();
        assert!(matches!(run.set_lr(0.1, Some(1)), Err(ServerError::Group { group: 1, groups: 1 })));
        assert!(matches!(run.set_lr(f64::NAN, None), Err(ServerError::Spec(_))));
    }

    #[test]
    fn a_bound_on_staleness_is_the_runs_from_then_on_and_nothing_else_changes() {
        let mut run = fresh();
        run.set_optimizer(sgd(0.1, 0.0)).unwrap();
        let before = run.config().clone();
        for most in [Some(3), Some(0), None] {
            run.set_max_staleness(most).unwrap();
            assert_eq!(run.store_spec().unwrap().staleness.max_staleness, most);
            let staleness = StalenessSpec { max_staleness: most, ..before.staleness.clone() };
            assert_eq!(run.config(), &RunConfig { staleness, ..before.clone() });
        }
    }
}
