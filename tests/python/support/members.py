"""Members that count, each in a process of its own under a `FaultTolerantTrainer`: a step adds to one number.

So what a round has made of what each has brought can be told to the bit.
"""

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.averaging.rounds import Rounds
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.averaging import warned
from support.fault_tolerant import loss_of, model, waited

BATCH, EVERY = 8, 5
"""Samples of a batch; iterations from average to average, and from save to save."""


def one_number():
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def averager_of(module, method, **settings):
    return offbeat.AsyncModelAverager(
        module, averaging_frequency=EVERY, method=method, **{"overlap": False} | settings
    )


def trainer_of(module, strategy, **settings):
    return offbeat.AsyncTrainer(
        module, strategy=strategy, regular_sync_frequency=EVERY, **{"overlap": False} | settings
    )


MADE = {"averager": averager_of, "trainer": trainer_of}


def count(
    folder,
    address,
    by,
    *,
    kind,
    method,
    max_steps,
    killed_in=0,
    waits_in=(EVERY + 1,),
    barrier=None,
    **settings,
):
    """Train a member at a server to its end, or to the batch in which it kills itself.

    Args:
        folder: Of its checkpoints.
        address: Of the server.
        by: What a step adds.
        kind: Of what trains; see `MADE`.
        method: By which members average.
        max_steps: In all lives.
        killed_in: Batches of this life; 0 for none.
        waits_in: In which batches it passes a barrier twice; that after the first round.
        barrier: That one.
        settings: More of what trains.
    """
    torch.set_num_threads(1)
    Saver.save = waited(Saver.save)
    batches = [0]

    def loss_fn(outputs, targets):
        batches[0] += 1
        for _ in range(2 if barrier is not None and batches[0] in waits_in else 0):
            barrier.wait()
        if batches[0] == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return -by * outputs.mean() + 0.0 * targets.mean()

    with MADE[kind](one_number(), method, server_address=address, **settings) as member:
        trained(member, folder, loss_fn, epochs=100, max_steps=max_steps)


def meet_at_rank_0(rank, port, folder, by, *, max_steps, barrier):
    """Be one of two whose server is that of rank 0; the rest as in `count`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = {"communication_backend": "tcp", "rank": rank, "world_size": 2}
    run = {"kind": "averager", "method": "average", "max_steps": max_steps}
    count(folder, None, by, barrier=barrier, **run, **settings)


def draw(folder, address, out, data, *, max_steps, is_killed):
    """Train the one member at a server on noise to its end, or to where that is due; write what it saw.

    Args:
        folder: Of its checkpoints.
        address: Of the server.
        out: Where to add each batch's samples and inputs.
        data: Gives what `train` takes of them.
        max_steps: In all lives.
        is_killed: Kill it when that is trained, and the members are to be ended together with.
    """
    torch.set_num_threads(1)
    save = waited(Saver.save)

    def saved(saver, draft):
        save(saver, draft)
        if is_killed and draft.manifest.is_end_due:
            os.kill(os.getpid(), signal.SIGKILL)

    def seen(outputs, targets):
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps([targets.tolist(), outputs.tolist()]) + "\n")
        return loss_of(outputs, targets)

    Saver.save = saved
    with averager_of(model(), "average", server_address=address) as member:
        FaultTolerantTrainer(member, folder, checkpoint_frequency=EVERY).train(
            **data(),
            epochs=3,
            max_steps=max_steps,
            optimizer=offbeat.optim.SGD(lr=0.01),
            loss_fn=seen,
        )


def in_group(
    rank, port, folder, out, *, kind, method, batches, in_batch, in_round=None, passes=2, **settings
):
    """Train a member of a group of two by gloo to its end; write what came of it.

    Args:
        rank: Of this member.
        port: Where they meet.
        folder: Of its checkpoints.
        out: Where to write.
        kind: Of what trains; see `MADE`.
        method: By which members average.
        batches: Of a pass of this member's.
        in_batch: Called in each batch, with its number in this life.
        in_round: Called with a round's number when this member is about to wait for it.
        passes: In all lives.
        settings: More of what trains.
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=60)
    Saver.save = waited(Saver.save)
    finish, num, began = Rounds.finish, [0], []

    def watched(rounds, iterations):
        if in_round is not None:
            in_round(rounds.number)
        return finish(rounds, iterations)

    def loss_fn(outputs, targets):
        num[0] += 1
        if num[0] == 1:
            began.append(rounds_of(member).number)
        in_batch(num[0])
        return (rank - 0.5) * outputs.mean() + 0.0 * targets.mean()

    Rounds.finish = watched
    with warned() as told, MADE[kind](one_number(), method, **settings) as member:
        history = trained(member, folder, loss_fn, batches=batches, epochs=passes)
        found = {
            "steps": history.steps,
            "value": member.model.weight.item(),
            "round": began,
            "warned": [text for text in told if "different rounds" in text],
        }
    Path(out).write_text(json.dumps(found), "utf-8")


def rounds_of(member):
    averager = member if isinstance(member, offbeat.AsyncModelAverager) else member._stage.strategy.averager
    return averager._turns.rounds


def trained(member, folder, loss_fn, *, batches=10, **until):
    trainer = FaultTolerantTrainer(member, folder, checkpoint_frequency=EVERY)
    return trainer.train(
        dataset=TensorDataset(torch.ones(batches * BATCH, 1), torch.zeros(batches * BATCH, 1)),
        batch_size=BATCH,
        optimizer=offbeat.optim.SGD(lr=1.0),
        loss_fn=loss_fn,
        **until,
    )


class Holds:
    """Is called with numbers, and waits for an event at some of them."""

    def __init__(self, until, there=None):
        """`until`: which event, by number; `there`: set where one is waited for."""
        self.until, self.there = until, there

    def __call__(self, number):
        if number in self.until:
            if self.there is not None:
                self.there.set()
            assert self.until[number].wait(30), "what was to come first never did"


class Sets:
    """Is called with numbers, and sets an event at one."""

    def __init__(self, number, event):
        self.number, self.event = number, event

    def __call__(self, number):
        if number == self.number:
            self.event.set()


def nothing(number):
    """Be called with a number."""
