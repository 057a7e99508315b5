"""Measuring a model, which the trainers that have an `evaluate` share."""

import math
import random

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat.errors import ConfigError
from offbeat.local.buffer_snapshot import same_buffers
from offbeat.local.buffers import FEW
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


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.zeros(3, dtype=torch.long))
        self.register_buffer("scale", torch.ones(2, 1).expand(2, 3))
        self.register_buffer("late", None)

    def forward(self, inputs):
        self.counts += 1
        self.scale = self.scale * 2
        if self.late is None:
            self.late = inputs.mean()
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(2))
        return inputs


def test_buffers_of_all_submodules_are_the_same_tensors_with_the_same_values():
    module = nn.Sequential(Part(), nn.Sequential(Part(), nn.BatchNorm1d(4)))
    before = [(name, buffer, buffer.clone()) for name, buffer in module.named_buffers()]
    with same_buffers(module):
        module(INPUTS)
        assert module[0].late is not None
    assert module[0].late is None, "as it began"
    now = dict(module.named_buffers())
    assert all(now.pop(name) is one and torch.equal(one, value) for name, one, value in before)
    assert set(now) == {"0.cache", "1.0.cache"}, "what was made since is there for who made it"


class Grows(nn.Module):
    """Has a cache that grows where it has to, and notes how far, as older rotary embeddings do."""

    def __init__(self, *, begins_as_none):
        super().__init__()
        self.size = 0
        if begins_as_none:
            self.register_buffer("cache", None, persistent=False)

    def forward(self, inputs):
        if len(inputs) > self.size:  # all are others then, as frequencies that go by the length are
            self.size = len(inputs)
            self.register_buffer("cache", torch.full((self.size, 1), self.size), persistent=False)
        return inputs * self.cache[: len(inputs)]


@pytest.mark.parametrize("begins_as_none", [False, True])
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_cache_that_grew_is_not_shrunk_under_the_module_that_noted_its_size(num_before, begins_as_none):
    module = Grows(begins_as_none=begins_as_none)
    if num_before:
        module(INPUTS[:num_before])
    with same_buffers(module):
        module(INPUTS)
    assert len(module.cache) == module.size == len(INPUTS)
    assert len(module(INPUTS[:2])) == 2


class Remembers(nn.Module):
    """Has a state of its batch's size, which the next batch begins with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4, 4))

    def forward(self, inputs):
        begin = self.state if len(self.state) == len(inputs) else torch.zeros_like(inputs)
        self.state = begin + inputs
        return self.state


@pytest.mark.parametrize("size", [3, 4, 9])
def test_a_state_of_the_batch_s_size_is_the_same_after_batches_of_another(size):
    module = Remembers()
    module(INPUTS[:4])
    before = module.state
    value = before.clone()
    with same_buffers(module):
        module(torch.ones(size, 4))
    assert module.state is before
    assert torch.equal(before, value)


class Collects(nn.Module):
    """Has a memory bank, which is a part of its state, and appends to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 4))

    def forward(self, inputs):
        self.bank = torch.cat([self.bank, inputs])
        return inputs


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_appended_to_a_state_is_gone_again(num_before):
    module = Collects()
    module(INPUTS[:num_before])
    bank = module.bank
    with same_buffers(module):
        module(INPUTS)
    assert module.bank is bank
    assert len(bank) == num_before


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "meta", "nested"])
@pytest.mark.filterwarnings("ignore")  # of torch: some of these are new
def test_buffers_without_numbers_one_after_another_are_the_same_objects(layout):
    def made(size):
        if layout == "meta":
            return torch.ones(size, size, device="meta")
        if layout == "nested":
            return torch.nested.nested_tensor([torch.ones(size), torch.ones(1)])
        return torch.eye(size).to_sparse(layout=getattr(torch, layout))

    module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))
    module[0].register_buffer("graph", made(2))
    graph = module[0].graph

    def measure():
        with same_buffers(module):
            module[0].graph = made(3)
            module(INPUTS)
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        measure()
    assert module[0].graph is graph
    assert module[1].num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore")  # of torch, to who traces
def test_buffers_that_have_no_size_yet_and_those_of_a_traced_module_are_left_to_torch():
    lazy = nn.LazyBatchNorm1d()
    with same_buffers(lazy):
        lazy(INPUTS)
    assert lazy.running_mean.shape == (4,)
    norm = nn.BatchNorm1d(4)
    norm(INPUTS)
    traced = torch.jit.trace(norm, INPUTS)
    before = {name: buffer.clone() for name, buffer in traced.named_buffers()}
    with same_buffers(traced):
        traced(INPUTS + 1)
    assert all(torch.equal(buffer, before[name]) for name, buffer in traced.named_buffers())


@pytest.mark.parametrize("are_few", [False, True])
def test_values_of_what_is_larger_than_all_that_is_trained_are_not_copied(are_few):
    module = nn.BatchNorm1d(4)
    module.register_buffer("table", torch.zeros(FEW))
    table = module.table
    with same_buffers(module, are_few=are_few):
        module(INPUTS)
        table[0] = 1.0
        module.table = torch.ones(FEW)
    assert module.table is table
    assert table[0] == are_few
    assert module.num_batches_tracked == 0


class Scales(nn.Module):
    """Takes the scale of each unit from what it sees first, in place."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("scale", torch.empty(0))

    def forward(self, inputs):
        outputs = self.last(inputs)
        if self.scale.numel() == 0:
            self.scale.resize_(3).copy_(outputs.detach().abs().amax(0))
        return outputs * self.scale


def test_a_size_that_a_buffer_got_in_place_is_gone_again_and_training_goes_on_from_there():
    module = Scales()
    with same_buffers(module), torch.no_grad():
        assert module(INPUTS).shape == (4, 3)
    assert module.scale.shape == (0,)
    module(INPUTS).sum().backward()
    assert module.scale.shape == (3,)
    assert module.last.weight.grad.isfinite().all()


def test_a_table_that_many_parts_share_counts_and_is_written_once():
    module, table = nn.Sequential(*(nn.Identity() for _ in range(8))), torch.zeros(FEW // 4)
    for part in module:
        part.register_buffer("table", table)
    module.register_buffer("bank", torch.zeros(FEW // 2))
    with same_buffers(module, are_few=True):
        table.add_(1.0)
        module.bank.add_(1.0)
    assert not module.bank.any()
    assert not table.any()
    assert all(part.table is table for part in module)


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
