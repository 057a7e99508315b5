"""An averager alone, and what can be told of it without others."""

import copy
import functools
import itertools
import statistics

import pytest
import torch
from torch import nn

import offbeat
from offbeat import averaging, optim
from offbeat.averaging.pace import Adaptive
from offbeat.errors import ClosedError, ConfigError, NonFiniteError, StateError, UnknownAttributeError
from offbeat.local import lr_scale
from support.averaging import warned

LOSS = nn.CrossEntropyLoss()
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    optim.Adam(lr=0.01),
    optim.AdamW(lr=0.01),
    optim.Adagrad(lr=0.1),
    optim.RMSprop(lr=0.01, momentum=0.5),
]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def batch(number):
    random = torch.Generator().manual_seed(number)
    return torch.randn(7, 6, generator=random), torch.randint(5, (7,), generator=random)


def train(averager, iterations, optimizer, first=0):
    losses = []
    for number in range(first, first + iterations):
        inputs, targets = batch(number)
        losses.append(averager.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=LOSS))
    return losses


def local(iterations, kind, **numbers):
    trained = model()
    live = getattr(torch.optim, kind)(trained.parameters(), **numbers)
    losses = []
    for number in range(iterations):
        inputs, targets = batch(number)
        live.zero_grad()
        loss = LOSS(trained(inputs), targets)
        loss.backward()
        live.step()
        losses.append(loss.item())
    return trained, losses


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "a dict without iterations, .*"),
        ({"pace": None}, "a dict without iterations, .*"),
        (model().state_dict(), "an OrderedDict without iterations, .*"),
        (3, "an int without iterations, .*"),
        (None, "None"),
    ],
)
def test_what_is_no_state_at_all_is_refused(state, told):
    with pytest.raises(ConfigError, match=rf"the state is {told}: give what .*state_dict"):
        offbeat.AsyncModelAverager(model()).load_state_dict(state)


@pytest.mark.parametrize("method", ["average", "easgd", "gossip"])
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
def test_one_member_is_a_local_loop_bit_for_bit(spec, method):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3, method=method)
    losses = train(ours, 10, spec)
    ours.flush()
    numbers = {name: getattr(spec, name) for name in vars(spec) if name != "groups"}
    theirs, expected = local(10, type(spec).__name__, **numbers)
    assert losses == expected
    assert same(ours.model, theirs)
    assert ours.averaging_round == 4, "three, and what was left at flush"
    assert ours.last_averaging_iteration == 0


