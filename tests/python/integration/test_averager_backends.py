"""Members do the same wherever they meet: in a process group, or at a server."""

import numpy as np
import pytest

import offbeat
from offbeat.averaging.methods import METHODS
from offbeat.averaging.settings import server_faults
from support.averaging import LOSS, SPEC, arrays, batch, model
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

BOTH = [name for name, kind in METHODS.items() if not server_faults(kind())]
"""Methods that members have at either place."""


def member(rank, method, place):
    trained = model()
    with offbeat.AsyncModelAverager(
        trained, 3, rank, averaging_frequency=4, method=method, overlap=False, **place
    ) as ours:
        for number in range(10):
            inputs, targets = batch(rank, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        before = [value.copy() for value in arrays(trained)]
        ours.flush()
        return before, arrays(trained), (ours.averaging_round, ours.world_size)


def apart(ours, theirs):
    """Give how far models are apart, as a share of the largest number of the tensor that is furthest."""
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", BOTH)
def test_members_in_a_group_and_at_a_server_agree_within_a_millionth(method):
    in_group = together(member, 3, method, {"communication_backend": "gloo"})
    with offbeat.ParameterServer(transaction="model") as server:
        place = {"communication_backend": "tcp", "server_address": server.address}
        at_server = together(member, 3, method, place)
    for ours, theirs in zip(in_group, at_server, strict=True):
        assert ours[2] == theirs[2] == (3, 3)
        assert apart(ours[0], theirs[0]) <= 1e-6, "what it had trained since the second round"
        assert apart(ours[1], theirs[1]) <= 1e-6, "and where all ended"
    assert apart(in_group[0][0], in_group[1][0]) > 1e-3, "each had a model of its own before the end"


def test_all_methods_but_gossip_are_at_both():
    assert {*METHODS} - {*BOTH} == {"gossip"}
