"""The ledger tells what is wrong with it: a push applied twice, torn, lost or out of order."""

import numpy as np
import pytest

from support import ledger

CELL = ledger.lane(2)


def after(*pushes):
    """Give a model to which pushes were added, each as often as it is listed."""
    return {"w": -sum((ledger.push_of(cell)["w"] for cell in pushes), np.zeros_like(ledger.MODEL["w"]))}


def test_a_push_is_one_in_its_cell_of_every_fragment_and_nothing_elsewhere():
    rows = ledger.read(after(CELL, CELL + 1))
    assert rows.sum() == 2 * ledger.NUM_FRAGMENTS
    assert (rows[:, CELL : CELL + 2] == 1).all()
    assert (ledger.whole(rows), ledger.partial(rows)) == (2, 0)


def test_what_is_applied_twice_is_seen():
    with pytest.raises(AssertionError, match=f"applied twice.*{CELL + 1}"):
        ledger.read(after(CELL, CELL + 1, CELL + 1))


@pytest.mark.parametrize(("index", "value"), [(ledger.NUM_CELLS, 1), (CELL, -1), (CELL, 0.5)])
def test_what_no_push_can_have_made_is_seen(index, value):
    state = after()
    state["w"][index] = value
    with pytest.raises(AssertionError):
        ledger.read(state)


def test_what_has_become_of_the_push_under_way_is_told():
    rows = ledger.read(after(CELL, CELL + 1))
    assert ledger.fate(rows, CELL, 1) == "whole"
    assert ledger.fate(rows, CELL, 2) == "absent"
    rows[1, CELL + 1] = 0
    assert ledger.fate(rows, CELL, 1) == "partial"
    assert ledger.partial(rows) == 1


def test_what_was_told_and_is_not_there_is_seen():
    rows = ledger.read(after(CELL, CELL + 1))
    rows[2, CELL] = 0
    for told in (2, 3):
        with pytest.raises(AssertionError, match="told and not there"):
            ledger.fate(rows, CELL, told)


def test_what_is_no_prefix_is_seen():
    with pytest.raises(AssertionError, match="one before it is not"):
        ledger.fate(ledger.read(after(CELL, CELL + 2)), CELL, 1)
