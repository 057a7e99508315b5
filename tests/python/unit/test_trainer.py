"""A trainer alone: what it does is a plain loop of torch's, and what cannot be done is refused."""

import copy
import functools
import io
import itertools
import json
import logging
import random
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

import offbeat
from offbeat import averaging, optim
from offbeat.errors import ConfigError, StateError
from offbeat.trainer.scheduling import as_it_was_after_failure
from offbeat.trainer.settings import Sync, Syncs
from offbeat.trainer.stage import Stage
from offbeat.trainer.trainer import KEYS

LOSS = nn.CrossEntropyLoss()
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    optim.Adam(lr=0.01),
    optim.AdamW(lr=0.01),
    optim.Adagrad(lr=0.1),
    optim.RMSprop(lr=0.01, momentum=0.5),
]


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def batch(number, size=7, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    return scale * torch.randn(size, 6, generator=generator), torch.randint(5, (size,), generator=generator)


DATA = [batch(number, size=3 + number % 5) for number in range(9)]


def live_of(spec, trained):
    return offbeat.local.LocalOptimizer(trained).use(spec)


def loop(
    trained, live, *, data=DATA, epochs=2, dtype=None, scaler=None, clip=None, each_step=None, each_epoch=None
):
    """The loop that a user would write; gives how many steps a scaler skipped."""
    skipped = 0
    torch.manual_seed(7)
    for _ in range(epochs):
        for inputs, targets in data:
            live.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = LOSS(trained(inputs), targets)
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(live)
            if clip is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            was_skipped = False
            if scaler is None:
                live.step()
            else:
                before = scaler.get_scale()
                scaler.step(live)
                scaler.update()
                was_skipped = scaler.get_scale() < before
                skipped += was_skipped
            if each_step is not None and not was_skipped:
                each_step.step()
        if each_epoch is not None:
            each_epoch.step()
    return skipped


def train(trainer, optimizer, *, data=DATA, epochs=2, **keywords):
    torch.manual_seed(7)
    return trainer.train(
        dataloader=data, epochs=epochs, optimizer=optimizer, loss_fn=LOSS, progress=False, **keywords
    )


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002  the global one is what is asked about


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_callbacks_find_the_strategy_of_the_batch_and_of_the_epoch_that_they_hear_of():
    class Notes:
        def __init__(self):
            self.seen, self.shown = [], []

        def on_step(self, trainer, step):
            self.seen.append((step.epoch, repr(trainer.strategy)))

        def on_epoch_end(self, trainer, epoch):
            self.seen.append((epoch, "end", repr(trainer.strategy)))
            self.shown.append(repr(trainer))

    notes = Notes()
    trainer = offbeat.AsyncTrainer(
        plain(), strategy={0: "local", 1: averaging.Average(), 3: "local"}, callbacks=notes
    )
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    by_epoch = ["'local'", "Average()", "Average()"]
    assert notes.seen == [
        noted for epoch, by in enumerate(by_epoch) for noted in ((epoch, by), (epoch, "end", by))
    ]
    assert ["strategy 'local', 1 epochs" in notes.shown[0], "3 epochs" in notes.shown[2]] == [True, True]
    assert trainer.strategy == "local", "of the next train"
    trainer.strategy = {0: "local", 4: averaging.Average()}
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=1)
    assert notes.seen[-2:] == [(3, "'local'"), (3, "end", "'local'")]
    assert trainer.strategy == averaging.Average()


def test_a_strategy_that_a_callback_sets_as_an_epoch_ends_is_found_at_once_and_trains_the_next():
    found = []

    class Sets:
        def on_step(self, trainer, step):
            found.append((step.epoch, type(trainer._stage.strategy).__name__))

        def on_epoch_end(self, trainer, epoch):
            found.append(trainer.strategy)
            if epoch == 0:
                trainer.strategy = {0: "accumulate", 1: "local"}
                found.append(trainer.strategy)
            if epoch == 1:
                trainer.strategy = "accumulate"
                found.append(trainer.strategy)

    trainer = offbeat.AsyncTrainer(plain(), 0, 1, 1, strategy={0: "local", 1: "accumulate"}, callbacks=Sets())
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    # The first one set says "accumulate" of the epoch that has ended, and is found so; the next has its own.
    first, second, third = (0, "Local"), (1, "Local"), (2, "Accumulated")
    assert found == [first, "local", "accumulate", second, "local", "accumulate", third, "accumulate"]


def test_an_interrupted_train_leaves_the_strategy_that_the_next_begins_with():
    class Ends:
        def on_epoch_end(self, trainer, epoch):
            raise RuntimeError(repr(trainer.strategy))

    trainer = offbeat.AsyncTrainer(plain(), strategy={0: "local", 1: averaging.Average()}, callbacks=Ends())
    with pytest.raises(RuntimeError, match="'local'"):
        train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    assert trainer.strategy == averaging.Average()


def test_a_batch_without_a_sample_is_refused_before_it_is_accumulated():
    trained = plain()
    trainer = offbeat.AsyncTrainer(trained, strategy="accumulate", regular_sync_frequency=2)
    live = torch.optim.Adam(trained.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"the batch has no sample.*drop_last"):
        trainer.train(
            dataloader=[DATA[0], (torch.empty(0, 6), torch.empty(0).long())], loss_fn=LOSS, optimizer=live
        )
    assert not live.state, "it is no micro-batch of a window"


@pytest.mark.parametrize("around", ["local", "average", "averager", "module"])
def test_a_batch_without_a_sample_is_refused_before_it_trains(around, tmp_path):
    trained = plain()
    run = {"dataloader": [DATA[0], (torch.empty(0, 6), torch.empty(0).long())], "loss_fn": LOSS}
    run["optimizer"] = live = torch.optim.Adam(trained.parameters(), lr=0.1)
    if around in ("local", "average"):
        trainer = offbeat.AsyncTrainer(trained, strategy=around)
    else:
        wraps = trained if around == "module" else offbeat.AsyncModelAverager(trained)
        trainer = offbeat.FaultTolerantTrainer(wraps, tmp_path)
    with pytest.raises(ConfigError, match=r"the batch has no sample.*drop_last"):
        trainer.train(**run)
    assert {float(state["step"]) for state in live.state.values()} == {1.0}


def test_a_train_of_a_fault_tolerant_trainer_within_another_costs_that_nothing(tmp_path):
    """It has a model, a monitor's meter and a loss function that the one at work goes by."""

    def trained(folder, *, calls_again):
        torch.manual_seed(3)
        trainer = offbeat.FaultTolerantTrainer(plain(), folder, 9, monitor="loss")
        live = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        given = {"dataloader": DATA, "optimizer": live, "epochs": 2}
        refused = []

        def loss_fn(outputs, targets):
            if calls_again and trainer.is_training and trainer.history.steps in (4, 12):
                with pytest.raises(
                    StateError, match="while a train\\(\\) of this trainer is at work"
                ) as said:
                    trainer.train(**given, loss_fn=lambda outputs, _: outputs.sum() * 0)
                refused.append(said.value)
            return LOSS(outputs, targets)

        trainer.train(**given, loss_fn=loss_fn, validation=DATA[:2])
        manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("save-*/manifest.json"))]
        monitored = [manifest["monitored"] for manifest in manifests]
        return trainer, monitored, len(refused)

    ours, our_means, num_refused = trained(tmp_path / "ours", calls_again=True)
    theirs, their_means, _ = trained(tmp_path / "theirs", calls_again=False)
    assert num_refused >= 2
    assert our_means == their_means
    assert same(ours.model, theirs.model)
    assert [one.metrics for one in ours.history.validation] == [
        one.metrics for one in theirs.history.validation
    ]


