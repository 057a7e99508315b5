"""What to say about a name that nobody knows: which one was given, the nearest known one, and all of them."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from offbeat.errors import ConfigError, UnknownAttributeError

__all__ = ["a_class", "brief", "known_attributes", "known_keywords", "nearest", "strict_keywords", "unknown"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

MOST_SHOWN = 60
"""Characters of a value in an error; of a longer one its class is named."""


SAME = {"every": "frequency", "interval": "frequency", "freq": "frequency", "steps": "frequency"}
"""Parts of names, by what others call them."""
OTHERS = {"learning_rate": "lr", "newest": "latest", "val": "validation"}
"""Whole names, likewise, that are spelt in no way alike."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """Find the known name that `name` was most likely meant to be; None if none is near."""
    ours = "_".join(SAME.get(part, part) for part in name.lower().replace("-", "_").split("_"))
    if name not in known and (found := next((one for one in (ours, OTHERS.get(ours)) if one in known), None)):
        return found
    folded = {k.lower().replace("-", "_"): k for k in known}
    wanted = name.lower().replace("-", "_")
    begun = [one for one in folded if one.startswith(f"{wanted}_") and wanted.strip("_")]
    hits = begun if len(begun) == 1 else difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6)
    return folded[hits[0]] if hits else None


def a_class(value: object) -> str:
    """Name a value's class with its article, such as ``an OrderedDict``."""
    return _a(type(value))


def brief(value: object) -> str:
    """Show a value in an error: as Python does, or where that is long its class."""
    shown = repr(value)
    return shown if len(shown) <= MOST_SHOWN else a_class(value)


def unknown(
    kind: str, name: object, known: Collection[str], *, elsewhere: Mapping[str, str] | None = None
) -> str:
    """Word the refusal of a name: ``unknown metric 'acuracy'; did you mean 'accuracy'? Known: …``.

    Args:
        kind: What it was to be a name of.
        name: As given.
        known: Those that there are.
        elsewhere: Names that are known in another place, and how they are given there.
    """
    others = {other: words for other, words in (elsewhere or {}).items() if other not in known}
    near = nearest(name, [*known, *others]) if isinstance(name, str) else None
    hint = f"did you mean {others.get(near, repr(near))}? " if near is not None else ""
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
            others = (
                _keywords_beside(function.__name__, type(args[0])) if args and "self" in signature else {}
            )
            told = (unknown(f"keyword of {of}", name, parameters, elsewhere=others) for name in wrong)
            raise ConfigError("; ".join(told))
        if len(args) > num_by_place and by_keyword:
            first = next((name for name in by_keyword if name not in keywords), by_keyword[0])
            raise ConfigError(
                f"{of} got a {type(args[num_by_place]).__name__} without its keyword: write {first}=… if it "
                f"is that. By keyword alone: {', '.join(by_keyword)}"
            )
        return function(*args, **keywords)

    return checked


def _keywords_beside(method: str, cls: type) -> dict[str, str]:
    """Give the keywords of a class's other calls that take settings, and how each is given there."""
    calls = {"__init__": cls.__name__, "train": "train", "train_step": "train_step"}
    return {
        name: f"{shown}({name}=…)"
        for call, shown in calls.items()
        if call != method and (found := getattr(cls, call, None)) is not None
        for name, parameter in inspect.signature(found).parameters.items()
        if name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def strict_keywords(cls: C) -> C:
    """Let a dataclass refuse an unknown keyword with the nearest known one, as `known_keywords` does."""
    cls.__init__ = known_keywords(cls.__init__)  # type: ignore[misc]  # of just this class
    return cls


def known_attributes(cls: C) -> C:
    """Let a class refuse that an attribute is set which it does not have, as a typo would, or not to be set.

    Private names, methods, properties with a setter, and what the constructor has set may be set, but for
    what it was given: that is built into more than the attribute. A subclass may have attributes of its own.
    """
    made_by: Callable[..., None] = cls.__init__  # type: ignore[misc]  # of just this class
    keywords = [name for name in inspect.signature(made_by).parameters if name != "self"]

    @functools.wraps(made_by)
    def make(self: object, *args: Any, **settings: Any) -> None:  # noqa: ANN401  whatever that takes
        made_by(self, *args, **settings)
        self.__dict__["_is_made"] = True

    def set_known(self: object, name: str, value: object) -> None:
        own = vars(self)
        is_free = name.startswith("_") or (name in own and name not in keywords)
        if type(self) is cls and "_is_made" in own and not is_free:
            found = getattr(cls, name, None)
            if found is None or (isinstance(found, property) and found.fset is None):
                text = _unsettable(cls, name, value, keywords, is_there=found is not None)
                raise UnknownAttributeError(text)
        object.__setattr__(self, name, value)

    cls.__init__ = make  # type: ignore[misc]
    cls.__setattr__ = set_known  # type: ignore[method-assign, assignment]
    return cls


def _unsettable(cls: type, name: str, value: object, keywords: list[str], *, is_there: bool) -> str:
    """Word why an attribute cannot be set, and what to do."""
    settable = [key for key, found in inspect.getmembers(cls) if isinstance(found, property) and found.fset]
    can = f"to be set in mid-run: {', '.join(settable) or 'nothing'}"
    if name in keywords:
        shown = repr(value)
        if len(shown) > MOST_SHOWN or "\n" in shown:  # as a model's
            shown = f"<{type(value).__name__}>"
        return (
            f"{name} is given when {_a(cls)} is made, and cannot be set to {shown} after that: end this "
            f"one and make a new one, with {cls.__name__}({name}={shown}); {can}"
        )
    if is_there:
        return f"{name} is what {_a(cls)} tells of itself, and cannot be set; {can}"
    near = nearest(name, [*settable, *(key for key in keywords if key not in settable)])
    hint = f"did you mean {near!r}? " if near is not None else ""
    return f"{_a(cls)} has no attribute {name!r} that could be set; {hint}{can}"


def _a(cls: type) -> str:
    return f"a{'n' if cls.__name__[0] in 'AEIOaeio' else ''} {cls.__name__}"  # a UserDict
