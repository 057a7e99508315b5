"""The remedy "rollback" of a `FaultTolerantTrainer`'s run: where it leads, and what is said of it."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import AsyncTrainingMonitor
from offbeat.errors import ConfigError
from offbeat.recovery.directory import entries, names
from offbeat.recovery.files import read
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import waited
from support.goes_back import GoesFurther, KeepsNothing, Steps
from support.small_run import LOSS, STEPS, batches, net


@pytest.fixture(autouse=True)
def _waited(monkeypatch):
    """Which checkpoints there are is then the same each time."""
    monkeypatch.setattr(Saver, "save", waited(Saver.save))


def blown(at, factor=math.nan):
    """Give an optimizer whose steps with these numbers spoil the parameters."""

    def made(parameters):
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        count = iter(range(1, 10_000))

        def spoil(*_):
            if next(count) in at:
                with torch.no_grad():
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.mul_(factor)

        optimizer.register_step_post_hook(spoil)
        return optimizer

    return made


def watched(
    folder,
    *,
    ladder="rollback",
    at=(13,),
    wrap=lambda module: module,
    metrics=("loss",),
    factor=math.nan,
    frequency=5,
    **keywords,
):
    model = net()
    trainer = FaultTolerantTrainer(wrap(model), folder, checkpoint_frequency=frequency)
    how = {"patience": 1, "warm_up": 8} | {k: keywords.pop(k) for k in ("patience",) if k in keywords}
    monitor = AsyncTrainingMonitor(model, list(metrics), remediation_strategy=ladder, **how)
    given = {"dataloader": batches(), "optimizer": blown(at, factor)(model.parameters()), "loss_fn": LOSS}
    trainer.train(**given | keywords)
    return trainer, monitor


def results(monitor):
    return [(alert.step, alert.action, alert.result) for alert in monitor.report().alerts]


@pytest.mark.parametrize("wrap", [lambda module: module, offbeat.AsyncTrainer], ids=["module", "trainer"])
def test_a_monitor_finds_the_trainer_and_goes_back_to_before_the_alert(wrap, tmp_path):
    trainer, monitor = watched(tmp_path, wrap=wrap)
    assert results(monitor) == [(14, "rollback", "went back to step 10")]
    assert (trainer.history.steps, trainer.history.skipped) == (STEPS, 1)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert trainer.history.first_non_finite is None  # that batch is in no mean
    assert all(e.manifest.is_good for e in entries(tmp_path))


def test_a_step_that_a_loss_scale_skips_is_gone_back_from_as_well(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer, monitor = watched(tmp_path, grad_scaler=scaler)
    assert [result for _, _, result in results(monitor)] == ["went back to step 10"]
    assert (trainer.history.steps, trainer.history.skipped) == (STEPS - 1, 1)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert scaler.get_scale() == 8.0


def test_it_goes_further_back_when_taken_again_and_never_to_the_step_of_the_alert(tmp_path):
    # The checkpoint of step 15 has the very values that the alert is about.
    trainer, monitor = watched(tmp_path, at=(15, 17, 19))
    found = [(step, result) for step, action, result in results(monitor)]
    assert found[:2] == [(16, "went back to step 10"), (18, "went back to step 5")]
    assert found[2] == (20, "went back to step 5")  # where none is older, once more to the same
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def test_what_is_observed_when_the_step_is_made_is_of_the_values_before_it(tmp_path):
    class Observes:
        monitor = None

        def on_step(self, trainer, step):
            if step.step == 11:  # the checkpoint of step 10 has the values of its loss
                (alert,) = self.monitor.observe(step.step, loss=math.nan)
                said.append(alert.result)

    said = []
    callback = Observes()
    outer = FaultTolerantTrainer(offbeat.AsyncTrainer(net(), callbacks=[callback]), tmp_path, 5)
    callback.monitor = AsyncTrainingMonitor(remediation_strategy="rollback", acts_on=outer, patience=1)
    outer.train(dataloader=batches(12), optimizer=blown(())(outer.model.parameters()), loss_fn=LOSS)
    assert said == ["went back to step 5"]


def test_a_model_that_is_lost_again_goes_back_to_what_was_kept_in_between(tmp_path):
    # By then nothing is kept that is as old as what it went back to before; to have patience would not help.
    trainer, monitor = watched(tmp_path, at=(13, 43), patience=5, dataloader=batches(60))
    found = [(step, result) for step, _, result in results(monitor)]
    assert found == [(14, "went back to step 10"), (44, "went back to step 40")]
    assert monitor.in_effect == ("rollback",)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def test_however_often_a_model_is_lost_it_is_brought_back(tmp_path):
    lost = (13, 15, 17, 19, 21, 33)
    trainer, monitor = watched(tmp_path, at=lost, patience=5, dataloader=batches(60))
    found = [(step, result) for step, _, result in results(monitor)]
    assert [step for step, _ in found] == [step + 1 for step in lost]
    assert [result for _, result in found] == [
        "went back to step 10",
        *["went back to step 5"] * 4,  # the loss of one matter, so that it is never forward
        "went back to step 30",
    ]
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def test_what_was_kept_after_the_matter_began_is_better_than_a_model_that_is_lost(tmp_path):
    _, monitor = watched(tmp_path, at=(13, 17), patience=5, frequency=1)
    (_, first), (_, refused), (_, second) = [(step, result) for step, _, result in results(monitor)]
    assert first == "went back to step 12"
    assert "no checkpoint is left that is as old as step 12" in refused
    assert second == "went back to step 16"


def test_a_rollback_that_could_not_be_done_is_tried_at_the_next_occurrence(tmp_path):
    data = batches(60)
    data[2][0][0] = math.nan  # of which the parameters stay finite
    trainer, monitor = watched(tmp_path, at=(33,), patience=5, dataloader=data)
    (_, failed), (step, result) = [(step, result) for step, _, result in results(monitor)]
    assert "could not be done" in failed
    assert (step, result) == (34, "went back to step 30")
    assert [alert.is_taken for alert in monitor.report().alerts] == [False, True]
    assert monitor.in_effect == ("rollback",)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def test_where_nothing_is_kept_yet_that_is_told_and_the_gradient_is_dropped(tmp_path):
    _, monitor = watched(tmp_path, at=(3,), max_steps=4)
    (alert,) = monitor.report().alerts
    assert "could not be done" in alert.result
    assert "has no checkpoint yet to go back to: the first one is written after 5 steps" in alert.result


def test_where_nothing_trains_that_is_told(tmp_path):
    model = net()
    trainer = FaultTolerantTrainer(model, tmp_path)
    with AsyncTrainingMonitor(model, remediation_strategy="rollback") as monitor:
        (alert,) = monitor.observe(1, loss=math.nan)
    assert "the FaultTolerantTrainer goes back while it trains, which it does not now" in alert.result
    assert not trainer.is_training


@pytest.mark.parametrize(
    "wrap", [offbeat.AsyncModelAverager, functools.partial(offbeat.AsyncTrainer, strategy="bmuf")]
)
def test_a_trainer_whose_model_is_others_as_well_is_not_found(wrap, tmp_path):
    model = net()
    trainer = FaultTolerantTrainer(wrap(model), tmp_path)
    with pytest.raises(ConfigError, match=r"'rollback', which has nothing to act on.*whose model is its own"):
        AsyncTrainingMonitor(model, remediation_strategy="rollback")
    with pytest.raises(ConfigError, match="FaultTolerantTrainer will not do"):
        AsyncTrainingMonitor(model, remediation_strategy="rollback", acts_on=trainer)


def test_of_two_trainers_of_a_model_that_goes_back_which_trains(tmp_path):
    model = net()
    before = FaultTolerantTrainer(model, tmp_path / "before")
    trainer = FaultTolerantTrainer(model, tmp_path / "now", checkpoint_frequency=5)
    monitor = AsyncTrainingMonitor(model, remediation_strategy="rollback")
    optimizer = blown((13,))(model.parameters())
    trainer.train(dataloader=batches(), optimizer=optimizer, loss_fn=LOSS, max_steps=20)
    assert results(monitor) == [(14, "rollback", "went back to step 10")]
    assert before.history.steps == 0


def test_a_batch_that_is_dropped_after_it_leaves_the_buffers_that_were_gone_back_to(tmp_path):
    data = batches()
    data[14][0][0] = math.nan  # the first batch after it
    _, monitor = watched(tmp_path, dataloader=data, max_steps=15, ladder=["rollback", "reject"])
    assert results(monitor)[0] == (14, "rollback", "went back to step 10")
    (folder,) = tmp_path.glob("save-*-step-10")
    trainer, _ = read(folder)
    now, _ = read(tmp_path / names(tmp_path)[0])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(now[name], trainer[name]), name


def test_the_way_back_is_no_update_whose_size_raises_an_alert(tmp_path):
    _, monitor = watched(tmp_path, metrics=("loss", "update_ratio"), at=(13,))
    assert [step for step, *_ in results(monitor) if step > 15] == []


def test_what_was_before_the_first_alert_is_known_to_the_next_life(tmp_path):
    def go(folder, cuts):
        for max_steps in (*cuts, STEPS):
            # The numbers of its steps begin anew in each life.
            done = entries(folder)[0].manifest.step if folder.is_dir() and entries(folder) else 0
            _, monitor = watched(
                folder,
                ladder=["alert", "rollback"],
                at=() if done >= 13 else (13 - done,),
                factor=1000.0,
                patience=6,
                max_steps=max_steps,
            )
        went = [result for _, _, result in results(monitor) if "went back" in result]
        return went, str(monitor.state_dict())  # in which NaN is NaN

    whole = go(tmp_path / "whole", ())
    assert whole[0] == ["went back to step 10"]
    assert go(tmp_path / "cut", (18,)) == whole


def test_where_parameters_are_lost_the_advice_is_to_put_it_on_the_ladder(tmp_path):
    _, monitor = watched(tmp_path, ladder="reduce_lr", at=(13,))
    said = [result for _, _, result in results(monitor) if "not finite" in result]
    assert said
    assert 'put "rollback" on the ladder' in said[0]


def hot(folder, ladder, *, cooled_at=72):
    """Train at a rate that makes parameters so large, from step 60 on, that no loss is finite; they are."""

    class Sets:
        def on_step(self, trainer, step):
            if step.step in (60, cooled_at):
                optimizer.param_groups[0]["lr"] = 5.0 if step.step == 60 else 0.01

    inputs = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.arange(10.0).reshape(10, 1)
    torch.manual_seed(0)
    layers = [nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inner = offbeat.AsyncTrainer(model, callbacks=Sets())
    trainer = FaultTolerantTrainer(inner, folder, 20, deterministic=True)
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, pause_timeout_s=0.01)
    data = torch.utils.data.TensorDataset(inputs, targets)
    trainer.train(dataset=data, epochs=5, optimizer=optimizer, loss_fn=nn.MSELoss(), log_frequency=1000)
    with torch.no_grad():
        return trainer, monitor, nn.MSELoss()(model(inputs), targets).item()


@pytest.mark.parametrize(
    "ladder",
    [
        ["rollback", "reduce_lr"],
        ["rollback", "pause"],
        ["rollback", "reduce_lr", "pause"],
        ["rollback", "alert"],
        ["alert", "rollback", "reduce_lr"],
    ],
    ids="-".join,
)
def test_a_model_that_is_lost_behind_a_rollback_goes_back_as_where_that_is_all_there_is(ladder, tmp_path):
    _, _, wanted = hot(tmp_path / "alone", ["rollback"])
    trainer, monitor, loss = hot(tmp_path / "ladder", ladder)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert wanted < 20.0
    assert loss < 2.0 * wanted  # a rate that was reduced is so for a while; the data's variance is 285
    assert trainer.history.skipped < 20
    went = [
        result.rpartition("went back to ")[2] for _, _, result in results(monitor) if "went back" in result
    ]
    assert list(dict.fromkeys(went)) == ["step 60", "step 40", "step 20"]
    said = next(result for _, _, result in results(monitor) if "once more" in result)
    assert said.endswith('; "rollback" once more: went back to step 40')


def test_where_it_was_gone_back_in_vain_that_is_said_with_what_helps_and_no_rate_is_cut_for_it(
    tmp_path, caplog
):
    trainer, monitor, _ = hot(tmp_path, ["rollback", "reduce_lr"], cooled_at=None)
    assert trainer.history.skipped > 200
    assert monitor.in_effect == ("rollback", "reduce_lr", "reduce_lr")
    assert "in effect: rollback, reduce_lr x2;" in repr(monitor.report())
    (said,) = (result for _, _, result in results(monitor) if "in vain" in result)
    (long,) = (r.getMessage() for r in caplog.records if "no gradient has passed" in r.getMessage())
    for words in (said, long):
        assert "where the data is sound" in words
        assert "call trainer.rollback() from a callback" in words
        assert "recovery_strategy='last_good'" in words
        assert "with a lower learning rate" in words
    assert "monitor.reset()" not in long
    assert "dropped by what is in effect (rollback, reduce_lr x2)" in long


class GoesBackInVain:
    num_calls = 0

    def rollback(self, version=None):
        self.num_calls += 1
        return "what is lost as well"


def test_parameters_that_stay_lost_beside_a_pause_go_back_three_times_in_all_and_that_is_said_once():
    model, thing, told = net(), GoesBackInVain(), []
    ladder, given = ["rollback", "pause"], {"patience": 2, "warm_up": 5, "pause_timeout_s": 0.01}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, acts_on=thing, **given)
    for step in range(10):
        monitor.observe(step, loss=1.0)
    model[0].weight.data.fill_(math.nan)
    went = []
    for step in range(10, 40):
        before = thing.num_calls
        told += [alert.result for alert in monitor.observe(step, loss=math.nan)]
        went += [step] * (thing.num_calls - before)
    assert went == [10, 12, 14]
    (said,) = (result for result in told if "in vain" in result)
    assert "start again from a checkpoint" in said


def test_finite_values_that_stay_out_of_range_after_the_last_rollback_are_said_to_once():
    thing, told = GoesBackInVain(), []
    given = {"patience": 3, "warm_up": 5, "acts_on": thing}
    monitor = AsyncTrainingMonitor(remediation_strategy=["alert", "rollback"], **given)
    for step in range(10):
        monitor.observe(step, loss=1.0)
    for step in range(10, 60):
        told += [(step, alert.result) for alert in monitor.observe(step, loss=50.0)]
    assert thing.num_calls == 3
    ((step, said),) = ((step, result) for step, result in told if "in vain" in result)
    assert step == 10 + 4 * 3, "when it has had its patience"
    assert "where such values are right from now on, monitor.reset() learns them; where the model" in said
    assert "start again from a checkpoint" in said
    assert "with a lower learning rate" in said


def test_batches_that_are_not_finite_one_after_the_other_with_sound_ones_between_lead_no_further_back():
    model, thing = net(), GoesBackInVain()
    ladder, given = ["rollback", "alert"], {"patience": 2, "warm_up": 5}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, acts_on=thing, **given)
    for step in range(100):
        monitor.observe(step, loss=math.nan if step > 10 and step % 3 else 1.0)
    assert thing.num_calls == 1


def test_a_rollback_that_could_not_be_done_is_tried_again_behind_others_where_the_model_is_lost():
    model, thing = net(), GoesBackInVain()
    can = thing.rollback
    thing.rollback = lambda version=None: (_ for _ in ()).throw(OSError("not now"))
    ladder, given = ["rollback", "reduce_lr"], {"patience": 2, "warm_up": 5}
    live = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, acts_on=[thing, live], **given)
    for step in range(10):
        monitor.observe(step, loss=1.0)
    for step in range(10, 13):
        monitor.observe(step, loss=math.nan)
    thing.rollback = can
    for step in range(13, 20):
        monitor.observe(step, loss=math.nan)
    assert thing.num_calls >= 1
    assert "rollback" in monitor.in_effect


def test_batches_that_are_not_finite_lead_back_once_and_cut_the_rate_once_where_no_gradient_passes(tmp_path):
    """What was gone back to is good, so that it is the data that is broken, and no remedy helps that."""
    inputs = torch.randn(60 * 8, 4, generator=torch.Generator().manual_seed(0))
    inputs[30 * 8 : 50 * 8] = math.nan
    model = net()
    live = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = FaultTolerantTrainer(model, tmp_path, checkpoint_frequency=5)
    monitor = AsyncTrainingMonitor(
        model, remediation_strategy=["rollback", "reduce_lr"], patience=2, acts_on=[trainer, live]
    )
    data = TensorDataset(inputs, inputs.nan_to_num()[:, :1])
    trainer.train(
        dataloader=DataLoader(data, batch_size=8),
        optimizer=live,
        loss_fn=lambda outputs, targets: (outputs[:, :1] - targets).square().mean(),
    )
    assert monitor._course.num_taken == {"rollback": 1, "reduce_lr": 1}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_where_gradients_are_not_heard_of_a_model_that_breaks_again_later_goes_back_again():
    model, thing = net(), GoesBackInVain()
    ladder, given = ["rollback", "alert"], {"patience": 2, "warm_up": 5, "quiet_steps": 1000}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, acts_on=thing, **given)
    for step in range(300):
        monitor.observe(step, loss=math.nan if step in (100, *range(200, 210)) else 1.0)
    assert thing.num_calls > 1


def astray(losses, *, state_at=(), ladder=("rollback", "reduce_lr")):
    """Observe losses beside a rollback and a learning rate, in another process from some steps on."""
    model, thing = net(), Steps(num_kept=3)
    live = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"patience": 2, "warm_up": 5, "quiet_steps": 1000, "acts_on": [thing, live][: len(ladder)]}

    def made():
        return AsyncTrainingMonitor(model, remediation_strategy=list(ladder), **given)

    monitor = made()
    for step, loss in enumerate(losses):
        thing.began_step = step
        if step in state_at:
            state = monitor.state_dict()
            monitor.close()
            monitor = made()
            monitor.load_state_dict(state)
        monitor.observe(step, loss=loss)
    return thing.went


@pytest.mark.parametrize("state_at", [(), (46,), (48,), (76,), (46, 48, 76, 78)])
def test_a_lower_rate_begins_where_it_went_before_or_of_a_new_matter_at_what_was_kept_before_that(state_at):
    losses = [1.0] * 100
    losses[45:52] = [9.0, 1.0, 9.0, 9.0, 1.0, 9.0, 9.0]  # a rollback at the first; each two cut the rate
    losses[75:80] = [
        9.0,
        9.0,
        1.0,
        9.0,
        9.0,
    ]  # likewise, of a matter that is new, whose first alert goes back to nothing
    assert astray(losses, state_at=state_at) == [40, 40, 40, 70, 70]


@pytest.mark.parametrize("state_at", [(), (46,), (48,), (46, 48, 50)])
def test_what_was_astray_already_is_gone_back_from_further(state_at):
    losses = [1.0] * 100
    losses[45:50] = [9.0] * 5  # of no checkpoint that was gone to is any in the range
    assert astray(losses, state_at=state_at) == [40, 30, 20]
    losses[48] = 1.0  # of one it is, and that is stayed at
    losses[50] = 9.0
    assert astray(losses, state_at=state_at) == [40, 30, 30]


def test_what_does_not_tell_where_it_went_is_not_gone_back_to_once_more_with_each_lower_rate():
    model, thing = net(), GoesFurther()
    live = torch.optim.SGD(model.parameters(), lr=1.0)
    ladder, given = ["rollback", "reduce_lr"], {"patience": 2, "warm_up": 5, "acts_on": [thing, live]}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, **given)
    for step in range(100):
        monitor.observe(step, loss=9.0 if step >= 80 else 1.0)
    assert thing.num_calls == 1
    assert monitor.in_effect.count("reduce_lr") > 3


class Unreachable(GoesFurther):
    """What it keeps is known where it can be reached."""

    is_there = True

    @property
    def keeps_checkpoints(self):
        if not self.is_there:
            raise ConnectionError("nobody answers")
        return True


def test_what_cannot_be_asked_whether_it_goes_back_costs_no_other_remedy_and_no_training():
    model, thing = net(), Unreachable()
    live = torch.optim.SGD(model.parameters(), lr=1.0)
    ladder, given = ["rollback", "reduce_lr"], {"patience": 2, "warm_up": 5, "acts_on": [thing, live]}
    monitor = AsyncTrainingMonitor(model, remediation_strategy=ladder, quiet_steps=10, **given)
    for step in range(150):
        thing.is_there = not 42 <= step < 60
        monitor.observe(step, loss=9.0 if 40 <= step < 50 else 1.0)
        if step == 49:
            assert monitor.in_effect == ("rollback", *["reduce_lr"] * 4)
    assert monitor.in_effect == ()
    assert thing.num_calls == 1


def cut_at(thing, ladder, *, ends_at=None):
    """Give the steps at which the rate was cut, of alerts from step 30 on; from one on in another process."""
    live = torch.optim.SGD(net().parameters(), lr=1.0)
    acts_on = [live] if thing is None else [thing, live]
    given = {"patience": 2, "warm_up": 10, "acts_on": acts_on, "remediation_strategy": ladder}
    monitor, cuts = AsyncTrainingMonitor(**given), []
    for step in range(300):
        if step == ends_at:
            state = monitor.state_dict()
            monitor.close()
            monitor = AsyncTrainingMonitor(**given)
            monitor.load_state_dict(state)
        if thing is not None:
            thing.began_step = step
        alerts = monitor.observe(step, loss=9.0 if step >= 30 else 1.0)
        cuts += [step for alert in alerts if alert.is_taken and alert.action == "reduce_lr"]
    return cuts


@pytest.mark.parametrize("ends_at", [None, 31, 45])
def test_a_rate_beside_a_rollback_that_finds_no_checkpoint_is_cut_no_sooner_than_alone(ends_at):
    """Else a run that has none yet is at a thousandth of its rate when a fault has barely begun."""
    alone = cut_at(None, ["reduce_lr"])
    cuts = cut_at(KeepsNothing(), ["rollback", "reduce_lr"], ends_at=ends_at)
    assert len(cuts) == len(alone) == 10
    assert [step - cuts[0] for step in cuts] == [step - alone[0] for step in alone]
    kept = cut_at(Steps(num_kept=3), ["rollback", "reduce_lr"], ends_at=ends_at)
    assert [later - step for step, later in itertools.pairwise(kept)] == [2] * 9


def test_where_what_was_gone_to_is_no_longer_kept_it_is_gone_to_what_is():
    """What is kept is what was good, and worth more than what has gone astray with a lower rate alone."""
    losses = [1.0] * 45 + [9.0, 9.0, 1.0, 1.0] * 12
    went = astray(losses)
    assert went[:5] == [40] * 5
    assert went[-1] > 40


def test_alerts_far_from_one_another_go_back_once_and_lose_nothing_by_a_lower_rate():
    losses = [1.0] * 200
    losses[45::20] = [9.0] * len(losses[45::20])
    assert astray(losses) == [40]


def test_where_nothing_comes_behind_it_it_goes_further_back_while_an_alert_persists_and_not_for_another():
    losses = [1.0] * 100
    losses[45:48] = [9.0] * 3
    assert astray(losses, ladder=["rollback"]) == [40, 30]
    losses[75] = losses[95] = 9.0  # each a matter of its own, of which two have been waited for
    assert astray(losses, ladder=["rollback"]) == [40, 30, 90]
