"""A server that keeps checkpoints, as a process to be disturbed, and what is on its disk afterwards."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress

import numpy as np
from safetensors.numpy import save_file

import offbeat
from offbeat.errors import ConnectionLostError
from support.command import Command, running
from support.strace import thread_of
from support.waiting import wait_for

MODEL = {"w": np.zeros(70_000, np.float32), "b": np.zeros(3, np.float32)}
"""So long that its files take more than one write each."""
ONES = {name: np.ones_like(value) for name, value in MODEL.items()}
OPTIMIZER = offbeat.optim.Adam(lr=0.1)
NUM_KEPT = 3
RARELY = "1000000"
"""Updates between two saves: there is the first and the last."""
OLD, NEW = 4, 5
"""Versions of the model: as it was found, and after one push."""


AT_A_WORD = (
    sys.executable,
    "-c",
    """
import select, sys
import locale, ml_dtypes, safetensors.numpy
import offbeat._offbeat, offbeat.cli.model_file, offbeat.cli.server, offbeat.cli.serving, offbeat.server
from offbeat.cli import main
print("loaded", flush=True)
select.select([sys.stdin], [], [])
sys.exit(main.main())
""",
)
"""`offbeat`, which begins when a line comes on its stdin.

It does not read it: a tracer that comes while it does so may count that call or not. What a start imports is
there before: how many calls an import makes goes by whether somebody has compiled the module meanwhile.
"""


def state_of(tensors):
    """Digest a model: two are the same bit by bit if this is."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.asarray(tensors[name]).tobytes())  # torch's, where there is torch
    return digest.hexdigest()


def push(address):
    """Push ones, as each push here does; return the version that it made."""
    with offbeat.Client(address, worker_id="a") as client:
        client.pull()
        receipt = client.push(ONES)
        assert receipt.applied
        return receipt.version


class Kept:
    """A directory to be copied, in which a server has left checkpoints, the newest of version `OLD`."""

    def __init__(self, place):
        self.path, self._model = place / "kept", place / "model.safetensors"
        save_file(MODEL, self._model)
        with self._served(self.path, "1") as server:
            for version in range(1, OLD + 1):
                assert push(server.address) == version
                server.line(f"a checkpoint is written path={self.path}/checkpoint-{version + 1:06} ")
            server.process.kill()
        assert len(whole(self.path)) == NUM_KEPT
        self.states = self._known()

    def _known(self):
        """The state of each version, of a server that nothing disturbs and that keeps nothing."""
        states = []
        with offbeat.ParameterServer(MODEL, optimizer=OPTIMIZER) as server:
            for version in range(OLD + 6):
                states.append(state_of(server.state_dict()))
                assert push(server.address) == version + 1
        assert len(set(states)) == len(states)
        return states

    def _command(self, place, frequency, **keywords):
        model = ("--model", str(self._model), "--optimizer", repr(OPTIMIZER).removeprefix("offbeat.optim."))
        keeping = ("--checkpoint-dir", str(place), "--checkpoint-frequency", frequency)
        return Command("server", *model, *keeping, "--port", "0", "--keep-running", **keywords)

    @contextmanager
    def about_to_go_on_with(self, place):
        """Run a server that is to go on with a copy of it, and begins when a line comes on its stdin."""
        shutil.copytree(self.path, place)
        with running(self._command(place, RARELY, program=AT_A_WORD, stdin=subprocess.PIPE)) as server:
            server.line("loaded")
            yield server

    @contextmanager
    def _served(self, place, frequency):
        """Run `offbeat server` there, which has written its first checkpoint."""
        with running(self._command(place, frequency)) as server:
            welcome, written = "OFFBEAT_SERVER=", f"a checkpoint is written path={place}/"
            said = ""
            while not (welcome in said and written in said):  # which of them comes first is open
                said += server.line("")
            server.address = said.split(welcome)[1].split()[0]
            yield server

    @contextmanager
    def gone_on_with(self, place, *, often=True):
        """Run a server on a copy of it, which has saved what it went on from.

        A push makes that `NEW`, and is saved if it saves `often`, else at the end. Its `keeper` is the number
        of the thread that saves.
        """
        shutil.copytree(self.path, place)
        with self._served(place, "1" if often else RARELY) as server:
            assert newest(place) == OLD
            server.place = place
            server.keeper = thread_of(server.process.pid, "offbeat-checkpoints")
            yield server

    def resumed(self, place):
        """Start a server there, which may complain of no checkpoint; return the version that it went on from.

        It is in the state of that version, gets to the next one's by a push, and keeps that.
        """
        with complaints() as complained:
            server = offbeat.ParameterServer(
                optimizer=OPTIMIZER, checkpoint_dir=place, checkpoint_frequency=10**6, resume="must"
            )
            with server:
                # Later, it would have the push, and the last one the goodbye besides: one folder more.
                wait_for(lambda: server.status()["checkpoints"]["version"] is not None)
                version, state = server.status()["version"], state_of(server.state_dict())
                assert state == self.states[version], f"that is not the state of version {version}"
                assert push(server.address) == version + 1
                assert state_of(server.state_dict()) == self.states[version + 1], "nor is its optimizer's"
        assert complained == []
        assert len(whole(place)) == NUM_KEPT
        assert newest(place) == version + 1
        assert not (place / ".new").exists()
        assert not (place / ".old").exists()
        return version


def push_into_the_dark(address):
    """Push to a server that may be killed for it."""
    with suppress(ConnectionLostError):
        push(address)


@contextmanager
def complaints():
    """Collect what Offbeat, in this process, warns of checkpoints."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "checkpoint" in record.getMessage())
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("offbeat").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("offbeat").removeHandler(handler)


def whole(directory):
    """Hold every checkpoint of a directory against its digests, without Offbeat; return their names."""
    names = sorted(folder.name for folder in directory.glob("checkpoint-*"))
    for name in names:
        text = (directory / name / "manifest.json").read_text()
        body, mark, digest = text.rpartition(',"sha256":"')
        assert mark, name
        assert digest == hashlib.sha256(body.encode()).hexdigest() + '"}\n', name
        files = {"manifest.json"}
        for entry in json.loads(text)["files"]:
            data = (directory / name / entry["name"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"]), name
            files.add(entry["name"])
        assert files == {file.name for file in (directory / name).iterdir()}, name
        assert len(files) == (2 if json.loads(text)["book"]["version"] == 0 else 3), name
    return names


def newest(directory):
    """Read the version of the newest checkpoint."""
    name = whole(directory)[-1]
    return json.loads((directory / name / "manifest.json").read_text())["book"]["version"]
