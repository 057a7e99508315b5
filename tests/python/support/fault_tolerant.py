"""A run of `FaultTolerantTrainer` in a process of its own, which kills itself where a test says.

The process is forked from one that has torch loaded and has computed nothing: dozens of them are quick.
"""

import faulthandler
import functools
import hashlib
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import offbeat
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.waiting import SHOWS_STACKS

faulthandler.register(SHOWS_STACKS, file=2, all_threads=True)  # also in what is forked from here

TESTS = Path(__file__).parents[1]
PRELOADED = ["support.fault_tolerant", "torch._dynamo"]
"""What a process has loaded as it begins; the second as torch loads it with the first optimizer."""
LOADED_BY = os.getpid()

TIMEOUT_S = 50
NUM_STEPS = 200
SAMPLES, BATCH_SIZE = 90, 8  # 12 batches a pass, the last of 2 samples
MEASURED = 40

SAVING = ("mkdir", "fsync", "rename", "unlink", "rmdir")
"""Calls of `os` with which a checkpoint is written and an old one removed."""


class Noisy(Dataset):
    """Samples that draw from every global random generator, with their index as target.

    `heard` is told of each that is made, and of the end of a pass where a loader of ours makes it.
    """

    @staticmethod
    def heard(kind):
        pass

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.heard("sample")
        noise = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002, S311
        return torch.full((6,), index / SAMPLES) + 0.1 * noise, torch.tensor(index)


class Quiet(Noisy):
    """Samples that follow from their index: what a loader's workers draw may be in no state of it."""

    def __getitem__(self, index):
        self.heard("sample")
        return torch.full((6,), index / SAMPLES), torch.tensor(index)


class Measured(Dataset):
    """Samples that a model is measured on; `heard` is told of each."""

    @staticmethod
    def heard(kind):
        pass

    def __len__(self):
        return MEASURED

    def __getitem__(self, index):
        self.heard("measured")
        return torch.full((6,), index / MEASURED), torch.tensor(index)


def shuffled():
    """Give what is measured in an order that the global generator has drawn."""
    return DataLoader(Measured(), batch_size=BATCH_SIZE, shuffle=True)


def shuffled_by_workers():
    return DataLoader(Measured(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)


def model():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def loss_of(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets % 3)


def order(outputs, targets):
    """Which samples, in which order: a number that is exact in float64."""
    return float(sum((i + 1) * int(t) for i, t in enumerate(targets)))


class Killer:
    """Kills this process at the n-th event of a kind, or all processes of its group."""

    def __init__(self, kind, number):
        self.kind, self.left = kind, number

    def __call__(self, kind):
        if kind in _EVENTS.get(self.kind, ()):
            self.left -= 1
            if self.left == 0:
                number = _SIGNALS.get(self.kind.partition(" ")[0], signal.SIGKILL)
                if self.kind in _OF_ALL:
                    # By another process: torch's workers tell their parent's signal apart.
                    subprocess.run(["kill", f"-{int(number)}", "--", f"-{os.getpgrp()}"], check=False)
                else:
                    os.kill(os.getpid(), number)


_SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT}
_EVENTS = {
    "step": ("step",),
    "save": ("save",),
    "term": ("step",),
    "term in a sample": ("sample",),
    "term at the end of a pass": ("pass",),
    "term in a validation": ("measured",),
    "term of all in a validation": ("measured",),
    "int in a validation": ("measured",),
    "term of all": ("step",),
    "term of all in a sample": ("sample",),
    "int": ("step",),
    "int in a sample": ("sample",),
    "int of all": ("step",),
    "int of all in a sample": ("sample",),
}
_OF_ALL = tuple(kind for kind in _EVENTS if "of all" in kind)


def averaged(module):
    return offbeat.AsyncModelAverager(module, averaging_frequency=7, method="diloco")


def trained_in_turns(module):
    return offbeat.AsyncTrainer(
        module,
        warm_up_epochs=1,
        warm_up_sync_frequency=3,
        regular_sync_frequency=5,
        strategy={0: "bmuf", 1: "local", 2: "accumulate"},
        max_grad_norm=0.5,
    )


def trained_in_half(module):
    return offbeat.AsyncTrainer(module, amp="fp16")


