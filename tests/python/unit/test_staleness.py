"""Staleness policies: names and objects, their checks, and keywords that say something else."""

import itertools
import pickle  # noqa: TID251  that it pickles is the claim

import pytest

from offbeat import staleness
from offbeat.errors import ConfigError

NAMES = {
    "constant": ({"name": "constant"}, staleness.Constant()),
    "adaptive_lr": ({"name": "adaptive_lr", "factor": 0.9}, staleness.AdaptiveLR()),
    "inverse": ({"name": "inverse"}, staleness.Inverse()),
    "polynomial": ({"name": "polynomial", "a": 0.5}, staleness.Polynomial()),
    "hinge": ({"name": "hinge", "a": 10.0, "b": 4}, staleness.Hinge()),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_class_and_object_are_the_same_policy(name):
    weight, policy = NAMES[name]
    expected = {"weights": [weight], "max_staleness": None, "max_norm": None}
    for given in (name, policy, [name], [policy], type(policy)):
        assert staleness.resolve(given) == (expected, None)


@pytest.mark.parametrize(
    "policy",
    [
        *(p for _, p in NAMES.values()),
        staleness.GradientFiltering(max_staleness=3, max_norm=2.0),
        staleness.MomentumCorrection(),
    ],
    ids=repr,
)
def test_policy_is_frozen_and_pickles(policy):
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301  our own bytes
    with pytest.raises(AttributeError):
        policy.max_staleness = 1


def test_factor_keyword_fills_adaptive_lr_where_that_is_given_by_name():
    spec, _ = staleness.resolve("adaptive_lr", lr_factor=0.5)
    assert spec["weights"] == [{"name": "adaptive_lr", "factor": 0.5}]


def test_factor_keyword_and_object_that_disagree_are_refused_naming_both():
    with pytest.raises(ConfigError, match=r"staleness_lr_factor is 0\.5 .*AdaptiveLR\(factor=0\.8"):
        staleness.resolve(staleness.AdaptiveLR(factor=0.8), lr_factor=0.5)
    spec, _ = staleness.resolve(staleness.AdaptiveLR(factor=0.8))
    assert spec["weights"] == [{"name": "adaptive_lr", "factor": 0.8}]


def test_factor_keyword_says_that_it_has_no_effect_on_other_policies():
    with pytest.warns(UserWarning, match=r"staleness_lr_factor=0\.5 has no effect"):
        staleness.resolve("inverse", lr_factor=0.5)


def test_max_staleness_keyword_and_object_that_disagree_are_refused_naming_both():
    with pytest.raises(ConfigError, match=r"max_staleness is 5 .*max_staleness=10"):
        staleness.resolve(staleness.AdaptiveLR(max_staleness=10), max_staleness=5)
    with pytest.raises(ConfigError, match="max_staleness 3 and 10"):
        staleness.resolve(
            [staleness.AdaptiveLR(max_staleness=10), staleness.GradientFiltering(max_staleness=3)]
        )
    spec, _ = staleness.resolve(staleness.AdaptiveLR(max_staleness=10), max_staleness=10)
    assert spec["max_staleness"] == 10


def test_what_is_wrong_with_policies_and_what_is_beside_them_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        staleness.resolve(["adaptve", "hing", "adaptive_lr"], lr_factor=2, max_staleness=-1)
    for said in ("max_staleness is -1", "staleness_lr_factor is 2", "policy 'adaptve'", "policy 'hing'"):
        assert str(caught.value).count(said) == 1, said


def test_list_multiplies_in_a_fixed_order_whatever_its_own():
    policies = ["hinge", staleness.AdaptiveLR(0.8), "polynomial", staleness.GradientFiltering(7), "inverse"]
    specs = [staleness.resolve(list(p))[0] for p in itertools.permutations(policies)]
    assert all(spec == specs[0] for spec in specs)
    assert [w["name"] for w in specs[0]["weights"]] == ["adaptive_lr", "inverse", "polynomial", "hinge"]
    assert specs[0]["max_staleness"] == 7


def test_same_policy_twice_is_refused():
    with pytest.raises(ConfigError, match="'inverse' is among the policies twice"):
        staleness.resolve(["inverse", staleness.Inverse()])


def test_gradient_filtering_bounds_staleness_and_on_request_the_norm():
    spec, _ = staleness.resolve(staleness.GradientFiltering(max_staleness=3, max_norm=2))
    assert spec == {"weights": [], "max_staleness": 3, "max_norm": 2.0}
    spec, _ = staleness.resolve("gradient_filtering", max_staleness=3)
    assert spec == {"weights": [], "max_staleness": 3, "max_norm": None}


def test_gradient_filtering_with_nothing_to_filter_by_is_refused():
    with pytest.raises(ConfigError, match="nothing to filter by"):
        staleness.resolve("gradient_filtering")


def test_momentum_correction_among_the_policies_says_the_default_aloud():
    assert staleness.resolve(["momentum_correction", "inverse"])[1] is True
    assert staleness.resolve(staleness.MomentumCorrection(), momentum_correction=True)[1] is True
    assert staleness.resolve("inverse", momentum_correction=False)[1] is False
    with pytest.raises(ConfigError, match=r"momentum_correction is False but MomentumCorrection\(\)"):
        staleness.resolve("momentum_correction", momentum_correction=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adaptive-lr", "did you mean 'adaptive_lr'"),
        ("constnt", "did you mean 'constant'"),
        ("momentum_corection", "did you mean 'momentum_correction'"),
        ("xyz", "Known: constant, adaptive_lr"),
        (3, "3 is no staleness policy"),
    ],
)
def test_unknown_policy_names_the_nearest(given, said):
    with pytest.raises(ConfigError, match=said):
        staleness.resolve(given)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: staleness.AdaptiveLR(factr=0.9), "keyword of AdaptiveLR 'factr'; did you mean 'factor'"),
        (lambda: staleness.GradientFiltering(max_staleness=3, maxnorm=1), "did you mean 'max_norm'"),
        (lambda: staleness.Inverse(a=1), "keyword of Inverse 'a'; Known: none"),
    ],
)
def test_unknown_keyword_names_the_nearest(made, said):
    with pytest.raises(ConfigError, match=said):
        made()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: staleness.AdaptiveLR(0), "factor is 0"),
        (lambda: staleness.AdaptiveLR(1.1), r"factor is 1\.1"),
        (lambda: staleness.AdaptiveLR(factor=2, max_staleness=-1), "factor is 2.*max_staleness is -1"),
        (lambda: staleness.Polynomial(-1), "a is -1"),
        (lambda: staleness.Hinge(a=-1, b=1.5), "a is -1.*b is 1.5"),
        (lambda: staleness.GradientFiltering(max_staleness=2.5), r"max_staleness is 2\.5"),
        (lambda: staleness.GradientFiltering(max_norm=0), "max_norm is 0"),
        (lambda: staleness.resolve("inverse", max_staleness=-2), "^max_staleness is -2: it is 0 or more"),
        (lambda: staleness.resolve("adaptive_lr", lr_factor=0), "^staleness_lr_factor is 0: it is"),
        (
            lambda: staleness.resolve(staleness.Hinge(), max_staleness=-2),
            "^max_staleness is -2: it is 0 or more",
        ),
    ],
)
def test_value_out_of_range_is_refused_by_name(made, said):
    with pytest.raises(ConfigError, match=said):
        made()
