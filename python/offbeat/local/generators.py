"""Random generators that belong to a loader, its samplers or its dataset: found as their attributes."""

import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from offbeat.errors import ConfigError

__all__ = ["Generators"]

Generator: TypeAlias = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_PARTS = (DataLoader, Sampler, Dataset)
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Those of a loader or a dataset, by where they are found in it.

    They are looked for each time: a dataset may make one as a pass begins.
    """

    def __init__(self, source: object) -> None:
        """`source`: A loader or a dataset."""
        self._source = source

    def states(self) -> dict[str, Any]:
        """Give their states, as nests, by where they are."""
        return {path: _state(generator) for path, generator in _found(self._source)[0].items()}

    def set(self, states: Mapping[str, Any]) -> None:
        """Give them states back; those that have none, as they were not there yet, stay as they are.

        One that is not there is left out where the data is told of epochs, and makes it then.

        Raises:
            ConfigError: If another is not there, or is of another kind.
        """
        found, places = _found(self._source)
        is_told = any(callable(getattr(place, "set_epoch", None)) for place in places)
        for path, state in states.items():
            if path not in found and is_told:
                continue
            if path not in found:
                raise ConfigError(
                    f"the data has no random generator {path!r}, as the checkpoint's had: give the same "
                    f"data, which makes its generators as it is made, or in set_epoch"
                )
            try:
                _set(found[path], state)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise ConfigError(
                    f"the data has a {type(found[path]).__name__} as {path!r}, and the checkpoint's had "
                    f"another random generator in its place: give the same ({error})"
                ) from error


def _found(source: object) -> tuple[dict[str, Generator], list[object]]:
    """Find the generators of a loader or a dataset, and of what it is made of; give these parts, too."""
    shared = torch.default_generator  # a run's own, as are those of `random` and numpy, which are no values
    found: dict[str, Generator] = {}
    places: dict[int, object] = {id(shared): shared}  # which are kept as long as their ids are
    waiting: list[tuple[str, object]] = [("", source)]
    while waiting:
        path, place = waiting.pop(0)
        if id(place) in places:
            continue
        places[id(place)] = place
        for name, value in getattr(place, "__dict__", {}).items():
            if _has_state(value) and id(value) not in places:
                places[id(value)] = value
                found[f"{path}{name}"] = value
        waiting += [(f"{path}{name}.", part) for name, part in _made_of(place)]
    return found, list(places.values())


def _has_state(value: object) -> bool:
    """Tell whether this is a generator that goes on from a state; the system's entropy has none."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _made_of(source: object) -> Iterator[tuple[str, object]]:
    """Give the loaders, samplers and datasets in one, as in a Subset or a progress bar, and their names."""
    for name in ("dataset", "sampler", "batch_sampler"):
        yield name, getattr(source, name, None)  # whatever it is
    several = {"datasets": getattr(source, "datasets", None), **getattr(source, "__dict__", {})}
    for name, value in several.items():
        if isinstance(value, _PARTS):
            yield name, value
        elif isinstance(value, Mapping | list | tuple):
            values = value.values() if isinstance(value, Mapping) else value
            if isinstance(next(iter(values), None), _PARTS):  # else it may be a list of a million paths
                keys = value.keys() if isinstance(value, Mapping) else range(len(value))
                yield from ((f"{name}.{key}", part) for key, part in zip(keys, values, strict=True))


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
