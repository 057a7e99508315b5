"""A monitor that goes on after a restart: by the same ranges, and with what was in effect."""

import io
import json
import math

import pytest
import torch

from offbeat import AsyncTrainingMonitor
from offbeat.errors import ClosedError, ConfigError
from offbeat.local.lr_scale import factor_of
from support.small_net import net

METRICS = ["loss", "loss_variance", "gradient_norm"]


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Serves:
    def __init__(self, *rates):
        self.rates = list(rates)

    def status(self):
        return {"optimizer": {"spec": {"groups": [{"lr": rate} for rate in self.rates]}}}

    def set_lr(self, lr, group=None):
        self.rates[group] = lr


class Worker:
    """One that can be left out, as an `AsyncWorker`."""

    id = "w3"
    is_quarantined = False

    def quarantine(self, worker_id):
        self.is_quarantined = True

    def release(self, worker_id):
        self.is_quarantined = False


def by_json(state):
    return json.loads(json.dumps(state))


def by_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def losses(length):
    """A course with single faults, one that persists, NaN, and long quiet."""
    course = [1.0 + 0.01 * (step % 7) for step in range(length)]
    course[40] = 50.0
    course[60:75] = [30.0] * 15
    course[140:143] = [math.nan] * 3
    return course


def test_a_state_that_does_not_tell_of_which_range_an_alert_was_is_gone_on_from():
    first = AsyncTrainingMonitor(warm_up=5)
    observed(first, [1.0] * 5 + [9.0])
    state = json.loads(json.dumps(first.state_dict()))
    del state["course"]["judge"]["spells"][0][-1]["expected"]
    second = AsyncTrainingMonitor(warm_up=5)
    second.load_state_dict(state)
    observed(second, [1.0] * 12, 6)
    (recovery,) = second.report().recoveries
    assert (recovery.since, recovery.expected) == (5, (1.0, 1.0))
    assert recovery.expected_then == (-math.inf, math.inf)
    assert "(up to 1)" in str(recovery)


def observed(monitor, course, begin=0):
    found = []
    for step, loss in enumerate(course, begin):
        alerts = monitor.observe(step, loss=loss, worker="ab"[step % 2])
        found += [(a.step, a.metric, a.value, a.expected, a.action, a.num) for a in alerts]
        found.append(monitor.in_effect)
    return [str(one) for one in found]  # in which NaN is NaN


def made(thing, **keywords):
    ladder = ["alert", "increase_sync_frequency"]
    return AsyncTrainingMonitor(
        divergence_metrics=["loss", "loss_variance"],
        remediation_strategy=ladder,
        acts_on=thing,
        quiet_steps=10,
        patience=2,
        **keywords,
    )


@pytest.mark.parametrize("way", [by_json, by_torch])
@pytest.mark.parametrize("cut", [0, 3, 20, 26, 41, 63, 66, 75, 90, 141, 150])
def test_a_run_that_was_cut_is_told_and_mended_as_one_that_was_not(way, cut):
    course = losses(600)
    whole = Thing(averaging_frequency=64)
    expected = observed(made(whole), course)
    thing = Thing(averaging_frequency=64)
    first = made(thing)
    found = observed(first, course[:cut])
    kept = way({"monitor": first.state_dict(), "frequency": thing.averaging_frequency})
    del first
    thing = Thing(averaging_frequency=kept["frequency"])
    second = made(thing)
    second.load_state_dict(kept["monitor"])
    assert found + observed(second, course[cut:], cut) == expected
    assert thing.averaging_frequency == whole.averaging_frequency == 64


@pytest.mark.parametrize(
    ("at_restart", "after_load", "in_the_end"),
    [
        (4, 4, 16),  # it came back with a checkpoint
        (16, 4, 16),  # it was made anew
        (5, 5, 5),  # somebody has set it since
    ],
)
def test_a_setting_is_let_go_of_to_what_was_before_the_alert_and_one_that_is_the_user_s_stays(
    at_restart, after_load, in_the_end
):
    thing = Thing(averaging_frequency=16)
    first = AsyncTrainingMonitor(
        remediation_strategy="increase_sync_frequency", acts_on=thing, warm_up=5, patience=1
    )
    for step, loss in enumerate([1.0] * 6 + [9.0] * 2):
        first.observe(step, loss=loss)
    assert thing.averaging_frequency == 4
    state = first.state_dict()
    thing = Thing(averaging_frequency=at_restart)
    second = AsyncTrainingMonitor(
        remediation_strategy="increase_sync_frequency", acts_on=thing, warm_up=5, patience=1
    )
    second.load_state_dict(state)
    assert second.in_effect == ("increase_sync_frequency",) * 2
    assert thing.averaging_frequency == after_load
    second.close()
    assert thing.averaging_frequency == in_the_end


def after_alert(monitor):
    for step, loss in enumerate([1.0] * 6 + [9.0]):
        monitor.observe(step, loss=loss)
    return by_json(monitor.state_dict())


@pytest.mark.parametrize(("at_restart", "in_the_end"), [(0.05, 0.1), (0.1, 0.1), (0.3, 0.3)])
def test_a_servers_rate_is_let_go_of_likewise(at_restart, in_the_end):
    state = after_alert(
        AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=Serves(0.1), warm_up=5)
    )
    server = Serves(at_restart)
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=server, warm_up=5)
    monitor.load_state_dict(state)
    assert server.rates == [0.3 if at_restart == 0.3 else 0.05]
    monitor.close()
    assert server.rates == [in_the_end]


