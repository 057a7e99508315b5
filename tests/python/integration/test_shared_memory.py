"""Members of one machine add up through its memory: what comes of it, and what of members that die in it."""

import fcntl
import functools
import gc
import logging
import math
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed, nn

import offbeat
from offbeat.errors import ConfigError, ConnectionLostError
from offbeat.local import shared_memory
from offbeat.local.sums import Sums
from support.group import together
from support.ports import free_port
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

CPU = torch.device("cpu")
LARGE = shared_memory.LEAST // 4
"""Numbers of float32 that are worth going through memory."""


def mapped():
    """Count the segments that this process has mapped."""
    return len(re.findall(r"/memfd:offbeat-", Path("/proc/self/maps").read_text()))


def left():
    """Wait until this process has none mapped, as the thread that added up last ends."""
    wait_for(lambda: mapped() == 0)
    return mapped()


def added_up(sums, rank, dtype=torch.float32):
    """Add up 1 of the first member and 2 of the second, many times; give what came of it, each once."""
    given = [torch.full((LARGE,), 1.0 + rank, dtype=dtype)]
    sums.begin(given)
    sums.finish()
    return np.unique(given[0].numpy()).tolist()


def tensors(rank, shapes, dtype):
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def added(rank, sets, dtype, switch):
    """Add up one set of tensors after another; give what came of each, and the mapped segments at each."""
    os.environ[shared_memory.SWITCH] = switch
    group = distributed.group.WORLD
    sums = Sums.among(group, of="numbers", device=CPU)
    found, segments = [], []
    for shapes in sets:
        given = tensors(rank, shapes, dtype)
        sums.begin(given)
        sums.finish()
        assert sums.is_there()
        found.append([one.numpy() for one in given])
        segments.append(mapped())
    sums.close()
    os.environ.pop(shared_memory.SWITCH)
    return found, segments, left()


