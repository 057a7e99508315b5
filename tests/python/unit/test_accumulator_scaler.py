"""With a GradScaler updates are those of a plain loop of torch's with one."""

import copy

import pytest
import torch
from torch import nn

import offbeat
from offbeat.accumulator.updates import Scaler
from offbeat.errors import ConfigError, NonFiniteError

LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def scaler(**keywords):
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3} | keywords)


def micro_batch(number):
    """Of four samples; every seventh has what becomes infinite."""
    random = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 6, generator=random)
    if number % 7 == 5:
        inputs[0, 0] = float("inf")
    return inputs, torch.randint(5, (4,), generator=random)


def plain_loop(num_updates, num_micro, kind, scaling, before_step=lambda *_: None, **keywords):
    trained = model()
    live = kind(trained.parameters(), **keywords)
    scales = []
    for update in range(num_updates):
        live.zero_grad()
        for micro in range(num_micro):
            inputs, targets = micro_batch(update * num_micro + micro)
            scaling.scale(LOSS(trained(inputs), targets) / num_micro).backward()
        scaling.unscale_(live)
        before_step(trained)
        scaling.step(live)
        scaling.update()
        scales.append(scaling.get_scale())
    return trained, scales


def train(ours, numbers, live):
    for number in numbers:
        inputs, targets = micro_batch(number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)


@pytest.mark.parametrize("num_micro", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    ],
)
def test_updates_skips_and_scales_are_those_of_a_loop_of_torchs(kind, keywords, num_micro):
    scaling, num_updates = scaler(), 30
    ours = offbeat.AsyncGradientAccumulator(model(), num_micro, grad_scaler=scaling)
    live = kind(ours.model.parameters(), **keywords)
    scales, made = [], []
    for number in range(num_updates * num_micro):
        train(ours, [number], live)
        if (number + 1) % num_micro == 0:
            scales.append(scaling.get_scale())
            made.append(ours.is_update_step())
    theirs, expected = plain_loop(num_updates, num_micro, kind, scaler(), **keywords)
    assert scales == expected
    skips = [any(n % 7 == 5 for n in range(u * num_micro, (u + 1) * num_micro)) for u in range(num_updates)]
    assert made == [not is_skipped for is_skipped in skips]
    assert (ours.skipped_updates, ours.updates) == (sum(skips), num_updates - sum(skips))
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
        if num_micro == 1:
            assert torch.equal(a, b)


def test_hooks_of_the_optimizer_see_the_unscaled_gradient():
    ours = offbeat.AsyncGradientAccumulator(model(), 2, grad_scaler=scaler())
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)

    def clip(trained):
        nn.utils.clip_grad_norm_(trained.parameters(), 0.1)

    live.register_step_pre_hook(lambda *_: clip(ours.model))
    train(ours, range(20), live)
    theirs, _ = plain_loop(10, 2, torch.optim.SGD, scaler(), clip, lr=0.1)
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_an_update_that_a_monitor_drops_is_none_and_not_one_that_is_skipped():
    ours = offbeat.AsyncGradientAccumulator(model(), 1, grad_scaler=(scaling := scaler(growth_interval=50)))
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1, momentum=0.9)
    with offbeat.AsyncTrainingMonitor(
        ours.model, ["gradient_norm"], remediation_strategy="reject", warm_up=8
    ) as monitor:
        train(ours, [0] * 12, live)
        before = copy.deepcopy((ours.model.state_dict(), live.state_dict()))
        inputs, targets = micro_batch(0)
        ours.train_step(inputs=inputs, targets=targets, loss_fn=lambda *both: 1e4 * LOSS(*both))
        assert not ours.is_update_step()
        assert monitor.report().num_dropped == 1
    assert all(map(torch.equal, before[0].values(), ours.model.state_dict().values()))
    momenta = [
        [entry["momentum_buffer"] for entry in one["state"].values()]
        for one in (before[1], live.state_dict())
    ]
    assert all(map(torch.equal, *momenta))
    assert (ours.updates, ours.skipped_updates) == (12, 0)
    assert scaling.state_dict()["_growth_tracker"] == 13, "its gradient was finite"


def test_a_scaler_that_is_not_enabled_is_as_none():
    off = scaler(enabled=False)
    ours = offbeat.AsyncGradientAccumulator(model(), 1, grad_scaler=off)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    train(ours, range(5), live)
    with pytest.raises(NonFiniteError):
        train(ours, [5], live)
    assert (ours.updates, ours.skipped_updates) == (5, 0)


