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
    """Let a function or constructor refuse what its signature does not have, and say what it has.

    Raises:
        ConfigError: From the function made: for each keyword that is not in the signature, with the nearest
            that is, and for a value without its keyword where that is needed.
    """
    signature = inspect.signature(function).parameters
    parameters = [name for name in signature if name != "self"]
    by_keyword = [name for name, parameter in signature.items() if parameter.kind is parameter.KEYWORD_ONLY]
    num_by_place = len(signature) - len(by_keyword)
    of = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        if wrong := [name for name in keywords if name not in parameters]:
            raise ConfigError("; ".join(unknown(f"keyword of {of}", name, parameters) for name in wrong))
        if len(args) > num_by_place and by_keyword:
            first = next((name for name in by_keyword if name not in keywords), by_keyword[0])
            raise ConfigError(
                f"{of} got a {type(args[num_by_place]).__name__} without its keyword: write {first}=… if it "
                f"is that. By keyword alone: {', '.join(by_keyword)}"
            )
        return function(*args, **keywords)

    return checked


def strict_keywords(cls: C) -> C:
    """Let a dataclass refuse an unknown keyword with the nearest known one, as `known_keywords` does."""
    cls.__init__ = known_keywords(cls.__init__)  # type: ignore[misc]  # of just this class
    return cls
