"""A model's file: what is written is what is read, by us and by torch's readers."""

import errno
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from offbeat.cli import model_file
from offbeat.errors import ConfigError


def test_what_is_saved_is_loaded(tmp_path):
    state = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.ones((2, 2), np.float16),
        "steps": np.array(7, np.int64),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "model.safetensors"
    model_file.save(state, path)
    loaded = model_file.load(path)
    assert loaded.keys() == state.keys()
    for name, array in state.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_tensors_may_be_torchs_and_not_contiguous(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    state = {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "narrow": torch.arange(4).to(torch.bfloat16),
    }
    path = tmp_path / "model.safetensors"
    model_file.save(state, path)
    loaded = load_file(path)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)


def test_plain_uint16_is_bfloat16s_bits(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensor = torch.tensor([1.0, -2.5]).to(torch.bfloat16)
    path = tmp_path / "model.safetensors"
    model_file.save({"w": tensor.view(torch.int16).numpy().view(np.uint16)}, path)
    assert torch.equal(load_file(path)["w"], tensor)


def test_bfloat16_is_loaded(tmp_path):
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.tensor([1.0, -2.5]).to(torch.bfloat16)}, path)
    loaded = model_file.load(path)["w"]
    assert loaded.dtype == ml_dtypes.bfloat16
    assert loaded.tolist() == [1.0, -2.5]


