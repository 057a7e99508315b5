"""What hooks measure of a model's gradients, and what becomes of a step whose gradients are not used."""

import copy
import gc
import io
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat import AsyncGradientAccumulator, AsyncTrainingMonitor, optim, trained_by
from offbeat.errors import ConfigError
from offbeat.local import lr_scale
from support.hand_loop import batch, loss_of, same, sgd, state_of
from support.small_net import net, normed

MEASURED = ["gradient_norm", "update_ratio", "non_finite"]


def norm_of(model):
    return math.sqrt(
        sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    )


def seen(monitor, metric):
    return monitor.report().series[metric].values


# ------------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_norm_is_that_which_backward_left_whether_it_is_clipped_or_not(max_norm, set_to_none):
    model, expected = net(), []
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(5):
            loss_of(model, number).backward()
            expected.append(norm_of(model))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-6)
        assert seen(monitor, "non_finite") == [0.0] * 5


def test_of_several_backwards_before_a_step_it_is_that_of_their_sum():
    model, expected = net(), []
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(3):
            for part in range(4):
                loss_of(model, 4 * number + part).backward()
            expected.append(norm_of(model))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-6)


def test_gradients_that_somebody_replaced_are_measured_as_they_are():
    model = net()
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        loss_of(model, 0).backward()
        for p in model.parameters():
            p.grad = 3 * p.grad
        expected = norm_of(model)
        sgd(model).step()
        assert seen(monitor, "gradient_norm") == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("factor", [1e3, math.nan])
def test_gradients_that_somebody_has_made_larger_since_are_measured_as_they_are(factor):
    model, expected = net(), []
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(3):
            model.zero_grad()
            loss_of(model, number).backward()
            if number == 2:
                next(model.parameters()).grad[0, 0] *= factor
            expected.append(norm_of(model))
            sgd(model).step()
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-6, nan_ok=True)
        assert seen(monitor, "non_finite") == [0.0, 0.0, float(math.isnan(factor))]


def test_gradients_whose_nan_somebody_has_mended_are_measured_as_they_are():
    model = net()
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        (loss_of(model, 0) * math.nan).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(nan=1.0)
        expected = norm_of(model)
        sgd(model).step()
        assert seen(monitor, "gradient_norm") == pytest.approx([expected], rel=1e-6)
        assert monitor.report().alerts == ()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_with_a_grad_scaler_the_norm_is_without_its_scale(fused, clips):
    model, expected = net(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = sgd(model, fused=fused)
    with AsyncTrainingMonitor(model, MEASURED, grad_scaler=scaler) as monitor:
        for number in range(6):
            scale = scaler.get_scale()
            scaler.scale(loss_of(model, number)).backward()
            expected.append(norm_of(model) / scale)
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() > 1024
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-5)


def test_a_grad_scaler_that_was_not_told_of_is_noticed(caplog):
    model, expected = net(), []
    scaler, optimizer = torch.amp.GradScaler("cpu", growth_interval=1), sgd(model)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(4):
            scale = scaler.get_scale()
            scaler.scale(loss_of(model, number)).backward()
            expected.append(norm_of(model) / scale)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-5)
    assert sum("grad_scaler=" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_is_nothing_to_tell_of(fused):
    model = net()
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(model, fused=fused)
    with AsyncTrainingMonitor(model, MEASURED, grad_scaler=scaler) as monitor:
        for number in range(3):
            loss = loss_of(model, number) * (math.inf if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert len(seen(monitor, "gradient_norm")) == 2
        assert monitor.report().alerts == ()


def test_a_sparse_gradient_is_measured_too():
    model = nn.Embedding(10, 4, sparse=True)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        model(torch.tensor([1, 1, 3])).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert seen(monitor, "gradient_norm") == pytest.approx([math.sqrt(4 * 4 + 4)])


def test_an_optimizer_with_a_closure_is_judged_by_what_that_computes():
    model, expected = net(), []
    optimizer = sgd(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 7)
        loss.backward()
        expected.append(norm_of(model))
        return loss

    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        optimizer.step(closure)
        optimizer.step(closure=closure)
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-6)


def test_the_update_ratio_is_how_far_the_step_before_has_moved_the_parameters():
    model, expected = net(), []
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, ["update_ratio"]) as monitor:
        for number in range(4):
            before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            expected.append(float((after - before).norm() / before.norm()))
        assert seen(monitor, "update_ratio") == pytest.approx(expected[:-1], rel=1e-5)


