"""What a wait that is told of leaves behind."""

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
