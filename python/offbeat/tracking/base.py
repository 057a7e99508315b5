"""What a tracker is: something that is handed numbers by name as training goes on, and keeps them."""

import os
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from offbeat.checks import is_count, objects, refuse
from offbeat.errors import ConfigError

__all__ = ["Tracker", "checked", "no_name", "trackers_of"]


@runtime_checkable
class Tracker(Protocol):
    """Keeps numbers by name and step: Offbeat's own, or an object of these two methods around any other.

    Who makes a tracker ends it. `train` never calls `finish`, so one tracker may serve several calls.
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep some numbers.

        Args:
            values: By name. Names may be new at any call, and any may be missing; NaN and infinities come as
                they are.
            step: Where they belong; it does not fall from one call to the next.
        """

    def finish(self) -> None:
        """Write what is still to be written, and let go of files and connections."""


def trackers_of(given: object) -> list[Tracker]:
    """Make a list of what a user gave as `trackers`: one, several, or none.

    Raises:
        ConfigError: Naming each that is no tracker.
    """
    if isinstance(given, Tracker) or not isinstance(given, Iterable) or isinstance(given, str | bytes):
        several: list[object] = [given]
    else:
        several = list(given)
    faults = []
    for tracker in several:
        if wrong := objects(trackers=tracker):
            faults += wrong
        elif not isinstance(tracker, Tracker):
            faults.append(
                f"trackers has {tracker!r:.100}: give objects with log(values, step) and finish(), such as "
                'offbeat.tracking.JSONL("run.jsonl")'
            )
    refuse(faults)
    return cast(list[Tracker], several)


def checked(values: Mapping[str, float], step: int) -> dict[str, float]:
    """Take what a tracker is handed as plain floats.

    Raises:
        ConfigError: Naming every value that is no number, every name that is none, and a step that is none.
    """
    faults = [] if is_count(step) else [f"step is {step!r}: give a whole number, 0 or more"]
    numbers = {}
    for name, value in values.items():
        if not _is_name(name):
            faults.append(f"a value is called {name!r}: give a text without control characters")
            continue
        try:
            numbers[name] = _number(value)
        except (
            OverflowError,
            TypeError,
            ValueError,
            RuntimeError,
        ):  # the last is a tensor's of many elements
            faults.append(f"{name} is {value!r:.100}: give a number")
    if faults:
        raise ConfigError("; ".join(faults))
    return numbers


def no_name(what: str, **paths: object) -> list[str]:
    """Tell which of the named values cannot be the name of `what`, a file or a folder."""
    return [
        f"{name} is {path!r}: give the name of {what}"
        for name, path in paths.items()
        if not isinstance(path, str | os.PathLike) or not os.fspath(path)
    ]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not any(unicodedata.category(c)[0] == "C" for c in name)


def _number(value: Any) -> float:  # noqa: ANN401  whatever came
    if isinstance(value, str | bytes):  # which float() would read
        raise TypeError
    return float(value)