def test_optimizers_of_other_models_are_nothing_to_it():
    model, other = net(), net(1)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        loss_of(other, 0).backward()
        sgd(other).step()
        assert seen(monitor, "gradient_norm") == []


@pytest.mark.parametrize("size", [1, 3])
def test_of_an_accumulator_each_update_is_measured_once_and_each_loss(size):
    model, expected, losses = net(), [], []
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: expected.append(norm_of(model)))
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=size)
    with AsyncTrainingMonitor(model, ["loss", "gradient_norm"]) as monitor:
        for number in range(6):
            x, y = batch(number)
            losses.append(
                accumulator.train_step(
                    inputs=x, targets=y, optimizer=optimizer, loss_fn=functional.cross_entropy
                )
            )
        assert seen(monitor, "loss") == losses
        assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-6)
    assert len(expected) == 6 // size


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_of_each_dtype_what_is_measured_is_the_norm(dtype):
    trained = nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with AsyncTrainingMonitor(trained, MEASURED) as monitor:
        expected = []
        for number in range(3):
            optimizer.zero_grad()
            trained(torch.full((4, 3), 1.0 + number, dtype=dtype)).abs().square().sum().backward()
            squares = (p.grad.abs().double().square().sum() for p in trained.parameters())
            expected.append(math.sqrt(sum(map(float, squares))))
            optimizer.step()
    assert seen(monitor, "gradient_norm") == pytest.approx(expected, rel=1e-3)
    assert seen(monitor, "non_finite") == [0.0] * 3
    assert all(0 < ratio < 10 for ratio in seen(monitor, "update_ratio"))


# ------------------------------------------------------------------------------------------- dropping


@pytest.mark.parametrize("strategy", ["reject", "clip"])
@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.AdamW(m.parameters())], ids=["sgd", "adamw"])
def test_a_step_that_is_dropped_changes_no_parameter_no_buffer_and_no_state(strategy, make):
    model = normed()
    optimizer = make(model)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy=strategy) as monitor:
        for number in range(6):
            before = state_of(model, optimizer)
            loss = loss_of(model, number) if number != 4 else model(batch(4)[0] * math.nan).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert same(before, state_of(model, optimizer)) == (number == 4)
        assert monitor.report().num_dropped == 1
        num_finite = 2  # BatchNorm's bias: its gradient does not know the batch
        assert monitor.report().alerts[0].value == sum(p.numel() for p in model.parameters()) - num_finite


def test_of_frozen_weights_that_are_quantized_no_norm_is_asked():
    model = net()
    model.table = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(3):
            loss_of(model, number).backward()
            sgd(model).step()
    assert all(0 < ratio < 1 for ratio in seen(monitor, "update_ratio"))