@pytest.mark.parametrize("content", [b"", b"not at all", b"\xff" * 64])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        model_file.load(path)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_s_is_refused_with_how_to_convert_it(tmp_path, is_zip):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ConfigError, match=r"looks like a file of torch\.save") as caught:
        model_file.load(path)
    target = path.with_suffix(".safetensors")
    assert f"safetensors.torch.save_file(torch.load({str(path)!r}), {str(target)!r})" in str(caught.value)
    save_file(torch.load(path), target)
    assert model_file.load(target)["w"].tolist() == [1.0] * 3


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.safetensors"
    model_file.save({"w": np.zeros(2, np.float32)}, path)
    before = path.read_bytes()
    with pytest.raises(Exception):  # noqa: B017, PT011  whichever safetensors raises
        model_file.save({"w": np.array(["no", "tensor"])}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_that_cannot_take_its_files_place_is_kept_and_named(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    replace = Path.replace

    def busy(self, target):  # as of a file that is mounted by itself
        if target == path:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self), None, str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(OSError, match="it is left in") as told:
        model_file.save({"w": np.ones(2, np.float32)}, path)
    (kept,) = tmp_path.glob(".offbeat-*/*")
    assert str(kept) in str(told.value)
    assert load_file(kept)["w"].tolist() == [1, 1]
    assert path.read_bytes() == b"old"


def test_a_file_that_cannot_be_written_is_an_error_of_the_system_and_leaves_nothing(tmp_path, run_python):
    path = tmp_path / "model.safetensors"
    code = """
import resource, sys, numpy as np
from pathlib import Path
from offbeat.cli import model_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))  # as of a full disk
try:
    model_file.save({"w": np.zeros(1024, np.float32)}, Path(sys.argv[1]))
except OSError as error:
    print(error)
"""
    assert f"{path} cannot be written: " in run_python(code, str(path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".pt", ".PTH", ".bin", ".ckpt"])
def test_a_name_of_a_torch_file_is_refused_before_anything_is_trained(tmp_path, suffix):
    with pytest.raises(
        ConfigError, match=r"name it .*model\.safetensors, and read it with safetensors\.torch"
    ):
        model_file.check_writable(tmp_path / f"model{suffix}")
    model_file.check_writable(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a folder")])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_file_is_refused_and_never_replaced(tmp_path, make, what, is_link):
    path = there = tmp_path / "model.safetensors"
    make(there)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to(there)
    with pytest.raises(ConfigError, match=f"--save: {path} cannot be written: it is {what}"):
        model_file.check_writable(path)
    before = there.stat()
    with pytest.raises(OSError, match=f"it is {what}.*; it is left in "):
        model_file.save({"w": np.zeros(2, np.float32)}, path)
    (kept,) = tmp_path.glob(".offbeat-*/*")
    assert load_file(kept)["w"].tolist() == [0, 0]
    assert stat.S_IMODE(kept.stat().st_mode) & 0o111 == 0
    assert os.path.samestat(there.stat(), before)
    assert path.is_symlink() == is_link


def test_links_that_lead_in_a_circle_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be written: Too many levels of symbolic links"):
        model_file.check_writable(path)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_and_the_model_is_where_it_leads(tmp_path, is_there):
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    path = near / "model.safetensors"
    path.symlink_to("../far/real.safetensors")
    if is_there:
        path.write_bytes(b"of a run before")
    model_file.check_writable(path)
    model_file.save({"w": np.ones(2, np.float32)}, path)
    assert path.is_symlink()
    assert model_file.load(far / "real.safetensors")["w"].tolist() == [1, 1]
    assert [p.name for folder in (far, near) for p in folder.iterdir()] == ["real.safetensors", path.name]


def test_a_link_to_a_folder_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to(tmp_path / "gone" / "model.safetensors")
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path / 'gone'}"):
        model_file.check_writable(path)


def test_a_name_may_be_as_long_as_names_can_be_and_a_longer_one_is_refused_at_the_start(tmp_path):
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    path = tmp_path / ("m" * longest)
    model_file.check_writable(path)
    assert not list(tmp_path.iterdir()), "trying leaves nothing"
    model_file.save({"w": np.ones(2, np.float32)}, path)
    assert model_file.load(path)["w"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        model_file.check_writable(tmp_path / ("m" * (longest + 1)))


@pytest.mark.parametrize("refused", ["mkdir", "replace"])
def test_a_folder_in_which_nothing_can_be_made_or_renamed_is_refused_at_the_start(
    tmp_path, monkeypatch, refused
):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, refused, refuse)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be written: Read-only file system"):
        model_file.check_writable(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_signal_when_the_folder_beside_is_made_leaves_nothing(tmp_path, monkeypatch):
    made = []

    def interrupted(*arguments, mkdir=os.mkdir, **keywords):
        mkdir(*arguments, **keywords)
        made.append(arguments[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_file.save({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert len(made) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("before", "after"), [(0o600, 0o600), (0o664, 0o664), (None, 0o640)])
def test_a_file_that_is_replaced_keeps_its_mode_and_a_new_one_has_what_the_umask_leaves(
    tmp_path, before, after
):
    path = tmp_path / "model.safetensors"
    if before is not None:
        path.touch()
        path.chmod(before)
    mask = os.umask(0o027)
    try:
        model_file.check_writable(path)
        model_file.save({"w": np.ones(2, np.float32)}, path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == after


@pytest.mark.parametrize(("mode", "left"), [(0o644, 0o644), (0o640, 0o600), (0o664, 0o644)])
def test_of_a_group_that_we_may_not_give_no_other_gets_its_rights(tmp_path, monkeypatch, mode, left):
    path = tmp_path / "model.safetensors"
    path.touch()
    path.chmod(mode)

    def refused(*arguments):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refused)
    model_file.save({"w": np.ones(2, np.float32)}, path)
    assert path.stat().st_mode & 0o777 == left


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_root_replaces_keeps_its_owner(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch(0o600)
    os.chown(path, 12345, 54321)
    model_file.save({"w": np.ones(2, np.float32)}, path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_a_file_that_this_user_may_not_write_is_refused_at_the_start(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.touch(0o444)

    def access(asked, mode):  # as for anybody but root
        return bool(os.stat(asked).st_mode & 0o200) or mode != os.W_OK  # noqa: PTH116  any kind of path

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(ConfigError, match=f"--save: {path} cannot be written: Permission denied"):
        model_file.check_writable(path)
    path.chmod(0o644)
    model_file.check_writable(path)


def test_a_relative_place_moves_with_the_working_directory_and_outlives_it(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    begun.mkdir()
    monkeypatch.chdir(begun)
    place = model_file.Place(Path("out.safetensors"), begun)
    begun.rename(tmp_path / "moved")
    model_file.save({"w": np.ones(2, np.float32)}, place.path())
    assert (tmp_path / "moved" / "out.safetensors").is_file()
    (tmp_path / "far" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "run")
    through = model_file.Place(Path("../link/../out.safetensors"), begun)
    shutil.rmtree(tmp_path / "moved")
    assert place.path() == begun / "out.safetensors"
    assert through.path() == tmp_path / "far" / "out.safetensors", "as it was where it was checked"