@pytest.mark.parametrize("method", [averaging.DiLoCo(lr=1.0, momentum=0.0), averaging.SlowMo(beta=0.0)])
def test_outer_steps_of_one_without_momentum_are_a_local_loop(method):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3, method=method, overlap=False)
    train(ours, 10, optim.SGD(lr=0.1))
    theirs, _ = local(10, "SGD", lr=0.1)
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, 2])
def test_outer_steps_of_one_are_torchs_on_the_way_since(overlap):
    method = averaging.DiLoCo(lr=0.7, momentum=0.9)
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=4, method=method, overlap=overlap)
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    outer = copy.deepcopy(list(trained.parameters()))
    steps = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    taken = None
    for number in range(14):
        inputs, targets = batch(number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        live.step()
        if (number + 1) % 4 == 0:
            taken = [p.detach().clone() for p in trained.parameters()]
        if taken is not None and (number + 1) % 4 == int(overlap):
            for reference, own in zip(outer, taken, strict=True):
                reference.grad = reference.detach() - own
            steps.step()
            with torch.no_grad():
                for p, own, reference in zip(trained.parameters(), taken, outer, strict=True):
                    p.add_(reference - own)
            taken = None
    for a, b in zip(ours.model.parameters(), trained.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max() + 1e-7


def test_a_loop_of_ones_own_counts_with_step():
    ours = offbeat.AsyncModelAverager(
        model(), averaging_frequency=2, method=averaging.DiLoCo(lr=1.0, momentum=0.5), overlap=False
    )
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    for number in range(5):
        inputs, targets = batch(number)
        live.zero_grad()
        LOSS(ours.model(inputs), targets).backward()
        live.step()
        ours.step(len(inputs))
    other = offbeat.AsyncModelAverager(
        model(), averaging_frequency=2, method=averaging.DiLoCo(lr=1.0, momentum=0.5), overlap=False
    )
    train(other, 5, optim.SGD(lr=0.1))
    assert same(ours.model, other.model)
    assert (ours.averaging_round, ours.last_averaging_iteration) == (2, 1)


def test_a_frequency_of_time_is_kept_by_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency="10s", averaging_policy="time")
    rounds = []
    for number, passes in enumerate((4.0, 5.9, 0.1, 9.0, 12.0, 1.0)):
        now[0] += passes
        train(ours, 1, optim.SGD(lr=0.1), first=number)
        rounds.append(ours.averaging_round)
    assert rounds == [0, 0, 1, 1, 2, 2]
    assert ours.averaging_frequency == 10.0


def test_a_frequency_of_time_counts_from_the_end_of_a_round_and_not_while_it_is_under_way(monkeypatch):
    """Of one alone, whose round of an outer method begins after one iteration and ends after the next."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def made():
        return offbeat.AsyncModelAverager(
            model(), averaging_frequency="10s", averaging_policy="time", method="diloco"
        )

    ours, seen = made(), []
    for number, passes in enumerate((10.0, 15.0, 9.9, 0.1, 3.0, 4.0)):
        now[0] += passes
        train(ours, 1, optim.SGD(lr=0.1), first=number)
        seen.append((ours.is_under_way, ours.averaging_round))
    assert seen == [(True, 0), (False, 1), (False, 1), (True, 1), (False, 2), (False, 2)]
    state, other = ours.state_dict(), made()
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(state, optimizer=optim.SGD(lr=0.1))  # 4 s after the end of its second round
    for passes, is_due in ((5.9, False), (0.1, True)):
        now[0] += passes
        train(other, 1, None)
        assert other.is_under_way == is_due


def test_an_adaptive_frequency_follows_the_metric_and_keeps_its_bounds():
    seen = iter([1.0, 1.0, 1.0] + [0.25] * 12 + [100.0] * 12)
    ours = offbeat.AsyncModelAverager(
        model(),
        averaging_frequency=4,
        averaging_policy="adaptive",
        min_averaging_frequency=2,
        max_averaging_frequency=7,
        adaptation_metric=lambda _: next(seen),
    )
    frequencies = []
    while ours.averaging_round < 27:
        train(ours, 1, optim.SGD(lr=0.01), first=ours.iterations)
        frequencies.append(ours.averaging_frequency)
    assert frequencies[0] == 4
    assert max(frequencies) == 7, "a quarter of the variance: twice as long, but for the bound"
    assert frequencies[-1] == 2


def test_the_losses_that_are_followed_are_those_since_the_last_average_by_variance_over_mean():
    ours = offbeat.AsyncModelAverager(
        model(), averaging_frequency=8, averaging_policy="adaptive", method="diloco", overlap=False
    )
    pace = Adaptive(every=8, start=8, least=2, most=32)
    losses, frequencies = [], []
    for number in range(160):
        inputs, targets = batch(number)
        losses.append(
            ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        )
        if len(losses) == pace.every:
            mean = statistics.fmean(losses)
            pace, losses = pace.after(statistics.variance(losses) / mean), []
            frequencies.append(pace.every)
        assert ours.averaging_frequency == pace.every
    assert len(set(frequencies)) > 1


@pytest.mark.parametrize("metric", ["gradient_norm", "parameter_variance"])
def test_each_metric_can_be_followed(metric):
    """Alone, members do not drift: that metric is 0 and stays so; the other falls as learning slows down."""
    ours = offbeat.AsyncModelAverager(
        model(), averaging_frequency=4, averaging_policy="adaptive", adaptation_metric=metric, method="diloco"
    )
    frequencies = set()
    for number in range(120):
        inputs, targets = batch(number % 4)
        ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        frequencies.add(ours.averaging_frequency)
    assert frequencies == {4} if metric == "parameter_variance" else max(frequencies) > 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_they_are_measured_are_told_of_once(set_to_none):
    def trained(is_zeroed):
        ours = offbeat.AsyncModelAverager(
            model(), averaging_frequency=2, averaging_policy="adaptive", adaptation_metric="gradient_norm"
        )
        live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
        with warned() as told:
            for number in range(40):
                live.zero_grad()
                LOSS(ours.model(batch(number % 4)[0]), batch(number % 4)[1]).backward()
                live.step()
                if is_zeroed:
                    live.zero_grad(set_to_none=set_to_none)
                ours.step(7)
            live.zero_grad()
            ours.flush()
        return ours.averaging_frequency, told

    frequency, told = trained(is_zeroed=True)
    assert frequency == 2
    assert len(told) == 1
    assert "zero the gradients before backward(), and not between" in told[0]
    frequency, told = trained(is_zeroed=False)
    assert frequency > 2
    assert not told


def test_sparse_gradients_are_measured_like_others():
    def frequencies(is_sparse):
        torch.manual_seed(0)
        trained = nn.Embedding(9, 5, sparse=is_sparse)
        ours = offbeat.AsyncModelAverager(
            trained, averaging_frequency=2, averaging_policy="adaptive", adaptation_metric="gradient_norm"
        )
        found = []
        for number in range(40):
            indices = torch.tensor([number % 4, 3, 3])
            ours.train_step(inputs=indices, targets=indices % 5, optimizer=optim.SGD(lr=0.5), loss_fn=LOSS)
            found.append(ours.averaging_frequency)
        return found

    found = frequencies(is_sparse=True)
    assert found == frequencies(is_sparse=False)
    assert len(set(found)) > 1


def test_a_state_goes_on_bit_for_bit():
    def made():
        return offbeat.AsyncModelAverager(
            model(),
            averaging_frequency=4,
            averaging_policy="adaptive",
            min_averaging_frequency=2,
            adaptation_metric="gradient_norm",
            method=averaging.DiLoCo(lr=0.5, momentum=0.5, fragments=2),
            overlap=False,
        )

    spec = optim.AdamW(lr=0.01)
    whole = made()
    train(whole, 30, spec)
    first = made()
    train(first, 17, spec)
    kept = copy.deepcopy((first.model.state_dict(), first.state_dict()))
    second = made()
    second.model.load_state_dict(kept[0])
    second.load_state_dict(kept[1], optimizer=spec)
    train(second, 13, spec, first=17)
    assert same(second.model, whole.model)
    assert (second.averaging_round, second.averaging_frequency) == (
        whole.averaging_round,
        whole.averaging_frequency,
    )


def test_what_an_optimizer_keeps_in_float32_beside_a_bfloat16_model_comes_back_as_it_was():
    spec = functools.partial(torch.optim.NAdam, lr=0.01)
    first = offbeat.AsyncModelAverager(model().bfloat16(), averaging_frequency=4)
    for number in range(3):
        inputs, targets = batch(number)
        first.train_step(inputs=inputs.bfloat16(), targets=targets, optimizer=spec, loss_fn=LOSS)
    second = offbeat.AsyncModelAverager(model().bfloat16(), averaging_frequency=4)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict(), optimizer=spec)
    kept = [[state["mu_product"] for state in one.optimizer.state.values()] for one in (first, second)]
    assert all(map(torch.equal, *kept))
    assert kept[1][0].dtype == torch.float32


@pytest.mark.parametrize("policy", ["iteration", "adaptive"])
def test_a_frequency_and_an_overlap_that_were_changed_are_in_the_state(policy):
    def made():
        return offbeat.AsyncModelAverager(
            model(),
            averaging_frequency=3,
            averaging_policy=policy,
            max_averaging_frequency=40 if policy == "adaptive" else None,
            min_averaging_frequency=3 if policy == "adaptive" else None,
            overlap=False,
            method="diloco",
        )

    def trained(ours, first, last):
        for number in range(first, last):
            if number == 4:
                ours.averaging_frequency, ours.overlap = 5, 2
            if number == 18:
                ours.averaging_frequency = 7  # which is not in force before a round agrees
            train(ours, 1, optim.SGD(lr=0.1), first=number)
        return ours.averaging_frequency

    whole, first, second = made(), made(), made()
    expected = trained(whole, 0, 18), trained(whole, 19, 60)
    trained(first, 0, 18)
    kept = copy.deepcopy((first.state_dict(), first.model.state_dict()))
    second.model.load_state_dict(kept[1])
    with warned() as told:
        second.load_state_dict(kept[0], optimizer=optim.SGD(lr=0.1))
    assert (second.averaging_frequency, second.overlap) == (expected[0], 2)
    assert len(told) == 1
    assert f"with averaging_frequency {expected[0]} and overlap 2, and not" in told[0]
    assert trained(second, 19, 60) == expected[1]
    assert same(whole.model, second.model)
    third = made()
    third.model.load_state_dict(kept[1])
    older = {name: value for name, value in kept[0].items() if name != "timing"}
    with warned() as told:
        third.load_state_dict(older, optimizer=optim.SGD(lr=0.1))
    assert third.overlap is False
    assert not told


def test_a_state_of_another_policy_is_refused():
    state = offbeat.AsyncModelAverager(model()).state_dict()
    for policy in ("time", "adaptive"):
        with pytest.raises(ConfigError, match="the state is of another averaging_policy"):
            offbeat.AsyncModelAverager(model(), averaging_policy=policy).load_state_dict(state)


def test_a_state_whose_overlap_does_not_go_with_todays_bounds_is_refused():
    def made(least, overlap=False):
        return offbeat.AsyncModelAverager(
            model(),
            averaging_frequency=8,
            averaging_policy="adaptive",
            min_averaging_frequency=least,
            overlap=overlap,
        )

    state = made(6, overlap=5).state_dict()
    with pytest.raises(ConfigError, match="overlap is 5, and a round begins every 4 iterations"):
        made(4).load_state_dict(state)


def test_a_frequency_of_time_is_taken_up_as_far_as_a_round_waits_here():
    def made(frequency):
        return offbeat.AsyncModelAverager(
            model(), averaging_frequency=frequency, averaging_policy="time", process_group=False
        )

    for before, now, expected in (("20s", "30s", 20.0), ("30s", "20s", 20.0)):
        ours = made(now)
        ours.load_state_dict(made(before).state_dict())
        assert ours.averaging_frequency == expected


def test_a_state_of_another_method_or_model_is_refused_and_changes_nothing():
    ours = offbeat.AsyncModelAverager(model(), method="diloco")
    state = ours.state_dict()
    other = offbeat.AsyncModelAverager(model(), method="easgd")
    with pytest.raises(ConfigError, match=r"the state is of method DiLoCo\(lr=0\.7, .* EASGD\(alpha=None\)"):
        other.load_state_dict(state)
    narrow = offbeat.AsyncModelAverager(nn.Linear(2, 2), method="diloco")
    with pytest.raises(ConfigError, match="the state is of a model of 6 parameters, and here are 2"):
        narrow.load_state_dict(state)


def test_a_state_with_an_optimizers_says_where_to_give_one_and_changes_nothing():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, overlap=False)
    train(ours, 3, optim.SGD(lr=0.1, momentum=0.9))
    state = ours.state_dict()
    other = offbeat.AsyncModelAverager(model(), averaging_frequency=2, overlap=False)
    with pytest.raises(
        ConfigError, match=r"the state has one's: give load_state_dict\(state, optimizer=\.\.\.\)"
    ):
        other.load_state_dict(state)
    assert (other.iterations, other.optimizer) == (0, None)
    with pytest.raises(
        ConfigError,
        match=r"is of method Average\(\), and here it is DiLoCo\(lr=.*; there is no optimizer",
    ):
        offbeat.AsyncModelAverager(model(), method="diloco").load_state_dict(state)
    with pytest.raises(StateError, match=r"parameter '0\.weight' has other values: load the model's own"):
        other.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9))
    assert (other.iterations, other.optimizer) == (0, None)
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9))
    assert other.iterations == 3
    assert len(other.optimizer.state) == len(ours.optimizer.state) > 0


def test_the_method_can_change_in_mid_run():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, overlap=False)
    train(ours, 2, optim.SGD(lr=0.1))
    ours.method = "slowmo"
    assert ours.method == averaging.Average(), "until a round has been begun with that wish"
    assert repr(ours).endswith(f", wishes for method={averaging.SlowMo()!r} (in force: Average())>")
    train(ours, 2, optim.SGD(lr=0.1), first=2)
    assert ours.method == averaging.SlowMo()
    before = [p.detach().clone() for p in ours.model.parameters()]
    train(ours, 2, optim.SGD(lr=0.1), first=4)
    theirs = model()
    with torch.no_grad():
        for p, value in zip(theirs.parameters(), before, strict=True):
            p.copy_(value)
    live = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in (4, 5):
        live.zero_grad()
        LOSS(theirs(batch(number)[0]), batch(number)[1]).backward()
        live.step()
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), (
            "the first round of a new method takes the mean for its reference"
        )
    with pytest.raises(ConfigError, match="did you mean 'slowmo'"):
        ours.method = "slow-mo"


def test_a_parameter_that_is_unfrozen_begins_with_the_mean():
    trained = model()
    trained[0].weight.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=1, method="diloco", overlap=False)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    train(ours, 3, live)
    trained[0].weight.requires_grad_(requires_grad=True)
    expected = trained[0].weight.detach().clone()
    for number in (
        3,
        4,
    ):  # in the first members agree that it is trained; the second's mean is where it begins
        train(ours, 1, live, first=number)
        expected -= 0.1 * trained[0].weight.grad
        assert torch.allclose(trained[0].weight, expected, atol=1e-6), "no outer step yet"
    train(ours, 1, live, first=5)
    expected -= 0.7 * 1.9 * 0.1 * trained[0].weight.grad
    assert torch.allclose(trained[0].weight, expected, atol=1e-6)


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_slowmo_follows_the_learning_rate_as_the_paper_does(is_scheduled):
    ours = offbeat.AsyncModelAverager(
        model(), averaging_frequency=2, method=averaging.SlowMo(alpha=1.0, beta=0.5), overlap=False
    )
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    x = [p.detach().clone() for p in ours.model.parameters()]
    u = [torch.zeros_like(p) for p in x]
    for number in range(4):
        gamma = 0.1 / (1 + number)
        if is_scheduled:
            live.param_groups[0]["lr"] = gamma
        else:  # as a monitor's "reduce_lr" does
            lr_scale.scale(live, number / (1 + number) if number else 1.0)
        trained = model()
        trained.load_state_dict(ours.model.state_dict())
        theirs = torch.optim.SGD(trained.parameters(), lr=gamma)
        for place in (2 * number, 2 * number + 1):
            theirs.zero_grad()
            LOSS(trained(batch(place)[0]), batch(place)[1]).backward()
            theirs.step()
        u = [0.5 * b + (a - p.detach()) / gamma for a, b, p in zip(x, u, trained.parameters(), strict=True)]
        x = [a - gamma * b for a, b in zip(x, u, strict=True)]
        train(ours, 2, live, first=2 * number)
        for p, value in zip(ours.model.parameters(), x, strict=True):
            assert torch.allclose(p, value, atol=1e-6), number


def test_an_optimizer_that_makes_its_own_rate_is_averaged_as_any():
    class MakesItsOwn(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)

    theirs, ours = model(), offbeat.AsyncModelAverager(model(), averaging_frequency=2, method="slowmo")
    train(ours, 4, MakesItsOwn(ours.model.parameters(), {"lr": None}))
    ours.close()
    alike = offbeat.AsyncModelAverager(theirs, averaging_frequency=2, method="slowmo")
    train(alike, 4, torch.optim.SGD(theirs.parameters(), lr=0.1))
    alike.close()
    assert all(map(torch.allclose, ours.model.parameters(), theirs.parameters()))


def test_a_model_in_bfloat16_keeps_its_reference_in_float32():
    trained = nn.Linear(4, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        trained.weight.fill_(1.0)
    ours = offbeat.AsyncModelAverager(
        trained, averaging_frequency=1, method=averaging.DiLoCo(lr=0.1, momentum=0.0), overlap=False
    )
    live = torch.optim.SGD(trained.parameters(), lr=1.0)
    for _ in range(20):  # each outer step is a tenth of the least that bfloat16 can tell from 1
        live.zero_grad()
        with torch.no_grad():
            trained.weight.sub_(2.0**-8)
        ours.step(4)
    state = ours.state_dict()["rounds"]["memories"][0]["reference"]
    assert {part.dtype for part in state} == {torch.float32}
    assert trained.weight[0, 0].item() < 1.0


def test_evaluation_is_of_this_members_model_and_changes_nothing():
    ours = offbeat.AsyncModelAverager(model())
    train(ours, 3, optim.SGD(lr=0.1))
    before = copy.deepcopy(ours.model.state_dict())
    dataset = torch.utils.data.TensorDataset(*batch(7))
    accuracy = ours.evaluate(dataset)
    both = ours.evaluate(torch.utils.data.DataLoader(dataset, batch_size=2), ["accuracy", "loss"])
    assert accuracy == pytest.approx(both["accuracy"])
    ours.model.eval()
    assert both["loss"] == pytest.approx(LOSS(ours.model(batch(7)[0]), batch(7)[1]).item(), rel=1e-5)
    assert all(map(torch.equal, before.values(), ours.model.state_dict().values()))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"averaging_frequency": 0}, "averaging_frequency is 0: give a number of iterations, 1 or more"),
        ({"averaging_frequency": "30s"}, "averaging_frequency is '30s' and averaging_policy 'iteration'"),
        ({"averaging_policy": "time", "averaging_frequency": 5}, "averaging_policy 'time': give '30s', say"),
        ({"averaging_policy": "adaptiv"}, "did you mean 'adaptive'"),
        ({"averaging_every": 5}, "did you mean 'averaging_frequency'"),
        (
            {"min_averaging_frequency": 5},
            "min_averaging_frequency given, and averaging_policy is 'iteration'",
        ),
        (
            {"averaging_policy": "adaptive", "averaging_frequency": 10, "min_averaging_frequency": 20},
            "20 and max_averaging_frequency 40 (four times it): 'adaptive' starts at averaging_frequency",
        ),
        (
            {"averaging_policy": "adaptive", "averaging_frequency": 1000, "max_averaging_frequency": 50},
            "min_averaging_frequency 250 (a quarter of it) and max_averaging_frequency 50: 'adaptive' starts",
        ),
        (
            {"averaging_frequency": 2, "method": averaging.DiLoCo(fragments=4)},
            "fragments is 4, and they are all averaged within 2 iterations",
        ),
        ({"averaging_frequency": 4, "overlap": 4}, "overlap is 4, and a round begins every 4 iterations"),
        ({"averaging_policy": "adaptive", "max_averaging_frequency": 0}, "max_averaging_frequency is 0"),
        ({"adaptation_metric": "loss"}, "unknown adaptation_metric 'loss'"),
        (
            {"adaptation_metric": "gradient_norm"},
            "adaptation_metric is 'gradient_norm', and averaging_policy is 'iteration', which goes by none",
        ),
        ({"adaptation_metric": 3}, "adaptation_metric is 3: give one of"),
        ({"communication_backend": "tcp"}, "there is no server: give server_address='HOST:PORT'"),
        (
            {"token": "secret"},
            "token given, and communication_backend is None, so no members meet at a server: give server",
        ),
        (
            {"server_address": "127.0.0.1:1", "communication_backend": "gloo"},
            "server_address given, and communication_backend is 'gloo', so no members meet at a server: take",
        ),
        (
            {"server_address": "127.0.0.1:1", "method": averaging.DiLoCo(fragments=2)},
            "fragments is 2, and with 'tcp' a model is averaged whole",
        ),
        (
            {
                "server_address": "127.0.0.1:1",
                "world_size": 4,
                "rank": 0,
                "method": averaging.EASGD(alpha=0.5),
            },
            "alpha is 0.5 and there are 4 members: the centre would be thrown ever further",
        ),
        ({"communication_backend": "mpi"}, "unknown communication_backend 'mpi'"),
        ({"method": "dilocco"}, "did you mean 'diloco'"),
        ({"method": averaging.DiLoCo}, "give DiLoCo() or 'diloco'"),
        ({"method": averaging.DiLoCo(fragments=50)}, "fragments is 50, and the model has 6 parameters"),
        ({"overlap": 0}, "overlap is 0"),
        ({"device": "warp"}, "device is 'warp'"),
        ({"world_size": 4}, "world_size is given and rank is not"),
        ({"world_size": 0}, "world_size is 0: give a whole number, 1 or more"),
        ({"rank": 3, "world_size": 2}, "ranks are 0 to world_size - 1"),
        ({"frequency": 3}, "unknown keyword of AsyncModelAverager 'frequency'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_value_and_the_remedy(settings, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncModelAverager(model(), **settings)
    assert told in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_nccl_without_a_device_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match='torch finds no CUDA device here: take "gloo"'):
        offbeat.AsyncModelAverager(model(), communication_backend="nccl")


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncModelAverager(
            nn.ReLU(),
            averaging_frequency=-1,
            communication_backend="tpc",
            method=7,
            overlap="yes",
            device=3.5,
        )
    for told in ("model is a ReLU", "averaging_frequency is -1", "'tpc'", "method is 7", "overlap", "device"):
        assert told in str(refused.value), told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"averaging_policy": "adaptiv", "adaptation_metric": 3, "averaging_frequency": -1},
            ("'adaptiv'", "adaptation_metric is 3", "averaging_frequency is -1"),
        ),
        (
            {"adaptation_metric": "loss", "averaging_frequency": "30s"},
            ("'loss'", "averaging_frequency is '30s' and averaging_policy 'iteration'"),
        ),
        (
            {"averaging_policy": "adaptive", "adaptation_metric": "loss", "min_averaging_frequency": 0},
            ("'loss'", "min_averaging_frequency is 0"),
        ),
        ({"communication_backend": "tpc", "rank": -1}, ("'tpc'", "rank is -1")),
        (
            {
                "averaging_policy": "adaptive",
                "averaging_frequency": 0,
                "min_averaging_frequency": 5,
                "max_averaging_frequency": 3,
            },
            ("averaging_frequency is 0", "min_averaging_frequency is 5 and max_averaging_frequency 3: give"),
        ),
        (
            {"server_address": "127.0.0.1", "overlap": 0},
            ("server_address: '127.0.0.1' is not an address; give HOST:PORT", "overlap is 0"),
        ),
    ],
)
def test_one_setting_that_cannot_be_used_hides_no_other(settings, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncModelAverager(model(), **settings)
    assert all(text in str(refused.value) for text in told)
    assert "within the two others" not in str(refused.value), "a bound that is none is not compared"


@pytest.mark.parametrize(
    ("kind", "numbers", "told"),
    [
        ("DiLoCo", {"lr": 0.0}, "lr is 0.0: give a number from above 0"),
        ("DiLoCo", {"momentum": 1.0}, "momentum is 1.0: give a number from 0 to below 1"),
        ("DiLoCo", {"nesterov": 1, "fragments": 0}, "nesterov is 1: give True or False; fragments is 0"),
        ("DiLoCo", {"momentun": 0.9}, "did you mean 'momentum'"),
        ("SlowMo", {"beta": float("nan")}, "beta is nan"),
        ("BMUF", {"block_lr": -1}, "block_lr is -1"),
        ("EASGD", {"alpha": 2.0}, "alpha is 2.0: give a number from above 0 to below 2"),
    ],
)
def test_a_methods_numbers_are_looked_at(kind, numbers, told):
    with pytest.raises(ConfigError, match=told.split(":")[0]) as refused:
        getattr(averaging, kind)(**numbers)
    assert told in str(refused.value)


def test_what_a_step_lacks_is_told_and_counts_nothing():
    ours = offbeat.AsyncModelAverager(model(), averaging_policy="adaptive")
    with pytest.raises(ConfigError, match=r"samples is 0: give a whole number, 1 or more; loss is missing"):
        ours.step(0)
    with pytest.raises(ConfigError, match="there is no optimizer"):
        ours.train_step(inputs=batch(0)[0], targets=batch(0)[1], loss_fn=LOSS)
    assert ours.iterations == 0


def given(**others):
    """Give what `train_step` takes, of a first batch; some of it replaced."""
    inputs, targets = batch(0)
    return {"inputs": inputs, "targets": targets, "optimizer": optim.SGD(lr=0.1), "loss_fn": LOSS} | others


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"inputs": torch.empty(0, 6), "targets": torch.empty(0).long()}, "the batch has no sample"),
        ({"loss_fn": None}, "loss_fn is None: give a function of (outputs, targets)"),
        ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss: give an object"),
    ],
    ids=["empty", "none", "class"],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_moves(others, told):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3)
    ours.train_step(**given())
    before = copy.deepcopy(ours.model.state_dict())
    gradients = [p.grad.clone() for p in ours.model.parameters()]
    with pytest.raises(ConfigError) as refused:
        ours.train_step(**given(**others))
    assert told in str(refused.value)
    assert ours.iterations == 1
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())
    assert all(
        torch.equal(p.grad, gradient) for p, gradient in zip(ours.model.parameters(), gradients, strict=True)
    )


@pytest.mark.parametrize("policy", ["iteration", "adaptive"])
@pytest.mark.parametrize("loss", ["x", torch.ones(2)])
def test_a_loss_that_is_no_number_is_refused_and_counts_nothing(loss, policy):
    ours = offbeat.AsyncModelAverager(model(), averaging_policy=policy)
    with pytest.raises(ConfigError, match=r"loss is .*: give the batch's loss, a number or a tensor of one"):
        ours.step(4, loss=loss)
    assert ours.iterations == 0
    for usable in (0.5, torch.tensor(0.5), torch.tensor([0.5]), float("nan")):
        ours.step(4, loss=usable)
    assert ours.iterations == 4


def test_a_metric_that_is_no_number_is_refused():
    ours = offbeat.AsyncModelAverager(
        model(), averaging_policy="adaptive", averaging_frequency=1, adaptation_metric=lambda _: "much"
    )
    with pytest.raises(ConfigError, match="gave 'much': it gives a number, 0 or more"):
        train(ours, 1, optim.SGD(lr=0.1))


def test_a_model_with_other_parameters_than_at_first_is_refused():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=1)
    ours.model[0].weight = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(StateError, match="another object than when this was made"):
        ours.step(4)


def test_a_state_from_before_a_new_methods_first_round_goes_on_from_that_rounds_mean():
    def made():
        return offbeat.AsyncModelAverager(model(), averaging_frequency=4, overlap=False)

    whole = made()
    whole.method = "diloco"
    train(whole, 6, optim.SGD(lr=0.1))
    kept = copy.deepcopy((whole.model.state_dict(), whole.state_dict()))
    train(whole, 6, optim.SGD(lr=0.1), first=6)
    second = offbeat.AsyncModelAverager(model(), averaging_frequency=4, overlap=False, method="diloco")
    second.model.load_state_dict(kept[0])
    second.load_state_dict(kept[1], optimizer=optim.SGD(lr=0.1))
    train(second, 6, optim.SGD(lr=0.1), first=6)
    assert same(second.model, whole.model)


def test_a_state_is_not_loaded_while_a_round_is_under_way():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=8, overlap=6, method="diloco")
    state = ours.state_dict()
    train(ours, 9, optim.SGD(lr=0.1))
    with pytest.raises(StateError, match="a round is under way"):
        ours.load_state_dict(state)


def test_flushing_with_nothing_done_counts_no_round():
    for method in ("average", "diloco"):
        ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, method=method)
        train(ours, 3, optim.SGD(lr=0.1))
        for _ in range(3):
            ours.flush()
        assert ours.averaging_round == 2


@pytest.mark.parametrize("method", ["average", "easgd", "gossip", "diloco"])
def test_one_alone_that_is_not_finite_is_an_error(method):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, method=method, overlap=False)
    with torch.no_grad():
        ours.model[0].weight[0, 0] = float("inf")
    ours.step(4)
    with pytest.raises(NonFiniteError, match=r"iteration .*, so there is nothing to go on from"):
        ours.step(4)


def tied_by_memory():
    """Tie what would be given each round's way twice."""
    made = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    made[1].weight.data = made[0].weight.data
    return made


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "holds a SyncBatchNorm"),
        (lambda: nn.LazyLinear(2), "of a lazy layer: run a batch through it first"),
        (tied_by_memory, r"'1\.weight' and '0\.weight' are two tensors in one memory: tie weights by"),
    ],
)
def test_models_that_cannot_be_averaged_are_refused(made, told):
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncModelAverager(made())