def test_a_loss_that_was_observed_before_the_step_drops_its_gradient():
    model = net()
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", warm_up=5) as monitor:
        for step in range(10):
            loss = loss_of(model, step)
            loss.backward()
            before = state_of(model, optimizer)
            monitor.observe(step, loss=100.0 if step == 8 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert same(before, state_of(model, optimizer)) == (step == 8)


def test_where_no_gradient_passes_for_long_that_is_told_and_the_new_level_becomes_the_range(caplog):
    model, moved = net(), []
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        for step in range(400):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            before = next(model.parameters()).clone()
            monitor.observe(step, loss=1.0 if step < 10 else 100.0 if step == 390 else 3.0)
            optimizer.step()
            moved.append(not torch.equal(next(model.parameters()), before))
        assert monitor.report().num_dropped == 201
        assert [release.remedy for release in monitor.report().releases] == ["reject"]
    assert [step for step, has_moved in enumerate(moved) if not has_moved] == [*range(10, 210), 390]
    said = [r.getMessage() for r in caplog.records if "no gradient has passed" in r.getMessage()]
    assert len(said) == 2
    assert "step 109: no gradient has passed for 100 steps, of which the model learns nothing" in said[0]
    assert "dropped by what is in effect (reject)" in said[0]
    assert "step 209: no gradient has passed for 200 steps: what loss is now is taken for usual" in said[1]


@pytest.mark.parametrize("ladder", [["reject"], ["reject", "rollback"]], ids=str)
@pytest.mark.parametrize("has_kept", [True, False])
def test_to_go_back_is_advised_where_something_can_and_is_not_asked_to_already(ladder, has_kept, caplog):
    class Keeps:
        keeps_checkpoints = has_kept

        def rollback(self, version=None):
            raise AssertionError(version)

    kept = Keeps()
    if "rollback" in ladder and not has_kept:
        with pytest.raises(ConfigError, match="'rollback', which has nothing to act on"):
            AsyncTrainingMonitor(net(), remediation_strategy=ladder, acts_on=kept)
        return
    model = net()
    optimizer, given = sgd(model), {"patience": 1000, "warm_up": 5}
    trained_by.register(model, kept)  # as what trains a model does
    with AsyncTrainingMonitor(model, remediation_strategy=ladder, **given) as monitor:
        for step in range(110):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            monitor.observe(step, loss=1.0 if step < 10 else 3.0)
            optimizer.step()
    (said,) = (r.getMessage() for r in caplog.records if "no gradient has passed" in r.getMessage())
    assert ('put "rollback" behind "reject"' in said) == (has_kept and "rollback" not in ladder)


def test_what_is_not_finite_is_never_taken_for_usual(caplog):
    model = net()
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        for step in range(400):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            monitor.observe(step, loss=1.0 if step < 10 else math.nan)
            optimizer.step()
        assert monitor.report().num_dropped == 390
        assert monitor.report().series["loss"].high[-1] == 1.0
    assert sum("no gradient has passed" in record.getMessage() for record in caplog.records) == 1


def test_a_new_level_that_comes_after_200_steps_of_nan_becomes_the_range_as_well():
    model, moved = net(), []
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        for step in range(260):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            before = next(model.parameters()).clone()
            monitor.observe(step, loss=1.0 if step < 10 else math.nan if step < 240 else 3.0)
            optimizer.step()
            moved.append(not torch.equal(next(model.parameters()), before))
    assert not any(moved[10:240])
    assert all(moved[245:])


def test_an_update_of_which_a_loss_was_out_of_range_is_dropped_whole():
    model, changed = net(), []
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=3)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", warm_up=5):
        for number in range(18):
            before = [p.clone() for p in model.parameters()]
            x, y = batch(number)
            accumulator.train_step(
                inputs=x * (math.nan if number == 10 else 1.0),
                targets=y,
                optimizer=optim.SGD(lr=0.1),
                loss_fn=functional.cross_entropy,
            )
            changed.append(not same(before, list(model.parameters())))
    assert [n for n, has_changed in enumerate(changed) if has_changed] == [2, 5, 8, 14, 17]


@pytest.mark.parametrize("ladder", [["alert", "reject"], ["reduce_lr", "clip"], ["pause"]], ids=str)
@pytest.mark.parametrize("metric", ["loss", "non_finite"])
def test_a_nan_is_dropped_each_time_where_any_remedy_of_the_ladder_keeps_it_out(ladder, metric):
    model = normed()
    optimizer = sgd(model)
    acts_on = optimizer if "reduce_lr" in ladder else None
    monitor = AsyncTrainingMonitor(
        model, [metric], remediation_strategy=ladder, acts_on=acts_on, pause_timeout_s=0.001
    )
    for step in range(12):
        x, y = batch(step)
        before = state_of(model, optimizer)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x * (math.nan if step > 8 else 1.0)), y)
        loss.backward()
        if metric == "loss":
            monitor.observe(step, loss=loss.detach())
        optimizer.step()
        assert same(before, state_of(model, optimizer)) == (step > 8)
    assert monitor.report().num_dropped == 3


@pytest.mark.parametrize("factor", [math.nan, 100.0])
def test_an_alert_after_a_pause_says_that_what_is_not_finite_is_dropped(factor):
    model = normed()
    optimizer = sgd(model)
    monitor = AsyncTrainingMonitor(
        model, ["loss"], remediation_strategy="pause", pause_timeout_s=0.001, warm_up=5
    )
    results, has_changed = [], []
    for step in range(16):
        before = state_of(model, optimizer)
        optimizer.zero_grad()
        loss = loss_of(model, step) * (factor if step in (8, 14) else 1.0)  # two matters
        loss.backward()
        results += [alert.result for alert in monitor.observe(step, loss=loss.detach())]
        optimizer.step()
        has_changed.append(not same(before, state_of(model, optimizer)))
    assert results[0].startswith("training waits")
    assert results[1].startswith("training was paused at step 8, and is not again before")
    is_dropped = math.isnan(factor)
    assert results[1].endswith("; the step's gradient is dropped") == is_dropped
    assert (has_changed[8], has_changed[14]) == (False, not is_dropped)