SETS = [
    [(LARGE,)],
    [(3,), (), (700, 501), (0,), (LARGE // 2, 2)],  # larger: other segments
    [(5,)],  # not worth it
    [(2, 1), (LARGE - 2,)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_all_members_and_alike_in_all_bit_for_bit(size, dtype):
    everybody = together(added, size, SETS, dtype, "1")
    over_the_group = together(added, size, SETS, dtype, "0")
    for (found, segments, left), (other, none, _) in zip(everybody, over_the_group, strict=True):
        assert segments == [size] * len(SETS)
        assert left == 0, "closed, nobody holds any"
        assert none == [0] * len(SETS)
        for shapes, ours, theirs, first in zip(SETS, found, other, everybody[0][0], strict=True):
            exact = [
                sum(parts[1:], parts[0])
                for parts in zip(*(tensors(r, shapes, dtype) for r in range(size)), strict=True)
            ]
            for one, two, three, four in zip(ours, theirs, exact, first, strict=True):
                assert np.array_equal(one, four), "alike in all"
                np.testing.assert_allclose(one, three.numpy(), rtol=1e-5, atol=1e-5)
                if size == 2:
                    assert np.array_equal(one, two), "of two numbers there is one sum"


def refuse(kind, text, *arguments, **keywords):
    raise kind(text)  # each anew: one that was raised holds what it went through


def not_alike(rank, what, dtype):
    """Let one member alone have no shared memory, or none that others can open."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1 and what == "the switch":
        os.environ[shared_memory.SWITCH] = "0"
    left()
    system, maps = SimpleNamespace(**vars(os)), SimpleNamespace(**vars(mmap))
    if rank == 1 and what == "the call":  # as in a Python that was built for an old system
        del system.memfd_create
    if rank == 1 and what == "its number":  # as of a process in a container that counts its own
        system.getpid = lambda: NOBODY
    if rank == 1 and what == "its name":  # as where that number is another process's, with memory there
        system.memfd_create = lambda _, flags: os.memfd_create("offbeat-another", flags)
    if rank == 1 and what == "a map":
        maps.mmap = functools.partial(refuse, OSError, "Cannot allocate memory")
    with mock.patch.object(shared_memory, "os", system), mock.patch.object(shared_memory, "mmap", maps):
        sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
        os.environ.pop(shared_memory.SWITCH, None)
        if rank == 1 and what == "the limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        found = [added_up(sums, rank, dtype) for _ in range(2)]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    segments = mapped()
    sums.close()
    return found, segments


NOBODY = 1 << 22
"""More than the number of any process of Linux."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("what", ["the switch", "the call", "the limit", "a map", "its number", "its name"])
def test_where_one_member_has_no_such_memory_all_add_up_over_the_group(what, dtype):
    assert together(not_alike, 2, what, dtype) == [([[3.0], [3.0]], 0)] * 2


def laid_out_anew(rank, came):
    """Add up more numbers, and fewer, in turn; one member reads each sum as the other is in the next."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    gather, are_there = shared_memory._Shared.gather, shared_memory._are_there
    told = 0

    def tell():
        nonlocal told
        told += 1
        if rank == 0:
            with came.open("ab") as file:
                file.write(b".")

    def are_there_and_told(*arguments, **keywords):
        tell()
        return are_there(*arguments, **keywords)

    def late(shared):
        if rank == 1:
            wait_for(lambda: came.stat().st_size > told, timeout_s=60)
        gather(shared)

    found = []
    with (
        mock.patch.object(shared_memory, "_are_there", are_there_and_told),
        mock.patch.object(shared_memory._Shared, "gather", late),
    ):
        for size, value in [(2 * LARGE, 10.0), (LARGE, 33.0)] * 3:
            given = [torch.full((size,), value)]
            sums.begin(given)
            sums.finish()
            found.append(given[0].unique().tolist())
        tell()  # after the last there is no other
    sums.close()
    return found


def test_a_member_that_reads_a_sum_still_reads_it_while_another_begins_the_next_of_another_layout(tmp_path):
    assert together(laid_out_anew, 2, tmp_path / "came") == [[[20.0], [66.0]] * 3] * 2


@pytest.mark.parametrize(
    ("everybody", "why"),
    [
        ([("a", "1")], None),
        ([("a", "0")], "OFFBEAT_SHARED_MEMORY is 0 in the environment of all members"),
        ([("a", "1"), ("a", "0"), ("a", "1")], "OFFBEAT_SHARED_MEMORY is 0 in the environment of member 1"),
        (
            [("a", "0"), ("a", "1"), ("a", "0")],
            "OFFBEAT_SHARED_MEMORY is 0 in the environment of members 0, 2",
        ),
        ([("a", "1"), ("b", "1")], "members are on 2 machines"),
        ([("a", "1"), ("b", "0"), ("a", "1")], "members are on 2 machines"),
        ([(None, "1")], "on the device, or system, of all members there is no memory to share"),
        ([("a", "1"), (None, "0")], "on the device, or system, of member 1 there is no memory to share"),
    ],
)
def test_members_share_memory_where_all_are_on_one_machine_and_none_has_switched_it_off(everybody, why):
    assert shared_memory.why_apart(everybody) == why


def badly_set(rank):
    if rank == 1:
        os.environ[shared_memory.SWITCH] = "no"
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncGradientAccumulator(nn.Linear(1, 1), 1)
    os.environ.pop(shared_memory.SWITCH, None)
    return str(refused.value)


def logged(switch=None):
    """Make an accumulator where the environment has such a switch; give what is logged of sums."""
    if switch is not None:
        os.environ[shared_memory.SWITCH] = switch
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("offbeat")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        offbeat.AsyncGradientAccumulator(nn.Linear(1, 1), 1).close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        os.environ.pop(shared_memory.SWITCH, None)
    return [line for line in lines if line.startswith("sums go")]


def switched_off(rank, switches):
    return logged(switches[rank])


def on_machines(rank, machines):
    with mock.patch("offbeat.local.sums.machine", return_value=machines[rank]):
        return logged()


@pytest.mark.parametrize(
    ("machines", "why"),
    [
        ("ab", "members are on 2 machines"),
        ([None, "a"], "on the device, or system, of member 0 there is no memory to share"),
    ],
)
def test_why_members_do_not_share_memory_is_told_to_all(machines, why):
    for told in together(on_machines, 2, machines):
        assert told == [f"sums go through the process group, as between machines: {why}"]


@pytest.mark.parametrize(
    ("switches", "whose"),
    [
        ((None, "0"), "member 1"),
        (("0", "1", "0"), "members 0, 2"),
        (("0", "0"), "all members"),
        (("", None), None),
    ],
)
def test_that_a_switch_keeps_members_from_sharing_memory_is_told_to_all_with_whose_it_is(switches, whose):
    for told in together(switched_off, len(switches), switches):
        line = f"sums go through the process group, as between machines: {shared_memory.SWITCH} is 0 in"
        assert told == ([] if whose is None else [f"{line} the environment of {whose}"])


def test_a_switch_of_one_member_that_is_neither_on_nor_off_is_refused_in_all_by_its_name():
    first, second = together(badly_set, 2)
    assert first == second
    assert "OFFBEAT_SHARED_MEMORY is 'no' in the environment of member 1: give 1" in first


@pytest.mark.parametrize("values", [(3e38, 3e38), (math.inf, -math.inf), (math.nan, 1.0)])
def test_what_is_not_finite_is_no_warning_of_one_member(values):
    for ends in together(not_finite, 2, values):
        total = torch.tensor(values[0]) + torch.tensor(values[1])
        assert np.array_equal(ends, [total.item()] * 2, equal_nan=True)


def not_finite(rank, values):
    """Add up values in the chunk of each member, where a warning would be an error."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    given = torch.zeros(LARGE)
    given[0] = given[-1] = values[rank]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums.begin([given])
        sums.finish()
    sums.close()
    return given[[0, -1]].tolist()


def large_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 1 << 9), nn.Tanh(), nn.Linear(1 << 9, 1 << 10))


def batch(rank, number):
    random = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 6, generator=random), torch.randint(1 << 10, (4,), generator=random)


def trained(rank, switch):
    """Accumulate, and then average; give the parameters, and how many segments there were."""
    os.environ[shared_memory.SWITCH] = switch
    ours = large_model()
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    with (
        offbeat.AsyncGradientAccumulator(ours, 2, overlap=True) as accumulator,
        offbeat.AsyncModelAverager(
            ours, averaging_frequency=2, communication_backend="gloo", overlap=False
        ) as averager,
    ):
        os.environ.pop(shared_memory.SWITCH)
        for one in (accumulator, averager):
            for number in range(6):
                inputs, targets = batch(rank, number)
                one.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=nn.CrossEntropyLoss())
            one.flush()
        segments = mapped()
    return [p.detach().numpy() for p in ours.parameters()], segments, left()


