"""Learning-rate schedules: objects, the names that say enough, and their checks."""

import pickle  # noqa: TID251  that it pickles is the claim

import pytest

from offbeat import schedule
from offbeat.errors import ConfigError

SCHEDULES = [
    schedule.Constant(warmup=10),
    schedule.Step(step_size=5),
    schedule.Cosine(total=100, end_factor=0.1),
    schedule.Linear(total=100, warmup=3, warmup_start_factor=0.5, unit="samples"),
]


@pytest.mark.parametrize("made", SCHEDULES, ids=repr)
def test_schedule_is_frozen_comparable_and_pickles(made):
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  our own bytes
    with pytest.raises(AttributeError):
        made.warmup = 1


def test_spec_is_what_the_core_reads():
    assert SCHEDULES[3].spec() == {
        "unit": "samples",
        "shape": {"name": "linear", "total": 100, "end_factor": 0.0},
        "warmup": 3,
        "warmup_start_factor": 0.5,
    }
    assert SCHEDULES[1].spec()["shape"] == {"name": "step", "step_size": 5, "gamma": 0.1}


def test_none_and_the_name_constant_are_factor_one():
    assert schedule.resolve(None) == schedule.resolve("constant") == schedule.Constant()


def test_name_of_a_decay_falls_to_zero_over_the_runs_samples():
    assert schedule.resolve("linear", max_samples=500) == schedule.Linear(total=500, unit="samples")
    assert schedule.resolve("cosine", max_samples=500) == schedule.Cosine(total=500, unit="samples")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("linear", "needs the length of the run"),
        ("cosine", r"offbeat\.schedule\.Cosine\(total=…\)"),
        ("step", "does not say when"),
        ("cosin", "did you mean 'cosine'"),
        (0.1, "lr_schedule is 0.1"),
    ],
)
def test_name_that_says_too_little_or_nothing_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        schedule.resolve(given)


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match="keyword of Linear 'warm_up'; did you mean 'warmup'"):
        schedule.Linear(total=10, warm_up=2)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: schedule.Step(step_size=0), "step_size is 0"),
        (lambda: schedule.Step(step_size=10**30), "step_size is 1000"),
        (lambda: schedule.Linear(total=1, end_factor=10**400), "end_factor is 1000"),
        (lambda: schedule.Step(step_size=1, gamma=0), "gamma is 0"),
        (lambda: schedule.Linear(total=0.5, end_factor=-1), r"total is 0\.5.*end_factor is -1"),
        (lambda: schedule.Constant(warmup=-1), "warmup is -1"),
        (lambda: schedule.Constant(warmup_start_factor=2), "warmup_start_factor is 2"),
        (lambda: schedule.Constant(unit="sample"), "did you mean 'samples'"),
    ],
)
def test_value_out_of_range_is_refused_by_name(made, said):
    with pytest.raises(ConfigError, match=said):
        made()
