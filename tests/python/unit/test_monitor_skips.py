"""What a monitor takes for a step that a GradScaler has skipped."""

import pytest
import torch

from offbeat.monitor.skips import Skips, is_told_to_skip


class Scale:
    """As much of a scaler as a monitor needs."""

    def __init__(self, scale, state):
        self.scale = scale
        self.state_dict = state

    def get_scale(self):
        return self.scale


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def update(scaled, *, is_skipped=False):
    """Let it do what it does after a step."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    factor = torch.inf if is_skipped else 1.0
    scaled.scale(factor * parameter).backward()
    scaled.step(optimizer)
    scaled.update()


@pytest.mark.parametrize("num_before", range(7))
def test_a_skip_is_seen_wherever_the_scale_is_on_its_way_and_a_growth_is_none(num_before):
    scaled = scaler()
    skips = Skips(scaled)
    for _ in range(num_before):
        update(scaled)
        assert not skips.are_any()
        assert not skips.take()
    update(scaled, is_skipped=True)
    assert skips.are_any()
    assert skips.take()
    assert not skips.take()


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_skip_is_seen_after_a_growth_within_the_same_time(num_before):
    scaled = scaler()
    for _ in range(num_before):
        update(scaled)
    skips = Skips(scaled)
    for _ in range(3 - num_before):
        update(scaled)
    update(scaled, is_skipped=True)
    assert scaled.get_scale() == 8.0
    assert skips.take()


def test_one_before_the_first_question_is_seen():
    scaled = scaler()
    skips = Skips(scaled)
    update(scaled, is_skipped=True)
    assert skips.take()


def test_an_earlier_state_of_the_same_scale_is_no_skip():
    scaled = scaler()
    update(scaled)
    state = scaled.state_dict()
    update(scaled)
    skips = Skips(scaled)
    scaled.load_state_dict(state)
    assert not skips.take()


@pytest.mark.parametrize(
    "scaled",
    [
        None,
        torch.amp.GradScaler("cpu", enabled=False),
        Scale(8.0, None),
        Scale(8.0, lambda: None),
        Scale(8.0, lambda: {"scale": None}),
    ],
    ids=["none", "off", "no state", "a state of nothing", "a scale of nothing"],
)
def test_any_scaler_is_asked_for_its_scale_alone_where_it_has_no_more(scaled):
    skips = Skips(scaled)
    assert not skips.take()
    if isinstance(scaled, Scale):
        scaled.scale = 4.0
        assert skips.take()


@pytest.mark.parametrize(("overflow", "expected"), [(0.0, False), (1.0, True), (None, False)])
def test_a_fused_optimizer_is_told_to_skip(overflow, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    optimizer.found_inf = None if overflow is None else torch.tensor(overflow)
    assert is_told_to_skip(optimizer) == expected
    assert not is_told_to_skip(None)
