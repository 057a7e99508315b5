"""A batch that is not finite leaves nothing in any member's buffers, nor in their mean."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import ModelMismatchError, NonFiniteError
from support.averaging import warned
from support.group import together
from support.small_net import normed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1)
NAN = float("nan")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


def micro_batch(rank, number):
    random = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 6, generator=random), torch.randint(5, (4,), generator=random)


def trained(rank, overlap, has_scaler, broken):
    """Train on five windows of two, with NaN in some micro-batches of the members'; then flush."""
    ours = offbeat.AsyncGradientAccumulator(
        model(),
        2,
        overlap=overlap,
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0) if has_scaler else None,
    )
    num_told, norm = 0, ours.model[1]
    for number in range(10):
        inputs, targets = micro_batch(rank, number)
        if (rank, number) in broken:
            inputs[0, 0] = NAN
        try:
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        except NonFiniteError:
            num_told += 1
        assert norm.running_mean.isfinite().all(), "at no time is it NaN behind a step"
    before = norm.running_mean.tolist(), int(norm.num_batches_tracked)
    with warned() as texts:
        try:
            ours.flush()
        except NonFiniteError:
            num_told += 1
    after = {name: value.numpy() for name, value in ours.model.state_dict().items()}
    return before, after, num_told, ours.updates, texts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("number", [2, 3, 9])
def test_a_batch_that_is_not_finite_in_one_member_reaches_no_members_statistics(overlap, has_scaler, number):
    first, second = together(trained, 2, overlap, has_scaler, {(1, number)})
    for _, after, num_told, updates, texts in (first, second):
        assert (num_told, updates) == (0 if has_scaler else 1, 4)
        assert texts == []
        assert all(np.isfinite(value).all() for value in after.values())
    assert all(np.array_equal(value, second[1][name]) for name, value in first[1].items())
    if not overlap and not has_scaler:
        assert first[0][1] == second[0][1] == 8, "the window that was dropped was never seen"
        expected = np.mean([first[0][0], second[0][0]], axis=0)
        assert first[1]["1.running_mean"] == pytest.approx(expected), "as many samples of each"


def broken_elsewhere(rank, ruined, num_batches):
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    for number in range(num_batches[rank]):
        inputs, targets = micro_batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    if rank in ruined:
        ours.model[1].running_var[3] = NAN
        ours.model[1].running_mean[0] = float("inf")
    before = ours.model[1].running_mean.tolist()
    with warned() as texts:
        ours.flush(optimizer=SPEC)
    return (
        before,
        ours.model[1].running_mean.tolist(),
        ours.model[1].running_var.isfinite().all().item(),
        texts,
    )


@pytest.mark.parametrize("num_batches", [(3, 2, 1), (3, 2, 0)], ids=str)
def test_flush_leaves_a_member_whose_buffers_are_not_finite_out_of_the_mean_and_names_both(num_batches):
    found = together(broken_elsewhere, 3, {1}, num_batches)
    weights = [num_batches[0], num_batches[2]]
    expected = np.average([found[0][0], found[2][0]], axis=0, weights=weights)
    for _, after, is_finite, texts in found:
        assert after == pytest.approx(expected)
        assert is_finite
        assert len(texts) == 1
        assert texts[0].startswith("in member 1 buffers are NaN or infinite ('1.running_mean' and 1 more): ")


def test_where_nobodys_buffers_are_finite_nobody_is_left_out():
    for _, after, is_finite, texts in together(broken_elsewhere, 2, {0, 1}, (2, 1)):
        assert (np.isfinite(after).tolist()[0], is_finite, texts) == (False, False, [])