def test_what_is_no_model_is_shown_in_short():
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncModelAverager(model().state_dict())
    assert str(caught.value) == "model is an OrderedDict: give an nn.Module"


def test_a_model_that_has_got_more_parameters_needs_a_new_averager():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=1, method="diloco", overlap=False)
    ours.model.append(nn.Linear(5, 5))
    with pytest.raises(StateError, match="make what trains it; make a new one now"):
        train(ours, 1, optim.SGD(lr=0.1))


def test_batch_norm_layers_stay_what_they_were():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, method="diloco", overlap=False)
    train(ours, 2, optim.SGD(lr=0.1))
    ours.model[1].running_mean = ours.model[1].running_var = None
    with pytest.raises(StateError, match="other running statistics than when the averager was made"):
        train(ours, 2, optim.SGD(lr=0.1))


def test_the_frequency_and_the_overlap_can_change_in_mid_run_and_what_the_method_keeps_stays():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3, method="diloco", overlap=False)
    ends = []
    for number in range(20):
        if number == 7:
            ours.averaging_frequency, ours.overlap = 5, 2
            assert (ours.averaging_frequency, ours.overlap) == (3, False)  # not before a round agrees
        train(ours, 1, optim.SGD(lr=0.1), first=number)
        if ours.averaging_round > len(ends):
            ends.append(ours.iterations)
    assert (ours.averaging_frequency, ours.overlap) == (5, 2)
    assert ends == [3, 6, 9, 16]  # the last began after 14 iterations, and ended 2 later
    kept = ours.state_dict()["rounds"]["memories"][0]
    ours.averaging_frequency = 4
    ours.flush()
    assert ours.averaging_frequency == 4
    assert ours.state_dict()["rounds"]["memories"][0].keys() == kept.keys()


