"""Asking a server for its status, without joining: what `status` and `top` have in common."""

import os
import socket
from argparse import Namespace
from contextlib import AbstractContextManager

from offbeat.checks import refuse, seconds
from offbeat.cli.parser import Parser, secret
from offbeat.cli.parser import seconds as as_seconds
from offbeat.cli.say import say
from offbeat.errors import AuthenticationError, ConfigError, OffbeatTimeoutError, ProtocolError
from offbeat.telling import telling

__all__ = ["add_server_arguments", "ask", "server_of", "telling_that_nobody_answers"]

DEFAULT_TIMEOUT_S = 10.0

TELL_AFTER_S = 1.0
"""Longer than a server takes that is there; before that whoever waits wonders at nothing."""

PROBE_TIMEOUT_S = 2.0
FIRST_BYTE = b"O"
"""Of whatever an Offbeat server sends."""


def add_server_arguments(parser: Parser) -> None:
    """Let be said which server is asked, and how long."""
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="the server; default: OFFBEAT_SERVER")
    parser.add_argument(
        "--token", type=secret, metavar="SECRET", help="the server's; better in OFFBEAT_TOKEN"
    )
    parser.add_argument(
        "--timeout",
        type=as_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        dest="timeout_s",
        help="how long to try; where all is silent, up to 2 s more to find out what is there; "
        "default: %(default)g",
    )


def server_of(arguments: Namespace) -> tuple[str, str | None]:
    """Give the server's address and token.

    Raises:
        ConfigError: If no server is named, or the timeout is none.
    """
    address = arguments.address or os.environ.get("OFFBEAT_SERVER")
    if not address:
        raise ConfigError("which server? Give HOST:PORT, or set OFFBEAT_SERVER")
    refuse(seconds(**{"--timeout": arguments.timeout_s}))
    return address, arguments.token or os.environ.get("OFFBEAT_TOKEN") or None


def ask(address: str, token: str | None, timeout_s: float) -> str:
    """Ask for the status, JSON.

    Raises:
        AuthenticationError: If the token is another one.
        ConnectError: If the server cannot be reached.
        OffbeatTimeoutError: If it does not answer in time.
        ProtocolError: If what is there is no Offbeat server.
    """
    from offbeat._offbeat import fetch_status

    try:
        return fetch_status(address, token, timeout_s)
    except AuthenticationError as error:  # worded for a worker
        raise AuthenticationError(str(error).replace("this worker", "this client")) from error
    except OffbeatTimeoutError as error:
        if _answers_http(address):
            raise ProtocolError(
                f"{address} is no Offbeat server: it answers in text, as HTTP servers do"
            ) from error
        raise


def telling_that_nobody_answers(address: str, timeout_s: float) -> AbstractContextManager[None]:
    """Say so once it takes longer than it should, with how long it is tried."""
    text = f"nobody has answered at {address} yet: it is tried for {timeout_s:g} s (--timeout)"
    return telling(text, after_s=TELL_AFTER_S, tell=say)


def _answers_http(address: str) -> bool:
    """Whether what is there answers in text: such a server waits for the end of a line, and we send none."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as probe:
            probe.sendall(b"GET / HTTP/1.0\r\n\r\n")
            probe.shutdown(socket.SHUT_WR)
            return probe.recv(1) not in (b"", FIRST_BYTE)
    except (OSError, ValueError):
        return False