def test_buffers_that_are_a_workers_own_go_back_too(serve, join):
    worker = join(serve(normed()), normed(), optimizer=SPEC, buffers="local")
    ours = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=2)
    norm, targets = worker.model[-1], torch.zeros(4, dtype=torch.long)

    def window(second):
        for inputs in (torch.arange(16.0).view(4, 4), second):
            ours.train_step(inputs=inputs, targets=targets, loss_fn=LOSS)

    window(torch.eye(4))
    before = norm.running_mean.clone(), norm.num_batches_tracked.clone()
    with pytest.raises(NonFiniteError):
        window(torch.full((4, 4), NAN))
    assert all(map(torch.equal, before, (norm.running_mean, norm.num_batches_tracked)))
    window(torch.eye(4))
    assert norm.num_batches_tracked == 4


class Holds(nn.Module):
    """A net whose buffer, of one kind, each member writes its own values to."""

    def __init__(self, kind, value, writes):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 5)
        self.register_buffer("kept", held(kind, 0 if writes else value))
        self.kind, self.value, self.writes = kind, value, writes

    def forward(self, inputs):
        if self.writes and self.training:
            self.kept = held(self.kind, self.value)
        return self.net(inputs)


def held(kind, value):
    dense = torch.diag((torch.arange(6) < value).float())  # so many values as `value` says
    if kind in ("sparse", "csr"):
        return dense.to_sparse() if kind == "sparse" else dense.to_sparse_csr()
    if kind == "expanded":
        return torch.full((1, 2), float(value)).expand(2, 2)
    if kind == "lazily conjugate":
        return torch.full((2, 2), value * 1j).conj()
    return torch.full((2, 2), value, dtype=getattr(torch, kind))


def ended(rank, kind, values, writes):
    ours = offbeat.AsyncGradientAccumulator(Holds(kind, values[rank], writes), 2, overlap=False)
    for number in range(2):
        inputs, targets = micro_batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    ours.flush()
    return listed(ours.model.kept)


def listed(tensor):
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


@pytest.mark.parametrize("kind", ["bool", "uint8", "int16", "int32", "sparse", "csr"])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_buffers_that_have_no_mean_are_the_first_members_in_all(kind, writes):
    values = (1, 0) if kind == "bool" else (4, 1)
    first, second = together(ended, 2, kind, values, writes)
    assert first == second == listed(held(kind, values[0]))


@pytest.mark.parametrize("kind", ["complex64", "float16", "float64", "float8_e4m3fn"])
def test_buffers_that_have_a_mean_get_it(kind):
    first, second = together(ended, 2, kind, (4, 1), True)
    assert first == second == [[2.5, 2.5], [2.5, 2.5]]


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_that_is_expanded_begins_as_the_first_members_and_gets_the_mean(writes):
    first, second = together(ended, 2, "expanded", (4, 1), writes)
    assert first == second == [[2.5 if writes else 4.0] * 2] * 2


@pytest.mark.parametrize("writes", [False, True])
def test_a_buffer_that_is_lazily_conjugate_gets_the_mean_of_its_values(writes):
    expected = -2.5j if writes else -4j  # what nobody writes to begins as the first member's
    first, second = together(ended, 2, "lazily conjugate", (4, 1), writes)
    assert first == second == [[expected] * 2] * 2


class Grows(nn.Module):
    """A net that keeps rows of its batches, and what it has seen first, beside statistics."""

    def __init__(self, rows=0, dtype=torch.float32):
        super().__init__()
        self.net = model()
        self.register_buffer("bank", torch.zeros(rows, 6, dtype=dtype))
        self.register_buffer("first", None)

    def forward(self, inputs):
        if self.training:
            self.bank = torch.cat([self.bank, inputs[:1]])
            self.first = inputs[0] if self.first is None else self.first
        return self.net(inputs)


def ended_with_others(rank, num_batches):
    ours = offbeat.AsyncGradientAccumulator(Grows(), 2)
    told = []
    for number in range(num_batches[rank]):
        inputs, targets = micro_batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    before = [ours.model.bank.tolist(), None if ours.model.first is None else ours.model.first.tolist()]
    for _ in range(2):
        with warned() as texts:
            ours.flush(optimizer=SPEC)
        told.append(list(texts))
    after = [ours.model.bank.tolist(), None if ours.model.first is None else ours.model.first.tolist()]
    values = [p.tolist() for p in ours.model.parameters()] + [ours.model.net[1].running_mean.tolist()]
    return before, after, values, told


