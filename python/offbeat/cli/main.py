"""`offbeat`: finds the command, runs it, and turns how it ended into one sentence and an exit code."""

import atexit
import codecs
import importlib
import io
import logging
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

from offbeat import log
from offbeat.cli import signals
from offbeat.cli.exit_codes import ExitCode, code_of
from offbeat.cli.parser import Parser
from offbeat.cli.say import flush_output, forget, output, say, takes_more
from offbeat.errors import ConfigError, OffbeatError
from offbeat.naming import unknown

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "server": "hold a model and apply what workers push",
    "launch": "run a script as several workers on this machine",
    "demo": "train two models with four unequal workers, beside a single process",
    "status": "ask a server how its run goes",
    "top": "watch a run on the terminal, as it goes",
    "checkpoint": "look at a server's checkpoints, verify them, or take the model out of one",
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
        arguments: What follows `offbeat`; None means this process's own, which ends with the command: SIGINT,
            SIGTERM and SIGHUP are ignored once its threads have ended. Otherwise handlers are as before.

    Returns:
        The exit code: docs/cli.md.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # for errors before the command line is read, too
    code: int = ExitCode.OK
    before = signals.handlers()
    _open_what_is_closed()
    _let_everything_be_written()
    try:
        command = _parse(given)
        if isinstance(command, ExitCode):
            code = command
        else:
            run, parsed = command
            debug = parsed.debug  # another one is a script's
            code = run(parsed)
        flush_output()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last place: every error ends here
        signals.Signals()  # one more does not break into what is said of this
        told = _explain(error, debug=debug)
        if code == ExitCode.OK:  # a full disk at the flush hides no failure
            code = told
        if isinstance(error, KeyboardInterrupt) and not takes_more(sys.stdout):
            forget(sys.stdout)  # it has broken off the wait for that
    finally:
        _forget_the_unwritten()
        if arguments is None:
            signals.Signals()  # for a thread that Python waits for, and that waits itself
            atexit.register(signals.install, signals.ignored())  # the code stands
        else:
            signals.install(before)
    return code


def _parse(given: list[str]) -> tuple[Callable[[Namespace], int], Namespace] | ExitCode:
    """Read a command line: what to run, with what; or how it ends already, with what it has printed."""
    if not given or given[0] in ("-h", "--help", "help"):
        output(_help())
        return ExitCode.OK if given else ExitCode.USAGE
    if given[0] in ("-V", "--version", "version"):
        output(f"offbeat {_version()}")
        return ExitCode.OK
    name = given[0]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(unknown(kind, name, [*COMMANDS, "--version", "--help"]))
    command = cast(Command, importlib.import_module(f"offbeat.cli.{name}"))
    parser = Parser(f"offbeat {name}", f"{COMMANDS[name].capitalize()}.")
    command.add_arguments(parser)
    try:
        parsed = parser.parse(given[1:])
    except SystemExit:  # how argparse ends what --help has told
        return ExitCode.OK
    if parsed.debug:
        log.LOGGER.setLevel(logging.DEBUG)
    return command.run, parsed


def _open_what_is_closed() -> None:
    """Let a stream that was closed (`2>&-`), which is None, be the null device, in the demo's workers, too.

    A file or socket that is opened later would get its number, and be what they take for that stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(null, True)  # noqa: FBT003  it takes no keyword
            elif _is_closed(number):
                os.dup2(null, number)
                os.close(null)
                null = number
            mode = "r" if name == "stdin" else "w"
            stream = open(null, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False  # somebody in this process has it, as where `main` is called by a program


def _let_everything_be_written() -> None:
    """See that no name of a file or a run, in letters that stdout's encoding lacks, ends what tells of it."""
    out = sys.stdout  # stderr is so in any Python
    if isinstance(out, io.TextIOWrapper) and (
        out.errors == "strict" or codecs.lookup(out.encoding).name != "utf-8"
    ):
        out.reconfigure(errors="backslashreplace")


def _forget_the_unwritten() -> None:
    """See that what a stream could not be rid of is not tried again at exit, where that is code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            forget(stream)


def _help() -> str:
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: offbeat COMMAND [OPTION …]\n\nAsynchronous training for PyTorch.\n\n{commands}\n\n"
        "offbeat COMMAND --help tells more; offbeat --version tells the version."
    )


def _version() -> str:
    import offbeat

    return offbeat.__version__


def _explain(error: BaseException, *, debug: bool) -> int:
    if debug:
        with suppress(OSError):
            traceback.print_exception(error)
    elif isinstance(error, KeyboardInterrupt):
        say("interrupted")
    elif isinstance(error, OffbeatError | OSError | ImportError):
        say(str(error))
    else:
        say(f"{type(error).__name__}: {error} (--debug shows where)")
    return code_of(error)


if __name__ == "__main__":
    sys.exit(main())
