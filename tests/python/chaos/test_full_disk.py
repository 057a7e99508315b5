"""A disk that is full: what does not fit is told by its name, and is written when there is room again."""

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support.command import Command, running
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