def test_what_becomes_infinite_at_the_scale_of_today_is_no_update():
    parameter = nn.Parameter(torch.ones(2))
    live = torch.optim.SGD([parameter], lr=1e-38)
    scaling = Scaler(scaler(init_scale=4.0), torch.device("cpu"))
    parameter.grad = torch.full((2,), 2e38)
    made_at = 1.0  # and the scale has grown since
    with scaling.unscaled([parameter.grad], live, made_at) as is_finite:
        scaling.step(live)
    assert torch.equal(parameter, torch.ones(2)), "torch has skipped it"
    assert not is_finite
    assert scaling.scale == 2.0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("made_at", "now"), [(0.0, 0.0), (0.0, 8.0), (8.0, 0.0), (2.0**-135, 2.0**-135)])
def test_nothing_is_made_of_what_was_or_would_be_scaled_by_0_or_nearly(made_at, now, adaptive):
    scaling = scaler(init_scale=made_at)
    ours = offbeat.AsyncGradientAccumulator(model(), 2, adaptive_accumulation=adaptive, grad_scaler=scaling)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1, weight_decay=0.1)
    train(ours, [0], live)
    scaling.load_state_dict({**scaling.state_dict(), "scale": now})
    train(ours, [1], live)
    ours.flush()
    assert (ours.updates, ours.skipped_updates) == (0, 1)
    assert all(map(torch.equal, ours.model.parameters(), model().parameters()))
    scaling.load_state_dict({**scaling.state_dict(), "scale": 8.0})
    train(ours, [2, 3], live)
    ours.flush()
    assert (ours.updates, ours.skipped_updates) == (1, 1)


@pytest.mark.parametrize("taken_after", [6, 11])
def test_a_round_trip_has_the_scaler_in_it(taken_after):
    scalings, made = [scaler() for _ in range(3)], []
    for scaling in scalings:
        ours = offbeat.AsyncGradientAccumulator(model(), 2, grad_scaler=scaling)
        made.append((ours, torch.optim.SGD(ours.model.parameters(), lr=0.1, momentum=0.9)))
    (whole, live), (first, live_of_first), (second, live_of_second) = made
    train(whole, range(30), live)
    train(first, range(taken_after), live_of_first)
    kept = copy.deepcopy((first.model.state_dict(), first.state_dict()))
    second.model.load_state_dict(kept[0])
    second.load_state_dict(kept[1], optimizer=live_of_second)
    train(second, range(taken_after, 30), live_of_second)
    assert scalings[2].state_dict() == scalings[0].state_dict()
    assert (second.updates, second.skipped_updates) == (whole.updates, whole.skipped_updates)
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))


def test_noise_is_measured_of_what_was_unscaled():
    found = []
    for scaling in (None, scaler(init_scale=65536.0, growth_interval=10**6)):
        ours = offbeat.AsyncGradientAccumulator(model(), 4, adaptive_accumulation=True, grad_scaler=scaling)
        for number in range(40):
            inputs, targets = micro_batch(7 * number)
            ours.train_step(
                inputs=inputs, targets=targets, optimizer=offbeat.optim.SGD(lr=0.01), loss_fn=LOSS
            )
        found.append((ours.noise_scale, ours.gain, ours.accumulation_steps))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize(
    ("trained", "given", "what"),
    [
        (model(), 3, "grad_scaler is 3: give a torch.amp.GradScaler, or None"),
        (model().half(), scaler(), "parameter '0.weight' is of float16"),
    ],
)
def test_what_cannot_be_used_is_refused(trained, given, what):
    with pytest.raises(ConfigError, match=what):
        offbeat.AsyncGradientAccumulator(trained, 1, grad_scaler=given)


@pytest.mark.parametrize("resumes", [False, True])
def test_two_accumulators_with_one_scaler_train_as_with_one_each(resumes):
    """As of a GAN: the scale changes in the midst of windows, which are unscaled by what they began with."""

    def trained(*scalings):
        ours = [
            offbeat.AsyncGradientAccumulator(model(), num, grad_scaler=scaling)
            for num, scaling in zip((3, 1), scalings, strict=True)
        ]
        lives = [torch.optim.SGD(one.model.parameters(), lr=0.1, momentum=0.9) for one in ours]
        for number in [n for n in range(40) if n % 7 != 5]:
            for one, live in zip(ours, lives, strict=True):
                train(one, [number], live)
            if resumes and number == 8:
                kept = copy.deepcopy([ours[0].model.state_dict(), ours[0].state_dict()])
                assert ours[0].state_dict()["window"]["batches"] == 2
                ours[0] = offbeat.AsyncGradientAccumulator(model(), 3, grad_scaler=scalings[0])
                lives[0] = torch.optim.SGD(ours[0].model.parameters(), lr=0.1, momentum=0.9)
                ours[0].model.load_state_dict(kept[0])
                ours[0].load_state_dict(kept[1], optimizer=lives[0])
        return [one.model for one in ours]

    one = scaler(growth_interval=1, init_scale=1.0)
    for shared, apart in zip(trained(one, one), trained(scaler(), scaler()), strict=True):
        assert all(map(torch.equal, shared.parameters(), apart.parameters()))
    assert one.get_scale() > 2.0**30
