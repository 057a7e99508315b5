"""Accumulated micro-batches are one large batch, for one process alone."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError

IGNORED = -100
NUM_CLASSES = 5


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def data(length, seed, share_ignored=0.0):
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(NUM_CLASSES, (length,), generator=random)
    targets[torch.rand(length, generator=random) < share_ignored] = IGNORED
    return torch.randn(length, 6, generator=random), targets


def large_batches(batches, loss_of, optimizer):
    """Train in one loop of torch's, with each of these batches whole; return the parameters."""
    trained = model()
    live = optimizer(trained.parameters())
    for inputs, targets in batches:
        live.zero_grad()
        loss_of(trained(inputs), targets).backward()
        live.step()
    return list(trained.parameters())


def close(ours, theirs):
    return all((a - b).abs().max() <= 1e-6 * b.abs().max() for a, b in zip(ours, theirs, strict=True))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@hypothesis.given(sizes=SIZES, reduction=st.sampled_from(["mean", "sum"]), seed=st.integers(0, 99))
def test_micro_batches_of_any_sizes_are_one_large_batch(sizes, reduction, seed):
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained, accumulation_steps=len(sizes), overlap=False, loss_reduction=reduction
    )
    live = momentum(trained.parameters())
    batches = [data(sum(sizes), seed + n) for n in range(3)]
    for inputs, targets in batches:
        for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            assert not ours.is_update_step() or ours.updates
            ours.train_step(inputs=micro[0], targets=micro[1], optimizer=live, loss_fn=loss_fn)
        assert ours.is_update_step()
    assert (ours.updates, ours.effective_batch_size) == (3, sum(sizes))
    assert close(trained.parameters(), large_batches(batches, loss_fn, momentum))


@hypothesis.given(
    sizes=SIZES, share=st.floats(0, 1), reduction=st.sampled_from(["mean", "sum"]), seed=st.integers(0, 99)
)
def test_with_a_normalizer_ignored_targets_count_as_in_one_large_batch(sizes, share, reduction, seed):
    inputs, targets = data(sum(sizes), seed, share)
    hypothesis.assume(bool((targets != IGNORED).any()))
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained,
        accumulation_steps=len(sizes),
        overlap=False,
        loss_reduction=reduction,
        normalizer=lambda _, targets: int((targets != IGNORED).sum()),
    )
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0],
            targets=micro[1],
            optimizer=optim.SGD(lr=0.1, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(reduction=reduction),
        )
    assert close(trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))


def test_without_a_normalizer_means_over_unlike_counts_are_another_thing():
    sizes = [3, 3]
    inputs, targets = data(6, 1)
    targets[:2] = IGNORED
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2)
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0], targets=micro[1], optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss()
        )
    whole = large_batches([(inputs, targets)], nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1))
    assert not close(trained.parameters(), whole)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop])
def test_windows_of_one_are_a_loop_of_torchs_bit_for_bit(kind):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=1)
    batches = [data(7, n) for n in range(20)]
    for inputs, targets in batches:
        ours.train_step(
            inputs=inputs, targets=targets, optimizer=kind(lr=0.01), loss_fn=nn.CrossEntropyLoss()
        )
    theirs = getattr(torch.optim, kind.__name__)
    whole = large_batches(batches, nn.CrossEntropyLoss(), lambda p: theirs(p, lr=0.01))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), whole, strict=True))


def test_what_is_left_of_a_window_is_an_update_at_flush():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=4)
    inputs, targets = data(6, 3)
    sizes = [2, 4]
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0],
            targets=micro[1],
            optimizer=optim.SGD(lr=0.1, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(),
        )
    assert (ours.updates, ours.is_update_step()) == (0, False)
    ours.flush()
    assert (ours.updates, ours.is_update_step(), ours.effective_batch_size) == (1, True, 6)
    assert close(trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))
    ours.flush()
    assert (ours.updates, ours.is_update_step()) == (1, False)


