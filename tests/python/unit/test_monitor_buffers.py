"""What a batch leaves in buffers whose gradient a monitor drops, or whose step a GradScaler skips."""

import concurrent.futures
import copy
import functools
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn import functional

from offbeat import AsyncTrainingMonitor, trained_by
from offbeat.errors import ClosedError
from offbeat.local.buffers import FEW
from support.hand_loop import batch, loss_of, same, sgd, state_of
from support.small_net import net, normed


class Buffered(nn.Module):
    """Its buffers are assigned, begin as None, grow, are expanded, and were made in inference mode."""

    def __init__(self, persistent):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()), persistent=persistent)
        self.register_buffer("mean", None, persistent=persistent)
        self.register_buffer("bank", torch.zeros(0, 4), persistent=persistent)
        self.register_buffer("once", torch.ones(1).expand(4))
        with torch.inference_mode():
            self.register_buffer("lent", torch.ones(4))

    def forward(self, inputs):
        now = inputs.detach().mean(0)
        self.scale = 0.9 * self.scale + 0.1 * now.abs().mean()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.bank = torch.cat([self.bank, now[None]])
        scaled = inputs * self.once.clone() * self.lent.clone() / self.scale
        return self.last(scaled + self.bank.sum(0) * self.mean)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dropped", [0, 4])
def test_a_batch_that_is_not_finite_leaves_no_buffer_another_one_whatever_it_is(dropped, persistent):
    """The same batches without that one come to the same bits."""

    def trained(numbers):
        torch.manual_seed(0)
        model = Buffered(persistent)
        with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
            for number in numbers:
                x, y = batch(number)
                x = x * math.nan if number == dropped else x
                model.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                sgd(model).step()
        return monitor.report().num_dropped, dict(model.named_buffers()) | dict(model.named_parameters())

    others = [number for number in range(8) if number != dropped]
    (num_dropped, found), (none, expected) = trained(range(8)), trained(others)
    assert (num_dropped, none) == (1, 0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Accumulates(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.last = nn.Linear(4, 2)

    def forward(self, inputs):
        self.total.add_(inputs.detach().mean(0))
        return self.last(inputs)


class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(0))
        self.last = nn.Linear(4, 2)

    def forward(self, inputs):
        now = inputs.detach().mean(0)
        self.mean = now if self.mean.numel() == 0 else 0.9 * self.mean + 0.1 * now
        return self.last(inputs - self.mean)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("made", [torch.jit.script, nn.Sequential], ids=["scripted", "plain"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_what_a_scripted_model_assigns_goes_back_as_well(made, num_before):
    model = made(Averages())
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 1):
            before = [buffer.clone() for buffer in model.buffers()]
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == num_before else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert all(map(torch.equal, model.buffers(), before))


@pytest.mark.parametrize("factor", [math.nan, 1e4])
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize(
    "made",
    [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(2, 4)), nn.Sequential],
    ids=["scripted", "traced", "plain"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_of_a_scripted_or_traced_model_a_dropped_batch_leaves_nothing_either(made, num_before, factor):
    model = made(Accumulates())
    given = {"remediation_strategy": "reject", "warm_up": 2}
    with AsyncTrainingMonitor(model, ["gradient_norm", "non_finite"], **given) as monitor:
        for number in range(num_before + 1):
            before = [buffer.clone() for buffer in model.buffers()]
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (factor if number == num_before else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == (not (num_before == 0 and math.isfinite(factor)))
    if monitor.report().num_dropped:
        assert all(map(torch.equal, model.buffers(), before))


def causal(size, slope):
    """As in ALiBi (Press et al. 2022)."""
    places = torch.arange(size)
    return torch.full((size, size), -math.inf).triu(1) + slope * (places - places[:, None]).clamp(max=0)


class Masked(nn.Module):
    """Makes a causal mask as large as it is asked for, and notes how large that is."""

    def __init__(self, begin, slope, persistent):
        super().__init__()
        self.last, self.most, self.slope = nn.Linear(4, 2), 0 if begin is None else len(begin), slope
        self.register_buffer("mask", begin, persistent=persistent)

    def forward(self, inputs):
        if (size := len(inputs)) > self.most:
            self.mask, self.most = causal(size, self.slope), size
        return self.last((inputs @ inputs.T + self.mask[:size, :size]).softmax(1) @ inputs)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("slope", [0.0, 0.5])
@pytest.mark.parametrize(
    "begin", [None, torch.zeros(0, 0), torch.zeros(1, 1)], ids=["none", "empty", "small"]
)
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_mask_that_a_dropped_batch_has_made_stays(num_before, begin, slope, persistent):
    model = Masked(begin, slope, persistent)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 1):
            x, y = batch(number, samples=4 + number)
            model.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            (loss * (math.nan if number == num_before else 1.0)).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert torch.equal(model.mask, causal(4 + num_before, slope))


class Recurs(nn.Module):
    """Keeps a state as large as its batch, in the dtype of autocast."""

    def __init__(self, persistent):
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(1, 4), persistent=persistent)

    def forward(self, inputs):
        outputs = self.cell(inputs + self.state)
        self.state = outputs.detach()
        return outputs


@pytest.mark.parametrize("persistent", [True, False])
def test_a_state_of_another_size_and_dtype_that_is_not_finite_goes_back(persistent):
    model = Recurs(persistent)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(4):
            x, y = batch(number)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x * (math.nan if number == 0 else 1.0)), y)
            loss.backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert bool(model.state.isfinite().all())


