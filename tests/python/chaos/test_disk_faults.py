"""A save that is disturbed at any of its system calls leaves what was there before it, or what it was to be.

`offbeat server` goes on from a directory, and a push makes it save. The calls of the thread that saves are
counted once, undisturbed; a point is one that names the directory or what is in it. Then, for each point and
each time on a copy, the process is killed when it comes there, or the call fails; and a server goes on from
what is left. `make chaos` does that at every point, `make test` at some.
"""

import errno
import os
import signal

import pytest

from support.kept import NEW, OLD, newest, push, push_into_the_dark, whole
from support.strace import at_each, failing, killing, traced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KINDS = {"open", "getdents64", "mkdir", "write", "fsync", "close", "rename", "unlink"}
"""What no save does without. The points are whatever calls there are."""
VITAL = {"open", "mkdir", "write", "fsync", "rename"}
"""Where one of these fails on the way to the new checkpoint, there is none."""
TRIED = {"EIO": 6, "ENOSPC": 4}
"""Each way to fail, and at how many points `make test` tries it."""

BEFORE = [f"checkpoint-{number:06}" for number in (3, 4, 5, 6)]
"""What is kept before the save: three versions, and the copy of the newest that the start has written."""
AFTER = [f"checkpoint-{number:06}" for number in (4, 6, 7)]
"""After it: the oldest has gone, and of the two that were the same the older."""


class Save:
    """The points of an undisturbed save, in their order."""

    def __init__(self, calls, place):
        self.points = [call for call in calls if call.touches(place)]
        self.said = [call.within(place) for call in self.points]
        assert {point.kind for point in self.points} >= KINDS
        self._named = self.said.index(f"rename ./.new ./{AFTER[-1]}")
        self._complete = self.said.index("fsync .", self._named)

    def first(self, kind):
        return next(point for point in self.points if point.kind == kind)

    @property
    def complete(self):
        """Where the new checkpoint's name gets to the disk."""
        return self.points[self._complete]

    def has_named(self, point):
        """Whether the new checkpoint has its name when the thread comes to a point."""
        return self.points.index(point) > self._named

    def is_complete(self, point):
        """Whether all that the new checkpoint needs is behind a point."""
        return self.points.index(point) > self._complete

    def assert_only(self, point, calls, place):
        """Look that a disturbed save came to this point, and up to there did what this one did."""
        number = self.points.index(point) + 1
        said = [call.within(place) for call in calls if call.touches(place)]
        assert said[:number] == self.said[:number]


def undisturbed(kept, place, *, often):
    with kept.gone_on_with(place, often=often) as server:
        assert whole(place) == BEFORE
        with traced(server.keeper, place.with_suffix(".trace")) as calls:
            bring_about(server, often=often)
            if often:
                server.line(f"a checkpoint is written path={place / AFTER[-1]} version={NEW} ")
            else:
                assert server.ends() == 0, server.said
    assert whole(place) == AFTER
    return Save(calls, place)


def bring_about(server, *, often):
    """Have a server save: after a push where it does so often, and at its end where it does not."""
    push_into_the_dark(server.address)
    if not often:
        server.signal(signal.SIGTERM)


@pytest.fixture(scope="session")
def save(kept, tmp_path_factory):
    return undisturbed(kept, tmp_path_factory.mktemp("save") / "kept", often=True)


@pytest.fixture(scope="session")
def last_save(kept, tmp_path_factory):
    return undisturbed(kept, tmp_path_factory.mktemp("last") / "kept", often=False)


def test_what_is_written_is_on_the_disk_before_it_has_its_name_and_before_anything_older_goes(save):
    """A machine that loses its power has what was synced; a process that is killed cannot tell."""
    files = sorted({said.split()[1] for said in save.said if said.startswith("write ")})
    *files, note = files
    assert files == [
        f"./.new/{name}" for name in ("manifest.json", "model.safetensors", "optimizer.safetensors")
    ]

    def last(said):
        return len(save.said) - 1 - save.said[::-1].index(said)

    synced = [save.said.index(f"fsync {file}") for file in files]
    assert all(last(f"write {file}") < place for file, place in zip(files, synced, strict=True))
    named = last(f"rename ./.new ./{AFTER[-1]}")
    order = [*sorted(synced), last("fsync ./.new"), named, save.said.index("fsync .", named)]
    # Not before is it noted as the newest.
    assert note == "./life.new"
    order += [
        last(f"write {note}"),
        last(f"fsync {note}"),
        last(f"rename {note} ./life.json"),
        last("fsync ."),
    ]
    order += [save.said.index(f"rename ./checkpoint-{number:06} ./.old") for number in (5, 3)]
    assert order == sorted(order)