class Trains:
    """A trainer, whose optimizer comes with its first `train`."""

    optimizer = None


def test_an_optimizer_that_comes_later_is_scaled_when_it_is_there_by_what_it_was_scaled_by():
    live = torch.optim.SGD(net().parameters(), lr=0.4)
    first = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=live, warm_up=5, lr_factor=0.3)
    state = after_alert(first)
    assert factor_of(live) == 0.3
    trainer = Trains()
    second = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=trainer, warm_up=5)
    second.load_state_dict(state)
    second.observe(7, loss=1.0)
    trainer.optimizer = torch.optim.SGD(net().parameters(), lr=0.4)
    for step in range(8, 11):
        second.observe(step, loss=1.0)
        assert factor_of(trainer.optimizer) == 0.3  # once, and no more
    second.close()
    assert factor_of(trainer.optimizer) == 1.0
    assert second.report().releases[0].result == "learning rates are divided by 0.3 again: 0.4 now"


def test_a_worker_is_left_out_again_and_takes_part_when_it_is_quiet():
    state = after_alert(AsyncTrainingMonitor(remediation_strategy="quarantine", acts_on=Worker(), warm_up=5))
    worker = Worker()
    monitor = AsyncTrainingMonitor(remediation_strategy="quarantine", acts_on=worker, warm_up=5)
    monitor.load_state_dict(state)
    assert worker.is_quarantined
    monitor.close()
    assert not worker.is_quarantined


def test_a_worker_that_somebody_else_had_left_out_stays_so():
    worker = Worker()
    worker.quarantine("w3")
    monitor = AsyncTrainingMonitor(remediation_strategy="quarantine", acts_on=worker, warm_up=5)
    after_alert(monitor)
    monitor.close()
    assert worker.is_quarantined
    assert monitor.report().releases[0].result == "worker w3 had been left out before, and stays so"


def test_a_rollback_is_not_done_once_more_by_a_restart_and_the_count_goes_on():
    class Keeps:
        calls = 0

        def rollback(self, version=None):
            self.calls += 1
            return "yesterday"

    state = after_alert(AsyncTrainingMonitor(remediation_strategy="rollback", acts_on=Keeps(), warm_up=5))
    keeper = Keeps()
    monitor = AsyncTrainingMonitor(remediation_strategy="rollback", acts_on=keeper, warm_up=5)
    monitor.load_state_dict(state)
    assert monitor.observe(7, loss=9.0)[0].result == "at step 6 it had gone back"
    assert keeper.calls == 0
    assert monitor.report().num_alerts == {"loss": 2}


def test_clip_goes_on_by_the_norms_that_there_were():
    def run(cut):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = AsyncTrainingMonitor(model, ["gradient_norm"], remediation_strategy="clip", warm_up=10)
        for step in range(40):
            if step == cut:
                state = by_torch(monitor.state_dict())
                monitor.close()
                monitor = AsyncTrainingMonitor(
                    model, ["gradient_norm"], remediation_strategy="clip", warm_up=10
                )
                monitor.load_state_dict(state)
            optimizer.zero_grad()
            size = 1 + step % 3 if step not in (20, 30) else 1e4
            (model(torch.ones(2, 4)).sum() * size).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for cut in (7, 15, 25):
        assert all(torch.equal(a, b) for a, b in zip(run(None), run(cut), strict=True))


def test_how_far_the_last_step_has_moved_the_parameters_is_not_lost():
    def life(steps, kept=None):
        """Take steps from there; give the monitor's state, the model's, and the ratios."""
        model = net()
        monitor = AsyncTrainingMonitor(model, ["update_ratio"], warm_up=3)
        if kept is not None:
            model.load_state_dict(kept["model"])
            monitor.load_state_dict(by_json(kept["monitor"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
        kept = {"monitor": monitor.state_dict(), "model": model.state_dict()}
        return kept, monitor.report().series["update_ratio"].values

    whole, ratios = life(9)
    first, before = life(5)
    second, after = life(4, first)
    assert [*before, *after] == ratios
    assert len(ratios) == 8
    assert second["monitor"] == whole["monitor"]


def test_what_is_in_effect_is_let_go_of_before_a_state_is_taken():
    thing = Thing(averaging_frequency=64)
    monitor = AsyncTrainingMonitor(
        remediation_strategy="increase_sync_frequency", acts_on=thing, warm_up=5, patience=1
    )
    fresh = monitor.state_dict()
    after_alert(monitor)
    assert thing.averaging_frequency == 32
    monitor.load_state_dict(fresh)
    assert (thing.averaging_frequency, monitor.in_effect) == (64, ())


def test_what_is_no_state_of_this_monitor_is_refused_and_changes_nothing():
    monitor = AsyncTrainingMonitor(warm_up=5)
    state = after_alert(monitor)
    other = AsyncTrainingMonitor(divergence_metrics=METRICS, remediation_strategy="pause").state_dict()
    with pytest.raises(ConfigError) as refused:
        monitor.load_state_dict(other)
    for said in ("divergence_metrics is ['loss']", "remediation_strategy is ['alert']", "['pause']"):
        assert said in str(refused.value)
    broken = [{}, {**state, "course": {}}, {**state, "norms": None}, {**state, "course": None}, 3]
    broken += [{**state, "course": {**state["course"], "judge": {}}}]
    for wrong in broken:
        with pytest.raises(ConfigError, match="is no state_dict"):
            monitor.load_state_dict(wrong)
    assert by_json(monitor.state_dict()) == state
    monitor.close()
    with pytest.raises(ClosedError):
        monitor.load_state_dict(state)
