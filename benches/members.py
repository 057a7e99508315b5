"""Member processes of one process group of torch's, kept from call to call, each computing with one thread.

Spawned, so that each imports what it needs; a function that they call is one that can be imported, or one of
the script itself.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import harness
from harness import ONE_THREAD, START_TIMEOUT_S, STOP_TIMEOUT_S, BenchError

__all__ = ["Members", "members"]

Call = Callable[..., Any]


class Members:
    """Processes that wait for what they are to do."""

    def __init__(self, processes: Sequence[tuple[SpawnProcess, Connection]]) -> None:
        self._processes = processes

    def call(self, function: Call, *arguments: object, timeout_s: float) -> list[Any]:
        """Call ``function(rank, *arguments)`` in all of them at once; give what each returned.

        Raises:
            BenchError: If one raised, ended or took longer.
        """
        for _, pipe in self._processes:
            pipe.send((function, arguments))
        answers = [harness.receive(pipe, process, timeout_s) for process, pipe in self._processes]
        for fault, _ in answers:
            if fault is not None:
                raise BenchError(fault)
        return [answer for _, answer in answers]


@contextmanager
def members(size: int) -> Iterator[Members]:
    """Start so many, in a group of gloo's; at the end all have ended, one way or another.

    Raises:
        BenchError: If they do not come together.
    """
    context = multiprocessing.get_context("spawn")
    os.environ.update(ONE_THREAD)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness.free_port())})
    processes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(rank, size, theirs), name=f"member {rank}")
        process.start()
        theirs.close()  # so that the pipe ends with the process
        processes.append((process, ours))
    try:
        group = Members(processes)
        group.call(_nothing, timeout_s=START_TIMEOUT_S)
        yield group
        for _, pipe in processes:
            pipe.close()
        for process, _ in processes:
            process.join(STOP_TIMEOUT_S)
    finally:
        for process, _ in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _nothing(rank: int) -> None:
    del rank


def _main(rank: int, size: int, parent: Connection) -> None:
    import torch

    import offbeat

    torch.set_num_threads(1)
    offbeat.init_distributed("gloo", rank=rank, world_size=size, timeout_s=START_TIMEOUT_S)
    while True:
        try:
            function, arguments = parent.recv()
        except EOFError:  # nobody calls any more
            break
        try:
            parent.send((None, function(rank, *arguments)))
        except Exception:  # noqa: BLE001  told in the process that called
            parent.send((traceback.format_exc(), None))
    torch.distributed.destroy_process_group()
