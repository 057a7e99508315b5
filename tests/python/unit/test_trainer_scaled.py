"""Updates of many batches with a loss scale: what is skipped, who hears of it, and what goes on."""

import copy
import functools
import logging
import math
import types

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import StepLR

import offbeat
from offbeat import AsyncTrainingMonitor, averaging, optim
from offbeat.errors import ConfigError
from offbeat.local.lr_scale import factor_of
from offbeat.trainer.accumulated import least_scale
from support.small_net import net, normed
from support.trainer_loop import LOSS, batch, live_of, loop, plain, same, train

SPEC = optim.SGD(lr=0.1, momentum=0.9)
HALF = {"strategy": "accumulate", "amp": "fp16"}
WILD = [batch(number, 3 + number % 5, scale=3000.0 if number % 4 == 1 else 1.0) for number in range(9)]
"""Of sizes that differ; some are too large for the scale that there is at first."""


def autocast():
    return torch.autocast("cpu", dtype=torch.float16)


def scaled_to(trainer, scale):
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": scale})
    return trainer


def by_hand(trained, windows, live, scaler, *, clip, each_step):
    """Train by accumulators; give the updates that were made, and skipped."""
    clipping = live.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(trained.parameters(), clip) and None
    )
    moving = live.register_step_post_hook(lambda *_: each_step.step())
    made = skipped = 0
    torch.manual_seed(7)
    for length, batches in windows:
        accumulator = offbeat.AsyncGradientAccumulator(trained, length, grad_scaler=scaler)
        for inputs, targets in batches:
            accumulator.train_step(
                inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS, autocast=autocast()
            )
        accumulator.flush()
        made, skipped = made + accumulator.updates, skipped + accumulator.skipped_updates
    clipping.remove()
    moving.remove()
    return made, skipped


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("spec", [SPEC, optim.AdamW(lr=0.01)], ids=repr)
def test_it_is_the_accumulator_by_hand_with_a_scaler_and_the_end_flushes_a_window(spec, checkpointed):
    ours, theirs = plain(), plain()
    trainer = offbeat.AsyncTrainer(
        ours, 1, 2, 4, **HALF, max_grad_norm=5.0, gradient_checkpointing=checkpointed
    )
    schedule = functools.partial(StepLR, step_size=2)
    history = train(trainer, spec, data=WILD, epochs=3, scheduler=schedule, scheduler_interval="step")
    live, scaler = live_of(spec, theirs), torch.amp.GradScaler("cpu")
    windows = [(2, WILD), (4, WILD * 2)]  # the last of each is of less
    made, skipped = by_hand(theirs, windows, live, scaler, clip=5.0, each_step=StepLR(live, 2))
    assert made + skipped == 5 + 5
    assert skipped >= 2
    assert (history.steps, history.skipped, trainer.skipped_steps) == (made, skipped, skipped)
    assert trainer.scaler.state_dict() == scaler.state_dict()
    assert trainer.optimizer.param_groups[0]["lr"] == live.param_groups[0]["lr"]
    assert same(ours, theirs)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_it_is_a_plain_loop_of_torchs_bit_for_bit(num, clip):
    data = [batch(n, scale=3000.0 if n % 5 == 1 else 1.0) for n in range(4 * num)]
    ours, theirs = plain(), plain()
    trainer = offbeat.AsyncTrainer(ours, 0, 1, num, **HALF, overlap=False, max_grad_norm=clip)
    train(trainer, SPEC, data=data, epochs=3)
    live, scaler, skipped = live_of(SPEC, theirs), torch.amp.GradScaler("cpu"), 0
    for number, (inputs, targets) in enumerate(data * 3, start=1):
        with autocast():
            loss = LOSS(theirs(inputs), targets)
        scaler.scale(loss).backward()
        if number % num:
            continue
        for parameter in theirs.parameters():
            parameter.grad.div_(num)
        scaler.unscale_(live)
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(live)
        scaler.update()
        skipped += scaler.get_scale() < before
        live.zero_grad()
    assert trainer.skipped_steps == skipped >= 2
    assert trainer.history.steps == 12 - skipped
    assert trainer.scaler.state_dict() == scaler.state_dict()
    assert same(ours, theirs)