class Centred(nn.Module):
    """Assigns a running mean, which begins as a size, as another one, or as None."""

    def __init__(self, begin):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("mean", begin)

    def forward(self, inputs):
        now = inputs.detach().mean(0)
        self.mean = now if self.mean is None or len(self.mean) == 0 else 0.9 * self.mean + 0.1 * now
        return self.last(inputs - self.mean)


@pytest.mark.parametrize("factor", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("begin", [None, torch.zeros(0), torch.zeros(4)], ids=["none", "empty", "zeros"])
def test_a_statistic_goes_back_whatever_number_a_dropped_batch_drove_it_to(begin, num_before, factor):
    model = Centred(begin)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 4):
            x, y = batch(number)
            if number == num_before:
                x[0, 1], before = x[0, 1].abs() * factor, model.mean
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            sgd(model).step()
            if number == num_before:
                assert model.mean is before
        assert monitor.report().num_dropped == 1
    assert bool(model.mean.isfinite().all())


class Quantized(nn.Module):
    """Quantizes what goes in by the range of what it has seen: of all, or of each channel."""

    def __init__(self, observer):
        super().__init__()
        self.observer, self.last = observer, nn.Linear(4, 2)

    def forward(self, inputs):
        self.observer(inputs.detach())
        low, high = self.observer.min_val, self.observer.max_val
        return self.last((inputs - low) / (high - low))


@pytest.mark.parametrize("factor", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize(
    "observer",
    [
        MinMaxObserver,
        MovingAverageMinMaxObserver,
        lambda: PerChannelMinMaxObserver(ch_axis=1),
        lambda: MovingAveragePerChannelMinMaxObserver(ch_axis=1),
    ],
    ids=["all", "all moving", "channels", "channels moving"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_range_that_begins_as_infinite_or_empty_goes_back(observer, num_before, factor):
    model = Quantized(observer())
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 4):
            x, y = batch(number)
            before = copy.deepcopy(dict(model.named_buffers()))
            if number == num_before:
                x[0, 1] = x[0, 1].abs() * factor
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            sgd(model).step()
            if number == num_before:
                assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
        assert monitor.report().num_dropped == 1
    assert all(bool(b.isfinite().all()) for b in model.buffers())


class Ranged(nn.Module):
    """Keeps the range of what it has seen, of which it looks at one end alone; and what a user gives it."""

    def __init__(self, end):
        super().__init__()
        self.last, self.end = nn.Linear(4, 2), end
        for name in ("low", "high", "centres"):
            self.register_buffer(name, None)

    def forward(self, inputs):
        low, high = inputs.detach().min(), inputs.detach().max()
        is_begun = getattr(self, self.end) is not None
        self.low = torch.minimum(self.low, low) if is_begun else low
        self.high = torch.maximum(self.high, high) if is_begun else high
        return self.last((inputs - self.low) / (self.high - self.low))


@pytest.mark.parametrize("factor", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("end", ["low", "high"])
def test_of_a_range_that_begins_as_none_no_end_is_left_alone(end, factor):
    model = Ranged(end)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(4):
            x, y = batch(number)
            if number == 0:
                x[0, 1] = x[0, 1].abs() * factor
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            sgd(model).step()
            assert [model.low is None, model.high is None] == [number == 0] * 2
        assert monitor.report().num_dropped == 1
    assert bool(torch.stack([model.low, model.high]).isfinite().all())


@pytest.mark.parametrize(
    "begin", [None, torch.zeros(0), torch.tensor(math.nan)], ids=["none", "empty", "nan"]
)
def test_what_a_user_assigned_beside_a_statistic_stays_when_that_goes_back(begin):
    model = Centred(torch.zeros(4))
    model.register_buffer("centres", begin)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(4):
            model.centres = torch.ones(3) if number == 2 else model.centres
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == 2 else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert model.centres.tolist() == [1.0, 1.0, 1.0]
    assert bool(model.mean.isfinite().all())


@pytest.mark.parametrize("num_before", [0, 2])
def test_all_that_a_dropped_batch_has_written_to_a_part_goes_back_its_count_too(num_before):
    """A cumulative average that counts a batch it has not seen is wrong by it ever after."""
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 1):
            before = copy.deepcopy(dict(model.named_buffers()))
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == num_before else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def wrapped(model):
    model[0] = nn.Sequential(model[0])


def shortened(model):
    del model[0]


def fused(model):
    model[1] = Fused(model[1])


def renewed(model):
    model[1] = nn.BatchNorm1d(4)


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("changed", [wrapped, shortened, fused, renewed])
def test_a_part_goes_back_under_another_name_and_so_does_one_in_the_place_of_another(changed, num_before):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 1):
            if number == num_before:
                changed(model)
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == num_before else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())