def test_a_wish_for_an_overlap_of_one_iteration_is_told_where_any_is_in_force():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3)
    ours.overlap = 1
    assert repr(ours).endswith(", wishes for overlap=1 (in force: True)>")


def test_an_adaptive_frequency_that_is_set_begins_anew_from_there():
    ours = offbeat.AsyncModelAverager(
        model(), averaging_frequency=4, averaging_policy="adaptive", max_averaging_frequency=8
    )
    ours.averaging_frequency = 7
    train(ours, 4, optim.SGD(lr=0.1))
    assert ours.averaging_frequency == 7
    with pytest.raises(ConfigError, match="averaging_frequency is 9: 'adaptive' keeps within 1 and 8"):
        ours.averaging_frequency = 9


@pytest.mark.parametrize(
    ("settings", "given", "told"),
    [
        ({}, 0, "averaging_frequency is 0"),
        ({}, "3s", "averaging_frequency is '3s': give a number of iterations"),
        (
            {"averaging_policy": "time", "averaging_frequency": "2s"},
            "3s",
            "give a time, up to 2 s as at first",
        ),
        ({"averaging_policy": "time", "averaging_frequency": "2s"}, 3, "give a time, up to 2 s as at first"),
    ],
)
def test_a_frequency_that_cannot_be_set_is_refused_and_changes_nothing(settings, given, told):
    ours = offbeat.AsyncModelAverager(model(), **settings)
    before = ours.averaging_frequency
    with pytest.raises(ConfigError, match=told):
        ours.averaging_frequency = given
    with pytest.raises(ConfigError, match="overlap is 0: give True, False, or a number"):
        ours.overlap = 0
    ours.flush()
    assert (ours.averaging_frequency, ours.overlap) == (before, True)


