"""From the keywords about checkpoints to what the Rust server reads: where, how often, what at a start."""

import os
import re
from pathlib import Path
from typing import Any

from offbeat.checks import Faults, refuse
from offbeat.errors import ConfigError
from offbeat.frequency import frequency
from offbeat.naming import unknown

__all__ = ["MANIFEST", "NAME", "directory_of", "resolve"]

MANIFEST = "manifest.json"
"""What the folder of a checkpoint has, and the directory of several does not."""

NAME = re.compile(r"(damaged-|earlier-)?checkpoint-\d{6,}")
"""How a server calls a checkpoint, and one that is set aside."""

RESUME = ("auto", "never", "must")
DEFAULT_FREQUENCY = 1000
"""Updates, where nothing else is said."""


def resolve(directory: object, frequency: object, resume: str) -> dict[str, Any] | None:
    """Check the keywords together.

    Args:
        directory: `checkpoint_dir`, as given.
        frequency: `checkpoint_frequency`, as given.
        resume: As given.

    Returns:
        What the Rust server reads; None where no checkpoints are kept.

    Raises:
        ConfigError: Naming every one that cannot be used.
    """
    faults = Faults()
    if resume not in RESUME:
        faults.append(unknown("resume", resume, RESUME))
    if directory is None:
        if frequency is not None:
            faults.append(
                f"checkpoint_frequency is {frequency!r}, and there is no checkpoint_dir: say where "
                "checkpoints are to be kept"
            )
        if resume == "must":
            faults.append("resume is 'must', and there is no checkpoint_dir to go on from")
        if resume == "never":
            faults.append(
                "resume is 'never', and there is no checkpoint_dir to begin anew in: say where checkpoints "
                "are to be kept, or leave resume out"
            )
        refuse(faults)
        return None
    path = faults.catch(lambda: directory_of(directory))
    every = faults.catch(lambda: _frequency(frequency))
    refuse(faults)
    return {"directory": path, "every": every, "resume": resume}


def directory_of(given: object) -> str:
    """Make a path absolute, with its `~`: where the process goes later does not matter.

    Args:
        given: `checkpoint_dir`, as given.

    Raises:
        ConfigError: If it is no path, or that of one checkpoint.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(path := os.fspath(given), str) or not path:
        raise ConfigError(f"checkpoint_dir is {given!r}: give the path of a directory")
    whole = os.path.expanduser(path)  # noqa: PTH111  Path takes the "./" from "./~amy", a folder of that name
    if whole == path and path.startswith("~"):
        raise ConfigError(
            f"checkpoint_dir is {given!r}, and there is no such user's home here: give an absolute path, or "
            f"{'./' + path!r} for a folder of that name"
        )
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"checkpoint_dir is {given!r}: give a path that is UTF-8") from None
    place = Path(whole).absolute()
    if os.path.isfile(place):  # noqa: PTH113  as below
        raise ConfigError(f"checkpoint_dir is {given!r}, which is a file: give the path of a directory")
    if os.path.isfile(place / MANIFEST):  # noqa: PTH113  what cannot be looked at is the server's to tell
        raise ConfigError(
            f"checkpoint_dir is {given!r}, and {place} is the folder of one checkpoint ({MANIFEST} is in "
            f"it): give the directory of all of them, {place.parent}"
        )
    if NAME.fullmatch(place.name) and not os.path.exists(place):  # noqa: PTH110  as above
        raise ConfigError(
            f"checkpoint_dir is {given!r}, which is named as one checkpoint is, and is gone: servers remove "
            f"old ones; give the directory of all of them, {place.parent}"
        )
    return str(place)


def _frequency(given: object) -> dict[str, int | float]:
    every = frequency(
        DEFAULT_FREQUENCY if given is None else given, name="checkpoint_frequency", counted="updates"
    )
    return {"versions": every.count} if every.count is not None else {"seconds": every.seconds or 0.0}
