"""What a crash must not lose: state that no `state_dict` lists, orders that others draw, and a signal."""

import errno
import fcntl
import functools
import math
import os
import queue
import random
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
)

from offbeat import optim, termination
from offbeat.errors import CheckpointError, ConfigError
from offbeat.recovery import directory as directory_module
from offbeat.recovery import manifest as manifest_module
from offbeat.recovery import saver as saver_module
from offbeat.recovery.averaged import Patience
from offbeat.recovery.directory import Directory, names
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import waited
from support.waiting import wait_for

LOSS = nn.CrossEntropyLoss()
SAMPLES = 40
"""In batches of 8: a pass has five."""


class Numbered(Dataset):
    """Each sample's target is its number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.full((4,), index / SAMPLES), torch.tensor(index)


class Noisy(Numbered):
    """Samples that draw from generators of the dataset's own."""

    def __init__(self):
        self.plain, self.legacy = random.Random(1), np.random.RandomState(2)  # noqa: S311  no secret
        self.new, self.torch = np.random.default_rng(3), torch.Generator().manual_seed(4)

    def __getitem__(self, index):
        noise = self.plain.random() + self.legacy.rand() + self.new.random()
        noise += torch.rand((), generator=self.torch).item()
        return torch.full((4,), index / SAMPLES) + noise, torch.tensor(index)


class Shuffled(Sampler):
    """Draws each pass's order from a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        self.generator.shuffle(order)
        return iter(order)


def in_order_of(generator):
    return {"dataloader": DataLoader(Numbered(), batch_size=8, sampler=Shuffled(generator))}


class Counting(nn.Module):
    """Counts its batches where no `state_dict` tells of it."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        self.seen += 1
        self.table = torch.cat([self.table, self.seen.reshape(1)])  # which grows
        return self.line(inputs) * (1 + self.seen / 10 + self.table.mean())


class Centred(nn.Module):
    """A loss that keeps count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs, targets):
        self.seen += 1
        return LOSS(outputs, targets % 3) * (1 + self.seen / 10)


def plain_loss(outputs, targets):
    return LOSS(outputs, targets % 3)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def life(folder, *, model=net, loss=None, max_steps=None, data=None, deterministic=False):
    """Live once, with everything made anew; give which samples were seen, in order, and the values."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    module, loss_fn, seen = model(), plain_loss if loss is None else loss(), []

    def order(outputs, targets):
        seen.extend(targets.tolist())
        return 0.0

    given = {"dataset": Numbered(), "batch_size": 8} if data is None else data()
    FaultTolerantTrainer(module, folder, checkpoint_frequency=1000, deterministic=deterministic).train(
        **given, epochs=4, max_steps=max_steps, optimizer=optim.Adam(lr=0.01), loss_fn=loss_fn, metrics=order
    )
    return seen, [p.detach().clone() for p in module.parameters()]


