"""argparse, with refusals that name the nearest thing known and are exceptions until `main` words them."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from offbeat.cli.say import output
from offbeat.errors import ConfigError
from offbeat.naming import unknown

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["Parser", "count", "file", "positive_int", "seconds", "secret"]


class Parser(argparse.ArgumentParser):
    """The parser of one command, or of one of its actions.

    Attributes:
        actions: The parsers of the command's actions by their names, if it has some.
        on_unknown: What to say besides of an option that is none.
    """

    def __init__(self, prog: str, description: str, *, is_action: bool = False) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.actions: Mapping[str, Parser] = {}
        self.on_unknown = ""
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS if is_action else False,  # else it would hide the command's
            help="show the traceback of an error, and log everything",
        )

    def add_actions(self, whats: Mapping[str, str]) -> None:
        """Let one of several actions be named next; which it was is `action` of what is parsed.

        Args:
            whats: What each does, by its name, in the words of a help.
        """
        group = self.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
        self.actions = {
            name: group.add_parser(name, description=f"{what.capitalize()}.", help=what, is_action=True)
            for name, what in whats.items()
        }

    def add_format(self) -> None:
        """Let the answer be asked for as text or JSON; `format` of what is parsed is "text" or "json"."""
        self.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")
        self.add_argument(
            "--json", dest="format", action="store_const", const="json", help="the same as --format json"
        )

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} ({self.prog} --help lists what there is)")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print it as any output: argparse's own says nothing where it cannot be written."""
        del file  # argparse gives none
        output(self.format_help(), end="")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read a command line; what is not known is refused with the nearest known name.

        Raises:
            ConfigError: If it cannot be read.
        """
        named = next((word for word in arguments if not word.startswith("-")), None)
        if self.actions and named is not None and named not in self.actions:
            raise ConfigError(unknown("action", named, [*self.actions]))
        parsed, rest = self.parse_known_args(arguments)
        if rest:
            given = rest[0].partition("=")[0]
            asked = self.actions[parsed.action] if self.actions else self
            if given.startswith("-"):
                known = asked._option_string_actions  # noqa: SLF001  another of this class
                options = sorted(option for option in known if option.startswith("--"))
                raise ConfigError(unknown("option", given, options) + self.on_unknown)
            asked.error(f"{given!r} is one argument too many")
        return parsed


def positive_int(text: str) -> int:
    """Read a whole number, 1 or more; underscores are allowed, as in Python."""
    return _whole(text, least=1)


def count(text: str) -> int:
    """Read a whole number, 0 or more; underscores are allowed, as in Python."""
    return _whole(text, least=0)


def seconds(text: str) -> float:
    """Read a time; which are none, as what is not finite or below 0, is for who uses it to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def file(text: str) -> Path:
    """Read the name of a file."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no file")
    return Path(text)


def secret(text: str) -> str:
    """Read a token."""
    if not text:
        raise argparse.ArgumentTypeError("an empty token is none; leave the option out")
    return text


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
    return value
