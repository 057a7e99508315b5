"""How much smaller a learning rate has to be where updates are one window late."""

import numpy as np
import pytest
import torch

from offbeat.accumulator.lateness import momentum_of, shrinks, words_of

LR = 0.01


def stays_bounded(momentum, curvature, *, is_late, is_nesterov):
    """Tell whether torch's SGD, whose gradients may be an update late, does not run away."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    live, before = (
        torch.optim.SGD([weight], lr=LR, momentum=momentum, nesterov=is_nesterov),
        torch.ones(1, dtype=torch.float64),
    )
    for _ in range(6000):
        at = before if is_late else weight.detach()
        before = weight.detach().clone()
        weight.grad = curvature * at.clone()
        live.step()
        if abs(weight.item()) > 1e6:
            return False
    return abs(weight.item()) < 2


def largest_stable(m, *, is_late, is_nesterov):
    """Give the largest stable rate times the curvature, by the roots of what the next is of those before."""
    for a in np.arange(0.0005, 4, 0.0005):
        at = [(1 + m) * a, -m * a] if is_nesterov else [a, 0]  # of the gradients, the newest first
        of_values = np.array([1, -(1 + m), m, 0]) + ([0, 0, *at] if is_late else [0, *at, 0])
        if max(abs(np.roots(of_values))) > 1 + 1e-9:
            return a
    return 4.0


@pytest.mark.parametrize("is_nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9, 0.95])
def test_it_is_the_ratio_of_the_two_bounds(momentum, is_nesterov):
    whole, late = (
        largest_stable(momentum, is_late=is_late, is_nesterov=is_nesterov) for is_late in (False, True)
    )
    assert whole / late == pytest.approx(shrinks(momentum, is_nesterov=is_nesterov), rel=0.03)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("momentum", "is_nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
def test_the_bounds_are_those_of_torchs_sgd(momentum, is_late, is_nesterov):
    whole = 2 * (1 + momentum) / (1 + 2 * momentum) if is_nesterov else 2 * (1 + momentum)
    bound = whole / (shrinks(momentum, is_nesterov=is_nesterov) if is_late else 1) / LR
    given = {"is_late": is_late, "is_nesterov": is_nesterov}
    assert stays_bounded(momentum, 0.97 * bound, **given)
    assert not stays_bounded(momentum, 1.03 * bound, **given)


def parameters():
    return [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]


def two_rates():
    one, two = parameters()
    return torch.optim.SGD([{**one, "momentum": 0.7}, {**two, "momentum": 0.2}], lr=0.1)


@pytest.mark.parametrize(
    ("made", "momentum"),
    [
        (lambda: torch.optim.SGD(parameters(), lr=0.1), 0.0),
        (lambda: torch.optim.SGD([{**g, "momentum": torch.ones(2)} for g in parameters()], lr=0.1), 0.0),
        (two_rates, 0.7),
        (lambda: torch.optim.Adam(parameters(), betas=(0.8, 0.99)), 0.8),
        (lambda: torch.optim.RMSprop(parameters(), momentum=0.6), 0.6),
        (lambda: torch.optim.Adagrad(parameters()), 0.0),
        (lambda: torch.optim.Rprop(parameters()), 0.0),
        (lambda: torch.optim.Adam(parameters(), lr=0.1, betas=(torch.tensor(0.9), torch.tensor(0.99))), 0.9),
    ],
)
def test_momentum_is_that_of_the_group_that_has_most(made, momentum):
    assert momentum_of(made()) == (pytest.approx(momentum), False)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda: torch.optim.NAdam(parameters(), betas=(0.9, 0.99)),
    ],
)
def test_that_it_is_nesterovs_is_known(made):
    assert momentum_of(made()) == (0.9, True)
    assert "up to 5 times smaller" in words_of(made())


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