# ---------------------------------------------------------------------------------------- killed


def test_a_server_killed_at_any_call_of_a_save_has_left_the_old_or_the_new_checkpoint(
    kept, save, tmp_path, some_of
):
    points = some_of(save.points, 8)

    def kill(point, place):
        with kept.gone_on_with(place) as server:
            with traced(server.keeper, place.with_suffix(".trace"), killing(point)) as calls:
                bring_about(server, often=True)
                assert server.ends() == -signal.SIGKILL, server.said
            assert [call for call in calls if call.touches(place)][-1].nth == point.nth
            save.assert_only(point, calls, place)
        assert set(whole(place)) >= set(AFTER if save.has_named(point) else BEFORE), point
        return f"version {kept.resumed(place)}"

    versions = at_each(points, tmp_path, kill)
    assert versions == [f"version {NEW if save.has_named(point) else OLD}" for point in points]


# ---------------------------------------------------------------------------------------- a call fails


@pytest.mark.parametrize("error", TRIED)
def test_a_call_of_a_save_that_fails_is_told_and_the_next_checkpoint_is_written(
    kept, save, tmp_path, some_of, error
):
    at_each(
        some_of(save.points, TRIED[error]), tmp_path, lambda *point: goes_on_after(kept, save, error, *point)
    )


def test_a_directory_that_cannot_be_closed_is_not_the_end_of_all_checkpoints(kept, save, tmp_path):
    """The standard library panics there."""
    assert goes_on_after(kept, save, "EIO", save.first("close"), tmp_path / "kept") == "written"


def test_a_name_that_does_not_get_to_the_disk_is_taken_back(kept, save, tmp_path):
    assert goes_on_after(kept, save, "EIO", save.complete, tmp_path / "kept") == "failed"


def goes_on_after(kept, save, error, point, place):
    """Let a call fail; return what the server told of the save."""
    with kept.gone_on_with(place) as server:
        with traced(server.keeper, place.with_suffix(".trace"), failing(point, error)) as calls:
            bring_about(server, often=True)
            said = ""
            while not ("a checkpoint is written " in said or "a checkpoint could not be written" in said):
                said = server.line("a checkpoint ")  # of older ones something may be said before
        save.assert_only(point, calls, place)
        told = what_is_told(save, error, point, server)
        assert push(server.address) == NEW + 1, "it goes on serving"
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert newest(place) == NEW + 1, point
    assert kept.resumed(place) == NEW + 1
    return told


def what_is_told(save, error, point, server):
    """Hold what is told of a save against the disk; return whether that is "written" or "failed"."""
    place, names = server.place, whole(server.place)
    assert set(names) >= set(AFTER) or names == BEFORE, point
    if f"a checkpoint is written path={place / AFTER[-1]} version={NEW} " in server.said:
        assert point.kind not in VITAL or save.is_complete(point), point
        assert (names[-1], newest(place)) == (AFTER[-1], NEW)
        return "written"
    (line,) = [line for line in server.said.splitlines() if " ERROR " in line]
    assert "checkpoint could not be written" in line
    assert str(place) in line
    assert os.strerror(getattr(errno, error)) in line
    assert "panicked" not in server.said
    assert not save.is_complete(point), point
    assert names == BEFORE, point
    assert not (place / ".new").exists(), "what is half done needs its room"
    return "failed"


# ---------------------------------------------------------------------------------------- the last


def test_a_last_checkpoint_that_fails_at_any_call_is_exit_code_11_or_it_is_there(
    kept, last_save, tmp_path, some_of
):
    def end(point, place):
        with kept.gone_on_with(place, often=False) as server:
            with traced(server.keeper, place.with_suffix(".trace"), failing(point, "EIO")) as calls:
                bring_about(server, often=False)
                code = server.ends()
            last_save.assert_only(point, calls, place)
            told = what_is_told(last_save, "EIO", point, server)
        assert code == {"written": 0, "failed": 11}[told], server.said
        assert told == "written" or "the last checkpoint could not be written: " in server.said
        assert kept.resumed(place) == (NEW if told == "written" else OLD)
        return f"code {code}"

    at_each(some_of(last_save.points, 4), tmp_path, end)
