"""The methods of averaging against their papers' forms, and against torch.optim.SGD."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from offbeat.averaging import BMUF, EASGD, Average, DiLoCo, Gossip, SlowMo
from offbeat.averaging.methods import METHODS, as_method
from offbeat.errors import ConfigError

ROUNDS = 6
SIZE = 5


def means(seed):
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(SIZE, generator=random, dtype=torch.float64)
    return start, [start + torch.randn(SIZE, generator=random, dtype=torch.float64) for _ in range(ROUNDS)]


def run(method, start, all_means, num_members=4):
    """Give where a member is led in each round, whose way from there to each mean is the same each time."""
    memory = {"reference": start.clone(), "velocity": torch.zeros_like(start)}
    led, at = [], start
    for mean in all_means:
        at = method.target(mean - start + at, at, memory, num_members).clone()
        led.append(at)
    return led


@hypothesis.given(
    seed=st.integers(0, 1000),
    lr=st.floats(0.05, 2.0),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    nesterov=st.booleans(),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_diloco_is_torchs_sgd_on_the_way_back(seed, lr, momentum, nesterov):
    start, all_means = means(seed)
    outer = torch.nn.Parameter(start.clone())
    live = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    for mean, led in zip(
        all_means, run(DiLoCo(lr=lr, momentum=momentum, nesterov=nesterov), start, all_means), strict=True
    ):
        outer.grad = start - mean
        live.step()
        assert torch.allclose(led, outer.detach(), rtol=1e-12, atol=1e-12)


@hypothesis.given(seed=st.integers(0, 1000), alpha=st.floats(0.1, 2.0), beta=st.floats(0.0, 0.95))
@hypothesis.settings(max_examples=50, deadline=None)
def test_slowmo_is_the_papers_with_a_learning_rate_that_stays(seed, alpha, beta):
    gamma = 0.03
    start, all_means = means(seed)
    x, u = start.clone(), torch.zeros_like(start)
    for mean, led in zip(all_means, run(SlowMo(alpha=alpha, beta=beta), start, all_means), strict=True):
        u = beta * u + (start - mean) / gamma
        x = x - alpha * gamma * u
        assert torch.allclose(led, x, rtol=1e-9, atol=1e-9)


@hypothesis.given(seed=st.integers(0, 1000), zeta=st.floats(0.1, 2.0), eta=st.floats(0.0, 0.95))
@hypothesis.settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_is_the_papers(nesterov, seed, zeta, eta):
    start, all_means = means(seed)
    model, delta, broadcast = start.clone(), torch.zeros_like(start), start.clone()
    method = BMUF(block_momentum=eta, block_lr=zeta, nesterov=nesterov)
    for mean, led in zip(all_means, run(method, start, all_means), strict=True):
        block = mean - start + broadcast  # the members began at what was broadcast
        way = block - broadcast
        delta = eta * delta + zeta * way
        model = model + delta
        broadcast = model + eta * delta if nesterov else model
        assert torch.allclose(led, broadcast, rtol=1e-9, atol=1e-9)


def test_bmufs_momentum_is_by_default_that_of_its_number_of_members():
    start, all_means = means(0)
    default = run(BMUF(), start, all_means, num_members=8)
    told = run(BMUF(block_momentum=1 - 1 / 8), start, all_means, num_members=8)
    assert all(map(torch.equal, default, told))


@hypothesis.given(seed=st.integers(0, 1000), num=st.integers(1, 16), beta=st.floats(0.05, 1.9))
@hypothesis.settings(max_examples=80, deadline=None)
def test_easgd_is_the_papers_for_each_member_and_its_centre(seed, num, beta):
    random = torch.Generator().manual_seed(seed)
    alpha = beta / (num + 1)
    centre = torch.randn(SIZE, generator=random, dtype=torch.float64)
    members = torch.randn(num, SIZE, generator=random, dtype=torch.float64)
    memories = [{"reference": centre.clone()} for _ in range(num)]
    for _ in range(ROUNDS):
        members += 0.1 * torch.randn(num, SIZE, generator=random, dtype=torch.float64)
        conserved = members.sum(0) + centre
        elastic = alpha * (members - centre)
        mean = members.mean(0)
        led = torch.stack(
            [
                EASGD(alpha=alpha).target(mean.clone(), own, memory, num)
                for own, memory in zip(members, memories, strict=True)
            ]
        )
        members, centre = members - elastic, centre + elastic.sum(0)
        assert torch.allclose(led, members, rtol=1e-12, atol=1e-12)
        assert torch.allclose(members.sum(0) + centre, conserved, rtol=1e-9, atol=1e-9), "nothing is lost"
        for memory in memories:
            assert torch.allclose(memory["reference"], centre, rtol=1e-9, atol=1e-9)


@hypothesis.given(num=st.integers(2, 16), share=st.floats(0.05, 0.99))
def test_easgd_takes_each_strength_at_which_the_centre_comes_to_rest_and_no_other(num, share):
    strongest = 2.0 / (num + 1)
    method = EASGD(alpha=share * strongest)
    method.check_for(num)
    mean, centre = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for number in range(1, 4):
        mean = method.target(mean.clone(), mean, memory := {"reference": centre}, num)
        centre = memory["reference"]
        assert (mean - centre).item() == pytest.approx((1.0 - 2.0 * share) ** number, abs=1e-9)
    for alpha in (strongest, min(strongest / share, 1.99)):
        with pytest.raises(ConfigError, match=f"give less than {strongest:g}"):
            EASGD(alpha=alpha).check_for(num)


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_a_spring_for_fewer_members_than_have_come_leaves_the_centre_at_rest(num):
    """As at a server, where more may come: unbounded, each round throws the centre further."""
    method, at = EASGD(alpha=0.9), [torch.full((1,), float(rank)) for rank in range(num)]
    memory = {"reference": torch.zeros(1)}
    total = float(sum(range(num)))  # the centre counts as a member: what it gains the others lose
    for _ in range(200):
        mean = torch.stack(at).mean(0)
        centre = memory["reference"].clone()
        at = [method.target(mean.clone(), own, {"reference": centre.clone()}, num) for own in at]
        method.target(mean.clone(), mean, memory, num)
    for value in (*at, memory["reference"]):
        assert value.item() == pytest.approx(total / (num + 1), rel=1e-4)


def test_easgds_strength_is_by_default_that_of_the_paper():
    own, mean = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])
    memory = {"reference": torch.zeros(2)}
    led = EASGD().target(mean, own, memory, 3)
    assert torch.allclose(led, 0.7 * own), "alpha = .9 / 3"
    assert torch.allclose(memory["reference"], 0.9 * torch.tensor([2.0, 2.0]))


def test_names_are_the_methods_with_their_defaults():
    assert [as_method(name) for name in METHODS] == [Average(), EASGD(), DiLoCo(), SlowMo(), BMUF(), Gossip()]
    mean = torch.tensor([1.0])
    assert Average().target(mean, torch.tensor([5.0]), {}, 2) is mean
