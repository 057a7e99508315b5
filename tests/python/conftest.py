"""What every test runs under: one thread per library, no settings from the shell, bounded random search."""

import functools
import logging
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable

import hypothesis
import pytest

# Before numpy or torch is loaded, here and in every process that a test starts: with as many threads as cores
# in each of several processes they would wait for one another, and time would tell nothing.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

# A background job begins with SIGINT ignored, one under nohup with SIGHUP; what tests start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # which is the default's in what is started

# A deadline per example measures the machine, not the code; the limit per test is pytest's.
hypothesis.settings.register_profile("fast", max_examples=25, deadline=None)
hypothesis.settings.register_profile("slow", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_addoption(parser):
    group = parser.getgroup("faults of networks, processes and disks")
    group.addoption("--every-fault", action="store_true", help="try all of them: `make chaos`")
    group.addoption(
        "--fault-seed", type=int, default=0, metavar="N", help="which of them are tried without that"
    )


def chosen(config, items, number):
    """So many of a list, in its order, by `--fault-seed`; all of them with `--every-fault`."""
    if config.getoption("--every-fault"):
        return items
    numbers = random.Random(config.getoption("--fault-seed"))  # noqa: S311  nobody is to guess it
    return [items[place] for place in sorted(numbers.sample(range(len(items)), min(number, len(items))))]


@pytest.fixture
def some_of(request):
    """Choose so many of what one test goes through: `some_of(items, number)`."""
    return functools.partial(chosen, request.config)


def pytest_collection_modifyitems(config, items):
    """Leave out the cases of `sampled` tests that are not chosen; one that is asked for by name is run."""
    if any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    left_out = {
        item
        for (_, number), found in cases.items()
        for item in {*found}.difference(chosen(config, found, number))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


RunPython = Callable[..., str]


@pytest.fixture(autouse=True)
def _no_log_level_of_another_test():
    """Put the log's level back: a command sets its process's, which here is that of all tests."""
    log = logging.getLogger("offbeat")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(autouse=True)
def _no_settings_from_the_shell(monkeypatch):
    """Forget OFFBEAT_SERVER, OFFBEAT_TOKEN and the like, and what a launcher may have set."""
    names = [name for name in os.environ if name.startswith("OFFBEAT_")]
    for name in (*names, "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_python() -> RunPython:
    """Run a snippet in a fresh interpreter and return what it printed; its own failure fails the test."""

    def run(code: str, *arguments: str, timeout_s: float = 50) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def members_in_one_process(monkeypatch):
    """Let several members, of one rank, be in one process: they are of one model, though nobody says so."""
    from offbeat.averaging import one_model

    monkeypatch.setattr(one_model, "check_free", lambda *_: None)
