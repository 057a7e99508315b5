"""A server that is killed, and one that goes on from its checkpoint: real processes, real files."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

import offbeat
from offbeat import optim
from offbeat._offbeat import inspect_checkpoints
from offbeat.cli import checkpoint_report
from offbeat.errors import CheckpointError, ConfigError, ModelMismatchError, StateError
from support.waiting import wait_for

MODEL = {"w": np.zeros(70_000, np.float32), "b": np.zeros(3, np.float32)}
ONES = {name: np.ones_like(value) for name, value in MODEL.items()}

SERVER = """
import sys
import numpy as np
import offbeat
server = offbeat.ParameterServer(
    {"w": np.zeros(70_000, np.float32), "b": np.zeros(3, np.float32)},
    optimizer=offbeat.optim.Adam(lr=0.1),
    checkpoint_dir=sys.argv[1],
    checkpoint_frequency=1,
)
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.stop()
"""


def made(place, **keywords):
    return offbeat.ParameterServer(MODEL, optimizer=optim.SGD(lr=1.0), checkpoint_dir=place, **keywords)


@contextmanager
def running(place):
    """Run a server in a process of its own; give the process and its address."""
    command = [sys.executable, "-c", SERVER, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def until_the_first(server):
    """Wait for the checkpoint of the model as it was given."""
    wait_for(lambda: server.status()["checkpoints"]["version"] == 0)


def push(address, times, worker_id="a"):
    """Push ones so often; return what the model is then, with the last receipt."""
    with offbeat.Client(address, worker_id=worker_id) as client:
        client.pull()
        for _ in range(times):
            receipt = client.push(ONES)
            assert receipt.applied
            client.pull()
        return client.pull(), receipt, client.status()


def test_a_killed_server_that_is_started_again_goes_on_with_the_same_bits(tmp_path):
    kept, steady = tmp_path / "kept", tmp_path / "steady"
    addresses, run_ids = set(), set()
    with running(steady) as (_, address):
        expected, _, _ = push(address, 15)
    for life in range(3):
        with running(kept) as (process, address):
            model, receipt, status = push(address, 5)
            assert (receipt.version, status["term"]) == (5 * life + 5, life + 1)
            addresses.add(address)
            run_ids.add(status["run_id"])
            with offbeat.Client(address, worker_id="b") as client:
                wait_for(lambda: client.status()["checkpoints"]["version"] == receipt.version)  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait(20)
    assert len(addresses) == len(run_ids) == 1
    for name, value in expected.items():
        assert np.array_equal(model[name], value)


def test_a_server_that_is_stopped_has_kept_everything(tmp_path):
    with made(tmp_path, checkpoint_frequency=10**6) as server:
        push(server.address, 7)
    assert server.status()["checkpoints"]["version"] == 7
    with made(tmp_path, resume="must") as again:
        assert again.status()["version"] == 7
        assert np.array_equal(again.state_dict()["w"], np.full(70_000, -7, np.float32))


def test_a_last_checkpoint_that_could_not_be_written_is_told_after_the_stop(tmp_path):
    with made(tmp_path, checkpoint_frequency=10**6) as server:
        until_the_first(server)
        (tmp_path / ".new").write_text("in the way")
        push(server.address, 1)
        assert server.status()["checkpoints"]["failed"] is None
    told = server.status()["checkpoints"]
    assert told["version"] == 0
    assert f"{tmp_path}/.new" in told["failed"]


def test_no_model_needs_to_be_given_again(tmp_path):
    with made(tmp_path) as server:
        push(server.address, 2)
    with offbeat.ParameterServer(checkpoint_dir=tmp_path) as again:
        assert again.status()["optimizer"]["summary"].startswith("SGD(lr=1")
        model, receipt, _ = push(again.address, 1)
        assert receipt.version == 3
        assert (model["b"] == -3).all()


def test_a_time_is_a_frequency_too(tmp_path):
    with made(tmp_path, checkpoint_frequency="0.01s") as server:
        push(server.address, 3)
        wait_for(lambda: server.status()["checkpoints"]["version"] == 3)


def test_any_tool_reads_the_model_of_a_checkpoint(tmp_path):
    from safetensors.numpy import load_file

    with made(tmp_path) as server:
        push(server.address, 2)
    newest = server.status()["checkpoints"]["path"]
    assert (load_file(f"{newest}/model.safetensors")["w"] == -2).all()
    manifest = json.loads((tmp_path / newest / "manifest.json").read_text())
    assert manifest["book"]["version"] == 2
    assert manifest["offbeat"] == offbeat.__version__


def test_a_directory_that_cannot_be_used_is_told(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint_dir is .*/file.*, which is a file"):
        made(in_the_way)
    with pytest.raises(CheckpointError, match=r"cannot create .*/file/kept"):
        made(in_the_way / "kept").start()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* to go on from"):
        made(tmp_path / "none", resume="must").start()
    kept = tmp_path / "kept"
    with made(kept) as server:
        until_the_first(server)
        push(server.address, 1)
        with pytest.raises(CheckpointError, match="in use by another server"):
            made(kept).start()
    for folder in kept.glob("checkpoint-*"):
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(1000)
            file.write(b"!")
    with pytest.raises(CheckpointError, match=r"none of the 2 .*model.safetensors is damaged: its SHA-256"):
        made(kept).start()


def test_what_does_not_fit_the_checkpoint_is_refused(tmp_path):
    with made(tmp_path) as server:
        until_the_first(server)
        push(server.address, 1)
    with pytest.raises(ConfigError, match="is of run"):
        made(tmp_path, run_id="another").start()
    less = {"w": MODEL["w"]}
    for model, difference in [
        ({"v": np.zeros(2, np.float32)}, "is nothing, and was b float32"),
        (less, "is nothing, and was b float32"),
        (MODEL | {"c": np.zeros(1, np.float32)}, "is c float32.*, and was nothing there"),
    ]:
        other = offbeat.ParameterServer(model, checkpoint_dir=tmp_path)
        with pytest.raises(
            ModelMismatchError, match=rf"not that of the checkpoint.*{difference}.*resume=\"never\""
        ):
            other.start()
    with offbeat.ParameterServer(dict(reversed(MODEL.items())), checkpoint_dir=tmp_path) as same:
        assert same.status()["version"] == 1, "the order of tensors is the checkpoint's"
        assert list(same.state_dict()) == list(MODEL)
    with offbeat.ParameterServer(
        {"v": np.zeros(2, np.float32)}, checkpoint_dir=tmp_path, resume="never"
    ) as anew:
        assert anew.status()["version"] == 0
    assert len(list(tmp_path.glob("earlier-checkpoint-*"))) >= 2


def test_a_run_that_begins_where_another_was_is_warned_of(tmp_path, caplog):
    caplog.set_level("INFO", "offbeat")

    def told(words):
        return [record for record in caplog.records if words in record.getMessage()]

    with made(tmp_path, checkpoint_frequency="5m") as server:
        until_the_first(server)
        assert server.status()["checkpoints"]["every"] == "300s"
    assert not told("a new run begins")
    for folder in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(folder)
    with made(tmp_path) as server:
        assert server.status()["version"] == 0
    assert [record.levelname for record in told("a new run begins")] == ["WARNING"]


@pytest.mark.parametrize("transaction", ["fragment", "model"])
def test_a_server_goes_back_to_a_checkpoint_and_the_run_goes_on(tmp_path, transaction):
    adam = offbeat.optim.Adam(lr=0.1)
    server = offbeat.ParameterServer(
        {"w": np.zeros(5, np.float32)},
        optimizer=adam,
        checkpoint_dir=tmp_path,
        checkpoint_frequency=1,
        transaction=transaction,
    )
    with server, offbeat.Client(server.address) as client:
        parameters = client.pull()

        def push(value):
            return client.push_pull({"w": np.full(5, value, np.float32)}, out=parameters)

        for n in range(3):
            assert push(n + 1).applied
            wait_for(lambda n=n: server.status()["checkpoints"]["version"] == n + 1)
        then = server.state_dict()["w"].tolist()
        undisturbed = push(4.0)
        after = parameters["w"].copy()
        wait_for(lambda: server.status()["checkpoints"]["version"] == 4)
        assert server.rollback(3) == 3
        assert server.state_dict()["w"].tolist() == then
        late = push(9.0)
        assert (late.applied, late.reason, late.term) == (False, "server_rolled_back", undisturbed.term + 1)
        assert parameters["w"].tolist() == then
        again = push(4.0)
        assert (again.applied, again.version) == (True, 5)
        assert (parameters["w"] == after).all(), "the optimizer remembers what it had then"
        with pytest.raises(CheckpointError, match=r"no checkpoint of version 77 .* of versions \["):
            server.rollback(77)
        with pytest.raises(ConfigError, match="version is -1"):
            server.rollback(-1)
    with (
        offbeat.ParameterServer({"w": np.zeros(5, np.float32)}, optimizer=adam) as keeps_none,
        pytest.raises(StateError, match="keeps no checkpoints"),
    ):
        keeps_none.rollback()


def test_a_rollback_can_be_undone_though_it_was_written_at_the_same_version(tmp_path):
    add = offbeat.optim.SGD(lr=1.0)
    with offbeat.ParameterServer(
        {"w": np.zeros(5, np.float32)}, optimizer=add, checkpoint_dir=tmp_path, checkpoint_frequency=1
    ) as server:
        with offbeat.Client(server.address) as client:
            client.pull()
            for version in (1, 2):
                assert client.push_pull({"w": -np.ones(5, np.float32)}).version == version
                wait_for(lambda version=version: server.status()["checkpoints"]["version"] == version)
        for version in (1, 2, 1):  # at version 2 each
            assert server.rollback(version) == version
            assert server.state_dict()["w"].tolist() == [version] * 5
        told = json.loads(inspect_checkpoints(str(tmp_path)))["checkpoints"][0]["checkpoint"]
        assert (told["version"], told["gone_back_to"]) == (2, 1)
        report = checkpoint_report.report(json.loads(inspect_checkpoints(str(tmp_path))), tmp_path)
        assert "2 (1 again)" in report
        with offbeat.Client(server.address) as client:
            client.pull()
            assert client.push({"w": -np.ones(5, np.float32)}).version == 3
        wait_for(lambda: server.status()["checkpoints"]["version"] == 3)
        told = json.loads(inspect_checkpoints(str(tmp_path)))["checkpoints"][0]["checkpoint"]
        assert (told["version"], told["gone_back_to"]) == (3, None)


GOES_BACK = """
import os, signal, sys
import numpy as np
import offbeat
server = offbeat.ParameterServer(
    {"w": np.zeros(5, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0), checkpoint_dir=sys.argv[1]
)
server.start()
with offbeat.Client(server.address) as client:
    client.pull()
    assert client.push({"w": np.ones(5, np.float32)}).applied
if sys.argv[2] == "rollback":
    server.rollback(0)
else:
    server.load_state_dict({"w": np.full(5, 7.0, np.float32)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("by", "value"), [("rollback", 0.0), ("load_state_dict", 7.0)])
def test_a_server_that_is_killed_right_after_a_rollback_goes_on_from_it(tmp_path, by, value):
    # The first checkpoint, of version 0, has to be there before anything is gone back to.
    with offbeat.ParameterServer({"w": np.zeros(5, np.float32)}, checkpoint_dir=tmp_path) as first:
        until_the_first(first)
        first.stop(restarting=True)
    done = subprocess.run([sys.executable, "-c", GOES_BACK, str(tmp_path), by], timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL
    with offbeat.ParameterServer(
        optimizer=optim.SGD(lr=1.0), checkpoint_dir=tmp_path, resume="must"
    ) as again:
        assert again.state_dict()["w"].tolist() == [value] * 5
        assert again.status()["version"] == 1, "versions do not go back"


def test_a_rollback_that_no_checkpoint_has_stands_and_is_warned_of(tmp_path, caplog):
    def warned():
        return [r for r in list(caplog.records) if "no checkpoint has the values" in r.getMessage()]

    with caplog.at_level("WARNING", logger="offbeat"), made(tmp_path) as server:
        until_the_first(server)
        push(server.address, 1)
        wait_for(lambda: server.status()["checkpoints"]["version"] == 1)  # nobody is there any more
        in_the_way = tmp_path / ".new"
        in_the_way.write_text("in the way")
        assert server.rollback(0) == 0
        assert not server.state_dict()["w"].any()
        wait_for(warned)
        (told,) = warned()
        assert told.levelname == "WARNING"
        assert f"directory={tmp_path} " in told.getMessage()
        assert f"cannot remove {in_the_way}" in told.getMessage()
        in_the_way.unlink()
    with made(tmp_path) as again:
        assert not again.state_dict()["w"].any()