def test_a_nan_is_used_where_no_remedy_of_the_ladder_keeps_it_out():
    model = net()
    optimizer = sgd(model)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reduce_lr", acts_on=optimizer):
        functional.cross_entropy(model(batch(0)[0] * math.nan), batch(0)[1]).backward()
        optimizer.step()
    assert not any(bool(p.isfinite().all()) for p in model.parameters())


def test_an_accumulator_alone_goes_on_from_a_nan_before_a_rollback_has_its_turn():
    class Keeps:
        def rollback(self, version=None):
            return "yesterday"

    model = net()
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=2)
    ladder = ["alert", "rollback"]
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy=ladder, acts_on=Keeps()) as monitor:
        for number in range(8):
            x, y = batch(number)
            accumulator.train_step(
                inputs=x * (math.nan if number == 3 else 1.0),
                targets=y,
                optimizer=optim.SGD(lr=0.1),
                loss_fn=functional.cross_entropy,
            )
        assert monitor.report().num_dropped == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_first_step_after_an_update_that_was_dropped_is_judged_as_any_other():
    model = net()
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=1)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        x, y = batch(0)
        accumulator.train_step(
            inputs=x * math.nan, targets=y, optimizer=optim.SGD(lr=0.1), loss_fn=functional.cross_entropy
        )
        accumulator.close()
        (loss_of(model, 1) * math.nan).backward()
        sgd(model).step()
    assert monitor.report().num_dropped == 2
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_closed_accumulator_gathers_nothing_so_gradients_are_measured_as_backward_left_them():
    model = net()
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=2)
    accumulator.close()
    with AsyncTrainingMonitor(model, ["gradient_norm"]) as monitor:
        loss_of(model, 0).backward()
        norm = norm_of(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        sgd(model).step()
    assert seen(monitor, "gradient_norm") == [pytest.approx(norm)]


def test_clipping_scales_to_zclips_norm_once_an_alert_has_begun_it():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    got = []
    optimizer.register_step_pre_hook(lambda *_: got.append(norm_of(model)))
    with AsyncTrainingMonitor(model, ["gradient_norm"], remediation_strategy="clip", warm_up=10) as monitor:
        band = None
        for step in range(40):
            model.zero_grad()
            (loss_of(model, step % 7) * (1000.0 if step == 30 else 1.0)).backward()
            if step == 30:
                band = monitor._norms
                large = norm_of(model)
            optimizer.step()
        assert large > 100 * band.high
        assert got[30] == pytest.approx(band.clipped(large), rel=1e-4)
        assert monitor.report().num_clipped >= 1
    assert all(value < band.high for i, value in enumerate(got))


# ------------------------------------------------------------------------------------------- hooks


def test_a_monitor_that_nobody_keeps_is_gone_and_leaves_no_hook_but_one_for_all():
    from torch.optim import optimizer as hooks

    AsyncTrainingMonitor(net()).close()
    before = len(hooks._global_optimizer_pre_hooks)
    model = net()
    monitor = AsyncTrainingMonitor(model, MEASURED)
    assert len(hooks._global_optimizer_pre_hooks) == before
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, 0).backward()
    sgd(model).step()


@pytest.mark.parametrize("ends", ["is collected", "is closed"])
@pytest.mark.parametrize("which", ["older", "newer"])
def test_a_monitor_that_ends_within_a_step_costs_no_step(ends, which):
    """As by the collector, which runs whenever Python likes, or by a callback of another's."""
    model, others, heard = net(), [], []
    monitor_of = net()
    if which == "older":
        others.append(AsyncTrainingMonitor(monitor_of, MEASURED))

    def end(alert):
        heard.append(alert)
        if ends == "is closed":
            others[0].close()
        else:
            others.clear()
            gc.collect()

    monitor = AsyncTrainingMonitor(model, MEASURED, callbacks=end)
    if which == "newer":
        others.append(AsyncTrainingMonitor(monitor_of, MEASURED))
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model, 0).backward()
        model[0].bias.grad[0] = math.nan
        optimizer.step()
    assert heard
    monitor.close()


def test_of_two_monitors_of_a_model_one_that_another_has_closed_in_a_step_judges_it_no_more():
    model = net()
    first = AsyncTrainingMonitor(model, MEASURED, callbacks=lambda _: second.close())
    second = AsyncTrainingMonitor(model, MEASURED)
    loss_of(model, 0).backward()
    model[0].bias.grad[0] = math.nan
    sgd(model).step()
    assert first.report().num_alerts
    assert not second.report().num_alerts