def test_what_is_trained_through_memory_is_bit_for_bit_what_is_trained_over_the_group():
    (first, segments, left), (second, *_) = together(trained, 2, "1")
    (over_the_group, none, _), _ = together(trained, 2, "0")
    assert (segments, none, left) == (4, 0, 0)
    assert all(map(np.array_equal, first, second))
    assert all(map(np.array_equal, first, over_the_group))


def taking_no_notice(rank):
    """Begin a sum and go on with other things on the group, as who loads a state in mid-round does."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    found = []
    for number in range(20):
        sums.begin([torch.full((LARGE,), 1.0 + rank)])
        with sums.together() as group:
            told = torch.tensor([number + rank])
            distributed.all_reduce(told, group=group)
        found.append((told.item(), added_up(sums, rank)))
    sums.close()
    return found


def test_what_nobody_takes_notice_of_is_ended_before_anything_else_is_asked_of_the_group():
    assert together(taking_no_notice, 2) == [[(2 * number + 1, [3.0]) for number in range(20)]] * 2


def dying(rank, begins_first, ready, gone, said):
    """Be killed where the others wait for this member's part of a sum that is under way in them."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    given = [torch.full((LARGE,), 1.0)]
    sums.begin(given)
    sums.finish()
    if rank == 1:
        wait_for(ready.exists, timeout_s=60)
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    sums.begin(given)
    assert not sums.is_there()
    ready.touch()
    wait_for(gone.exists, timeout_s=60)
    told = []
    begins = functools.partial(sums.begin, given)
    for act in [begins, sums.finish, begins] if begins_first else [sums.finish, sums.finish, begins]:
        try:
            act()
        except ConnectionLostError as error:
            told.append(str(error))
    gc.disable()
    sums.close()
    told.append(str(left()))
    gc.enable()
    said.write_text("\n".join(told))


