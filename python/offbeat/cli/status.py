"""`offbeat status`: how a run goes, asked from its server without joining."""

import json
import os
import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.address import EVERY_INTERFACE, is_local, reachable
from offbeat.checks import refuse, seconds
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.parser import Parser, secret
from offbeat.cli.say import output
from offbeat.cli.wording import (
    by_reason,
    columns,
    duration,
    learning_rate,
    model,
    optimizer,
    pushes,
    staleness,
)
from offbeat.errors import AuthenticationError, ConfigError, OffbeatTimeoutError, ProtocolError

__all__ = ["add_arguments", "report", "run"]

DEFAULT_TIMEOUT_S = 10.0

PRESENT = ("joined", "stalled")
"""The states of a worker that is there."""

MAX_DEPARTURES = 10
"""The latest; `--json` has more."""

GLOSSARY = (
    "In the tables: damped, pushes that were worth less because they were late. Pushes applied, to the whole "
    "model; partial, to some pieces of it only; dropped, admitted and yet applied to none. Staleness, "
    "in updates since the worker's last pull. Longest poll, the longest time that a thread of the server was "
    "busy at a stretch. Lost updates, those of which workers had been told and which the checkpoint that the "
    "server went on from does not have. Memory, of the model: roots, the newest values; pinned, older ones "
    "that somebody still reads; idle, kept for the next update; staging, pushes that are on their way in."
)
"""What the tables' words mean, for `--help`."""

PROBE_TIMEOUT_S = 2.0
FIRST_BYTE = b"O"
"""Of whatever an Offbeat server sends."""

Status = Mapping[str, Any]


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.epilog = GLOSSARY
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="the server; default: OFFBEAT_SERVER")
    parser.add_format()
    parser.add_argument(
        "--token", type=secret, metavar="SECRET", help="the server's; better in OFFBEAT_TOKEN"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        dest="timeout_s",
        help="how long to try; where all is silent, up to 2 s more to find out what is there; "
        "default: %(default)g",
    )


def run(arguments: Namespace) -> int:
    """Ask, and print the answer."""
    address = arguments.address or os.environ.get("OFFBEAT_SERVER")
    if not address:
        raise ConfigError("which server? Give HOST:PORT, or set OFFBEAT_SERVER")
    refuse(seconds(**{"--timeout": arguments.timeout_s}))
    from offbeat._offbeat import fetch_status

    token = arguments.token or os.environ.get("OFFBEAT_TOKEN") or None
    try:
        text = fetch_status(address, token, arguments.timeout_s)
    except AuthenticationError as error:  # worded for a worker
        raise AuthenticationError(str(error).replace("this worker", "this client")) from error
    except OffbeatTimeoutError as error:
        if _answers_http(address):
            raise ProtocolError(
                f"{address} is no Offbeat server: it answers in text, as HTTP servers do"
            ) from error
        raise
    if arguments.format == "json":
        output(text)
    else:
        output(report(json.loads(text), asked=address))
    return ExitCode.OK


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


def report(status: Status, *, asked: str) -> str:
    """Word a server's status for people.

    Args:
        status: What it told.
        asked: The address where it was asked.
    """
    parts = [
        _run(status, asked),
        _workers(status["workers"]),
        _departures(status["departures"], status["workers"]),
        _memory(status["memory"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _address(told: str, asked: str) -> str:
    """Give an address to join with, where a server listens on every interface."""
    if told.rpartition(":")[0] not in EVERY_INTERFACE:
        return told
    return f"{reachable(told) if is_local(asked) else asked} (every interface)"


def _run(status: Status, asked: str) -> str:
    lines = {
        "run": f"{status['run_id']} on {_address(status['address'], asked)}, "
        f"{status['state'].replace('_', ' ')}, up {duration(status['uptime_s'])}",
        "model": model(status),
        "optimizer": optimizer(status),
        "learning rate": learning_rate(status),
        "staleness": staleness(status["staleness"]),
        "transaction": status["transaction"],
        "pushes": pushes(status),
        "longest poll": f"{status['longest_poll_ms']:.1f} ms",
    }
    if status["lost_updates"]:
        lines["lost updates"] = f"{status['lost_updates']:,}"
    if status["checkpoints"] is not None:
        lines["checkpoints"] = _checkpoints(status["checkpoints"])
    return columns([[name, value] for name, value in lines.items()], left=2)


def _checkpoints(told: Status) -> str:
    newest = "none written yet"  # by this server: the one that it went on from does not count
    if told["version"] is not None:
        newest = f"the newest of version {told['version']:,}, {duration(told['age_s'])} ago"
    failed = "" if told["failed"] is None else f"; the last one failed: {told['failed']}"
    return f"in {told['directory']}, {newest}{failed}"


def _workers(workers: Sequence[Status]) -> str:
    if not workers:
        return "no worker has joined yet"
    head = ["worker", "state", "host", "samples", "samples/s", "pushes", "damped", "rejected"]
    head += ["staleness", "max", "last push"]
    rows = [
        [
            worker["id"],
            worker["state"],
            worker["host"],
            f"{worker['samples']:,}",
            f"{worker['samples_per_s']:,.0f}",
            f"{worker['pushes']:,}",
            f"{worker['damped']:,}",
            by_reason(worker["rejected"]),
            f"{worker['mean_staleness']:.1f}",
            str(worker["max_staleness"]),
            "-" if worker["last_push_age_s"] is None else f"{duration(worker['last_push_age_s'])} ago",
        ]
        for worker in workers
    ]
    return columns([head, *rows], left=3)


def _departures(departures: Sequence[Status], workers: Sequence[Status]) -> str:
    """Word who has gone; a worker that was lost and is back has not."""
    present = {worker["incarnation"] for worker in workers if worker["state"] in PRESENT}
    gone = [d for d in departures if d["state"] != "lost" or d["incarnation"] not in present]
    if not gone:
        return ""
    head = ["departure", "state", "when", "cause"]
    rows = [[d["worker"], d["state"], f"{duration(d['age_s'])} ago", d["cause"]] for d in gone]
    return columns([head, *rows[-MAX_DEPARTURES:]], left=4)


def _memory(memory: Status) -> str:
    names = ("roots", "ledgers", "pinned", "idle", "staging")
    terms = {name: memory[f"{name}_bytes"] / 2**20 for name in ("total", *names)}
    listed = " + ".join(f"{terms[name]:.1f}" for name in names)
    return f"memory {terms['total']:.1f} MiB = {memory['formula'] or 'no model yet'} = {listed}"
