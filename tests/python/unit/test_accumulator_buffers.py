"""A window that is dropped because it is not finite leaves no trace in buffers."""

import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.accumulator.kept_buffers import KeptBuffers, is_kept, is_ruined
from offbeat.accumulator.members import words_of_left_out
from offbeat.errors import ConfigError, NonFiniteError
from offbeat.local.buffers import FEW, few, write
from offbeat.local.mean_alike import left_out, shares

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1)
NAN = float("nan")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def micro_batch(number, factor=1.0):
    random = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(4, 6, generator=random), torch.randint(5, (4,), generator=random)
    inputs[0, 0] *= factor
    return {"inputs": inputs, "targets": targets}


def statistics(trained):
    return {name: buffer.clone() for name, buffer in trained.named_buffers()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor", [NAN, math.inf, 1e38])
def test_a_window_that_is_refused_leaves_buffers_as_they_were_before_it(place, factor):
    ours = offbeat.AsyncGradientAccumulator(model(), 3)
    for number in range(3):
        ours.train_step(**micro_batch(number), optimizer=SPEC, loss_fn=LOSS)
    before = statistics(ours.model)
    batches = [micro_batch(number, factor if number == place else 1.0) for number in range(3)]
    for batch in batches[:2]:
        ours.train_step(**batch, loss_fn=LOSS)
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        ours.train_step(**batches[2], loss_fn=lambda out, targets: LOSS(out * math.inf, targets))
    assert same(before, statistics(ours.model)), "the counts of batches, too"
    for number in range(3):
        ours.train_step(**micro_batch(number), loss_fn=LOSS)
    assert not same(before, statistics(ours.model))
    assert ours.updates == 2


def test_buffers_that_stayed_finite_go_back_as_well_where_nothing_is_to_be_changed():
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    before = statistics(ours.model)
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        ours.train_step(
            **micro_batch(0), optimizer=SPEC, loss_fn=lambda out, targets: LOSS(out, targets) * NAN
        )
    assert same(before, statistics(ours.model))


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_window_that_a_scaler_skips_leaves_what_it_broke_in_no_buffer(is_flushed):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ours = offbeat.AsyncGradientAccumulator(model(), 3 if is_flushed else 2, grad_scaler=scaler)
    ours.train_step(**micro_batch(0), optimizer=SPEC, loss_fn=LOSS)
    ours.flush()
    before = statistics(ours.model)
    ours.train_step(**micro_batch(1), loss_fn=LOSS)
    ours.train_step(**micro_batch(2, NAN), loss_fn=LOSS)
    ours.flush()
    assert ours.skipped_updates == 1
    assert same(before, statistics(ours.model))


def test_what_only_the_scale_made_infinite_keeps_its_statistics_as_in_a_loop_of_torchs():
    ours = offbeat.AsyncGradientAccumulator(
        model(), 1, grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127)
    )
    ours.train_step(**micro_batch(0), optimizer=SPEC, loss_fn=lambda out, targets: 8 * LOSS(out, targets))
    theirs = model()
    theirs(micro_batch(0)["inputs"])
    assert ours.skipped_updates == 1
    assert same(statistics(theirs), statistics(ours.model))


class Masked(nn.Module):
    """Where the loss is finite, and the gradient and a buffer are not."""

    def __init__(self):
        super().__init__()
        self.inside = model()

    def forward(self, inputs):
        out = self.inside(inputs.nan_to_num()) if self.training else inputs
        broken = self.inside[1](self.inside[0](inputs))
        return torch.where(broken.isfinite().all(), broken[:, :5], out)


def test_a_gradient_that_is_not_finite_beside_a_finite_loss_leaves_nothing_either():
    ours = offbeat.AsyncGradientAccumulator(Masked(), 1)
    ours.train_step(**micro_batch(0), optimizer=SPEC, loss_fn=LOSS)
    before = statistics(ours.model)
    with pytest.raises(NonFiniteError):
        ours.train_step(**micro_batch(1, NAN), loss_fn=LOSS)
    assert same(before, statistics(ours.model))


def test_what_breaks_in_the_backward_pass_of_a_batch_that_is_not_finite_leaves_no_nan():
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    before = statistics(ours.model)
    with torch.autograd.set_detect_anomaly(mode=True), pytest.raises(RuntimeError, match="nan values"):
        ours.train_step(**micro_batch(0, NAN), optimizer=SPEC, loss_fn=LOSS)
    assert same(before, statistics(ours.model))