class Fused(nn.Module):
    """Another class that has a BatchNorm's buffers, as those have that quantization fuses."""

    def __init__(self, norm):
        super().__init__()
        self.inner = nn.Module()
        for name, buffer in norm.named_buffers():
            self.inner.register_buffer(name, buffer)

    def forward(self, inputs):
        mean, var = self.inner.running_mean, self.inner.running_var
        return functional.batch_norm(inputs, mean, var, training=self.training)


class Ring(nn.Module):
    """Has two buffers in turn."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("now", torch.zeros(4))
        self.register_buffer("before", torch.zeros(4))

    def forward(self, inputs):
        self.now, self.before = self.before, self.now
        self.now.copy_(inputs.detach().mean(0))
        return self.last(inputs - self.before)


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_buffers_that_take_turns_go_on_as_two(num_before):
    def trained(numbers):
        torch.manual_seed(0)
        model = Ring()
        with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
            for number in numbers:
                x, y = batch(number)
                model.zero_grad()
                factor = math.nan if number == num_before else 1.0
                functional.cross_entropy(model(x * factor), y).backward()
                sgd(model).step()
        return monitor.report().num_dropped, model.now, model.before

    others = [number for number in range(5) if number != num_before]
    (num_dropped, *found), (none, *expected) = trained(range(5)), trained(others)
    assert (num_dropped, none) == (1, 0)
    assert found[0] is not found[1]
    assert all(map(torch.equal, found, expected))


class Handed(nn.Module):
    """Hands its former state to two buffers at once."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        for name in ("now", "before", "memory"):
            self.register_buffer(name, torch.zeros(4))

    def forward(self, inputs):
        self.before = self.memory = self.now
        self.now = inputs.detach().mean(0)
        return self.last(inputs - self.before)


def test_where_two_buffers_were_given_what_a_third_was_all_three_go_back():
    model = Handed()
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(4):
            held = [id(buffer) for buffer in (model.now, model.before, model.memory)]
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == 3 else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert [id(buffer) for buffer in (model.now, model.before, model.memory)] == held


class Recurrent(nn.Module):
    """Has a state of the batch's size, which is None where a sequence begins."""

    def __init__(self, persistent):
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 3), nn.Linear(3, 2)
        self.register_buffer("state", None, persistent=persistent)
        self.register_buffer("weights", None)

    def forward(self, inputs):
        state = self.cell(inputs, self.state)
        self.state = state.detach()
        return self.last(state)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("num_before", [0, 3])
def test_a_state_that_was_reset_for_another_size_begins_anew_after_a_batch_is_dropped(num_before, persistent):
    model = Recurrent(persistent)
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:

        def trained(number, samples, factor=1.0):
            x, y = batch(number, samples)
            model.zero_grad()
            functional.cross_entropy(model(x * factor), y, model.weights).backward()
            sgd(model).step()

        for number in range(num_before):
            trained(number, samples=3)
            model.state = None if number == num_before - 1 else model.state
        model.weights = torch.tensor([1.0, 2.0])
        trained(5, samples=4, factor=math.nan)
        assert model.state is None
        assert model.weights.tolist() == [1.0, 2.0]
        trained(6, samples=4)
        assert monitor.report().num_dropped == 1


