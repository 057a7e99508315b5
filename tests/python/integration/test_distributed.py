"""`init_distributed` in real processes, as torchrun starts them and alone."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.distributed import _device_of
from offbeat.errors import ConfigError, ConnectError, StateError
from support.averaging import warned
from support.ports import free_port

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "PET_NODE_RANK")

GROUP = """
import torch
import offbeat
rank, world_size = offbeat.init_distributed({backend!r}, timeout_s=60)
if torch.distributed.is_initialized():
    one = torch.tensor([1.0 + rank])
    torch.distributed.all_reduce(one)
    print(f"{{rank}} of {{world_size}}: {{one.item()}}", flush=True)
else:
    print(f"{{rank}} of {{world_size}}: no group", flush=True)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_group():
    from torch import distributed

    yield distributed
    if distributed.is_initialized():
        distributed.destroy_process_group()


TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--standalone")
LAUNCH = ("offbeat.cli.main", "launch", "--workers", "2")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("launcher", "backend", "told"),
    [(TORCHRUN, "gloo", "3.0"), (TORCHRUN, "tcp", "no group"), (LAUNCH, "gloo", "3.0")],
)
def test_processes_know_their_ranks_and_meet_where_they_are_to(launcher, backend, told, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GROUP.format(backend=backend))
    ended = subprocess.run(
        [sys.executable, "-m", *launcher, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"{rank} of 2: {told}" in ended.stdout


LEFT = """
from contextlib import suppress
from pathlib import Path
import torch
from torch import distributed, nn
import offbeat
from support.waiting import wait_for

def threads():
    names = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended since
            names.add(path.read_text())
    return {name for name in names if "gloo" in name}

offbeat.init_distributed("gloo")
model = nn.Linear(1, 1)
model(torch.ones(1)).backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
wait_for(threads)
distributed.destroy_process_group()
wait_for(lambda: not threads())
"""
"""A step imports what keeps the default group, if one stands by then."""


@pytest.mark.slow
def test_a_group_that_is_destroyed_leaves_no_threads_that_could_abort_the_process_at_its_end():
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", LEFT], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


FORKS = """
import os, sys, torch
from torch import distributed
import offbeat
from offbeat.local.sums import Sums

offbeat.init_distributed("gloo", rank=0, world_size=1)
if sys.argv[1] == "sums":
    held = Sums.among(distributed.group.WORLD, of="numbers", device=torch.device("cpu"))
    held.begin([torch.ones(1 << 20)])
    held.finish()
distributed.all_reduce(torch.ones(3))
if (child := os.fork()) == 0:
    sys.exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the group", "sums"])
def test_a_forked_child_ends_without_what_it_has_no_threads_for(what):
    ended = subprocess.run(
        [sys.executable, "-c", FORKS, what], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


@pytest.mark.parametrize(
    ("local_rank", "num_devices", "device"), [(0, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3)]
)
def test_each_process_of_a_machine_has_a_device_of_its_own(local_rank, num_devices, device):
    assert _device_of(local_rank, num_devices) == device


def test_more_processes_than_devices_are_refused():
    with pytest.raises(ConfigError, match="process 4 of its machine, counted from 0, and torch sees 4 CUDA"):
        _device_of(4, 4)


def test_a_batch_script_that_takes_itself_for_the_only_process_is_warned(monkeypatch, caplog):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert offbeat.init_distributed() == (0, 1)
    assert "SLURM_NTASKS is 8, and this process was not started by srun" in caplog.text


def test_a_worker_of_a_tfjob_that_takes_itself_for_the_only_process_is_warned(monkeypatch, caplog):
    cluster = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    assert offbeat.init_distributed() == (0, 1)
    assert "TF_CONFIG names 2 tasks, and is not read here" in caplog.text
    caplog.clear()
    assert offbeat.init_distributed(rank=1, world_size=2) == (1, 2)
    assert not caplog.text


def test_alone_on_tcp_nothing_is_opened_and_what_was_chosen_is_logged(caplog, no_group):
    with caplog.at_level(logging.INFO, logger="offbeat"):
        assert offbeat.init_distributed() == (0, 1)
    assert not no_group.is_initialized()
    assert caplog.messages == ["this is process 0 of 1, by nobody, so it is the only one"]


def test_one_process_is_a_group_of_its_own_without_an_address(no_group):
    assert offbeat.init_distributed("gloo") == (0, 1)
    assert (no_group.get_rank(), no_group.get_world_size(), no_group.get_backend()) == (0, 1, "gloo")
    assert offbeat.init_distributed("gloo") == (0, 1), "the second call finds it there"
    with pytest.raises(StateError, match=r"process 1 of 2 is asked for, .* this is process 0 of 1"):
        offbeat.init_distributed("gloo", rank=1, world_size=2)


def test_another_backend_than_that_of_the_group_there_is_is_refused(monkeypatch, no_group):
    offbeat.init_distributed("gloo")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(StateError, match="backend is 'nccl', and torch has a process group of cpu:gloo"):
        offbeat.init_distributed("nccl")


def test_nccl_without_cuda_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device here: take 'tcp', or 'gloo'"):
        offbeat.init_distributed("nccl")


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        offbeat.init_distributed("mpi", rank=-1, timeout_s="long")
    told = str(caught.value)
    for what in ("backend is 'mpi': give one of 'tcp', 'gloo', 'nccl'", "rank is -1", "timeout_s is 'long'"):
        assert what in told


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_no_time_at_all_to_wait_is_refused(backend):
    with pytest.raises(ConfigError, match="timeout_s is 0, in which nobody can be met"):
        offbeat.init_distributed(backend, timeout_s=0)


def test_nccl_without_cuda_hides_nothing_else(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device here: .*rank is -1"):
        offbeat.init_distributed("nccl", rank=-1)


def test_a_mistyped_keyword_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'timeout'; did you mean 'timeout_s'\?"):
        offbeat.init_distributed("gloo", timeout=60)


def test_a_time_to_wait_without_a_group_is_told_of():
    with warned() as told:
        assert offbeat.init_distributed("tcp", timeout_s=60) == (0, 1)
    assert [text for text in told if text.startswith("timeout_s is 60 and backend 'tcp'")] == told
    assert len(told) == 1


def test_a_group_of_several_needs_a_place_to_meet():
    with pytest.raises(
        ConfigError, match=r"world_size is 2, by the rank and world_size given, .* set MASTER_ADDR"
    ):
        offbeat.init_distributed("gloo", rank=0, world_size=2)


def test_others_that_do_not_come_are_told_with_place_and_remedy(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ConnectError, match=rf"process 0 of 2 did not meet the others at 127.0.0.1:{port}: "):
        offbeat.init_distributed("gloo", rank=0, world_size=2, timeout_s=1)


MEET = """
import logging
import torch
import offbeat
from offbeat.errors import ConnectError
logging.basicConfig(format="%(message)s")
try:
    print(offbeat.init_distributed("gloo", timeout_s={timeout_s}), flush=True)
except ConnectError as error:
    print(error, flush=True)
"""


def _meet(tmp_path, *ranks_and_sizes, timeout_s=30, is_last_late=False):
    """Let processes meet that say that they are of so many; give what each printed.

    Where the last is late, it is started when the one before it has ended.
    """
    script = tmp_path / "meet.py"
    script.write_text(MEET.format(timeout_s=timeout_s))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    try:
        for rank, size in ranks_and_sizes:
            if is_last_late and len(started) == len(ranks_and_sizes) - 1:
                started[-1].wait(timeout=60)
            said = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            started.append(
                subprocess.Popen(
                    [sys.executable, script],
                    env=os.environ | place | said,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return [one.communicate(timeout=60)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sizes", [(3, 3, 4), (4, 3, 3), (3, 4, 3)])
def test_who_says_another_world_size_is_named_in_all_before_torch_would_wait_for_ever(sizes, tmp_path):
    told = _meet(tmp_path, *enumerate(sizes))
    usual = 3
    (odd,) = (rank for rank, size in enumerate(sizes) if size != usual)
    for rank, text in enumerate(told):
        # The odd one, and all others where rank 0 is it, hear of the first that says otherwise.
        other, theirs = (0 if odd else 1, usual) if rank == odd else (odd, 4)
        assert f"process {other} says WORLD_SIZE {theirs}, and this one {sizes[rank]}: " in text, told


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_is_beyond_what_rank_0_says_is_told_and_the_others_go_on(tmp_path):
    # Rank 1 comes late, so that rank 0 is there until rank 2 has asked it.
    told = _meet(tmp_path, (0, 2), (2, 3), (1, 2), is_last_late=True)
    assert "process 0 says WORLD_SIZE 2, and this one 3: this is process 2" in told[1], told
    assert ("(0, 2)" in told[0], "(1, 2)" in told[2]) == (True, True), told


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_is_there_twice_is_told_and_who_does_not_come_is_named(tmp_path):
    told = _meet(tmp_path, (0, 3), (1, 3), (1, 3), timeout_s=10)
    assert ["there has been another process 1, of pid" in text for text in told].count(True) == 1
    assert "process 0 of 3 did not meet the others" in told[0]
    assert "process 2 has not come" in told[0]
