"""Accumulated micro-batches are one large batch, for one process alone."""

import copy

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import ClosedError, ConfigError, NonFiniteError, StateError

IGNORED = -100
NUM_CLASSES = 5


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def data(length, seed, share_ignored=0.0):
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(NUM_CLASSES, (length,), generator=random)
    targets[torch.rand(length, generator=random) < share_ignored] = IGNORED
    return torch.randn(length, 6, generator=random), targets


def large_batches(batches, loss_of, optimizer):
    """Train in one loop of torch's, with each of these batches whole; return the parameters."""
    trained = model()
    live = optimizer(trained.parameters())
    for inputs, targets in batches:
        live.zero_grad()
        loss_of(trained(inputs), targets).backward()
        live.step()
    return list(trained.parameters())


def close(ours, theirs):
    return all((a - b).abs().max() <= 1e-6 * b.abs().max() for a, b in zip(ours, theirs, strict=True))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@hypothesis.example(sizes=[1, 4, 5, 8, 9], reduction="sum", seed=84)
@hypothesis.given(sizes=SIZES, reduction=st.sampled_from(["mean", "sum"]), seed=st.integers(0, 99))
def test_micro_batches_of_any_sizes_are_one_large_batch(sizes, reduction, seed):
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained, accumulation_steps=len(sizes), overlap=False, loss_reduction=reduction
    )

    def steps_alike(parameters):  # a sum's steps, as many times as large, would blow up what is rounded
        rate = 0.1 if reduction == "mean" else 0.1 / sum(sizes)
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    live = steps_alike(trained.parameters())
    batches = [data(sum(sizes), seed + n) for n in range(3)]
    taken = 0
    for inputs, targets in batches:
        for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            ours.train_step(inputs=micro[0], targets=micro[1], optimizer=live, loss_fn=loss_fn)
            taken += 1
            assert ours.is_update_step() == (taken % len(sizes) == 0)
    assert (ours.updates, ours.effective_batch_size) == (3, sum(sizes))
    assert close(trained.parameters(), large_batches(batches, loss_fn, steps_alike))


@hypothesis.given(
    sizes=SIZES, share=st.floats(0, 1), reduction=st.sampled_from(["mean", "sum"]), seed=st.integers(0, 99)
)
def test_with_a_normalizer_ignored_targets_count_as_in_one_large_batch(sizes, share, reduction, seed):
    inputs, targets = data(sum(sizes), seed, share)
    hypothesis.assume(bool((targets != IGNORED).any()))
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained,
        accumulation_steps=len(sizes),
        overlap=False,
        loss_reduction=reduction,
        normalizer=lambda _, targets: int((targets != IGNORED).sum()),
    )
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0],
            targets=micro[1],
            optimizer=optim.SGD(lr=0.1, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(reduction=reduction),
        )
    assert close(trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))


def test_without_a_normalizer_means_over_unlike_counts_are_another_thing():
    sizes = [3, 3]
    inputs, targets = data(6, 1)
    targets[:2] = IGNORED
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2)
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0], targets=micro[1], optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss()
        )
    whole = large_batches([(inputs, targets)], nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1))
    assert not close(trained.parameters(), whole)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop])
def test_windows_of_one_are_a_loop_of_torchs_bit_for_bit(kind):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=1)
    batches = [data(7, n) for n in range(20)]
    for inputs, targets in batches:
        ours.train_step(
            inputs=inputs, targets=targets, optimizer=kind(lr=0.01), loss_fn=nn.CrossEntropyLoss()
        )
    theirs = getattr(torch.optim, kind.__name__)
    whole = large_batches(batches, nn.CrossEntropyLoss(), lambda p: theirs(p, lr=0.01))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), whole, strict=True))


def test_what_is_left_of_a_window_is_an_update_at_flush():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=4)
    inputs, targets = data(6, 3)
    sizes = [2, 4]
    for micro in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        ours.train_step(
            inputs=micro[0],
            targets=micro[1],
            optimizer=optim.SGD(lr=0.1, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(),
        )
    assert (ours.updates, ours.is_update_step()) == (0, False)
    ours.flush()
    assert (ours.updates, ours.is_update_step(), ours.effective_batch_size) == (1, True, 6)
    assert close(trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))
    ours.flush()
    assert (ours.updates, ours.is_update_step()) == (1, False)