@pytest.mark.parametrize("around", ["trainer", "fault tolerant"])
def test_a_train_within_another_is_refused_and_costs_that_nothing(around, tmp_path):
    class Again:
        def __init__(self):
            self.refused = []

        def again(self, trainer, _):
            with pytest.raises(StateError, match="while a train\\(\\) of this trainer is at work") as said:
                trainer.train(dataloader=DATA, optimizer=optim.SGD(lr=9.0), loss_fn=LOSS)
            self.refused.append(str(said.value))

        on_step = on_epoch_end = on_train_end = again

    def trained(callbacks):
        inner = offbeat.AsyncTrainer(model(), callbacks=callbacks)
        outer = (
            inner
            if around == "trainer"
            else offbeat.FaultTolerantTrainer(inner, tmp_path / str(len(callbacks)))
        )
        torch.manual_seed(7)
        history = outer.train(dataloader=DATA, epochs=2, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        assert inner.history is history
        return inner, history

    again = Again()
    ours, history = trained([again])
    theirs, _ = trained([])
    assert (history.steps, history.stopped, len(again.refused)) == (18, "epochs", 18 + 2 + 1)
    assert same(ours.model, theirs.model)


def test_of_two_threads_one_trains_and_the_other_is_refused(tmp_path):
    begun, ends = threading.Event(), threading.Event()

    class Waits:
        def on_step(self, trainer, step):
            begun.set()
            assert ends.wait(30)

    trainer = offbeat.AsyncTrainer(model(), callbacks=Waits())
    thread = threading.Thread(target=train, args=(trainer, optim.SGD(lr=0.1)))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(StateError, match="at work"):
        train(trainer, optim.SGD(lr=0.1))
    with pytest.raises(StateError, match="at work"):
        offbeat.FaultTolerantTrainer(trainer, tmp_path).train(
            dataloader=DATA, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
        )
    ends.set()
    thread.join()
    assert trainer.history.steps == 18
    assert train(trainer, optim.SGD(lr=0.1)).steps == 18


# ------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("strategy", ["local", "average"])
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
def test_alone_it_is_a_plain_loop_bit_for_bit(spec, strategy):
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours, warm_up_epochs=1, warm_up_sync_frequency=2, strategy=strategy)
    history = train(trainer, spec)
    loop(theirs, live_of(spec, theirs))
    assert same(ours, theirs)
    assert (history.steps, history.epochs, history.stopped) == (18, 2, "epochs")
    assert history.samples == 2 * sum(len(targets) for _, targets in DATA)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize(
    "make", [functools.partial(StepLR, step_size=3), functools.partial(ExponentialLR, gamma=0.8)]
)
def test_a_scheduler_steps_as_in_a_plain_loop(interval, make):
    ours, theirs = model(), model()
    train(
        offbeat.AsyncTrainer(ours), optim.Adam(lr=0.01), epochs=4, scheduler=make, scheduler_interval=interval
    )
    live = live_of(optim.Adam(lr=0.01), theirs)
    loop(theirs, live, epochs=4, **{f"each_{interval}": make(live)})
    assert same(ours, theirs)


def test_a_live_scheduler_goes_on_from_one_train_to_the_next_and_so_does_what_made_one():
    for given in (lambda live: OneCycleLR(live, 0.1, total_steps=40), None):
        ours, theirs = model(), model()
        live = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        scheduler = OneCycleLR(live, 0.1, total_steps=40) if given is None else given
        trainer = offbeat.AsyncTrainer(ours)
        torch.manual_seed(7)
        for _ in range(2):
            trainer.fit(
                dataloader=DATA,
                optimizer=live,
                loss_fn=LOSS,
                scheduler=scheduler,
                scheduler_interval="step",
                progress=False,
            )
        reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        loop(theirs, reference, each_step=OneCycleLR(reference, 0.1, total_steps=40))
        assert same(ours, theirs)


def test_what_makes_a_scheduler_may_be_an_equal_one_at_each_call():
    trainer = offbeat.AsyncTrainer(model())
    for _ in range(4):
        scheduler = functools.partial(StepLR, step_size=3, gamma=0.5)
        train(trainer, offbeat.optim.SGD(lr=1.0), scheduler=scheduler)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25  # of 4 times 2 epochs


class Once:
    """Gives an iterator that is used up after the first pass."""

    def __init__(self):
        self._batches = iter(DATA)

    def __iter__(self):
        return self._batches


@pytest.mark.parametrize("strategy", ["local", "accumulate", averaging.Average()])
def test_a_pass_that_gives_nothing_after_one_that_did_is_an_error(strategy):
    trainer = offbeat.AsyncTrainer(model(), 0, 1, 1, strategy=strategy)
    live = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"the data gave no batch in epoch 2, .* gone through again"):
        train(trainer, live, data=Once(), scheduler=StepLR(live, step_size=1, gamma=0.5))
    assert live.param_groups[0]["lr"] == 0.5  # of the epoch that was trained
    with pytest.raises(ConfigError, match="DataLoaderIter, which gives its batches once, and epochs is 2"):
        train(trainer, live, data=iter(DataLoader(DATA, batch_size=None)))


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (lambda self, trainer: None, r"on_epoch_end\(trainer\) cannot be called with \(trainer, epoch\)"),
        (lambda self, trainer, epoch, logs: None, r"on_epoch_end\(trainer, epoch, logs\) cannot be called"),
    ],
)
def test_a_hook_that_takes_other_arguments_is_refused_before_anything_is_trained(hook, told):
    kind = type("Mine", (), {"on_epoch_end": hook, "on_train_end": lambda self, *args: None})
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncTrainer(model(), callbacks=kind())


def test_hooks_may_take_what_they_get_in_any_way():
    seen = []
    kind = type(
        "Mine", (), {"on_log": lambda *args: None, "on_epoch_end": lambda *_, **more: seen.append(more)}
    )
    builtin = type("Named", (), {"on_train_end": print})
    train(offbeat.AsyncTrainer(model(), callbacks=[kind(), builtin()]), optim.SGD(lr=0.1))
    assert seen == [{}, {}]


def test_a_loader_that_gives_nothing_is_warned_of(caplog):
    train(offbeat.AsyncTrainer(model()), optim.SGD(lr=0.1), data=[])
    assert "the trainer trained on nothing: the dataloader gave no batch" in caplog.text


def test_a_plateau_is_of_the_epochs_mean_metric():
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(live, patience=0, factor=0.5)
    seen = []
    step = scheduler.step
    scheduler.step = lambda value: (seen.append(value), step(value))
    history = train(
        offbeat.AsyncTrainer(trained), live, scheduler=scheduler, scheduler_metric="loss", log_frequency=9
    )
    assert seen == pytest.approx([record.metrics["loss"] for record in history.records])


def test_a_plateau_whose_step_passes_on_what_it_is_given_goes_by_a_metric_too():
    class Passes(ReduceLROnPlateau):
        def step(self, *given, **named):
            return super().step(*given, **named)

    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Passes goes by a metric: give"):
        train(offbeat.AsyncTrainer(trained), live, scheduler=functools.partial(Passes))
    plateau = Passes(live)
    train(offbeat.AsyncTrainer(trained), live, scheduler=plateau, scheduler_metric="loss")
    assert plateau.last_epoch > 0


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
def test_clipping_and_bfloat16_are_those_of_a_plain_loop(strategy):
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours, 0, 1, 1, strategy=strategy, max_grad_norm=0.3, amp="bf16")
    train(trainer, optim.SGD(lr=0.1, momentum=0.9))
    loop(theirs, live_of(optim.SGD(lr=0.1, momentum=0.9), theirs), dtype=torch.bfloat16, clip=0.3)
    assert same(ours, theirs)
    other = model()
    loop(other, live_of(optim.SGD(lr=0.1, momentum=0.9), other))
    assert not same(ours, other)


@pytest.mark.parametrize("spec", [OPTIMIZERS[1], OPTIMIZERS[3]], ids=repr)
@pytest.mark.parametrize("strategy", ["local", "average"])
def test_a_loss_scale_is_that_of_a_plain_loop_and_steps_it_skips_are_counted(spec, strategy):
    wild = [batch(number, scale=3000.0 if number % 4 == 1 else 1.0) for number in range(9)]
    ours, theirs = plain(), plain()
    trainer = offbeat.AsyncTrainer(ours, 0, 1, 3, strategy=strategy, amp="fp16", max_grad_norm=5.0)
    history = train(
        trainer, spec, data=wild, scheduler=functools.partial(StepLR, step_size=4), scheduler_interval="step"
    )
    live, scaler = live_of(spec, theirs), torch.amp.GradScaler("cpu")
    skipped = loop(
        theirs,
        live,
        data=wild,
        dtype=torch.float16,
        scaler=scaler,
        clip=5.0,
        each_step=StepLR(live, step_size=4),
    )
    assert skipped >= 2
    assert (trainer.skipped_steps, history.skipped, history.steps) == (skipped, skipped, 18 - skipped)
    assert trainer.scaler.state_dict() == scaler.state_dict()
    assert same(ours, theirs)
    if strategy == "average":
        assert trainer._stage.strategy.averager.iterations == 18 - skipped


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
        self.computed = 0

    def forward(self, inputs):
        self.computed += 1
        return self.inner(inputs)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 5))


