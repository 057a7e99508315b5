"""Who trains a module, as what is trained is found by who watches it."""

import threading

from torch import nn

from offbeat import trained_by


class Trainer:
    """What a weak reference can be to."""


class LeavesWhileOneComes(nn.Linear):
    """A module that is being noted while another trainer leaves: as one that is collected at that moment."""

    def __init__(self, leave):
        super().__init__(2, 2)
        self._leave = leave

    def __hash__(self):
        leave, self._leave = self._leave, lambda: None
        leave()
        return id(self)

    def __eq__(self, other):
        return self is other


def test_a_trainer_may_leave_while_another_one_is_noted_on_the_same_thread():
    """A collector that runs then closes what was not closed, and would wait for its own thread for ever."""
    left, stays, comes = Trainer(), Trainer(), Trainer()
    before = nn.Linear(2, 2)
    trained_by.register(before, left)
    trained_by.register(before, stays)
    module = LeavesWhileOneComes(lambda: trained_by.unregister(before, left))
    noting = threading.Thread(target=trained_by.register, args=(module, comes), daemon=True)
    noting.start()
    noting.join(timeout=20)
    assert not noting.is_alive()
    assert trained_by.trainers_of(before) == [stays]
    assert trained_by.trainers_of(module) == [comes]
