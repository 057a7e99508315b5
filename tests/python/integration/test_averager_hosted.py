"""The server that a member has started for all stays as long as it is needed, and no longer."""

import subprocess
import sys

import pytest

import offbeat
from support.ports import free_port
from support.waiting import wait_for

pytestmark = pytest.mark.timeout(100)

BEGIN = """
import gc, logging, os, sys, weakref
import numpy as np
import offbeat
from torch import nn

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}

def host(model, *, world_size=1, rank=0):
    return offbeat.AsyncModelAverager(model, world_size, rank, communication_backend="tcp")
"""


@pytest.mark.parametrize("is_held", [False, True])
def test_a_process_that_looks_on_at_its_own_server_does_not_wait_for_itself(run_python, is_held):
    code = f"""{BEGIN}
def run():
    averager = host(nn.Linear(2, 2))
    looks = offbeat.Client(f"127.0.0.1:{{sys.argv[1]}}", "looks")
    averager.flush()
    return averager, looks

logging.getLogger("offbeat").addHandler(logging.StreamHandler(sys.stdout))
held = run()
if not {is_held}:
    del held
print("ends")
"""
    said = run_python(code, str(free_port())).splitlines()
    # And tells of no wait. Who looks on is stalled after a lease, which is as long as `flush` waits for it.
    after = said[said.index("ends") + 1 :]
    assert [text for text in after if "is alive but makes no progress" not in text] == []


def test_after_a_try_that_failed_a_process_may_host_again_and_nothing_of_the_first_is_kept(run_python):
    code = f"""{BEGIN}
models = []
def run(fails):
    model = nn.Linear(2, 2)
    models.append(weakref.ref(model))
    averager = host(model)
    if fails:
        raise RuntimeError("out of memory")
    averager.flush()

for fails in (True, False):
    try:
        run(fails)
    except RuntimeError as error:
        print(error)
    gc.collect()
print([model() for model in models])
"""
    said = run_python(code, str(free_port())).splitlines()
    assert said == ["out of memory", "[None, None]"]


FAILS = f"""{BEGIN}
elsewhere = offbeat.Client(sys.argv[2], "amy")
elsewhere.init({{"w": np.zeros(3, np.float32)}})
averager = host(nn.Linear(2, 2))
print("met", flush=True)
sys.stdin.readline()
raise RuntimeError("training failed")
"""


def test_while_it_waits_for_others_at_its_end_who_is_elsewhere_has_said_how_it_ends(serve):
    """A server that still waits keeps no other from being told, nor does Ctrl-C in that wait."""
    server, port = serve(), free_port()

    def amys():
        return [worker for worker in server.status()["workers"] if worker["id"] == "amy"]

    with (
        subprocess.Popen(
            [sys.executable, "-c", FAILS, str(port), server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            with offbeat.Client(f"127.0.0.1:{port}", "stays", contribution="delta"):
                assert process.stdout.readline() == "met\n"
                process.stdin.write("\n")
                process.stdin.flush()
                wait_for(lambda: amys()[0]["state"] == "left")
                assert "RuntimeError: training failed" in amys()[0]["cause"]
                assert process.poll() is None, "it waits for who stays"
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