@pytest.mark.parametrize("begins_first", [False, True])
def test_a_member_that_is_killed_in_mid_sum_is_an_error_each_time_and_its_memory_goes(begins_first, tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 2, begins_first, tmp_path / "ready", tmp_path / "gone", tmp_path / "said")
    *told, left = (tmp_path / "said").read_text().splitlines()
    assert left == "0", "closed, nobody holds any"
    assert len(told) == 3
    assert all("numbers of all members could not be put together, for one is gone" in one for one in told)


def without_threads(rank):
    """Add up where no thread can be had."""
    left()
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    given = [torch.full((LARGE,), 1.0 + rank)]
    start = functools.partial(refuse, RuntimeError, "can't start new thread")
    with mock.patch.object(threading.Thread, "start", start):
        sums.begin(given)
        assert sums.is_there()
        sums.finish()
    sums.close()
    return given[0].unique().tolist(), mapped()


def test_where_no_thread_can_be_had_it_is_added_up_at_once():
    assert together(without_threads, 2) == [([3.0], 0)] * 2


def forked(rank):
    """Close in a forked child, which goes on with memory of its own."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    added_up(sums, rank)
    if (child := os.fork()) == 0:
        of_its_own = [torch.ones(LARGE) for _ in range(8)]
        sums.close()
        os._exit(0 if all(bool((one == 1).all()) for one in of_its_own) else 1)
    ended = os.waitpid(child, 0)[1]
    total = added_up(sums, rank)
    sums.close()
    return ended, total


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_forked_child_closes_is_there_for_its_parent_still():
    assert together(forked, 2) == [(0, [3.0])] * 2


def closing(rank, closed):
    """Close with a sum under way, to which the other one comes later."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    if rank == 1:
        wait_for(closed.exists, timeout_s=60)
        total = added_up(sums, rank)
        sums.close()
        return total
    given = [torch.full((LARGE,), 1.0 + rank)]
    sums.begin(given)
    group = sums.group
    thread = threading.Thread(target=sums.close)
    thread.start()
    wait_for(lambda: group not in distributed.distributed_c10d._world.pg_map, timeout_s=60)
    closed.touch()
    thread.join()
    wait_for(lambda: bool((given[0] == 3).all()), timeout_s=60)
    return given[0].unique().tolist()


def test_a_sum_that_is_under_way_as_a_member_closes_is_made_with_it_all_the_same(tmp_path):
    assert together(closing, 2, tmp_path / "closed") == [[3.0]] * 2


ENDING = """
import atexit, concurrent.futures, os, sys, threading
import torch
from torch import distributed, nn
import offbeat
from offbeat.local import shared_memory, sums

rank, what = int(sys.argv[1]), sys.argv[2]
offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=60)
sums.LEAVING_S = 40.0
if what == "a pair":
    model = nn.Linear(1, 1, bias=False)
    averager = offbeat.AsyncModelAverager(model, averaging_frequency=1, method="gossip")
    nn.init.constant_(model.weight, 2.0 - rank)
    begin = lambda: averager.step(1)

    def end():
        pairs = averager._turns.members._twos.pairs
        pairs.wait()
        return pairs.take().values.popitem()[1].tolist()
else:
    given = [torch.ones(shared_memory.LEAST if what == "a sum" else 1)]
    members = sums.Sums.among(distributed.group.WORLD, of="numbers", device=torch.device("cpu"))
    begin = lambda: members.begin(given)

    def end():
        members.finish()
        return given[0].unique().tolist()

if rank == 1:  # which comes to it as the other is at its end
    sys.stdin.readline()
    begin()
    print(end(), flush=True)
    sys.exit()

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def wait(futures, timeout, wait=concurrent.futures.wait):
    if not all(one.done() for one in futures):
        print("waits", flush=True)
    return wait(futures, timeout)

class Last:  # as Python is torn down
    def __del__(self, write=os.write, read=os.read):
        write(1, b"torn down\\n")
        read(0, 1)

sys.last = Last()
begin()
given = None  # who sums holds it
if what == "a closed one":
    sums.LEAVING_S = 0.2
    members.close()

@atexit.register
def as_from_3_12_on():
    threading.Thread.start = refuse
    concurrent.futures.wait = wait

sys.exit("of the user's")
"""