@pytest.mark.parametrize(
    ("settings", "halves"),
    [
        ({"averaging_frequency": 16}, [8, 4, 2]),
        ({"averaging_frequency": "30s", "averaging_policy": "time"}, [15.0, 7.5, 3.75]),
    ],
    ids=["iterations", "time"],
)
def test_a_monitor_halves_what_is_not_yet_in_force_and_sets_it_back_whole(settings, halves):
    ours = offbeat.AsyncModelAverager(model(), process_group=False, overlap=False, **settings)
    whole = ours.averaging_frequency
    monitor = offbeat.AsyncTrainingMonitor(
        remediation_strategy="increase_sync_frequency", acts_on=ours, warm_up=5, patience=1
    )
    for step in range(6):
        monitor.observe(step, loss=1.0)
    said = [monitor.observe(6 + i, loss=9.0)[0].result for i in range(3)]
    assert said == [
        f"averaging_frequency is to be {after!r} instead of {before!r}"
        for before, after in itertools.pairwise([whole, *halves])
    ]
    monitor.close()
    train(ours, 20, optim.SGD(lr=0.01))
    assert ours.averaging_frequency == whole


def test_a_monitor_halves_down_to_the_least_of_an_adaptive_pace_and_no_further():
    ours = offbeat.AsyncModelAverager(
        model(),
        averaging_frequency=75,
        averaging_policy="adaptive",
        min_averaging_frequency=50,
        max_averaging_frequency=500,
        process_group=False,
    )
    assert (ours.min_averaging_frequency, ours.max_averaging_frequency) == (50, 500)
    monitor = offbeat.AsyncTrainingMonitor(
        remediation_strategy="increase_sync_frequency", acts_on=ours, warm_up=5, patience=1
    )
    for step in range(6):
        monitor.observe(step, loss=1.0)
    assert [monitor.observe(6 + i, loss=9.0)[0].result for i in range(2)] == [
        "averaging_frequency is to be 50 instead of 75",
        "every object averages as often as it can already",
    ]


