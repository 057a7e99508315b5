"""What a wait that is told of leaves behind."""

import threading
import weakref

import pytest

from offbeat.telling import Waits, telling


class Group:
    """Stands for what has to be let go of on the thread that waits, as a process group has."""

    def words(self, waited_s=0.0):
        return f"waited {waited_s:g} s"


@pytest.mark.parametrize("kind", ["one wait", "waits"])
def test_what_a_text_is_made_from_is_held_by_nobody_once_the_wait_is_over(kind):
    for _ in range(100):
        group = Group()
        gone = weakref.ref(group)
        wait = telling(group.words, after_s=100.0) if kind == "one wait" else Waits().telling(group.words)
        with wait:
            assert gone() is not None
        del group, wait
        assert gone() is None, "the thread that was to tell, which ends on its own, holds it"


def test_a_wait_goes_on_untold_where_there_is_no_thread_to_be_had(monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)  # as a system at its limit, or Python at its end
    with telling("waits", after_s=0.0):
        is_through = True
    assert is_through
