"""`offbeat launch`: a script as N workers on this machine, with a server beside them unless one is named.

The workers are not a gang: one that fails does not end the others, and its exit code is told at the end.
"""

import os
import secrets
import socket
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from offbeat import ParameterServer
from offbeat.address import is_address
from offbeat.cli.background import Background
from offbeat.cli.copying import Output
from offbeat.cli.exit_codes import SIGNALLED, ExitCode, code_of, first_failure
from offbeat.cli.failures import Failures
from offbeat.cli.options import as_typed
from offbeat.cli.parser import Parser, count, positive_int
from offbeat.cli.processes import Processes
from offbeat.cli.say import forget, say
from offbeat.cli.serving import (
    add_run_options,
    logged_to,
    make_server,
    not_saved,
    run_options_given,
    stop,
)
from offbeat.cli.signals import Signals, Stopped
from offbeat.errors import ConfigError

__all__ = ["add_arguments", "environment", "run", "usable_cores"]

TOKEN_BYTES = 16

ENDING_WITH_US = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGTERM = 1, 15
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)
if os.getppid() == int(sys.argv[1]):  # else it has ended before that
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes a program that the system sends SIGTERM when what has started it has ended, however that was.

In a process of its own, since what runs between fork and exec may take no lock that a thread of ours has.
"""


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.usage = f"{parser.prog} --workers N [OPTION …] SCRIPT [ARGUMENT …]"
    parser.add_argument("--workers", type=positive_int, metavar="N", help="how many processes; required")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="join this one (with OFFBEAT_TOKEN) and start none"
    )
    parser.add_argument(
        "--first-rank",
        type=count,
        default=0,
        metavar="K",
        help="RANK of the first worker here; default: %(default)s",
    )
    parser.add_argument(
        "--world-size",
        type=positive_int,
        metavar="N",
        help="WORLD_SIZE; default: the first rank + the workers here",
    )
    add_run_options(parser)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the Python script each worker runs")
    rest = parser.add_argument("arguments", nargs=REMAINDER, metavar="ARGUMENT", help="what the script gets")
    parser.on_unknown = "; what the script is to get stands behind its name"
    rest.required = False  # where SCRIPT is missing, argparse would ask for this, too


def run(arguments: Namespace) -> int:
    """Run the workers until all have ended; the first failure is the exit code."""
    _check(arguments)
    with ExitStack() as stack:
        return _run(arguments, stack)


def _run(arguments: Namespace, stack: ExitStack) -> int:
    signals = Signals()
    background = Background(Output.to(sys.stderr, 2))
    try:
        with signals.raised():
            server, joining = _server(arguments, background, stack)
            if server is not None and os.environ.get("OFFBEAT_TOKEN"):  # else nobody has what opens it
                background.say(f"how the workers do is told by `offbeat status {server.address}`")
    except Stopped as stopped:
        background.say(f"stopped by {stopped}")
        not_saved(arguments.save, "a signal came before there was a server", background)
        background.flush()
        return ExitCode.INTERRUPTED
    workers = _workers(arguments, joining, signals, background)
    signals.before_the_last = workers.kill
    failures = Failures(arguments.workers)
    of_run = of_save = of_output = ExitCode.OK
    try:
        with workers, signals.raised():
            for ended in workers.as_they_end():
                if ended.code != 0:
                    background.say(failures.tell(ended))
                else:
                    failures.well()
    except Stopped as stopped:
        background.say(f"stopped by {stopped}")
        of_run = ExitCode.INTERRUPTED
        # Those that had failed by themselves, and whose last words were still on their way.
        for ended in workers.left_over():
            if ended.code != 0 and not ended.was_asked:
                failures.add(ended)
    finally:
        if server is not None:
            of_save = stop(server, arguments.save, signals, background)
        of_output = _finish_output(workers, background)
    return first_failure(_tell(failures), of_run, of_save, of_output)


def _check(arguments: Namespace) -> None:
    """Refuse what no run can be, before anything starts.

    Raises:
        ConfigError: It names the options and the remedy.
    """
    if arguments.workers is None:
        misplaced = any(word.partition("=")[0] == "--workers" for word in arguments.arguments)
        before = f" before the script: what stands after {arguments.script} is the script's"
        raise ConfigError("how many workers? Give --workers N" + (before if misplaced else ""))
    num_ranks = arguments.first_rank + arguments.workers
    if arguments.world_size is not None and arguments.world_size < num_ranks:
        raise ConfigError(
            f"the workers here have ranks up to {num_ranks - 1} (--first-rank {arguments.first_rank}, "
            f"--workers {arguments.workers}), and --world-size is {arguments.world_size}: give {num_ranks} "
            f"or more there, which counts the workers of all machines, or less for the other two"
        )
    if arguments.server is not None and (given := run_options_given(arguments)):
        raise ConfigError(
            f"{', '.join(given)}: with --server none is started here that could take it; give it to "
            f"`offbeat server`, or leave out --server"
        )
    if arguments.server is not None and not is_address(arguments.server):
        raise ConfigError(f"--server: {arguments.server!r} is not an address; give HOST:PORT")
    if not arguments.script.is_file():
        raise ConfigError(f"there is no script {arguments.script}")
    with suppress(OSError):  # there may be none; what is wrong with it is told later
        if arguments.save is not None and arguments.save.path().samefile(arguments.script):
            raise ConfigError(f"--save: the model would replace the script, {arguments.script}")


def environment(
    inherited: Mapping[str, str], *, rank: int, local_rank: int, world_size: int, num_workers: int
) -> dict[str, str]:
    """Write one worker's environment.

    Args:
        inherited: Ours.
        rank: Among all workers.
        local_rank: Among those on this machine.
        world_size: How many workers there are.
        num_workers: How many of them are on this machine, and share its cores.
    """
    threads = max(1, usable_cores() // num_workers)
    return (
        {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        | dict(inherited)
        | {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    )


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def exit_code(of_worker: int) -> int:
    """Give a worker's end as an exit code of ours: a signal's number n as 128 + n."""
    return of_worker if of_worker >= 0 else SIGNALLED - of_worker


def _server(
    arguments: Namespace, background: Background, stack: ExitStack
) -> tuple[ParameterServer | None, dict[str, str]]:
    """Start a server for the workers, if none is named; give the variables, too, by which they find it."""
    if arguments.server is not None:
        return None, {"OFFBEAT_SERVER": arguments.server}
    # This machine only, and even so with a token: other users of the machine can reach the port too.
    given = os.environ.get("OFFBEAT_TOKEN")
    token = given or secrets.token_hex(TOKEN_BYTES)
    # With our token a server of the script's own would listen on every interface, which nobody has asked for.
    ours = not given and not os.environ.get("OFFBEAT_HOST")
    host = {"OFFBEAT_HOST": "127.0.0.1"} if ours else {}
    server = make_server(arguments, host="127.0.0.1", port=0, token=token)
    stack.enter_context(logged_to(background, "[server] "))
    with as_typed():
        server.start()
    return server, {"OFFBEAT_SERVER": server.address, "OFFBEAT_TOKEN": token} | host


def _meeting_place() -> dict[str, str]:
    """Name a port of this machine for a process group of torch's, should the script make one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _workers(
    arguments: Namespace, joining: dict[str, str], signals: Signals, background: Background
) -> Processes:
    world_size = arguments.world_size or arguments.first_rank + arguments.workers
    are_all_here = world_size == arguments.workers
    meeting = _meeting_place() if are_all_here else {}
    # What is empty says nothing: not where they meet either.
    inherited = dict(os.environ) | {name: os.environ.get(name) or value for name, value in meeting.items()}
    variables = [
        environment(
            inherited,
            rank=arguments.first_rank + local_rank,
            local_rank=local_rank,
            world_size=world_size,
            num_workers=arguments.workers,
        )
        | joining
        for local_rank in range(arguments.workers)
    ]
    command = [sys.executable, str(arguments.script), *arguments.arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", ENDING_WITH_US, str(os.getpid()), *command]
    return Processes(
        command,
        variables,
        signals,
        background,
        first_rank=arguments.first_rank,
        shows_interrupts=arguments.debug,
    )


def _finish_output(workers: Processes, background: Background) -> ExitCode:
    """Wait until all is written; say if it is not, and give the exit code of that."""
    code = ExitCode.OK
    try:
        workers.finish_output()
    except Stopped as stopped:
        background.say(f"stopped by {stopped} before all was written that the workers had to say")
        code = ExitCode.INTERRUPTED
    if (lost := workers.lost_output) is not None:
        background.say(str(lost))
        forget(sys.stdout)  # it is told once
        code = ExitCode(first_failure(code, code_of(lost)))
    background.flush()
    return code


def _tell(failures: Failures) -> int:
    """Tell of the workers that failed, and give the exit code of the one that did first."""
    if failures.first is None:
        return ExitCode.OK
    say(failures.summary())
    return exit_code(failures.first.code)
