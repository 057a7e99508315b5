"""What is shown while the demo runs: a line every few seconds, or one bar."""

import errno
import io
import time

from offbeat.demo import progress


def test_lines_come_every_few_seconds(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress.Lines() as lines:
        lines.begin("MLP, 4 workers", 1000)
        for samples in range(0, 1000, 100):
            now[0] += 1.0
            lines.update(samples, "version 7")
    captured = capsys.readouterr()
    assert captured.out == ""
    said = captured.err.splitlines()
    assert said[0] == "MLP, 4 workers: 1,000 samples"
    assert said[1:] == [
        "MLP, 4 workers:  40%, 80 samples/s; version 7",
        "MLP, 4 workers:  90%, 90 samples/s; version 7",
    ]


def test_lines_that_cannot_be_written_end_nothing(monkeypatch):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(time, "monotonic", iter((0.0, 100.0)).__next__)
    monkeypatch.setattr("sys.stderr", Full())
    with progress.Lines() as lines:
        lines.begin("MLP, 4 workers", 1000)
        lines.update(100)


def test_a_bar_never_goes_beyond_its_end(capsys):
    with progress.Bar() as bar:
        bar.update(5)  # before it begins: nothing
        bar.begin("one", 100)
        bar.update(64)
        bar.update(128, "version 9")
        bar.begin("two", 100)
    said = capsys.readouterr().err
    assert "100/100" in said
    assert "two" in said
    assert "128" not in said


def test_without_a_terminal_there_is_no_bar(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert isinstance(progress.choose(), progress.Lines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(progress.choose(), progress.Bar)