def assert_goes_on(tmp_path, *, stop_at=13, **run):
    """A run of two lives, the second in mid-epoch, is one of one life to the bit."""
    whole, expected = life(tmp_path / "whole", **run)
    first, _ = life(tmp_path / "kept", max_steps=stop_at, **run)
    second, values = life(tmp_path / "kept", **run)
    assert len(first) == 8 * stop_at
    assert first + second == whole
    assert all(a.equal(b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize(
    "run", [{"model": Counting}, {"loss": Centred}], ids=["buffers that are no part of it", "the loss's own"]
)
def test_state_that_the_model_s_state_dict_lacks_is_not_lost(run, tmp_path):
    assert_goes_on(tmp_path, **run)


class Stacked(StackDataset):
    """Pairs of two datasets' samples, whose inputs are added up."""

    __getitems__ = None  # torch then asks for one by one

    def __getitem__(self, index):
        inputs = [sample[0] for sample in super().__getitem__(index).values()]
        return sum(inputs), torch.tensor(index)


@pytest.mark.parametrize(
    "data",
    [
        lambda: {"dataset": Noisy(), "batch_size": 8},
        lambda: {"dataset": Subset(Noisy(), range(SAMPLES)), "batch_size": 8},
        lambda: {"dataset": Subset(ConcatDataset([Noisy(), Noisy()]), range(2 * SAMPLES)), "batch_size": 8},
        lambda: {"dataset": Stacked(a=Noisy(), b=Noisy()), "batch_size": 8},
        lambda: {"dataloader": DataLoader(Noisy(), batch_size=8)},
        lambda: in_order_of(random.Random(5)),  # noqa: S311
        lambda: in_order_of(np.random.default_rng(5)),
    ],
    ids=[
        *("a dataset", "a part of a dataset", "a part of several in a row", "several side by side"),
        *("a dataset in a loader", "a sampler's of Python", "of numpy"),
    ],
)
def test_generators_of_the_data_s_own_go_on_where_they_were(data, tmp_path):
    assert_goes_on(tmp_path, data=data)


class Dropping(nn.Module):
    """Draws from torch's generator in each step, between the draws of what loads its batches."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, inputs):
        random.random(), np.random.rand()  # noqa: NPY002, S311  likewise
        return self.parts(inputs)


class Buffered(IterableDataset):
    """Shuffles as it goes, from a buffer, by torch's, numpy's or Python's generator."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        waiting = []
        for index in range(SAMPLES):
            if len(waiting) < 12:
                waiting.append(index)
                continue
            place = self.draw(12)
            chosen, waiting[place] = waiting[place], index
            yield Numbered()[chosen]
        for index in waiting:
            yield Numbered()[index]


class Buckets:
    """Gives batches, and shuffles samples of about one length as it comes to them."""

    def __len__(self):
        return SAMPLES // 8

    def __iter__(self):
        for start in range(0, SAMPLES, 8):
            yield (start + torch.randperm(8)).tolist()


@pytest.mark.parametrize("stop_at", [1, 4, 5, 13], ids=lambda number: f"after step {number}")
@pytest.mark.parametrize(
    "data",
    [
        lambda: {"dataset": Buffered(lambda n: torch.randint(n, ()).item()), "batch_size": 8},
        lambda: {"dataloader": DataLoader(Buffered(np.random.randint), batch_size=8)},
        lambda: {"dataloader": DataLoader(Buffered(random.randrange), batch_size=8)},
        lambda: {"dataloader": DataLoader(Numbered(), batch_sampler=Buckets())},
        lambda: {"dataloader": DataLoader(Numbered(), batch_sampler=Buckets(), num_workers=1)},
    ],
    ids=["a buffer by torch's", "by numpy's", "by Python's", "buckets", "buckets for workers"],
)
def test_what_a_loader_draws_as_it_goes_is_as_it_was_beside_what_the_model_draws(data, stop_at, tmp_path):
    assert_goes_on(tmp_path, stop_at=stop_at, model=Dropping, data=data)


def test_what_a_loader_draws_as_it_goes_is_another_order_in_each_pass(tmp_path):
    seen, _ = life(tmp_path, data=lambda: {"dataset": Buffered(random.randrange), "batch_size": 8})
    passes = [tuple(seen[start : start + SAMPLES]) for start in range(0, 4 * SAMPLES, SAMPLES)]
    assert len(set(passes)) == 4
    assert all(sorted(one) == list(range(SAMPLES)) for one in passes)


class Around:
    """A loader around another, as a progress bar is."""

    def __init__(self, loader):
        self.iterable = loader

    def __iter__(self):
        return iter(self.iterable)


class Hides(Around):
    """Keeps it where nobody finds it."""

    def __init__(self, loader):
        self.iterable = functools.partial(lambda: loader)

    def __iter__(self):
        return iter(self.iterable())


def seeded(shared=None):
    generator = torch.Generator().manual_seed(7) if shared is None else shared
    return DataLoader(Numbered(), batch_size=8, shuffle=True, generator=generator)


@pytest.mark.parametrize("stop_at", [13, 15])
def test_a_generator_of_a_loader_inside_another_goes_on_where_it_was(stop_at, tmp_path):
    assert_goes_on(tmp_path, stop_at=stop_at, data=lambda: {"dataloader": Around(seeded())})


class Noise(nn.Module):
    """Draws from a generator that its loader has, too."""

    def __init__(self, shared):
        super().__init__()
        self.line, self.shared = nn.Linear(4, 3), (shared,)

    def forward(self, inputs):
        return self.line(inputs + torch.randn(inputs.shape, generator=self.shared[0]))


@pytest.mark.parametrize("stop_at", [13, 15])
def test_a_generator_that_loader_and_model_share_goes_on_where_it_was(stop_at, tmp_path):
    shared = []  # of the life that is made

    def data():
        return {"dataloader": seeded(shared[-1])}

    def drawing():
        shared.append(torch.Generator().manual_seed(7))
        return Noise(shared[-1])

    assert_goes_on(tmp_path, stop_at=stop_at, model=drawing, data=data)


@pytest.mark.parametrize("deterministic", [False, True])
def test_other_batches_than_were_trained_on_are_told_of_or_refused(deterministic, tmp_path, caplog):
    def data():
        return {"dataloader": Hides(seeded())}

    life(tmp_path, data=data, max_steps=13)
    run = functools.partial(life, tmp_path, data=data, deterministic=deterministic)
    told = "the dataloader did not give the same batches again: the 3 of epoch 3 that were read"
    if deterministic:
        with pytest.raises(ConfigError, match=told):
            run()
        return
    run()
    assert sum(told in record.message for record in caplog.records) == 1


class TellsItsPlace:
    """A loader with a state, whose `set_epoch` begins a pass anew, or only says which order it has."""

    def __init__(self, begins_anew):
        self.begins_anew, self.place, self.epoch = begins_anew, 0, 0

    def set_epoch(self, number):
        self.epoch = number
        if self.begins_anew:
            self.place = 0

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).view(-1, 8)
        while self.place < len(order):
            self.place += 1
            samples = [Numbered()[index] for index in order[self.place - 1].tolist()]
            yield tuple(map(torch.stack, zip(*samples, strict=True)))
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("stop_at", [3, 5, 13])
@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_loader_that_tells_its_place_is_told_the_epoch_before_it_gets_it_back(
    begins_anew, stop_at, tmp_path
):
    assert_goes_on(tmp_path, stop_at=stop_at, data=lambda: {"dataloader": TellsItsPlace(begins_anew)})


def test_other_generators_than_the_checkpoint_s_are_refused(tmp_path):
    life(tmp_path, max_steps=3, data=lambda: {"dataset": Noisy(), "batch_size": 8})
    with pytest.raises(ConfigError, match="the data has no random generator 'plain', as the checkpoint's"):
        life(tmp_path)


class MadeByEpoch(Numbered):
    """Makes its generator anew for each pass, as it is told the epoch."""

    def set_epoch(self, number):
        self.rng = random.Random(number)  # noqa: S311  no secret

    def __getitem__(self, index):
        return torch.full((4,), index / SAMPLES) + self.rng.random(), torch.tensor(index)


class MadeLate(Numbered):
    """Makes its generator as it is first asked for a sample."""

    rng = None

    def __getitem__(self, index):
        self.rng = random.Random(3) if self.rng is None else self.rng  # noqa: S311
        return torch.full((4,), index / SAMPLES) + self.rng.random(), torch.tensor(index)


@pytest.mark.parametrize("stop_at", [4, 5, 13])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_generator_that_is_made_as_the_epoch_is_told_goes_on_where_it_was(is_loaded, stop_at, tmp_path):
    def data():
        if is_loaded:
            return {"dataloader": DataLoader(MadeByEpoch(), batch_size=8, shuffle=True)}
        return {"dataset": MadeByEpoch(), "batch_size": 8}

    assert_goes_on(tmp_path, stop_at=stop_at, data=data)


def test_a_generator_that_was_not_there_yet_keeps_nobody_from_going_on_in_the_same_process(tmp_path):
    data = MadeLate()
    given = {"optimizer": optim.SGD(lr=0.1), "loss_fn": plain_loss, "dataset": data, "batch_size": 8}
    trainer = FaultTolerantTrainer(net(), tmp_path)
    assert trainer.train(epochs=1, **given).steps == 5
    assert trainer.train(epochs=2, **given).steps == 10


class ReadsAhead:
    """Takes batches from a loader on a thread, some before they are asked for."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        ready, has_begun = queue.Queue(maxsize=3), threading.Event()

        def read():
            for number, batch in enumerate(self.loader):
                ready.put(batch)
                if number == 1:
                    has_begun.set()
            has_begun.set()
            ready.put(None)

        threading.Thread(target=read, daemon=True).start()
        has_begun.wait()
        while (batch := ready.get()) is not None:
            yield batch


@pytest.mark.parametrize("stop_at", [3, 13])
def test_a_loader_that_reads_ahead_on_a_thread_gives_the_same_order(stop_at, tmp_path):
    def data():
        drawn = RandomSampler(Numbered(), replacement=True, generator=torch.Generator().manual_seed(7))
        return {"dataloader": ReadsAhead(DataLoader(Numbered(), batch_size=8, sampler=drawn))}

    assert_goes_on(tmp_path, stop_at=stop_at, data=data)


def test_workers_that_draw_for_validation_are_told_of_where_the_same_bits_are_asked_for(tmp_path, caplog):
    kept = DataLoader(Numbered(), batch_size=8, num_workers=1, persistent_workers=True)
    FaultTolerantTrainer(net(), tmp_path, deterministic=True).train(
        dataset=Numbered(), max_steps=1, optimizer=optim.SGD(lr=0.1), loss_fn=plain_loss, validation=kept
    )
    told = "what the workers of a DataLoader (validation=) draw at random is in no state of it"
    assert sum(told in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("stop_at", [3, 10, 13], ids=["the first pass", "between two", "a later one"])
def test_a_loader_that_keeps_its_workers_gives_the_same_order_after_a_crash(stop_at, tmp_path):
    def data():
        loader = DataLoader(Numbered(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
        return {"dataloader": loader}

    assert_goes_on(tmp_path, stop_at=stop_at, data=data)


def test_a_wrapped_model_s_parameters_are_looked_at_as_its_own_are():
    wrapped = torch.compile(net(), backend="eager")
    named = frozenset(dict(net().named_parameters()))
    assert saver_module.parameters_of(wrapped, net().state_dict()) == named


def test_a_tensor_that_nothing_can_be_brought_back_into_is_refused(tmp_path):
    module = net()
    module.register_buffer("expanded", torch.zeros(1).expand(4))
    with pytest.raises(ConfigError, match=r"model has 'expanded', whose elements share their memory"):
        FaultTolerantTrainer(module, tmp_path)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)],
    ids=["a plain one", "a fused one, which the scaler calls in any case"],
)
def test_a_step_that_is_skipped_is_none_and_moves_no_scheduler(optimizer, tmp_path):
    """The scale is that of a plain loop's first finite gradients, and each halving before it was a skip."""

    def live_once():
        module, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
        live = optimizer(module.parameters(), lr=1.0)
        history = FaultTolerantTrainer(module, tmp_path).train(
            dataset=TensorDataset(torch.full((SAMPLES, 4), 1e3), torch.zeros(SAMPLES, dtype=torch.long)),
            batch_size=8,
            epochs=2,
            optimizer=live,
            scheduler=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
            scheduler_interval="step",
            grad_scaler=scaler,
            loss_fn=LOSS,
        )
        return history, live, scaler

    history, live, scaler = live_once()
    skipped = round(127 - math.log2(scaler.get_scale()))
    assert skipped > 0
    assert (history.steps, history.skipped, history.samples) == (10 - skipped, skipped, 2 * SAMPLES)
    assert live.param_groups[0]["lr"] == 0.5 ** (10 - skipped)
    again, _, _ = live_once()
    assert again.skipped == skipped


@pytest.mark.parametrize(
    "data", [DataLoader(Numbered(), batch_size=64, drop_last=True), iter([])], ids=["too short", "used up"]
)
def test_a_pass_without_a_batch_is_an_error_and_no_end(data, tmp_path):
    trainer = FaultTolerantTrainer(net(), tmp_path)
    with pytest.raises(ConfigError, match="gave no batch in epoch 1"):
        trainer.train(dataloader=data, optimizer=optim.SGD(lr=0.1), loss_fn=plain_loss)
    assert names(tmp_path) == []


def test_a_seed_beside_a_dataloader_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="seed is 3, which is for dataset="):
        FaultTolerantTrainer(net(), tmp_path).train(
            dataloader=DataLoader(Numbered()), optimizer=optim.SGD(lr=0.1), loss_fn=plain_loss, seed=3
        )