def test_it_gives_the_micro_batchs_loss_and_leaves_no_gradients_behind():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2)
    inputs, targets = data(4, 0)
    expected = nn.CrossEntropyLoss()(trained(inputs), targets)
    expected.backward()  # gradients that are there before are not ours
    given = {"optimizer": optim.SGD(lr=0.1), "loss_fn": nn.CrossEntropyLoss()}
    assert ours.train_step(inputs=inputs, targets=targets, **given) == expected.item()
    ours.train_step(inputs=inputs, targets=targets, **given)
    assert all(p.grad is None for p in trained.parameters())
    whole = large_batches([(inputs, targets)], nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1))
    assert close(trained.parameters(), whole)


def test_a_parameter_without_a_gradient_is_left_alone():
    trained = model()
    trained.add_module("unused", nn.Linear(2, 2))
    before = trained.unused.weight.detach().clone()

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = trained

        def forward(self, inputs):
            return self.all[2](self.all[1](self.all[0](inputs)))

    ours = offbeat.AsyncGradientAccumulator(First(), accumulation_steps=1)
    inputs, targets = data(4, 0)
    ours.train_step(
        inputs=inputs,
        targets=targets,
        optimizer=optim.AdamW(lr=0.1, weight_decay=0.5),
        loss_fn=nn.CrossEntropyLoss(),
    )
    assert torch.equal(trained.unused.weight, before)


def test_sizes_are_given_as_steps_or_as_samples():
    ours = offbeat.AsyncGradientAccumulator(model(), base_batch_size=32, target_batch_size=500)
    assert (ours.accumulation_steps, ours.effective_batch_size) == (16, 512)
    assert offbeat.AsyncGradientAccumulator(model(), 4, base_batch_size=8).effective_batch_size == 32
    assert offbeat.AsyncGradientAccumulator(model(), 4).effective_batch_size == 0


@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({}, "no size is given: give accumulation_steps, or base_batch_size and target_batch_size"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0: give a whole number, 1 or more"),
        ({"target_batch_size": 64}, "target_batch_size given: give"),
        ({"accumulation_steps": 2, "target_batch_size": 64}, "accumulation_steps and target_batch_size give"),
        ({"base_batch_size": 64}, "base_batch_size given: give"),
        ({"accumulation_steps": 1, "overlap": "yes"}, "overlap is 'yes': give True or False"),
        ({"accumulation_steps": 1, "process_group": 3}, "process_group is 3: give a torch.distributed."),
        (
            {"base_batch_size": 64, "target_batch_size": 32},
            "target_batch_size is 32 and base_batch_size 64: one micro-batch is larger; give a target_batch_",
        ),
        ({"accumulation_steps": 1, "loss_reduction": "none"}, "loss_reduction is 'none': give \"mean\" or"),
        ({"accumulation_steps": 1, "loss_reduction": np.ones(2)}, "loss_reduction is array([1., 1.])"),
        ({"accumulation_steps": 1, "normalizer": 3}, "normalizer is 3: give a function of (inputs, targets)"),
        ({"accumulation_steps": 1, "device": "abacus"}, "device is 'abacus'"),
        ({"accumulation_steps": 1, "model": nn.ReLU()}, "a ReLU without parameters"),
        ({"accumulation_steps": 1, "model": "resnet"}, "model is 'resnet': give an nn.Module"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_value_and_the_remedy(keywords, what):
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator(**{"model": model()} | keywords)
    assert what in str(caught.value)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator("net", accumulation_steps=-1, loss_reduction="max", device="abacus")
    for what in (
        "model is 'net'",
        "accumulation_steps is -1",
        "loss_reduction is 'max'",
        "device is 'abacus'",
    ):
        assert what in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "what"),
    [
        ({"optimizer": torch.optim.LBFGS}, "needs a closure"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, "loss_fn gave a tensor of shape"),
        ({"loss_fn": None}, r"loss_fn is None: give a function of \(outputs, targets\)"),
        ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss: give an object"),
        (
            {"inputs": torch.tensor(1.0), "targets": 3},
            "cannot be counted; give inputs or targets whose first",
        ),
        (
            {"inputs": torch.empty(0, 6), "targets": torch.empty(0).long()},
            "the batch has no sample.*drop_last",
        ),
    ],
)
def test_a_step_that_cannot_be_made_adds_nothing(keywords, what):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    inputs, targets = data(4, 0)
    given = {"optimizer": optim.SGD(lr=0.1, momentum=0.9), "loss_fn": nn.CrossEntropyLoss()}
    halves = [
        dict(zip(("inputs", "targets"), half, strict=True))
        for half in ((inputs[:2], targets[:2]), (inputs[2:], targets[2:]))
    ]
    with pytest.raises(ConfigError, match=what):
        ours.train_step(**halves[0] | given | keywords)
    ours.train_step(**halves[0], **given)
    with pytest.raises(ConfigError):
        ours.train_step(
            **halves[0] | given | keywords | ({"optimizer": optim.SGD} if "optimizer" in keywords else {})
        )
    ours.train_step(**halves[1], **given)
    assert (ours.updates, ours.effective_batch_size) == (1, 4)
    assert close(trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))


