"""What a forked child has of an averager or an accumulator says at once that it is not for use there."""

import copy
import gc
import os
import signal

import pytest
import torch

import offbeat
from offbeat.local.sums import Sums
from support.averaging import LOSS, arrays, batch, model
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

HANGS_S = 20


def in_a_child(act):
    """Run in a forked child; give what it says, or by which signal it ended."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S)
        try:
            said = act()
        except BaseException as error:  # noqa: BLE001  whatever it is goes to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        said = told.read()
    ended = os.waitpid(child, 0)[1]
    return f"ended by {signal.Signals(ended).name}" if ended else said


def forking(rank, kind, address):
    """Train as one of two, of which the first forks in mid-run; give what its children say, and the model."""
    trained = model()
    if kind == "accumulator":
        ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2)
    else:
        where = {"server_address": address, "world_size": 2, "rank": rank} if kind == "tcp" else {}
        ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, **where)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)

    def train(number):
        inputs, targets = batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)

    state = copy.deepcopy(ours.state_dict())
    for number in range(3):
        train(number)
    uses = {
        "train_step": lambda: train(3),
        "flush": ours.flush,
        "state_dict": ours.state_dict,
        "load_state_dict": lambda: ours.load_state_dict(state),
        "with": ours.__enter__,
    }

    def leave():
        ours.close()
        ours.close()
        repr(ours)
        for sums in [thing for thing in gc.get_objects() if isinstance(thing, Sums)]:
            sums.close()  # as where nobody holds them any more, and at the end
        return "closed"

    said = {}
    if rank == 0:
        said = {name: in_a_child(use) for name, use in uses.items()} | {"close": in_a_child(leave)}
    for number in range(3, 6):
        train(number)
    ours.flush()
    ours.close()
    return said, arrays(trained), type(ours).__name__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["accumulator", "gloo", "tcp"])
def test_what_a_child_inherits_is_refused_there_at_once_and_the_parent_goes_on(kind):
    with offbeat.ParameterServer(transaction="model") as server:
        (said, first, name), (_, second, _) = together(forking, 2, kind, server.address)
    assert said.pop("close") == "closed"
    for use, told in said.items():
        assert told.startswith(f"ForkedError: this {name} was made before a fork"), (use, told)
        assert 'make it after the fork, or start processes with the "spawn" method' in told
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_may_measure_the_model_that_it_has_inherited():
    with (
        offbeat.ParameterServer(transaction="model") as server,
        offbeat.AsyncModelAverager(model(), 1, 0, server_address=server.address) as ours,
    ):

        def measure():
            return str(ours.evaluate([batch(0, 0)]))

        assert in_a_child(measure) == measure()


def test_who_is_alone_may_go_on_in_a_child():
    trained = model()
    inputs, targets = batch(0, 0)
    for ours in (
        offbeat.AsyncModelAverager(trained, averaging_frequency=1),
        offbeat.AsyncGradientAccumulator(trained, accumulation_steps=1),
    ):

        def train(ours=ours):
            optimizer = offbeat.optim.SGD(lr=0.1)
            ours.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=LOSS)
            ours.flush()
            return "trained"

        assert in_a_child(train) == "trained"