def test_what_is_not_adaptive_has_no_bounds():
    ours = offbeat.AsyncModelAverager(model(), process_group=False)
    assert (ours.min_averaging_frequency, ours.max_averaging_frequency) == (None, None)


def test_a_monitor_of_the_model_lets_it_average_more_often_and_less_again():
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=8, method="diloco", overlap=False)
    monitor = offbeat.AsyncTrainingMonitor(
        ours.model, remediation_strategy="increase_sync_frequency", warm_up=10, quiet_steps=12
    )
    train(ours, 24, optim.SGD(lr=0.01))
    assert ours.averaging_frequency == 8
    inputs, targets = batch(0)
    ours.train_step(inputs=inputs, targets=targets, loss_fn=lambda out, to: LOSS(out, to) + 1e3)
    train(ours, 8, optim.SGD(lr=0.01), first=25)
    assert ours.averaging_frequency == 4
    assert [alert.action for alert in monitor.report().alerts][:1] == ["increase_sync_frequency"]
    train(ours, 40, optim.SGD(lr=0.01), first=33)
    assert ours.averaging_frequency == 8


AT_A_SERVER = "communication_backend='tcp'"
IN_A_GROUP = "offbeat.init_distributed('gloo') (or 'nccl'; 'tcp' makes none)"


