"""Random generators that belong to a loader, its samplers or its dataset: found as their attributes."""

import random
from collections.abc import Mapping, ValuesView
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from offbeat.errors import ConfigError

__all__ = ["Generators"]

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Each once, in the order in which they were found."""

    def __init__(self, found: list[Generator]) -> None:
        self._found = found

    @classmethod
    def of(cls, source: object) -> "Generators":
        """Find those of a loader or a dataset, and of the loaders, samplers and datasets it is made of."""
        places: list[object] = []
        seen: set[int] = set()
        waiting = [source]
        while waiting:
            place = waiting.pop(0)
            if id(place) not in seen:
                seen.add(id(place))
                places.append(place)
                waiting += _made_of(place)
        values = [value for place in places for value in getattr(place, "__dict__", {}).values()]
        shared = (
            torch.default_generator
        )  # a run's own, as are those of `random` and numpy, which are no values
        own = {id(v): v for v in values if _has_state(v) and v is not shared}
        return cls(list(own.values()))

    def states(self) -> list[Any]:
        """Give their states, as nests."""
        return [_state(generator) for generator in self._found]

    def set(self, states: list[Any]) -> None:
        """Give them states back.

        Raises:
            ConfigError: If they are of other generators.
        """
        if len(states) != len(self._found):
            raise ConfigError(
                f"the data has {len(self._found)} random generators of its own, and the checkpoint's had "
                f"{len(states)}: give the same"
            )
        for generator, state in zip(self._found, states, strict=True):
            try:
                _set(generator, state)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise ConfigError(
                    f"the data has a {type(generator).__name__}, and the checkpoint's had another random "
                    f"generator in its place: give the same ({error})"
                ) from error


def _has_state(value: object) -> bool:
    """Tell whether this is a generator that goes on from a state; the system's entropy has none."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _made_of(source: object) -> list[object]:
    """Give what a loader or a dataset is made of, as a Subset, a ConcatDataset or a progress bar is."""
    named = (getattr(source, name, None) for name in ("dataset", "sampler", "batch_sampler"))
    found = [value for value in named if value is not None]
    for value in [getattr(source, "datasets", None), *getattr(source, "__dict__", {}).values()]:
        several = value.values() if isinstance(value, Mapping) else value
        listed = several if isinstance(several, list | tuple | ValuesView) else [several]
        found += [each for each in listed if isinstance(each, DataLoader | Sampler | Dataset)]
    return found


def _state(generator: Generator) -> Any:  # noqa: ANN401  a nest
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case _:
            return generator.get_state(legacy=False)


def _set(generator: Generator, state: Any) -> None:  # noqa: ANN401  as `_state` gave it
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.set_state(state)
