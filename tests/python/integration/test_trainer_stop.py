"""`AsyncTrainer.stop` in one of several: for the others it is as if that one's data had ended there."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import averaging, optim
from offbeat.errors import StateError
from support.averaging import arrays, model
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.05, momentum=0.9)
LENGTHS = [13, 9]
"""Batches of each member."""
STOP_AT = 4
"""Batches, in the second one."""


def data_of(rank):
    random = torch.Generator().manual_seed(100 + rank)
    sizes = [2 + (rank + number) % 4 for number in range(LENGTHS[rank])]
    return [(torch.randn(n, 6, generator=random), torch.randint(5, (n,), generator=random)) for n in sizes]


class Stops:
    """Stops the trainer after some batches."""

    def __init__(self, after):
        self.left = after

    def on_step(self, trainer, step):
        self.left -= 1
        if self.left == 0:
            trainer.stop("no better")


def member(rank, is_stopped, keywords):
    """The second one is stopped, or has no more data."""
    data, callbacks = data_of(rank), []
    if rank == 1:
        callbacks = [Stops(STOP_AT)] if is_stopped else []
        data = data if is_stopped else data[:STOP_AT]
    trained = model(seed=rank)
    place = {"RANK": str(rank), "WORLD_SIZE": "2"}  # at a server members that begin together wait by these
    with (
        mock.patch.dict(os.environ, place),
        offbeat.AsyncTrainer(
            trained, overlap=False, regular_sync_frequency=3, callbacks=callbacks, **keywords
        ) as trainer,
    ):
        history = trainer.train(dataloader=data, epochs=1, optimizer=SPEC, loss_fn=LOSS, progress=False)
    return arrays(trained), history.steps, history.samples, history.stopped, history.stop_reason


@pytest.mark.parametrize(
    "strategy",
    ["average", averaging.DiLoCo(), "gossip", "accumulate"],
    ids=["average", "diloco", "gossip", "accumulate"],
)
def test_a_member_that_stops_early_is_to_the_others_as_one_whose_data_has_ended(strategy):
    (one, *counts, how, _), (other, *less, stopped, reason) = together(
        member, 2, True, {"strategy": strategy}
    )
    (theirs, *c, _, _), (others, *d, ended, _) = together(member, 2, False, {"strategy": strategy})
    assert (how, stopped, reason, ended) == ("epochs", "stop", "no better", "epochs")
    assert (counts, less) == (c, d)
    assert all(map(np.array_equal, one, theirs))
    assert all(map(np.array_equal, other, others))


def warming_up(rank):
    trained = model(seed=rank)
    trainer = offbeat.AsyncTrainer(trained, warm_up_epochs=1, callbacks=[Stops(2)] if rank == 1 else [])
    trainer.strategy = "average"
    with trainer, pytest.raises(StateError) as raised:
        trainer.train(dataloader=data_of(rank), epochs=3, optimizer=SPEC, loss_fn=LOSS, progress=False)
    return str(raised.value)


def test_one_that_stops_while_a_change_is_still_to_come_is_an_error_in_all_that_says_so():
    first, second = together(warming_up, 2)
    for told in (first, second):
        assert "call stop, or set strategy in all of them, after the same batch of theirs" in told


def test_at_a_server_that_averages_it_waits_for_the_others_and_all_end_with_the_same_model():
    with offbeat.ParameterServer(transaction="model") as server:
        keywords = {"strategy": "average", "server_address": server.address}
        (one, steps, _, how, _), (other, less, _, stopped, reason) = together(member, 2, True, keywords)
        held = [np.asarray(value) for value in server.state_dict().values()]
    assert (steps, how) == (LENGTHS[0], "epochs")
    assert (less, stopped, reason) == (STOP_AT, "stop", "no better")
    for own in (one, other):
        assert all(map(np.array_equal, own, held))


def test_a_worker_of_a_parameter_server_pushes_what_is_gathered_and_the_others_go_on():
    with offbeat.ParameterServer(model()) as server:
        keywords = {"strategy": "parameter_server", "server_address": server.address}
        (_, steps, _, how, _), (_, less, _, stopped, _) = together(member, 2, True, keywords)
        assert server.wait_for_workers(2)
        workers = server.status()["workers"]
    assert (steps, how) == (5, "epochs")  # pushes, of three batches each and of the one that was left
    assert (less, stopped) == (2, "stop")
    assert [worker["state"] for worker in workers] == ["finished"] * 2