@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ("a sum", "waits\ntorn down\n"),
        ("a pair", "waits\ntorn down\n"),
        ("a small sum", "torn down\n"),
        ("a closed one", "torn down\n"),
    ],
)
def test_a_process_that_ends_in_mid_sum_takes_part_where_python_starts_no_thread_by_then(what, printed):
    def start(rank):
        return subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), what], env=os.environ | at, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with start(0) as ends, start(1) as comes:
        try:
            first = ends.stdout.readline()
            total, _ = comes.communicate("\n", timeout=60)
            later, told = ends.communicate("\n", timeout=60)
            assert total == "[2.0]\n"
            assert told.startswith("of the user's\n"), told
            assert (first + later, ends.returncode, comes.returncode) == (printed, 1, 0)
        finally:
            ends.kill()
            comes.kill()


ENDS = """
import atexit, sys
from torch import distributed
import offbeat
from offbeat.local import sums

offbeat.init_distributed("gloo", rank=0, world_size=1)
held, destroy = [], sums.destroy

def make():
    held.append(sums.Sums.among(distributed.group.WORLD, of="numbers"))

def breaks_off(group):
    sums.destroy = destroy
    raise KeyboardInterrupt

@atexit.register  # the first, and so the last to be called
def tell():
    print([one._group is None for one in held], flush=True)
    if sys.argv[1] == "made later":
        make()

make()
make()
if sys.argv[1] == "broken off":
    sums.destroy = breaks_off
"""


@pytest.mark.parametrize("how", ["broken off", "made later"])
def test_whatever_happens_as_a_process_ends_all_are_closed_and_it_does_end(how):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.stdout == "[True, True]\n", ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert ("KeyboardInterrupt" in ended.stderr) is (how == "broken off")


LEAVES = """
import signal, sys, torch
from torch import distributed
import offbeat
from offbeat.local import sums

signal.signal(signal.SIGINT, signal.default_int_handler)  # which what runs in the background ignores
rank, wait = int(sys.argv[1]), sums._Closing.wait
offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=60)

def tell(closing, timeout_s):
    print(timeout_s > 4, flush=True)
    wait(closing, timeout_s)

def make():
    return sums.Sums.among(distributed.group.WORLD, of="numbers", device=torch.device("cpu"))

held = [make(), make()]
if rank == 1:
    sys.stdin.readline()
sums._Closing.wait, sums.LEAVING_S = tell, float(sys.argv[2])
for one in held:
    one.begin([torch.ones(8)])
"""


@pytest.mark.parametrize("ends_by", ["Ctrl-C", "time"])
def test_the_wait_for_others_as_a_process_ends_is_one_for_all_sums_and_ctrl_c_ends_it(ends_by):
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, other = (
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), "50" if ends_by == "Ctrl-C" else "8"],
            env=os.environ | at, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    )  # fmt: skip
    with first, other:
        try:
            assert first.stdout.readline() == "True\n", first.stderr.read()
            if ends_by == "Ctrl-C":
                first.send_signal(signal.SIGINT)
            said, told = first.communicate(timeout=40)
            assert (said, first.returncode) == ("False\n", 0), told
            assert ("KeyboardInterrupt" in told) is (ends_by == "Ctrl-C")
        finally:
            first.kill()
            other.kill()


FORKED = """
import multiprocessing, os, sys

def member(rank, ends):
    import torch
    from torch import distributed
    import offbeat
    from offbeat.local.sums import Sums
    global members
    torch.set_num_threads(1)
    offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=60)
    members = Sums.among(distributed.group.WORLD, of="numbers", device=torch.device("cpu"))
    given = torch.ones(8)
    if rank == 1:
        ends.wait()
    members.begin([given])
    if rank == 0:
        ends.set()
    else:
        members.finish()
        print(given[0].item(), flush=True)

method = multiprocessing.get_context("fork")
both = [method.Process(target=member, args=(rank, ends)) for ends in [method.Event()] for rank in range(2)]
[one.start() for one in both]
[one.join() for one in both]
print([one.exitcode for one in both])
"""