@pytest.mark.parametrize(
    ("environ", "method", "remedies"),
    [
        (
            {"OFFBEAT_SERVER": "10.0.0.1:7"},
            "average",
            [f"{AT_A_SERVER} to meet at the server at 10.0.0.1:7 (OFFBEAT_SERVER)", IN_A_GROUP],
        ),
        (
            {"MASTER_ADDR": "10.0.0.2"},
            "average",
            [f"{AT_A_SERVER} to meet at a server that rank 0 starts at 10.0.0.2", IN_A_GROUP],
        ),
        ({}, "average", [IN_A_GROUP, "server_address='HOST:PORT' of an `offbeat server`"]),
        ({"OFFBEAT_SERVER": "10.0.0.1:7"}, "gossip", [IN_A_GROUP]),
    ],
)
def test_one_of_several_without_a_group_is_refused_with_the_nearest_remedy_first(
    monkeypatch, environ, method, remedies
):
    for name in ("OFFBEAT_SERVER", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **environ}.items():
        monkeypatch.setenv(name, value)
    found = []
    for make in (
        lambda: offbeat.AsyncModelAverager(model(), method=method),
        lambda: offbeat.AsyncTrainer(model(), strategy=method),
    ):
        with pytest.raises(ConfigError, match="this is process 1 of 2, by the environment") as caught:
            make()
        found.append(str(caught.value))
    assert found[0] == found[1]
    places = [found[0].index(remedy) for remedy in (*remedies, "process_group=False to train alone")]
    assert places == sorted(places)
    assert (AT_A_SERVER in found[0]) == (AT_A_SERVER in remedies[0])
    assert offbeat.AsyncModelAverager(model(), process_group=False).is_alone