def test_a_batch_without_a_sample_leaves_the_model_and_a_normalizer_alone():
    asked = []
    trained = nn.Sequential(nn.BatchNorm1d(6), model())
    ours = offbeat.AsyncGradientAccumulator(trained, 1, normalizer=lambda *_: asked.append(1) or 0)
    with pytest.raises(ConfigError, match="the batch has no sample"):
        ours.train_step(
            inputs=torch.empty(0, 6),
            targets=torch.empty(0).long(),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=nn.CrossEntropyLoss(),
        )
    assert (trained[0].num_batches_tracked.item(), asked, ours.optimizer) == (0, [], None)
    inputs, targets = data(4, 0)
    ours.train_step(
        inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss()
    )
    assert asked == [1], "a batch in which nothing counts is one"


@pytest.mark.parametrize(
    "counts",
    [-1, float("nan"), float("inf"), None, "4", torch.ones(2), 10**400],
    ids=lambda counts: repr(counts)[:9],
)
def test_a_normalizer_gives_a_count(counts):
    ours = offbeat.AsyncGradientAccumulator(model(), 1, normalizer=lambda *_: counts)
    inputs, targets = data(4, 0)
    with pytest.raises(ConfigError, match=r"normalizer gave .*: it gives a count, 0 or more"):
        ours.train_step(
            inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss()
        )


def in_two(ours, inputs, targets, between=lambda: None, loss_fn=None):
    for half in (slice(0, 2), slice(2, None)):
        ours.train_step(
            inputs=inputs[half],
            targets=targets[half],
            optimizer=optim.SGD(lr=0.1, momentum=0.9),
            loss_fn=loss_fn or nn.CrossEntropyLoss(),
        )
        between()


def test_gradients_that_are_zeroed_or_added_between_two_steps_are_not_the_windows():
    inputs, targets = data(6, 0)
    for between in (
        lambda trained: trained.zero_grad(),
        lambda trained: trained.zero_grad(set_to_none=False),
        lambda trained: trained(inputs).sum().backward(),
    ):
        trained = model()
        ours = offbeat.AsyncGradientAccumulator(trained, 2)
        in_two(ours, inputs, targets, lambda trained=trained, between=between: between(trained))
        assert close(
            trained.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum)
        )


def test_what_breaks_in_the_backward_pass_drops_the_window():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()

        def forward(self, inputs):
            return self.net(inputs)

    trained = Net()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    inputs, targets = data(6, 0)
    plain = nn.CrossEntropyLoss()
    ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1, momentum=0.9), loss_fn=plain)
    with pytest.raises(MemoryError):
        ours.train_step(inputs=inputs, targets=targets, loss_fn=lambda *both: Breaks.apply(plain(*both)))
    assert all(p.grad is None for p in trained.parameters())
    in_two(ours, inputs, targets)
    assert ours.updates == 1
    assert close(trained.parameters(), large_batches([(inputs, targets)], plain, momentum))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "2", nn.Linear(8, NUM_CLASSES)),
        lambda net: net.load_state_dict(model().state_dict(), assign=True),
        lambda net: net.append(nn.Linear(NUM_CLASSES, NUM_CLASSES)),
    ],
)
def test_a_model_with_other_parameters_than_at_first_is_refused(change):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    change(trained)
    with pytest.raises(StateError, match="the model"):
        in_two(ours, *data(6, 0))