class Windowed(nn.Module):
    """Looks at a part of another buffer's memory."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.register_buffer("history", torch.arange(16.0))
        self.register_buffer("window", torch.full((8,), 7.0))

    def forward(self, inputs):
        self.window.data = self.history[:4]
        return self.last(inputs)


@pytest.mark.parametrize("num_before", [0, 2])
def test_of_a_buffer_that_got_another_s_memory_nothing_is_written_there(num_before):
    model = Windowed()
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(num_before + 1):
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model(x * (math.nan if number == num_before else 1.0)), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert torch.equal(model.history, torch.arange(16.0))


def test_a_mask_that_was_loaded_before_the_first_step_stays_when_that_is_dropped():
    model, mask = net(), torch.full((4, 4), -math.inf).triu(1)
    model.register_buffer("mask", torch.zeros(4, 4))
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        model.load_state_dict(model.state_dict() | {"mask": mask})
        (loss_of(model, 0) * math.nan).backward()
        sgd(model).step()
        assert monitor.report().num_dropped == 1
    assert torch.equal(model.mask, mask)


@pytest.mark.parametrize("num_before", [0, 3])
def test_what_a_user_has_assigned_or_converted_between_two_steps_stays_when_the_next_is_dropped(num_before):
    model = normed()
    model.register_buffer("mask", torch.ones(4))
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:

        def trained(number, factor=1.0):
            x, y = batch(number)
            model.zero_grad()
            functional.cross_entropy(model((x * factor * model.mask).to(model[0].weight.dtype)), y).backward()
            sgd(model).step()

        for number in range(num_before):
            trained(number)
        model.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
        model.bfloat16()
        trained(7, math.nan)
        assert monitor.report().num_dropped == 1
        assert model.mask.tolist() == [1.0, 0.0, 1.0, 0.0]
        assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.bfloat16}
        assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
        trained(8)
        assert monitor.report().num_dropped == 1


def test_a_first_step_that_is_dropped_breaks_no_buffer_and_leaves_what_was_loaded():
    model = normed()
    model.register_buffer("table", torch.zeros(3))
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject"):
        model.table.copy_(torch.arange(3.0))
        x, y = batch(0)
        for factor in (math.nan, math.nan, 1.0):
            functional.cross_entropy(model(x * factor), y).backward()
            sgd(model).step()
            model.zero_grad()
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    assert not model[3].running_mean.equal(torch.zeros(2))
    assert model.table.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("metric", ["loss", "non_finite"])
@pytest.mark.parametrize("bad", [(3, 6), (0, 1)], ids=["later", "the first"])
@pytest.mark.parametrize(("fused", "is_told"), [(False, True), (True, True), (True, False)])
def test_what_a_batch_has_broken_whose_step_a_grad_scaler_skips_goes_back(fused, is_told, metric, bad):
    """With a fused optimizer that has to be told of no scaler, and what is dropped later brings none back."""
    model = normed()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    # No momentum: where a fused SGD's first step is skipped, torch leaves what was in that memory in it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    told = scaler if is_told else None
    with AsyncTrainingMonitor(model, [metric], remediation_strategy="reject", grad_scaler=told):
        for number in range(8):
            x, y = batch(number)
            x = x * math.nan if number in bad else x
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            trained_by.tell(model, loss=loss.detach())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Scaled(nn.Module):
    """Reads in its forward what it keeps: once that is NaN, all is."""

    def __init__(self):
        super().__init__()
        self.last = normed()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        self.scale.mul_(0.9).add_(0.1 * inputs.detach().abs().mean())
        return self.last(inputs / self.scale)


@pytest.mark.parametrize("bad", [3, 4, 9], ids=["in between", "as the scale has grown", "the last"])
def test_what_is_read_again_or_came_last_goes_back_when_the_loop_observes_or_ends(bad):
    """The scale is halved by that, to what it was before it had grown."""
    model = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    optimizer, scales = sgd(model), []
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler) as monitor:
        for number in range(10):
            x, y = batch(number)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x * math.nan if number == bad else x), y)
            monitor.observe(number, loss=loss.detach())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert monitor.report().num_dropped == 0
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert scales[bad] == scales[bad - 1] / 2
    assert sum(after < before for before, after in itertools.pairwise(scales)) <= 2


def step(model, optimizer, scaler, number=0, factor=1.0):
    x, y = batch(number)
    optimizer.zero_grad()
    scaler.scale(functional.cross_entropy(model(x * factor), y)).backward()
    scaler.step(optimizer)
    scaler.update()


skip = functools.partial(step, factor=math.nan)


def in_a_thread(function):
    """Call it there, and give what came of it."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_what_a_forward_breaks_while_another_thread_mends_is_mended_by_the_next_step():
    model = normed()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler) as monitor:
        step(model, optimizer, scaler)
        skip(model, optimizer, scaler)
        in_a_thread(lambda: monitor.observe(2, worker="other", loss=1.0))
        model[-1].running_mean.fill_(math.nan)  # as a forward does that had read it before
        step(model, optimizer, scaler)
        assert model[-1].running_mean.isfinite().all()
        model[-1].running_mean.fill_(math.nan)  # with no skip since, this is somebody's own
        step(model, optimizer, scaler)
        assert model[-1].running_mean.isnan().all()


