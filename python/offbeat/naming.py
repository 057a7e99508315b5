"""What to say about a name that nobody knows: which one was given, the nearest known one, and all of them."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from offbeat.errors import ConfigError

__all__ = ["known_keywords", "nearest", "strict_keywords", "unknown"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def nearest(name: str, known: Collection[str]) -> str | None:
    """Find the known name that `name` was most likely meant to be; None if none is near."""
    folded = {k.lower().replace("-", "_"): k for k in known}
    hits = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[hits[0]] if hits else None


def unknown(kind: str, name: object, known: Collection[str]) -> str:
    """Word the refusal of a name: ``unknown metric 'acuracy'; did you mean 'accuracy'? Known: …``."""
    near = nearest(name, known) if isinstance(name, str) else None
    hint = f"did you mean {near!r}? " if near is not None else ""
    return f"unknown {kind} {name!r}; {hint}Known: {', '.join(known) or 'none'}"


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function or constructor refuse an unknown keyword with the nearest known one.

    Raises:
        ConfigError: From the function made: for each keyword that is not in the signature.
    """
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    of = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        if wrong := [name for name in keywords if name not in parameters]:
            raise ConfigError("; ".join(unknown(f"keyword of {of}", name, parameters) for name in wrong))
        return function(*args, **keywords)

    return checked


def strict_keywords(cls: C) -> C:
    """Let a dataclass refuse an unknown keyword with the nearest known one, as `known_keywords` does."""
    cls.__init__ = known_keywords(cls.__init__)  # type: ignore[misc]  # of just this class
    return cls
