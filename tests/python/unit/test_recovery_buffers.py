"""Buffers that training makes others than they were built: the same command builds the same model again."""

import functools
import logging

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, ModelMismatchError, UnsupportedTensorError
from offbeat.module.table import unwrap
from offbeat.recovery.files import read
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import digest, waited
from support.small_run import LOSS, batches


class Remembers(nn.Module):
    """A bank that grows, a mean that begins as None, one that a forward registers, one that comes and goes.

    What it gives depends on all of them.
    """

    def __init__(self, units=8):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, units), nn.BatchNorm1d(units), nn.Linear(units, 3)
        self.register_buffer("bank", torch.zeros(0, units))
        self.register_buffer("mean", None)
        self.register_buffer("comes", torch.zeros(2))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).relu()
        if self.training:
            now = hidden.detach().mean(0)
            self.bank = torch.cat([self.bank, now[None]])
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
            self.comes = None if self.comes is not None else now.double()
            self.cache = now if self.cache is None else self.cache + now
            if not hasattr(self.last, "made"):
                self.last.register_buffer("made", now.clone())
                self.first.register_buffer("beside", now.clone(), persistent=False)
            self.last.made.mul_(0.5).add_(now)
            self.first.beside.mul_(0.5).add_(now)
            hidden = hidden + self.bank.mean(0) + self.mean + self.last.made + self.cache + self.first.beside
            hidden = hidden if self.comes is None else hidden + self.comes.float()
        return self.last(hidden)