@pytest.mark.parametrize("given", [True, ["0", "1"]])
def test_gradient_checkpointing_computes_twice_and_changes_no_bit(given):
    ours, theirs = blocks(), blocks()
    train(offbeat.AsyncTrainer(ours, gradient_checkpointing=given), optim.SGD(lr=0.1))
    loop(theirs, live_of(optim.SGD(lr=0.1), theirs))
    assert same(ours, theirs)
    assert (ours[0].computed, theirs[0].computed) == (36, 18)
    assert not any("forward" in part.__dict__ for part in ours.modules())
    copy.deepcopy(ours)


def test_a_copy_of_a_model_that_is_computed_twice_computes_by_its_own_weights():
    class Keeps:
        saved = io.BytesIO()

        def on_epoch_end(self, trainer, epoch):
            if not epoch:
                self.copied = copy.deepcopy(trainer.model)
                torch.save(trainer.model, self.saved)
                self.state = copy.deepcopy(trainer.model.state_dict())

    ours, plain, kept = blocks(), blocks(), Keeps()
    train(offbeat.AsyncTrainer(ours, gradient_checkpointing=True, callbacks=kept), optim.SGD(lr=0.1))
    plain.load_state_dict(kept.state)
    inputs = DATA[0][0]
    expected = plain.eval()(inputs)
    assert not torch.equal(expected, ours.eval()(inputs)), "it was trained on"
    found = kept.copied.eval()(inputs)
    assert torch.equal(found, expected)
    gradients = [parameter.grad.clone() for parameter in ours.parameters()]
    kept.copied.zero_grad()
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in kept.copied.parameters())
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in ours.parameters()]))
    assert kept.saved.tell() > 0


@pytest.mark.parametrize("strategy", ["local", "accumulate"])
def test_a_compiled_model_computes_in_bfloat16_and_steps_in_float32(strategy):
    torch._dynamo.reset()  # else what other tests have compiled may hide what cannot be
    seen = []

    def loss_fn(outputs, targets):
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return nn.functional.cross_entropy(outputs, targets)

    ours = model()
    given = {} if strategy == "local" else {"regular_sync_frequency": 2}
    trainer = offbeat.AsyncTrainer(ours, strategy=strategy, compile="eager", amp="bf16", **given)
    trainer.train(dataloader=DATA, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn, progress=False)
    assert set(seen) == {(torch.bfloat16, True)}
    assert not torch.is_autocast_enabled("cpu")
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


def test_a_compiled_model_is_trained_in_place():
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours, compile="eager")
    train(trainer, optim.SGD(lr=0.1))
    loop(theirs, live_of(optim.SGD(lr=0.1), theirs))
    assert same(ours, theirs)
    assert trainer.model is ours
    with pytest.raises(ConfigError, match=r"compile is 'eagr', and torch\.compile has no such backend"):
        offbeat.AsyncTrainer(model(), compile="eagr")


def test_accumulating_is_the_accumulator_by_hand():
    ours, theirs = model(), model()
    steps, updates = [], []

    class Seen:
        def on_step(self, _, step):
            steps.append(step.step)
            updates.append(step.is_update)

    trainer = offbeat.AsyncTrainer(ours, 1, 2, 4, strategy="accumulate", callbacks=[Seen()])
    train(trainer, optim.SGD(lr=0.1, momentum=0.9), epochs=3)
    live = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    for epochs, length in ((1, 2), (2, 4)):
        accumulator = offbeat.AsyncGradientAccumulator(theirs, length)
        for inputs, targets in DATA * epochs:
            accumulator.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
        accumulator.flush()
    assert same(ours, theirs)
    assert steps[:10] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]  # the ninth is an update when the warm-up ends
    assert updates[:9] == [False, True] * 4 + [False], "each that a batch has made is told of once"
    assert trainer.history.steps == 5 + 5


def test_a_state_is_loaded_beside_buffers_that_are_expanded_or_of_inference_mode():
    def made():
        held = model()
        held.register_buffer("flat", torch.ones(1).expand(4), persistent=False)
        with torch.inference_mode():
            held.register_buffer("fixed", torch.ones(2), persistent=False)
        return offbeat.AsyncTrainer(held, strategy="local")

    ours, other = made(), made()
    train(ours, optim.Adam(lr=0.1))
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(copy.deepcopy(ours.state_dict()), optimizer=optim.Adam(lr=0.1))
    for one in (ours, other):
        train(one, optim.Adam(lr=0.1), epochs=1)
    assert same(ours.model, other.model)


@pytest.mark.parametrize(("every", "warned"), [(9, 0), (10, 1)])
def test_an_epoch_of_less_than_one_update_is_warned_of_once(every, warned, caplog):
    def breaks():
        yield DATA[0]
        raise ZeroDivisionError

    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=every, strategy="accumulate")
    with pytest.raises(ZeroDivisionError):  # a batch that is no part of the next epoch
        train(trainer, optim.SGD(lr=0.1), data=breaks(), epochs=1)
    train(trainer, optim.SGD(lr=0.1))
    other = offbeat.AsyncTrainer(model(), regular_sync_frequency=every, strategy="accumulate")
    other.model.load_state_dict(trainer.model.state_dict())
    other.load_state_dict(trainer.state_dict(), optimizer=optim.SGD(lr=0.1))
    train(other, optim.SGD(lr=0.1), epochs=1)  # which may be the rest of one
    told = 'an epoch is of 9 batches, and strategy "accumulate" makes an update of every 10 of a member\'s'
    assert caplog.text.count("an epoch is of") == caplog.text.count(told) == warned


@pytest.mark.parametrize(
    ("keywords", "is_told"),
    [
        ({"strategy": "average"}, True),
        ({"strategy": "gossip"}, True),
        ({"strategy": "average", "process_group": False}, False),
        ({}, False),
    ],
)
def test_who_averages_with_nobody_is_told_so(keywords, is_told, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    train(offbeat.AsyncTrainer(model(), **keywords), optim.SGD(lr=0.1))
    assert caplog.text.count("averages with nobody: this process trains alone") == is_told
    names_a_server = is_told and keywords["strategy"] != "gossip"  # whose members meet at none
    assert ("'tcp'" in caplog.text, "server_address=" in caplog.text) == (names_a_server, names_a_server)


# ------------------------------------------------------------------------------------------ strategies


@pytest.mark.parametrize("is_set", [False, True])
def test_a_strategy_begins_with_its_epoch_or_when_it_is_set_and_keeps_model_and_optimizer(is_set):
    class Setter:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 0:
                trainer.strategy = averaging.DiLoCo(lr=0.5)

    ours, theirs = model(), model()
    how = {"callbacks": [Setter()]} if is_set else {"strategy": {0: "local", 1: averaging.DiLoCo(lr=0.5)}}
    trainer = offbeat.AsyncTrainer(ours, regular_sync_frequency=4, overlap=1, **how)
    train(trainer, optim.Adam(lr=0.01))
    assert trainer.strategy == averaging.DiLoCo(lr=0.5)
    live = torch.optim.Adam(theirs.parameters(), lr=0.01)
    loop(theirs, live, epochs=1)
    averager = offbeat.AsyncModelAverager(
        theirs, averaging_frequency=4, overlap=1, method=averaging.DiLoCo(lr=0.5)
    )
    for inputs, targets in DATA:
        averager.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
    averager.flush()
    assert same(ours, theirs)


def test_a_strategy_that_is_set_within_an_epoch_is_that_of_the_next_batch():
    rounds = []

    class Setter:
        def on_step(self, trainer, step):
            strategy = trainer._stage.strategy
            rounds.append((type(strategy).__name__, strategy.version))
            if step.step == 4:
                trainer.strategy = "average"

    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=2, callbacks=Setter())
    train(trainer, optim.SGD(lr=0.1), epochs=1)
    assert rounds == [("Local", 0)] * 4 + [("Averaged", n) for n in (0, 1, 1, 2, 2)]


def test_a_strategy_that_cannot_be_set_is_refused_and_changes_nothing():
    trainer = offbeat.AsyncTrainer(model(), amp="fp16")
    for given, told in [
        ("avrage", "unknown strategy 'avrage'; did you mean 'average'"),
        ({1: "local"}, 'strategy says nothing of epoch 0, which is the first: give one for it, as in {0: "l'),
        ({0: "local", 2.5: "averge"}, "unknown strategy 'averge'.*; strategy has the epoch 2.5"),
        ({0: "local", -1: "average"}, "strategy has the epoch -1"),
        ({0: "local", 3: 5}, "strategy is 5"),
        (averaging.DiLoCo, "method is the class DiLoCo"),
        ("accumulate", 'amp is "fp16" and the strategy "accumulate"'),
        ("parameter_server", "nobody says where it is"),
    ]:
        with pytest.raises(ConfigError, match=told):
            trainer.strategy = given
    assert trainer.strategy == "local"