def test_callbacks_hear_once_of_each_update_that_is_skipped_and_log_lines_count_them(caplog):
    caplog.set_level(logging.INFO)
    told = []

    def on_step(_, step):
        told.append((step.is_skipped, step.is_update, step.gradient_norm is None))

    trainer = scaled_to(
        offbeat.AsyncTrainer(
            plain(), 0, 1, 2, **HALF, max_grad_norm=1.0, callbacks=types.SimpleNamespace(on_step=on_step)
        ),
        8.0,
    )
    data = [batch(n, scale=math.nan if n in (3, 4) else 1.0) for n in range(9)]
    history = train(trainer, SPEC, data=data, epochs=1, log_frequency=1)
    gathered, made, skipped = (False, False, True), (False, True, False), (True, False, True)
    assert told == [gathered, made, gathered, skipped, gathered, skipped, gathered, made, gathered]
    assert (history.skipped, history.steps) == (2, 3), "the last batch's update is made when all have ended"
    assert trainer.scaler.get_scale() == 2.0
    lines = [text for record in caplog.records if "samples/s" in (text := record.getMessage())]
    assert [text.rpartition("samples/s")[2] for text in lines] == [")", "; 2 updates skipped)", ")"]


def test_the_loss_of_a_batch_that_the_scale_keeps_out_is_in_no_mean_and_no_news(caplog):
    """What else was in its window was measured before that was known."""
    losses = []

    def loss_fn(outputs, targets):
        loss = LOSS(outputs, targets) * (math.nan if len(losses) == 2 else 1.0)
        losses.append(float(loss.detach()))
        return loss

    trainer = offbeat.AsyncTrainer(plain(), 0, 1, 4, **HALF)
    scaled_to(trainer, 8.0)
    history = trainer.train(
        dataloader=[batch(n) for n in range(8)], optimizer=SPEC, loss_fn=loss_fn, progress=False
    )
    assert (history.skipped, history.steps, history.first_non_finite) == (1, 1, None)
    del losses[2]
    assert [one.metrics["loss"] for one in history.records] == [pytest.approx(sum(losses) / 7)]
    assert "not finite" not in caplog.text


def test_a_loss_that_is_infinite_while_gradients_are_not_is_told_of_as_ever(caplog):
    def loss_fn(outputs, targets):
        return LOSS(outputs, targets) + (math.inf if targets[0] == 4 else 0.0)

    trainer = offbeat.AsyncTrainer(plain(), 0, 1, 2, **HALF)
    scaled_to(trainer, 8.0)
    data = [(torch.ones(3, 6), torch.full((3,), n)) for n in (0, 4, 1, 2)]
    history = trainer.train(dataloader=data, optimizer=SPEC, loss_fn=loss_fn, progress=False)
    assert (history.skipped, history.steps, history.first_non_finite) == (0, 2, 1)
    assert "at step 1 the loss is inf, and the parameters are finite" in caplog.text


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
@pytest.mark.parametrize("begins_at", [2.0**16, 2.0**-120])
def test_where_all_was_skipped_until_the_scale_is_0_or_nearly_all_goes_on_to_be_skipped(
    strategy, begins_at, caplog
):
    """A scale of less than 2^-128 is no number to divide by either: zeros times infinity are NaN."""
    ours, before = plain(), plain()
    trainer = scaled_to(
        offbeat.AsyncTrainer(ours, 0, 1, 1, strategy=strategy, amp="fp16", overlap=False), begins_at
    )
    num = 200 if begins_at > 1.0 else 15
    broken = [batch(n, scale=math.nan) for n in range(num)]
    history = train(trainer, SPEC, data=broken, epochs=1)
    assert (history.steps, history.skipped) == (0, num)
    assert trainer.scaler.get_scale() == (0.0 if begins_at > 1.0 else 2.0**-135)
    assert caplog.text.count("the loss scale has fallen to") == 1
    assert "call trainer.scaler.update(65536.0)" in caplog.text
    history = train(trainer, SPEC, data=[batch(n) for n in range(9)], epochs=1)
    assert (history.steps, history.skipped, history.stopped) == (0, 9, "epochs")
    assert same(ours, before)
    assert caplog.text.count("the loss scale has fallen to") == 1
    trainer.scaler.update(8.0)
    assert train(trainer, SPEC, data=[batch(n) for n in range(9)], epochs=1).steps == 9


