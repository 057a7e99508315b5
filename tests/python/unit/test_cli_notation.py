"""Objects on the command line: Python's notation is read, and never run."""

import re

import pytest

from offbeat import optim, schedule, staleness
from offbeat.cli import notation, serving
from offbeat.errors import ConfigError


def optimizer(text):
    return notation.read(text, "--optimizer", serving.OPTIMIZERS, "SGD(lr=0.1)")


def test_a_name_means_its_defaults():
    assert optimizer("SGD") == optim.SGD()
    assert optimizer(" adamw ") == optim.AdamW()


def test_keywords_are_literals():
    assert optimizer("SGD(lr=.05, momentum=0.9, nesterov=True)") == optim.SGD(
        lr=0.05, momentum=0.9, nesterov=True
    )
    assert optimizer("Adam(betas=(0.9, 0.98))") == optim.Adam(betas=(0.9, 0.98))
    groups = [{"pattern": "*.bias", "weight_decay": 0}]
    assert optimizer(f"AdamW(groups={groups})") == optim.AdamW(groups=groups)


@pytest.mark.parametrize("name", ["adaptive_lr", "AdaptiveLR", "adaptivelr"])
def test_capitals_and_underscores_do_not_matter(name):
    policy = notation.read(f"{name}(factor=0.5)", "--staleness-policy", serving.POLICIES, "x")
    assert policy == staleness.AdaptiveLR(factor=0.5)


def test_every_public_class_can_be_named():
    def names(module, base):
        found = {n for n in module.__all__ if isinstance(getattr(module, n), type)}
        return {n for n in found if issubclass(getattr(module, n), base) and getattr(module, n) is not base}

    assert {c.__name__ for c in serving.OPTIMIZERS.values()} == names(optim, optim.OptimizerSpec)
    assert {c.__name__ for c in serving.POLICIES.values()} == names(staleness, staleness.StalenessPolicy)
    assert {c.__name__ for c in serving.SCHEDULES.values()} == names(schedule, schedule.Schedule)
    assert len(serving.OPTIMIZERS) >= 5


@pytest.mark.parametrize(
    "text",
    [
        "SGD(lr=__import__('os').getpid())",
        "SGD(lr=1)(2)",
        "optim.SGD()",
        "SGD(**{'lr': 1})",
        "SGD(1)",
        "SGD lr=1",
        "",
        "[SGD]",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="as in Python"):
        optimizer(text)


@pytest.mark.parametrize("text", ["cosine", "Cosine()"])
def test_a_decay_that_says_no_more_is_as_long_as_the_run(text):
    assert serving._schedule(text, 8) == "cosine"


def test_a_decay_that_says_more_is_told_how_to_be_as_long_as_the_run():
    told = "write 'Cosine(warmup=2, total=...)', or cosine alone, which is as long as --max-samples"
    with pytest.raises(ConfigError, match=re.escape(told)):
        serving._schedule("Cosine(warmup=2)", 8)


def test_a_value_that_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        optimizer("SGD(lr={[]: 1})")


def test_a_keyword_given_twice_is_refused_by_name():
    with pytest.raises(ConfigError, match="cannot be read, since it has lr twice: write"):
        optimizer("SGD(lr=0.1, momentum=0.9, lr=0.2)")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Cosine", "'Cosine' lacks total: write 'Cosine(total=...)'"),
        ("step(gamma=.5)", "'step(gamma=.5)' lacks step_size: write 'Step(gamma=0.5, step_size=...)'"),
        ("Cosine(totl=100)", "unknown keyword of Cosine 'totl'; did you mean 'total'?"),
    ],
    ids=["missing", "missing beside another", "mistyped"],
)
def test_a_keyword_that_is_missing_or_mistyped_is_named(text, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        notation.read(text, "--lr-schedule", serving.SCHEDULES, "x")
