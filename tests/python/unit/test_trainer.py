"""A trainer alone: what it does is a plain loop of torch's."""

import copy
import functools
import io
import random
from types import MethodType

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError
from offbeat.trainer.recompute import Recomputed
from support.trainer_loop import (
    DATA,
    LOSS,
    OPTIMIZERS,
    batch,
    blocks,
    live_of,
    loop,
    model,
    numpy_state,
    plain,
    same,
    train,
)


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


@pytest.mark.parametrize("given", [True, ["0", "1"]])
def test_gradient_checkpointing_computes_twice_and_changes_no_bit(given):
    ours, theirs = blocks(), blocks()
    train(offbeat.AsyncTrainer(ours, gradient_checkpointing=given), optim.SGD(lr=0.1))
    loop(theirs, live_of(optim.SGD(lr=0.1), theirs))
    assert same(ours, theirs)
    assert (ours[0].computed, theirs[0].computed) == (36, 18)
    assert not any("forward" in part.__dict__ for part in ours.modules())
    copy.deepcopy(ours)


class Twice(nn.Module):
    """A model that computes a stage of its own twice already."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stage = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.out = nn.Linear(6, 5)

    def forward(self, inputs):
        return self.out(checkpoint(self.stage, inputs, use_reentrant=False))


class Named(nn.Module):
    """A part that takes its tensors by keyword, and a keyword that torch's checkpoint has, too."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, *, inputs, debug):
        return self.drop(torch.tanh(self.inner(inputs))) * (1.0 if debug else 100.0)


class ByKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part, self.out = Named(), nn.Linear(6, 5)

    def forward(self, inputs):
        return self.out(self.part(inputs=inputs, debug=True))


class UnderTwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.head = nn.Sequential(self.first, nn.Tanh(), nn.Linear(6, 5))

    def forward(self, inputs):
        return self.head(self.first(inputs))


class WithinItself(nn.Module):
    """A part that is used within itself, as a tree's node."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs, depth=2):
        inner = self(torch.tanh(self.down(inputs)), depth - 1) if depth else inputs
        return torch.tanh(self.up(inner))


def tree():
    torch.manual_seed(0)
    return nn.Sequential(WithinItself(), nn.Linear(6, 5))


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (Twice, ["stage.1"]),
        (Twice, ["stage.0", "stage.2"]),
        (tree, ["0"]),
        (ByKeywords, ["part"]),
        (UnderTwoNames, True),
        (UnderTwoNames, ["first", "head.0"]),
    ],
)
def test_parts_of_any_kind_change_no_bit(made, parts, strategy):
    ours, theirs = made(), made()
    often = {} if strategy == "local" else {"regular_sync_frequency": 2, "warm_up_epochs": 0}
    for trained, named in ((ours, parts), (theirs, False)):
        torch.manual_seed(7)
        trainer = offbeat.AsyncTrainer(trained, strategy=strategy, gradient_checkpointing=named, **often)
        train(trainer, optim.SGD(lr=0.1))
    assert same(ours, theirs)


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
    assert all("forward" not in part.__dict__ or isinstance(part.forward, MethodType) for part in kept.copied)
    kept.saved.seek(0)
    loaded = torch.load(kept.saved, weights_only=False).eval()
    assert torch.equal(loaded(inputs), expected)
    num, before = loaded[0].computed, ours[0].computed
    loaded(inputs).sum().backward()
    assert (loaded[0].computed, ours[0].computed) == (num + 1, before), "it computes once, and by itself"
    found = kept.copied.eval()(inputs)
    assert torch.equal(found, expected)
    gradients = [parameter.grad.clone() for parameter in ours.parameters()]
    kept.copied.zero_grad()
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in kept.copied.parameters())
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in ours.parameters()]))


class Reduced(nn.Linear):
    """Is pickled and copied by what it has, as a `torch.fx.GraphModule` is."""

    def __reduce__(self):
        return (made_of, (dict(self.__dict__),))


def made_of(attributes):
    part = Reduced.__new__(Reduced)
    part.__dict__.update(attributes)
    return part


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class OfAnother(nn.Sequential):
    """Has another's forward for its own."""

    @property
    def forward(self):
        return self[0].forward


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize(
    "made",
    [
        lambda: Reduced(6, 6),
        lambda: OfAnother(nn.Linear(6, 6)),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6))),
    ],
    ids=["by its attributes", "a property", "of fx"],
)
def test_a_callback_may_copy_and_save_a_model_of_any_parts_that_are_computed_twice(made, copied):
    class Copies:
        def on_step(self, trainer, step):
            self.copied, self.state = copied(trainer.model), copy.deepcopy(trainer.model.state_dict())

    kept, ours = Copies(), nn.Sequential(made(), nn.Linear(6, 5))
    trainer = offbeat.AsyncTrainer(ours, gradient_checkpointing=["0"], callbacks=kept)
    train(trainer, optim.SGD(lr=0.1))
    assert all(map(torch.equal, kept.copied.state_dict().values(), kept.state.values()))
    inputs = DATA[0][0]
    assert torch.equal(kept.copied(inputs), ours(inputs)), "of the last step"


def doubled(inputs):
    return 2.0 * inputs


class Static(nn.Linear):
    forward = staticmethod(doubled)


class Builtin(nn.Linear):
    forward = torch.tanh


@pytest.mark.parametrize("kind", [Static, Builtin])
def test_parts_are_computed_twice_whatever_their_class_has_for_a_forward(kind):
    part, inputs = kind(6, 6), DATA[0][0]
    expected = part(inputs)
    with Recomputed([part]).passes():
        assert torch.equal(part(inputs), expected)
    assert "forward" not in part.__dict__


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
