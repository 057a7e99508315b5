//! Every number that cannot be run is refused, by its name, with its value; everything else passes.

use offbeat_core::spec::{
    Group, OptimizerSpec, Rule, Schedule, ScheduleShape, SpecError, StalenessSpec, Weight,
};

fn sgd(momentum: f64, dampening: f64, nesterov: bool) -> Rule {
    Rule::Sgd { momentum, dampening, weight_decay: 0.0, nesterov, maximize: false }
}

fn adam(betas: (f64, f64), eps: f64, weight_decay: f64) -> Rule {
    Rule::Adam { betas, eps, weight_decay, amsgrad: false, maximize: false, decoupled_weight_decay: false }
}

fn adagrad(lr_decay: f64, weight_decay: f64, initial_accumulator_value: f64, eps: f64) -> Rule {
    Rule::Adagrad { lr_decay, weight_decay, initial_accumulator_value, eps, maximize: false }
}

fn rmsprop(alpha: f64, eps: f64, weight_decay: f64, momentum: f64) -> Rule {
    Rule::RmsProp { alpha, eps, weight_decay, momentum, centered: false, maximize: false }
}

fn delayed(momentum: f64, delay: u64, activation: f64) -> Rule {
    Rule::DelayedNesterov { momentum, delay, activation }
}

fn group(pattern: &str, lr: f64, rule: Rule) -> Group {
    Group { pattern: pattern.to_owned(), lr, rule }
}

fn optimizer(groups: Vec<Group>) -> OptimizerSpec {
    OptimizerSpec { groups, momentum_correction: false }
}

fn one(rule: Rule) -> OptimizerSpec {
    optimizer(vec![group("*", 0.1, rule)])
}

#[track_caller]
fn refused(result: Result<(), SpecError>, field: &str, value: &str) {
    let error = result.expect_err("accepted");
    assert_eq!(error.field, field);
    assert!(error.value.contains(value), "{error}");
    assert!(!error.remedy.is_empty());
}

#[test]
fn torchs_defaults_pass() {
    for rule in [
        sgd(0.0, 0.0, false),
        sgd(0.9, 0.0, true),
        adam((0.9, 0.999), 1e-8, 0.0),
        adagrad(0.0, 0.0, 0.0, 1e-10),
        rmsprop(0.99, 1e-8, 0.0, 0.0),
        delayed(0.9, 4, 0.25),
        Rule::Add,
    ] {
        assert_eq!(one(rule).validate(), Ok(()));
    }
    assert_eq!(StalenessSpec::default().validate(), Ok(()));
    assert_eq!(Schedule::default().validate(), Ok(()));
}

#[test]
fn hyper_parameters_out_of_range_are_refused_by_name() {
    let decay = |weight_decay| Rule::Sgd {
        momentum: 0.0,
        dampening: 0.0,
        weight_decay,
        nesterov: false,
        maximize: false,
    };
    for (rule, field, value) in [
        (sgd(-0.1, 0.0, false), "momentum", "-0.1"),
        (sgd(0.9, f64::NAN, false), "dampening", "NaN"),
        (decay(-1.0), "weight_decay", "-1"),
        (decay(f64::INFINITY), "weight_decay", "inf"),
        (sgd(0.0, 0.0, true), "nesterov", "momentum 0"),
        (sgd(0.9, 0.1, true), "nesterov", "dampening 0.1"),
        (adam((1.0, 0.9), 1e-8, 0.0), "betas[0]", "1"),
        (adam((0.9, -0.1), 1e-8, 0.0), "betas[1]", "-0.1"),
        (adam((0.9, f64::NAN), 1e-8, 0.0), "betas[1]", "NaN"),
        (adam((0.9, 0.9), -1e-8, 0.0), "eps", "-0.00000001"),
        (adam((0.9, 0.9), 0.0, -1.0), "weight_decay", "-1"),
        (adagrad(-1.0, 0.0, 0.0, 0.0), "lr_decay", "-1"),
        (adagrad(0.0, -1.0, 0.0, 0.0), "weight_decay", "-1"),
        (adagrad(0.0, 0.0, -1.0, 0.0), "initial_accumulator_value", "-1"),
        (adagrad(0.0, 0.0, 0.0, -1.0), "eps", "-1"),
        (rmsprop(-1.0, 0.0, 0.0, 0.0), "alpha", "-1"),
        (rmsprop(0.9, -1.0, 0.0, 0.0), "eps", "-1"),
        (rmsprop(0.9, 0.0, -1.0, 0.0), "weight_decay", "-1"),
        (rmsprop(0.9, 0.0, 0.0, -1.0), "momentum", "-1"),
        (delayed(1.0, 4, 0.0), "momentum", "1"),
        (delayed(0.9, 0, 0.0), "delay", "0"),
        (delayed(0.9, 4, 0.3), "activation", "0.3"),
        (delayed(0.9, 4, f64::NAN), "activation", "NaN"),
    ] {
        refused(one(rule).validate(), &format!("groups[0].{field}"), value);
    }
}

