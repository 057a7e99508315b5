"""A model that is a ledger: each push adds one to a cell of its own, in every fragment, and to nothing else.

So the parameters tell of each push whether it is there, in all of the model or in parts of it, and whether it
was applied twice. The server's optimizer is `SGD(lr=1)`; sums of ones are exact.
"""

import sys
from pathlib import Path

import numpy as np

import offbeat

FRAGMENT_ELEMENTS = 64 << 10
NUM_FRAGMENTS = 3
NUM_CELLS = 9000
"""Of each fragment: the last one has no more elements."""
MODEL = {"w": np.zeros((NUM_FRAGMENTS - 1) * FRAGMENT_ELEMENTS + NUM_CELLS, np.float32)}
OPTIMIZER = "SGD(lr=1)"
CELLS_OF_A_LANE = 300
PROGRAM = (sys.executable, "-m", "support.ledger")
"""A worker as a process, for a `Command` with `ENVIRONMENT`: it writes a line for each push."""
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[1])}


def lane(number, num_cells=CELLS_OF_A_LANE):
    """Give the first cell of one worker process: its pushes have the cells from there on, in order."""
    assert (number + 1) * num_cells <= NUM_CELLS
    return number * num_cells


def push_of(cell):
    """Make the gradient that adds one to a cell."""
    gradient = np.zeros_like(MODEL["w"])
    gradient[cell::FRAGMENT_ELEMENTS] = -1
    return {"w": gradient}


def read(state):
    """Take a model for a ledger; return the number in each cell, a row per fragment.

    Nothing is above one, or anywhere but in a cell.
    """
    rows = np.zeros((NUM_FRAGMENTS, FRAGMENT_ELEMENTS), np.float32)
    rows.reshape(-1)[: len(MODEL["w"])] = state["w"]
    assert rows.max() <= 1, f"applied twice: cells {np.argwhere(rows > 1).tolist()}"
    assert np.isin(rows, (0, 1)).all()
    assert not rows[:, NUM_CELLS:].any()
    return rows[:, :NUM_CELLS].astype(int)


def whole(rows):
    """Count the pushes that are in every fragment."""
    return int((rows.sum(axis=0) == NUM_FRAGMENTS).sum())


def partial(rows):
    """Count the pushes that are in some fragments and not in others."""
    ones = rows.sum(axis=0)
    return int(((ones > 0) & (ones < NUM_FRAGMENTS)).sum())


def fate(rows, first, told):
    """Look at the cells of a process that was told of so many pushes, all applied, and may have sent another.

    Returns:
        What has become of that one: "absent", "partial" or "whole".
    """
    ones = rows[:, first : first + CELLS_OF_A_LANE].sum(axis=0)
    assert (ones[:told] == NUM_FRAGMENTS).all(), f"told and not there: {ones[:told].tolist()} from {first}"
    assert not ones[told + 1 :].any(), f"there, and one before it is not: {ones.tolist()} from {first}"
    return {0: "absent", NUM_FRAGMENTS: "whole"}.get(int(ones[told]), "partial")


def work(client, first, number):
    """Push so often, with and without a pull; yield each receipt."""
    out = client.pull()
    for n in range(number):
        gradient = push_of(first + n)
        yield client.push(gradient) if n % 2 else client.push_pull(gradient, out=out)


def main(address, worker_id, first, number):
    with offbeat.Client(address, worker_id=worker_id) as client:
        for receipt in work(client, int(first), int(number)):
            assert receipt.applied, receipt
            print("told of a push", flush=True)  # noqa: T201  to whom has started it


if __name__ == "__main__":
    main(*sys.argv[1:])
