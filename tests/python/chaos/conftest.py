"""Checkpoints to be disturbed, and which faults are tried."""

import numpy as np
import pytest

from support.kept import Kept


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    return Kept(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def some_of(request):
    """Choose so many of a list, in its order, by `--fault-seed`; all of them with `--every-fault`."""

    def choose(items, number):
        if request.config.getoption("--every-fault"):
            return items
        numbers = np.random.default_rng(request.config.getoption("--fault-seed"))
        return [items[place] for place in sorted(numbers.choice(len(items), number, replace=False))]

    return choose
