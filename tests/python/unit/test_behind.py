"""What is done on a thread of its own: what it holds, and which threads those are."""

import threading
import weakref

from offbeat.local.behind import Behind, is_behind


class Doing:
    """What is done, once it may be."""

    def __init__(self, may):
        self.may = may

    def __call__(self):
        self.may.wait(60)
        return is_behind()


def test_as_it_tells_that_it_has_ended_its_thread_holds_nothing_of_what_it_did_any_more():
    behind, may, looked = Behind[bool]("test"), threading.Event(), threading.Event()
    do = Doing(may)
    of_it, held = weakref.ref(do), []
    behind.begin(do)
    del do

    def look():
        held.append(of_it())
        looked.set()

    behind.after(look)
    may.set()
    assert behind.take() is True, "there"
    assert looked.wait(60)
    assert held == [None]


def test_other_threads_are_not_behind():
    told = []
    other = threading.Thread(target=lambda: told.append(is_behind()))
    other.start()
    other.join()
    assert (told, is_behind()) == ([False], False)