def work(folder, address, *, kill=(None, 0), out=None, is_live=False, update_frequency=1, **keywords):
    """Train a worker's run to its end, or to where it is killed; add each batch's samples to a file."""
    module, killer = model(), Killer(*kill)

    def loss_fn(outputs, targets):
        killer("step")
        with Path(f"{folder}-seen").open("a", encoding="utf-8") as seen:
            seen.write(json.dumps(targets.tolist()) + "\n")
        return loss_of(outputs, targets)

    Saver.save = waited(Saver.save)
    with offbeat.AsyncWorker(address, module, BATCH_SIZE, update_frequency, worker_id="amy") as worker:
        trainer = FaultTolerantTrainer(worker, folder, checkpoint_frequency=5)
        live = torch.optim.Adam(worker.model.parameters(), lr=0.01)
        history = trainer.train(
            dataset=Noisy(),
            optimizer=live if is_live else offbeat.optim.SGD(lr=0.05),
            loss_fn=loss_fn,
            **{"epochs": 3, "log_frequency": 1} | keywords,
        )
        moments = [int(entry["step"]) for entry in live.state.values()]
        told = {
            "counts": [history.steps, history.samples, history.epochs, history.stopped],
            "records": [[r.step, r.version] for r in history.records],
            "receipts": history.receipts,
            "resumed_from": str(trainer.resumed_from),
            "moments": moments,
        }
    if out is not None:
        Path(out).write_text(json.dumps(told), "utf-8")


def meet(folder, address, *, kill=(None, 0), out=None):
    """Train a member at a server to its end, or to where it is killed."""
    module, killer = model(), Killer(*kill)

    def loss_fn(outputs, targets):
        killer("step")
        return loss_of(outputs, targets)

    Saver.save = waited(Saver.save)
    with offbeat.AsyncModelAverager(
        module, averaging_frequency=5, communication_backend="tcp", server_address=address, overlap=False
    ) as averager:
        began = digest([p.detach() for p in module.parameters()])
        trainer = FaultTolerantTrainer(averager, folder, checkpoint_frequency=6)
        history = trainer.train(
            dataset=Noisy(),
            batch_size=BATCH_SIZE,
            epochs=2,
            optimizer=offbeat.optim.Adam(lr=0.01),
            loss_fn=loss_fn,
        )
        told = {
            "began": began,
            "counts": [history.steps, history.samples, history.epochs, history.stopped],
            "resumed_from": str(trainer.resumed_from),
            "moments": sorted({int(entry["step"]) for entry in trainer.optimizer.state.values()}),
        }
    if out is not None:
        Path(out).write_text(json.dumps(told), "utf-8")


def stateful():
    return {"dataloader": Stateful(DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True))}


def plain():
    return {"dataloader": DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)}


def of_torchdata(samples=None, **keywords):
    from torchdata.stateful_dataloader import StatefulDataLoader  # which a machine with a device may lack

    samples = Noisy() if samples is None else samples
    return {"dataloader": StatefulDataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, **keywords)}


def of_torchdata_with_workers():
    return of_torchdata(Quiet(), num_workers=2)


def in_our_order():
    return {"dataset": Noisy(), "batch_size": BATCH_SIZE}


def with_workers():
    return {"dataloader": DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)}


def with_kept_workers():
    return {
        "dataloader": DataLoader(
            Noisy(), batch_size=BATCH_SIZE, num_workers=2, persistent_workers=True, shuffle=True
        )
    }


def with_generator():
    generator = torch.Generator().manual_seed(5)
    return {"dataloader": DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, generator=generator)}


def iterable():
    return {"dataset": Stream(), "batch_size": BATCH_SIZE}


class Stream(IterableDataset):
    def __iter__(self):
        samples = Noisy()
        return (samples[index] for index in torch.randperm(SAMPLES).tolist())


class Stateful:
    """A loader with the protocol of torchdata's StatefulDataLoader: its order is its own state."""

    def __init__(self, loader):
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.generator = torch.Generator().manual_seed(9)
        self.at, self.began, self.is_loaded = 0, None, False

    def __len__(self):
        return math.ceil(SAMPLES / self.batch_size)

    def __iter__(self):
        if not self.is_loaded:
            self.at, self.began = 0, self.generator.get_state()
        self.is_loaded = False
        self.generator.set_state(self.began)
        order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        for start in range(self.at * self.batch_size, SAMPLES, self.batch_size):
            samples = [self.dataset[i] for i in order[start : start + self.batch_size]]
            self.at += 1
            yield torch.utils.data.default_collate(samples)
        self.dataset.heard("pass")

    def state_dict(self):
        return {"at": self.at, "began": self.began}

    def load_state_dict(self, state):
        self.at, self.began = state["at"], state["began"]
        self.is_loaded = self.at < len(self)


def waited(save):
    """Let training wait for each save, so that none is put off, and the n-th call is always the same."""

    def save_and_wait(saver, draft):
        save(saver, draft)
        saver.wait()

    return save_and_wait


