"""`offbeat checkpoint`: real checkpoints, whole, damaged and vanishing, looked at, verified and exported."""

import hashlib
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offbeat
from offbeat import optim
from offbeat.cli import main, model_file
from offbeat.cli.reading import Reading
from support.command import command
from support.waiting import wait_for

NUMBERS = 600_000  # of a model that is long enough to be told of while it is read


class Net(nn.Module):
    """Tied weights, BatchNorm's buffers, and a layer in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.half = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def kept(place, model, pushes=3, optimizer=None):
    """Let a server write a checkpoint of a model as given, and one after some pushes; give it, stopped."""
    optimizer = optimizer or optim.SGD(lr=0.1, momentum=0.9)
    server = offbeat.ParameterServer(
        model, optimizer=optimizer, checkpoint_dir=place, checkpoint_frequency=10**6, max_samples=1000
    )
    with server:
        wait_for(lambda: server.status()["checkpoints"]["version"] == 0)
        with offbeat.Client(server.address, worker_id="amy") as client:
            for step in range(pushes):
                now = client.pull()
                floats = {name: value for name, value in now.items() if value.dtype != np.int64}
                client.push(
                    {name: np.full_like(value, 0.1 + step) for name, value in floats.items()}, samples=8
                )
    return server


@pytest.fixture
def place(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def server(place):
    return kept(place, Net(), optimizer=optim.Adam(lr=0.1))


@pytest.fixture
def run(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main.main(["checkpoint", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def on_disk(place):
    return {
        path.relative_to(place): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [place, *place.rglob("*")]
    }


# ---------------------------------------------------------------------------------------- inspect


def test_a_directory_is_told_as_a_table_while_its_server_is_at_work(place, run):
    sgd = optim.SGD(lr=1.0)
    with offbeat.ParameterServer(
        {"w": np.zeros(3, np.float32)}, optimizer=sgd, checkpoint_dir=place
    ) as server:
        wait_for(lambda: server.status()["checkpoints"]["version"] == 0)
        run_id = server.status()["run_id"]
        code, out, err = run("inspect", place)
        assert (code, err) == (0, "")
        assert run("verify", place)[0] == 0
        assert run("export", place, place.parent / "model.safetensors")[0] == 0
    assert out.startswith(f"1 checkpoint in {place}\n")
    assert re.search(
        rf"^checkpoint-000001  \d+-\d\d-\d\d \d\d:\d\d:\d\d  {run_id} +0 +1 +0 ", out, re.MULTILINE
    )
    assert "a server would go on from checkpoint-000001" in out


def test_a_checkpoint_is_told_with_its_run_and_its_workers(place, server, run):
    code, out, _ = run("inspect", place / "checkpoint-000002")
    assert code == 0
    told = {line[:14].strip(): line[14:].strip() for line in out.splitlines() if line}
    assert told["checkpoint"].startswith("checkpoint-000002, file time 2")
    assert told["run"].startswith(server.status()["run_id"])
    assert told["model"] == "version 3, 24 of 1,000 samples, term 1"
    assert told["optimizer"].startswith("Adam(lr=0.1, ")
    assert "betas=[0.9,0.999]" in told["optimizer"]
    assert (told["transaction"], told["staleness"]) == ("fragment", "constant")
    assert told["pushes carry"] == "gradients, as fixed by the server's optimizer"
    assert told["tensors"].startswith("8, with 48 parameters and 9 numbers in buffers")
    assert "optimizer.safetensors" in told["files"]
    assert re.search(r"^amy +departed +1 +3 +3 +3 +24 +0$", out, re.MULTILINE)


def test_a_program_is_told_everything(place, server, run):
    code, out, _ = run("inspect", "--json", place)
    told = json.loads(out)
    assert (code, told["kind"], told["next"]) == (0, "directory", "checkpoint-000002")
    assert [entry["name"] for entry in told["checkpoints"]] == ["checkpoint-000002", "checkpoint-000001"]
    alone = json.loads(run("inspect", place / "checkpoint-000002", "--json")[1])
    assert alone == {"kind": "checkpoint"} | told["checkpoints"][0]["checkpoint"]
    status = server.status()
    for name in ("run_id", "term", "version", "samples", "optimizer", "schedule", "staleness", "tickets"):
        assert alone[name] == status[name]


def test_what_cannot_be_gone_on_with_is_told_beside_what_can(place, server, run):
    (place / "checkpoint-000002" / "manifest.json").write_text("{")
    (place / "earlier-checkpoint-000001").mkdir()
    code, out, _ = run("inspect", place)
    assert code == 0
    assert re.search(r"^checkpoint-000002 +cannot be used ", out, re.MULTILINE)
    assert f"{place}/checkpoint-000002: manifest.json is damaged: " in out
    assert "set aside: earlier-checkpoint-000001" in out
    assert "go on from checkpoint-000001" in out
    (place / "life.json").write_text("{")
    assert f"a server would not start here: {place}/life.json is damaged" in run("inspect", place)[1]


# ---------------------------------------------------------------------------------------- verify


def test_what_is_good_is_said_to_be_and_nothing_is_changed(place, server, run):
    for left in ("lock", "life.json"):
        (place / left).unlink()
    before = on_disk(place)
    for _ in range(2):
        code, out, err = run("verify", place)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            f"{place}/life.json: not there; a server would go by what the checkpoints say",
            f"{place}/checkpoint-000002: ok",
            f"{place}/checkpoint-000001: ok",
        ]
    assert run("verify", place / "checkpoint-000001")[:2] == (0, f"{place}/checkpoint-000001: ok\n")
    assert run("inspect", place)[0] == 0
    assert on_disk(place) == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:99])


def rename(path):
    path.write_text(path.read_text().replace("amy", "bob", 1))


def forge(path):
    """Change a value by hand, digest and all."""
    text = path.read_text()
    body = text.rpartition(',"sha256":"')[0].replace('"version":3,"samples"', f'"version":{2**61},"samples"')
    assert str(2**61) in body
    path.write_text(f'{body},"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n')


DIGESTS = r"[0-9a-f]{64}.* [0-9a-f]{64}"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (("model.safetensors", flip), rf"model.safetensors is damaged: its SHA-256 is {DIGESTS}"),
        (("optimizer.safetensors", flip), rf"optimizer.safetensors is damaged: its SHA-256 is {DIGESTS}"),
        (("manifest.json", flip), "manifest.json is damaged: its end, a SHA-256, is missing"),
        (("manifest.json", rename), rf"manifest.json is damaged: the SHA-256 of .* {DIGESTS}"),
        (("model.safetensors", cut), "model.safetensors is damaged: it has 99 bytes where the manifest says"),
        (("model.safetensors", Path.unlink), "model.safetensors is damaged: it is not there"),
        (("manifest.json", forge), "manifest.json does not hold together: book: tickets counts to"),
    ],
    ids=["a bit", "a moment's bit", "the end", "a name", "cut short", "gone", "forged"],
)
def test_what_is_wrong_is_told_with_its_file_and_nothing_is_set_aside(place, server, run, damage, said):
    folder = place / "checkpoint-000002"
    file, do = damage
    do(folder / file)
    before = on_disk(place)
    code, out, err = run("verify", place)
    assert code == 11
    lives, bad, good = out.splitlines()
    assert lives.startswith(f"{place}/life.json: ok")
    assert bad.startswith(f"{folder}: ")
    assert re.search(said, bad)
    assert good == f"{place}/checkpoint-000001: ok"
    assert err == f"offbeat: {place}: 1 of 2 cannot be used\n"
    code, out, err = run("verify", folder)
    assert (code, out.splitlines()) == (11, [bad])
    assert on_disk(place) == before


def test_what_lives_have_reserved_is_verified_with_a_directory(place, server, run):
    code, out, _ = run("verify", place)
    assert (code, out.splitlines()[0]) == (
        0,
        f"{place}/life.json: ok, all up to term 1 and incarnation 4,096 are taken",
    )
    (place / "life.json").write_text("no")
    code, out, err = run("verify", place)
    assert code == 11
    lives, *checkpoints = out.splitlines()
    assert lives.startswith(f"{place}/life.json is damaged (")
    assert checkpoints == [f"{place}/checkpoint-00000{number}: ok" for number in (2, 1)]
    no_start = f"offbeat: {place}: no server would start there, because of its life.json"
    assert err == f"{no_start}\n", "it is no checkpoint"
    flip(place / "checkpoint-000002" / "model.safetensors")
    assert run("verify", place)[2] == f"{no_start}; {place}: 1 of 2 cannot be used\n"


@pytest.fixture
def large(place):
    return kept(place, {"w": np.zeros(NUMBERS, np.float32)})


def test_one_that_its_server_removes_meanwhile_is_gone_and_no_failure(place, large, run, monkeypatch):
    removed, last = place / "checkpoint-000001", place / "checkpoint-000002"
    twice = 2 * (last / "model.safetensors").stat().st_size

    def remove(self, read_bytes, all_bytes):
        assert read_bytes <= all_bytes == twice
        shutil.rmtree(removed, ignore_errors=True)

    monkeypatch.setattr(Reading, "__call__", remove)
    code, out, err = run("verify", place)
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [f"{last}: ok", f"{removed}: gone, removed by its server"]
    removed = last
    code, out, err = run("verify", place)
    assert (code, err) == (11, f"offbeat: there is no checkpoint in {place} any more\n")


# ---------------------------------------------------------------------------------------- export


def test_a_models_every_tensor_is_exported_as_the_server_has_it(place, server, run, tmp_path):
    to, saved = tmp_path / "model.safetensors", tmp_path / "saved.safetensors"
    code, out, err = run("export", place, to)
    assert (code, err) == (0, "")
    assert out == f"the model of checkpoint-000002, version 3, is in {to}\n"
    exported, state = load_file(to), server.state_dict()
    assert exported.keys() == state.keys() == Net().state_dict().keys()
    for name, value in state.items():
        assert exported[name].dtype == value.dtype
        assert torch.equal(exported[name], value)
    assert exported["half.weight"].dtype == torch.bfloat16
    assert torch.equal(exported["head.weight"], exported["embed.weight"])
    model = Net()
    model.load_state_dict(exported)
    assert not torch.equal(model.embed.weight, Net().embed.weight)
    model_file.save(state, saved)
    assert to.read_bytes() == saved.read_bytes()


def test_one_that_is_asked_for_is_exported(place, server, run, tmp_path):
    to = tmp_path / "first.safetensors"
    assert run("export", place / "checkpoint-000001", to)[0] == 0
    assert torch.equal(load_file(to)["embed.weight"], Net().embed.weight)


def test_one_that_was_set_aside_is_looked_at_by_its_path(place, server, run, tmp_path):
    with offbeat.ParameterServer(Net(), optimizer=optim.Adam(lr=0.1), checkpoint_dir=place, resume="never"):
        pass
    aside = place / "earlier-checkpoint-000002"
    assert run("inspect", aside)[1].startswith("checkpoint     earlier-checkpoint-000002, file time ")
    assert run("verify", aside) == (0, f"{aside}: ok\n", "")
    assert run("export", aside, tmp_path / "model.safetensors")[0] == 0
    exported, kept = load_file(tmp_path / "model.safetensors"), server.state_dict()
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_the_same_bytes_are_exported_as_a_server_saves(tmp_path):
    given, saved, place = tmp_path / "given.safetensors", tmp_path / "saved.safetensors", tmp_path / "kept"
    save_file({"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}, given)
    arguments = ["--model", given, "--save", saved, "--optimizer", "SGD(lr=0.3)", "--checkpoint-dir", place]
    with command("server", *map(str, arguments), "--port", "0", "--keep-running") as server:
        address = server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]
        with offbeat.Client(address) as client:
            client.push({name: np.ones_like(value) for name, value in client.pull().items()})
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    exported = tmp_path / "exported.safetensors"
    with command("checkpoint", "export", str(place), str(exported)) as export:
        assert export.ends() == 0, export.said
    assert exported.read_bytes() == saved.read_bytes()


def test_a_damaged_one_is_passed_over_loudly(place, server, run, tmp_path):
    to = tmp_path / "model.safetensors"
    flip(place / "checkpoint-000002" / "model.safetensors")
    code, out, err = run("export", place, to)
    assert code == 0
    assert out == f"the model of checkpoint-000001, version 0, is in {to}\n"
    assert err.startswith(
        f"offbeat: WARNING: a newer checkpoint is damaged, and passed over: {place}/checkpoint-"
    )
    assert "model.safetensors is damaged: its SHA-256 is" in err
    assert torch.equal(load_file(to)["embed.weight"], Net().embed.weight)
    other = tmp_path / "other.safetensors"
    assert run("export", place / "checkpoint-000002", other)[0] == 11
    shutil.rmtree(place / "checkpoint-000001")
    code, out, err = run("export", place, other)
    assert (code, out) == (11, "")
    assert "none of the 1 checkpoints in" in err
    assert not other.exists()


def test_no_file_is_replaced_that_should_stay(place, server, run, tmp_path):
    to = tmp_path / "model.safetensors"
    to.write_text("precious")
    code, _, err = run("export", place, to)
    assert (code, to.read_text()) == (2, "precious")
    assert "is there already: give another name, or --force to replace it" in err
    assert run("export", place, "--force", to)[0] == 0
    assert load_file(to)


OWN = ("lock", "life.json", "life.new", "token", "token.new")
OWN += (".new", ".old", "checkpoint-000003", "damaged-checkpoint-000002")


def test_nothing_is_written_over_what_a_server_has_whichever_path_is_given(place, server, run, tmp_path):
    checkpoint, link = place / "checkpoint-000002", tmp_path / "link"
    link.symlink_to(place)
    (place / ".new").mkdir()  # as one has it that is killed as it writes
    files = [*(place / name for name in OWN if name != ".new"), place / ".new" / "model.safetensors"]
    before = on_disk(place)
    for path in (place, checkpoint, place / "checkpoint-000001", link / "checkpoint-000001"):
        for file in (checkpoint / "model.safetensors", checkpoint / "new", link / "life.json", *files):
            code, _, err = run("export", path, file, "--force")
            assert code == 2
            assert f"FILE: {file} is among the files of a server's checkpoints: give another" in err
    assert on_disk(place) == before
    shutil.copytree(place, tmp_path / "other")
    assert run("export", place, tmp_path / "other" / "lock", "--force")[0] == 2
    (place / ".new").rmdir()
    assert run("export", place, place / ".new")[0] == 2
    offbeat.ParameterServer(checkpoint_dir=place).stop()


def test_a_model_may_be_put_beside_the_checkpoints_and_where_no_server_is_by_any_name(
    place, server, run, tmp_path
):
    for file in (place / "model.safetensors", place / "checkpoint-000002.safetensors", tmp_path / "lock"):
        for _ in range(2):
            assert run("export", place, file, "--force")[0] == 0
            assert load_file(file)


def test_a_file_that_comes_meanwhile_is_not_replaced(place, large, run, tmp_path, monkeypatch):
    to = tmp_path / "model.safetensors"
    monkeypatch.setattr(Reading, "__call__", lambda *_: to.write_text("precious"))
    code, _, err = run("export", place, to)
    assert (code, to.read_text()) == (2, "precious")
    assert "is there already" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "model.safetensors"]


def test_what_is_removed_meanwhile_is_looked_for_anew(place, large, run, tmp_path, monkeypatch):
    newest = place / "checkpoint-000002"
    monkeypatch.setattr(Reading, "__call__", lambda *_: shutil.rmtree(newest, ignore_errors=True))
    code, out, err = run("export", place, tmp_path / "model.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("the model of checkpoint-000001, version 0, ")


FULL = (
    sys.executable,
    "-c",
    """
