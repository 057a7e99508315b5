"""`offbeat top`: how a run goes, on a terminal, as it goes."""

import io
import json
import math
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from offbeat.cli.asking import add_server_arguments, ask, server_of
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.parser import Parser, seconds
from offbeat.cli.say import output
from offbeat.cli.signals import LOOK_S, Signals, Stopped
from offbeat.cli.wording import duration
from offbeat.errors import ConfigError, ConnectError, ConnectionLostError, OffbeatTimeoutError
from offbeat.extras import lacks

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_arguments", "run"]

DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
MAX_ANSWER_S = 3.0
"""Of a server that has answered before: after that it is said that it does not."""

PLAIN_WIDTH = 200
"""In columns, where the output is no terminal and COLUMNS says nothing: as wide as a row with a cause."""

Status = dict[str, Any]


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.epilog = (
        "Rates and staleness are of the time between two looks, but for a worker's samples/s, which the "
        "server takes over ten seconds. Ctrl-C ends it."
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--interval",
        type=seconds,
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        dest="interval_s",
        help="between two looks; default: %(default)g",
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one frame, and end")


def run(arguments: Namespace) -> int:
    """Show frames until a signal asks for an end, or one frame."""
    address, token = server_of(arguments)
    interval_s = arguments.interval_s
    if not (math.isfinite(interval_s) and interval_s >= MIN_INTERVAL_S):
        raise ConfigError(
            f"--interval is {interval_s!r}: it is a number of seconds, {MIN_INTERVAL_S} or more"
        )
    if fault := lacks("rich", "offbeat top"):
        raise ModuleNotFoundError(fault, name="rich")
    if not arguments.once and not sys.stdout.isatty():
        raise ConfigError("stdout is no terminal: give --once for one frame, or take offbeat status")

    def look(timeout_s: float = arguments.timeout_s) -> Status:
        status: Status = json.loads(ask(address, token, timeout_s))
        return status

    first = look()
    if arguments.once:
        threading.Event().wait(interval_s)
        output(_printed(look(), first, address), end="")
        return ExitCode.OK
    signals = Signals()
    try:
        with signals.raised():
            _live(first, look, address, interval_s)
    except Stopped:  # which is how it ends
        pass
    return ExitCode.OK


def _printed(after: Status, before: Status, address: str) -> str:
    """Render a frame as lines; for a terminal as wide as that, and with its colours."""
    from rich.console import Console

    from offbeat.cli.frame import frame

    on_terminal = sys.stdout.isatty()
    width = None if on_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
    text = io.StringIO()
    console = Console(file=text, force_terminal=on_terminal, width=width, highlight=False)
    console.print(frame(after, before, asked=address))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _live(first: Status, look: Callable[..., Status], address: str, interval_s: float) -> None:
    """Draw frame after frame; a server that has gone is told as gone, and asked again."""
    from rich.console import Console
    from rich.live import Live

    from offbeat.cli.frame import AROUND_THE_WORKERS, frame

    after, before = first, None
    heard, notice = time.monotonic(), None
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> "RenderableType":
            room = max(3, console.height - AROUND_THE_WORKERS)
            return frame(after, before, asked=address, notice=notice, max_workers=room)

        while True:
            live.update(draw(), refresh=True)
            _wait(interval_s)
            try:
                newest = look(MAX_ANSWER_S)
            except (ConnectError, ConnectionLostError, OffbeatTimeoutError) as error:
                since = duration(time.monotonic() - heard)
                notice = f"no answer since {since}, and tried again; what follows is old. {error}"
                continue
            before, after = after, newest
            heard, notice = time.monotonic(), None


def _wait(seconds: float) -> None:
    """Wait, and let signals in: one that comes to another thread wakes nobody."""
    end, never = time.monotonic() + seconds, threading.Event()
    while (rest := end - time.monotonic()) > 0:
        never.wait(min(rest, LOOK_S))
