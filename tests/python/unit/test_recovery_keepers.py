"""A run that goes on is guarded as before: monitors, and callbacks with a state, are saved with it."""

import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import UnsupportedTensorError

LOSS = nn.CrossEntropyLoss()
STEPS = 40
BAD = (20, 21, 30)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        inputs = torch.randn(8, 4, generator=generator)
        if step in BAD:
            inputs[0] = math.nan
        found.append((inputs, torch.randint(0, 3, (8,), generator=generator)))
    return found


def monitor_of(module, remedies=("reduce_lr", "reject")):
    metrics = ["loss", "gradient_norm"]
    return AsyncTrainingMonitor(
        module, metrics, remediation_strategy=list(remedies), warm_up=5, quiet_steps=15
    )


def trained(wrap, folder, cuts):
    """Train in as many lives, each with a model, a monitor and a trainer of its own; give the last ones."""
    for max_steps in (*cuts, STEPS):
        module = model()
        trainer = offbeat.FaultTolerantTrainer(wrap(module), folder, checkpoint_frequency=1000)
        monitor = monitor_of(module)
        trainer.train(dataloader=batches(), optimizer=optim.Adam(lr=0.01), loss_fn=LOSS, max_steps=max_steps)
        state = monitor.state_dict()
        monitor.close()
    return module, state


@pytest.mark.parametrize("wrap", [lambda module: module, offbeat.AsyncTrainer, offbeat.AsyncModelAverager])
@pytest.mark.parametrize("cuts", [(3,), (10,), (20,), (21, 25), (30, 31)])
def test_a_monitored_run_that_goes_on_ends_with_the_bits_and_the_ranges_of_one_that_was_not_cut(
    wrap, cuts, tmp_path
):
    whole, state = trained(wrap, tmp_path / "whole", ())
    again, state_again = trained(wrap, tmp_path / "cut", cuts)
    assert str(state_again) == str(state)  # in which NaN is NaN
    assert state["course"]["num_alerts"] == {"loss": 3, "gradient_norm": 3}
    ours, theirs = again.state_dict(), whole.state_dict()
    assert all(ours[name].equal(value) for name, value in theirs.items())
    assert all(bool(value.isfinite().all()) for value in theirs.values())


class Counts:
    """A callback with a state."""

    def __init__(self):
        self.seen = torch.zeros(2, dtype=torch.int64)

    def on_step(self, trainer, step):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()


def test_a_callback_with_a_state_goes_on_and_one_that_no_checkpoint_holds_is_refused_by_name(tmp_path):
    class Odd(Counts):
        def state_dict(self):
            return {"seen": object()}

    def train(callback, max_steps):
        trainer = offbeat.AsyncTrainer(model(), callbacks=callback)
        offbeat.FaultTolerantTrainer(trainer, tmp_path).train(
            dataloader=batches()[:15], optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, max_steps=max_steps
        )
        return callback

    with pytest.raises(UnsupportedTensorError, match=r"keepers.*seen"):
        train(Odd(), 3)
    for max_steps in (4, 9, 12):
        assert train(Counts(), max_steps).seen.tolist() == [max_steps] * 2


def test_a_monitor_that_is_set_otherwise_begins_anew_with_a_warning_and_a_new_one_without(tmp_path, caplog):
    def train(remedies, max_steps):
        module = model()
        monitors = [monitor_of(module, one) for one in remedies]
        offbeat.FaultTolerantTrainer(module, tmp_path).train(
            dataloader=batches()[:15], optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, max_steps=max_steps
        )
        return [monitor.state_dict()["num_steps"] for monitor in monitors]

    assert train([["alert"]], 4) == [4]
    assert train([["reject"], ["alert"]], 6) == [2, 6]
    assert "the state of" not in caplog.text
    assert train([["clip"], ["alert"]], 7) == [1, 7]
    assert "the state of 1 that is not here, or set otherwise (AsyncTrainingMonitor)" in caplog.text


def test_a_train_after_the_other_lets_go_of_nothing_that_is_in_effect(tmp_path):
    module = model()
    trainer = offbeat.FaultTolerantTrainer(module, tmp_path)
    with monitor_of(module) as monitor:
        for max_steps in (22, 24):
            trainer.train(
                dataloader=batches(), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, max_steps=max_steps
            )
            assert monitor.in_effect == ("reduce_lr", "reject")
        assert monitor.report().releases == ()
