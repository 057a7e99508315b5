"""Checking what a user gave: each check says what is wrong in words, so that all of it is told at once."""

import math
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from offbeat.address import is_address
from offbeat.errors import ConfigError
from offbeat.naming import a_class

__all__ = [
    "Faults",
    "at_least_one",
    "functions",
    "is_count",
    "is_number",
    "is_scalar",
    "objects",
    "of_address",
    "of_seed",
    "of_worker_id",
    "one_or_two",
    "refuse",
    "refuse_two_in_flight",
    "seconds",
    "strings",
]

SECRETS = frozenset({"token"})
"""What is never shown, whatever is wrong with it."""

LARGEST_COUNT = 2**63 - 1
"""Beyond it a count does not travel."""

MAX_ID_BYTES = 128
"""Of a worker's name, as the server takes it (`rust/net/src/server/config.rs`)."""

IN_NO_NAME = frozenset({"Cc", "Cs"})
"""Unicode's control characters; and its surrogates, which are no UTF-8."""

T = TypeVar("T")


class Faults(list[str]):
    """What is wrong so far."""

    def catch(self, check: Callable[[], T]) -> T | None:
        """Do something that may raise a ConfigError, and take down what that says."""
        try:
            return check()
        except ConfigError as error:
            self.append(str(error))
            return None


def refuse(faults: Iterable[str]) -> None:
    """Raise with everything that is wrong, if anything is.

    Raises:
        ConfigError: Naming all of it.
    """
    if text := "; ".join(faults):
        raise ConfigError(text)


def check_keys(state: object, keys: Iterable[str], *, owner: str) -> None:
    """See that a state is one at all, before what is in it is looked at.

    Args:
        state: Whatever a user gave.
        keys: That every state of this kind has.
        owner: Whose it is to be, with its article.

    Raises:
        ConfigError: If it has not all of them.
    """
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        what = "None" if state is None else f"{a_class(state)} without {', '.join(missing)}"
        raise ConfigError(f"the state is {what}: give what {owner}'s state_dict() gave")


def refuse_two_in_flight(run: dict[str, Any]) -> None:
    """Refuse two pushes in flight where a run takes none that is late: every second one would be rejected.

    Raises:
        ConfigError: Naming both settings.
    """
    if run["staleness"]["max_staleness"] == 0:
        raise ConfigError(
            "in_flight is 2 and the server's max_staleness is 0: with two in flight each push is one update "
            "late at least, so that every second one would be rejected; take in_flight=1, or give the server "
            "max_staleness=1 or more"
        )


def is_count(value: object, *, least: int = 0) -> bool:
    """Tell whether a value is a whole number from `least` on that the server can take."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_COUNT


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number, a Python one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_float(value))


def is_scalar(value: object) -> bool:
    """Tell whether a value is a number, or a tensor or an array of one; no device is waited for."""
    return hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1


def at_least_one(**counts: object) -> list[str]:
    """Tell which of the named values are not whole numbers, 1 or more."""
    return [
        f"{name} is {value!r}: give a whole number, 1 or more"
        for name, value in counts.items()
        if type(value) is not int or value < 1
    ]


def one_or_two(**counts: object) -> list[str]:
    """Tell which of the named values are not 1 or 2."""
    return [
        f"{name} is {v!r}: give 1 or 2" for name, v in counts.items() if type(v) is not int or v not in (1, 2)
    ]


def objects(**values: object) -> list[str]:
    """Tell which of the named values are classes, where an object of the class belongs."""
    return [
        f"{name} is the class {value.__name__}: give an object, as {value.__name__}(…) makes one"
        for name, value in values.items()
        if isinstance(value, type)
    ]


def functions(what: str, **values: object) -> list[str]:
    """Tell which of the named values cannot be called, or are classes; `what` is to be given."""
    faults = objects(**values)
    return faults + [f"{name} is {v!r}: give {what}" for name, v in values.items() if not callable(v)]


def strings(what: str = "a string, or None", **texts: object) -> list[str]:
    """Tell which of the named values are neither strings nor None; `what` is to be given."""
    return [
        f"{name} is {f'of type {type(value).__name__}' if name in SECRETS else repr(value)}: give {what}"
        for name, value in texts.items()
        if not isinstance(value, str | None)
    ]


def seconds(*, finite: bool = False, **times: object) -> list[str]:
    """Tell which of the named values are not times in seconds; where `finite`, infinity is none."""
    what = "a finite number of seconds, 0 or more" if finite else "a number of seconds, 0 or more"
    return [f"{name} is {v!r}: it is {what}" for name, v in times.items() if not _is_time(v, finite=finite)]


def of_seed(seed: object) -> list[str]:
    """Tell what is wrong with a seed: any whole number from 0 on is one, and None."""
    if seed is None or (not isinstance(seed, bool) and isinstance(seed, Integral) and int(seed) >= 0):
        return []
    return [f"seed is {seed!r}: give a whole number, 0 or more, or None"]


def of_address(given: object, *, name: str = "server_address") -> list[str]:
    """Tell what is wrong with a server's address: the one given, or else that of the environment.

    Args:
        given: As a user gave it; `strings` tells of what is none.
        name: Of the keyword.
    """
    if not given:
        name, given = "OFFBEAT_SERVER", os.environ.get("OFFBEAT_SERVER")
    if not given or not isinstance(given, str) or is_address(given):
        return []
    return [f"{name}: {given!r} is not an address; give HOST:PORT, such as 127.0.0.1:5000"]


def of_worker_id(worker_id: object) -> list[str]:
    """Tell what is wrong with a worker's name, by the server's rule; with None the server chooses one."""
    if not isinstance(worker_id, str):
        return strings(worker_id=worker_id)
    what = f"give 1 to {MAX_ID_BYTES} bytes of UTF-8 without control characters, or None"
    num_bytes = len(worker_id.encode(errors="surrogatepass"))
    if num_bytes > MAX_ID_BYTES:
        return [f"worker_id is {num_bytes} bytes long: {what}"]
    if not worker_id or any(unicodedata.category(c) in IN_NO_NAME for c in worker_id):
        return [f"worker_id is {worker_id!r}: {what}"]
    return []


def _is_time(value: object, *, finite: bool) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number = _float(value)
    return number >= 0 and (math.isfinite(number) or not finite)


def _float(value: Real | float) -> float:
    """Give a number as a float; NaN where it is a whole number beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.nan
