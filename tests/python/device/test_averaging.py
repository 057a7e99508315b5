"""Members average on a device what they would on the CPU."""

import os

import numpy as np
import pytest
import torch
from torch import distributed, nn

import offbeat
from offbeat import optim
from offbeat.errors import ConnectionLostError
from support.averaging import LOSS, SPEC, Alone, Counter, arrays, batch, close, model, warned
from support.cuda import NO_CUDA
from support.fault_tolerant import in_process, started
from support.group import together
from support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

ITERATIONS, EVERY, LATE = 10, 4, 2


def member(rank, device, address, method, overlap):
    """Train one of two, at a server or, without an address, in a group; give its model."""
    where = {"server_address": address, "rank": rank, "world_size": 2} if address else {}
    trained = model(
        seed=0 if address else rank
    )  # all start from the first one's; at a server whose comes first
    with offbeat.AsyncModelAverager(
        trained, averaging_frequency=EVERY, method=method, overlap=overlap, device=device, **where
    ) as ours:
        for number in range(ITERATIONS):
            inputs, targets = batch(rank, number)  # on the CPU: it is brought there
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        ours.flush()
        assert {p.device.type for p in trained.parameters()} == {device}
    return arrays(trained)


def alone(method, overlap):
    """What one process makes of it on the CPU, by the papers' forms."""
    us = Alone(2, method)
    us.train(ITERATIONS, EVERY, overlap)
    us.lead(*us.take(), moved=False)
    if method == "easgd":
        us.lead(*us.take(), moved=False)  # in the round in which nobody had anything to do any more
        return [centre.float().numpy() for centre in us.reference]
    return arrays(us.models[0])


@pytest.mark.parametrize("overlap", [False, LATE])
@pytest.mark.parametrize("method", ["average", "easgd", "diloco"])
def test_members_of_a_group_do_what_the_methods_say(device, method, overlap):
    first, second = together(member, 2, device, None, method, overlap)
    assert all(map(np.array_equal, first, second)), "the same for all at the end"
    assert close(first, alone(method, int(overlap)), within=1e-5)


@pytest.mark.parametrize("method", ["average", "diloco"])
def test_members_at_a_server_do_what_the_methods_say(device, meeting_place, method):
    first, second = together(member, 2, device, meeting_place, method, False)
    assert all(map(np.array_equal, first, second)), "the same for all at the end"
    assert close(first, alone(method, 0), within=1e-5)


def drifting(rank, device, address, iterations):
    """Give where a member begins and ends that adds a number of its own, rounds being made behind it."""
    where = {"server_address": address, "rank": rank, "world_size": 2} if address else {}
    trained = nn.Linear(300, 200, bias=False).to(device)
    with offbeat.AsyncModelAverager(trained, averaging_frequency=5, device=device, **where) as ours:
        start = trained.weight.detach().cpu().numpy().copy()
        for iteration in range(1, iterations + 1):
            with torch.no_grad():
                trained.weight.add_(2.0 ** -(rank + 1))
            if iteration % 5 == 0:
                ours.state_dict()  # ends the round before: at a server the next would begin later else
            ours.step(4)
        ours.state_dict()  # ends the round under way
        return start, trained.weight.detach().cpu().numpy()


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_in_the_background_no_progress_is_lost(device, meeting_place, backend):
    """The sum over members is the start's and all their steps, at whichever iteration each round ended.

    It is where members have done as many as one another when a round begins: they count by their samples.
    """
    found = together(drifting, 2, device, meeting_place if backend == "tcp" else None, 43)
    total = sum(end for _, end in found)
    assert np.allclose(total, 2 * found[0][0] + 43 * (0.5 + 0.25), atol=1e-4)


def normed(rank, device, address):
    """Give the buffers of a member with BatchNorm, which has samples of its own."""
    where = {"server_address": address, "rank": rank, "world_size": 2} if address else {}
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    with offbeat.AsyncModelAverager(
        trained, averaging_frequency=2, overlap=False, device=device, **where
    ) as ours:
        for number in range(4):
            random = torch.Generator().manual_seed(10 * rank + number)
            inputs = torch.randn(4 * (rank + 1), 6, generator=random) + rank
            targets = torch.randint(5, (len(inputs),), generator=random)
            ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        ours.flush()
    return [value.cpu().numpy() for name, value in trained.named_buffers() if "num_" not in name]


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_buffers_are_those_that_the_cpu_has(device, meeting_place, backend):
    address = meeting_place if backend == "tcp" else None
    first, second = together(normed, 2, device, address)
    assert all(map(np.array_equal, first, second))
    if device != "cpu":
        on_cpu, _ = together(normed, 2, "cpu", None)
        assert close(first, on_cpu, within=1e-5)