def test_it_gives_the_micro_batchs_loss_and_leaves_no_gradients_behind():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2)
    inputs, targets = data(4, 0)
    expected = nn.CrossEntropyLoss()(trained(inputs), targets)
    expected.backward()  # gradients that are there before are not ours
    given = {"optimizer": optim.SGD(lr=0.1), "loss_fn": nn.CrossEntropyLoss()}
    assert ours.train_step(inputs=inputs, targets=targets, **given) == expected.item()
    ours.train_step(inputs=inputs, targets=targets, **given)
    assert all(p.grad is None for p in trained.parameters())
    whole = large_batches([(inputs, targets)], nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1))
    assert close(trained.parameters(), whole)


def test_a_parameter_without_a_gradient_is_left_alone():
    trained = model()
    trained.add_module("unused", nn.Linear(2, 2))
    before = trained.unused.weight.detach().clone()

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = trained

        def forward(self, inputs):
            return self.all[2](self.all[1](self.all[0](inputs)))

    ours = offbeat.AsyncGradientAccumulator(First(), accumulation_steps=1)
    inputs, targets = data(4, 0)
    ours.train_step(
        inputs=inputs,
        targets=targets,
        optimizer=optim.AdamW(lr=0.1, weight_decay=0.5),
        loss_fn=nn.CrossEntropyLoss(),
    )
    assert torch.equal(trained.unused.weight, before)


def test_sizes_are_given_as_steps_or_as_samples():
    ours = offbeat.AsyncGradientAccumulator(model(), base_batch_size=32, target_batch_size=500)
    assert (ours.accumulation_steps, ours.effective_batch_size) == (16, 512)
    assert offbeat.AsyncGradientAccumulator(model(), 4, base_batch_size=8).effective_batch_size == 32
    assert offbeat.AsyncGradientAccumulator(model(), 4).effective_batch_size == 0


@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({}, "no size is given: give accumulation_steps, or base_batch_size and target_batch_size"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0: give a whole number, 1 or more"),
        ({"target_batch_size": 64}, "target_batch_size are given"),
        ({"accumulation_steps": 2, "target_batch_size": 64}, "accumulation_steps and target_batch_size are"),
        ({"base_batch_size": 64, "target_batch_size": 32}, "target_batch_size is 32 and base_batch_size 64"),
        ({"accumulation_steps": 1, "loss_reduction": "none"}, "loss_reduction is 'none': give \"mean\" or"),
        ({"accumulation_steps": 1, "normalizer": 3}, "normalizer is 3: give a function of (inputs, targets)"),
        ({"accumulation_steps": 1, "device": "abacus"}, "device is 'abacus'"),
        ({"accumulation_steps": 1, "model": nn.ReLU()}, "a ReLU without parameters"),
        ({"accumulation_steps": 1, "model": "resnet"}, "model is 'resnet': give an nn.Module"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_value_and_the_remedy(keywords, what):
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator(**{"model": model()} | keywords)
    assert what in str(caught.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator("net", accumulation_steps=-1, loss_reduction="max", device="abacus")
    for what in (
        "model is 'net'",
        "accumulation_steps is -1",
        "loss_reduction is 'max'",
        "device is 'abacus'",
    ):
        assert what in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({"optimizer": None}, "there is no optimizer"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, "loss_fn gave a tensor of shape"),
        ({"normalizer": lambda *_: -1}, "normalizer gave -1.0: it gives a count, 0 or more"),
    ],
)
def test_a_step_that_cannot_be_made_changes_nothing(keywords, what):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 1, normalizer=keywords.pop("normalizer", None))
    inputs, targets = data(4, 0)
    given = {"optimizer": optim.SGD(lr=0.1), "loss_fn": nn.CrossEntropyLoss()}
    with pytest.raises(ConfigError, match=what):
        ours.train_step(inputs=inputs, targets=targets, **given | keywords)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model().parameters(), strict=True))
    assert ours.updates == 0