@pytest.mark.parametrize("num_batches", [(3, 2), (2, 3), (2, 0), (0, 3)], ids=str)
def test_what_members_have_grown_differently_stays_their_own_and_is_told_of_once(num_batches):
    one, other = together(ended_with_others, 2, num_batches)
    assert one[2] == other[2], "all else is alike"
    for (before, after, _, (first, second)), num in zip((one, other), num_batches, strict=True):
        assert len(before[0]) == num
        assert before[0] == after[0]
        assert 0 not in num_batches or before == after
        assert len(first) == 1
        assert "different shapes or dtypes, or some members alone have them ('bank'" in first[0]
        assert ("and 1 more" in first[0]) == (0 in num_batches)
        assert second == []


def begun_with_another_buffer(rank, made, rows, kinds):
    grown = Grows(rows[rank], getattr(torch, kinds[rank]))
    with torch.no_grad():
        for tensor in (*grown.parameters(), grown.net[1].running_mean, grown.bank):
            tensor.fill_(rank)
    with warned() as texts:
        if made == "accumulator":
            offbeat.AsyncGradientAccumulator(grown, 2)
        else:
            offbeat.AsyncModelAverager(grown)
    bank = grown.bank.tolist()
    return bank, [p.abs().max().item() for p in grown.parameters()], grown.net[1].running_mean.tolist(), texts


@pytest.mark.parametrize("made", ["accumulator", "averager"])
@pytest.mark.parametrize(("rows", "kinds"), [((2, 3), ("float32",) * 2), ((2, 2), ("float32", "float64"))])
def test_members_begin_alike_but_for_buffers_that_they_hold_in_different_shapes_or_dtypes(made, rows, kinds):
    found = together(begun_with_another_buffer, 2, made, rows, kinds)
    for rank, (bank, largest, mean, texts) in enumerate(found):
        assert bank == [[rank] * 6] * rows[rank]
        assert largest == [0.0] * len(largest)
        assert mean == [0.0] * 8
        assert [text.partition(" (")[0] for text in texts] == [
            "members hold buffers in different shapes or dtypes, or some members alone have them"
        ]


def of_other_statistics(rank):
    try:
        offbeat.AsyncModelAverager(nn.Sequential(nn.BatchNorm1d(6 + rank, affine=False), nn.Linear(6, 5)))
    except ModelMismatchError as error:
        return str(error)
    return None


def test_statistics_that_are_averaged_have_to_be_of_one_size():
    for text in together(of_other_statistics, 2):
        assert text.startswith("members hold different models: here comes '0.running_mean' of shape [")


def in_stages(rank, schedule):
    trained = Grows()
    ours = offbeat.AsyncTrainer(
        trained, strategy=schedule, local_batch_size=8, warm_up_epochs=1, warm_up_sync_frequency=2,
        regular_sync_frequency=3, overlap=False,
    )  # fmt: skip
    inputs, targets = (
        torch.cat(parts) for parts in zip(*(micro_batch(rank, n) for n in range(10 + 2 * rank)), strict=True)
    )
    ours.train(dataset=TensorDataset(inputs, targets), epochs=4, optimizer=optim.Adam(lr=0.01), loss_fn=LOSS)
    ours.close()
    return len(trained.bank), [p.tolist() for p in trained.parameters()]


@pytest.mark.parametrize(
    "schedule", ["accumulate", "average", {0: "average", 2: "accumulate", 3: "diloco"}], ids=str
)
def test_a_trainer_goes_from_stage_to_stage_with_what_members_have_grown_differently(schedule):
    (rows, one), (more_rows, other) = together(in_stages, 2, schedule)
    assert (rows, more_rows) == (4 * 5, 4 * 6)
    assert one == other
