"""Faults in the system calls of another process's thread, by strace: it is killed at one, or one fails."""

import re
import shutil
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 40
ATTACHED = re.compile(r"Process \d+ attached")
CALL = re.compile(r"(\w+)\((.*)\)\s+= ")


@dataclass(frozen=True)
class Call:
    """One system call."""

    name: str
    nth: int
    """Counted from 1, among those of its name."""
    arguments: str
    """With the path of each descriptor."""

    @property
    def kind(self):
        """Its name, whether or not a directory goes with it: some machines only have `renameat`."""
        return re.sub(r"^(open|mkdir|rename|unlink)at2?$", r"\1", self.name)

    def touches(self, directory):
        """Whether it names a directory or what is in it."""
        return str(directory) in self.arguments

    def within(self, directory):
        """What it does to which places of a directory, which is the same each time that it is made."""
        places = re.findall(re.escape(str(directory)) + r'([^">]*)', self.arguments)
        return " ".join((self.kind, *("." + place for place in places)))


def killing(point):
    """Say to strace that the process is to be killed at a call, before it is made."""
    return f"{point.name}:signal=SIGKILL:when={point.nth}"


def failing(point, error):
    """Say to strace that a call is not to be made, and to fail, as with "EIO"."""
    return f"{point.name}:error={error}:when={point.nth}"


def at_each(points, place, disturb):
    """Disturb something at each call, in a place of its own; return what came of it at each."""
    outcomes = []
    for point in points:
        own = place / f"{point.kind}-{point.nth}"
        outcomes.append(disturb(point, own))
        shutil.rmtree(own)  # all of them would fill the disk
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(point.kind for point in points).items()))
    came = ", ".join(f"{number} × {what}" for what, number in Counter(outcomes).items())
    print(f"{len(points)} points ({kinds}): {came}")  # noqa: T201  it is what one runs `make chaos` for
    return outcomes


def thread_of(pid, name):
    """Find a process's thread by its name, of which the kernel keeps 15 letters."""
    (found,) = [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name[:15]
    ]
    return found


@contextmanager
def traced(tid, place, inject=None):
    """Trace one thread to the end of the block, or to its own; give a list, which then has its calls.

    Args:
        tid: The thread's number.
        place: Of the trace, a file to be made.
        inject: What strace does to some call, as in `fsync:error=EIO:when=2`; it counts from here on.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not on this machine: `make setup` as root installs it")
    command = ["strace", "-y", "-o", str(place), "-p", str(tid)]
    command += [] if inject is None else ["-e", f"inject={inject}"]
    calls = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as strace:
        try:
            said = strace.stderr.readline()
            if "not permitted" in said:
                pytest.skip(f"strace may not look into another process here: {said.strip()}")
            assert ATTACHED.search(said), said
            yield calls
        finally:
            if Path(f"/proc/{tid}").exists():
                strace.terminate()  # it lets go of the thread; without one it ends by itself
            strace.wait(TIMEOUT_S)
    calls += read(place.read_text())


def read(trace):
    """Read a trace's calls."""
    calls, seen = [], {}
    for line in trace.splitlines():
        if call := CALL.match(line):
            name, arguments = call.groups()
            seen[name] = seen.get(name, 0) + 1
            calls.append(Call(name, seen[name], arguments))
    return calls