#[test]
fn a_learning_rate_is_finite_as_the_kernels_see_it() {
    for lr in [-0.1, f64::NAN, f64::INFINITY, 1e39] {
        refused(optimizer(vec![group("*", lr, Rule::Add)]).validate(), "groups[0].lr", &lr.to_string());
    }
    assert_eq!(optimizer(vec![group("*", 0.0, Rule::Add)]).validate(), Ok(()));
}

#[test]
fn groups_end_with_the_rest_and_share_one_optimizer() {
    refused(optimizer(vec![]).validate(), "groups", "[]");
    refused(optimizer(vec![group("*.bias", 0.1, Rule::Add)]).validate(), "groups[0].pattern", "\"*.bias\"");
    let empty = vec![group("", 0.1, Rule::Add), group("*", 0.1, Rule::Add)];
    refused(optimizer(empty).validate(), "groups[0].pattern", "\"\"");
    let mixed = vec![group("a", 0.1, sgd(0.0, 0.0, false)), group("*", 0.1, Rule::Add)];
    refused(optimizer(mixed).validate(), "groups[0].rule", "SGD");
    let adamw = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.01,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let mixed = vec![group("a", 0.1, adamw), group("*", 0.1, adam((0.9, 0.999), 1e-8, 0.0))];
    refused(optimizer(mixed).validate(), "groups[0].rule", "AdamW");
    refused(optimizer(vec![group("*", 0.1, Rule::Add); 65_536]).validate(), "groups", "65536");
    let differing = vec![group("a", 0.1, sgd(0.9, 0.0, true)), group("*", 0.2, sgd(0.0, 0.0, false))];
    assert_eq!(optimizer(differing).validate(), Ok(()));
}

#[test]
fn momentum_correction_is_for_sgd_with_momentum_and_without_dampening() {
    let corrected = |groups| OptimizerSpec { groups, momentum_correction: true }.validate();
    let single = |rule| corrected(vec![group("*", 0.1, rule)]);
    assert_eq!(single(sgd(0.9, 0.0, false)), Ok(()));
    assert_eq!(single(sgd(0.9, 0.0, true)), Ok(()));
    refused(single(sgd(0.0, 0.0, false)), "momentum_correction", "momentum 0");
    refused(single(sgd(0.9, 0.1, false)), "momentum_correction", "dampening 0.1");
    refused(single(adam((0.9, 0.999), 1e-8, 0.0)), "momentum_correction", "Adam");
    refused(single(Rule::Add), "momentum_correction", "Add");
    // A group without momentum among others that have it: its worker sends the gradient as it is.
    let partly = vec![group("*.bias", 0.1, sgd(0.0, 0.0, false)), group("*", 0.1, sgd(0.9, 0.0, false))];
    assert_eq!(corrected(partly), Ok(()));
}

#[test]
fn policies_out_of_range_are_refused_by_name() {
    let weight = |weight| StalenessSpec { weights: vec![weight], ..StalenessSpec::default() }.validate();
    for factor in [0.0, -0.5, 1.1, f64::NAN] {
        refused(weight(Weight::AdaptiveLr { factor }), "staleness_lr_factor", &factor.to_string());
    }
    assert_eq!(weight(Weight::AdaptiveLr { factor: 1.0 }), Ok(()));
    refused(weight(Weight::Polynomial { a: -0.5 }), "a", "-0.5");
    refused(weight(Weight::Hinge { a: f64::INFINITY, b: 4 }), "a", "inf");
    for max_norm in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let spec = StalenessSpec { max_norm: Some(max_norm), ..StalenessSpec::default() };
        refused(spec.validate(), "max_norm", &max_norm.to_string());
    }
    assert_eq!(StalenessSpec { max_norm: Some(1.0), ..StalenessSpec::default() }.validate(), Ok(()));
}

#[test]
fn schedules_out_of_range_are_refused_by_name() {
    let shape = |shape| Schedule { shape, ..Schedule::default() }.validate();
    refused(shape(ScheduleShape::Step { step_size: 0, gamma: 0.5 }), "step_size", "0");
    refused(shape(ScheduleShape::Step { step_size: 1, gamma: 0.0 }), "gamma", "0");
    refused(shape(ScheduleShape::Step { step_size: 1, gamma: 1.5 }), "gamma", "1.5");
    refused(shape(ScheduleShape::Cosine { total: 0, end_factor: 0.0 }), "total", "0");
    refused(shape(ScheduleShape::Linear { total: 0, end_factor: 0.0 }), "total", "0");
    refused(shape(ScheduleShape::Linear { total: 9, end_factor: -0.5 }), "end_factor", "-0.5");
    refused(shape(ScheduleShape::Cosine { total: 9, end_factor: f64::NAN }), "end_factor", "NaN");
    for warmup_start_factor in [-0.1, 1.1, f64::NAN] {
        let schedule = Schedule { warmup_start_factor, ..Schedule::default() };
        refused(schedule.validate(), "warmup_start_factor", &warmup_start_factor.to_string());
    }
}

#[test]
fn an_error_says_field_value_and_remedy() {
    let error = one(sgd(-0.1, 0.0, false)).validate().expect_err("accepted");
    assert_eq!(error.to_string(), "groups[0].momentum is -0.1: give a finite number >= 0");
}
