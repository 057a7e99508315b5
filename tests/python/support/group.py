"""Processes of a process group of torch's, each of which calls a function that can be imported."""

import multiprocessing
import os
import traceback
from contextlib import ExitStack

from support.ports import free_port

TIMEOUT_S = 100


def together(function, size, *arguments):
    """Call `function(rank, *arguments)` in each of so many processes; give what each returned.

    No tensors: they would be gone with the process that they came from.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    with ExitStack() as stack:
        pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_call, args=(theirs, (rank, size, port), function, arguments))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()
            pipes.append(ours)
        answers = []
        for pipe in pipes:
            assert pipe.poll(TIMEOUT_S), "a member does not answer"
            answers.append(pipe.recv())
    for went_well, answer in answers:
        assert went_well, answer
    return [answer for _, answer in answers]


def _call(pipe, place, function, arguments):
    import torch

    import offbeat

    rank, size, port = place
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        offbeat.init_distributed("gloo", rank=rank, world_size=size, timeout_s=60)
        answer = True, function(rank, *arguments)
    except BaseException:  # noqa: BLE001  told in the test's own process
        answer = False, traceback.format_exc()
    pipe.send(answer)