@pytest.mark.parametrize("strategy", ["local", "accumulate"])
def test_parameters_that_are_not_finite_are_told_of_where_all_is_skipped_for_them(strategy, caplog):
    ours = plain()
    nn.init.constant_(ours[2].bias, math.nan)
    trainer = scaled_to(offbeat.AsyncTrainer(ours, 0, 1, 1, strategy=strategy, amp="fp16"), 2.0**-148)
    history = train(trainer, SPEC, data=[batch(n) for n in range(9)], epochs=1)
    assert (history.steps, history.skipped, trainer.scaler.get_scale()) == (0, 9, 0.0)
    assert "parameters are not finite, 2.bias" in caplog.text


class Interrupted(torch.optim.SGD):
    """Ctrl-C comes, once, as its gradients are looked at that a scaler has unscaled."""

    scaler = None

    @property
    def param_groups(self):
        scaler = self.scaler
        if scaler is not None and scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
            self.scaler = None
            raise KeyboardInterrupt
        return self.groups

    @param_groups.setter
    def param_groups(self, groups):
        self.groups = groups


@pytest.mark.parametrize("strategy", ["local", "average"])
def test_after_ctrl_c_between_a_step_s_scale_and_its_end_the_next_train_goes_on(strategy):
    ours = plain()
    live = Interrupted(ours.parameters(), lr=0.1)
    trainer = scaled_to(offbeat.AsyncTrainer(ours, strategy=strategy, amp="fp16"), 8.0)
    data = [batch(n) for n in range(9)]
    live.scaler = trainer.scaler
    with pytest.raises(KeyboardInterrupt):
        train(trainer, live, data=data, epochs=1)
    assert trainer.history.steps == 0
    history = train(trainer, live, data=data, epochs=1)
    assert (history.steps, history.skipped) == (9, 0)
    assert trainer.scaler.state_dict()["_growth_tracker"] == 10


# -------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize("is_set", [False, True])
def test_strategies_that_follow_one_another_have_one_scale(is_set):
    class Sets:
        def on_epoch_end(self, trainer, epoch):
            if is_set and epoch < 2:
                trainer.strategy = ("accumulate", averaging.Average())[epoch]

    by_epochs = {0: "local", 1: "accumulate", 2: averaging.Average()}
    ours, theirs = plain(), plain()
    trainer = offbeat.AsyncTrainer(
        ours, 0, 1, 2, strategy="local" if is_set else by_epochs, amp="fp16", callbacks=Sets()
    )
    scaler = trainer.scaler
    train(trainer, SPEC, data=WILD, epochs=3)
    assert trainer.scaler is scaler
    live, one = live_of(SPEC, theirs), torch.amp.GradScaler("cpu")
    half = {"data": WILD, "epochs": 1, "dtype": torch.float16, "scaler": one}
    skipped = [loop(theirs, live, **half)]
    accumulator = offbeat.AsyncGradientAccumulator(theirs, 2, grad_scaler=one)
    for inputs, targets in WILD:
        accumulator.train_step(
            inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS, autocast=autocast()
        )
    accumulator.flush()
    skipped += [accumulator.skipped_updates, loop(theirs, live, **half)]
    assert skipped[0] >= 2
    assert trainer.skipped_steps == trainer.history.skipped == sum(skipped)
    assert scaler.state_dict() == one.state_dict()
    assert same(ours, theirs)


def test_a_window_that_a_change_ends_within_an_epoch_is_an_update_by_its_own_scale():
    data = [batch(n) for n in range(5)]

    class Sets:
        def on_step(self, trainer, step):
            if not step.is_update and trainer.strategy == "accumulate":
                scaled_to(trainer, 2.0)  # in mid-window, whose losses were multiplied by another
                trainer.strategy = "local"

    ours, theirs = plain(), plain()
    trainer = scaled_to(offbeat.AsyncTrainer(ours, 0, 1, 4, **HALF, callbacks=Sets()), 8.0)
    history = train(trainer, SPEC, data=data, epochs=1)
    assert (history.steps, history.skipped) == (5, 0)
    loop(theirs, live_of(SPEC, theirs), data=data, epochs=1, dtype=torch.float16)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3), "gradients of half precision, by powers of two"