import resource, sys
from offbeat.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99))
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat`, on a disk that is full."""


def test_a_file_that_cannot_be_written_is_code_11_and_nothing_is_left(place, server, tmp_path):
    to = tmp_path / "model.safetensors"
    with command("checkpoint", "export", str(place), str(to), program=FULL) as export:
        assert export.ends() == 11, export.said
    assert f"{to} cannot be written: " in export.said
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# ---------------------------------------------------------------------------------------- all three

ALL = pytest.mark.parametrize("action", ["inspect", "verify", "export"])


def arguments(action, path, tmp_path):
    return [action, path, *([tmp_path / "model.safetensors"] if action == "export" else [])]


@ALL
def test_a_path_that_leads_to_none_is_refused_with_the_remedy(action, run, tmp_path):
    empty, foreign, file = tmp_path / "empty", tmp_path / "foreign", tmp_path / "file"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "notes.txt").write_text("")
    file.write_text("")
    said = {
        tmp_path / "nowhere": "is not there: give",
        file: "is no folder: give",
        empty: "is no directory of checkpoints, nor a checkpoint: give",
        foreign: "is no directory of checkpoints, nor a checkpoint: give",
    }
    for path, what in said.items():
        code, out, err = run(*arguments(action, path, tmp_path))
        assert (code, out) == (2, "")
        assert f"offbeat: {path} {what} " in err
        assert "--checkpoint-dir" in err
        assert "what a FaultTolerantTrainer has as checkpoint_dir, or one of the folders save-… in it" in err
        assert err.count("\n") == 1
    assert not any(empty.iterdir())


@ALL
def test_a_directory_in_which_there_is_none_yet_is_told(action, run, tmp_path):
    with offbeat.ParameterServer(checkpoint_dir=tmp_path / "kept"):
        code, out, err = run(*arguments(action, tmp_path / "kept", tmp_path))
    if action == "inspect":
        assert (code, out, err) == (0, f"no checkpoint yet in {tmp_path / 'kept'}\n", "")
    else:
        assert code == 11
        lives = f"{tmp_path / 'kept'}/life.json: ok"
        assert [line[: len(lives)] for line in out.splitlines()] == [lives] * (action == "verify")
        assert f"there is no checkpoint in {tmp_path / 'kept'}" in err


INTERRUPTED = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat.cli import main, reading
reading.Reading.__call__ = lambda *_: signal.raise_signal(signal.SIGINT)
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat`, with Ctrl-C as soon as it has read something."""


@pytest.mark.parametrize("action", ["verify", "export"])
def test_ctrl_c_ends_it(place, large, action, tmp_path):
    given = map(str, arguments(action, place, tmp_path))
    with command("checkpoint", *given, program=INTERRUPTED) as interrupted:
        assert interrupted.ends() == 130
    assert "".join(interrupted.err) == "offbeat: interrupted\n"
    assert len(interrupted.out) == (1 if action == "verify" else 0), "that of life.json"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


ENDED_AS_IT_WRITES = (
    sys.executable,
    "-c",
    """
import signal, sys
import safetensors
from offbeat.cli import main
number, write = int(sys.argv.pop(1)), safetensors.serialize_file
def write_and_signal(*given, **named):
    write(*given, **named)
    signal.raise_signal(number)
safetensors.serialize_file = write_and_signal
sys.exit(main.main())
""",
)
"""`offbeat`, with a signal, by its number, when a model is written and not in its place."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_a_file_that_is_being_written(place, server, number, tmp_path):
    given = ("checkpoint", "export", place, tmp_path / "model.safetensors")
    with command(str(int(number)), *map(str, given), program=ENDED_AS_IT_WRITES) as ended:
        assert ended.ends() == 130
    assert ended.said == "offbeat: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@ALL
def test_it_needs_no_torch(place, server, action, tmp_path, run_python):
    code = (
        "import sys; sys.modules['torch'] = None\nfrom offbeat.cli import main\n"
        "print('code', main.main(['checkpoint', *sys.argv[1:]]))"
    )
    assert "code 0" in run_python(code, *map(str, arguments(action, place, tmp_path)))
