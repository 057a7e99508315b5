"""Of members at a server one is killed and one joins late: the others go on, and all end alike."""

import itertools
import json
import os
import signal
import time

import numpy as np
import pytest
import torch

import offbeat
from offbeat._offbeat import fetch_status
from support.averaging import arrays, model, step
from support.group import together
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(200)]

LEASE_S = 10.0
EVERY = 5
STAY, JOINS, DIES = range(3), 3, 4
"""By their number here; the one that joins does so in the place of the one that dies."""


def rounds_of(address):
    return json.loads(fetch_status(address, None, 5.0))["rounds"]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def die_as_others_wait(averager, address):
    """Be killed before this member has come to a round in which all others are."""
    if averager.averaging_round == 3 and averager.iterations % EVERY == EVERY - 1:
        wait_for(lambda: rounds_of(address)["open_entrants"] == len(STAY), timeout_s=60)
        killed()


def die_in_a_round(averager, address):
    """Be killed in a round of which this member has its share, and has not pushed it."""
    if averager.averaging_round == 3:
        averager._turns.members._presence.met().push = lambda *_, **__: killed()


def flat(trained):
    return np.concatenate([value.ravel() for value in arrays(trained)])


def member(number, address, here, die):
    ready = model()  # what torch loads for the first step takes others dozens of rounds
    step(ready, torch.optim.SGD(ready.parameters(), lr=0.01), number, 0)
    if number == JOINS:
        wait_for((here / "fewer").exists, timeout_s=60)
    trained, closed = model(seed=number), [rounds_of(address)["closed"]]
    with offbeat.AsyncModelAverager(
        trained, 4, min(number, JOINS), averaging_frequency=EVERY, overlap=False,
        communication_backend="tcp", server_address=address,
    ) as ours:  # fmt: skip
        began, sizes, means = flat(trained), [], []
        closed.append(rounds_of(address)["closed"])
        live = torch.optim.SGD(trained.parameters(), lr=0.01)
        gap_s, since = 0.0, time.monotonic()
        while not (here / "joined").exists():
            ours.step(step(trained, live, number, ours.iterations % 20))
            gap_s, since = max(gap_s, time.monotonic() - since), time.monotonic()
            if ours.averaging_round > len(means):
                sizes.append(ours.world_size)
                means.append(flat(trained))
            if number == DIES:
                die(ours, address)
            if sizes[-2:] == [3, 3]:
                (here / "fewer").touch()
            if number == JOINS and len(means) == 5:
                (here / "joined").touch()
        ours.flush()
        found = {"began": began, "closed": closed, "sizes": sizes, "means": means, "gap_s": gap_s}
        np.savez(here / f"{number}.npz", end=flat(trained), size=ours.world_size, **found)


@pytest.mark.parametrize("die", [die_as_others_wait, die_in_a_round])
def test_of_four_one_is_killed_and_one_joins_and_the_rest_never_stop_for_longer_than_a_lease(tmp_path, die):
    with offbeat.ParameterServer(transaction="model") as server:
        with pytest.raises(EOFError):  # of the one that is killed
            together(member, 5, server.address, tmp_path, die)
        held = np.concatenate([np.asarray(value).ravel() for value in server.state_dict().values()])
    first, *others, late = ({**np.load(tmp_path / f"{number}.npz")} for number in (*STAY, JOINS))
    num = min(len(stayed["sizes"]) for stayed in (first, *others))  # one may have ended a round before
    for stayed in (first, *others):
        assert stayed["gap_s"] < LEASE_S
        assert [size for size, _ in itertools.groupby(stayed["sizes"])] == [4, 3, 4]
        assert np.array_equal(stayed["sizes"][:num], first["sizes"][:num])
        assert np.array_equal(stayed["means"][:num], first["means"][:num]), (
            "after each round they have its mean"
        )
        assert np.array_equal(stayed["began"], first["began"])

    (found,) = np.flatnonzero((first["means"] == late["began"]).all(axis=1))
    assert first["sizes"][found] == 3, "it begins with what the others have made without it"
    closed = found + 2  # rounds at the server: that in which four begin, and up to this one
    assert late["closed"][0] <= closed <= late["closed"][1], "and with the newest of that"
    (again, *_) = np.flatnonzero(first["sizes"][found:] == 4) + found
    num = len(late["means"])
    assert np.array_equal(late["means"], first["means"][again : again + num]), (
        "from then on it is one of them"
    )

    for ended in (first, *others, late):
        assert ended["size"] == 4
        assert np.array_equal(ended["end"], held)