def test_a_forked_process_that_ends_in_mid_sum_takes_part():
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = subprocess.run(
        [sys.executable, "-c", FORKED], env=os.environ | at, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert ended.stdout == "2.0\n[0, 0]\n", ended.stderr


def collected(rank):
    """Have Python's collector close the sums on the thread that adds up."""
    members = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    added_up(members, rank)
    if rank == 1:
        return added_up(members, rank)
    show, gone = shared_memory._Shared.show, threading.Event()

    def collects(shared):
        gone.wait(60)
        gc.collect()
        show(shared)

    given = [torch.full((LARGE,), 1.0 + rank)]
    longer_than_the_group_waits = mock.patch("offbeat.local.sums.LEAVING_S", 90.0)
    with mock.patch.object(shared_memory._Shared, "show", collects), longer_than_the_group_waits:
        members.begin(given)
        gc.disable()  # here it is to be in that thread
        members.itself = members
        is_there = weakref.ref(members)
        del members
        gone.set()
        wait_for(lambda: bool((given[0] == 3).all()), timeout_s=60)
        gc.enable()
    assert is_there() is None
    return given[0].unique().tolist()


def test_a_thread_on_which_sums_are_collected_does_not_wait_for_itself():
    assert together(collected, 2) == [[3.0]] * 2


def outlived(rank, port):
    """Go on and close where the group went with a default group, and there is another one by now."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    first = added_up(sums, rank)
    distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=60)
    again = added_up(sums, rank)
    sums.close()
    return first, again, left()


def test_sums_go_on_and_close_where_torch_has_forgotten_their_group_for_another():
    assert together(outlived, 2, free_port()) == [([3.0], [3.0], 0)] * 2


def interrupted(rank, asked):
    """Be interrupted in the wait for the other member, and wait again."""
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    if rank == 1:
        wait_for(asked.exists, timeout_s=60)
        return added_up(sums, rank), False
    given = [torch.full((LARGE,), 1.0 + rank)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    sums.begin(given)
    was_heard = False
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        sums.finish()
    except KeyboardInterrupt:
        was_heard = not sums.is_there()
    signal.signal(signal.SIGALRM, before)
    asked.touch()
    sums.finish()
    return given[0].unique().tolist(), was_heard


def test_a_wait_that_is_broken_off_is_heard_at_once_and_loses_nothing(tmp_path):
    assert together(interrupted, 2, tmp_path / "asked") == [([3.0], True), ([3.0], False)]


OPENING = """
import os, sys
os.setuid(65534)
for number in sys.argv[2:]:
    try:
        os.open(f"/proc/{sys.argv[1]}/fd/{number}", os.O_RDONLY)
    except PermissionError:
        print("refused")
"""
"""By another user of the machine."""


F_GET_SEALS, F_SEAL_SHRINK = 1034, 2
"""On Linux; a Python may have no names for them."""


def looked_at(rank):
    """Tell how segments are mapped, and what another user gets who opens one's own by its descriptor."""
    left()
    sums = Sums.among(distributed.group.WORLD, of="numbers", device=CPU)
    sums.begin([torch.ones(LARGE)])
    sums.finish()
    lines = Path("/proc/self/maps").read_text().splitlines()
    modes = sorted(line.split()[1] for line in lines if "/memfd:offbeat-" in line)
    open_now = [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]  # not what listed them
    numbers = [one.name for one in open_now if "memfd:offbeat-" in str(one.readlink())]
    for one in open_now:
        if one.name in numbers:  # what others have mapped cannot be taken away
            assert fcntl.fcntl(int(one.name), F_GET_SEALS) & F_SEAL_SHRINK
    told = ""
    if os.geteuid() == 0:  # else nobody can be another
        command = [sys.executable, "-c", OPENING, str(os.getpid()), *numbers]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sums.close()
    return modes, len(numbers), told.split()


def test_nobody_but_its_user_opens_it_and_members_map_one_anothers_to_read():
    for modes, num, told in together(looked_at, 2):
        assert modes == ["r--s", "rw-s"]
        assert num > 0
        if os.geteuid() == 0:
            assert told == ["refused"] * num
    if os.geteuid() != 0:
        pytest.skip("how they are mapped is as it is to be; what another user gets only root can try")