def test_a_closed_monitor_hears_no_more():
    model = net()
    monitor = AsyncTrainingMonitor(model, MEASURED)
    monitor.close()
    monitor.close()
    loss_of(model, 0).backward()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    sgd(model).step()
    assert seen(monitor, "gradient_norm") == []


def test_a_watched_model_is_copied_and_saved_as_any_other():
    model = net()
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        twin = copy.deepcopy(model)
        loss_of(twin, 0).backward()
        sgd(twin).step()
        assert seen(monitor, "gradient_norm") == []
        torch.save(model.state_dict(), io.BytesIO())
        loss_of(model, 0).backward()
        sgd(model).step()
        assert len(seen(monitor, "gradient_norm")) == 1


def test_what_measures_nothing_hooks_no_parameter():
    model = net()
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject"):
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


# ------------------------------------------------------------------------------------------- learning rates


class Notes(torch.optim.Optimizer):
    """Notes the rate by which it would step: hooks of a step are not to see it."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.rates = []

    def step(self, closure=None):
        if closure is not None:
            closure()
        self.rates.append(float(self.param_groups[0]["lr"]))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    ],
    ids=["closed form", "chained", "cosine"],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_reduced_learning_rate_is_the_scheduled_one_times_the_factor(schedule, as_tensor):
    model, twin = net(), net()
    optimizer, plain = (
        Notes(m.parameters(), lr=torch.tensor(0.1) if as_tensor else 0.1) for m in (model, twin)
    )
    scheduler, plain_scheduler = schedule(optimizer), schedule(plain)
    factors = []
    with AsyncTrainingMonitor(
        model, remediation_strategy="reduce_lr", acts_on=optimizer, warm_up=3, patience=1, quiet_steps=3
    ) as monitor:
        for step in range(20):
            monitor.observe(step, loss=9.0 if step in (5, 6) else 1.0)
            factors.append(0.5 ** len(monitor.in_effect))
            for o, s in ((optimizer, scheduler), (plain, plain_scheduler)):
                o.step()
                s.step()
            assert float(optimizer.param_groups[0]["lr"]) == float(plain.param_groups[0]["lr"])
    assert min(factors) == 0.25
    assert factors[-1] == 1
    assert optimizer.rates == pytest.approx([r * f for r, f in zip(plain.rates, factors, strict=True)])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_hooks_of_the_step_see_and_set_the_rate_that_is_not_reduced_whenever_they_came(as_tensor):
    live = Notes(net().parameters(), lr=torch.tensor(0.1) if as_tensor else 0.1)
    seen = []

    def doubles(optimizer, *_):
        group = optimizer.param_groups[0]
        seen.append(float(group["lr"]))
        group["lr"] = 2 * group["lr"]

    live.register_step_pre_hook(doubles)
    live.register_step_post_hook(doubles)
    lr_scale.scale(live, 0.5)
    live.register_step_pre_hook(doubles)
    live.register_step_post_hook(doubles)
    live.step()
    live.step()
    assert seen == pytest.approx([0.1 * 2**i for i in range(8)])
    assert live.rates == pytest.approx([0.1 * 4 / 2, 0.1 * 64 / 2])
    lr_scale.unscale(live, 0.5)
    live.step()
    assert live.rates[-1] == pytest.approx(0.1 * 1024)


def backward_of(model, size):
    model.zero_grad()
    (sum(p.sum() for p in model.parameters()) * size).backward()


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_rate_is_reduced_and_whole_again_in_the_midst_of_steps_with_another_monitor_of_the_model(
    has_closure,
):
    model = net()
    optimizer = Notes(model.parameters())
    settings = {"divergence_metrics": ["gradient_norm"], "warm_up": 3, "quiet_steps": 3}
    ours = AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", acts_on=optimizer, **settings)
    other = AsyncTrainingMonitor(model, **settings)
    for size in [1.0] * 5 + [100.0] + [1.0] * 6:
        backward = partial(backward_of, model, size)
        if has_closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
    assert optimizer.rates == [0.1] * 5 + [0.05] * 4 + [0.1] * 3
    assert len(ours.report().releases) == len(other.report().releases) == 1


@pytest.mark.parametrize(("place", "num_reduced"), [("pre", 3), ("post", 4)])
def test_a_hook_of_the_step_may_observe_and_others_come_behind_it(place, num_reduced):
    optimizer, seen = Notes(net().parameters()), []
    monitor = AsyncTrainingMonitor(
        remediation_strategy="reduce_lr", acts_on=optimizer, warm_up=3, quiet_steps=3
    )

    def observes(*_):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        monitor.observe(len(seen), loss=9.0 if len(seen) == 5 else 1.0)

    register = getattr(optimizer, f"register_step_{place}_hook")
    register(observes)
    register(lambda *_: None)
    for _ in range(12):
        optimizer.step()
    assert optimizer.rates == [0.1] * 5 + [0.05] * num_reduced + [0.1] * (7 - num_reduced)
    assert seen == [0.1] * 12
    assert len(monitor.report().releases) == 1


def test_a_step_that_raises_leaves_no_scaled_rate_behind():
    optimizer = Notes(net().parameters())
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=optimizer, warm_up=1)
    monitor.observe(0, loss=1.0)
    monitor.observe(1, loss=9.0)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    optimizer.step()
    assert optimizer.rates == [0.05]
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    monitor.close()
    optimizer.step()
    assert optimizer.rates[-1] == optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_that_makes_its_own_rate_has_none_to_reduce():
    with pytest.raises(ConfigError, match="reduce_lr"):
        AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=Notes(net().parameters(), lr=None))


def norms_of(model, do, num_steps=6):
    """Give what a monitor measures in these steps."""
    with AsyncTrainingMonitor(model, ["gradient_norm"]) as monitor:
        for step in range(num_steps):
            do(step)
        return monitor.report().series["gradient_norm"].values


def backward_and_clip(model):
    """Leave gradients of a norm of 1, and give the one that they had."""
    model(torch.ones(8, 4)).sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def norm_left(model):
    return nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


@pytest.mark.parametrize("is_new", [False, True])
def test_what_comes_to_be_trained_in_the_midst_is_measured_as_backward_leaves_it(is_new):
    model = two_layers()
    optimizer, left = torch.optim.SGD(model[1].parameters(), lr=0.0), []
    model[0].requires_grad_(False)

    def do(step):
        if step == 2:
            if is_new:
                model[0] = nn.Linear(4, 4)
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        left.append(backward_and_clip(model))
        optimizer.step()

    found = norms_of(model, do)
    assert found[:2] + found[3:] == pytest.approx(left[:2] + left[3:])
    assert left[3] > left[1] > 2.0


def replaced(module):
    for name, parameter in list(module.named_parameters()):
        value, size = parameter.detach().clone(), parameter.shape
        del parameter
        setattr(module, name, None)  # whose place in memory the new one may have
        setattr(module, name, nn.Parameter(value.reshape(size)))


def assigned(module):
    module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [replaced, assigned])
def test_parameters_that_others_have_taken_the_place_of_are_heard_whatever_their_ids(replace):
    model, left = two_layers(), []

    def do(step):
        if step == 2:
            for layer in model:
                replace(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        left.append(backward_and_clip(model))
        optimizer.step()

    found = norms_of(model, do)
    assert found[:2] + found[3:] == pytest.approx(left[:2] + left[3:])
    assert left[3] > 2.0


def test_a_parameter_that_is_computed_is_heard_by_none_and_costs_no_step():
    model = two_layers()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
    left = []

    def do(_):
        optimizer.zero_grad()
        model[0]._parameters["weight"] = 1.0 * torch.ones(
            4, 4, requires_grad=True
        )  # as of MAML's inner steps
        model(torch.ones(8, 4)).sum().backward()
        left.append(norm_left(model[1]))
        optimizer.step()

    assert norms_of(model, do) == pytest.approx(left)


def test_what_no_optimizer_steps_adds_up_in_no_norm_and_is_clipped_with_nothing():
    model = two_layers()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)

    def do(_):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    found = norms_of(model, do)
    expected = torch.stack([p.grad.square().sum() for p in model[1].parameters()]).sum().sqrt().item()
    assert found == pytest.approx([expected] * 6)


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_gradients_that_a_user_throws_away_before_the_step_are_in_no_norm(num_optimizers):
    """As those of a layer that is not to be trained yet, or that are not finite."""
    model, left = two_layers(), []
    parts = [model] if num_optimizers == 1 else list(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in parts]

    def do(step):
        model.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        if step % 3 == 1:
            model[0].weight.grad.fill_(float("nan"))
        if step % 3:
            for parameter in model[0].parameters():
                parameter.grad = None
        left.extend([norm_of(model)] * num_optimizers)
        for optimizer in optimizers:
            optimizer.step()

    found = norms_of(model, do)
    assert found[1:] == pytest.approx(left[1:]), "of the second one nothing is known before it steps"


def test_gradients_of_a_batch_that_a_user_skips_are_in_no_norm_of_the_next():
    model, left = two_layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def do(_):
        (float("nan") * model[0](torch.ones(8, 4))).sum().backward()
        model.zero_grad()
        model[1](torch.ones(8, 4)).sum().backward()
        left.append(norm_of(model[1:]))
        optimizer.step()
        optimizer.zero_grad()

    assert norms_of(model, do) == pytest.approx(left)


@pytest.mark.parametrize("frees", [False, True])
def test_two_optimizers_of_one_backward_step_by_the_same_norm(frees):
    """Also where each takes its own away as soon as it has stepped."""
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    left = []

    def do(_):
        model.zero_grad()
        left.append(backward_and_clip(model))
        for optimizer in optimizers:
            optimizer.step()
            if frees:
                optimizer.zero_grad()

    found = norms_of(model, do)
    assert found[1:] == pytest.approx([left[0]] * 11), "of the second one nothing is known before it steps"
    assert left[0] > found[0]


def test_what_another_optimizer_has_stepped_by_before_is_of_no_step_in_turns():
    model = two_layers()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model)

    def do(_):
        first.zero_grad()
        model[0](torch.ones(8, 4)).sum().backward()
        first.step()
        second.zero_grad()
        model[1](torch.ones(8, 4)).sum().backward()
        second.step()

    norms = [math.sqrt(4 * 4 * 8**2 + 4 * 8**2), math.sqrt(4 * 8**2 + 8**2)]
    assert norms_of(model, do) == pytest.approx(norms * 6)


def test_a_generator_is_not_judged_by_what_its_backward_leaves_on_the_discriminator():
    model = two_layers()
    generator, discriminator = (torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model)
    left = []

    def do(_):
        discriminator.zero_grad()
        model[1](model[0](torch.ones(8, 4)).detach()).sum().mul(100.0).backward()
        left.append(norm_left(model[1]))
        discriminator.step()
        generator.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        left.append(norm_left(model[0]))
        generator.step()

    assert norms_of(model, do) == pytest.approx(left)
    assert left[0] > 10 * left[1]


@pytest.mark.parametrize("is_given", [True, False])
def test_of_two_optimizers_under_one_scaler_each_is_judged_by_what_it_steps(is_given):
    model = two_layers()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    found, left = [], []
    with AsyncTrainingMonitor(model, ["gradient_norm"], grad_scaler=scaler if is_given else None) as monitor:
        for _ in range(4):
            model.zero_grad()
            scaler.scale(model(torch.ones(8, 4)).sum()).backward()
            for layer, optimizer in zip(model, optimizers, strict=True):
                scaler.unscale_(optimizer)
                left.append(norm_left(layer))
                scaler.step(optimizer)
            scaler.update()
        found = monitor.report().series["gradient_norm"].values
    assert found[2:] == pytest.approx(left[2:])


def test_a_gradient_that_is_filled_anew_without_backward_is_measured_as_it_is():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(8, 4)).sum().mul(1000.0).backward()

    def do(step):
        if step:
            for parameter in model.parameters():
                parameter.grad.fill_(1.0)
        optimizer.step()

    found = norms_of(model, do)
    assert found[1:] == pytest.approx([math.sqrt(4 * 4 + 4 + 4 + 1)] * 5)


def test_a_model_that_is_watched_can_be_converted_by_swapping_its_tensors():
    model = two_layers()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with AsyncTrainingMonitor(model, ["gradient_norm"]):
            model.double()
            model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype is torch.float64


class Wraps(torch.optim.Optimizer):
    """Stands for an optimizer, as what Accelerate makes of one does: torch calls no hooks around its step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