def test_a_loss_of_something_else_is_refused():
    ours = offbeat.AsyncGradientAccumulator(model(), 2)
    other = nn.Parameter(torch.ones(()))
    with pytest.raises(StateError, match="no parameter has a gradient"):
        in_two(ours, *data(6, 0), loss_fn=lambda *_: other * 2)


def test_a_window_in_which_nothing_counts_is_no_update_and_no_error_of_sums():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained, 2, loss_reduction="sum", normalizer=lambda _, targets: (targets != IGNORED).sum()
    )
    inputs, targets = data(6, 0)
    summed = nn.CrossEntropyLoss(reduction="sum", ignore_index=IGNORED)
    in_two(ours, inputs, targets, loss_fn=summed)
    before = [p.detach().clone() for p in trained.parameters()]
    in_two(ours, inputs, torch.full_like(targets, IGNORED), loss_fn=summed)
    assert all(map(torch.equal, before, trained.parameters()))
    in_two(ours, inputs, targets, loss_fn=summed)
    other = nn.Parameter(torch.ones(()))
    with pytest.raises(StateError, match="no parameter has a gradient"):
        in_two(ours, inputs, targets, loss_fn=lambda *_: other * 2)


def test_a_loss_that_reduces_otherwise_than_was_told_is_warned_of_once(caplog):
    ours = offbeat.AsyncGradientAccumulator(model(), 2)
    in_two(ours, *data(6, 0), loss_fn=nn.CrossEntropyLoss(reduction="sum"))
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert 'the AsyncGradientAccumulator has loss_reduction="mean"' in warning


def test_the_live_optimizer_can_be_had_and_its_hooks_see_the_updates_gradient():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    assert ours.optimizer is None
    inputs, targets = data(6, 0)
    in_two(ours, inputs, targets)
    norms = []
    ours.optimizer.register_step_pre_hook(
        lambda *_: norms.append(nn.utils.clip_grad_norm_(trained.parameters(), 1e-3).item())
    )
    before = [p.detach().clone() for p in trained.parameters()]
    ours.optimizer.state.clear()  # no momentum
    in_two(ours, inputs, targets)
    moved = torch.cat([(a - b).flatten() for a, b in zip(trained.parameters(), before, strict=True)]).norm()
    assert norms[0] > 1e-3
    assert moved.item() == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_one_of_several_processes_is_not_alone_unless_it_says_so(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"process 1 of 2, .* offbeat.init_distributed\('gloo'\).* worker="):
        offbeat.AsyncGradientAccumulator(model(), 2)
    ours = offbeat.AsyncGradientAccumulator(model(), 2, process_group=False)
    in_two(ours, *data(6, 0))
    assert ours.updates == 1


def test_a_target_that_is_no_multiple_is_rounded_up_with_a_warning(caplog):
    offbeat.AsyncGradientAccumulator(model(), base_batch_size=64, target_batch_size=130)
    assert "target_batch_size is 130, and an update is of 192 samples" in caplog.text


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    inputs, targets = data(4, 0)
    given = {"optimizer": optim.Adam(lr=0.1), "loss_fn": nn.CrossEntropyLoss()}
    for _ in range(2):
        ours.train_step(inputs=inputs, targets=targets, **given)
    before = [p.detach().clone() for p in trained.parameters()]
    ours.train_step(inputs=inputs, targets=targets, **given)
    with pytest.raises(NonFiniteError, match="the gradient of update 2 is NaN or infinite"):
        ours.train_step(inputs=torch.full_like(inputs, float("nan")), targets=targets, **given)
    assert all(map(torch.equal, before, trained.parameters()))
    for _ in range(2):
        ours.train_step(inputs=inputs, targets=targets, **given)
    assert ours.updates == 2
    assert all(p.isfinite().all() for p in trained.parameters())