def test_the_warm_up_is_of_the_trainers_first_epochs():
    syncs = Syncs(2, Sync(10, overlap=False), Sync(100, overlap=True))
    assert [syncs.at(epoch).every for epoch in range(4)] == [10, 10, 100, 100]

    seen = []

    class Seen:
        def on_step(self, trainer, step):
            averager = trainer._stage.strategy.averager
            seen.append((step.epoch, averager.averaging_frequency, averager.overlap))

    trainer = offbeat.AsyncTrainer(model(), 2, 3, 5, strategy="diloco", overlap=1, callbacks=[Seen()])
    for _ in range(3):  # counted over all calls
        train(trainer, optim.SGD(lr=0.1), epochs=1)
    assert seen == [(0, 3, False)] * 9 + [(1, 3, False)] * 9 + [(2, 5, 1)] * 9


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "a dict without epochs, .*"),
        ({"stage": None}, "a dict without epochs, .*"),
        (model().state_dict(), "an OrderedDict without epochs, .*"),
        (3, "an int without epochs, .*"),
        (None, "None"),
    ],
)
def test_what_is_no_state_at_all_is_refused(state, told):
    with pytest.raises(ConfigError, match=rf"the state is {told}: give what .*state_dict"):
        offbeat.AsyncTrainer(model(), strategy="local").load_state_dict(state)


OTHERS = {
    (6, 8, 5): "parameter '0.weight' has other values: load the model's own state before this one",
    (6, 9, 5): "parameter '0.weight' is of shape [9, 6], and the state's was of [8, 6]: build the model that",
    (6, 8, 8, 5): "the optimizer's groups have [6] parameters, and the state's [4]",
}


@pytest.mark.parametrize(
    ("strategy", "others"),
    [(one, other) for one in ("local", "average", "accumulate") for other in OTHERS][1:],
)
def test_a_state_of_another_model_is_refused_and_goes_into_that_one(strategy, others):
    often = {} if strategy == "local" else {"regular_sync_frequency": 3}
    made = functools.partial(offbeat.AsyncTrainer, strategy=strategy, **often)
    ours = made(layers(6, 8, 5))
    schedule = functools.partial(LinearLR, start_factor=0.1)
    train(ours, optim.SGD(lr=0.1, momentum=0.9), epochs=1, scheduler=schedule)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    other = made(layers(*others))
    live = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9)
    group = dict(live.param_groups[0])
    with pytest.raises((StateError, ConfigError), match=re.escape(OTHERS[others])):
        other.load_state_dict(state, optimizer=live, scheduler=schedule)
    assert live.param_groups == [group]
    assert (other.optimizer, other.history.steps, live.state) == (None, 0, {})
    assert other.state_dict()["stage"] is None
    with pytest.raises(ConfigError, match="there is no optimizer: give optimizer="):
        train(other, None)
    train(other, optim.Adam(lr=0.01), epochs=1)  # as if nothing had been
    assert type(other.optimizer) is torch.optim.Adam
    own = made(layers(6, 8, 5))
    own.model.load_state_dict(values)
    own.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9), scheduler=schedule)
    for trainer in (ours, own):
        train(trainer, None, epochs=1)
    assert same(own.model, ours.model)


class Around(torch.optim.Optimizer):
    """One that remembers nothing itself."""

    state = property(lambda self: self.inner.state, lambda *_: None)

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.told = {"of": self, "optimizers": [self.inner]}
        self.told["told"] = self.told  # which goes round

    def step(self, closure=None):
        return self.inner.step(closure)

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.param_groups = self.inner.param_groups


@pytest.mark.parametrize("given", [optim.SGD(lr=0.1, momentum=0.9), Around])
@pytest.mark.parametrize("error", [StateError, RuntimeError, KeyboardInterrupt])
def test_what_breaks_off_while_a_state_is_taken_up_leaves_the_optimizer_as_it_was(error, given, monkeypatch):
    def broken(stage, state):
        del state
        stage._workshop.live.state.clear()  # as where members of a group accumulate
        raise error

    ours = offbeat.AsyncTrainer(plain())
    train(ours, given, epochs=1)
    state, momenta = copy.deepcopy(ours.state_dict()), copy.deepcopy([*ours.optimizer.state.values()])
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "load_state_dict", broken)
        with pytest.raises(error):
            ours.load_state_dict(state)
    assert len(momenta) == 4
    for entry, before in zip(ours.optimizer.state.values(), momenta, strict=True):
        assert torch.equal(entry["momentum_buffer"], before["momentum_buffer"])
    ours.load_state_dict(state)
    train(ours, None, epochs=1)


def several(num):
    """Give what makes a scheduler of as many others."""

    def made(live):
        parts = [ConstantLR(live, 1 / (number + 2), total_iters=100) for number in range(num)]
        return SequentialLR(live, parts, milestones=list(range(2, num + 1)))

    return made


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("given", [optim.SGD(lr=0.1, momentum=0.9), Around])
def test_a_scheduler_that_does_not_take_its_state_is_refused_and_the_optimizer_is_as_it_was(given, is_there):
    ours, other = (offbeat.AsyncTrainer(plain()) for _ in range(2))
    train(ours, given, epochs=1, scheduler=several(3))
    state = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    if is_there:
        train(other, given, epochs=1, scheduler=several(2))
        live, others = other.optimizer, {}
    else:
        kind = Around if given is Around else functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        live = kind(other.model.parameters())
        others = {"optimizer": live, "scheduler": several(2)}
    other.model.load_state_dict(state[1])
    before, scheduled = copy.deepcopy((live.state_dict(), other.state_dict()["scheduler"]))
    told = (
        r"the SequentialLR does not take the state's \(IndexError: .*\): make it as it was made where the st"
    )
    with pytest.raises(ConfigError, match=told):
        other.load_state_dict(state[0], **others)
    now = live.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()
    for number, entry in now["state"].items():
        assert torch.equal(entry["momentum_buffer"], before["state"][number]["momentum_buffer"])
    assert getattr(live, "inner", live).param_groups is live.param_groups
    assert other.optimizer is (live if is_there else None)
    assert other.state_dict()["scheduler"] == scheduled
    train(other, None if is_there else live, epochs=1)


class Factor:
    def __init__(self, by):
        self.by = by

    def __call__(self, epoch):
        return self.by**epoch


def test_a_failure_undoes_what_was_loaded_into_the_function_of_a_scheduler_too():
    def made(by):
        live = torch.optim.SGD(plain().parameters(), lr=0.1)
        return LambdaLR(live, [Factor(by)])

    scheduler, other = made(0.5), made(0.9)
    (function,) = scheduler.lr_lambdas

    def fail():
        with as_it_was_after_failure(scheduler):
            scheduler.load_state_dict(other.state_dict())
            assert function.by == 0.9
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert function.by == 0.5


@pytest.mark.parametrize("lambdas", [None, Factor(0.5)])
def test_a_scheduler_whose_lambdas_are_no_list_is_undone_too(lambdas):
    class Own(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.lr_lambdas = lambdas
            super().__init__(optimizer)

        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

    scheduler = Own(torch.optim.SGD(plain().parameters(), lr=0.1))

    def fail():
        with as_it_was_after_failure(scheduler):
            scheduler.last_epoch = 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert scheduler.last_epoch == 0


class Two(torch.optim.Optimizer):
    """Several as one, whose groups are a tuple, around what cannot be copied and what cannot be read."""

    param_groups = property(lambda self: tuple(group for one in self.both for group in one.param_groups))
    state = property(lambda self: {name: value for one in self.both for name, value in one.state.items()})

    class Unready(torch.optim.Optimizer):
        def __init__(self):  # as one that is set up by what it steps first
            pass

        @property
        def param_groups(self):
            raise RuntimeError("not ready yet")

    def __init__(self, params):
        first, *others = params
        groups = [{"params": [first], "lock": threading.Lock()}], others
        self.both = [torch.optim.SGD(group, lr=0.1) for group in groups]
        self.later = self.Unready()

    def step(self, closure=None):
        for one in self.both:
            one.step(closure)

    def zero_grad(self, set_to_none=True):
        for one in self.both:
            one.zero_grad(set_to_none)


def test_an_optimizer_that_cannot_be_copied_or_read_whole_trains_and_is_as_it_was_after_a_failure():
    def failing(live):
        for one in live.both:
            one.param_groups[0]["lr"] = 9.0
        raise ValueError("the cause")

    ours = offbeat.AsyncTrainer(plain())
    live = Two(ours.model.parameters())
    with pytest.raises(ConfigError, match="ValueError: the cause"):
        train(ours, live, epochs=1, scheduler=failing)
    assert [group["lr"] for group in live.param_groups] == [0.1, 0.1]
    beside = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    beside.other = Two(nn.Linear(2, 2).parameters())
    train(ours, beside, epochs=1)
    assert ours.optimizer is beside


def test_what_is_frozen_may_have_another_shape_where_one_trains_alone(caplog):
    def with_frozen(size):
        head = layers(6, 5)
        return nn.Sequential(head, nn.Linear(5, size).requires_grad_(False)), head

    built, head = with_frozen(5)
    ours = offbeat.AsyncTrainer(built)
    train(ours, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9), epochs=1)
    state = copy.deepcopy(ours.state_dict())
    built, head = with_frozen(7)
    live = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    offbeat.AsyncTrainer(built).load_state_dict(state, optimizer=live)
    assert len(live.state) == 2
    assert "the model is not the one of the state: parameter" in caplog.text