def fails_by_itself(out, targets):
    loss = LOSS(out, targets)
    if not loss.isfinite():
        raise ValueError("to be left out")
    return loss


def is_refused(out, targets):
    loss = LOSS(out, targets)
    return loss if loss.isfinite() else loss.detach()


class Failing(nn.Module):
    """A model that looks at what it gives."""

    def __init__(self):
        super().__init__()
        self.inside = model()

    def forward(self, inputs):
        out = self.inside(inputs)
        if not out.isfinite().all():
            raise ValueError("to be left out")
        return out


def is_broken_off(outputs, targets):
    if not outputs.isfinite().all():
        raise KeyboardInterrupt
    return LOSS(outputs, targets)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("made", "loss_fn", "error"),
    [
        (model, fails_by_itself, ValueError),
        (model, is_broken_off, KeyboardInterrupt),
        (model, is_refused, ConfigError),
        (Failing, LOSS, ValueError),
    ],
    ids=["the loss function", "Ctrl-C", "its check", "the model"],
)
def test_what_fails_before_the_backward_pass_leaves_no_nan_and_the_window_as_it_was(
    place, made, loss_fn, error
):
    ours, theirs = (offbeat.AsyncGradientAccumulator(made(), 2) for _ in range(2))
    for each in (ours, theirs):
        for number in range(2 + place):
            each.train_step(**micro_batch(number), optimizer=SPEC, loss_fn=loss_fn)
    before = ours.state_dict()
    with pytest.raises(error):
        ours.train_step(**micro_batch(7, NAN), loss_fn=loss_fn)
    after = ours.state_dict()
    counts = {"updates", "skipped_updates", "was_update", "samples", "sizes", "due", "settings"}
    assert {name: before[name] for name in counts} == {name: after[name] for name in counts}
    gradients = before["window"].pop("gradients"), after["window"].pop("gradients")
    assert before["window"] == after["window"]
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert all(bool(value.isfinite().all()) for value in statistics(ours.model).values())
    if not place:
        assert same(statistics(theirs.model), statistics(ours.model))
    for each in (ours, theirs):
        for number in range(3, 6):
            each.train_step(**micro_batch(number), loss_fn=loss_fn)
        each.flush()
    assert ours.updates == theirs.updates == 3
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_fails_in_no_window_is_nothing_that_a_flush_is_missed_for(caplog):
    with offbeat.AsyncGradientAccumulator(model(), 2) as ours:
        ours.train_step(**micro_batch(0), optimizer=SPEC, loss_fn=LOSS)
        ours.state_dict()  # it is to go on from there
        with pytest.raises(ValueError, match="to be left out"):
            ours.train_step(**micro_batch(1, NAN), loss_fn=fails_by_itself)
    assert caplog.text == ""


def test_a_monitor_that_drops_the_update_finds_no_nan_to_keep():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    with offbeat.AsyncTrainingMonitor(trained, ["non_finite"], remediation_strategy="reject"):
        for number in range(4):
            ours.train_step(**micro_batch(number), optimizer=SPEC, loss_fn=LOSS)
        before = statistics(trained)
        for number in range(2):
            ours.train_step(**micro_batch(number, NAN), loss_fn=LOSS)
    assert same(before, statistics(trained))


def test_a_state_that_is_taken_behind_a_broken_batch_has_no_nan_and_goes_on():
    first, second = (offbeat.AsyncGradientAccumulator(model(), 2) for _ in range(2))
    first.train_step(**micro_batch(0, NAN), optimizer=SPEC, loss_fn=LOSS)
    assert same(statistics(model()), statistics(first.model))
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict(), optimizer=SPEC)
    with pytest.raises(NonFiniteError):
        second.train_step(**micro_batch(1), loss_fn=LOSS)
    assert same(statistics(model()), statistics(second.model))


def test_a_trainer_that_accumulates_keeps_its_statistics_finite():
    trained = model()
    trainer = offbeat.AsyncTrainer(trained, strategy="accumulate", regular_sync_frequency=2, warm_up_epochs=0)
    batches = [tuple(micro_batch(n, NAN if n == 3 else 1.0).values()) for n in range(4)]
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        trainer.train(dataloader=batches, optimizer=SPEC, loss_fn=LOSS, epochs=1)
    after = statistics(trained)
    assert all(bool(buffer.isfinite().all()) for buffer in after.values())
    assert after["1.num_batches_tracked"] == 2


