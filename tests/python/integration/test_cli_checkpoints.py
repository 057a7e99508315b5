"""`offbeat server --checkpoint-dir`: the same command goes on, whatever ended the one before."""

import json
import shlex
import shutil
import signal
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import offbeat
from offbeat._offbeat import fetch_status
from support.command import command
from support.waiting import wait_for

ZEROS = {"w": np.zeros((2, 3), np.float32)}
ONES = {"w": np.ones((2, 3), np.float32)}


def pushes(server, times):
    """Push ones so often; give the run's id, and the version of its last push."""
    address = server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]
    with offbeat.Client(address) as client:
        client.pull()
        versions = [client.push(ONES).version for _ in range(times)]
        return client.status()["run_id"], versions[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_same_command_goes_on(tmp_path, number):
    model, kept, saved = tmp_path / "model.safetensors", tmp_path / "kept", tmp_path / "saved.safetensors"
    save_file(ZEROS, model)
    arguments = ["--model", str(model), "--optimizer", "SGD(lr=1.0)", "--checkpoint-dir", str(kept)]
    arguments += ["--save", str(saved), "--port", "0", "--keep-running"]
    runs = []
    for _ in range(3):
        with command("server", *arguments) as server:
            runs.append(pushes(server, 2))
            server.signal(number)
            assert server.ends() == 0, server.said
    assert [version for _, version in runs] == [2, 4, 6]
    assert len({run_id for run_id, _ in runs}) == 1
    assert (load_file(saved)["w"] == -6).all()
    with command("server", *arguments, "--resume", "never") as server:
        assert pushes(server, 1) not in runs
        server.signal(number)
        assert server.ends() == 0, server.said


def joining(server):
    """Give the address and the token of the line by which a worker joins."""
    words = shlex.split(server.line("OFFBEAT_SERVER="))[:2]
    return dict(word.split("=", 1) for word in words).values()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_token_that_was_made_up_is_taken_again_by_the_same_command(tmp_path, number):
    model, kept = tmp_path / "model.safetensors", tmp_path / "kept"
    save_file(ZEROS, model)
    arguments = ["--model", str(model), "--optimizer", "SGD(lr=1.0)", "--checkpoint-dir", str(kept)]
    arguments += ["--port", "0", "--host", "127.0.0.1", "--keep-running", "--new-token"]
    with command("server", *arguments) as server:
        server.line("The token is new, and kept there for the next start")
        address, token = joining(server)
        assert stat.S_IMODE((kept / "token").stat().st_mode) == 0o600
        wait_for((kept / "checkpoint-000001").exists)
        client = offbeat.Client(address, token=token)
        client.pull()
        server.signal(number)
        assert server.ends() == (0 if number == signal.SIGTERM else -number), server.said
    with command("server", *arguments) as server:
        client.pull()  # it has waited, and is let in
        assert client.push(ONES).applied
        client.close()
        server.line("The token is the one that is kept there")
        assert list(joining(server)) == [address, token]
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    for action in ("verify", "inspect"):
        with command("checkpoint", action, str(kept)) as told:
            assert told.ends() == 0, told.said
        assert "/token" not in told.said
        assert token not in told.said
    with command("server", *arguments, "--resume", "never") as server:  # of the run, and not of the door
        assert list(joining(server))[1] == token


def test_a_token_that_others_may_have_read_opens_no_door(tmp_path):
    arguments = ["--port", "0", "--host", "127.0.0.1", "--checkpoint-dir", str(tmp_path), "--new-token"]
    with command("server", *arguments) as server:
        _, token = joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    (tmp_path / "token").chmod(0o644)
    with command("server", *arguments) as server:
        assert server.ends() == 11, server.said
    assert f"{tmp_path}/token may be read or changed by others (mode 0644)" in server.said
    assert token not in server.said
    assert "joins" not in server.said
    (tmp_path / "token").unlink()
    with command("server", *arguments) as server:
        assert list(joining(server))[1] != token


def test_a_start_whose_token_cannot_be_kept_replaces_no_model_that_was_saved_before(tmp_path):
    model, saved, kept = tmp_path / "model.safetensors", tmp_path / "best.safetensors", tmp_path / "kept"
    save_file(ZEROS, model)
    saved.write_bytes(b"of a run before")
    (kept / "token.new").mkdir(parents=True)
    arguments = ["--port", "0", "--checkpoint-dir", str(kept), "--new-token", "--model", str(model)]
    with command("server", *arguments, "--save", str(saved)) as server:
        assert server.ends() == 11, server.said
    assert (
        f"{kept}/token, where the token of --new-token is kept for the next start, cannot be" in server.said
    )
    assert saved.read_bytes() == b"of a run before"
    assert not (kept / "token").exists()


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(tmp_path):
    model = tmp_path / "model.safetensors"
    save_file(ZEROS, model)
    kept, saved = tmp_path / "kept", tmp_path / "saved.safetensors"
    arguments = ["--model", str(model), "--optimizer", "SGD(lr=1.0)", "--checkpoint-dir", str(kept)]
    with command("server", *arguments, "--port", "0", "--save", str(saved), "--keep-running") as server:
        wait_for((kept / "checkpoint-000001").exists)
        (kept / ".new").write_text("in the way")
        pushes(server, 1)
        server.signal(signal.SIGTERM)
        assert server.ends() == 11, server.said
    assert "the last checkpoint could not be written" in server.said
    assert (load_file(saved)["w"] == -1).all()


def test_what_cannot_be_gone_on_with_is_told_with_its_code(tmp_path):
    with command("server", "--port", "0", "--checkpoint-dir", str(tmp_path), "--resume", "must") as server:
        assert server.ends() == 11, server.said
    assert f"there is no checkpoint in {tmp_path} to go on from: look at --checkpoint-dir, or" in server.said
    with command("server", "--port", "0", "--checkpoint-frequency", "5m") as server:
        assert server.ends() == 2, server.said
    assert "--checkpoint-frequency is '5m', and there is no --checkpoint-dir: say" in server.said


@pytest.mark.parametrize(
    ("given", "meant"), [("~/kept", "home/kept"), ("./~nobody-of-that-name", "~nobody-of-that-name")]
)
def test_a_home_that_the_shell_left_as_it_is_is_one_s_home(tmp_path, given, meant):
    for place in ("home/kept", "~nobody-of-that-name"):
        (tmp_path / place).mkdir(parents=True)
    arguments = ["--port", "0", f"--checkpoint-dir={given}", "--resume", "must"]
    with command("server", *arguments, cwd=tmp_path, HOME=str(tmp_path / "home")) as server:
        assert server.ends() == 11, server.said
    assert f"there is no checkpoint in {tmp_path / meant} to go on from" in server.said


@pytest.mark.parametrize("has_one_finished", [True, False])
def test_after_a_restart_nobody_is_waited_for_longer_than_was_said_and_who_is_missing_is_told(
    tmp_path, has_one_finished
):
    model, kept = tmp_path / "model.safetensors", tmp_path / "kept"
    save_file(ZEROS, model)
    arguments = ["--model", str(model), "--optimizer", "SGD(lr=1.0)", "--checkpoint-dir", str(kept)]
    arguments += ["--checkpoint-frequency", "1", "--port", "0"]
    with command("server", *arguments) as server:
        address = server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]
        there = offbeat.Client(address, worker_id="there", reconnect_timeout_s=0)
        if has_one_finished:
            with offbeat.Client(address, worker_id="done") as done:
                done.pull()
                done.push(ONES)
        there.pull()
        version = there.push(ONES).version
        wait_for(lambda: there.status()["checkpoints"]["version"] == version)
        server.signal(signal.SIGKILL)
        server.ends()
    with command("server", *arguments, "--linger", "0.1", "--rejoin-grace", "1") as server:
        assert server.ends() == (0 if has_one_finished else 8), server.said
    then = ", then 1 s for anybody" if has_one_finished else ""
    assert f"nobody is there, 1 lost: waiting up to 5 s for them{then}\n" in server.said
    missing = "there: has not come back since the server was started again"
    if has_one_finished:
        missing = "the work is done without a worker that was lost worker=there"
    assert missing in server.said


