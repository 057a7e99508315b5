"""The states of the random generators that training draws from: Python's, numpy's, torch's, the device's."""

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """Take the states; none is moved.

    Args:
        device: Where is trained; of the others none is taken.
    """
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the global one, which datasets draw from
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
