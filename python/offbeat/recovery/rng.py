"""The states of the random generators that training draws from: Python's, numpy's, torch's, the device's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from offbeat.recovery.digest import digest_of

__all__ = ["apart", "capture", "derived", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """Take the states; none is moved.

    Args:
        device: Where is trained; of the others none is taken.
    """
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  the global one, which datasets draw from
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Give the generators the states that were taken.

    The device's is left as it is where the state is of another kind of device.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if (own := state.get(device.type)) is not None:
        torch.get_device_module(device).set_rng_state(own, device)


def derived(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Give states that follow from others and a number, and say nothing of them; no generator is moved.

    Args:
        state: As `capture` gave it.
        number: Which of those that follow.
    """
    seed = int(digest_of([number, *state.values()], most=None, of_all=True)[:16], 16) >> 1
    own = {
        "python": random.Random(seed).getstate(),  # noqa: S311  no secret
        "numpy": _seeded(state["numpy"], seed),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    devices = state.keys() - own.keys()
    return own | {device: torch.Generator(device).manual_seed(seed).get_state() for device in devices}


@contextmanager
def apart(own: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Draw from states of one's own, which move, while the global ones stay where they are."""
    outside = capture(device)
    restore(own, device)
    try:
        yield
    finally:
        own.update(capture(device))
        restore(outside, device)


def _seeded(state: dict[str, Any], seed: int) -> dict[str, Any]:
    """Give a state of numpy's for the bit generator that another is of; of a foreign one, that same state."""
    kind = getattr(np.random, str(state["bit_generator"]), None)
    if kind is None:
        return state
    seeded: dict[str, Any] = np.random.RandomState(kind(seed)).get_state(legacy=False)
    return seeded