# -------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("is_in_both", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_state_in_mid_window_goes_on_bit_for_bit_and_has_the_scale_once(steps, is_in_both):
    def made():
        return offbeat.AsyncTrainer(plain(), 0, 1, 4, **HALF, callbacks=stops)

    kept, seen = [], []

    def on_step(trainer, step):
        seen.append(step)
        if len(seen) == 4 * steps + 2 and not kept:
            kept.append(copy.deepcopy((trainer.model.state_dict(), trainer.state_dict(), len(seen))))

    stops = types.SimpleNamespace(on_step=on_step)
    whole, data = made(), WILD * 3
    history = train(whole, SPEC, data=data, epochs=1)
    values, state, num = kept[0]
    work = state["stage"]["work"]["accumulator"]
    assert (work["grad_scaler"], work["window"]["batches"]) == (None, 2)
    assert state["scaler"]["scale"] < 2.0**16
    if is_in_both:  # as an accumulator's own has it
        work["grad_scaler"] = {**state["scaler"], "scale": 3.0}
    other = made()
    other.model.load_state_dict(values)
    other.load_state_dict(state, optimizer=SPEC)
    assert other.scaler.state_dict() == state["scaler"]
    assert other.skipped_steps == state["skipped"] >= 1
    other.train(dataloader=data[num:], loss_fn=LOSS, progress=False)
    assert same(other.model, whole.model)
    assert other.scaler.state_dict() == whole.scaler.state_dict()
    assert other.skipped_steps == whole.skipped_steps == history.skipped


def test_a_state_without_a_scale_is_refused_where_there_is_one_and_the_other_way_round():
    half, full = (
        offbeat.AsyncTrainer(plain(), 0, 1, 4, strategy="accumulate", amp=a) for a in ("fp16", "none")
    )
    for trainer in (half, full):
        train(trainer, SPEC, epochs=1)
    for one, other in ((half, full), (full, half)):
        with pytest.raises(ConfigError, match="loss scale: make the trainer with the same"):
            one.load_state_dict(copy.deepcopy(other.state_dict()))


class Killed(Exception):  # noqa: N818  no error of ours
    """Ends a life."""


@pytest.mark.parametrize("killed_at", [3, 9, 14, 22])
def test_a_run_that_is_killed_goes_on_bit_for_bit_with_its_scale_and_its_counts(killed_at, tmp_path):
    strategy = {0: "accumulate", 1: "local", 2: "accumulate"}
    data = [batch(n, scale=3000.0 if n % 4 == 1 else 1.0) for n in range(9)]
    samples = torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True)))

    def life(folder, at=None):
        losses = []

        def loss_fn(outputs, targets):
            losses.append(1)
            if len(losses) == at:
                raise Killed
            return LOSS(outputs, targets)

        inner = offbeat.AsyncTrainer(
            plain(), 0, 1, 4, strategy=strategy, amp="fp16", local_batch_size=7, seed=0, max_grad_norm=5.0
        )
        trainer = offbeat.FaultTolerantTrainer(inner, folder, checkpoint_frequency=1, deterministic=True)
        history = trainer.train(dataset=samples, optimizer=SPEC, loss_fn=loss_fn, epochs=3)
        return inner, history

    whole, expected = life(tmp_path / "whole")
    with pytest.raises(Killed):
        life(tmp_path / "broken", killed_at)
    ours, history = life(tmp_path / "broken")
    assert same(ours.model, whole.model)
    assert ours.scaler.state_dict() == whole.scaler.state_dict()
    assert (history.steps, history.skipped) == (expected.steps, expected.skipped)
    assert ours.skipped_steps == whole.skipped_steps == history.skipped >= 2
    assert history.steps + history.skipped == 3 + 9 + 3, "with those that an epoch's end flushes"


