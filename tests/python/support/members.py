"""Members that count, each in a process of its own under a `FaultTolerantTrainer`: a step adds to one number.

So what a round has made of what each has brought can be told to the bit.
"""

import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import waited

BATCH, EVERY = 8, 5
"""Samples of a batch, of which a pass has ten; iterations from average to average, and from save to save."""


def one_number():
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def averager_of(module, method, **settings):
    return offbeat.AsyncModelAverager(
        module, averaging_frequency=EVERY, method=method, overlap=False, **settings
    )


def trainer_of(module, strategy, **settings):
    return offbeat.AsyncTrainer(
        module, strategy=strategy, regular_sync_frequency=EVERY, overlap=False, **settings
    )


MADE = {"averager": averager_of, "trainer": trainer_of}


def count(folder, address, by, *, kind, method, max_steps, killed_in=0, barrier=None, **settings):
    """Train a member at a server to its end, or to the batch in which it kills itself.

    Args:
        folder: Of its checkpoints.
        address: Of the server.
        by: What a step adds.
        kind: Of what trains; see `MADE`.
        method: By which members average.
        max_steps: In all lives.
        killed_in: Batches of this life; 0 for none.
        barrier: Passed twice in the first batch after the first round.
        settings: More of what trains.
    """
    torch.set_num_threads(1)
    Saver.save = waited(Saver.save)
    batches = [0]

    def loss_fn(outputs, targets):
        batches[0] += 1
        for _ in range(2 if barrier is not None and batches[0] == EVERY + 1 else 0):
            barrier.wait()
        if batches[0] == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return -by * outputs.mean() + 0.0 * targets.mean()

    data = TensorDataset(torch.ones(10 * BATCH, 1), torch.zeros(10 * BATCH, 1))
    with MADE[kind](one_number(), method, server_address=address, **settings) as member:
        FaultTolerantTrainer(member, folder, checkpoint_frequency=EVERY).train(
            dataset=data,
            batch_size=BATCH,
            epochs=100,
            max_steps=max_steps,
            optimizer=offbeat.optim.SGD(lr=1.0),
            loss_fn=loss_fn,
        )
