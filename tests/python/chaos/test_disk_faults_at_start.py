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
BEFORE = [f"checkpoint-{number:06}" for number in range(OLD - 1, OLD - 1 + NUM_KEPT)]
"""What there is to go on from."""


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
            server.line("a checkpoint is written ")
    points = {point: point.within(place) for point in calls if point.touches(place)}
    assert {point.kind for point in points} >= KINDS
    return points


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
        assert whole(place) == BEFORE
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
        while True:
            line = server.line("")
            if "a checkpoint is written " in line:
                assert f" version={OLD} " in line
                server.process.kill()
                return "it goes on"
            if line.startswith("offbeat: "):
                assert str(place) in line
                assert server.ends() == 11, server.said
                assert whole(place) == BEFORE
                return "code 11"

    outcomes = at_each(some_of(list(points), 4), tmp_path, fail)
    assert "code 11" in outcomes
