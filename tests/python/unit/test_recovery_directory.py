"""A trainer's directory: folders that are whole or not there, one owner, and what is kept and wanted."""

import dataclasses
import json
import math
import os
import random
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import CheckpointError, ConfigError, DamagedError
from offbeat.recovery import choice
from offbeat.recovery import manifest as manifest_module
from offbeat.recovery.band import NUM_RECENT, Band, judged
from offbeat.recovery.choice import best, kept, ranked
from offbeat.recovery.directory import Directory, entries, is_trainers, names
from offbeat.recovery.folder import verify, write_synced
from offbeat.recovery.manifest import FILES, MANIFEST, Manifest


def manifest(number=1, *, step=None, **fields):
    told = {
        "number": number,
        "step": 10 * number if step is None else step,
        "epoch": 1,
        "batch": 2,
        "samples": 320,
        "seconds": 1.5,
        "written_unix_s": 1.7e9,
        "is_finished": False,
        "is_good": True,
        "loss": 0.5,
        "band": None,
        "monitored": None,
        "monitor": None,
        "num_parameters": 3,
        "optimizer": "SGD",
        "offbeat": "0",
        "torch": "2",
        "files": (),
    }
    return Manifest(**told | fields)


def filled(given_manifest):
    def fill(folder):
        files = tuple(write_synced(folder / name, name.encode() * 5) for name in FILES)
        whole = dataclasses.replace(given_manifest, files=files)
        write_synced(folder / MANIFEST, whole.to_bytes())

    return fill


def add(directory, number, **fields):
    own = manifest(number, **fields)
    return directory.add(number, own.step, filled(own))


@pytest.fixture
def directory(tmp_path):
    made = Directory(tmp_path / "kept")
    with made.locked():
        yield made


# ---------------------------------------------------------------------------------------- manifest


@given(
    loss=st.floats(),
    monitored=st.none() | st.floats(),
    step=st.integers(0),
    monitor=st.none() | st.text(),
)
def test_a_manifest_is_read_as_it_was_written(loss, monitored, step, monitor):
    own = manifest(loss=loss, monitored=monitored, step=step, monitor=monitor)
    raw = dataclasses.replace(own, files=files()).to_bytes()
    read = Manifest.from_bytes(raw)
    assert read.to_bytes() == raw
    assert repr(read) == repr(dataclasses.replace(own, files=files()))


def test_an_older_manifest_tells_neither_request_nor_samples_nor_what_was_gone_back_to():
    told = json.loads(manifest(files=files(), request="latest", monitored_samples=8).to_bytes())
    for name in ("request", "monitored_samples", "gone_back_to", "sha256"):
        del told[name]
    read = Manifest.from_bytes(manifest_module._sealed(told))
    assert (read.request, read.monitored_samples, read.gone_back_to) == (None, None, None)
    assert read.step == 10


def files():
    from offbeat.recovery.manifest import FileEntry

    return tuple(FileEntry(name, 5, "0" * 64) for name in FILES)


@given(st.data())
def test_no_bit_of_a_manifest_can_be_changed_unnoticed(data):
    raw = bytearray(manifest(files=files()).to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Manifest.from_bytes(bytes(raw))


def test_a_manifest_of_another_format_is_told_and_is_no_damage():
    from offbeat.recovery import manifest as module

    body = {"kind": module.KIND, "format": 9, "offbeat": "3.1"}
    with pytest.raises(CheckpointError, match=r"of format 9.* reads format 1: use Offbeat 3\.1") as caught:
        Manifest.from_bytes(module._sealed(body))
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("more", lambda told: told.update(more=1)),
        ("mode", lambda told: told["files"][0].update(mode=1)),
        ("more.bin", lambda told: told["files"].append({"name": "more.bin", "bytes": 1, "sha256": "0" * 64})),
    ],
)
def test_what_a_newer_version_tells_besides_is_no_damage_and_stays(name, change, directory):
    newest = [add(directory, number) for number in (1, 2)][1]
    path = directory.path / newest / "manifest.json"
    told = manifest_module._opened(path.read_bytes()) | {"offbeat": "3.1"}
    change(told)
    path.write_bytes(manifest_module._sealed(told))
    said = (
        rf"{newest}: manifest\.json tells of '{re.escape(name)}', which .* use Offbeat 3\.1, which wrote it"
    )
    with pytest.raises(CheckpointError, match=said) as caught:
        entries(directory.path)
    assert not isinstance(caught.value, DamagedError)
    with pytest.raises(CheckpointError, match=said):
        directory.keep(lambda _: set())
    assert names(directory.path) == [newest]


# ---------------------------------------------------------------------------------------- directory


def test_checkpoints_are_listed_newest_first_and_are_good(directory):
    added = [add(directory, number) for number in (1, 2, 10)]
    assert names(directory.path) == added[::-1]
    assert [entry.manifest.number for entry in entries(directory.path)] == [10, 2, 1]
    assert all(verify(directory.path / name) for name in added)
    assert directory.next_number() == 11
    assert is_trainers(directory.path)
    assert is_trainers(directory.path / added[0])


