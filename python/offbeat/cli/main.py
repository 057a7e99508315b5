"""`offbeat`: finds the command, runs it, and turns how it ended into one sentence and an exit code."""

import importlib
import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from typing import Protocol, cast

from offbeat.cli.exit_codes import ExitCode, code_of
from offbeat.cli.parser import Parser
from offbeat.errors import ConfigError, OffbeatError
from offbeat.naming import unknown

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "server": "hold a model and apply what workers push",
    "launch": "run a script as several workers on this machine",
    "demo": "train two models with four unequal workers, beside a single process",
    "status": "ask a server how its run goes",
    "env": "print what a bug report needs to know about this machine",
}


class Command(Protocol):
    """What each command's module has."""

    def add_arguments(self, parser: Parser) -> None:
        """Say what it takes."""

    def run(self, arguments: Namespace) -> int:
        """Do it; give the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `offbeat`; None means this process's own.

    Returns:
        The exit code: docs/cli.md.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # for errors before the command line is read, too
    try:
        code = _run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone (`offbeat status … | head`); nothing may write to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last place: every error ends here
        return _explain(error, debug=debug)
    return code


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return ExitCode.OK if given else ExitCode.USAGE
    if given[0] in ("-V", "--version", "version"):
        print(f"offbeat {_version()}")
        return ExitCode.OK
    name = given[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(unknown(kind, name, [*COMMANDS, "--version", "--help"]))
    command = cast(Command, importlib.import_module(f"offbeat.cli.{name}"))
    parser = Parser(f"offbeat {name}", f"{COMMANDS[name].capitalize()}.")
    command.add_arguments(parser)
    parsed = parser.parse(given[1:])
    if parsed.debug:
        logging.getLogger("offbeat").setLevel(logging.DEBUG)
    return command.run(parsed)


def _help() -> str:
    commands = "\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: offbeat COMMAND [OPTION …]\n\nAsynchronous training for PyTorch.\n\n{commands}\n\n"
        "offbeat COMMAND --help tells more; offbeat --version tells the version."
    )


def _version() -> str:
    import offbeat

    return offbeat.__version__


def _explain(error: BaseException, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, KeyboardInterrupt):
        print("offbeat: interrupted", file=sys.stderr)
    elif isinstance(error, OffbeatError | OSError | ImportError):
        print(f"offbeat: {error}", file=sys.stderr)
    else:
        print(f"offbeat: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
    return code_of(error)


if __name__ == "__main__":
    sys.exit(main())
