"""Objects on a command line, in Python's own notation: ``SGD(lr=0.1, momentum=0.9)``, or the bare name.

Read, not run: the name is looked up among those known, and the values are literals.
"""

import ast
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from offbeat.errors import ConfigError
from offbeat.naming import unknown

__all__ = ["read"]

T = TypeVar("T")


def read(text: str, option: str, known: Mapping[str, type[T]], example: str, *, or_else: str = "") -> T:
    """Make the object that a text names.

    Args:
        text: A name, or a name with keywords in brackets.
        option: The option it was given to, for errors.
        known: Classes by name; capitals and underscores do not matter.
        example: For errors.
        or_else: What to write else where a keyword is missing, for errors.

    Raises:
        ConfigError: If the text cannot be read, or the name or a keyword is unknown; the class's own else.
    """
    name, keywords = _parse(text, option, example)
    cls = {_folded(key): cls for key, cls in known.items()}.get(_folded(name))
    if cls is None:
        raise ConfigError(unknown(option, name, list(known)))
    parameters = inspect.signature(cls).parameters
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    missing = [name for name in needed if name not in keywords]
    if missing and keywords.keys() <= parameters.keys():  # else the class names those it does not know
        given = [f"{name}={value!r}" for name, value in keywords.items()]
        written = ", ".join([*given, *(f"{name}=..." for name in missing)])
        raise ConfigError(
            f"{option} {text!r} lacks {', '.join(missing)}: write '{cls.__name__}({written})'{or_else}"
        )
    try:
        return cls(**keywords)
    except ConfigError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error


def _parse(text: str, option: str, example: str) -> tuple[str, dict[str, Any]]:
    def refusal(why: str = "") -> ConfigError:
        return ConfigError(
            f"{option} {text!r} cannot be read{why}: write a name, or as in Python, {example!r}"
        )

    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise refusal(", since a ) is missing" if text.count("(") > text.count(")") else "") from error
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise refusal()
    if tree.args:
        raise refusal(", since it has a value without its keyword")
    names = [keyword.arg for keyword in tree.keywords]
    if None in names:
        raise refusal()
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise refusal(f", since it has {twice} twice")
    try:
        return tree.func.id, {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
    except (ValueError, TypeError) as error:  # the second for a list as a dict's key
        raise refusal() from error


def _folded(name: str) -> str:
    return name.lower().replace("_", "")