def test_what_cannot_be_written_leaves_nothing_and_says_why(directory):
    def fill(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"save-000001-step-5 cannot be written: No space left"):
        directory.add(1, 5, fill)
    assert directory.others() == []


def test_temporaries_of_a_process_that_died_are_removed_by_the_next(tmp_path):
    directory = Directory(tmp_path)
    with directory.locked():
        add(directory, 1)
    for name in (".saving-000002", ".removing-save-000001-step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert len(names(tmp_path)) == 1
    with directory.locked():
        assert directory.others() == names(tmp_path)


def test_what_is_a_user_s_stays_whatever_it_begins_with(tmp_path):
    theirs = [".saving-notes.txt", ".removing-list", ".saving-12", "damaged-by-me"]
    ours = [".saving-000012", ".removing-save-000001-step-1", ".removing-damaged-save-000002-step-2"]
    for name in theirs + ours:
        (tmp_path / name).write_bytes(b"a file")
    with Directory(tmp_path).locked():
        assert Directory(tmp_path).others() == sorted(theirs)


def test_a_directory_has_one_owner_who_is_named(tmp_path):
    with (
        Directory(tmp_path).locked(),
        pytest.raises(CheckpointError, match=rf"in use by another .*\(process {os.getpid()}\)"),
        Directory(tmp_path).locked(),
    ):
        pass
    with Directory(tmp_path).locked():  # and none any more
        pass


@pytest.mark.parametrize("how", ["removed", "moved", "lock removed"])
def test_one_that_is_removed_in_mid_run_is_made_again_and_locked(how, directory, tmp_path, caplog):
    add(directory, 1)
    match how:
        case "removed":
            shutil.rmtree(directory.path)
        case "moved":
            directory.path.rename(tmp_path / "elsewhere")
        case "lock removed":
            (directory.path / "lock").unlink()
    add(directory, 2)
    assert names(directory.path)[0] == "save-000002-step-20"
    warned = "was removed or moved in mid-run, with all that was in it, and is made again" in caplog.text
    assert warned == (how != "lock removed")
    with (
        pytest.raises(CheckpointError, match="in use by another trainer"),
        Directory(directory.path).locked(),
    ):
        pass
    directory.keep(lambda found: {m.number for m in found})


@pytest.mark.parametrize("is_there", [True, False])
def test_one_that_another_has_come_to_since_is_left_alone(is_there, directory, tmp_path):
    directory.path.rename(tmp_path / "elsewhere")
    (hears, ends), (told, tells) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        with Directory(directory.path).locked():
            (directory.path / "save-000001-step-10").mkdir()
            if is_there:
                os.write(tells, b"here")
                os.read(hears, 1)  # until the parent is done
        os.write(tells, b"gone")
        os._exit(0)
    os.read(told, 4)
    with pytest.raises(
        CheckpointError, match=rf"another trainer or server \(process {child}\) has come there"
    ):
        add(directory, 1)
    assert directory.others() == ["save-000001-step-10"]
    for number in (ends, hears, told, tells):
        os.close(number)
    os.waitpid(child, 0)


def test_a_child_does_not_hold_the_lock(tmp_path):
    (hears, ends), (told, tells) = os.pipe(), os.pipe()
    with Directory(tmp_path).locked():
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.write(tells, b"here")
            os.read(hears, 1)  # until the parent is done
            os._exit(0)
        os.read(told, 4)
    with Directory(tmp_path).locked():
        pass
    for number in (ends, hears, told, tells):
        os.close(number)
    os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["life.json", "checkpoint-000001", "damaged-checkpoint-000001"])
def test_a_server_s_directory_is_refused(name, tmp_path):
    (tmp_path / name).mkdir()
    with (
        pytest.raises(ConfigError, match=rf"a server keeps its checkpoints there \({name}\)"),
        Directory(tmp_path).locked(),
    ):
        pass


def test_a_checkpoint_under_another_s_name_is_damaged(directory):
    add(directory, 1)
    (directory.path / "save-000001-step-10").rename(directory.path / "save-000002-step-10")
    (entry,) = entries(directory.path)
    assert "the manifest is of save-000001-step-10" in entry.damage


def test_damaged_checkpoints_keep_their_numbers_and_stay(directory):
    for number in range(1, 6):
        add(directory, number)
    (directory.path / "save-000002-step-20" / MANIFEST).write_bytes(b"{}")
    directory.keep(lambda found: kept(found, monitor=None, mode="min"))
    assert [name[:11] for name in names(directory.path)] == [
        "save-000005",
        "save-000004",
        "save-000003",
        "save-000002",
    ]
    directory.set_aside("save-000005-step-50")
    assert directory.next_number() == 6
    directory.clear()
    assert directory.others() == []


def test_clearing_leaves_what_is_not_ours(directory):
    add(directory, 1)
    (directory.path / "notes.txt").write_text("mine", "utf-8")
    directory.clear()
    assert directory.others() == ["notes.txt"]


