"""What a person sees of `train`: one bar per terminal, or a line now and then."""

import fcntl
import logging
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import offbeat
from offbeat.demo.progress import Bar, Lines, choose
from offbeat.local.progress import _Bar, _Lines, _Silent, progress_for
from offbeat.worker.fates import Watch

SPEC = offbeat.optim.SGD(lr=0.1)
BATCHES = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))] * 10


@pytest.fixture
def train(serve, join):
    def run(loss_fn=None, **keywords):
        worker = join(serve(nn.Linear(3, 2)), nn.Linear(3, 2), worker_id="me", optimizer=SPEC)
        return worker.train(
            dataloader=BATCHES, loss_fn=loss_fn or nn.CrossEntropyLoss(), log_frequency=4, **keywords
        )

    return run


# The two below are no fixtures: between those and the test pytest exchanges stderr and takes hold of loggers.


@contextmanager
def unconfigured():
    """Leave logging as it is before anyone configures it."""
    logger = logging.getLogger("offbeat")
    handlers, logger.handlers, logger.propagate = logger.handlers, [], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, True


@contextmanager
def terminal(columns=120):
    """Make stderr a terminal, and give what reads it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    with os.fdopen(slave, "w") as screen, os.fdopen(master, "rb", buffering=0) as reader:
        os.set_blocking(reader.fileno(), False)
        before, sys.stderr = sys.stderr, screen
        try:
            yield lambda: b"".join(iter(lambda: reader.read(4096) or b"", b"")).decode()
        finally:
            sys.stderr = before


def lines(text):
    return [line for line in text.splitlines() if "step" in line]


@unconfigured()
def test_without_a_terminal_there_is_one_line_per_log_frequency_on_stderr(train, capsys):
    train()
    captured = capsys.readouterr().err
    said = lines(captured)
    assert len(said) == 3, captured
    assert said[0].startswith("worker me: epoch 1/1, step 4, version 4: loss ")
    assert "samples/s" in said[0]
    assert "step 10, version 10" in said[2]


def test_a_line_is_written_at_once_with_its_end():
    """Or another process, that shares stderr, writes between the two. Here each write is a message."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from offbeat.log import announce; announce('one'); announce('two')"
    with reader:
        with writer:
            subprocess.run([sys.executable, "-c", code], stderr=writer, check=True)
        assert [said for _ in range(6) if (said := reader.recv(100))] == [b"one\n", b"two\n"]