@pytest.mark.parametrize("num", [1, 3])
def test_more_or_fewer_parameters_beside_what_is_trained_are_warned_of(num, caplog):
    def with_frozen(num):
        head = layers(6, 5)
        return nn.Sequential(head, *(nn.Linear(5, 5).requires_grad_(False) for _ in range(num))), head

    state = None
    for many in (2, num):
        built, head = with_frozen(many)
        trainer, live = offbeat.AsyncTrainer(built), torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        if state is not None:
            trainer.load_state_dict(state, optimizer=live)
        train(trainer, live, epochs=1)
        state = copy.deepcopy(trainer.state_dict())
    assert (
        f"the model is not the one of the state: it has {2 + 2 * num} parameters, and the state's had 6"
        in (caplog.text)
    )
    assert "other values" not in caplog.text


@pytest.mark.parametrize("seed", [0, 1])
def test_one_that_trains_alone_is_warned_of_other_values_which_may_be_meant(seed, caplog):
    ours = offbeat.AsyncTrainer(plain())
    train(ours, optim.SGD(lr=0.1, momentum=0.9), epochs=1)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    other = offbeat.AsyncTrainer(plain())
    if seed == 0:
        other.model.load_state_dict(values)
    other.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9))
    told = "the model is not the one of the state: parameter '0.weight' has other values. Load the "
    assert (told in caplog.text) == (seed == 1)
    assert other.state_of_now()["stage"]["work"] is None  # who asks for this has the model itself
    other.model.load_state_dict(values)  # later on will do as well
    for trainer in (ours, other):
        train(trainer, None, epochs=1)
    assert same(other.model, ours.model)


def test_a_state_of_before_tells_of_no_model_and_is_taken():
    ours, other = (offbeat.AsyncTrainer(plain()) for _ in range(2))
    train(ours, optim.SGD(lr=0.1), epochs=1)
    state = ours.state_dict()
    assert state["stage"]["work"]["model"]
    other.load_state_dict(state | {"stage": state["stage"] | {"work": None}}, optimizer=optim.SGD(lr=0.1))
    assert other.history.steps == ours.history.steps


def test_every_state_has_what_is_looked_for():
    state = offbeat.AsyncTrainer(model(), strategy="local").state_dict()
    assert set(state) == {*KEYS, "classes", "settings", "dtypes"}  # older ones lack these


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, None),
        (
            {"warm_up_epochs": 2, "warm_up_sync_frequency": 10, "regular_sync_frequency": 100},
            "warm_up_epochs=2",
        ),
        (
            {"warm_up_sync_frequency": 2, "regular_sync_frequency": 3},
            "warm_up_sync_frequency=2, regular_sync_freq",
        ),
        ({"strategy": {0: "local", 3: "average"}, "regular_sync_frequency": 3}, None),  # to come
    ],
)
def test_local_says_once_that_frequencies_have_no_effect_and_warns_where_some_were_given(given, told, caplog):
    caplog.set_level(logging.INFO, logger="offbeat")
    train(offbeat.AsyncTrainer(model=model(), **given), optim.SGD(lr=0.1), epochs=3)
    said = [one for one in caplog.records if "of meeting others have no effect" in one.message]
    assert [one.levelname for one in said] == ["INFO" if told is None else "WARNING"]
    assert told is None or f"({told}" in said[0].message
    assert not any("meet every" in line for line in caplog.messages)


@pytest.mark.parametrize(("first", "num"), [("local", 1), ("average", 0)])
def test_a_warm_up_that_is_over_before_members_meet_is_warned_of(first, num, caplog):
    strategy = {0: first, 1: "local", 2: "average"}
    ours = offbeat.AsyncTrainer(model(), 1, warm_up_sync_frequency=2, strategy=strategy, process_group=False)
    train(ours, optim.SGD(lr=0.1), epochs=3)
    said = [line for line in caplog.messages if "the warm-up is over before" in line]
    assert len(said) == num
    assert all("(warm_up_epochs=1, warm_up_sync_frequency=2): warm_up_epochs counts" in line for line in said)


@pytest.mark.parametrize("when", ["in mid-run", "between two"])
def test_frequencies_that_had_effect_before_local_was_set_are_not_said_to_have_none(when, caplog):
    class Leaves:
        def on_epoch_end(self, trainer, epoch):
            if when == "in mid-run":
                trainer.strategy = "local"

    ours = offbeat.AsyncTrainer(
        model(), regular_sync_frequency=3, strategy="average", process_group=False, callbacks=Leaves()
    )
    train(ours, optim.SGD(lr=0.1), epochs=2)
    ours.strategy = "local"
    train(ours, None, epochs=1)
    assert not any("have no effect" in line for line in caplog.messages)


# ------------------------------------------------------------------------------------------ what is told