# ---------------------------------------------------------------------------------------- choice


def test_the_newest_three_the_newest_good_and_the_best_are_kept():
    found = [
        manifest(n, is_good=n in (2, 3), monitor="loss", monitored=abs(n - 1.5) + 0.1 * n)
        for n in range(9, 0, -1)
    ]
    assert kept(found, monitor=None, mode="min") == {9, 8, 7, 3}
    assert kept(found, monitor="loss", mode="min") == {9, 8, 7, 3, 1}
    assert kept(found, monitor="loss", mode="max") == {9, 8, 7, 3}
    assert kept(found, monitor="accuracy", mode="max") == {9, 8, 7, 3}


def test_of_several_of_one_step_in_a_row_the_newest_takes_the_place():
    def told(*steps, **fields):
        return [manifest(number, step=step, **fields) for number, step in enumerate(steps, 1)][::-1]

    assert kept(told(10, 20, 30, 40, 40), monitor=None, mode="min") == {5, 3, 2}
    assert kept(told(10, 20, 20, 20, 40), monitor=None, mode="min") == {5, 4, 1}
    assert kept(told(10, 20, 30, 20), monitor=None, mode="min") == {4, 3, 2}  # after a return to the first
    last, *before = told(10, 20, 30, 40, 40)
    assert kept([dataclasses.replace(last, is_good=False), *before], monitor=None, mode="min") == {5, 4, 3, 2}


def test_best_goes_by_the_value_then_by_age_and_passes_over_what_is_not_finite():
    values = {5: math.nan, 4: 0.2, 3: 0.1, 2: 0.2, 1: math.inf}
    found = [manifest(n, monitor="loss", monitored=value) for n, value in values.items()]
    found.append(manifest(0, monitor="accuracy", monitored=0.0))
    assert [m.number for m in ranked("best", found, monitor="loss", mode="min")] == [3, 4, 2]
    assert [m.number for m in ranked("best", found, monitor="loss", mode="max")] == [4, 2, 3]
    assert best(found, "other", "min") is None


def test_a_mean_of_much_fewer_samples_than_the_usual_one_before_it_is_short():
    def is_short(samples, before):
        return choice.is_short(samples, before, is_broken_off=False)

    assert not is_short(8, [])  # there is no other to go by
    assert is_short(8, [800])
    assert not is_short(400, [800, 800])
    assert is_short(399, [800, 800])
    assert not is_short(800, [800, 800, 5000])  # a long one, as after a slow save, makes none short
    assert [is_short(10, before) for before in ([60] * 5, [60, 60, 60, 10, 10], [60, 60, 10, 10, 10])] == [
        True, True, False
    ]  # fmt: skip


def test_best_passes_over_means_that_are_short_whatever_comes_after_them():
    def told(*shorts):
        return [
            manifest(number, monitor="loss", monitored=float(number), is_short=one)
            for number, one in enumerate(shorts, 1)
        ][::-1]

    assert [m.number for m in ranked("best", told(True, False, False), monitor="loss")] == [2, 3]
    assert kept(told(False, False, False, False, False, True), monitor="loss", mode="max") == {6, 5, 4}
    assert best(told(False, False, True), "loss", "max").number == 2


def test_a_strategy_that_wants_none_of_those_there_are_says_so():
    found = [manifest(2, is_good=False), manifest(1, is_good=False)]
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints has finite parameters.*'latest'"):
        ranked("last_good", found)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints has a finite 'loss'"):
        ranked("best", found, monitor="loss")
    assert ranked("latest", found) == found
    assert ranked("last_good", []) == []


# ---------------------------------------------------------------------------------------- band


def test_a_loss_that_falls_or_stays_is_within_the_band_and_one_that_leaps_is_not():
    chance = random.Random(1)  # noqa: S311
    band, verdicts = None, []
    for level in [2.0, 1.0, 0.5, 0.5, 0.52, 0.48]:
        is_within, band = judged([level + chance.gauss(0, 0.1) for _ in range(NUM_RECENT)], band)
        verdicts.append(is_within)
    assert verdicts == [True] * 6
    for level in [1.0, 2.0, 2.0, 2.0]:  # also one that stays where it has leapt
        is_within, after = judged([level + chance.gauss(0, 0.1) for _ in range(NUM_RECENT)], band)
        assert not is_within
        assert after == band
    assert judged([0.5] * NUM_RECENT, band)[0]  # and lets go again


def test_what_is_not_finite_is_never_within_and_moves_no_band():
    band = Band(1.0, 0.1)
    for value in (math.nan, math.inf):
        assert judged([1.0] * 24 + [value], band) == (False, band)
        assert judged([value], None) == (False, None)


def test_fewer_than_twenty_five_losses_make_no_band():
    assert judged([5.0] * 24, None) == (True, None)
    assert judged([], None) == (True, None)
    assert judged([5.0] * 25, None) == (True, Band(5.0, 0.0))
