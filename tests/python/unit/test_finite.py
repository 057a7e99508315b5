"""What trains on with a loss or parameters that are not finite is told of once, and in the history."""

import itertools
import json
import logging
import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import NonFiniteError
from offbeat.history import History
from offbeat.local.finite import Finiteness
from support.small_net import net

BATCHES = [(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 20
KINDS = ["local", "average", "fault_tolerant", "around"]
GO_ON = ["local", "fault_tolerant", "around"]
"""Those that go on with parameters that are not finite, of which there would be no mean."""


class Loss:
    """Cross entropy, of whose batches some are multiplied by what is not finite."""

    def __init__(self, *bad, factor=math.nan):
        self._loss = nn.CrossEntropyLoss()
        self._bad, self._factor, self._num = bad, factor, 0

    def __call__(self, outputs, targets):
        self._num += 1
        loss = self._loss(outputs, targets)
        return loss * self._factor if self._num in self._bad else loss


def train(kind, model, folder, loss_fn, batches=BATCHES, **keywords):
    if kind in ("fault_tolerant", "around"):
        trained = offbeat.AsyncTrainer(model) if kind == "around" else model
        trainer, more = offbeat.FaultTolerantTrainer(trained, checkpoint_dir=folder), {}
    else:
        trainer, more = offbeat.AsyncTrainer(model, strategy=kind), {"progress": False}
    return trainer.train(
        dataloader=batches, loss_fn=loss_fn, optimizer=optim.SGD(lr=0.1), log_frequency=5, **more, **keywords
    )


def warned(caplog):
    return [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "finite" in r.getMessage()
    ]


@pytest.mark.parametrize("kind", GO_ON)
def test_parameters_that_become_nan_are_told_of_once_with_the_step_and_the_remedy(kind, tmp_path, caplog):
    history = train(kind, net(), tmp_path, Loss(8))
    assert history.stopped == "epochs"
    assert history.first_non_finite == 8
    (said,) = warned(caplog)
    assert "at step 8 the loss is nan, and parameters are not finite, 0.weight" in said
    assert "AsyncTrainingMonitor(model, remediation_strategy=" in said
    assert "recovery_strategy='last_good'" in said
    assert json.loads(history.to_json())["first_non_finite"] == 8


@pytest.mark.parametrize("kind", GO_ON)
def test_running_statistics_that_become_infinite_are_told_of_once_with_what_mends_them(
    kind, tmp_path, caplog
):
    """A batch of huge inputs leaves the loss finite, and all later ones."""
    model = nn.Sequential(nn.BatchNorm1d(4), *net())
    batches = [(inputs.clone(), targets) for inputs, targets in BATCHES]
    batches[2][0][0] = 1e30
    history = train(kind, model, tmp_path, nn.CrossEntropyLoss(), batches)
    assert history.first_non_finite is None
    (said,) = warned(caplog)
    assert (
        "running statistics are not finite, 0.running_var, as after a batch of huge inputs, or of NaN" in said
    )
    assert "reset_running_stats()" in said


def test_running_statistics_that_were_mended_are_told_of_once_more(tmp_path, caplog):
    model = nn.Sequential(nn.BatchNorm1d(4), *net())
    batches = [(inputs.clone(), targets) for inputs, targets in BATCHES]
    for number in (2, 13):
        batches[number][0][0] = 1e30

    num = itertools.count(1)

    def mend(*_):
        if next(num) == 7:
            model[0].reset_running_stats()

    model.register_forward_pre_hook(mend)
    train("local", model, tmp_path, nn.CrossEntropyLoss(), batches)
    assert [text.split(" running ")[0] for text in warned(caplog)] == ["at step 5", "at step 15"]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_to_be_infinite_or_is_frozen_is_nothing_to_tell_of(is_frozen, tmp_path, caplog):
    model = net()
    if is_frozen:
        model.append(norm := nn.BatchNorm1d(2))
        norm.running_var.fill_(math.inf)
        norm.train = lambda mode: norm  # as who fine-tunes lets it be
        norm.training = False
    else:
        model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    train("fault_tolerant", model, tmp_path, nn.CrossEntropyLoss())
    assert warned(caplog) == []


def test_where_they_would_be_averaged_it_is_an_error(tmp_path):
    with pytest.raises(NonFiniteError, match=r"were not finite in iteration .*, so there is nothing"):
        train("average", net(), tmp_path, Loss(8))


@pytest.mark.parametrize("kind", GO_ON)
def test_what_only_the_last_step_has_ruined_is_told_of_at_the_end(kind, tmp_path, caplog):
    model = net()
    for parameter in model.parameters():  # the loss is finite, and its gradient is not
        parameter.register_hook(lambda gradient: gradient * math.nan)
    history = train(kind, model, tmp_path, Loss(), BATCHES[:1])
    assert history.first_non_finite == 1
    (said,) = warned(caplog)
    assert "training has ended at step 1, and parameters are not finite" in said


@pytest.mark.parametrize("kind", GO_ON)
def test_where_a_monitor_drops_all_since_the_step_that_met_such_parameters_is_known(kind, tmp_path, caplog):
    model = net()

    def loss_fn(outputs, targets, num=[0]):  # noqa: B006  counts the calls
        num[0] += 1
        if num[0] == 8:
            nn.init.constant_(model[0].weight, math.nan)  # which the next batch meets
        return nn.functional.cross_entropy(outputs, targets)

    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5):
        history = train(kind, model, tmp_path, loss_fn)
    assert (history.steps, history.skipped, history.first_non_finite) == (20, 12, 9)
    said = warned(caplog)[-1]
    assert "training has ended at step 20, and parameters are not finite since step 9, 0.weight" in said
    assert "remediation_strategy='reject'" not in said
    assert 'put "rollback" behind its remedies' in said


@pytest.mark.parametrize("numbers", ["its own", "a caller's"])
@pytest.mark.parametrize("kind", ["local", "around"])
def test_that_step_is_one_of_this_train_however_a_monitor_counts(kind, numbers, tmp_path, caplog):
    model = net()
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        train(kind, model, tmp_path / "first", Loss())
        if numbers == "a caller's":
            monitor.observe(5000, loss=1.0)

        def loss_fn(outputs, targets, num=[0]):  # noqa: B006  counts the calls
            num[0] += 1
            if num[0] == 8:
                nn.init.constant_(model[0].weight, math.nan)
            return nn.functional.cross_entropy(outputs, targets)

        history = train(kind, model, tmp_path / "second", loss_fn)
    assert (history.steps, history.skipped, history.first_non_finite) == (20, 12, 9)
    said = warned(caplog)[-1]
    assert "training has ended at step 20, and parameters are not finite since step 9, 0.weight" in said


def test_a_batch_that_was_skipped_before_for_another_reason_is_not_that_step():
    model, history = net(), History()
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        seen = Finiteness(model, history, remedy="do something")
        for step in range(1, 9):
            history.steps = step
            if step == 7:
                nn.init.constant_(model[0].weight, math.nan)
            is_bad = step in (2, 6, 7, 8)
            monitor.observe(step, loss=math.nan if is_bad else 1.0)
            if is_bad:
                seen.skip(step)
            else:
                seen.add(torch.tensor(1.0), step)
        seen.end()
    assert history.first_non_finite == 7


@pytest.mark.parametrize("kind", KINDS)
def test_where_all_is_finite_nothing_is_said(kind, tmp_path, caplog):
    assert train(kind, net(), tmp_path, Loss()).first_non_finite is None
    assert warned(caplog) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_monitor_has_told_of_and_dropped_is_not_told_of_again(kind, tmp_path, caplog):
    model = net()
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5):
        history = train(kind, model, tmp_path, Loss(8, 9))
    assert (history.first_non_finite, history.skipped) == (None, 2)
    assert not any("parameters are" in said for said in warned(caplog))