def test_a_sparse_gradient_that_is_not_finite_is_an_error_and_changes_nothing():
    trained = nn.Embedding(6, 3, sparse=True)
    ours = offbeat.AsyncGradientAccumulator(trained, 2)
    given = {"targets": torch.zeros(2), "optimizer": torch.optim.SGD(trained.parameters(), lr=0.1)}
    before = trained.weight.detach().clone()
    ours.train_step(inputs=torch.tensor([0, 1]), loss_fn=lambda out, _: out.mean(), **given)
    with pytest.raises(NonFiniteError, match="the gradient of update 1 is NaN or infinite"):
        ours.train_step(
            inputs=torch.tensor([1, 2]), loss_fn=lambda out, _: out.mean() * float("nan"), **given
        )
    assert torch.equal(trained.weight, before)
    for rows in ([0, 1], [1, 2]):
        ours.train_step(inputs=torch.tensor(rows), loss_fn=lambda out, _: out.mean(), **given)
    expected = before - 0.1 / 12 * torch.tensor([1.0, 2.0, 1.0, 0.0, 0.0, 0.0])[:, None]
    assert torch.allclose(trained.weight, expected, rtol=1e-6)


def test_an_update_that_a_monitor_drops_is_not_one_that_a_scaler_skipped():
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 1)
    with offbeat.AsyncTrainingMonitor(trained, ["non_finite"], remediation_strategy="reject"):
        feed(ours, 4, 4)
        before = [p.detach().clone() for p in trained.parameters()]
        inputs, targets = data(4, 0)
        ours.train_step(
            inputs=torch.full_like(inputs, float("nan")), targets=targets, loss_fn=nn.CrossEntropyLoss()
        )
    assert all(map(torch.equal, before, trained.parameters()))
    assert (ours.updates, ours.skipped_updates) == (2, 0)


def test_a_keyword_that_is_unknown_or_missing_its_name_is_answered_with_the_nearest():
    ours = offbeat.AsyncGradientAccumulator(model(), 2)
    inputs, targets = data(4, 0)
    with pytest.raises(ConfigError, match="did you mean 'inputs'"):
        ours.train_step(input=inputs, targets=targets, loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match="By keyword alone: inputs, targets, optimizer, loss_fn"):
        ours.train_step(inputs, targets)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_compiled_model_is_trained_as_what_is_inside(is_in_place):
    inside = model()
    compiled = inside
    if is_in_place:
        inside.compile(backend="eager")
    else:
        compiled = torch.compile(inside, backend="eager")
    ours = offbeat.AsyncGradientAccumulator(compiled, 2)
    inputs, targets = data(6, 0)
    in_two(ours, inputs, targets)
    assert ours.updates == 1
    assert close(inside.parameters(), large_batches([(inputs, targets)], nn.CrossEntropyLoss(), momentum))


def feed(ours, *sizes):
    """Train on batches of these sizes."""
    for number, size in enumerate(sizes):
        inputs, targets = data(size, number)
        ours.train_step(
            inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss()
        )


def sized(base, target=128, **keywords):
    return offbeat.AsyncGradientAccumulator(
        model(), base_batch_size=base, target_batch_size=target, **keywords
    )


@pytest.mark.parametrize(
    ("base", "size", "in_update", "remedy"),
    [
        (16, 32, 256, "give base_batch_size=32, or load batches of 16"),
        (64, 32, 64, "give base_batch_size=32, or load batches of 64"),
        (64, 200, 400, "load batches of 64"),
    ],
)
def test_micro_batches_of_another_size_than_was_said_are_warned_of_once(
    base, size, in_update, remedy, caplog
):
    ours = sized(base)
    assert ours.effective_batch_size == 128
    num = 128 // base
    sizes = [size] * num
    feed(ours, *sizes)
    assert (ours.updates, ours.effective_batch_size) == (1, in_update)
    feed(ours, *sizes)
    assert (ours.updates, ours.effective_batch_size) == (2, in_update)
    told = (
        f"base_batch_size is {base}, and micro-batches are of {size} samples: an update is of {num} of them, "
        f"so of {in_update} samples, where target_batch_size is 128: {remedy}"
    )
    assert [record.getMessage() for record in caplog.records] == [told]
    other = sized(base)
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(ours.state_dict(), optimizer=optim.SGD(lr=0.1))
    assert other.effective_batch_size == in_update


