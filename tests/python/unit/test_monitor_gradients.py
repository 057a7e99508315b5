"""What hooks measure of a model's gradients, and what becomes of a step whose gradients are not used."""

import copy
import gc
import io
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

from offbeat import AsyncGradientAccumulator, AsyncTrainingMonitor, optim, trained_by
from offbeat.errors import ConfigError
from offbeat.local import lr_scale
from offbeat.local.buffers import FEW
from support.small_net import net, normed

MEASURED = ["gradient_norm", "update_ratio", "non_finite"]


def batch(number, samples=16):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss_of(model, number):
    x, y = batch(number)
    return functional.cross_entropy(model(x), y)


def norm_of(model):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))


def seen(monitor, metric):
    return monitor.report().series[metric].values


def sgd(model, **keywords):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **keywords)


def state_of(model, optimizer):
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return [t.clone() for t in tensors if isinstance(t, torch.Tensor)]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) and torch.equal(a.isnan(), b.isnan()) for a, b in zip(one, other, strict=True)
    )


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


def test_of_frozen_weights_that_are_quantized_no_norm_is_asked():
    model = net()
    model.table = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    with AsyncTrainingMonitor(model, MEASURED) as monitor:
        for number in range(3):
            loss_of(model, number).backward()
            sgd(model).step()
    assert all(0 < ratio < 1 for ratio in seen(monitor, "update_ratio"))


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
@pytest.mark.parametrize(("fused", "is_told"), [(False, True), (True, True), (True, False)])
def test_what_a_batch_has_broken_whose_step_a_grad_scaler_skips_goes_back(fused, is_told, metric):
    """With a fused optimizer that has to be told of no scaler, and what is dropped later brings none back."""
    model = normed()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model, fused=fused)
    told = scaler if is_told else None
    with AsyncTrainingMonitor(model, [metric], remediation_strategy="reject", grad_scaler=told):
        for number in range(8):
            x, y = batch(number)
            x = x * math.nan if number in (3, 6) else x
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
    assert "step 109: no gradient has passed for 100 steps, and the model learns nothing" in said[0]
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


def test_a_monitor_that_nobody_keeps_leaves_no_hook_and_no_monitor():
    from torch.optim import optimizer as hooks

    lr_scale.listen()  # which stays for good
    before = len(hooks._global_optimizer_pre_hooks)
    model = net()
    monitor = AsyncTrainingMonitor(model, MEASURED)
    assert len(hooks._global_optimizer_pre_hooks) == before + 1
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    assert len(hooks._global_optimizer_pre_hooks) == before
    loss_of(model, 0).backward()
    sgd(model).step()


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
    lr_scale.scale(live, 2.0)
    live.step()
    assert live.rates[-1] == pytest.approx(0.1 * 1024)


def test_a_rate_is_reduced_and_whole_again_in_the_midst_of_steps_with_another_monitor_of_the_model():
    model = net()
    optimizer = Notes(model.parameters())
    settings = {"divergence_metrics": ["gradient_norm"], "warm_up": 3, "quiet_steps": 3}
    ours = AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", acts_on=optimizer, **settings)
    other = AsyncTrainingMonitor(model, **settings)
    for step in range(12):
        optimizer.zero_grad()
        (sum(p.sum() for p in model.parameters()) * (100.0 if step == 5 else 1.0)).backward()
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