def test_where_logging_is_configured_the_lines_go_there(train, capsys, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    train()
    assert lines(capsys.readouterr().err) == []
    assert len([r for r in caplog.records if "step" in r.getMessage() and r.levelno == logging.INFO]) == 3


@unconfigured()
def test_progress_false_shows_nothing(train, capsys):
    train(progress=False)
    assert lines(capsys.readouterr().err) == []


@unconfigured()
def test_on_a_terminal_there_is_a_bar_with_the_metrics(train):
    with terminal() as read:
        train()
        shown = read()
    assert "me: 100%" in shown
    assert "10/10" in shown
    assert "loss=" in shown
    assert "version=10" in shown


@pytest.fixture
def refused(serve, join):
    """A worker whose pushes come to nothing."""
    server = serve(nn.Linear(3, 2), staleness_policy=offbeat.staleness.GradientFiltering(max_norm=1e-9))
    return join(server, nn.Linear(3, 2), worker_id="me", optimizer=SPEC)


def test_a_log_line_says_how_many_pushes_were_rejected_and_why(refused, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    refused.train(dataloader=BATCHES, loss_fn=nn.CrossEntropyLoss(), log_frequency=4)
    said = [r.getMessage() for r in caplog.records if "step" in r.getMessage()]
    assert len(said) == 3, said
    assert "rejected pushes; 0 pushes applied, 4 rejected: 4x norm)" in said[0]
    assert "0 pushes applied, 2 rejected: 2x norm" in said[2]


def test_the_end_of_the_budget_is_told_as_an_end_and_not_as_a_fault(serve, join, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    worker = join(serve(nn.Linear(3, 2), max_samples=20), nn.Linear(3, 2), optimizer=SPEC)
    history = worker.train(dataloader=BATCHES, loss_fn=nn.CrossEntropyLoss(), log_frequency=4)
    assert history.stopped == "budget"
    said = [r.getMessage() for r in caplog.records if "epoch 1/1, step" in r.getMessage()]
    assert said[-1].endswith("; 1 came after the run's max_samples were used up)")


def test_a_bar_says_how_many_pushes_were_rejected_and_why(refused, capsys):
    refused.train(dataloader=BATCHES, loss_fn=nn.CrossEntropyLoss(), log_frequency=5, progress=True)
    assert "version=0, 0 pushes applied, 5 rejected: 5x norm" in capsys.readouterr().err


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_worker_most_of_whose_pushes_are_rejected_is_told_once(refused, caplog):
    for number in range(120):
        assert bool(warned(caplog)) == (number > 50)
        nn.functional.cross_entropy(refused.model(BATCHES[0][0]), BATCHES[0][1]).backward()
        assert not refused.step(samples=4).applied
    (line,) = warned(caplog)
    assert "worker me: of its last 51 pushes the server rejected 51 (51x norm)" in line
    assert "raise the max_norm" in line


def test_a_worker_without_an_optimizer_is_told_at_the_first_push_and_once(serve, join, caplog):
    worker = join(serve(nn.Linear(3, 2)), nn.Linear(3, 2), worker_id="me")
    for _ in range(60):
        nn.functional.cross_entropy(worker.model(BATCHES[0][0]), BATCHES[0][1]).backward()
        assert worker.step(samples=4).reason == "no_optimizer"
        (line,) = warned(caplog)
    assert line.startswith("worker me: the server rejected a push, and does so with all: ")
    assert "give one to ParameterServer(optimizer=…) or AsyncWorker" in line


def test_a_worker_half_of_whose_pushes_are_applied_is_told_nothing(caplog):
    watch = Watch("me")
    applied = offbeat.Receipt(1, 1, 0, 1.0, "admit", applied=True, duplicate=False)
    for _ in range(150):
        watch.see(applied)
        watch.see(applied._replace(verdict="reject", applied=False, reason="stale"))
    assert warned(caplog) == []
    watch.see(applied._replace(verdict="reject", applied=False, reason="stale"))
    watch.see(applied._replace(verdict="reject", applied=False, reason="budget"))
    assert len(warned(caplog)) == 1
    assert "of its last 100 pushes" in warned(caplog)[0]
    assert "max_staleness" in warned(caplog)[0]
    assert "update_frequency" in warned(caplog)[0]


@unconfigured()
def test_progress_true_shows_a_bar_without_a_terminal_too(train, capsys):
    train(progress=True)
    assert "me: 100%" in capsys.readouterr().err


@terminal()
def test_one_terminal_has_one_bar_until_it_is_closed():
    first = progress_for(asked=None, total=10, name="a")
    assert isinstance(first, _Bar)
    assert type(progress_for(asked=None, total=10, name="b")) is _Silent
    with first:
        pass
    with progress_for(asked=None, total=10, name="c") as third:
        assert isinstance(third, _Bar)


def test_a_terminal_of_no_columns_has_lines():
    with terminal(columns=0):
        assert type(progress_for(asked=None, total=1, name="me")) is _Lines
        assert type(progress_for(asked=True, total=1, name="me")) is _Bar
        assert type(choose()) is Lines
    with terminal():
        assert type(choose()) is Bar


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
@terminal()
def test_of_a_launch_only_rank_0_has_a_bar(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert type(progress_for(asked=None, total=10, name="a")) is _Silent
    monkeypatch.setenv(variable, "0")
    with progress_for(asked=None, total=10, name="a") as shown:
        assert isinstance(shown, _Bar)


@terminal()
def test_a_rank_that_is_empty_is_none(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setenv("RANK", "")
    with progress_for(asked=None, total=10, name="a") as shown:
        assert isinstance(shown, _Bar)
    monkeypatch.setenv("RANK", "1")
    assert type(progress_for(asked=None, total=10, name="a")) is _Silent


def test_without_a_terminal_every_rank_has_its_lines(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert isinstance(progress_for(asked=None, total=10, name="a"), _Lines)
    assert capsys.readouterr().err == ""


@unconfigured()
def test_ctrl_c_closes_the_bar(train):
    def loss(outputs, targets):
        if loss.calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        loss.calls += 1
        return nn.functional.cross_entropy(outputs, targets)

    loss.calls = 0
    with terminal() as read:
        with pytest.raises(KeyboardInterrupt):
            train(loss)
        assert read().endswith("\n")
        with progress_for(asked=None, total=10, name="next") as shown:
            assert isinstance(shown, _Bar)


@terminal()
def test_a_bar_starts_no_thread():
    before = threading.active_count()
    with progress_for(asked=None, total=10, name="a") as bar:
        bar.advance()
        assert threading.active_count() == before