def spoilt(rank, device):
    """Be one of two of which the second has NaN for once; give its model, and what it was warned of."""
    trained = model()
    with (
        warned() as told,
        offbeat.AsyncModelAverager(trained, averaging_frequency=2, overlap=False, device=device) as ours,
    ):
        for number in range(8):
            inputs, targets = batch(rank, number)
            if (rank, number) == (1, 3):
                inputs[0, 0] = float("nan")
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        ours.flush()
    return arrays(trained), [text for text in told if "not finite" in text]


def test_a_member_that_is_not_finite_is_told_and_spoils_no_other(device):
    (first, _), (second, told) = together(spoilt, 2, device)
    assert all(np.isfinite(value).all() for value in first)
    assert all(map(np.array_equal, first, second))
    assert told


def in_pairs(rank, device):
    counter = Counter(by=0.0)
    counter.model.to(device)
    with torch.no_grad():
        counter.model.weight.fill_(float(rank))
    with offbeat.AsyncModelAverager(
        counter.model, averaging_frequency=1, method="gossip", overlap=False, device=device
    ) as ours:
        begun = counter.value
        with torch.no_grad():
            counter.model.weight.fill_(float(rank))
        counter.train(ours, 6)
        ours.state_dict()
        return begun, counter.value


def test_gossip_preserves_the_mean(device):
    values = [value for _, value in together(in_pairs, 4, device)]
    assert sum(values) == pytest.approx(0 + 1 + 2 + 3, abs=1e-5)
    assert np.ptp(values) < 3, "they have met"


KINDS = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01, "fused": True})]


@pytest.mark.parametrize(("kind", "keywords"), KINDS)
def test_one_member_is_a_loop_of_torchs(device, kind, keywords):
    ours, theirs = model().to(device), model().to(device)
    averager = offbeat.AsyncModelAverager(ours, averaging_frequency=3, device=device, process_group=False)
    lives = [kind(trained.parameters(), **keywords) for trained in (ours, theirs)]
    for number in range(7):
        inputs, targets = batch(0, number)
        averager.train_step(inputs=inputs, targets=targets, optimizer=lives[0], loss_fn=LOSS)
        lives[1].zero_grad()
        LOSS(theirs(inputs.to(device)), targets.to(device)).backward()
        lives[1].step()
    assert all(map(np.array_equal, arrays(ours), arrays(theirs)))


def one_of_nccl():
    offbeat.init_distributed("nccl")
    assert distributed.get_backend() == "nccl"
    ours, theirs = model().cuda(), model().cuda()
    live = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    with offbeat.AsyncModelAverager(
        ours, averaging_frequency=3, communication_backend="nccl", device="cuda"
    ) as averager:
        for number in range(7):
            inputs, targets = batch(0, number)
            averager.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            live.zero_grad()
            LOSS(theirs(inputs.cuda()), targets.cuda()).backward()
            live.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    accumulator = offbeat.AsyncGradientAccumulator(ours, 2, device="cuda")
    for number in range(5):
        inputs, targets = batch(0, number)
        accumulator.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    accumulator.flush(optimizer=SPEC)


@NO_CUDA
def test_one_member_of_a_group_by_nccl_is_a_loop_of_torchs():
    assert in_process(one_of_nccl) == 0


def one_of_two_by_nccl(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    offbeat.init_distributed("nccl", rank=rank, world_size=2, timeout_s=60)
    with pytest.raises(ConnectionLostError, match="two members on one CUDA device"):
        offbeat.AsyncModelAverager(model(), averaging_frequency=3, device="cuda:0")


@NO_CUDA
def test_two_members_on_one_device_are_told_that_nccl_refuses_that():
    port = free_port()
    both = [started(one_of_two_by_nccl, rank, port) for rank in range(2)]
    for process in both:
        process.join(100)
    assert [process.exitcode for process in both] == [0, 0]
