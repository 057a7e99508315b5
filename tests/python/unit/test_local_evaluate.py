"""Measuring a model, which the trainers that have an `evaluate` share."""

import math
import random

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat.errors import ConfigError
from offbeat.local.evaluate import evaluate

INPUTS, TARGETS = torch.eye(4), torch.tensor([0, 1, 2, 0])
EMPTY = TensorDataset(INPUTS[:0], TARGETS[:0])


def measured(data, metrics="accuracy", **keywords):
    """Of a model whose answer is the place of its input's one."""
    return evaluate(
        nn.Identity(), data, metrics, batch_size=3, device=torch.device("cpu"), loss_fn=None, **keywords
    )


def trainers(directory):
    yield offbeat.AsyncTrainer(nn.Linear(4, 3))
    yield offbeat.FaultTolerantTrainer(nn.Linear(4, 3), checkpoint_dir=directory)
    with offbeat.AsyncModelAverager(nn.Linear(4, 3), process_group=False) as averager:
        yield averager


@pytest.mark.parametrize("metrics", ["accuracy", ["accuracy"]])
@pytest.mark.parametrize(
    ("data", "kind"), [([], "list"), (EMPTY, "TensorDataset"), ([(INPUTS[:0], TARGETS[:0])], "list")]
)
def test_of_nothing_there_is_no_mean_in_any_trainer(tmp_path, data, kind, metrics):
    num = 0
    for trainer in trainers(tmp_path / "kept"):
        with pytest.raises(ConfigError, match=rf"loader is a {kind} that gave no sample.*give data that has"):
            trainer.evaluate(data, metrics)
        num += 1
    assert num == 3


def test_a_generator_gives_its_batches_once():
    batches = (batch for batch in [(INPUTS, TARGETS)])
    assert measured(batches, reduction="mean") == 0.75
    with pytest.raises(ConfigError, match=r"generator that gave no sample.*has to be made anew"):
        measured(batches, reduction="mean")


def test_a_batch_without_samples_counts_for_nothing():
    batches = [(INPUTS[:0], TARGETS[:0]), (INPUTS, TARGETS)]
    found = measured(batches, ["accuracy", lambda outputs, _: outputs.mean()], reduction="mean")
    assert found["accuracy"] == 0.75
    assert not any(map(math.isnan, found.values()))


def test_what_comes_first_does_so_once_all_is_known_to_be_usable():
    calls = []
    for wrong in ({"metrics": "acuracy"}, {"data": 3}):
        arguments = {"data": [(INPUTS, TARGETS)], "metrics": "accuracy"} | wrong
        with pytest.raises(ConfigError):
            measured(**arguments, reduction="mean", first=lambda: calls.append("first"))
    assert calls == []
    measured([(INPUTS, TARGETS)], reduction="mean", first=lambda: calls.append("first"))
    assert calls == ["first"]


class Entropy(Dataset):
    """Samples that draw from the system's entropy, and from a generator that has a state."""

    def __init__(self):
        self.system, self.own = random.SystemRandom(), random.Random(1)  # noqa: S311  no secret

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return INPUTS[index] * (1 + self.system.random() + self.own.random()), TARGETS[index]


def test_entropy_of_the_system_has_no_state_and_keeps_no_data_from_being_measured(tmp_path):
    data = Entropy()
    before = data.own.getstate()
    for trainer in trainers(tmp_path / "kept"):
        assert 0 <= trainer.evaluate(data) <= 1
    assert data.own.getstate() == before