# ---------------------------------------------------------------------- inside


class Buffered(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def test_of_two_windows_the_newest_that_is_whole_is_what_buffers_go_back_to():
    held = Buffered(own=torch.zeros(2), mask=torch.tensor([0.0, -math.inf]), ready=torch.tensor(1))
    kept = KeptBuffers(held, are_late=True)
    for number in (1.0, 2.0, 3.0):
        held.own.fill_(number)
        kept.seen += 10
        kept.begin()
        kept.end()
    held.own[0] = NAN
    held.ready += 1
    kept.put_back()
    assert (held.own.tolist(), held.ready.item(), kept.seen) == ([3.0, 3.0], 1, 30)
    held.own[1] = math.inf
    kept.begin()  # behind a window that was not known to be broken
    held.own[0] = 7.0
    kept.put_back(is_refused=True)
    assert (held.own.tolist(), kept.seen) == ([3.0, 3.0], 30)
    held.own.fill_(8.0)
    kept.put_back(is_refused=True)
    assert held.own.tolist() == [8.0, 8.0], "they have seen another window"
    kept.forget()
    held.own.fill_(NAN)
    kept.put_back(is_refused=True)
    assert held.own.isnan().all(), "of which window that is nobody knows"


def test_a_window_that_is_begun_again_takes_no_copies_from_the_one_under_way():
    norm = nn.BatchNorm1d(2)
    kept = KeptBuffers(norm, are_late=True)
    for number in (1.0, 2.0):
        norm.running_mean.fill_(number)
        kept.begin()
        kept.end()
    norm.running_mean[0] = NAN  # by the second, whose update is judged behind the third
    for _ in range(3):
        kept.begin()  # the third, whose first micro-batch fails twice
    kept.put_back(is_refused=True)
    assert norm.running_mean.tolist() == [2.0, 2.0]


def test_buffers_that_were_replaced_go_back_whatever_by_and_one_that_was_resized_keeps_none_from_it():
    kinds = {"plain": torch.zeros(2, 4), "flat": torch.zeros(2, 1).expand(2, 4), "single": torch.zeros(())}
    held = Buffered(**kinds, fixed=torch.zeros(2), resized=torch.zeros(2), own=torch.ones(2))
    kept = KeptBuffers(held, are_late=False)
    kept.begin()
    with torch.inference_mode():
        held.fixed = torch.full((2,), NAN)
    held.plain, held.single, held.resized = torch.full((2, 4), NAN), torch.tensor(NAN), torch.ones(3)
    held.flat = torch.full((2, 1), NAN).expand(2, 4)
    held.own += 1
    kept.put_back()
    assert all(torch.equal(getattr(held, name), value) for name, value in kinds.items())
    assert held.flat.stride() == (1, 0)
    assert (held.fixed.tolist(), held.own.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    kept.begin()
    assert held.resized.tolist() == [1.0] * 3


def test_an_expanded_tensor_is_written_once_and_has_memory_of_its_own_where_values_part():
    held = Buffered(flat=torch.zeros(2, 1).expand(2, 4))
    flat = held.flat
    write(torch.ones(2, 4), flat)
    assert (flat.stride(), flat.tolist()) == ((1, 0), [[1.0] * 4] * 2)
    sums = torch.tensor([[0.1], [NAN]]) + 1e-8 * torch.arange(4.0)  # of many members
    assert sums[0, 0] != sums[0, 3]
    write(sums, flat, num_eps=1000)
    assert flat.stride() == (1, 0)
    assert flat[0].tolist() == pytest.approx([0.1] * 4)
    write(torch.tensor([[NAN], [1.0]]).expand(2, 4), flat)
    assert flat.stride() == (1, 0)
    values = 1e4 + torch.arange(8.0).view(2, 4) / 1024  # as close as float32 has them, and no sums
    write(values, flat)
    assert held.flat is flat
    assert torch.equal(flat, values)
    with torch.inference_mode():
        fixed = torch.zeros(2, 1).expand(2, 4)
    write(values, fixed)
    assert torch.equal(fixed, values)


class OwnNorm(nn.Module):
    """A norm of a user's own, which writes where torch's version counters do not count it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, inputs):
        return nn.functional.batch_norm(inputs, self.mean, self.var, training=True)


class WithTable(nn.Module):
    """A few parameters beside a table that is larger than all of them."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)
        self.inside = nn.Sequential(OwnNorm(), model())

    def forward(self, inputs):
        return self.inside(inputs + self.table[:1].nan_to_num(neginf=0.0))


@pytest.mark.parametrize("value", [0.0, -math.inf], ids=["a table", "a mask"])
def test_of_what_is_larger_than_all_that_is_trained_no_copy_is_kept_and_all_else_goes_back(value, caplog):
    table = torch.full((FEW,), value)
    ours = offbeat.AsyncGradientAccumulator(WithTable(table), 1)
    ours.train_step(**micro_batch(0), optimizer=SPEC, loss_fn=LOSS)
    before = statistics(ours.model.inside)

    def writes(number):
        def loss_fn(out, targets):
            table[-1] = number
            return LOSS(out, targets)

        return loss_fn

    for number in (5.0, NAN, NAN):
        with pytest.raises(NonFiniteError):
            ours.train_step(**micro_batch(1, NAN), loss_fn=writes(number))
        assert same(before, statistics(ours.model.inside))
        assert str(float(table[-1])) == str(number), "as it was written"
        assert number is NAN or not caplog.text
    assert caplog.text.count("buffer 'table' became NaN or infinite, and stays so") == (value == 0.0)
    assert caplog.text.count("this one has 4,194,304") == (value == 0.0)


def test_the_smallest_buffers_are_copied_and_no_more_than_is_in_training():
    norm = {name: torch.zeros(8) for name in ("mean", "var")}
    large = {name: torch.zeros(1).expand(FEW // 2) for name in ("one", "two", "three")}
    module = nn.ParameterDict({"frozen": nn.Parameter(torch.zeros(1).expand(4 * FEW), requires_grad=False)})
    assert few(module, large | norm).keys() == {"mean", "var", "one"}
    assert few(module, {"one": large["one"], "two": large["two"]}).keys() == {"one", "two"}
    module["trained"] = nn.Parameter(torch.zeros(1).expand(FEW + FEW // 2))
    assert few(module, large | norm).keys() == {"mean", "var", "one", "two"}
    module["frozen"].requires_grad_()
    assert few(module, large | norm).keys() == {"mean", "var", "one", "two", "three"}


@pytest.mark.parametrize(
    ("buffer", "is_one"),
    [
        (torch.zeros(3), True),
        (torch.zeros(3, dtype=torch.bfloat16), True),
        (torch.tensor(0), True),
        (torch.zeros(3, dtype=torch.complex64), True),
        (torch.zeros(3, dtype=torch.int8), False),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), False),
        (torch.zeros(3).to_sparse(), False),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_statistics_and_counts_are_kept_and_stored_weights_are_not(buffer, is_one):
    assert is_kept(buffer) is is_one


def test_a_number_is_ruined_that_was_finite():
    before = {"a": torch.tensor([1.0, math.inf, NAN])}
    assert not is_ruined({"a": torch.tensor([2.0, NAN, math.inf])}, before)
    assert is_ruined({"a": torch.tensor([math.inf, 0.0, 0.0])}, before)
    assert not is_ruined({"a": torch.tensor([NAN])}, before), "of another shape: another buffer"
    assert not is_ruined({}, before)


@pytest.mark.parametrize(
    ("samples", "are_finite", "expected", "out"),
    [
        ([3, 1], [True, True], [0.75, 0.25], []),
        ([3, 1], [True, False], [1.0, 0.0], [1]),
        ([1, 1, 2], [True, False, True], [1 / 3, 0.0, 2 / 3], [1]),
        ([3, 1], [False, False], [0.75, 0.25], []),
        ([3, 0], [True, False], [1.0, 0.0], []),
        ([3, 0], [False, True], [0.0, 1.0], [0]),
        ([0, 0], [True, True], [1.0, 0.0], []),
        ([0, 0], [False, True], [0.0, 1.0], []),
        ([0, 0], [False, False], [1.0, 0.0], []),
    ],
)
def test_what_is_not_finite_has_no_share_in_a_mean(samples, are_finite, expected, out):
    assert shares(samples, are_finite) == pytest.approx(expected)
    assert left_out(samples, are_finite) == out


def test_who_was_left_out_is_named():
    assert words_of_left_out({"bn.mean": [1]}).startswith(
        "in member 1 buffers are NaN or infinite ('bn.mean'): "
    )
    assert words_of_left_out({"a": [2], "b": [1, 2], "c": [1]}).startswith(
        "in members 1, 2 buffers are NaN or infinite ('a' and 2 more): "
    )
