"""A batch that is NaN spoils no running statistics for good: an update that is dropped changes nothing."""

import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.accumulator.buffers import Statistics
from offbeat.errors import NonFiniteError
from support.averaging import warned
from support.group import together

LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batch(rank, number, *, is_nan=False):
    random = torch.Generator().manual_seed(100 * rank + number)
    inputs = torch.randn(5, 4, generator=random)
    if is_nan:
        inputs[0, 0] = math.nan
    return inputs, torch.randint(3, (5,), generator=random)


def statistics(trained):
    return [trained[1].running_mean.tolist(), trained[1].running_var.tolist()]


def train(trained, ours, *, rank, broken):
    """Train on eight micro-batches, in windows of two; give the errors' texts, and what was warned of."""
    errors = []
    with warned() as told:
        for number in range(8):
            inputs, targets = batch(rank, number, is_nan=(rank, number) == broken)
            try:
                ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
            except NonFiniteError as error:
                errors.append(str(error))
        try:
            ours.flush()
        except NonFiniteError as error:
            errors.append(str(error))
    return errors, [line for line in told if "running statistics" in line or "running_" in line]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_nan_batch_leaves_the_statistics_as_before_its_window(scaled):
    trained = model()
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    ours = offbeat.AsyncGradientAccumulator(trained, 2, grad_scaler=scaler)
    seen = []

    class Looks(nn.Module):
        def forward(self, inputs):
            seen.append(statistics(trained))
            return inputs

    trained.append(Looks())
    errors, told = train(trained, ours, rank=0, broken=(0, 5))
    assert len(errors) == (0 if scaled else 1)
    (line,) = told
    assert line.startswith("1.running_mean and 1 other running statistics had become NaN or infinite with ")
    assert all(math.isfinite(value) for part in statistics(trained) for value in part)
    assert any(math.isnan(value) for value in seen[5][0]), "it was NaN in between"
    before = seen[3]  # the last of the window before
    moved = [one != other for one, other in zip(seen[6], before, strict=True)]
    assert moved == [True, True], "and goes on from what was there"
    assert ours.updates == 3


def test_what_was_finite_stays_and_what_never_was_is_left():
    trained = model()
    ours = Statistics(trained)
    assert ours.heal() == []
    with torch.no_grad():
        trained[1].running_mean.fill_(math.nan)
    assert ours.heal() == [], "nothing was kept"
    with torch.no_grad():
        trained[1].running_mean.fill_(1.0)
    ours.keep()
    with torch.no_grad():
        trained[1].running_mean.fill_(math.inf)
        trained[1].running_var.fill_(2.0)
    ours.keep()
    assert ours.heal() == ["1.running_mean"]
    assert statistics(trained) == [[1.0] * 6, [2.0] * 6]


def member(rank, overlap, broken):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2, overlap=overlap)
    errors, told = train(trained, ours, rank=rank, broken=broken)
    return statistics(trained), len(errors), len(told), ours.updates


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", [3, 6, 7])
def test_in_a_group_no_member_s_nan_gets_into_the_statistics_of_all(overlap, number):
    first, second = together(member, 2, overlap, (1, number))
    assert first[0] == second[0], "they are alike after flush"
    assert all(math.isfinite(value) for part in first[0] for value in part)
    assert (first[1], second[1]) == (1, 1), "an error in all members"
    assert (first[2], second[2]) == (0, 1), "told in the member whose they were"
    assert first[3] == 3
