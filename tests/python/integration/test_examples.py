"""The examples run, in separate processes, as a user would start them."""

import ast
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import command
from support.ports import free_port

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def free_address():
    return f"127.0.0.1:{free_port()}"


def group_of(size):
    """Give the environment by which processes, each with a RANK besides, find one another."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }


def network_address():
    """The address by which other machines reach this one (nothing is sent to the one named here)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no network: {error}")
        return probe.getsockname()[0]


@pytest.fixture
def start(tmp_path):
    """Start examples; whatever of them is left when the test ends is ended too."""
    with contextlib.ExitStack() as stack:

        def run(name, *arguments, **environment):
            output = stack.enter_context((tmp_path / f"{len(started)}.txt").open("w+"))
            process = subprocess.Popen(
                [sys.executable, EXAMPLES / name, *arguments],
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started.append((process, output))
            stack.callback(_end, process)
            return process, output

        started = []
        yield run


def _end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(*started):
    """Wait for all, and give back what they printed; each has to end well."""
    printed = []
    for process, output in started:
        process.wait(timeout=200)
        output.seek(0)
        printed.append(output.read())
        assert process.returncode == 0, printed[-1]
    return printed


def test_every_example_has_a_test():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert len(names) >= 5
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert names == tested


def test_the_parameter_server_in_two_processes(start):
    address = free_address()
    name = "tour_parameter_server.py"
    server = start(name, "server", address.rpartition(":")[2])
    workers = [start(name, "worker", address) for _ in range(2)]
    _, *histories = finish(server, *workers)
    for history in histories:
        assert '"stopped": "epochs"' in history
        assert '"epochs": 10' in history


def test_late_pushes_are_worth_what_the_policy_says(start):
    (printed,) = finish(start("tour_staleness.py"))
    lines = printed.splitlines()
    assert "version 1: 0 updates late, weight 1.00" in lines
    for late in (0, 1, 2, 3, 5, 10, 20):
        (line,) = [line for line in lines if f": {late} updates late, " in line]
        assert line.endswith(f"weight {0.9**late:.2f}")
    assert "21 updates late, rejected: " in lines[-1]


@pytest.mark.parametrize("name", ["tour_parameter_server.py", "tour_tutorial.py"])
def test_an_example_without_its_arguments_says_what_it_takes(start, name):
    process, output = start(name)
    assert process.wait(timeout=200) == 1
    output.seek(0)
    assert output.read().startswith(f"usage: {name} server ")


def accuracies(printed):
    return {
        rank: float(value) for rank, value in re.findall(r"Worker (\d) final accuracy: ([\d.]+)", printed)
    }


def test_the_tutorial_in_separate_processes(start, tmp_path):
    environment = {"TUTORIAL_SERVER": free_address(), "TUTORIAL_CHECKPOINTS": str(tmp_path / "kept")}
    server = start("tour_tutorial.py", "server", **environment)
    workers = [start("tour_tutorial.py", "worker", str(r), "2", **environment) for r in range(2)]
    _, *printed = finish(server, *workers)
    found = accuracies("".join(printed))
    assert sorted(found) == ["0", "1"]
    assert min(found.values()) > 0.8
    assert list((tmp_path / "kept").glob("*/manifest.json"))


def test_the_tutorial_on_the_network_s_address_with_one_environment_variable(start):
    address = f"{network_address()}:{free_address().rpartition(':')[2]}"
    environment = {"TUTORIAL_SERVER": address, "OFFBEAT_TOKEN": "the same here and there"}
    server = start("tour_tutorial.py", "server", **environment)
    stranger = start("tour_tutorial.py", "worker", "0", "2", **environment | {"OFFBEAT_TOKEN": "another"})
    refused, output = stranger
    assert refused.wait(timeout=200) == 1
    output.seek(0)
    assert "AuthenticationError" in output.read()
    workers = [start("tour_tutorial.py", "worker", str(r), "2", **environment) for r in range(2)]
    _, *printed = finish(server, *workers)
    assert sorted(accuracies("".join(printed))) == ["0", "1"]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_tutorial_under_multiprocessing_with_two_loader_processes(start, start_method):
    environment = {
        "TUTORIAL_SERVER": free_address(),
        "TUTORIAL_NUM_WORKERS": "2",
        "TUTORIAL_START_METHOD": start_method,
    }
    (printed,) = finish(start("tour_tutorial.py", "all", "2", **environment))
    assert sorted(accuracies(printed)) == ["0", "1"]


def test_a_loop_of_one_s_own(start):
    (printed,) = finish(start("own_loop.py"))
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.8


def test_three_lines_make_a_plain_loop_asynchronous(start):
    (printed,) = finish(start("three_lines.py"))
    assert float(re.search(r"plain: accuracy ([\d.]+)", printed)[1]) > 0.8
    place = group_of(2)
    ranks = [start("three_lines.py", "asynchronous", RANK=str(rank), **place) for rank in range(2)]
    found = [re.search(r"asynchronous: accuracy ([\d.]+)", printed)[1] for printed in finish(*ranks)]
    assert found[0] == found[1], "they have the same model"
    assert float(found[0]) > 0.8


def test_three_lines_run_by_the_very_command_that_the_page_gives():
    page = ast.get_docstring(ast.parse((EXAMPLES / "three_lines.py").read_text()))
    (given,) = [line for line in page.splitlines() if line.strip().startswith("offbeat launch ")]
    with command(*shlex.split(given, comments=True)[1:], cwd=EXAMPLES.parent) as launch:
        assert launch.ends() == 0, launch.said
    found = re.findall(r"^\[\d\] asynchronous: accuracy ([\d.]+)$", "".join(launch.out), re.MULTILINE)
    assert len(found) == 2, launch.said
    assert "[server] " in "".join(launch.err), "launch has started it"
    assert found[0] == found[1], "they have the same model"
    assert float(found[0]) > 0.8


def test_a_language_model_by_members_that_wait_for_nobody(start, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and " * 400, "utf-8")
    few = ("--workers", "2", "--iterations", "200", "--width", "32", "--iteration-ms", "1")
    (printed,) = finish(start("character_model.py", str(text), *few))
    assert printed.startswith(f"text: {text}, 19600 characters")
    before, after = (
        float(re.search(rf"{when}: ([\d.]+) bits per character", printed)[1]) for when in ("before", "after")
    )
    assert before > 4.0
    assert after < before / 2
    assert re.search(r"worker 1: 200 iterations, \d+ outer steps, the last \d+ late", printed)


def test_one_server_and_two_workers_train_on_pictures(start):
    (printed,) = finish(start("parameter_server.py", "2"))
    found = [float(value) for value in re.findall(r"stopped by budget, accuracy ([\d.]+)", printed)]
    assert len(found) == 2
    assert min(found) > 0.75


def test_each_of_the_family_does_what_its_few_lines_say(start, tmp_path):
    (printed,) = finish(start("tour_family.py", str(tmp_path / "kept")))
    assert "accumulated: 40 updates of 512 samples" in printed
    assert "survived: 640 steps, resumed from None" in printed
    assert re.search(r"tuned: 192 steps, 0 alerts, \d+ updates", printed)
    (again,) = finish(start("tour_family.py", str(tmp_path / "kept")))
    assert re.search(r"survived: 640 steps, resumed from .*save-", again), "the same command trains nothing"


def test_eight_processes_average(start):
    environment = group_of(8)
    printed = finish(*(start("tour_members.py", RANK=str(rank), **environment) for rank in range(8)))
    assert float(re.search(r"averaged: 7 times, accuracy ([\d.]+)", printed[0])[1]) > 0.95
    assert all("Epoch 9, Loss: " in of_one for of_one in printed)


def test_the_averaging_tutorial_in_separate_processes(start):
    environment = group_of(2)
    name = "tour_averaging.py"
    printed, also = finish(*(start(name, RANK=str(rank), **environment) for rank in range(2)))
    accuracy = float(re.search(r"Averaged, accuracy: ([\d.]+)", printed)[1])
    assert accuracy > 0.5, "after ten passes over half of the digits each"
    assert "Rank 1, Epoch 9, Batch 0" in also
    assert len(re.findall(r"Epoch \d+, Accuracy", printed)) == 10