def test_of_an_optimizer_that_stands_for_another_that_one_s_rate_is_reduced():
    optimizer = Notes(net().parameters())
    wrapped = Wraps(optimizer)
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=wrapped, warm_up=1)
    monitor.observe(0, loss=1.0)
    monitor.observe(1, loss=9.0)
    wrapped.step()
    assert optimizer.rates == [0.05]


def test_an_accumulator_s_optimizer_is_found_when_there_is_one():
    model = net()
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=1)
    with AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", warm_up=1) as monitor:
        monitor.observe(0, loss=1.0)
        assert "no optimizer yet" in monitor.observe(1, loss=9.0)[0].result
        monitor.reset()
        x, y = batch(0)
        accumulator.train_step(
            inputs=x, targets=y, optimizer=optim.SGD(lr=0.1), loss_fn=functional.cross_entropy
        )
        monitor.observe(3, loss=99.0)
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, 0).backward()
        expected = [b - 0.05 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
        model.zero_grad()
        accumulator.train_step(inputs=x, targets=y, loss_fn=functional.cross_entropy)
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)


def test_steps_that_nobody_observes_are_steps_and_count_for_letting_go():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = AsyncTrainingMonitor(
        model, ["gradient_norm", "loss"], remediation_strategy="clip", warm_up=5, quiet_steps=20
    )
    for step in range(200):
        if step % 100 == 0:
            monitor.observe(step, loss=1.0)  # now and then, as at a log line
        optimizer.zero_grad()
        (sum(p.sum() for p in model.parameters()) * (100.0 if step == 130 else 1.0)).backward()
        optimizer.step()
    report = monitor.report()
    assert [alert.step for alert in report.alerts] == [130]
    assert [release.step for release in report.releases] == [151]


