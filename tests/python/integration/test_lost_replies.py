"""Pushes whose connection breaks under way, or whose answer is lost: none is applied twice."""

from contextlib import suppress

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import ConnectionLostError
from support.fault_plan import Cut, LostReply, after, inside, plan
from support.fault_proxy import FaultProxy
from support.small_net import normed
from support.waiting import wait_for

BATCH = torch.ones(4, 4)
ONES = {"w": np.ones(200_000, np.float32)}  # four fragments


def pushed(server, times, fault):
    """Push so often through a proxy that has one fault; return what it has counted."""
    with FaultProxy(server.address, [plan(fault)]) as proxy:
        with suppress(ConnectionLostError), offbeat.Client(proxy.address, worker_id="a") as client:
            client.pull()
            for _ in range(times):
                assert client.push(ONES).weight == 1.0
        proxy.wait_for("cuts")
        return proxy.counts


@pytest.fixture(params=["fragment", "model"])
def server(request):
    zeros = {"w": np.zeros(200_000, np.float32)}
    optimizer = offbeat.optim.SGD(lr=1.0)
    with offbeat.ParameterServer(zeros, optimizer=optimizer, transaction=request.param) as server:
        yield server


def test_a_push_whose_reply_is_lost_is_applied_once(server):
    counts = pushed(server, 3, LostReply(push=3))
    assert (counts["lost_replies"], counts["truncated_pushes"]) == (1, 0)
    status = server.status()
    assert (status["version"], status["duplicates"], status["cut_short"]) == (3, 1, 0)
    assert [worker["duplicates"] for worker in status["workers"]] == [1]
    assert (server.state_dict()["w"] == -3).all()


@pytest.mark.parametrize(
    "place", [inside("Fragment", 2, push=2, payload_byte=17), after("Push", 2), after("Fragment", 3, push=2)]
)
def test_no_element_has_a_push_that_is_cut_short_twice(server, place):
    counts = pushed(server, 2, Cut(place))
    assert (counts["lost_replies"], counts["truncated_pushes"]) == (0, 1)
    wait_for(lambda: server.status()["connections"] == 0)
    assert server.status()["cut_short"] == 1
    weights = set(server.state_dict()["w"].tolist())
    assert weights <= {-1.0, -2.0}
    if server.status()["transaction"] == "model":
        assert len(weights) == 1


@pytest.mark.parametrize("place", [after("Push", 3), inside("Fragment", 2, push=3, payload_byte=17)])
def test_with_two_in_flight_a_module_s_buffers_count_on_over_a_lost_connection(place):
    spec = offbeat.optim.SGD(lr=0.01)
    with (
        offbeat.ParameterServer(optimizer=spec, transaction="model") as server,
        FaultProxy(server.address, [plan(Cut(place))]) as proxy,
        offbeat.AsyncWorker(proxy.address, normed(), in_flight=2) as worker,
    ):
        receipts = []
        for _ in range(10):
            worker.model(BATCH).square().mean().backward()
            receipts.append(worker.step())
        receipts += worker.flush()
        assert proxy.counts["cuts"] == 1
        assert receipts[0] is None
        assert None not in receipts[1:]
        rejected = [receipt for receipt in receipts[1:] if not receipt.applied]
        assert {receipt.reason for receipt in rejected} == {"connection_lost"}
        # Each applied push has counted its own forward pass; those of the others are gone with them.
        (count,) = (v for name, v in server.state_dict().items() if name.endswith("num_batches_tracked"))
        assert int(count) == 10 - len(rejected)
        assert all(
            torch.equal(value, server.state_dict()[name]) for name, value in worker.model.state_dict().items()
        )
