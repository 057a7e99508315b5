"""`offbeat checkpoint` on what a `FaultTolerantTrainer` has kept."""

import errno
import json
import logging
import os
import re
import shutil

import pytest
import safetensors.torch
import torch

from offbeat import FaultTolerantTrainer
from offbeat.cli import main
from offbeat.recovery.directory import names
from offbeat.recovery.saver import Saver
from support import fault_tolerant

open_file = os.open


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "kept"
    trainer = fault_tolerant.trained(folder, max_steps=30, monitor="loss")
    fault_tolerant.trained(folder, max_steps=40, monitor="loss")
    return folder, trainer


def offbeat(capsys, *arguments):
    capsys.readouterr()
    code = main.main(["checkpoint", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def damage(folder, name="model.safetensors"):
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_inspect_tells_of_a_directory_and_of_one(kept, capsys):
    folder, _ = kept
    newest = names(folder)[0]
    code, out, _ = offbeat(capsys, "inspect", folder)
    assert code == 0
    assert "checkpoints of a training in" in out
    assert all(name in out for name in names(folder))
    assert "lengths of files: what is in these, `offbeat checkpoint verify` compares" in out
    code, out, _ = offbeat(capsys, "inspect", folder / newest)
    assert code == 0
    assert "step 40, " in out
    assert "finished" in out
    assert "AdamW" in out
    assert "batch 5 of epoch 4" in out


def test_inspect_counts_epochs_as_the_log_lines_do(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.setattr(Saver, "save", fault_tolerant.waited(Saver.save))  # so that none is put off
    caplog.set_level(logging.INFO, "offbeat")
    trainer = FaultTolerantTrainer(fault_tolerant.model(), tmp_path, 6, monitor="loss")
    trainer.train(
        dataset=fault_tolerant.Noisy(),  # in batches of which a pass has 12
        batch_size=fault_tolerant.BATCH_SIZE,
        epochs=2,
        optimizer=torch.optim.SGD(trainer.model.parameters(), lr=0.1),
        loss_fn=fault_tolerant.loss_of,
        log_frequency=1,
    )
    epochs = {step: epoch for epoch, step in re.findall(r"epoch (\d+)/2, step (\d+):", caplog.text)}
    _, out, _ = offbeat(capsys, "inspect", tmp_path)
    shown = re.findall(r"save-\d+-step-(\d+) .* (?:yes|no) +\d+ +(\d+) ", out)
    assert {step for step, _ in shown} == {"12", "18", "24"}  # the end of a pass, its middle, the end of all
    assert shown == [(step, epochs[step]) for step, _ in shown]


def test_inspect_says_of_which_step_a_rollback_s_checkpoint_is_and_export_takes_nothing_left_behind(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Saver, "save", fault_tolerant.waited(Saver.save))
    folder, model = tmp_path / "kept", fault_tolerant.model()
    trainer = FaultTolerantTrainer(model, folder, 5)

    def loss_fn(outputs, targets):
        if trainer.history.steps == 12 and not is_back:
            is_back.append(trainer.rollback(5))
        return fault_tolerant.loss_of(outputs, targets)

    is_back = []
    trainer.train(
        dataset=fault_tolerant.Noisy(),
        batch_size=fault_tolerant.BATCH_SIZE,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        epochs=2,
        max_steps=14,
    )
    steps = [name.rpartition("-")[2] for name in names(folder)]
    assert steps == ["14", "13", "10", "5"]
    _, out, _ = offbeat(capsys, "inspect", folder)
    assert "13 (5 again)" in out
    _, out, _ = offbeat(capsys, "inspect", folder / names(folder)[1])
    assert "step 13 (5 again), " in out
    for name in names(folder)[:2]:
        damage(folder / name)
    code, out, _ = offbeat(capsys, "export", folder, tmp_path / "model.safetensors")
    assert (code, "step 5, is in" in out) == (0, True)


def test_inspect_gives_json_to_programs_also_of_what_is_damaged(kept, capsys):
    folder, _ = kept
    newest, before, *_ = names(folder)
    damage(folder / newest, "manifest.json")
    code, out, _ = offbeat(capsys, "inspect", "--json", folder)
    told = json.loads(out)
    assert (code, told["kind"]) == (0, "training directory")
    assert "not as it was written" in told["checkpoints"][0]["error"]
    assert told["checkpoints"][1]["name"] == before
    assert told["checkpoints"][1]["checkpoint"]["optimizer"] == "AdamW"
    code, out, _ = offbeat(capsys, "inspect", "--json", folder / before)
    assert json.loads(out)["kind"] == "training checkpoint"
    code, _, err = offbeat(capsys, "inspect", folder / newest)
    assert code == 11
    assert "manifest.json is not as it was written" in err


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_inspect_tells_by_the_files_lengths_what_is_damaged(file, is_cut, kept, capsys):
    folder, _ = kept
    newest, before, *_ = names(folder)
    if is_cut:
        os.truncate(folder / newest / file, 100)
        told = rf"{newest}: {file} has 100 bytes where the manifest says \d+"
    else:
        (folder / newest / file).unlink()
        told = rf"{newest}: there is no {file}"
    code, out, _ = offbeat(capsys, "inspect", folder)
    assert code == 0
    assert re.search(rf"^{newest} +damaged ", out, re.MULTILINE)
    assert not re.search(rf"^{before} +damaged ", out, re.MULTILINE)
    assert re.search(told, out)
    code, _, err = offbeat(capsys, "inspect", folder / newest)
    assert (code, bool(re.search(told, err))) == (11, True)
    assert offbeat(capsys, "inspect", folder / before)[0] == 0


def test_inspect_of_a_directory_tells_of_the_others_where_one_cannot_be_read(kept, capsys, monkeypatch):
    folder, _ = kept
    newest, before, *_ = names(folder)

    def refusing(path, *given):
        if path.parent.name == before:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *given)

    monkeypatch.setattr(os, "open", refusing)
    code, out, _ = offbeat(capsys, "inspect", folder)
    assert (code, f"{before}/manifest.json cannot be read: Permission denied" in out) == (0, True)
    assert re.search(rf"^{before} +unusable ", out, re.MULTILINE)
    assert re.search(rf"^{newest} +20\d\d-", out, re.MULTILINE)
    code, out, _ = offbeat(capsys, "inspect", "--json", folder)
    told = json.loads(out)["checkpoints"]
    assert [(one["name"], one["error"] is None) for one in told[:2]] == [(newest, True), (before, False)]
    code, _, err = offbeat(capsys, "inspect", folder / before)
    assert (code, "cannot be read: Permission denied" in err) == (11, True)


@pytest.mark.parametrize("ruin", [lambda path: path.mkdir(), lambda path: path.symlink_to("state.json")])
def test_inspect_tells_what_is_no_file_and_needs_to_read_none_but_manifests(ruin, kept, capsys, monkeypatch):
    folder, _ = kept
    newest = names(folder)[0]
    (folder / newest / "model.safetensors").unlink()
    ruin(folder / newest / "model.safetensors")
    opened = []
    monkeypatch.setattr(os, "open", lambda path, *given: (opened.append(path), open_file(path, *given))[1])
    code, out, _ = offbeat(capsys, "inspect", folder)
    assert (code, f"{newest}: model.safetensors is " in out) == (0, True)
    assert {path.name for path in opened} == {"manifest.json"}


def test_a_copy_under_another_checkpoint_s_name_is_damaged_as_a_start_finds_it(kept, capsys, tmp_path):
    folder, _ = kept
    newest = names(folder)[0]
    shutil.copytree(folder / newest, folder / "save-000200-step-300")
    shutil.copytree(folder / newest, tmp_path / "copy")
    told = f"save-000200-step-300: the manifest is of {newest}"
    code, out, _ = offbeat(capsys, "verify", folder)
    assert (code, told in out, f"{newest}: ok" in out) == (11, True, True)
    assert told in offbeat(capsys, "inspect", folder)[1]
    for action in ("inspect", "verify"):  # of a folder by its path a start asks no name
        assert offbeat(capsys, action, folder / "save-000200-step-300")[0] == 0
        assert offbeat(capsys, action, tmp_path / "copy")[0] == 0
    code, out, err = offbeat(capsys, "export", folder, tmp_path / "model.safetensors")
    assert (code, told in err, f"the model of {newest}," in out) == (0, True, True)


def test_rubbish_under_a_checkpoint_s_name_or_a_manifest_s_is_passed_over(kept, capsys, tmp_path):
    folder, _ = kept
    newest = names(folder)[0]
    (folder / "save-000300-step-300").write_bytes(b"a file")
    (folder / "save-000301-step-301").symlink_to(tmp_path / "nothing")
    (folder / "manifest.json").mkdir()
    code, out, _ = offbeat(capsys, "inspect", folder)
    told = ("save-000300-step-300 is no folder", "save-000301-step-301 is a link to nothing")
    assert (code, [text in out for text in told]) == (0, [True, True])
    code, out, _ = offbeat(capsys, "verify", folder)
    assert (code, f"{newest}: ok" in out, [text in out for text in told]) == (11, True, [True, True])
    code, out, err = offbeat(capsys, "export", folder, tmp_path / "model.safetensors")
    assert (code, f"the model of {newest}," in out) == (0, True)
    assert all(text in err for text in told)


def test_verify_reads_all_and_names_what_is_damaged(kept, capsys):
    folder, _ = kept
    newest, *older = names(folder)
    assert offbeat(capsys, "verify", folder)[0] == 0
    damage(folder / newest)
    code, out, err = offbeat(capsys, "verify", folder)
    assert code == 11
    assert f"{newest}: model.safetensors is not as it was written: its SHA-256 is" in out
    assert all(f"{name}: ok" in out for name in older)
    assert f"1 of {len(older) + 1} cannot be used" in err
    assert offbeat(capsys, "verify", folder / newest)[0] == 11
    assert offbeat(capsys, "verify", folder / older[0])[0] == 0


def test_export_writes_a_file_that_a_module_takes_and_passes_over_what_is_damaged(kept, capsys, tmp_path):
    folder, _ = kept
    newest, before, *_ = names(folder)
    to = tmp_path / "model.safetensors"
    code, out, err = offbeat(capsys, "export", folder, to)
    assert (code, err) == (0, "")
    assert f"the model of {newest}, step 40, is in {to}" in out
    module = fault_tolerant.model()
    module.load_state_dict(safetensors.torch.load_file(to))
    written = safetensors.torch.load_file(folder / newest / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in module.state_dict().items())
    assert offbeat(capsys, "export", folder, to)[0] == 2  # it is there already
    damage(folder / newest)
    code, out, err = offbeat(capsys, "export", "--force", folder, to)
    assert code == 0
    assert f"a newer checkpoint is damaged, and passed over: {folder / newest}: model.safetensors" in err
    assert before in out
    assert offbeat(capsys, "export", "--force", folder / newest, to)[0] == 11


@pytest.mark.parametrize("place", ["model.safetensors", "save-000009-step-9", "lock"])
def test_export_puts_nothing_among_a_trainer_s_files(place, kept, capsys):
    folder, _ = kept
    code, _, err = offbeat(capsys, "export", "--force", folder, folder / place)
    assert code == 2
    assert "is among a trainer's checkpoints" in err


def test_nothing_is_changed_while_a_trainer_is_at_work(kept, capsys):
    folder, _ = kept
    from offbeat.recovery.directory import Directory

    before = sorted(path.name for path in folder.rglob("*"))
    with Directory(folder).locked():
        for action in ("inspect", "verify"):
            assert offbeat(capsys, action, folder)[0] == 0
    assert sorted(path.name for path in folder.rglob("*")) == before
