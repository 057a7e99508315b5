"""Processes of a process group of torch's, each of which calls a function that can be imported.

They are kept from call to call, for torch takes seconds to be imported; each call makes a group of its own.
Where one of them dies, or does not answer, all are given up, and the next call starts others.
"""

import atexit
import multiprocessing
import os
import traceback

from support.ports import free_port

TIMEOUT_S = 100

_kept: list[tuple] = []
"""Of each rank: its process, and our end of the pipe to it."""


def together(function, size, *arguments):
    """Call `function(rank, *arguments)` in each of so many processes; give what each returned.

    No tensors: they are no values that a pipe carries.
    """
    port = free_port()
    while len(_kept) < size:
        _kept.append(_started())
    try:
        for rank, (_, pipe) in enumerate(_kept[:size]):
            pipe.send(((rank, size, port), function, arguments))
        answers = []
        for _, pipe in _kept[:size]:
            assert pipe.poll(TIMEOUT_S), "a member does not answer"
            answers.append(pipe.recv())
    except BaseException:
        _give_up()
        raise
    if not all(went_well for went_well, _ in answers):
        _give_up()  # whatever is left in there
    for went_well, answer in answers:
        assert went_well, answer
    return [answer for _, answer in answers]


def _started():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _give_up():
    while _kept:
        process, pipe = _kept.pop()
        process.kill()
        process.join()
        pipe.close()


atexit.register(_give_up)


def _serve(pipe):
    while True:
        try:
            place, function, arguments = pipe.recv()
        except EOFError:  # nobody calls any more
            return
        pipe.send(_called(place, function, arguments))


def _called(place, function, arguments):
    import torch

    import offbeat

    rank, size, port = place
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        offbeat.init_distributed("gloo", rank=rank, world_size=size, timeout_s=60)
        return True, function(rank, *arguments)
    except BaseException:  # noqa: BLE001  told in the test's own process
        return False, traceback.format_exc()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
