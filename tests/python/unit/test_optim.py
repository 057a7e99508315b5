"""Optimizer specs: torch.optim's names and defaults; what is refused, and how a live one is told."""

import functools
import inspect
import pickle  # noqa: TID251  that it pickles is the claim

import pytest
import torch

from offbeat import optim
from offbeat.errors import ConfigError, OffbeatError
from offbeat.optim.base import IGNORED

SPECS = [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop]
by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.__name__)


def torch_keywords(spec):
    parameters = inspect.signature(getattr(torch.optim, spec.__name__)).parameters
    return {name: p.default for name, p in parameters.items() if name != "params"}


@by_name
def test_every_keyword_of_torch_is_implemented_or_ignored_with_the_same_default(spec):
    ours = {name: p.default for name, p in inspect.signature(spec).parameters.items()}
    for name, default in torch_keywords(spec).items():
        if name in IGNORED:
            assert name not in ours
        else:
            assert ours.pop(name) == default, name
    assert list(ours) == ["groups"]


@by_name
def test_keywords_are_keyword_only_and_the_signature_says_so(spec):
    kinds = {p.kind for p in inspect.signature(spec).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@by_name
def test_spec_is_frozen_comparable_hashable_and_pickles(spec):
    one = spec(lr=0.5, groups=[{"pattern": "*.bias", "lr": 0.25}])
    assert one == spec(lr=0.5, groups=({"pattern": "*.bias", "lr": 0.25},)) != spec(lr=0.5)
    assert hash(one) == hash(spec(lr=0.5, groups=[{"pattern": "*.bias", "lr": 0.25}]))
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301  our own bytes
    assert eval(repr(one), {spec.__name__: spec}) == one  # noqa: S307  our own text
    with pytest.raises(AttributeError):
        one.lr = 1


@by_name
def test_ignored_keywords_of_torch_change_nothing(spec):
    given = {name: True for name in IGNORED if name in torch_keywords(spec)}
    assert given
    assert spec(lr=0.5, **given) == spec(lr=0.5)


@by_name
def test_bare_class_means_its_defaults(spec):
    assert optim.as_spec(spec) == spec()
    assert optim.as_spec(getattr(torch.optim, spec.__name__)) == spec()


@by_name
def test_partial_of_torchs_class_is_the_spec(spec):
    partial = functools.partial(getattr(torch.optim, spec.__name__), lr=0.5, weight_decay=0.1, foreach=False)
    assert optim.as_spec(partial) == spec(lr=0.5, weight_decay=0.1)
    assert optim.as_spec(functools.partial(spec, lr=0.5)) == spec(lr=0.5)


@by_name
def test_parameters_make_it_the_live_optimizer_of_torch(spec):
    model = torch.nn.Linear(2, 1)
    live = spec(model.parameters(), lr=0.5)
    assert type(live) is getattr(torch.optim, spec.__name__)
    assert live.param_groups[0]["lr"] == 0.5
    assert live.param_groups[0]["params"][0] is model.weight


@by_name
def test_a_value_without_its_keyword_is_refused_with_how_to_write_it(spec):
    with pytest.raises(ConfigError, match=rf"{spec.__name__}\(0\.5\): .*{spec.__name__}\(lr=0\.1\)"):
        spec(0.5)


def test_live_optimizer_is_recognised_without_importing_torch(run_python):
    told = run_python(
        "import sys\n"
        "from offbeat import optim\n"
        "class Live:\n"
        "    param_groups = []\n"
        "    def step(self): ...\n"
        "    def zero_grad(self): ...\n"
        "    def state_dict(self): ...\n"
        "print(*map(optim.is_live, (Live(), Live, optim.SGD())), 'torch' in sys.modules)"
    )
    assert told.split() == ["True", "False", "False", "False"]
    assert optim.is_live(torch.optim.Adam(torch.nn.Linear(1, 1).parameters()))


def test_live_optimizer_is_refused_where_the_server_needs_a_spec():
    live = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"a live SGD runs on the worker.*offbeat\.optim\.SGD\(lr=0\.1\)"):
        optim.as_spec(live)


def test_other_classes_are_refused_with_pass_a_live_optimizer():
    class Mine(torch.optim.SGD):
        pass

    rprop = functools.partial(torch.optim.Rprop, lr=1)
    for other in (torch.optim.NAdam, torch.optim.LBFGS, Mine, rprop):
        with pytest.raises(ConfigError, match="pass a live optimizer"):
            optim.as_spec(other)