def train(
    folder,
    *,
    kill=(None, 0),
    out=None,
    data=None,
    max_steps=NUM_STEPS,
    epochs=100,
    validation=None,
    wrap=lambda module: module,
    waits=False,
    guard=None,
    **keywords,
):
    """Train a run to its end, or to where it is killed; write what came of it.

    `validation` gives what is measured on; `wrap` what trains; `waits`: let training wait for each save;
    `guard`: a name in `GUARDS`.
    """
    # Else loaders would start their workers by another server, and torch's watch for a parent that was killed
    # would watch that.
    multiprocessing.set_start_method("fork", force=True)
    killer = Killer(*kill)

    def watched(name):
        own = getattr(os, name)

        @functools.wraps(own)
        def call(*arguments, **options):
            killer("save")
            return own(*arguments, **options)

        return call

    if kill[0] in _OF_ALL:
        os.setpgrp()  # which is of no test's
    if "sample" in _EVENTS.get(kill[0], ()) or "pass" in _EVENTS.get(kill[0], ()):
        Noisy.heard = killer
    Measured.heard = killer
    module = model()
    data = data() if data is not None else {"dataset": Noisy(), "batch_size": BATCH_SIZE}

    def loss_fn(outputs, targets):
        killer("step")
        return loss_of(outputs, targets)

    for name in SAVING:
        setattr(os, name, watched(name))
    if waits or kill[0] == "save":
        Saver.save = waited(Saver.save)
    trainer = FaultTolerantTrainer(
        wrap(module), folder, **{"checkpoint_frequency": 25, "deterministic": True} | keywords
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    monitor = None if guard is None else guarded(trainer, optimizer, **GUARDS[guard])
    history = trainer.train(
        **data,
        epochs=epochs,
        max_steps=max_steps,
        validation=None if validation is None else validation(),
        optimizer=optimizer,
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9),
        loss_fn=loss_fn,
        metrics=["loss", order],
        log_frequency=1,
    )
    if out is not None:
        told = result(trainer, history)
        if monitor is not None:
            went = [alert.result for alert in monitor.report().alerts]
            told |= {"monitor": str(monitor.state_dict())}
            Path(f"{out}-went").write_text(json.dumps(went), "utf-8")
        Path(out).write_text(json.dumps(told), "utf-8")


GUARDS = {
    "NaN": {"bad": {60: math.nan}, "patience": 5, "ladder": ["rollback"]},
    "NaN twice": {"bad": {60: math.nan, 64: math.nan}, "patience": 1, "ladder": ["rollback"]},
    "late": {"bad": {52: 1000.0}, "patience": 28, "ladder": ["alert", "rollback"]},
}
"""After which steps the parameters are spoilt, by which factor, and who watches that."""


def guarded(trainer, optimizer, *, bad, ladder, patience):
    """Spoil parameters after some steps of a run, whichever life makes them; give the monitor."""

    @torch.no_grad()
    def spoil(*_):
        factor = bad.get(trainer.history.steps + 1)
        if factor is not None:
            for parameter in trainer.model.parameters():
                parameter.mul_(factor)

    optimizer.register_step_post_hook(spoil)
    return offbeat.AsyncTrainingMonitor(
        trainer.model, ["loss"], remediation_strategy=ladder, patience=patience
    )


def trained(folder, *, max_steps, **keywords):
    """Train a run in this process, as the others do, up to a step."""
    module = model()
    trainer = FaultTolerantTrainer(module, folder, checkpoint_frequency=25, **keywords)
    trainer.train(
        dataset=Noisy(),
        batch_size=BATCH_SIZE,
        epochs=100,
        max_steps=max_steps,
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.01),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9),
        loss_fn=loss_of,
        metrics=["loss", order],
        log_frequency=1,
    )
    return trainer


def result(trainer, history):
    """Give all that must be equal to the bit."""
    return {
        "records": [[r.step, r.samples, *map(float.hex, r.metrics.values())] for r in history.records],
        "counts": [history.steps, history.samples, history.epochs, history.stopped],
        "validation": [[v.epoch, v.step, *map(float.hex, v.metrics.values())] for v in history.validation],
        "model": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "random": digest([random.getstate(), list(np.random.get_state()), torch.get_rng_state()]),  # noqa: NPY002
    }


def digest(state):
    return hashlib.sha256("".join(parts(state)).encode()).hexdigest()


def parts(state):
    if isinstance(state, dict):
        for key, value in state.items():
            yield repr(key)
            yield from parts(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from parts(value)
    elif isinstance(state, torch.Tensor):
        raw = bytes(state.contiguous().reshape(-1).view(torch.uint8))
        yield f"{state.dtype}{list(state.shape)}{raw.hex()}"
    elif isinstance(state, np.ndarray):
        yield state.tobytes().hex()
    else:
        yield repr(state)


def started(target, *arguments, **keywords):
    """Start a function in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Python 3.11 begins a fork server without our `sys.path`, and is silent of what it cannot load there.
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        forkserver.ensure_running()
    process = context.Process(target=target, args=arguments, kwargs=keywords)
    process.start()
    return process


def check_preloaded():
    """See, in a process that was started, that it had everything before it was."""
    assert os.getpid() != LOADED_BY, "it has loaded torch itself"
    assert "torch._dynamo" in sys.modules


def in_process(target, *arguments, **keywords):
    """Run a function in a process of its own and give its exit code."""
    process = started(target, *arguments, **keywords)
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, "it has not ended"
    return process.exitcode
