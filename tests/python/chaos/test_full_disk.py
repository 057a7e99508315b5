"""A disk that is full: what does not fit is told by its name, and is written when there is room again."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.command import Command, command, running
from support.kept import NEW, OLD, newest, push, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FULL = os.strerror(errno.ENOSPC)
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")
"""As they are written."""

DISK = "16m"
MOUNTED = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && read -r _'
"""A disk in memory that nobody else sees, and that ends with its shell."""


@pytest.fixture
def disk(tmp_path):
    """A small disk, as a path that leads into the namespace where it is mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not on this machine: util-linux has it")
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    program = ("unshare", "--mount", "sh", "-c", MOUNTED, "sh")
    with running(Command(DISK, str(tmp_path), program=program, stdin=subprocess.PIPE)) as shell:
        shell.line("mounted")
        yield Path(f"/proc/{shell.process.pid}/root{tmp_path}")


class Ballast:
    """What fills a disk but for some room."""

    def __init__(self, disk, room_bytes=0):
        self._path = disk / "ballast"
        free = os.statvfs(disk)
        self._path.write_bytes(bytes(free.f_bavail * free.f_bsize - room_bytes))

    def go(self):
        self._path.unlink()


def room_until_the_middle_of(file, checkpoint):
    """Count the bytes of what a checkpoint has before a file, and of half of that file's pages."""
    pages = [-(-(checkpoint / name).stat().st_size // PAGE_BYTES) for name in FILES]
    number = FILES.index(file)
    return (sum(pages[:number]) + pages[number] // 2) * PAGE_BYTES


@pytest.mark.parametrize("file", FILES)
def test_what_does_not_fit_is_told_and_the_next_checkpoint_is_written(kept, disk, file):
    place = disk / "kept"
    with kept.gone_on_with(place) as server:
        before = whole(place)
        ballast = Ballast(disk, room_until_the_middle_of(file, place / before[-1]))
        push(server.address)
        told = server.line("a checkpoint ")
        assert " ERROR a checkpoint could not be written" in told
        assert file in told
        assert FULL in told
        assert whole(place) == before
        assert not (place / ".new").exists(), "what is half done needs its room"
        assert push(server.address) == NEW + 1, "it goes on serving"
        ballast.go()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert newest(place) == NEW + 1
    assert kept.resumed(place) == NEW + 1


def test_a_server_tries_again_by_itself(kept, disk):
    place = disk / "kept"
    with kept.gone_on_with(place) as server:
        ballast = Ballast(disk)
        push(server.address)
        assert FULL in server.line("a checkpoint ")
        ballast.go()
        assert f"is written path={place}" in server.line("a checkpoint ")  # after 10 s
        server.process.kill()
    assert kept.resumed(place) == NEW


def test_a_start_on_a_full_disk_says_that_room_is_all_it_needs(kept, disk):
    place = disk / "kept"
    with kept.about_to_go_on_with(place) as server:
        before, ballast = whole(place), Ballast(disk)
        server.process.stdin.write("\n")
        server.process.stdin.flush()
        assert server.ends() == 11, server.said
    assert FULL in server.said
    assert "the checkpoints there are untouched: make room, and start again" in server.said
    assert whole(place) == before
    ballast.go()
    assert kept.resumed(place) == OLD


def test_a_last_checkpoint_that_does_not_fit_is_exit_code_11_and_the_one_before_is_there(kept, disk):
    place = disk / "kept"
    with kept.gone_on_with(place) as server:
        ballast = Ballast(disk)
        push(server.address)
        assert FULL in server.line("a checkpoint ")
        server.signal(signal.SIGTERM)
        assert server.ends() == 11, server.said
    assert "the last checkpoint could not be written: " in server.said
    ballast.go()
    assert kept.resumed(place) == OLD


TRAINER = (
    sys.executable,
    "-c",
    """
import sys, torch, offbeat
from offbeat.recovery import saver

def loss_fn(outputs, targets):
    if not steps:
        print("ready", flush=True)
        sys.stdin.readline()
    steps.append(1)
    return torch.nn.functional.cross_entropy(outputs, targets)

steps, saver.RETRY_S = [], 0.1
data = torch.utils.data.TensorDataset(torch.ones(64, 256), torch.zeros(64, dtype=torch.long))
trainer = offbeat.FaultTolerantTrainer(torch.nn.Linear(256, 1024), sys.argv[1], checkpoint_frequency=1)
trainer.train(
    dataset=data,
    epochs=1_000_000,
    max_steps=int(sys.argv[2]),
    optimizer=offbeat.optim.SGD(lr=1e-6),
    loss_fn=loss_fn,
)
print("goes on from", trainer.resumed_from)
""",
)
"""A run of a model of a megabyte, saved as often as the disk can, which begins at a line on its stdin."""


@contextmanager
def training_on_a_full_disk(place):
    """Train until a checkpoint could not be written; give the process, and what fills the disk."""
    with command(str(place), "1_000_000", program=TRAINER, stdin=subprocess.PIPE) as trainer:
        trainer.line("ready")
        ballast = Ballast(place.parent)
        trainer.process.stdin.write("\n")
        trainer.process.stdin.flush()
        told = trainer.line("a checkpoint could not be written")
        assert str(place) in told
        assert FULL in told
        assert "training goes on" in told
        yield trainer, ballast


def test_a_trainer_on_a_full_disk_goes_on_and_saves_when_there_is_room_and_its_last_says_what_to_do(disk):
    place = disk / "kept"
    with training_on_a_full_disk(place) as (trainer, ballast):
        ballast.go()
        trainer.line("saving goes on again")
        trainer.signal(signal.SIGTERM)
        assert trainer.ends() == 143, trainer.said
    saved = max(place.glob("save-*"))
    with training_on_a_full_disk(place) as (trainer, ballast):
        trainer.signal(signal.SIGTERM)
        assert trainer.ends() == 1, trainer.said
    assert "the last checkpoint could not be written" in trainer.said
    assert f"run the same command, which goes on from {saved}\n" in trainer.said
    assert not list(place.glob(".saving-*")), "what is half done needs its room"
    ballast.go()
    with command(str(place), saved.name.rpartition("-")[2], program=TRAINER) as trainer:
        assert trainer.ends() == 0, trainer.said
    assert f"goes on from {saved}\n" in trainer.said