def test_training_may_go_on_in_another_thread():
    """Where its forward reads what is broken, no step would ever be made there."""
    model = Scaled()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler) as monitor:
        step(model, optimizer, scaler)

        def go_on():
            for number in range(4):
                (skip if number == 1 else step)(model, optimizer, scaler)
                monitor.observe(number + 1, loss=1.0)

        in_a_thread(go_on)
        assert model.scale.isfinite()
        assert scaler.get_scale() == 4.0
        in_a_thread(lambda: skip(model, optimizer, scaler))
    assert model.scale.isfinite()


@pytest.mark.parametrize("num_before", [0, 1])
def test_what_is_mended_in_the_thread_that_trains_is_not_mended_again(num_before):
    """Since then it may be somebody's own, as where a smallest value begins anew."""
    model = normed()
    model.register_buffer("least", torch.zeros(1))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler) as monitor:
        for number in range(num_before):
            step(model, optimizer, scaler, number)
        skip(model, optimizer, scaler)
        monitor.observe(2, loss=1.0)
        assert model[-1].running_mean.isfinite().all()
        model.least.fill_(math.inf)
        step(model, optimizer, scaler)
    assert model.least.isinf()


class Closes(torch.amp.GradScaler):
    """Whoever reads its scale is interrupted by what closes a monitor, as a signal's handler may."""

    monitor = None

    def get_scale(self):
        if self.monitor is not None:
            monitor, self.monitor = self.monitor, None
            monitor.close()
        return super().get_scale()


@pytest.mark.timeout(20)
def test_a_monitor_may_be_closed_in_the_midst_of_its_own_look():
    model = normed()
    scaler, optimizer = Closes("cpu", init_scale=8.0), sgd(model)
    monitor = AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler)
    step(model, optimizer, scaler)
    scaler.monitor = monitor
    step(model, optimizer, scaler)
    with pytest.raises(ClosedError):
        monitor.observe(2, loss=1.0)


def test_what_was_heard_of_is_mended_where_a_callback_ends_the_run_before():
    model = normed()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)

    def ends(alert):
        raise SystemExit(f"{alert.metric} {alert.step}")

    watched = AsyncTrainingMonitor(
        model, ["gradient_norm"], remediation_strategy="reject", grad_scaler=scaler, callbacks=ends
    )
    for number in range(40):
        step(model, optimizer, scaler, number)
    skip(model, optimizer, scaler)
    assert not model[-1].running_mean.isfinite().any()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 1e6 * gradient)
    with pytest.raises(SystemExit, match="gradient_norm"), watched:
        step(model, optimizer, scaler)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_a_round_takes_nothing_for_good_that_a_forward_has_broken_while_another_thread_mended():
    model = normed()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler) as monitor:
        step(model, optimizer, scaler)
        skip(model, optimizer, scaler)
        in_a_thread(lambda: monitor.observe(2, worker="other", loss=1.0))
        model[-1].running_mean.fill_(math.nan)  # as a forward does that had read it before
        trained_by.moved(model)
        assert model[-1].running_mean.isfinite().all()


class Unreadable(torch.amp.GradScaler):
    """Its scale is on a device on which all fails, as after an assertion in a kernel."""

    fails = False

    def get_scale(self):
        if self.fails:
            raise RuntimeError("device-side assert triggered")
        return super().get_scale()


