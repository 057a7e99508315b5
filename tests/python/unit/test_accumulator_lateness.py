"""How much smaller a learning rate has to be where updates are one window late."""

import numpy as np
import pytest
import torch

from offbeat.accumulator.lateness import momentum_of, shrinks, words_of

LR = 0.01


def stays_bounded(momentum, curvature, *, is_late):
    """Tell whether torch's SGD, whose gradients may be an update late, does not run away."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    live, before = torch.optim.SGD([weight], lr=LR, momentum=momentum), torch.ones(1, dtype=torch.float64)
    for _ in range(6000):
        at = before if is_late else weight.detach()
        before = weight.detach().clone()
        weight.grad = curvature * at.clone()
        live.step()
        if abs(weight.item()) > 1e6:
            return False
    return abs(weight.item()) < 2


def largest_stable(momentum, *, is_late):
    """Give the largest stable rate times the curvature, by the roots of what the next is of those before."""
    for scaled in np.arange(0.001, 4, 0.001):
        last = [1, -(1 + momentum), momentum + scaled] if is_late else [1, scaled - 1 - momentum, momentum]
        if max(abs(np.roots(last))) > 1:
            return scaled
    return 4.0


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9, 0.95])
def test_it_is_the_ratio_of_the_two_bounds(momentum):
    whole, late = (largest_stable(momentum, is_late=is_late) for is_late in (False, True))
    assert whole / late == pytest.approx(shrinks(momentum), rel=0.03)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_bounds_are_those_of_torchs_sgd(momentum, is_late):
    bound = (1 - momentum if is_late else 2 * (1 + momentum)) / LR
    assert stays_bounded(momentum, 0.97 * bound, is_late=is_late)
    assert not stays_bounded(momentum, 1.03 * bound, is_late=is_late)


def parameters():
    return [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]


def two_rates():
    one, two = parameters()
    return torch.optim.SGD([{**one, "momentum": 0.7}, {**two, "momentum": 0.2}], lr=0.1)


@pytest.mark.parametrize(
    ("made", "momentum"),
    [
        (lambda: torch.optim.SGD(parameters(), lr=0.1), 0.0),
        (two_rates, 0.7),
        (lambda: torch.optim.Adam(parameters(), betas=(0.8, 0.99)), 0.8),
        (lambda: torch.optim.RMSprop(parameters(), momentum=0.6), 0.6),
        (lambda: torch.optim.Adagrad(parameters()), 0.0),
        (lambda: torch.optim.Rprop(parameters()), 0.0),
        (lambda: torch.optim.Adam(parameters(), lr=0.1, betas=(torch.tensor(0.9), torch.tensor(0.99))), 0.9),
    ],
)
def test_momentum_is_that_of_the_group_that_has_most(made, momentum):
    assert momentum_of(made()) == pytest.approx(momentum)


@pytest.mark.parametrize(("momentum", "told"), [(0.9, "38 times"), (0.5, "6 times"), (0.4, None)])
def test_it_is_told_from_a_half_on(momentum, told):
    text = words_of(torch.optim.SGD(parameters(), lr=0.1, momentum=momentum))
    assert (text is None) == (told is None)
    if text is not None and told is not None:
        assert (
            f"the SGD's momentum is {momentum:g}: the largest learning rate that is stable is up to {told}"
            in text
        )
        assert "Give overlap=False" in text