def test_steps_that_no_checkpoint_has_are_warned_of(tmp_path, caplog):
    left = [4]

    def loss_fn(outputs, targets):
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError
        return plain_loss(outputs, targets)

    trainer = FaultTolerantTrainer(net(), tmp_path)
    run = {"dataset": Numbered(), "batch_size": 8, "optimizer": optim.SGD(lr=0.1), "loss_fn": loss_fn}
    with pytest.raises(ZeroDivisionError):
        trainer.train(**run)
    trainer.train(**run)
    assert "no checkpoint has the 3 steps that this trainer made before" in caplog.text


# ---------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_in_the_last_save_is_not_lost(number, tmp_path, monkeypatch):
    write, usual = saver_module.write, signal.getsignal(number)

    def write_and_be_told(folder, parts):
        os.kill(os.getpid(), number)
        return write(folder, parts)

    monkeypatch.setattr(saver_module, "write", write_and_be_told)
    trainer = FaultTolerantTrainer(net(), tmp_path)
    run = {"dataset": Numbered(), "batch_size": 8, "optimizer": optim.SGD(lr=0.1), "loss_fn": plain_loss}
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        trainer.train(**run)
    assert getattr(caught.value, "code", None) == (143 if number == signal.SIGTERM else None)
    assert trainer.history.stopped == "epochs"
    assert signal.getsignal(number) is usual
    assert trainer.train(**run).stopped == "epochs"  # it was all saved