class Recalls(nn.Module):
    """A loss with a bank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("losses", torch.zeros(0))
        self.register_buffer("least", None)

    def forward(self, outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        self.losses = torch.cat([self.losses, loss.detach()[None]])
        self.least = self.losses.min()
        return loss * (1 + self.losses.mean() + self.least)


@pytest.fixture(autouse=True)
def _waited(monkeypatch):
    monkeypatch.setattr(Saver, "save", waited(Saver.save))


def built(kind=Remembers, **keywords):
    torch.manual_seed(0)
    return kind(**keywords)


def state_of(module):
    return dict(module.state_dict()) | dict(module.named_buffers())


def itself(module):
    return module


def local(module):
    return offbeat.AsyncTrainer(module, strategy="local")


def averaging(module):
    return offbeat.AsyncTrainer(module, strategy="average", regular_sync_frequency=4)


def accumulating(module):
    return offbeat.AsyncTrainer(module, strategy="accumulate", regular_sync_frequency=2)


def averager(module):
    return offbeat.AsyncModelAverager(module, averaging_frequency=4)


def live(folder, *, wrap=itself, module=None, loss_fn=None, **keywords):
    """Live once, with everything made anew; give the trainer and the loss."""
    module = built() if module is None else module
    loss_fn = Recalls() if loss_fn is None else loss_fn
    trainer = FaultTolerantTrainer(wrap(module), folder, checkpoint_frequency=5, deterministic=True)
    given = {"dataloader": batches(), "epochs": 3, "optimizer": optim.Adam(lr=0.01), "loss_fn": loss_fn}
    trainer.train(**given | keywords)
    return trainer, loss_fn


def bits_of(trainer, loss_fn):
    return digest([state_of(unwrap(trainer.model)), state_of(loss_fn), trainer.optimizer.state_dict()])


@pytest.mark.parametrize("wrap", [itself, torch.compile, local, averaging, accumulating, averager])
@pytest.mark.parametrize("stop_at", [7, 12])
def test_a_run_whose_buffers_change_goes_on_with_the_same_bits(wrap, stop_at, tmp_path):
    if wrap is torch.compile:
        wrap = functools.partial(torch.compile, backend="eager")
    whole, expected = live(tmp_path / "whole", wrap=wrap)
    live(tmp_path / "kept", wrap=wrap, max_steps=stop_at)
    again, loss_fn = live(tmp_path / "kept", wrap=wrap)
    assert again.resumed_from is not None
    assert again.history.steps == whole.history.steps
    assert len(unwrap(again.model).bank) > stop_at
    assert len(loss_fn.losses) > stop_at
    assert bits_of(again, loss_fn) == bits_of(whole, expected)
    for name, buffer in whole.model.named_buffers():
        assert dict(again.model.named_buffers())[name].dtype == buffer.dtype
    listed = unwrap(again.model).state_dict()
    assert {"bank", "mean", "last.made"} <= listed.keys()
    assert not {"cache", "first.beside"} & listed.keys()


def test_what_was_of_another_size_is_named(tmp_path, caplog):
    live(tmp_path, max_steps=5)
    with caplog.at_level(logging.INFO, "offbeat"):
        live(tmp_path, max_steps=6)
    assert "'bank' is [5, 8], and was [0, 8] here; 'mean' is [8], and was None here" in caplog.text
    assert "'last.made' is [8], and the model had no such buffer yet" in caplog.text
    assert "were the model built otherwise in these alone, nothing could tell" in caplog.text


@pytest.mark.parametrize("stop_at", [5, 6])
def test_a_buffer_that_was_none_then_is_none_again(stop_at, tmp_path):
    whole, _ = live(tmp_path, max_steps=stop_at)
    (folder,) = tmp_path.glob(f"save-*-step-{stop_at}")
    assert ("comes" in read(folder)[0]) == (stop_at == 6)
    again, _ = live(tmp_path, max_steps=stop_at + 1)
    assert (again.model.comes is None) == (whole.model.comes is not None)


class Back:
    """A loss that goes back once."""

    def __init__(self, at, to):
        self.at, self.to, self.trainer, self.said = at, to, None, None

    def __call__(self, outputs, targets):
        if self.trainer.history.steps + 1 == self.at and self.said is None:
            self.said = self.trainer.rollback(self.to)
        return LOSS(outputs, targets)


def going_back(folder, *, wrap=itself, max_steps, back=(13, 5)):
    loss_fn = Back(*back)
    trainer = FaultTolerantTrainer(wrap(built()), folder, checkpoint_frequency=5, deterministic=True)
    loss_fn.trainer = trainer
    trainer.train(
        dataloader=batches(), epochs=6, max_steps=max_steps, optimizer=optim.Adam(lr=0.01), loss_fn=loss_fn
    )
    return trainer, loss_fn


@pytest.mark.parametrize("wrap", [itself, local])
def test_rollback_goes_back_over_a_change_of_size(wrap, tmp_path):
    trainer, loss_fn = going_back(tmp_path, wrap=wrap, max_steps=13)
    assert loss_fn.said == 5
    (folder,) = tmp_path.glob("save-*-step-5")
    then = read(folder)[0]
    assert digest(dict(trainer.model.state_dict())) == digest(then)
    assert len(trainer.model.bank) == 5
    assert trainer.model.comes is None


def test_a_run_that_went_back_over_one_and_is_broken_off_ends_with_the_same_bits(tmp_path):
    whole, _ = going_back(tmp_path / "whole", max_steps=18)
    going_back(tmp_path / "kept", max_steps=14)
    again, _ = going_back(tmp_path / "kept", max_steps=18, back=(0, 5))
    assert digest(state_of(again.model)) == digest(state_of(whole.model))


class Late(nn.Module):
    """Begins one buffer as None and registers another, both in the eighth batch."""

    def __init__(self):
        super().__init__()
        self.line, self.seen = nn.Linear(4, 3), 0
        self.register_buffer("none", None)

    def forward(self, inputs):
        self.seen += 1
        if self.seen == 8:
            self.none = torch.ones(2)
            self.register_buffer("made", torch.ones(3))
        return self.line(inputs)


def test_rollback_to_before_a_buffer_was_made_leaves_none_where_it_began_so(tmp_path):
    module, loss_fn = built(Late), Back(12, 5)
    loss_fn.trainer = FaultTolerantTrainer(module, tmp_path, checkpoint_frequency=5)
    loss_fn.trainer.train(
        dataloader=batches(), max_steps=12, epochs=6, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn
    )
    assert loss_fn.said == 5
    assert module.none is None
    assert module.made.equal(torch.ones(3))  # whoever made it takes it for there


def test_a_checkpoint_that_does_not_tell_of_buffers_is_taken_where_they_are_registered(tmp_path, monkeypatch):
    """As those of before: what a forward registers could be a parameter there."""
    taken = offbeat.recovery.local.Local.state_dict

    def without(self):
        return {name: part for name, part in taken(self).items() if name != "buffers"}

    with monkeypatch.context() as patched:
        patched.setattr(offbeat.recovery.local.Local, "state_dict", without)
        live(tmp_path / "made", max_steps=5)
        live(tmp_path / "late", module=built(Late), max_steps=5)
    with pytest.raises(ModelMismatchError, match=r"has a 'last\.made', which the model has not"):
        live(tmp_path / "made")
    module = built()
    module.last.register_buffer("made", None)
    module.comes = None
    trainer, _ = live(tmp_path / "made", module=module, max_steps=6)
    assert len(trainer.model.bank) == 6
    module = built(Late)
    live(tmp_path / "late", module=module, max_steps=6)
    assert module.none is None


class Other(Remembers):
    """Of other modules, parameters or buffers than what was saved, by what is said."""

    def __init__(self, what):
        super().__init__(units=6 if what == "size" else 8)
        match what:
            case "module":
                self.middle = nn.Identity()
                self.middle.register_buffer("table", torch.zeros(3))
            case "parameter":
                self.scale = nn.Parameter(torch.ones(()))
            case "buffer":
                self.register_buffer("bankk", torch.zeros(0, 8))
            case "bias":
                self.last = nn.Linear(8, 3, bias=False)
            case "dtype":
                self.first.weight = nn.Parameter(self.first.weight.detach().double())
            case "taken":
                self.last.made = None  # where no buffer can be registered
            case "outside":
                del self.bank
                self.register_buffer("bank", torch.zeros(0, 8), persistent=False)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("size", r"'first\.weight' is \[6, 4\] float32, and the checkpoint's is \[8, 4\] float32"),
        ("module", r"the checkpoint has no 'middle\.table', which the model has"),
        ("parameter", "the checkpoint has no 'scale', which the model has"),
        ("buffer", "the checkpoint has no 'bankk', which the model has"),
        ("bias", r"the checkpoint has a 'last\.bias', which the model has not"),
        ("dtype", r"'first\.weight' is \[8, 4\] float64"),
        ("taken", r"the checkpoint has a 'last\.made', which the model has not"),
        ("outside", "the checkpoint has a 'bank', which the model has not"),
    ],
)
def test_another_model_is_refused_by_name_and_nothing_changes(what, said, tmp_path):
    live(tmp_path, max_steps=6)
    module = built(functools.partial(Other, what))
    before = digest(state_of(module))
    with pytest.raises(ModelMismatchError, match=said) as caught:
        live(tmp_path, module=module)
    assert "build the model that was saved" in str(caught.value)
    assert "'bank' is" not in str(caught.value)
    assert digest(state_of(module)) == before


def test_what_a_checkpoint_has_as_a_parameter_is_no_buffer_that_may_differ(tmp_path):
    module = built(functools.partial(Other, "parameter"))
    live(tmp_path, module=module, max_steps=6)
    with pytest.raises(ModelMismatchError, match="has a 'scale', which the model has not"):
        live(tmp_path)
    module = built()
    module.register_buffer("scale", None)
    with pytest.raises(ModelMismatchError, match="has a 'scale', which the model has not"):
        live(tmp_path, module=module)


def test_a_buffer_whose_module_is_not_there_is_refused(tmp_path):
    module = built(functools.partial(Other, "module"))
    live(tmp_path, module=module, max_steps=6)
    with pytest.raises(ModelMismatchError, match=r"has a 'middle\.table', which the model has not"):
        live(tmp_path)


def test_another_optimizer_beside_buffers_that_changed_is_told_as_that_alone(tmp_path):
    live(tmp_path, max_steps=6)
    with pytest.raises(
        ModelMismatchError, match="the optimizer is SGD, and the checkpoint's is Adam: give the same, or"
    ):
        live(tmp_path, optimizer=optim.SGD(lr=0.1))


def test_a_buffer_that_became_an_expanded_one_is_gone_back_from(tmp_path):
    class Expands(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, inputs):
            if self.training:
                self.mean = inputs.detach().mean().expand(8)
            return self.line(inputs)

    module, loss_fn = built(Expands), Back(12, 5)
    loss_fn.trainer = FaultTolerantTrainer(module, tmp_path, checkpoint_frequency=5)
    loss_fn.trainer.train(
        dataloader=batches(), max_steps=12, epochs=6, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn
    )
    (folder,) = tmp_path.glob("save-*-step-5")
    assert module.mean.equal(read(folder)[0]["mean"])


def lazy(norm):
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (nn.LazyBatchNorm1d, "parameters"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "buffers"),
        (lambda: nn.LazyLinear(8), "parameters"),
    ],
)
def test_a_model_without_a_shape_yet_is_refused_also_where_a_checkpoint_has_one(norm, what, tmp_path):
    module = lazy(norm())
    module(torch.zeros(2, 4))
    FaultTolerantTrainer(module, tmp_path).train(
        dataloader=batches(), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
    )
    with pytest.raises(ConfigError, match=f"model has {what} without a shape yet: run one batch through it"):
        FaultTolerantTrainer(lazy(norm()), tmp_path)


def test_a_loss_whose_buffers_have_no_shape_yet_is_refused_likewise(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LazyBatchNorm1d(affine=False)

        def forward(self, outputs, targets):
            return LOSS(self.norm(outputs), targets)

    made = Normed()
    made(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))
    live(tmp_path, loss_fn=made, max_steps=5)
    with pytest.raises(UnsupportedTensorError, match=r"'norm\.running_mean'\] is a .*UninitializedBuffer"):
        live(tmp_path, loss_fn=Normed(), max_steps=6)


def test_at_a_server_buffers_are_the_checkpoint_s_or_refused(tmp_path):
    with offbeat.ParameterServer(transaction="model", linger_s=0.1) as server:
        at_it = {"communication_backend": "tcp", "server_address": server.address, "world_size": 1}
        with offbeat.AsyncModelAverager(built(), averaging_frequency=4, **at_it) as member:
            FaultTolerantTrainer(member, tmp_path).train(
                dataloader=batches(), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
            )
    with offbeat.ParameterServer(transaction="model", linger_s=0.1) as server:
        at_it["server_address"] = server.address
        with (
            offbeat.AsyncModelAverager(built(), averaging_frequency=4, **at_it) as member,
            pytest.raises(ModelMismatchError, match=r"'bank' is \[0, 8\] float32"),
        ):
            FaultTolerantTrainer(member, tmp_path).train(
                dataloader=batches(), epochs=2, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
            )
