"""The README's Python runs as it stands, one process serving, one training; only port and folder differ."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from support.command import command
from support.ports import free_port

README = Path(__file__).parents[3] / "README.md"
TIMEOUT_S = 100

# The server's block waits ten seconds for more workers after the last has left.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def with_port(code, port):
    """Put another port in the place of the page's; fails where the page does not name one."""
    changed, count = re.subn(r"(?<=port=)5000\b|(?<=127\.0\.0\.1:)5000\b", str(port), code)
    assert count == 1, code
    return changed


def programs():
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    serving, training = blocks  # a third one needs a test too
    return serving, training


def test_the_code_of_the_readme_runs(tmp_path):
    serving, training = programs()
    port = free_port()
    with contextlib.ExitStack() as stack:
        running = []
        for code in (serving, training):
            process = subprocess.Popen(
                [sys.executable, "-c", with_port(code, port)],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            running.append(process)
        for process in reversed(running):
            said, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, said
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_the_server_of_the_readme_leaves_its_model_when_it_is_stopped(tmp_path, number):
    serving, _ = programs()
    with command(program=[sys.executable, "-c", with_port(serving, free_port())], cwd=tmp_path) as server:
        server.line("parameter server on")
        while not catches(server.process.pid, signal.SIGTERM):  # it does so once it waits for its workers
            assert server.process.poll() is None, server.said
        server.signal(number)
        assert server.ends() == (0 if number == signal.SIGTERM else -signal.SIGINT), server.said
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(torch.load(tmp_path / "model.pt"))


def catches(pid, number):
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16) >> (number - 1) & 1