def test_sigterms_that_come_at_the_same_time_are_one(monkeypatch):
    monkeypatch.setattr(termination, "ECHO_S", 1.0)

    def come_in_a_row():
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)

    def work():
        with termination.noting_signals() as noted:
            row = threading.Thread(target=come_in_a_row)
            row.start()
            row.join()
            assert noted.has_come

    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 143


@pytest.mark.parametrize(("value", "is_noted"), [("", False), ("0", True)])
def test_a_sigint_is_a_sigterm_where_launch_has_said_something(value, is_noted, monkeypatch):
    for name in termination.SET_BY_LAUNCH:
        monkeypatch.setenv(name, value)

    def work():
        with termination.noting_signals() as noted:
            os.kill(os.getpid(), signal.SIGINT)
            assert noted.has_come

    with pytest.raises(SystemExit if is_noted else KeyboardInterrupt):
        work()


def test_a_child_that_is_forked_meanwhile_is_ended_by_the_first_sigterm():
    (hears, ends), (told, tells) = os.pipe(), os.pipe()
    with termination.noting_signals() as noted:
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.write(tells, b"here")
            os.read(hears, 1)  # until it is ended, or the parent has given it up
            os._exit(0)
        os.read(told, 4)
        os.kill(child, signal.SIGTERM)
        os.close(ends)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not noted.has_come
    for number in (hears, told, tells):
        os.close(number)


