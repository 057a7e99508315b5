"""An adaptive accumulator's updates are those of a loop of torch's with its batches and its rates."""

import logging

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat import optim
from offbeat.accumulator.window import Window
from offbeat.errors import ConfigError
from offbeat.local.norm import square_norm

LOSS = nn.CrossEntropyLoss()
WEIGHTS = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def micro_batch(number, size=8, noise=1.0):
    random = torch.Generator().manual_seed(number)
    inputs = torch.randn(size, 6, generator=random)
    return inputs, (inputs @ WEIGHTS + noise * torch.randn(size, 5, generator=random)).argmax(1)


def adaptive(trained, most=8, **keywords):
    return offbeat.AsyncGradientAccumulator(
        trained, base_batch_size=8, target_batch_size=8 * most, adaptive_accumulation=True, **keywords
    )


def train(ours, numbers, optimizer, **keywords):
    """Give the batches of each update, and its gain."""
    updates, gathered = [], []
    for number in numbers:
        inputs, targets = micro_batch(number, **keywords)
        gathered.append((inputs, targets))
        ours.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=LOSS)
        if ours.is_update_step():
            updates.append((gathered, ours.gain))
            gathered = []
    return updates


class Based(torch.optim.SGD):
    """One whose step calls that of its base class, which has hooks once one of that was made."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_step_that_sets_its_rate_is_scaled_once_and_keeps_no_gain(is_hooked, is_before, is_relative):
    class Base(torch.optim.Optimizer):  # which has no hooks yet, as torch gives them to a class
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)

    class SetsItsRate(Base):  # before or behind its base class's step
        num_steps = 0

        def step(self, closure=None):
            if not is_before:
                super().step()
            self.num_steps += 1
            rate = self.param_groups[0]["lr"] * 0.99 if is_relative else 0.1 * 0.99**self.num_steps
            self.param_groups[0]["lr"] = rate
            if is_before:
                super().step()

    trained = model()
    live = SetsItsRate(trained.parameters(), {"lr": 0.1})
    if is_hooked:
        Base(trained.parameters(), {})
    ours, weight, seen = adaptive(trained), trained[0].weight, []
    live.register_step_pre_hook(
        lambda *_: seen.append((weight.detach().clone(), weight.grad.clone(), live.param_groups[0]["lr"]))
    )
    for number in range(200):
        seen.clear()
        train(ours, [number], live)
        if ours.is_update_step():
            (was, gradient, stood), gain = seen[0], ours.gain**0.5
            made = ((was - weight) * gradient).sum() / gradient.square().sum()
            own = 0.1 * 0.99**live.num_steps
            if is_relative:
                rate = own * gain if is_before else own / 0.99 * gain
            else:  # what it is made of is not known: of that it warns
                rate = own if is_before else stood * gain
            assert made.item() == pytest.approx(rate, rel=1e-3)
            assert live.param_groups[0]["lr"] == pytest.approx(own if is_relative else own / gain)
    assert ours.gain > 1.1


@pytest.mark.parametrize(
    ("kind", "lr", "power"),
    [
        (torch.optim.SGD, 0.1, 1.0),
        (torch.optim.ASGD, 0.1, 1.0),
        (torch.optim.AdamW, 0.01, 0.5),
        (Based, 0.1, 1.0),
    ],
)
def test_updates_are_a_loop_of_torchs_with_the_rate_times_the_gain(kind, lr, power):
    trained, whole = model(), model()
    torch.optim.SGD(whole.parameters())
    live = kind(trained.parameters(), lr=lr)
    with adaptive(trained) as ours:  # at whose end some batches may be left
        updates = train(ours, range(300), live)
    theirs = kind(whole.parameters(), lr=lr)
    for batches, gain in updates:
        assert 1.0 <= gain <= len(batches) <= 8
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        theirs.zero_grad()
        LOSS(whole(inputs), targets).backward()
        theirs.param_groups[0]["lr"] = lr * gain**power
        theirs.step()
    assert len({len(batches) for batches, _ in updates}) > 2, "there is something to see"
    assert max(gain for _, gain in updates) > 1.1
    assert live.param_groups[0]["lr"] == lr
    for a, b in zip(trained.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_two_sizes_are_enough_and_what_changes_is_logged(caplog):
    caplog.set_level(logging.INFO, "offbeat")
    ours = offbeat.AsyncGradientAccumulator(
        model=model(), base_batch_size=32, target_batch_size=512, adaptive_accumulation=True
    )
    assert (ours.accumulation_steps, ours.effective_batch_size) == (16, 512)
    assert (ours.gain, ours.noise_scale) == (1.0, None)
    train(ours, range(200), optim.SGD(lr=0.1), size=32)
    assert ours.accumulation_steps < 16
    assert ours.effective_batch_size == 32 * ours.accumulation_steps
    assert ours.noise_scale > 0.0
    assert "micro-batches per member instead of 16, by a noise scale of" in caplog.text
    assert "the gain of an update of" in caplog.text


@pytest.mark.parametrize("is_hook", [True, False])
def test_a_scheduler_goes_on_as_without_gains(is_hook):
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(live, 0.99)
    seen = []
    live.register_step_pre_hook(lambda *_: seen.append(live.param_groups[0]["lr"]))
    if is_hook:  # there before the accumulator comes
        live.register_step_post_hook(lambda *_: scheduler.step())
    ours = adaptive(trained)
    for number in range(200):
        train(ours, [number], live)
        if ours.is_update_step() and not is_hook:
            scheduler.step()
    assert ours.gain > 1.0
    assert seen == pytest.approx([0.1 * 0.99**n for n in range(ours.updates)])
    assert live.param_groups[0]["lr"] == pytest.approx(0.1 * 0.99**ours.updates)


def test_rates_are_what_they_were_also_where_a_step_raises():
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    ours = adaptive(trained)
    train(ours, range(150), live)
    assert ours.gain > 1.0

    def breaks(*_):
        raise ZeroDivisionError

    live.register_step_post_hook(breaks)
    with pytest.raises(ZeroDivisionError):
        train(ours, range(150, 170), live)
    assert live.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("taken_after", [3, 101])
def test_a_round_trip_goes_on_bit_for_bit(taken_after):
    spec = optim.SGD(lr=0.1, momentum=0.9)
    whole, first, second = (adaptive(model()) for _ in range(3))
    expected = train(whole, range(200), spec)
    train(first, range(taken_after), spec)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict(), optimizer=spec)
    found = train(second, range(taken_after, 200), spec)
    assert [gain for _, gain in found] == [gain for _, gain in expected][-len(found) :]
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    assert whole.noise_scale == second.noise_scale
    for ended in (whole, second):
        ended.close()
    with pytest.raises(ConfigError, match="the state is of one with adaptive_accumulation"):
        offbeat.AsyncGradientAccumulator(model(), 4).load_state_dict(whole.state_dict(), optimizer=spec)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 99),
)
def test_a_window_measures_its_micro_batches_and_gathers_the_same(sizes, reduction, seed):
    trained, loss_fn = model(), nn.CrossEntropyLoss(reduction=reduction)
    parameters, are_means = list(trained.parameters()), reduction == "mean"
    windows = [
        Window(parameters, are_means=are_means, is_divided=are_means, is_measured=is_measured)
        for is_measured in (False, True)
    ]
    squares = 0.0
    for number, size in enumerate(sizes):
        inputs, targets = micro_batch(seed + 100 * number, size)
        for window in windows:
            window.add(loss_fn(trained(inputs), targets), counts=size, samples=size)
        mean = torch.autograd.grad(LOSS(trained(inputs), targets), parameters)
        squares += size * square_norm(mean)
    plain, measured = (window.take() for window in windows)
    assert measured.measured == (len(sizes), sum(sizes), pytest.approx(squares, rel=1e-4))
    assert plain.measured == (0, 0.0, 0.0)
    for a, b in zip(plain.gradients, measured.gradients, strict=True):
        assert torch.equal(a, b)


def test_squared_norms_are_of_all_dtypes_and_layouts():
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, generator=random).to(kind) for kind in (torch.float32, torch.float64)]
    tensors += [torch.full((4096,), 1.0, dtype=torch.bfloat16), None]
    tensors.append(torch.sparse_coo_tensor([[0, 1, 1]], [1.0, 2.0, 1.0], (3,), check_invariants=True))
    expected = sum((t.double() ** 2).sum().item() for t in tensors[:2]) + 4096 + 1 + 9
    assert square_norm(tensors) == pytest.approx(expected, rel=1e-6)


def test_sums_that_are_divided_are_taken_as_means_and_others_refused():
    steps, gains = [], []
    for keywords in ({}, {"loss_reduction": "sum", "normalizer": lambda _, targets: len(targets)}):
        ours = adaptive(model(), **keywords)
        of = nn.CrossEntropyLoss(reduction=keywords.get("loss_reduction", "mean"))
        for number in range(200):
            inputs, targets = micro_batch(number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=of)
            steps.append(ours.accumulation_steps)
            gains.append(ours.gain)
        ours.close()
    assert steps[:200] == steps[200:]
    assert gains[:200] == pytest.approx(gains[200:], rel=1e-3)
    assert len(set(steps)) > 1, "there is something to decide"
    with pytest.raises(ConfigError, match='adaptive_accumulation is True and loss_reduction "sum", whose'):
        adaptive(model(), loss_reduction="sum")


def test_what_is_no_switch_is_refused():
    with pytest.raises(ConfigError, match="adaptive_accumulation is 'yes': give True or False"):
        offbeat.AsyncGradientAccumulator(model(), 4, adaptive_accumulation="yes")