def test_callbacks_are_told_in_order_and_their_errors_are_raised():
    told = []

    class Tells:
        def on_step(self, trainer, step):
            told.append(("step", step.step, step.epoch, step.samples, step.is_skipped, float(step.loss) > 0))

        def on_log(self, trainer, record):
            told.append(("log", record.step))

        def on_epoch_end(self, trainer, epoch):
            told.append(("epoch", epoch))

        def on_train_end(self, trainer, history):
            told.append(("end", history.stopped, trainer.history is history))

    class Raises:
        def on_epoch_end(self, trainer, epoch):
            raise RuntimeError(f"after epoch {epoch}")

    trainer = offbeat.AsyncTrainer(model(), callbacks=[Tells()])
    train(trainer, optim.SGD(lr=0.1), data=DATA[:2], log_frequency=2)
    steps = [("step", n, (n - 1) // 2, len(DATA[(n - 1) % 2][1]), False, True) for n in (1, 2, 3, 4)]
    assert told == [
        *steps[:2], ("log", 2), ("epoch", 0), *steps[2:], ("log", 4), ("epoch", 1), ("end", "epochs", True)
    ]  # fmt: skip
    trainer = offbeat.AsyncTrainer(model(), callbacks=[Raises()])
    with pytest.raises(RuntimeError, match="after epoch 0"):
        train(trainer, optim.SGD(lr=0.1))
    assert (trainer.history.stopped, trainer.history.epochs) == ("failed", 1)
    assert train(offbeat.AsyncTrainer(model()), optim.SGD(lr=0.1), max_steps=5).stopped == "max_steps"


class Stops:
    """Wants an end at a step, or after an epoch."""

    def __init__(self, *, step=None, epoch=None):
        self.step, self.epoch, self.ends = step, epoch, []

    def on_step(self, trainer, step):
        if step.step == self.step:
            trainer.stop("enough")
            trainer.stop("more than enough")

    def on_epoch_end(self, trainer, epoch):
        if epoch == self.epoch:
            trainer.stop()

    def on_train_end(self, trainer, history):
        self.ends.append(history.stopped)


@pytest.mark.parametrize("strategy", ["local", "average", "diloco", "accumulate"])
def test_a_stop_ends_a_train_as_so_many_steps_do_and_the_next_one_goes_on(strategy, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    callback = Stops(step=4)
    stopped, limited = (
        offbeat.AsyncTrainer(model(), 0, 1, 1, strategy=strategy, callbacks=callbacks)
        for callbacks in ([callback], [])
    )
    history = train(stopped, optim.SGD(lr=0.1))
    assert (history.stopped, history.stop_reason, history.steps) == ("stop", "enough", 4)
    assert callback.ends == ["stop"]
    assert "training ends at step 4: enough" in caplog.text
    wanted = train(limited, optim.SGD(lr=0.1), max_steps=4)
    assert history.records[-1].metrics == wanted.records[-1].metrics
    assert all(map(torch.equal, stopped.model.parameters(), limited.model.parameters()))
    callback.step = None
    assert train(stopped, None, epochs=1).stopped == "epochs"
    assert stopped.history.stop_reason is None


def test_a_stop_after_an_epoch_ends_with_it_and_one_out_of_train_is_refused():
    trainer = offbeat.AsyncTrainer(model(), callbacks=[Stops(epoch=1)])
    with pytest.raises(StateError, match=r"stop\(\) was called outside of train\(\)"):
        trainer.stop()
    history = train(trainer, optim.SGD(lr=0.1), epochs=5)
    assert (history.stopped, history.stop_reason, history.epochs) == ("stop", None, 2)
    assert history.steps == 2 * len(DATA)
    with pytest.raises(StateError, match="call it in a callback"):
        trainer.stop()


def test_a_reason_that_is_no_text_is_refused_and_training_goes_on():
    class Fails:
        def on_step(self, trainer, step):
            with pytest.raises(ConfigError, match="reason is 3: give text, or nothing"):
                trainer.stop(3)

    assert train(offbeat.AsyncTrainer(model(), callbacks=[Fails()]), optim.SGD(lr=0.1)).stopped == "epochs"


def test_another_thread_may_stop_a_train():
    going = threading.Event()

    class Tells:
        def on_step(self, trainer, step):
            going.set()

    trainer = offbeat.AsyncTrainer(model(), callbacks=[Tells()])
    thread = threading.Thread(target=lambda: going.wait(50) and trainer.stop("by hand"))
    thread.start()
    history = train(trainer, optim.SGD(lr=0.1), epochs=1_000_000)
    thread.join()
    assert (history.stopped, history.stop_reason) == ("stop", "by hand")


def test_ctrl_c_keeps_the_history_and_the_next_train_goes_on():
    class Interrupts:
        def on_step(self, trainer, step):
            if step.step == 4:
                raise KeyboardInterrupt

    for strategy in ("local", "average", "accumulate"):
        trainer = offbeat.AsyncTrainer(model(), 0, 1, 2, strategy=strategy, callbacks=[Interrupts()])
        with pytest.raises(KeyboardInterrupt):
            train(trainer, optim.SGD(lr=0.1))
        assert (trainer.history.stopped, trainer.history.steps) == ("interrupted", 4)
        assert train(trainer, None, max_steps=3).steps == 3
        assert trainer.history.stopped == "max_steps"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_ends_a_train_between_two_passes_leaves_no_number_out(error):
    epochs = []

    class Ends:
        def on_step(self, trainer, step):
            epochs.append(step.epoch)

        def on_epoch_end(self, trainer, epoch):
            if epoch == 1:
                raise error

    trainer = offbeat.AsyncTrainer(model(), callbacks=Ends())
    with pytest.raises(error):
        train(trainer, optim.SGD(lr=0.1), data=DATA[:2], epochs=3)
    train(trainer, None, data=DATA[:2], epochs=2)
    assert epochs == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_pass_that_was_begun_and_not_finished_is_not_begun_again_and_one_without_a_batch_is():
    epochs = []

    class Seen:
        def on_step(self, trainer, step):
            epochs.append(step.epoch)

    def broken(number):
        yield from DATA[:number]
        raise ZeroDivisionError

    trainer = offbeat.AsyncTrainer(model(), callbacks=Seen())
    for number in (0, 1):
        with pytest.raises(ZeroDivisionError):
            train(trainer, optim.SGD(lr=0.1), data=broken(number), epochs=1)
    train(trainer, None, data=DATA[:2], epochs=1)
    assert epochs == [0, 1, 1]


def test_a_batch_that_is_no_pair_is_refused_with_what_a_trainer_s_user_can_do():
    three = [(torch.zeros(2, 6), torch.zeros(2), torch.zeros(2, dtype=torch.long))]
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError, match=r"gave a tuple of 3; .*collate_fn.*AsyncModelAverager") as caught:
        train(trainer, optim.SGD(lr=0.1), data=three)
    assert "worker." not in str(caught.value)
    with pytest.raises(ConfigError, match=r"gave a tuple of 3; .*collate_fn") as caught:
        trainer.evaluate(three)
    assert "worker." not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: offbeat.AsyncTrainer(model(), max_epochs=3), "'max_epochs'; did you mean train(epochs=…)?"),
        (lambda: offbeat.AsyncTrainer(model(), warmup_epochs=3), "did you mean 'warm_up_epochs'?"),
        (
            lambda: offbeat.AsyncTrainer(model()).train(batch_size=8, loss_fn=LOSS),
            "'batch_size'; did you mean AsyncTrainer(local_batch_size=…)?",
        ),
        (lambda: offbeat.AsyncTrainer(model()).fit(epoch=8, loss_fn=LOSS), "did you mean 'epochs'?"),
        (
            lambda: offbeat.AsyncModelAverager(model(), optimizer=optim.SGD(lr=0.1)),
            "did you mean train_step(optimizer=…)?",
        ),
    ],
)
def test_a_keyword_of_another_call_is_answered_with_that_call(call, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        call()


def test_callbacks_none_are_none():
    train(offbeat.AsyncTrainer(model(), callbacks=None), optim.SGD(lr=0.1))


def test_the_size_of_batches_can_be_set_between_two_trains():
    trainer = offbeat.AsyncTrainer(model(), local_batch_size=4)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.arange(16) % 5)
    given = {"dataset": data, "optimizer": optim.SGD(lr=0.1), "loss_fn": LOSS, "progress": False}
    assert trainer.train(**given).steps == 4
    with pytest.raises(ConfigError, match="local_batch_size is 0"):
        trainer.local_batch_size = 0
    trainer.local_batch_size = 8
    assert trainer.train(**given | {"optimizer": None}).steps == 2


def test_one_of_several_processes_is_not_alone_unless_it_says_so(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="there is no process group of them"):
        offbeat.AsyncTrainer(model(), strategy={0: "local", 1: "average"})
    train(offbeat.AsyncTrainer(model(), strategy="average", process_group=False), optim.SGD(lr=0.1))
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError, match="there is no process group of them"):
        trainer.strategy = "accumulate"


def test_a_step_tells_the_norm_from_before_it_was_clipped():
    norms = []

    class Seen:
        def on_step(self, trainer, step):
            after = nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
            norms.append((float(step.gradient_norm), float(after)))

    train(offbeat.AsyncTrainer(model(), max_grad_norm=0.01, callbacks=Seen()), optim.SGD(lr=0.1), epochs=1)
    assert all(before > 0.01 and after == pytest.approx(0.01, rel=1e-3) for before, after in norms)


def test_trackers_of_both_kinds_get_the_log_lines():
    class Keeps:
        def __init__(self):
            self.steps = []

        def log(self, values, step):
            self.steps.append((step, "loss" in values, "offbeat/samples_per_s" in values))

        def finish(self):
            raise AssertionError("they are the user's to finish")

    of_all, of_one = Keeps(), Keeps()
    trainer = offbeat.AsyncTrainer(model(), trackers=of_all)
    train(trainer, optim.SGD(lr=0.1), epochs=1, log_frequency=9, trackers=[of_one])
    train(trainer, optim.SGD(lr=0.1), epochs=1, log_frequency=9)
    assert of_all.steps == [(9, True, True), (18, True, True)]
    assert of_one.steps == [(9, True, True)]


def test_the_history_draws_itself(tmp_path):
    trainer = offbeat.AsyncTrainer(model())
    train(trainer, optim.SGD(lr=0.1), log_frequency=5)
    trainer.history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000


def test_a_dataset_is_gone_through_in_an_order_of_the_members_own():
    inputs = torch.arange(20.0)[:, None].expand(20, 6)
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(20, dtype=torch.long))
    seen = {}

    def orders(name, **keywords):
        def note(outputs, targets):
            return 0.0

        taken = []
        trained = model()
        trained.register_forward_pre_hook(lambda _, given: taken.extend(given[0][:, 0].tolist()))
        trainer = offbeat.AsyncTrainer(trained, local_batch_size=5, **keywords)
        trainer.train(
            dataset=data, epochs=2, optimizer=optim.SGD(lr=0.01), loss_fn=LOSS, progress=False, metrics=note
        )
        seen[name] = taken

    orders("plain")
    torch.manual_seed(99)
    orders("again")
    orders("seeded", seed=3)
    assert seen["plain"] == seen["again"] != seen["seeded"]
    assert sorted(seen["plain"][:20]) == list(range(20)) != seen["plain"][:20]
    assert seen["plain"][:20] != seen["plain"][20:]


# ------------------------------------------------------------------------------------------ measuring


