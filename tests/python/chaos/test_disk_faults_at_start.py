"""A start that is disturbed at any of its system calls goes on from the newest checkpoint, or not at all.

As of a save (`test_disk_faults`), of the thread that starts the server: it locks the directory, clears it up,
reads the newest checkpoint and begins a life.
"""

import signal

import pytest

from support.kept import NUM_KEPT, OLD, whole
from support.strace import at_each, failing, killing, traced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KINDS = {"open", "read", "getdents64", "flock", "write", "fsync", "rename", "close"}
"""What no start does without."""
WELCOME, WRITTEN = "OFFBEAT_SERVER=", "a checkpoint is written "
"""What is said at its end, by the thread that starts and by the one that saves, whichever is first."""
BEFORE = [f"checkpoint-{number:06}" for number in range(OLD - 1, OLD - 1 + NUM_KEPT)]
"""What there is to go on from."""
NEXT = f"checkpoint-{OLD - 1 + NUM_KEPT:06}"
"""What a start writes in the end, of the same state: by another thread, which may be done before this one."""


def begin(server):
    server.process.stdin.write("\n")
    server.process.stdin.flush()


@pytest.fixture(scope="session")
def points(kept, tmp_path_factory):
    """The calls of an undisturbed start, and what each does."""
    place = tmp_path_factory.mktemp("start") / "kept"
    with kept.about_to_go_on_with(place) as server:
        assert whole(place) == BEFORE
        with traced(server.process.pid, place.with_suffix(".trace")) as calls:
            begin(server)
            assert until_begun(server) is not None
    points = {point: point.within(place) for point in calls if point.touches(place)}
    assert {point.kind for point in points} >= KINDS
    return points


def until_begun(server):
    """Wait until a start is over, in both of its threads; give what was said of a save, None: it ended."""
    lines = []
    while not (any(WELCOME in line for line in lines) and any(WRITTEN in line for line in lines)):
        lines.append(server.line(""))
        if lines[-1].startswith("offbeat: "):
            return None
    return next(line for line in lines if WRITTEN in line)


def assert_kept(place):
    """Look that there is what there was, or what the start has made of it."""
    assert whole(place) in (BEFORE, [*BEFORE, NEXT], [*BEFORE[1:], NEXT])


def assert_only(points, point, calls, place):
    """Look that a disturbed start came to this point, and up to there did what the undisturbed one did."""
    said, due = [call.within(place) for call in calls if call.touches(place)], list(points.values())
    number = list(points).index(point) + 1
    assert said[:number] == due[:number]


def test_a_server_killed_at_any_call_of_its_start_leaves_what_the_next_one_goes_on_from(
    kept, points, tmp_path, some_of
):
    def kill(point, place):
        with kept.about_to_go_on_with(place) as server:
            with traced(server.process.pid, place.with_suffix(".trace"), killing(point)) as calls:
                begin(server)
                assert server.ends() == -signal.SIGKILL, server.said
            assert_only(points, point, calls, place)
        assert_kept(place)
        return f"version {kept.resumed(place)}"

    assert set(at_each(some_of(list(points), 4), tmp_path, kill)) == {f"version {OLD}"}


def test_a_start_at_which_any_call_fails_goes_on_from_the_newest_or_ends_and_says_why(
    kept, points, tmp_path, some_of
):
    def fail(point, place):
        with kept.about_to_go_on_with(place) as server:
            with traced(server.process.pid, place.with_suffix(".trace"), failing(point, "EIO")) as calls:
                begin(server)
                outcome = came_of(server, place)
            assert_only(points, point, calls, place)
        assert kept.resumed(place) == OLD
        return outcome

    def came_of(server, place):
        written = until_begun(server)
        if written is None:
            assert str(place) in server.said
            assert server.ends() == 11, server.said
            assert_kept(place)
            return "code 11"
        assert f" version={OLD} " in written
        server.process.kill()
        return "it goes on"

    outcomes = at_each(some_of(list(points), 4), tmp_path, fail)
    assert "code 11" in outcomes