def test_a_server_for_gradients_is_no_place_to_average_at(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "OFFBEAT_SERVER": "10.0.0.1:7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="make a group by offbeat") as caught:
        offbeat.AsyncTrainer(model(), strategy={0: "average", 1: "parameter_server"})
    assert AT_A_SERVER not in str(caught.value)


def test_a_model_of_which_nothing_can_be_trained_is_refused():
    with pytest.raises(ConfigError, match=r"model is wholly frozen \(requires_grad\)"):
        offbeat.AsyncModelAverager(model().requires_grad_(requires_grad=False))
    with pytest.raises(ConfigError, match="model has tensors on the device 'meta', which hold no values"):
        offbeat.AsyncModelAverager(model().to("meta"))


@pytest.mark.parametrize(
    "make",
    [lambda: offbeat.AsyncModelAverager(model()), lambda: offbeat.AsyncGradientAccumulator(model(), 2)],
)
def test_what_is_closed_begins_no_block(make):
    ours = make()
    ours.close()
    with pytest.raises(ClosedError), ours:
        pass


def test_what_is_closed_trains_no_more_and_says_so():
    """It would go on by itself, and no other member would have what it learns."""
    with offbeat.AsyncModelAverager(model(), averaging_frequency=100) as ours:
        inputs, targets = batch(0)
        ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
    before = copy.deepcopy(ours.model.state_dict())
    for call in (
        lambda: ours.train_step(inputs=inputs, targets=targets, loss_fn=LOSS),
        lambda: ours.step(1),
        ours.flush,
    ):
        with pytest.raises(ClosedError, match=r"AsyncModelAverager was closed, .*: make a new one"):
            call()
    assert ours.iterations == 1
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())
    ours.close()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (
            "averaging_frequncy",
            2,
            "has no attribute 'averaging_frequncy'.*did you mean 'averaging_frequency'",
        ),
        (
            "averaging_policy",
            "adaptive",
            r"given when .*with AsyncModelAverager\(averaging_policy='adaptive'\)",
        ),
        ("asynchronous", "x", "given when an AsyncModelAverager is made"),
        ("adaptation_metric", "gradient_norm", "given when an AsyncModelAverager is made"),
        ("world_size", 3, "given when an AsyncModelAverager is made"),
        ("min_averaging_frequency", 1, "given when an AsyncModelAverager is made"),
        ("device", "cpu", "given when an AsyncModelAverager is made"),
        ("rank", 1, "given when an AsyncModelAverager is made"),
        ("model", nn.Sequential(nn.Linear(6, 5)), r"with AsyncModelAverager\(model=<Sequential>\)"),
        ("iterations", 0, "iterations is what an AsyncModelAverager tells of itself, and cannot be set"),
    ],
)
def test_what_cannot_be_set_in_mid_run_is_refused_with_what_can(name, value, told):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=3)
    with pytest.raises(UnknownAttributeError, match=told) as refused:
        setattr(ours, name, value)
    assert str(refused.value).endswith("to be set in mid-run: averaging_frequency, method, overlap")
    ours.averaging_frequency = 4


@pytest.mark.parametrize(
    "make",
    [
        lambda given, _: offbeat.AsyncModelAverager(given),
        lambda given, _: offbeat.AsyncTrainer(given),
        lambda given, _: offbeat.AsyncGradientAccumulator(given, 2),
        offbeat.FaultTolerantTrainer,
    ],
)
@pytest.mark.parametrize("name", ["model", "device"])
def test_what_is_trained_cannot_be_put_in_the_place_of_another(make, name, tmp_path):
    ours = make(model(), tmp_path)
    before = getattr(ours, name)
    with pytest.raises(UnknownAttributeError, match=f"{name} is given when an? {type(ours).__name__} is"):
        setattr(ours, name, copy.deepcopy(before))
    assert getattr(ours, name) is before


def test_who_makes_a_kind_of_averager_may_give_it_attributes():
    class Named(offbeat.AsyncModelAverager):
        def __init__(self, name):
            super().__init__(model())
            self.name = name

    ours = Named("first")
    ours.note = "of its own"
    assert (ours.name, ours.note) == ("first", "of its own")


@pytest.mark.parametrize(
    ("name", "value"), [("method", "diloco"), ("averaging_frequency", 7), ("overlap", 2)]
)
def test_of_what_is_closed_nothing_can_be_set(name, value):
    ours = offbeat.AsyncModelAverager(model())
    ours.close()
    with pytest.raises(ClosedError):
        setattr(ours, name, value)