# -------------------------------------------------------------------------------------- monitors


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_an_update_that_a_monitor_drops_is_none_and_none_that_the_scale_skipped(amp):
    model, losses = net(), []

    def loss_fn(outputs, targets):
        losses.append(1)
        return LOSS(outputs, targets) * (1000.0 if len(losses) == 28 else 1.0)

    data = [(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 40
    live = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(live, 0.9)
    trainer = offbeat.AsyncTrainer(model, 0, 1, 2, strategy="accumulate", amp=amp)
    if amp == "fp16":
        scaled_to(trainer, 8.0)
    with AsyncTrainingMonitor(model, ["gradient_norm"], remediation_strategy="reject", warm_up=5) as monitor:
        history = trainer.train(
            dataloader=data,
            optimizer=live,
            loss_fn=loss_fn,
            scheduler=schedule,
            scheduler_interval="step",
            progress=False,
        )
    report = monitor.report()
    assert (report.num_alerts, report.num_dropped) == ({"gradient_norm": 1}, 1)
    assert report.series["gradient_norm"].num_seen == 20
    assert (history.steps, history.skipped, schedule.last_epoch) == (19, 0, 19)
    if amp == "fp16":
        assert trainer.scaler.state_dict()["_growth_tracker"] == 20, "its gradients were finite"


def test_an_alert_on_a_batch_whose_update_the_scale_skips_costs_no_other():
    model, losses = net(), []

    def loss_fn(outputs, targets):
        losses.append(1)
        return LOSS(outputs, targets) * (math.inf if len(losses) == 10 else 1.0)

    trainer = scaled_to(offbeat.AsyncTrainer(model, 0, 1, 2, **HALF), 8.0)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        history = trainer.train(
            dataloader=[(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 20,
            optimizer=optim.SGD(lr=0.1),
            loss_fn=loss_fn,
            progress=False,
        )
    report = monitor.report()
    assert report.num_alerts == {"loss": 1}
    assert (history.skipped, history.steps, report.num_dropped) == (1, 9, 0)


def test_a_monitor_that_lowers_the_rate_does_so_while_the_scaler_steps():
    model, losses, rates = net(), [], []

    def loss_fn(outputs, targets):
        losses.append(1)
        return LOSS(outputs, targets) * (1000.0 if len(losses) > 20 else 1.0)

    live = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = scaled_to(offbeat.AsyncTrainer(model, 0, 1, 2, **HALF), 8.0)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reduce_lr", warm_up=5) as monitor:
        live.register_step_post_hook(lambda *_: rates.append(live.param_groups[0]["lr"]))
        trainer.train(
            dataloader=[(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 24,
            optimizer=live,
            loss_fn=loss_fn,
            progress=False,
        )
        assert factor_of(live) == 0.5
    assert monitor.report().num_alerts["loss"] >= 1
    assert live.param_groups[0]["lr"] == 1e-6


def test_what_a_batch_has_broken_of_buffers_goes_back_as_its_update_is_skipped():
    model = normed()
    data = [
        (torch.ones(6, 4) * (math.nan if n == 3 else 1.0), torch.zeros(6, dtype=torch.long)) for n in range(8)
    ]
    trainer = scaled_to(offbeat.AsyncTrainer(model, 0, 1, 2, **HALF), 8.0)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject"):
        history = trainer.train(dataloader=data, optimizer=SPEC, loss_fn=LOSS, progress=False)
    assert (history.skipped, history.steps) == (1, 3)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


# -------------------------------------------------------------------------------------- refusals


def test_what_is_trained_in_half_precision_is_refused_and_what_is_frozen_is_not():
    def half(*, is_frozen):
        model = plain()
        model[0].half().requires_grad_(not is_frozen)
        return model

    told = (
        "amp is \"fp16\" and parameter '0.weight' is of float16, whose gradients torch does not unscale: keep"
    )
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncTrainer(half(is_frozen=False), **HALF)
    trainer = offbeat.AsyncTrainer(half(is_frozen=False), amp="fp16")
    with pytest.raises(ConfigError, match=told):
        trainer.strategy = {0: "local", 3: "accumulate"}
    assert trainer.strategy == "local"
    trainer = offbeat.AsyncTrainer(half(is_frozen=True), 0, 1, 2, **HALF)
    before = copy.deepcopy(trainer.model)
    train(trainer, SPEC, data=[batch(n) for n in range(4)], epochs=1)
    assert trainer.history.steps == 2
    assert torch.equal(before[0].weight, trainer.model[0].weight)
    assert not torch.equal(before[2].weight, trainer.model[2].weight)


def test_of_members_scales_the_least_is_taken_and_of_equals_the_one_that_grows_last():
    states = [
        {"scale": s, "_growth_tracker": n, "growth_interval": 5} for s, n in ((8.0, 1), (2.0, 4), (2.0, 3))
    ]
    assert least_scale(states) == states[2]
    assert least_scale(states[:1]) == states[0]
    fallen = states[0] | {"scale": 0.0}
    assert least_scale([*states, fallen, fallen | {"scale": 2.0**-135}]) == states[2]
    assert least_scale([fallen, fallen]) == fallen