def test_a_step_that_an_optimizer_skips_leaves_the_next_one_out_of_suspicion():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    monitor = AsyncTrainingMonitor(model, ["loss", "gradient_norm"], remediation_strategy="reject", warm_up=3)

    def step():
        optimizer.zero_grad()
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()

    for number in range(5):
        monitor.observe(number, loss=1.0)
        step()
    monitor.observe(5, loss=math.inf)
    optimizer.found_inf = torch.ones(())  # as a GradScaler tells an optimizer that skips by itself
    step()
    del optimizer.found_inf
    before = next(model.parameters()).clone()
    monitor.observe(6, loss=1.0)
    step()
    assert not torch.equal(next(model.parameters()), before)
    assert monitor.report().num_dropped == 0


@pytest.mark.parametrize("is_observed_after_backward", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_a_grad_scaler_skips_leaves_the_next_one_out_of_suspicion(
    is_observed_after_backward, set_to_none
):
    model, changed = net(), []
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(model)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=3, grad_scaler=scaler) as monitor:
        for step in range(8):
            optimizer.zero_grad(set_to_none=set_to_none)
            before = [p.clone() for p in model.parameters()]
            loss = loss_of(model, step) * (math.inf if step == 5 else 1.0)
            if not is_observed_after_backward:
                monitor.observe(step, loss=loss.detach())
            scaler.scale(loss).backward()
            if is_observed_after_backward:
                monitor.observe(step, loss=loss.detach())
            scaler.step(optimizer)
            scaler.update()
            changed.append(not same(before, list(model.parameters())))
        assert monitor.report().num_alerts == {"loss": 1}
        assert monitor.report().num_dropped == 0
    assert [step for step, has_changed in enumerate(changed) if not has_changed] == [5]


