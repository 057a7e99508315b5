"""When a level that is out of its range is taken for usual, and what is done while it is not."""

import itertools
import math

import pytest
import torch
from torch import nn

from offbeat import AsyncTrainingMonitor
from offbeat.local.lr_scale import factor_of
from support.goes_back import Steps
from support.small_net import net


def watched(metrics=("loss",), *, ladder="reduce_lr", thing=None, model=None, **keywords):
    """Make a monitor of a rate, and, before it on the ladder, of something that goes back."""
    live = torch.optim.SGD(net().parameters(), lr=1.0)
    acts_on = [live, thing] if thing is not None else live
    given = {"patience": 2, "warm_up": 10, "quiet_steps": 1000, **keywords}
    return AsyncTrainingMonitor(
        model, list(metrics), remediation_strategy=ladder, acts_on=acts_on, **given
    ), live


COMES_BACK = [0.5 ** (10 - n // 5) for n in range(50)]
"""What a rate that was cut ten times is multiplied by from step to step."""


def learnt(monitor):
    """Give the alerts that say so."""
    return [alert for alert in monitor.report().alerts if "is taken for usual" in alert.result]


# ------------------------------------------------------------------------------------ a rate that was cut


def test_a_level_that_stays_after_all_cuts_of_the_rate_is_taken_for_usual():
    live, told = torch.optim.SGD(net().parameters(), lr=1.0), []
    given = {"patience": 2, "warm_up": 10, "quiet_steps": 20, "acts_on": live, "callbacks": told.append}
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", **given)
    rates = []
    for step in range(600):
        monitor.observe(step, loss=9.0 if step >= 10 else 1.0)
        rates.append(factor_of(live))
    all_taken = rates.index(0.5**10)
    (in_vain,) = (alert for alert in told if "in vain" in alert.result)
    assert in_vain.step == all_taken + 2 * 8
    words = "where such values are right from now on, monitor.reset() learns them, as is done after 100 steps"
    assert words in in_vain.result
    assert "lower learning rate" not in in_vain.result
    (learnt,) = (alert for alert in told if "is taken for usual" in alert.result)
    assert learnt.step == all_taken + 100
    assert "100 more steps have had an alert in spite of all that there is" in learnt.result
    assert set(rates[: all_taken + 100]) == {0.5**n for n in range(11)}
    assert rates[all_taken + 100 : all_taken + 150] == COMES_BACK
    assert set(rates[all_taken + 150 :]) == {1.0}
    assert monitor.in_effect == ()
    assert monitor.observe(600, loss=9.0) == ()
    (alert,) = monitor.observe(601, loss=90.0)
    assert (alert.num, alert.action) == (1, "reduce_lr")


class Bounds:
    """Keeps out what is late, and with it what is learnt from that."""

    max_staleness: int | None = None


def test_a_bound_on_staleness_that_helps_nothing_is_let_go_of_as_a_cut_of_the_rate_is():
    thing = Bounds()
    given = {"patience": 2, "warm_up": 10, "quiet_steps": 1000, "acts_on": thing}
    monitor = AsyncTrainingMonitor(remediation_strategy="tighten_staleness", **given)
    bounds = []
    for step in range(600):
        monitor.observe(step, loss=9.0 if step >= 10 else 1.0)
        bounds.append(thing.max_staleness)
    assert 0 in bounds
    assert len(learnt(monitor)) == 1
    assert bounds[-1] is None
    assert monitor.in_effect == ()


@pytest.mark.parametrize(("patience", "after"), [(5, 100), (12, 100), (20, 160)])
def test_a_level_is_learnt_after_100_alerts_and_no_sooner_than_the_last_cut_has_had_its_time(patience, after):
    monitor, live = watched(patience=patience)
    rates = []
    for step in range(30 + 60 * patience + after):
        monitor.observe(step, loss=9.0 if step >= 20 else 1.0)
        rates.append(factor_of(live))
    (alert,) = learnt(monitor)
    assert alert.step == rates.index(0.5**10) + after


@pytest.mark.parametrize("by", [0.99, 1.0])
def test_a_rate_is_cut_no_further_while_the_loss_falls(by):
    monitor, live = watched(patience=5)
    loss, rates = 9.0, []
    for step in range(200):
        loss *= by if factor_of(live) <= 0.5**4 else 1.0
        monitor.observe(step, loss=loss if step >= 20 else 1.0)
        rates.append(factor_of(live))
    assert (min(rates) == 0.5**4) == (by < 1.0)


@pytest.mark.parametrize("how", ["comes down", "stays"])
def test_a_level_that_comes_down_after_all_cuts_of_the_rate_is_given_time(how):
    """By as little as a thousandth of the rate makes it, and not what is usual meanwhile."""
    live, told = torch.optim.SGD(net().parameters(), lr=1.0), []
    given = {"patience": 5, "warm_up": 10, "quiet_steps": 2000, "acts_on": live, "callbacks": told.append}
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", **given)
    loss, rates = 1.0, []
    for step in range(1500):
        is_cut = factor_of(live) == 0.5**10
        by = {"comes down": 0.997, "stays": 0.9995}[how] if is_cut else 1.05
        loss = min(max(loss * by, 1.0), 8.0)
        monitor.observe(step, loss=1.0 if step < 20 else loss)
        rates.append(factor_of(live))
    assert min(rates) == 0.5**10, "all was taken"
    assert bool(learnt(monitor)) == (how == "stays")
    assert (rates[-1] == 0.5**10) == (how == "comes down")
    in_vain = [alert for alert in told if "in vain" in alert.result]
    assert len(in_vain) == 1 or how == "stays", "however often it is given time"


def behind_a_rollback(loss_after, num_steps=400):
    """Observe losses from step 30 on, each by how long ago it was gone back, and the one before.

    There is one checkpoint, and so nothing says of several that it is the data.
    """
    thing = Steps(newest=10)
    monitor, live = watched(ladder=["rollback", "reduce_lr"], thing=thing)
    rates, loss, went_at = [], 1.0, 30
    for step in range(30):
        thing.began_step = step
        monitor.observe(step, loss=loss)
    for step in range(30, 30 + num_steps):
        thing.began_step, num_went = step, len(thing.went)
        loss = loss_after(step - went_at, loss)
        monitor.observe(step, loss=loss)
        went_at = step if len(thing.went) > num_went else went_at
        rates.append(factor_of(live))
    assert set(thing.went) == {10}
    all_taken = rates.index(0.5**10)
    return monitor, rates, [alert.step - 30 - all_taken for alert in learnt(monitor)]


def falling(since, loss):
    return max(loss * 0.995, 5.0) if since > 2 else 50.0


def test_behind_a_rollback_too_a_level_that_comes_down_is_given_time():
    _, rates, found = behind_a_rollback(lambda since, loss: 1.0 if since == 1 else falling(since, loss), 1000)
    assert found[0] % 100 == 1  # of which one was in the range
    assert found[0] >= 400, "it falls to 5 in 460 steps"
    assert set(rates[-300:]) == {0.5**10}


def test_where_no_loss_was_in_the_range_behind_a_rollback_it_is_given_none():
    """So that data which changed is not learnt for long at a thousandth of the rate."""
    _, rates, found = behind_a_rollback(falling, 1000)
    assert found == [100]
    assert set(rates[-700:]) == {1.0}


@pytest.mark.parametrize(("newest", "after"), [(10, 100), (20, 2), (30, 2), (200, 2)])
def test_a_loss_in_the_range_on_none_of_two_checkpoints_or_more_is_the_data_s(newest, after):
    thing = Steps(newest=newest)
    monitor, live = watched(ladder=["rollback", "reduce_lr"], thing=thing)
    rates = []
    for step in range(400):
        thing.began_step = step
        monitor.observe(step, loss=1.0 if step < 60 else 9.0)
        rates.append(factor_of(live))
    (alert,) = learnt(monitor)
    assert ("it is the data" in alert.result) == (after == 2)
    assert alert.step == rates.index(0.5**10) + after


def test_behind_a_rollback_a_level_that_stays_is_learnt_and_the_rate_is_whole_soon():
    _, rates, found = behind_a_rollback(lambda since, loss: 50.0)
    assert found == [100]
    assert set(rates[-200:]) == {1.0}


def test_what_comes_down_by_going_back_alone_is_no_level_that_comes_down():
    _, _, found = behind_a_rollback(lambda since, loss: 50.0 if since == 2 else 33.0)
    assert found == [100]


def test_where_a_loss_was_in_its_range_since_it_was_gone_back_what_is_in_effect_is_let_go_of_in_its_time():
    """Then it may be what keeps it there."""
    monitor, rates, found = behind_a_rollback(lambda since, loss: 1.0 if since == 1 else 50.0)
    assert found == [101]  # of which one was in the range
    assert "in its time" in learnt(monitor)[0].result
    assert set(rates[-200:]) == {0.5**10}


def test_alerts_of_what_is_not_finite_say_nothing_of_a_level():
    monitor, live = watched()
    for step in range(400):
        monitor.observe(step, loss=1.0 if step < 60 else math.nan)
    assert factor_of(live) == 0.5**10
    for step in range(400, 499):
        (alert,) = monitor.observe(step, loss=9.0)
        assert "usual" not in alert.result or "in vain" in alert.result
    assert factor_of(live) == 0.5**10
    rates = []
    for step in range(499, 550):
        monitor.observe(step, loss=9.0)
        rates.append(factor_of(live))
    assert rates == [*COMES_BACK, 1.0]


# ------------------------------------------------------------------------------------- several metrics


def test_of_two_metrics_in_a_step_one_is_learnt_anew_and_the_other_begins_nothing_in_it():
    live = torch.optim.SGD(net().parameters(), lr=1.0)
    given = {"patience": 1, "warm_up": 10, "quiet_steps": 20, "acts_on": live}
    metrics, ladder = ["loss", "gradient_norm"], ["alert", "reduce_lr"]
    monitor = AsyncTrainingMonitor(None, metrics, remediation_strategy=ladder, **given)
    in_effect = []
    for step in range(300):
        value = 9.0 if step >= 40 else 1.0
        monitor.observe(step, loss=value, gradient_norm=value)
        in_effect.append(monitor.in_effect)
    first = next(step for step in range(41, 300) if in_effect[step] == ()) - 5 * 11
    (learnt,) = (alert for alert in monitor.report().alerts if "taken for usual" in alert.result)
    assert learnt.step == first
    assert "what loss and gradient_norm is now is taken for usual" in learnt.result
    assert set(in_effect[first + 5 * 11 :]) == {()}
    nums = [len(names) for names in in_effect[first:]]
    assert nums == sorted(nums, reverse=True), "nothing is taken meanwhile"


@pytest.mark.parametrize("ladder", ["reduce_lr", ["rollback", "reduce_lr"]])
@pytest.mark.parametrize(("by", "between"), [(1.0, 9.0), (0.998, 9.0), (1.0, 1.4)])
def test_which_metric_is_judged_first_decides_nothing(ladder, by, between):
    ends = []
    for metrics in (["loss", "gradient_norm"], ["gradient_norm", "loss"]):
        thing = None if ladder == "reduce_lr" else Steps()
        monitor, live = watched(metrics, ladder=ladder, thing=thing)
        rates = []
        for step in range(500):
            value = 1.0 if step < 200 else 9.0
            if thing is not None:
                thing.began_step = step
            loss = between if step > 200 and step % 2 else value  # which may be above its range by little
            monitor.observe(step, loss=loss * by ** max(step - 200, 0), gradient_norm=value)
            rates.append(factor_of(live))
        assert (monitor.in_effect == ()) == (by == 1.0 or ladder != "reduce_lr")
        ends.append((rates, thing and thing.went))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("every", "phase"), [(1, 0), (2, 0), (3, 1), (3, 2), (10, 0), (10, 5), (25, 3)])
def test_a_loss_that_is_measured_now_and_then_decides_as_it_was_measured_last(every, phase):
    monitor, live = watched(["loss", "gradient_norm"])
    rates = []
    for step in range(700):
        value = 1.0 if step < 300 else 9.0
        if step % every == phase:
            monitor.observe(step, loss=value)
        monitor.observe(step, gradient_norm=value)
        rates.append(factor_of(live))
    assert min(rates) == 0.5**10
    assert set(rates[-100:]) == {1.0}


@pytest.mark.parametrize("ladder", ["reduce_lr", ["rollback", "reduce_lr"]])
@pytest.mark.parametrize("every", [1, 50, 200])
def test_a_loss_of_before_what_was_done_says_nothing_of_what_came_of_it(ladder, every):
    """It was out of its range once, and the gradient's norm is for good."""
    thing = None if ladder == "reduce_lr" else Steps()
    monitor, live = watched(["loss", "gradient_norm"], ladder=ladder, thing=thing)
    for step in range(2400, 2700):
        for before in range(0 if step == 2400 else step, step):
            if thing is not None:
                thing.began_step = before
            given = {"loss": 1.0} if before % every == 0 else {}
            monitor.observe(before, gradient_norm=1.0, **given)
        if thing is not None:
            thing.began_step = step
        if step % every == 0:
            monitor.observe(step, loss=9.0 if step == 2400 else 1.0)
        monitor.observe(step, gradient_norm=9.0)
    (alert,) = learnt(monitor)
    assert "it is the data" not in alert.result
    assert "in its time" in alert.result
    assert factor_of(live) == 0.5**10


def test_a_level_that_was_learnt_is_not_what_a_later_one_has_come_down_from():
    monitor, live = watched(["loss", "gradient_norm"], quiet_steps=400, patience=5)
    for step in range(1500):
        norm = 1.0 if step < 200 else 100.0 if step < 700 else 3.0 if step < 900 else 40.0
        monitor.observe(step, loss=1.0, gradient_norm=norm)
    first, second = (alert.step for alert in learnt(monitor))
    assert (first - 200) // 100 == 3
    assert (second - 900) // 100 == 1
    assert factor_of(live) < 1.0


def test_a_metric_that_was_out_of_range_for_a_worker_that_left_keeps_its_range():
    monitor, _ = watched(["loss", "gradient_norm"])
    for step in range(400):
        if step <= 50:
            monitor.observe(step, worker="leaves", loss=1.0, gradient_norm=9.0 if step == 50 else 1.0)
        monitor.observe(step, worker="stays", loss=9.0 if step >= 60 else 1.0, gradient_norm=1.0)
    (alert,) = learnt(monitor)
    assert "what loss is now is taken for usual" in alert.result


def test_a_metric_whose_last_values_were_mixed_is_learnt_with_the_loss():
    """Else it would take all once more, for what began with what is usual by now."""
    monitor, _ = watched(["loss", "gradient_norm"])
    for step in range(400):
        norm = 9.0 if step >= 60 and step % 4 == 0 else 1.0
        monitor.observe(step, loss=9.0 if step >= 60 else 1.0, gradient_norm=norm)
    (alert, *_) = learnt(monitor)
    assert "what loss and gradient_norm is now is taken for usual" in alert.result


@pytest.mark.parametrize("every", [1, 20, 50])
@pytest.mark.parametrize("spike", [1e3, math.nan])
def test_a_loss_that_was_out_of_its_range_once_says_nothing_of_a_metric_that_stays_so(every, spike):
    """And its own range is not what the other one's is."""

    def lowest(has_spike, norm_after):
        monitor, live = watched(["loss", "gradient_norm"], patience=5, quiet_steps=100)
        rates, since = [], 600
        for step in range(1, 1200):
            wobble = 1 + 0.05 * math.sin(1.7 * step)
            if step % every == 0:
                monitor.observe(step, loss=spike if has_spike and step == since else wobble)
            monitor.observe(step, gradient_norm=wobble * (norm_after(step - since) if step >= since else 1.0))
            rates.append(factor_of(live))
        return min(rates), learnt(monitor)

    falling = [lowest(has_spike, lambda since: max(9 * 0.99**since, 1.0))[0] for has_spike in (False, True)]
    assert falling[1] >= 0.5 * falling[0], "by one, where it is nothing but a spike"
    lowest_rate, (alert,) = lowest(True, lambda since: 9.0)
    assert lowest_rate == 0.5**10
    assert "in its time" in alert.result


# ------------------------------------------------------------------------------------- behind a rollback


@pytest.mark.parametrize("every", [3, 5])
def test_values_that_are_not_finite_lead_no_further_back_than_thrice_nor_say_that_it_is_the_data(every):
    thing = Steps()
    monitor, _ = watched(ladder=["rollback", "reduce_lr"], thing=thing)
    for step in range(260):
        thing.began_step = step
        is_broken = step >= 200 and step % every == 0
        monitor.observe(step, loss=1.0 if step < 200 else math.nan if is_broken else 9.0)
    assert set(thing.went) == {190, 180, 170}
    assert not any("it is the data" in alert.result for alert in monitor.report().alerts)


def test_after_the_data_has_changed_another_change_is_gone_back_for_as_the_first_was():
    thing = Steps()
    monitor, live = watched(ladder=["rollback", "reduce_lr"], thing=thing, quiet_steps=50)
    went = []
    for step in range(600):
        thing.began_step = step
        before = len(thing.went)
        monitor.observe(step, loss=1.0 if step < 200 else 9.0 if step < 400 else 90.0)
        went += [(step // 200, place) for place in thing.went[before:]]
    for part, newest in ((1, 190), (2, 390)):
        places = [place for when, place in went if when == part]
        assert places[:3] == [newest, newest - 10, newest - 20]
        assert set(places) == set(places[:3])
    assert [alert.step // 200 for alert in learnt(monitor)] == [1, 2]
    assert factor_of(live) == 1.0


class TellsNothing(Steps):
    """Goes back, and does not say where to."""

    def rollback(self, step=None):
        super().rollback(step)


def test_what_goes_back_and_does_not_say_where_to_costs_no_training():
    things = [TellsNothing(), TellsNothing()]
    monitor = AsyncTrainingMonitor(nn.Linear(2, 2), remediation_strategy="rollback", acts_on=things)
    for step in range(100):
        for thing in things:
            thing.began_step = step
        monitor.observe(step, loss=9.0 if step > 60 else 1.0)
    assert all(thing.went for thing in things)
    assert monitor.in_effect != ()


# ------------------------------------------------------------------------------------------ other remedies


def test_what_was_cut_while_no_gradient_passed_is_whole_again_when_one_does():
    """It had nothing to slow, and would from now on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ladder, given = ["reject", "reduce_lr"], {"warm_up": 10, "quiet_steps": 1000}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, acts_on=optimizer, **given)
    rates, values = [], []
    for step in range(400):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        monitor.observe(step, loss=9.0 if step >= 60 else 1.0)
        optimizer.step()
        rates.append(factor_of(optimizer))
        values.append(model[0].bias.detach().clone())
    assert rates[258] < 0.01
    assert torch.equal(values[60], values[259])
    num_cuts = round(-math.log2(rates[258]))
    assert rates[259 : 259 + 5 * num_cuts] == COMES_BACK[-5 * num_cuts :]
    assert set(rates[259 + 5 * num_cuts :]) == {1.0}
    assert monitor.in_effect == ()
    assert not torch.equal(values[260], values[261])


def test_the_end_of_alerts_by_a_level_that_was_learnt_is_told():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = AsyncTrainingMonitor(model, remediation_strategy="reject")
    for step in range(700):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        monitor.observe(step, loss=9.0 if step >= 60 else 1.0)
        optimizer.step()
    report = monitor.report()
    assert report.num_alerts == {"loss": 200}
    (recovery,) = report.recoveries
    assert (recovery.since, recovery.num_alerts) == (60, 200)


def test_a_pause_is_taken_again_where_the_metric_falls_too_and_in_the_end_that_is_said():
    monitor = AsyncTrainingMonitor(remediation_strategy="pause", pause_timeout_s=1e-6, patience=1, warm_up=10)
    taken, in_vain = [], []
    for step in range(1200):
        alerts = monitor.observe(step, loss=1.0 if step < 60 else 90 * 0.998 ** (step - 60))
        taken += [step - 60 for alert in alerts if alert.is_taken]
        in_vain += [step - 60 for alert in alerts if "in vain" in alert.result]
    assert taken == [2 * (2**n - 1) for n in range(10)]
    assert in_vain == [taken[-1] + 1]


# ------------------------------------------------------------------------------- while what is in effect ends


def ending(
    metrics=("loss",), *, ladder=("reduce_lr",), thing=None, workers=(None,), left_out=None, **keywords
):
    """Make a monitor that has just learnt a level; give it, the optimizer, and the step that comes next."""
    monitor, live = watched(metrics, ladder=list(ladder), thing=thing, **keywords)
    for step in range(2000):
        for worker in workers:
            loss = 1.0 if step < 40 else 9.0
            if left_out is not None and worker == left_out[0] and step >= 20:
                loss = left_out[1]
            if hasattr(thing, "began_step"):
                thing.began_step = step
            monitor.observe(step, worker=worker, loss=loss)
        if learnt(monitor):
            return monitor, live, step + 1
    raise AssertionError("no level was learnt")


class LeavesOut:
    """Leaves workers out."""

    def quarantine(self, worker_id):
        pass

    def release(self, worker_id):
        pass


@pytest.mark.parametrize("of_left_out", [9.0, 1e9, math.nan])
def test_a_worker_that_is_left_out_holds_up_nothing_that_is_let_go_of(of_left_out):
    workers = ("a", "b", "c", "d")
    given = {"ladder": ["quarantine", "reduce_lr"], "thing": LeavesOut(), "workers": workers}
    monitor, live, begin = ending(left_out=("d", of_left_out), **given)
    for step in range(begin, begin + 60):
        for worker in workers:
            monitor.observe(step, worker=worker, loss=of_left_out if worker == "d" else 9.0)
    assert factor_of(live) == 1.0


@pytest.mark.parametrize("workers", [("a",), ("a", "b", "c", "d"), tuple("abcdefghijklmnop")])
def test_however_many_workers_there_are_one_is_let_go_of_each_five_steps(workers):
    monitor, live, begin = ending(workers=workers)
    rates = []
    for step in range(begin, begin + 60):
        for worker in workers:
            monitor.observe(step, worker=worker, loss=9.0)
        rates.append(factor_of(live))
    changes = [n for n in range(1, 60) if rates[n] != rates[n - 1]]
    assert len(changes) == 10
    assert {later - one for one, later in itertools.pairwise(changes)} == {5}


@pytest.mark.parametrize(("patience", "every"), [(2, 6), (5, 6), (5, 10), (20, 4)])
def test_alerts_that_take_nothing_hold_up_nothing_that_is_let_go_of(patience, every):
    monitor, live, begin = ending(patience=patience)
    for step in range(begin, begin + 50):
        monitor.observe(step, loss=math.nan if step % every == 0 else 9.0)
    assert monitor.report().num_alerts["loss"] > 100
    assert factor_of(live) == 1.0


@pytest.mark.parametrize("patience", [2, 5])
@pytest.mark.parametrize("warm_up", [10, 25])
def test_alerts_far_from_one_another_take_nothing_while_all_is_let_go_of(patience, warm_up):
    thing = Steps()
    given = {"patience": patience, "warm_up": warm_up, "ladder": ["rollback", "reduce_lr"]}
    monitor, live, begin = ending(thing=thing, **given)
    for step in range(begin, begin + 50):
        thing.began_step = step
        monitor.observe(step, loss=math.nan if step % 7 == 0 else 9.0)
    assert factor_of(live) == 1.0


@pytest.mark.parametrize("patience", [5, 6, 10])
@pytest.mark.parametrize("ladder", [["reduce_lr"], ["rollback", "reduce_lr"]], ids=str)
def test_what_goes_astray_while_all_is_let_go_of_takes_the_next_after_its_patience(ladder, patience):
    thing = Steps() if "rollback" in ladder else None
    monitor, live, begin = ending(patience=patience, ladder=ladder, thing=thing)
    loss, rates = 9.0, []
    for step in range(begin, begin + 60):
        if thing is not None:
            thing.began_step = step
        loss = min(loss * 2, 1e9) if step >= begin + 14 else loss
        monitor.observe(step, loss=loss)
        rates.append(factor_of(live))
    assert any(later < one for one, later in itertools.pairwise(rates)), "one was taken"
    assert max(rates) <= 1 / 8


def test_what_is_taken_while_all_is_let_go_of_has_its_own_time_and_the_rest_goes_on_behind_it():
    monitor, _, begin = ending(patience=3, quiet_steps=30)
    for step in range(begin, begin + 200):
        monitor.observe(step, loss=99.0 if begin + 32 <= step < begin + 36 else 9.0)
    (taken,) = [alert.step for alert in monitor.report().alerts if alert.is_taken and alert.step > begin]
    left = [release.step for release in monitor.report().releases if release.step >= begin]
    before, (own, *rest) = [one for one in left if one <= taken], [one for one in left if one > taken]
    assert [later - one for one, later in itertools.pairwise(before)] == [5] * (len(before) - 1)
    assert own - taken >= 2 * 30, "twice as long, as what had to be taken again"
    assert [later - one for one, later in itertools.pairwise([own, *rest])] == [5] * len(rest)
    assert len(before) + len(rest) == 10
    assert monitor.in_effect == ()


@pytest.mark.parametrize("num_steps", [4, 6, 8, 12, 30])
def test_workers_that_come_and_go_hold_up_nothing_that_is_let_go_of(num_steps):
    monitor, live, begin = ending()
    for step in range(begin, begin + 120):
        monitor.observe(step, worker=f"worker-{step // num_steps}", loss=9.0)
    assert factor_of(live) == 1.0


def test_steps_in_the_range_while_all_is_let_go_of_are_none_without_anything_in_effect():
    """So that what comes back soon after is let go of as late as it would be."""
    monitor, live, begin = ending(quiet_steps=40, patience=3)
    state = monitor.state_dict()
    state["course"]["judge"]["standing"]["relapses"] = 1
    monitor.load_state_dict(state)
    left = []
    for step in range(begin, begin + 300):
        monitor.observe(step, loss=9.0)
        if factor_of(live) == 1.0:
            left.append(monitor.state_dict()["course"]["judge"]["standing"]["relapses"])
    assert left.count(1) == 2 * 40
    assert left[-1] == 0


def test_how_often_a_lost_model_was_gone_back_from_is_forgotten_as_remedies_are_let_go_of():
    thing, model = Steps(), net()
    monitor, live, begin = ending(ladder=["rollback", "reduce_lr"], thing=thing, model=model)
    finite = [value.clone() for value in model.state_dict().values()]

    def rollback(step):
        if needed[0] > 0:
            needed[0] -= 1
        else:
            with torch.no_grad():
                for value, was in zip(model.state_dict().values(), finite, strict=True):
                    value.copy_(was)
        return step

    needed, thing.rollback = [2], rollback
    for step in range(begin, begin + 300):
        thing.began_step = step
        if step in (begin + 20, begin + 200):
            model[0].weight.data.fill_(math.nan)
            needed[0] = 2
        is_lost = not all(value.isfinite().all() for value in model.state_dict().values())
        monitor.observe(step, loss=math.nan if is_lost else 9.0)
        if step == begin + 199:
            assert not is_lost
            assert factor_of(live) == 1.0
    assert not is_lost


def test_a_step_with_an_alert_while_all_is_let_go_of_is_none_in_the_range():
    """So that a model which is lost then is brought back once, and no further for what a worker has still."""
    thing, model = Steps(), net()
    monitor, _, begin = ending(ladder=["rollback", "reduce_lr"], thing=thing, model=model)
    num_went = len(thing.went)
    for step in range(begin, begin + 22):
        thing.began_step = step
        if step == begin + 20:
            model[0].weight.data.fill_(math.nan)
        monitor.observe(step, loss=9.0 if step < begin + 20 else math.nan)
    assert len(thing.went) == num_went + 1
