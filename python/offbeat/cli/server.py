"""`offbeat server`: a parameter server by itself. It needs no torch."""

import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from offbeat import ParameterServer, log
from offbeat.address import THIS_MACHINE, is_local
from offbeat.checkpoints import directory_of
from offbeat.cli import kept_token
from offbeat.cli.background import Background
from offbeat.cli.copying import Output
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.options import as_typed
from offbeat.cli.parser import Parser, count, positive_int, seconds, secret
from offbeat.cli.serving import (
    add_run_options,
    join_lines,
    logged_to,
    make_server,
    not_saved,
    stop,
)
from offbeat.cli.signals import LOOK_S, Signals, Stopped
from offbeat.errors import CheckpointError, ConfigError, OffbeatError

__all__ = ["add_arguments", "run"]

DEFAULT_PORT = 5000
"""The port of the tutorial, so that a server that is started again is found where it was."""


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    door = parser.add_argument_group("the door")
    door.add_argument(
        "--host", metavar="ADDRESS", help="default: every interface with a token, this machine without"
    )
    door.add_argument(
        "--port",
        type=count,
        default=DEFAULT_PORT,
        metavar="N",
        help="default: %(default)s; 0 takes a free one",
    )
    door.add_argument(
        "--token", type=secret, metavar="SECRET", help="what workers must know; better in OFFBEAT_TOKEN"
    )
    door.add_argument(
        "--new-token",
        action="store_true",
        help="make a token up, and show it; with --checkpoint-dir it is kept there, in the file token, and "
        "taken again at the next start",
    )
    door.add_argument("--insecure", action="store_true", help="listen beyond this machine without a token")
    door.add_argument(
        "--metrics-port",
        type=count,
        metavar="N",
        help="tell metrics there, GET /metrics in Prometheus's format; 0 takes a free port; default: nowhere",
    )
    door.add_argument(
        "--metrics-host",
        default=THIS_MACHINE[0],
        metavar="ADDRESS",
        help="where to listen for that, without a token; default: %(default)s",
    )
    end = parser.add_argument_group("the end")
    end.add_argument(
        "--workers",
        type=positive_int,
        default=1,
        metavar="N",
        help="the run is not over before so many have joined; default: %(default)s",
    )
    end.add_argument(
        "--linger",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long nobody must be there before the run is over; default: %(default)g",
    )
    end.add_argument(
        "--rejoin-grace",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long a lost worker counts as there, after a restart five times that; default: %(default)g",
    )
    end.add_argument("--keep-running", action="store_true", help="go on after all workers have gone")
    add_run_options(parser)


def run(arguments: Namespace) -> int:
    """Serve until all workers have come and gone, or until SIGINT, SIGTERM or SIGHUP."""
    if arguments.new_token and arguments.token is not None:
        raise ConfigError("--token gives a token and --new-token makes one up: say one of the two")
    to_keep_in, made_up = _made_up(arguments) if arguments.new_token else (None, None)
    token = made_up or arguments.token or os.environ.get("OFFBEAT_TOKEN")
    if arguments.host not in (None, *THIS_MACHINE) and not token and not arguments.insecure:
        raise ConfigError(
            f"--host {arguments.host} without a token would let anyone in who reaches the port: give "
            "--new-token, set OFFBEAT_TOKEN here and on the workers, or say --insecure"
        )
    background = Background(Output.to(sys.stderr, 2))
    try:
        with ExitStack() as stack:
            return _serve(arguments, background, stack, token=token, made_up=made_up, to_keep_in=to_keep_in)
    finally:
        background.flush()


def _made_up(arguments: Namespace) -> tuple[str | None, str]:
    """Give where the token of --new-token is to be kept, if it is and is not there yet; and the token.

    Raises:
        CheckpointError: If what is kept there cannot be trusted.
    """
    if arguments.checkpoint_dir is None:
        return None, kept_token.made_up()
    with as_typed():
        directory = directory_of(arguments.checkpoint_dir)
    known = kept_token.read(directory)
    return (None, known) if known is not None else (directory, kept_token.made_up())