def test_with_a_grad_scaler_too_one_of_several_losses_drops_the_step_that_is_made_of_all():
    model, changed = net(), []
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(model)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=3, grad_scaler=scaler) as monitor:
        for step in range(12):
            loss = loss_of(model, step)
            monitor.observe(step, loss=100.0 if step == 6 else 1.0)
            scaler.scale(loss).backward()
            if step % 3 == 2:
                before = [p.clone() for p in model.parameters()]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                changed.append(not same(before, list(model.parameters())))
    assert changed == [True, True, False, True]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_micro_batch_of_which_nothing_counts_is_no_alert(reduction):
    model = nn.Linear(4, 3)
    accumulator = AsyncGradientAccumulator(
        model,
        accumulation_steps=2,
        loss_reduction=reduction,
        normalizer=lambda _, targets: float((targets != -100).sum()),
    )
    monitor = AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5)
    for step in range(20):
        targets = torch.full((8,), -100 if step == 13 else 1)
        loss = accumulator.train_step(
            inputs=torch.ones(8, 4),
            targets=targets,
            optimizer=optim.SGD(lr=0.01),
            loss_fn=nn.CrossEntropyLoss(reduction=reduction),
        )
        assert math.isnan(loss) == (step == 13 and reduction == "mean")
    assert monitor.report().num_alerts == {}
    assert monitor.report().num_dropped == 0
    assert monitor.report().series["loss"].num_seen == 19
    assert accumulator.updates == 10