def test_a_batch_that_a_loss_scale_skips_is_not_told_of(tmp_path, caplog):
    trainer = offbeat.FaultTolerantTrainer(net(), checkpoint_dir=tmp_path)
    history = trainer.train(
        dataloader=BATCHES,
        loss_fn=Loss(8, factor=math.inf),
        optimizer=optim.SGD(lr=0.1),
        grad_scaler=torch.amp.GradScaler("cpu"),
    )
    assert (history.skipped, history.first_non_finite) == (1, None)
    assert warned(caplog) == []


def test_a_run_that_goes_on_knows_it(tmp_path, caplog):
    train("fault_tolerant", net(), tmp_path, Loss(8))
    history = train("fault_tolerant", net(), tmp_path, Loss(), epochs=2)
    assert (history.steps, history.first_non_finite) == (40, 8)
    _, start, said = warned(caplog)  # each start that trains on such parameters, and what it goes on from
    assert start.startswith("parameters are not finite in ")
    assert said.startswith("at step 21 the loss is nan, and parameters are not finite")


def test_a_nan_that_left_the_parameters_whole_is_told_of_and_a_later_one_that_does_not_too(caplog):
    model, history = net(), History()
    seen = Finiteness(model, history, remedy="do something")
    for step, loss in enumerate([1.0, math.nan, math.inf], 1):
        seen.add(torch.tensor(loss), step)
    seen.look()
    seen.add(torch.tensor(math.nan), 4)
    seen.look()
    (said,) = warned(caplog)
    assert said == (
        "at step 2 the loss is nan, and the parameters are finite: training goes on; look at the inputs and "
        "targets of that batch; do something"
    )
    with torch.no_grad():
        model[0].bias.fill_(math.inf)
    seen.add(torch.tensor(math.inf), 5)
    seen.end()
    seen.end()
    (_, said) = warned(caplog)
    assert said == (
        "at step 5 the loss is inf, and parameters are not finite, 0.bias: what is trained from there on "
        "learns nothing; do something"
    )
    assert history.first_non_finite == 2


def test_of_a_thousand_losses_that_nobody_has_looked_at_one_that_is_not_finite_is_told_of(caplog):
    history = History()
    seen = Finiteness(net(), history, remedy="do something")
    for step in range(1, 1001):
        seen.add(torch.tensor(math.nan if step == 3 else 1.0), step)
    (said,) = warned(caplog)
    assert said.startswith("at step 3 the loss is nan")
    assert history.first_non_finite == 3


def test_a_loss_is_waited_for_when_it_is_looked_at_and_not_before():
    class Waits(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert function not in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__)
            return super().__torch_function__(function, types, args, kwargs or {})

    seen = Finiteness(net(), History(), remedy="")
    seen.add(torch.tensor(1.0).as_subclass(Waits), 1)
    with pytest.raises(AssertionError):
        seen.look()