def test_partial_that_holds_parameters_is_refused():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="pass the live optimizer"):
        optim.as_spec(functools.partial(torch.optim.SGD, model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: optim.SGD(momentm=0.9), "did you mean 'momentum'"),
        (lambda: optim.Adam(beta=(0.9, 0.99)), "did you mean 'betas'"),
        (lambda: optim.Adam(learning_rate=0.1), "did you mean 'lr'"),
        (lambda: optim.AdamW(weightdecay=0.1), "did you mean 'weight_decay'"),
        (
            lambda: optim.SGD(groups=[{"pattern": "*", "lrr": 1}]),
            r"keyword of SGD in groups\[0\] 'lrr'; did you mean 'lr'",
        ),
        (lambda: optim.as_spec("sdg"), r"did you mean offbeat\.optim\.SGD\("),
        (
            lambda: optim.as_spec("L-BFGS"),
            r"an object; give one such as offbeat\.optim\.SGD\(lr=0\.1\)\. Known: SGD",
        ),
        (lambda: optim.as_spec("torch.optim.Adam(lr=0.1)"), r"did you mean offbeat\.optim\.Adam\("),
        (lambda: optim.as_spec(functools.partial(torch.optim.SGD, momentun=1)), "did you mean 'momentum'"),
    ],
)
def test_near_miss_names_the_nearest(made, said):
    with pytest.raises(ConfigError, match=said):
        made()


@pytest.mark.parametrize("name", ["beta", "temperature", "zzz"])
def test_an_unknown_name_in_a_group_is_no_nearer_than_elsewhere(name):
    known = "Known: lr, momentum, dampening, weight_decay, nesterov, maximize"
    with pytest.raises(ConfigError, match=f"unknown keyword of SGD '{name}'; {known}, groups$"):
        optim.SGD(**{name: 1})
    with pytest.raises(ConfigError, match=rf"unknown keyword of SGD in groups\[0\] '{name}'; {known}$"):
        optim.SGD(groups=[{"pattern": "*", name: 1}])


@pytest.mark.parametrize(
    ("spec", "values", "said"),
    [
        (optim.SGD, {"lr": -0.1}, "lr is -0.1"),
        (optim.SGD, {"lr": float("nan")}, "lr is nan"),
        (optim.SGD, {"lr": float("inf")}, "lr is inf"),
        (optim.SGD, {"lr": 10**400}, "lr is 1000"),
        (optim.SGD, {"lr": "0.1"}, "lr is '0.1'"),
        (optim.SGD, {"lr": True}, "lr is True"),
        (optim.SGD, {"nesterov": True}, "nesterov=True needs momentum > 0 and dampening = 0"),
        (optim.SGD, {"nesterov": 1.5}, "nesterov is 1.5"),
        (optim.SGD, {"momentum": -1}, "momentum is -1"),
        (optim.SGD, {"dampening": float("-inf")}, "dampening is -inf"),
        (optim.Adam, {"betas": (0.9, 1.0)}, "betas is"),
        (optim.Adam, {"betas": 0.9}, "betas is 0.9"),
        (optim.Adam, {"eps": -1}, "eps is -1"),
        (optim.SGD, {"groups": {"*": {}}}, "it is a list of dicts"),
        (optim.SGD, {"groups": [{"lr": 1}]}, r"groups\[0\] is .* a dict with a 'pattern'"),
        (optim.SGD, {"groups": [{"pattern": "a", "nesterov": True}]}, r"groups\[0\]: nesterov=True needs"),
    ],
)
def test_value_out_of_range_is_refused_by_name(spec, values, said):
    with pytest.raises(ConfigError, match=said) as refused:
        spec(**values)
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, OffbeatError)


def test_every_bad_keyword_is_named_at_once():
    with pytest.raises(ConfigError, match=r"'momentm'.*lr is -1.*weight_decay is -2"):
        optim.SGD(momentm=1, lr=-1, weight_decay=-2)


def test_group_takes_from_the_spec_what_it_does_not_name_and_the_rest_comes_last():
    spec = optim.SGD(
        lr=0.1, momentum=0.9, groups=[{"pattern": "*.bias", "lr": 1}, {"pattern": "b*", "momentum": 0}]
    )
    groups = spec.spec()["groups"]
    assert [(g["pattern"], g["lr"], g["rule"]["momentum"]) for g in groups] == [
        ("*.bias", 1.0, 0.9),
        ("b*", 0.1, 0.0),
        ("*", 0.1, 0.9),
    ]


def test_tensor_as_learning_rate_is_its_number():
    assert optim.SGD(lr=torch.tensor(0.5)) == optim.SGD(lr=0.5)


def test_momentum_is_corrected_by_default_wherever_it_can_be():
    assert optim.SGD(momentum=0.9).spec()["momentum_correction"] is True
    assert optim.SGD(momentum=0.9, nesterov=True).spec()["momentum_correction"] is True
    assert optim.SGD(momentum=0.9, dampening=0.1).spec()["momentum_correction"] is False
    assert optim.SGD().spec()["momentum_correction"] is False
    assert optim.Adam().spec()["momentum_correction"] is False
    assert optim.RMSprop(momentum=0.9).spec()["momentum_correction"] is False
    assert optim.SGD(momentum=0.9).spec(momentum_correction=False)["momentum_correction"] is False


@pytest.mark.parametrize(
    "spec", [optim.Adam(), optim.SGD(), optim.SGD(momentum=0.9, dampening=0.1)], ids=repr
)
def test_momentum_correction_is_refused_without_sgd_momentum_and_no_dampening(spec):
    with pytest.raises(ConfigError, match="needs SGD with momentum > 0 and dampening = 0"):
        spec.spec(momentum_correction=True)