def test_the_last_batch_of_an_epoch_may_be_shorter(caplog):
    ours = sized(16, 64)
    feed(ours, 16, 16, 5, 16, 16, 5)
    assert (ours.updates, ours.effective_batch_size, caplog.text) == (1, 64, "")
    feed(ours, 9)  # two short ones together are not the ends of two epochs
    assert "base_batch_size is 16, and micro-batches are of 9 samples" in caplog.text
    ours.close()


def test_of_unequal_micro_batches_the_newest_window_counts(caplog):
    ours = sized(16, 64)
    feed(ours, 20, 30, 40, 10)
    assert (ours.updates, ours.effective_batch_size) == (1, 100)
    feed(ours, 32, 32)
    ours.flush()
    assert (ours.updates, ours.effective_batch_size) == (2, 128), "of a whole window"
    assert len(caplog.records) == 1


def test_accumulation_steps_with_a_size_that_is_another_are_told_of_likewise(caplog):
    ours = offbeat.AsyncGradientAccumulator(model(), 4, base_batch_size=8)
    feed(ours, *[6] * 4)
    assert (ours.updates, ours.effective_batch_size) == (1, 24)
    assert "an update is of 4 of them, so of 24 samples: give base_batch_size=6, or" in caplog.text


def test_what_is_closed_trains_no_more_and_says_so():
    """Alone, too: a script that is started again as one of several would train apart from the others."""
    with offbeat.AsyncGradientAccumulator(model(), 2) as ours:
        feed(ours, 8)
    before = copy.deepcopy(ours.model.state_dict())
    for call in (lambda: feed(ours, 8), ours.flush):
        with pytest.raises(ClosedError, match=r"AsyncGradientAccumulator was closed, .*: make a new one"):
            call()
    assert ours.updates == 0, "that is flush's"
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())
    ours.close()


@pytest.mark.parametrize("part", ["accumulator", "averager"])
def test_model_and_loss_are_computed_in_a_context_and_the_backward_pass_is_not(part):
    seen = []

    class Watched(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            seen.append(("forward", outputs.dtype))
            outputs.register_hook(lambda _: seen.append(("backward", torch.is_autocast_enabled("cpu"))))
            return outputs

    def loss_fn(outputs, targets):
        seen.append(("loss", torch.is_autocast_enabled("cpu")))
        return nn.functional.cross_entropy(outputs, targets)

    torch.manual_seed(0)
    trained, other = Watched(4, 3), nn.Linear(4, 3)
    other.load_state_dict(trained.state_dict())
    make = {
        "accumulator": lambda: offbeat.AsyncGradientAccumulator(trained, 1, overlap=False),
        "averager": lambda: offbeat.AsyncModelAverager(trained),
    }
    ours, live = make[part](), torch.optim.SGD(other.parameters(), lr=0.1)
    in_half = torch.autocast("cpu", torch.bfloat16)
    for number in range(3):
        inputs, targets = (
            torch.randn(5, 4, generator=torch.Generator().manual_seed(number)),
            torch.arange(5) % 3,
        )
        given = {"inputs": inputs, "targets": targets, "optimizer": optim.SGD(lr=0.1), "loss_fn": loss_fn}
        ours.train_step(**given, autocast=in_half)
        live.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(other(inputs), targets)
        loss.backward()
        live.step()
    assert seen == [("forward", torch.bfloat16), ("loss", True), ("backward", False)] * 3
    assert all(map(torch.equal, trained.parameters(), other.parameters()))
    with pytest.raises(ConfigError, match=r"autocast is 'bf16': give torch\.autocast"):
        ours.train_step(**given, autocast="bf16")
