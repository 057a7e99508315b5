"""Processes that stand still, as under a suspended laptop or a virtual machine that is moved."""

import os
import signal


def freeze(*processes):
    """Stop children, and wait until all their threads have stopped: a signal alone may take its time."""
    for process in processes:
        os.kill(_pid(process), signal.SIGSTOP)
    for process in processes:
        os.waitid(os.P_PID, _pid(process), os.WSTOPPED | os.WNOWAIT)


def wake(*processes):
    for process in processes:
        os.kill(_pid(process), signal.SIGCONT)


def _pid(process):
    return getattr(process, "process", process).pid