def test_what_was_done_is_kept_when_all_have_gone_though_no_checkpoint_was_due(tmp_path):
    model, kept, saved = tmp_path / "model.safetensors", tmp_path / "kept", tmp_path / "saved.safetensors"
    save_file(ZEROS, model)
    arguments = [
        "--model",
        str(model),
        "--optimizer",
        "SGD(lr=1.0)",
        "--checkpoint-dir",
        str(kept),
        "--port",
        "0",
    ]
    with command("server", *arguments, "--keep-running") as server:
        address = server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]
        with offbeat.Client(address) as client:
            client.pull()
            wait_for(lambda: client.status()["checkpoints"]["version"] == 0)
            assert [client.push(ONES).version for _ in range(3)] == [1, 2, 3]
            assert client.status()["checkpoints"]["version"] == 0  # a thousand are between two
        wait_for(lambda: json.loads(fetch_status(address, None, 10.0))["checkpoints"]["version"] == 3)
        server.signal(signal.SIGKILL)
        server.ends()
    ended = ["--save", str(saved), "--linger", "0.1", "--rejoin-grace", "0.1"]
    with command("server", *arguments, *ended) as server:
        assert server.ends() == 0, server.said  # and not 8: its work was done
    assert (load_file(saved)["w"] == -3).all()


def test_a_new_run_says_at_once_that_it_will_take_the_place_of_a_saved_model(tmp_path):
    model, kept, saved = tmp_path / "model.safetensors", tmp_path / "kept", tmp_path / "saved.safetensors"
    save_file(ZEROS, model)
    arguments = ["--model", str(model), "--optimizer", "SGD(lr=1.0)", "--checkpoint-dir", str(kept)]
    arguments += ["--save", str(saved), "--port", "0", "--keep-running"]
    said = []
    for is_lost, times in ((False, 0), (False, 1), (True, 1)):
        if is_lost:
            shutil.rmtree(kept)
        with command("server", *arguments) as server:
            if times:
                pushes(server, times)
            else:
                server.line("OFFBEAT_SERVER=")
            server.signal(signal.SIGTERM)
            assert server.ends() == 0, server.said
            said.append("will take its place" in server.said)
    assert said == [False, False, True], "there is none; it is this run's; it is another's"


def test_a_token_that_is_kept_and_not_asked_for_is_told_of_and_one_that_is_not_used(tmp_path):
    arguments = ["--checkpoint-dir", str(tmp_path / "kept"), "--port", "0", "--host", "127.0.0.1"]
    other = {"OFFBEAT_TOKEN": "of another server"}
    with command("server", *arguments, "--new-token", **other) as server:
        server.line("OFFBEAT_TOKEN holds another token than that of --new-token")
        server.signal(signal.SIGINT)
        server.ends()
    with command("server", *arguments) as server:
        server.line("this server has no token, though")
        server.signal(signal.SIGINT)
        server.ends()