def _serve(
    arguments: Namespace,
    background: Background,
    stack: ExitStack,
    *,
    token: str | None,
    made_up: str | None,
    to_keep_in: str | None,
) -> ExitCode:
    signals = Signals()
    is_new = not _has_checkpoints(arguments) or arguments.resume == "never"
    try:
        with signals.raised():
            server = make_server(
                arguments,
                host=arguments.host,
                port=arguments.port,
                token=token,
                insecure=arguments.insecure,
                linger_s=arguments.linger,
                rejoin_grace_s=arguments.rejoin_grace,
                metrics_port=arguments.metrics_port,
                metrics_host=arguments.metrics_host,
            )
    except Stopped as stopped:
        background.say(f"stopped by {stopped}")
        return not_saved(arguments.save, "a signal came before there was a server", background)
    stack.enter_context(logged_to(background))
    with as_typed():
        server.start()
    if made_up is not None and to_keep_in is not None:
        try:  # now that the directory is there, and ours alone; as yet nobody knows the token
            kept_token.write(to_keep_in, made_up)
        except CheckpointError:
            server.stop()  # before there is anything to save: what --save names stays as it is
            raise
    for caveat in _caveats(arguments, token, made_up, is_new=is_new):
        log.warn(caveat)
    code, forever = ExitCode.OK, threading.Event()
    restarting = False
    try:
        with server:
            try:
                with signals.raised():
                    with suppress(OSError):  # workers come, whether or not anybody reads how
                        welcome = _welcome(
                            server, token=token, made_up=made_up, is_kept_already=to_keep_in is None
                        )
                        print(welcome, end="", flush=True)
                    if arguments.keep_running:
                        while not forever.wait(LOOK_S):
                            pass
                    server.wait_for_workers(arguments.workers)
            except Stopped as stopped:
                # Ctrl-C is of somebody who sits there; the others are of a machine that goes away.
                restarting = arguments.checkpoint_dir is not None and str(stopped) != "SIGINT"
                raise
            finally:
                code = stop(server, arguments.save, signals, background, restarting=restarting)
    except Stopped as stopped:
        log.info("stopped by %s", stopped)
    return code


def _has_checkpoints(arguments: Namespace) -> bool:
    from offbeat._offbeat import checkpoint_names

    try:
        return arguments.checkpoint_dir is not None and bool(
            checkpoint_names(directory_of(arguments.checkpoint_dir))
        )
    except (OffbeatError, OSError):  # there is no such directory; where that is a fault the start says so
        return False


def _caveats(arguments: Namespace, token: str | None, made_up: str | None, *, is_new: bool) -> Iterator[str]:
    """Say what whoever typed this may not have meant, and would find out too late.

    Args:
        arguments: The command line's.
        token: The server's.
        made_up: The same, where it is that of --new-token.
        is_new: Whether the run begins here.
    """
    if arguments.checkpoint_dir is not None:
        directory = directory_of(arguments.checkpoint_dir)
        if is_new and arguments.save is not None and arguments.save.path().exists():
            yield (
                f"a new run begins, from no checkpoint in {directory}, and {arguments.save.given} is there: "
                "the new run's model will take its place; if that is to be kept, copy it now"
            )
        if not token and kept_token.is_kept(directory):
            yield (
                f"this server has no token, though {directory} has that of an earlier --new-token: give "
                "--new-token again, and it is asked for"
            )
    given = os.environ.get("OFFBEAT_TOKEN")
    if made_up is not None and given and given != made_up:
        yield "OFFBEAT_TOKEN holds another token than that of --new-token, and is not this server's"


def _welcome(
    server: ParameterServer, *, token: str | None, made_up: str | None, is_kept_already: bool
) -> str:
    has_token, in_environment = bool(token), token == os.environ.get("OFFBEAT_TOKEN")
    address = server.address
    lines = [f"Run {server.status()['run_id']}: a parameter server on {address}"]
    if is_local(address):
        opener = "--host 0.0.0.0" if has_token else "--new-token, or set OFFBEAT_TOKEN here and there"
        lines.append(f"Only this machine can reach it; for others give {opener}.")
    elif not has_token:
        lines.append("Whoever reaches this port can join: there is no token (--insecure).")
    if (kept := server.status()["checkpoints"]) is not None:
        lines.append(f"Checkpoints go to {kept['directory']}, every {kept['every']}.")
        if made_up is not None and is_kept_already:
            lines.append("The token is the one that is kept there.")
        elif made_up is not None:
            lines.append("The token is new, and kept there for the next start, in the file token.")
    if server.metrics_address is not None:
        lines.append(f"Metrics are at http://{server.metrics_address}/metrics.")
    # With its end, in one piece: the log writes to the same terminal.
    joining = join_lines(address, token=made_up, has_token=has_token, in_environment=in_environment)
    return "\n".join([*lines, joining, ""])