@pytest.mark.parametrize("has_failed", [False, True], ids=["closed", "the block fails"])
def test_a_monitor_whose_device_fails_lets_go_of_all_and_hides_no_error(has_failed, caplog):
    model = normed()
    scaler, optimizer = Unreadable("cpu", init_scale=8.0), sgd(model)
    monitor = AsyncTrainingMonitor(
        model, ["loss"], remediation_strategy=["reduce_lr", "reject"], acts_on=optimizer, grad_scaler=scaler
    )
    monitor.observe(0, loss=math.inf)
    assert monitor.in_effect
    scaler.fails = True
    expected = (
        pytest.raises(KeyError, match="mine") if has_failed else pytest.raises(RuntimeError, match="assert")
    )
    with expected, monitor:
        if has_failed:
            raise KeyError("mine")
    assert ("may hold NaN or infinity: RuntimeError: device-side assert" in caplog.text) == has_failed
    assert monitor.in_effect == ()
    with pytest.raises(ClosedError):
        monitor.observe(1, loss=1.0)
    monitor.close()


def break_off_after(function):
    function()
    raise KeyboardInterrupt


def test_a_block_that_is_left_by_an_error_is_mended_too():
    """As by Ctrl-C, after which the model is saved."""
    model = normed()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    watched = AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject", grad_scaler=scaler)
    step(model, optimizer, scaler)
    with pytest.raises(KeyboardInterrupt), watched:
        break_off_after(lambda: skip(model, optimizer, scaler))
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_a_closed_monitor_keeps_no_copies():
    model = normed()
    monitor = AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject")
    kept = weakref.ref(monitor._attachment._buffers)
    assert kept() is not None
    monitor.close()
    gc.collect()
    assert kept() is None


def test_a_finite_batch_whose_step_a_grad_scaler_skips_counts_in_buffers_as_without_a_monitor():
    """So it is while a scale is too large, as at the beginning."""

    def trained(has_monitor):
        torch.manual_seed(0)
        model = normed()
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**127), sgd(model)
        monitor = None
        if has_monitor:
            monitor = AsyncTrainingMonitor(
                model, ["non_finite"], remediation_strategy="reject", grad_scaler=scaler
            )
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(1e3 * loss_of(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert monitor is None or monitor.report().num_dropped == 0
        return state_of(model, optimizer), scaler.get_scale()

    (found, scale), (expected, as_much) = trained(has_monitor=True), trained(has_monitor=False)
    assert scale == as_much < 2.0**127
    assert same(found, expected)


def test_a_dropped_step_leaves_a_graph_that_a_user_keeps_over_it_to_its_backward():
    """As of a generator, whose fakes are there when the discriminator steps."""
    model = nn.ModuleDict({"generator": nn.Sequential(normed(), nn.Linear(2, 4)), "discriminator": normed()})
    of_each = {name: sgd(part) for name, part in model.items()}
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for number in range(5):
            x, y = batch(number)
            fake = model["generator"](x)
            of_each["discriminator"].zero_grad()
            real = x * math.nan if number == 3 else x
            functional.cross_entropy(model["discriminator"](real), y).backward()
            of_each["discriminator"].step()
            before = [p.clone() for p in model["generator"].parameters()]
            of_each["generator"].zero_grad()
            functional.cross_entropy(model["discriminator"](fake), y).backward()
            of_each["generator"].step()
            assert not same(before, list(model["generator"].parameters()))
        assert monitor.report().num_dropped == 1
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def train_and_drop(model):
    """Make a step, and drop the next."""
    with AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject") as monitor:
        for factor in (1.0, math.nan):
            x, y = batch(0)
            model.zero_grad()
            functional.cross_entropy(model(factor * x), y).backward()
            sgd(model).step()
        assert monitor.report().num_dropped == 1


def test_of_a_buffer_that_is_larger_than_all_that_is_trained_no_copy_is_kept_and_others_go_back():
    class Tabled(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = normed()
            self.register_buffer("table", torch.zeros(FEW, dtype=torch.int32))

        def forward(self, inputs):
            self.table += 1
            return self.last(inputs)

    model = Tabled()
    train_and_drop(model)
    assert model.last[-1].num_batches_tracked == 1
    assert model.table[0] == 2


SMALL = [name for name in ("int4", "uint2", "bits8", "float4_e2m1fn_x2") if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", SMALL)
def test_a_buffer_of_numbers_that_torch_can_only_store_is_left_alone(dtype):
    model = normed()
    model.register_buffer("packed", torch.ones(4, dtype=torch.uint8).view(getattr(torch, dtype)))
    train_and_drop(model)
    assert model[-1].num_batches_tracked == 1