def test_after_ctrl_c_a_loader_s_workers_that_have_gone_are_told_of_again():
    """As a process that catches it goes on."""

    def theirs(*_):
        raise RuntimeError

    def work():
        with termination.noting_signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGCHLD)  # of which nothing is heard

    before = signal.signal(signal.SIGCHLD, theirs)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(signal.SIGCHLD) is theirs
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_that_was_set_meanwhile_stays():
    def theirs(*_):
        pass

    try:
        with termination.noting_signals():
            signal.signal(signal.SIGTERM, theirs)
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ---------------------------------------------------------------------------------------- the directory


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_lock_that_the_disk_cannot_give_is_told_as_that(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with (
        pytest.raises(CheckpointError, match="cannot be used: Input/output error"),
        Directory(tmp_path).locked(),
    ):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_used_with_one_warning(number, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    trainer = FaultTolerantTrainer(net(), tmp_path)
    run = {"dataset": Numbered(), "batch_size": 8, "optimizer": optim.SGD(lr=0.1), "loss_fn": plain_loss}
    assert trainer.train(**run).steps == 5
    assert trainer.train(**run, epochs=2).steps == 10
    assert caplog.text.count("nothing keeps a second trainer out") == 1


def test_a_lock_whose_holder_cannot_be_written_down_is_let_go_of(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match="No space left"), Directory(tmp_path).locked():
            pass
    with Directory(tmp_path).locked():  # in this process, too
        assert (tmp_path / "lock").read_text("utf-8") == f"{os.getpid()}\n"


def test_the_names_of_new_directories_get_to_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(directory_module, "sync", synced.append)
    for _ in range(2):
        with Directory(tmp_path / "one" / "two").locked():
            pass
    assert sorted(synced) == [tmp_path, tmp_path / "one"]


def saved_each_step(folder, monkeypatch, *, epochs, loss_fn=plain_loss):
    monkeypatch.setattr(Saver, "save", waited(Saver.save))  # so that none is put off
    return FaultTolerantTrainer(net(), folder, checkpoint_frequency=1).train(
        dataset=Numbered(), batch_size=8, epochs=epochs, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn
    )


def test_a_save_waits_for_the_end_of_a_round_also_where_a_new_strategy_begins_to_count():
    patience = Patience()
    assert not any(patience.is_over(is_under_way=True, number=7) for _ in range(2))
    assert patience.is_over(is_under_way=True, number=0)
    assert patience.is_over(is_under_way=False, number=7)


def test_an_old_checkpoint_that_cannot_be_removed_is_told_of_once_and_tried_again(
    tmp_path, monkeypatch, caplog
):
    """As one of which NFS keeps an open file: training goes on, and the next save has another try."""
    rmtree, failures = shutil.rmtree, []

    def busy(path, **keywords):
        if len(failures) < 4 and not keywords:  # those of two saves
            failures.append(path)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmtree(path, **keywords)

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert saved_each_step(tmp_path, monkeypatch, epochs=2).stopped == "epochs"
    assert len(failures) == 4
    assert caplog.text.count("old ones stay that should be gone") == 1
    assert "cannot be removed: Device or resource busy" in caplog.text
    assert len(names(tmp_path)) == 3
    assert Directory(tmp_path).others() == sorted(names(tmp_path))


def test_an_old_manifest_that_cannot_be_read_ends_no_run_and_others_are_removed(
    tmp_path, monkeypatch, caplog
):
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 3:
            body = {"kind": manifest_module.KIND, "format": 9, "offbeat": "3.1"}
            raw = manifest_module._sealed(body)
            (tmp_path / "save-000001-step-1" / "manifest.json").write_bytes(raw)
        return plain_loss(outputs, targets)

    history = saved_each_step(tmp_path, monkeypatch, epochs=2, loss_fn=loss_fn)
    assert history.stopped == "epochs"
    assert [name.rpartition("-")[2] for name in names(tmp_path)] == ["10", "9", "8", "1"]
    assert caplog.text.count("is of format 9") == 1


def test_what_cannot_be_swept_away_keeps_nobody_from_starting_and_no_save_takes_its_number(
    tmp_path, monkeypatch, caplog
):
    rmtree = shutil.rmtree

    def busy(path, *given, **keywords):
        if path == tmp_path / ".saving-000004":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        rmtree(path, *given, **keywords)

    monkeypatch.setattr(shutil, "rmtree", busy)
    (tmp_path / ".saving-000004").mkdir()
    assert saved_each_step(tmp_path, monkeypatch, epochs=1).stopped == "epochs"
    assert names(tmp_path)[0] == "save-000010-step-5"
    assert ".saving-000004 cannot be removed" in caplog.text


def test_both_signals_in_a_wait_end_it_once_and_do_as_usual_afterwards(monkeypatch):
    """The second comes while echoes of the first pass: neither stays ignored."""
    monkeypatch.setattr(termination, "ECHO_S", 0.5)
    heard = []

    def work():
        with termination.noting_signals() as noted:
            try:
                with noted.breaking_off():
                    other = threading.Thread(target=second)
                    other.start()
                    os.kill(os.getpid(), signal.SIGTERM)
                    threading.Event().wait(30)
            except termination.BrokenOff:
                heard.append(noted.has_come)
            other.join()
            heard.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
            heard.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    def second():
        wait_for(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as caught:
        work()
    assert caught.value.code == 143
    assert heard == [True, True, True]