def test_evaluate_and_predict_leave_no_trace():
    trainer = offbeat.AsyncTrainer(model(), strategy="average", regular_sync_frequency=4)
    train(trainer, optim.SGD(lr=0.1))
    trained = trainer.model
    trained.train()
    trained[1].eval()
    state = copy.deepcopy(trained.state_dict())
    gradients = [p.grad.clone() for p in trained.parameters()]
    modes = [part.training for part in trained.modules()]
    randoms = torch.get_rng_state(), random.getstate(), numpy_state()
    inputs = torch.cat([inputs for inputs, _ in DATA])
    data = torch.utils.data.TensorDataset(inputs, torch.cat([targets for _, targets in DATA]))
    shuffled = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    found = trainer.evaluate(shuffled, ["accuracy", "loss"])
    one = trainer.evaluate(DATA)
    pairs, dataset, alone = trainer.predict(DATA), trainer.predict(data), trainer.predict([inputs])
    assert [part.training for part in trained.modules()] == modes
    assert all(map(torch.equal, state.values(), trained.state_dict().values()))
    assert all(map(torch.equal, gradients, [p.grad for p in trained.parameters()]))
    assert torch.equal(randoms[0], torch.get_rng_state())
    assert randoms[1:] == (random.getstate(), numpy_state())
    with torch.no_grad():
        expected = trained.eval()(inputs)
    assert torch.equal(alone, expected)
    assert not alone.requires_grad
    assert torch.allclose(pairs, expected)
    assert torch.allclose(dataset, expected)
    targets = torch.cat([targets for _, targets in DATA])
    assert (
        found["accuracy"]
        == pytest.approx(one)
        == pytest.approx((expected.argmax(1) == targets).float().mean())
    )
    assert found["loss"] == pytest.approx(LOSS(expected, targets).item(), rel=1e-5)


def test_predict_in_the_midst_moves_no_generator_of_the_data_and_no_buffer():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(6, 5)
            self.register_buffer("num_seen", torch.zeros(()))

        def forward(self, inputs):
            self.num_seen += len(inputs)
            return super().forward(inputs)

    trainer, generator = offbeat.AsyncTrainer(Counts()), torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.zeros(8, 6)), batch_size=4, shuffle=True, generator=generator
    )
    before = generator.get_state()
    assert trainer.predict(loader).shape == (8, 5)
    assert torch.equal(generator.get_state(), before)
    assert trainer.model.num_seen == 0


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, inputs):
        return {"sum": inputs.sum(1), "pair": (self.linear(inputs), inputs)}


def test_predict_puts_nests_together_and_says_what_it_cannot():
    trainer = offbeat.AsyncTrainer(Both())
    inputs = torch.cat([inputs for inputs, _ in DATA])
    found = trainer.predict(DATA)
    assert torch.equal(found["sum"], torch.cat([one.sum(1) for one, _ in DATA]))
    assert torch.equal(found["pair"][1], inputs)
    with pytest.raises(ConfigError, match="predict got no batches"):
        trainer.predict([])
    with pytest.raises(ConfigError, match="the loader gave a str"):
        trainer.predict(["text"])
    for measure in (trainer.predict, trainer.evaluate):
        with pytest.raises(
            ConfigError, match=rf"a tensor of shape \[{len(inputs)}, 6\].*give a list of batches"
        ):
            measure(inputs)


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
def test_a_loss_without_a_way_back_is_refused_before_anything_is_trained(strategy):
    trained = model()
    before = copy.deepcopy(list(trained.parameters()))
    with (
        offbeat.AsyncTrainer(trained, strategy=strategy) as trainer,
        pytest.raises(ConfigError, match="loss without a way back to the model: it was detached"),
    ):
        trainer.train(
            dataloader=DATA,
            optimizer=optim.SGD(lr=0.1),
            loss_fn=lambda outputs, targets: LOSS(outputs.detach(), targets),
            progress=False,
        )
    assert all(map(torch.equal, before, trained.parameters()))


# ------------------------------------------------------------------------------------------ refusals


def test_a_hook_that_is_mistyped_is_refused_with_the_nearest_though_others_are_right():
    class Mistyped:
        on_click = print  # nobody's hook
        on_steps = 3  # no method

        def on_step(self, trainer, step):
            pass

        def on_epochs_end(self, trainer, epoch):
            pass

        def onTrainEnd(self, trainer, history):  # noqa: N802  as others would write it
            pass

    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), callbacks=[Mistyped()])
    known = "Known: on_step, on_log, on_epoch_end, on_train_end"
    assert f"unknown hook 'on_epochs_end'; did you mean 'on_epoch_end'? {known}" in str(refused.value)
    assert f"unknown hook 'onTrainEnd'; did you mean 'on_train_end'? {known}" in str(refused.value)
    assert str(refused.value).count("unknown hook") == 2


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(
            nn.Sequential(nn.BatchNorm1d(3)),
            warm_up_epochs=-1,
            warm_up_sync_frequency=0,
            regular_sync_frequency="30s",
            strategy="gossipp",
            local_batch_size=True,
            device="tpu9",
            callbacks=[5],
            max_grad_norm=-1.0,
            amp="fp8",
            compile=3,
            gradient_checkpointing=True,
            loss_reduction="max",
            overlap=0,
            server_address=5,
            worker_id="",
            trackers=5,
            seed=-1,
        )
    for told in [
        "warm_up_epochs is -1",
        "warm_up_sync_frequency is 0",
        "regular_sync_frequency is '30s'",
        "unknown strategy 'gossipp'",
        "local_batch_size is True",
        "device is 'tpu9'",
        "callbacks has 5: give objects with any of on_step",
        "max_grad_norm is -1.0",
        "unknown amp 'fp8'",
        "compile is 3",
        "'0' is a BatchNorm1d, whose running statistics a second pass would count twice",
        "compile and gradient_checkpointing do not go together",
        "unknown loss_reduction 'max'",
        "overlap is 0",
        "server_address is 5",
        "worker_id is ''",
        "trackers has 5",
        "seed is -1",
    ]:
        assert told in str(refused.value)
    with pytest.raises(
        ConfigError, match="unknown keyword of AsyncTrainer 'stratgy'; did you mean 'strategy'"
    ):
        offbeat.AsyncTrainer(model(), stratgy="local")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"server_address": "10.0.0.1:5000"}, ["server_address is '10.0.0.1:5000', and no strategy is at a"]),
        (
            {"strategy": "accumulate", "server_address": "10.0.0.1:5000", "token": "t", "overlap": 3},
            ["server_address is '10.0.0.1:5000'", "token is given, and no strategy", "overlap is 3"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "process_group": False},
            ["server_address is '10.0.0.1:5000', and those that average meet in a process group"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "communication_backend": "gloo"},
            ["server_address is '10.0.0.1:5000', and those that average meet in a process group"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "worker_id": "amy"},
            ["worker_id is 'amy', and only \"parameter_server\" has names"],
        ),
        (
            {"communication_backend": "gloo", "asynchronous": True},
            ["communication_backend is 'gloo', and no strategy averages", "asynchronous is True, and no"],
        ),
        (
            {
                "strategy": {0: "average", 1: "parameter_server"},
                "server_address": "10.0.0.1:5000",
                "communication_backend": "tcp",
                "process_group": False,
            },
            ["which adds up either differences or gradients in one run", "process_group is given, and no"],
        ),
        ({"strategy": "average", "communication_backend": "tpc"}, ["unknown communication_backend 'tpc'"]),
        ({"strategy": "average", "communication_backend": "tcp"}, ["give server_address='HOST:PORT'"]),
        (
            {"strategy": "parameter_server", "server_address": "10.0.0.1", "seed": -1},
            ["server_address: '10.0.0.1' is not an address; give HOST:PORT", "seed is -1"],
        ),
    ],
)
def test_what_no_strategy_has_a_use_for_is_refused_with_value_and_remedy(keywords, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), **keywords)
    for text in told:
        assert text in str(refused.value)


def test_a_process_group_that_no_strategy_meets_in_is_refused():
    given = {"process_group": object(), "server_address": "127.0.0.1:1"}
    for strategy in ("local", "parameter_server"):
        with pytest.raises(
            ConfigError, match="process_group is given, and no strategy's members meet in one"
        ):
            offbeat.AsyncTrainer(model(), strategy=strategy, **given)


