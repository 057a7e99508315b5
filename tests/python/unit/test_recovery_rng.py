"""Random states that follow from others, and what is drawn from them without moving those of the process."""

import random

import numpy as np
import pytest
import torch

from offbeat.recovery import rng

CPU = torch.device("cpu")


def drawn():
    """Draw from each of the global generators."""
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002, S311  of these it is about


def seed(python=1, numpy=2, of_torch=3):
    random.seed(python)
    np.random.seed(numpy)  # noqa: NPY002
    torch.manual_seed(of_torch)


@pytest.fixture(autouse=True)
def _as_before():
    before = rng.capture(CPU)
    yield
    rng.restore(before, CPU)


def drawn_apart(number=0, **seeds):
    seed(**seeds)
    own = rng.derived(rng.capture(CPU), number)
    with rng.apart(own, CPU):
        return drawn()


def test_what_is_drawn_apart_goes_on_from_its_own_states_and_moves_no_others():
    seed()
    expected = drawn(), drawn()
    seed()
    own = rng.derived(rng.capture(CPU), 0)
    first = drawn()
    with rng.apart(own, CPU):
        once = drawn()
    second = drawn()
    with rng.apart(own, CPU):
        twice = drawn()
    assert (first, second) == expected
    assert len({first, second, once, twice}) == 4

    seed()
    own = rng.derived(rng.capture(CPU), 0)
    with rng.apart(own, CPU):
        assert (drawn(), drawn()) == (once, twice)


@pytest.mark.parametrize("other", [{"python": 9}, {"numpy": 9}, {"of_torch": 9}, {"number": 9}], ids=str)
def test_states_that_follow_from_others_are_others_in_each_generator(other):
    assert all(a != b for a, b in zip(drawn_apart(), drawn_apart(**other), strict=True))
    assert drawn_apart(**other) == drawn_apart(**other)


def test_an_error_leaves_the_states_outside_where_they_were():
    seed()
    expected = drawn()
    seed()
    own = rng.derived(rng.capture(CPU), 0)
    with pytest.raises(KeyError), rng.apart(own, CPU):
        {}[drawn()]
    assert drawn() == expected


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.MT19937])
def test_numpy_s_global_generator_may_be_of_any_kind(kind):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        seed()
        expected = drawn()
        seed()
        own = rng.derived(rng.capture(CPU), 0)
        with rng.apart(own, CPU):
            apart = drawn()
        assert drawn() == expected
        assert apart[1] != expected[1]
    finally:
        np.random.set_bit_generator(before)