@pytest.mark.parametrize(
    "keywords",
    [
        {
            "strategy": {0: "local", 1: "parameter_server"},
            "server_address": "h:1",
            "token": "t",
            "worker_id": "a",
        },
        {"strategy": {0: "local", 1: "average"}, "server_address": "h:1", "token": "t"},
        {"strategy": {0: "average", 1: "parameter_server"}, "server_address": "h:1", "process_group": False},
        {"strategy": {0: "accumulate", 1: "average"}, "overlap": 3, "process_group": False},
        {"strategy": "local", "process_group": False, "overlap": False},
    ],
)
def test_what_one_of_several_strategies_has_a_use_for_is_taken(keywords):
    offbeat.AsyncTrainer(model(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        (
            {"strategy": {0: "local", 5: averaging.DiLoCo(fragments=1000)}},
            ["fragments is 1000, and the model has 6 parameters"],
        ),
        (
            {"strategy": "average", "overlap": 200, "warm_up_epochs": 1, "callbacks": 5},
            ["overlap is 200, and a round begins every 100 iterations", "callbacks has 5"],
        ),
        (
            {"strategy": averaging.DiLoCo(fragments=4), "warm_up_epochs": 1, "warm_up_sync_frequency": 3},
            ["fragments is 4, and they are all averaged within 3 iterations"],
        ),
        (
            {"strategy": {0: "local", 1: averaging.DiLoCo(delay=3)}},
            ["delay and activation are for asynchronous"],
        ),
        (
            {"strategy": "diloco", "asynchronous": True},
            ["asynchronous is True and communication_backend None"],
        ),
        (
            {"strategy": {0: "diloco", 1: "average"}, "asynchronous": True, "server_address": "h:1"},
            ["asynchronous is True and method Average()"],
        ),
        ({"strategy": {0: "local", 9: "gossip"}, "server_address": "h:1"}, ["whose members meet in twos"]),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_before_its_epoch_comes(keywords, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), **keywords)
    for text in told:
        assert str(refused.value).count(text) == 1


def test_a_strategy_is_asked_for_the_frequencies_of_its_own_epochs():
    four = averaging.DiLoCo(fragments=4)
    how = {"warm_up_epochs": 1, "warm_up_sync_frequency": 3}
    trainer = offbeat.AsyncTrainer(model(), strategy={0: "local", 1: four}, **how)
    assert trainer.strategies == {0: "local", 1: four}
    with pytest.raises(ConfigError, match="within 3 iterations"):
        trainer.strategy = four
    train(trainer, optim.SGD(lr=0.1), epochs=1)
    trainer.strategy = four  # the warm-up is over


def test_an_alpha_that_is_too_strong_for_all_members_is_refused_before_its_epoch_comes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"alpha is 0\.6 and there are 4 members"):
        offbeat.AsyncTrainer(
            model(), strategy={0: "local", 1: averaging.EASGD(alpha=0.6)}, server_address="h:1"
        )


def test_all_that_is_wrong_with_a_train_is_told_at_once_and_nothing_changes():
    trainer = offbeat.AsyncTrainer(model())
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ConfigError) as refused:
        trainer.train(
            epochs=0,
            loss_fn=3,
            metrics="acuracy",
            log_frequency=0,
            scheduler=StepLR,
            scheduler_interval="batch",
            max_steps=0,
            progress="yes",
            trackers=7,
        )
    for told in [
        "epochs is 0",
        "loss_fn is 3",
        "unknown metric 'acuracy'",
        "log_frequency is 0",
        "scheduler is the class StepLR",
        "unknown scheduler_interval 'batch'",
        "max_steps is 0",
        "progress is 'yes': give True for a bar, False for nothing, or None",
        "trackers has 7",
        "a dataset= or a dataloader=",
    ]:
        assert told in str(refused.value)
    with pytest.raises(ConfigError, match="there is no optimizer: give optimizer="):
        train(trainer, None)
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"scheduler": functools.partial(ReduceLROnPlateau)}, "ReduceLROnPlateau goes by a metric: give"),
        (
            {
                "scheduler": functools.partial(ReduceLROnPlateau),
                "scheduler_interval": "step",
                "scheduler_metric": "loss",
            },
            "ReduceLROnPlateau goes by an epoch's mean",
        ),
        ({"scheduler": lambda live: StepLR(live, 2), "scheduler_metric": "loss"}, "StepLR goes by no metric"),
        ({"scheduler_metric": "loss"}, "scheduler_metric is given, and no scheduler"),
        ({"scheduler_interval": "step"}, 'scheduler_interval is "step", and there is no scheduler'),
        (
            {"scheduler": functools.partial(ReduceLROnPlateau), "scheduler_metric": 5},
            "scheduler_metric: 5 is no metric",
        ),
        ({"scheduler": lambda live: 5}, "scheduler gave 5"),
        (
            {"scheduler": functools.partial(StepLR)},
            r"StepLR.*cannot make one of the SGD: TypeError: .*step_size.*step_size=10",
        ),
        ({"scheduler": lambda live: OneCycleLR(live, 0.1)}, "cannot make one of the SGD: ValueError: "),
        (
            {"scheduler": StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 2)},
            "the StepLR is of another optimizer than the SGD",
        ),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused_and_no_optimizer_stays_behind(keywords, told):
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError, match=told):
        train(trainer, optim.SGD(lr=0.1), **keywords)
    assert trainer.optimizer is None
    train(trainer, optim.Adam(lr=0.01), epochs=1)
    assert type(trainer.optimizer) is torch.optim.Adam


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        (
            {"scheduler": lambda live: OneCycleLR(live, 0.1, total_steps=9), "scheduler_metric": "loss"},
            "metric",
        ),
        ({"scheduler": lambda live: OneCycleLR(live, 0.1, total_steps=9), "max_steps": 0}, "max_steps is 0"),
    ],
)
def test_a_refused_train_leaves_a_live_optimizer_as_it_was(keywords, told):
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=torch.tensor(0.3), momentum=0.8)
    before, own = copy.deepcopy(live.state_dict()), set(vars(live))
    trainer = offbeat.AsyncTrainer(trained)
    with pytest.raises(ConfigError, match=told):
        train(trainer, live, **keywords)
    assert live.state_dict() == before
    assert set(vars(live)) == own


def test_what_is_wrong_with_optimizer_scheduler_and_the_rest_is_told_at_once():
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError) as refused:
        train(trainer, 5, scheduler=StepLR, scheduler_interval="batch", max_steps=0)
    for told in ("optimizer", "scheduler is the class StepLR", "interval 'batch'", "max_steps is 0"):
        assert told in str(refused.value)
    with pytest.raises(ConfigError, match=r"max_steps is 0: .*; .*StepLR goes by no metric"):
        train(
            trainer,
            optim.SGD(lr=0.1),
            scheduler=lambda live: StepLR(live, 2),
            scheduler_metric="loss",
            max_steps=0,
        )
    assert trainer.optimizer is None


@pytest.mark.parametrize(
    ("trained", "given", "told"),
    [
        (nn.Linear(2, 2), True, "the Linear is and holds no nn.Sequential"),
        (blocks(), ["0", "0.inner"], "'0.inner' is within '0', and would be computed three times"),
        (blocks(), ["0.iner"], "unknown part '0.iner'; did you mean '0.inner'"),
        (blocks(), "0", "gradient_checkpointing is '0': give True, False, or names"),
        (blocks(), [], "gradient_checkpointing is \\[\\]"),
    ],
)
def test_parts_that_cannot_be_computed_twice_are_refused_by_name(trained, given, told):
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncTrainer(trained, gradient_checkpointing=given)


def test_a_model_in_ddp_or_fsdp_is_refused(monkeypatch):
    from torch.distributed import fsdp

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    with pytest.raises(ConfigError, match="a module in FSDP"):
        offbeat.AsyncTrainer(nn.Sequential(Sharded(2, 2)))
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Sharded)
    with pytest.raises(ConfigError, match="a module in DDP"):
        offbeat.AsyncTrainer(nn.Sequential(Sharded(2, 2)))


def test_another_optimizer_is_refused_and_an_equal_one_keeps_its_state():
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours)
    torch.manual_seed(7)
    for spec in (optim.Adam(lr=0.01), optim.Adam(lr=0.01), None):
        trainer.train(dataloader=DATA, optimizer=spec, loss_fn=LOSS, progress=False)
    loop(theirs, live_of(optim.Adam(lr=0.01), theirs), epochs=3)
    assert same(ours, theirs)
    with pytest.raises(ConfigError, match="whose state would be lost"):
        train(trainer, optim.SGD(lr=0.1))


def test_a_model_with_other_parameters_than_at_first_is_refused_by_what_averages():
    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=1, strategy="average")
    train(trainer, optim.SGD(lr=0.1))
    trainer.model[0].weight = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(StateError, match="is another object"):
        train(trainer, None)
    assert trainer.history.stopped == "failed"
