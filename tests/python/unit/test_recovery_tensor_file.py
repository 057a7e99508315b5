"""A .safetensors file of ours: the library reads it, its digest is right, and it leaves nothing in memory."""

import errno
import hashlib
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
from io import FileIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UnsupportedTensorError
from offbeat.recovery import files, snapshot, tensor_file
from offbeat.recovery.nest import flatten
from offbeat.recovery.tensor_file import DTYPES, UNSYNCED_BYTES, laid_out, write_tensors

SHAPES = st.lists(st.integers(0, 5), max_size=3)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter("__metadata__".__ne__)


def tensor_of(dtype, shape, seed):
    """Build a tensor of any bits, NaN's of all kinds among them; a bool has no others than 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@given(
    drawn=st.dictionaries(
        NAMES, st.tuples(st.sampled_from(sorted(DTYPES, key=str)), SHAPES, st.integers(0, 99)), max_size=6
    ),
    piece=st.integers(1, 40),
    unsynced=st.integers(100, 600),
)
def test_the_library_reads_what_was_written_and_the_digest_is_the_files(drawn, piece, unsynced):
    tensors = {name: tensor_of(*one) for name, one in drawn.items()}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "PIECE_BYTES", piece)
        patch.setattr(tensor_file, "UNSYNCED_BYTES", unsynced)
        path = Path(folder) / "model.safetensors"
        entry = write_tensors(path, laid_out(tensors))
        raw = path.read_bytes()
        loaded = safetensors.torch.load_file(path)
    assert (entry.name, entry.bytes) == (path.name, len(raw))
    assert entry.sha256 == hashlib.sha256(raw).hexdigest()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


def test_every_tensor_lies_at_a_multiple_of_its_elements_size(tmp_path):
    tensors = {str(dtype): tensor_of(dtype, (3,), 0) for dtype in DTYPES}
    write_tensors(tmp_path / "x", laid_out(tensors))
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.itemsize == 0


def test_a_contiguous_tensor_of_one_element_or_none_may_have_any_stride(tmp_path):
    tensors = {"one": torch.tensor(7.0).expand(1, 1), "none": torch.ones(3).as_strided((0,), (0,))}
    write_tensors(tmp_path / "x", laid_out(tensors))
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert (loaded["one"].tolist(), loaded["none"].tolist()) == ([[7]], [])


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "x").write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", laid_out({"a": torch.ones(3)}))
    assert (tmp_path / "x").read_bytes() == b"another's"


def test_a_header_that_the_library_would_not_read_is_refused_before_anything_is_written(tmp_path):
    tensors = {f"{i}{'n' * 1_000_000}": torch.ones(1) for i in range(100)}
    told = r"100 tensors, as '.*n', have 1000.* keep many numbers as one array"
    with pytest.raises(UnsupportedTensorError, match=told):
        laid_out(tensors)
    state = files.Parts(flatten({"weight": torch.ones(1)}, what="model"), flatten(tensors, what="state"))
    with pytest.raises(UnsupportedTensorError, match=told):
        files.check(state)
    with pytest.raises(OSError, match=told):
        files.write(tmp_path, state)
    assert list(tmp_path.iterdir()) == []
    del tensors[min(tensors)]
    write_tensors(tmp_path / "x", laid_out(tensors))
    assert safetensors.torch.load_file(tmp_path / "x").keys() == tensors.keys()


def test_what_is_written_is_synced_on_the_way_and_then_leaves_the_page_cache(tmp_path, monkeypatch):
    piece, unsynced = 1_000, 10_000
    done = []

    def note(what):
        return lambda number, *_: done.append((what, os.fstat(number).st_size))

    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece)
    monkeypatch.setattr(tensor_file, "UNSYNCED_BYTES", unsynced)
    monkeypatch.setattr(os, "fsync", note("sync"))
    monkeypatch.setattr(os, "posix_fadvise", note("leave"))
    tensors = {str(size): torch.ones(size) for size in (1, 300, 9_999, 25_000)}
    entry = write_tensors(tmp_path / "x", laid_out(tensors))
    synced = [size for what, size in done if what == "sync"]
    assert done == [(what, size) for size in synced for what in ("sync", "leave")]
    assert synced[-1] == entry.bytes
    steps = [size - before for before, size in zip([0, *synced], synced, strict=False)]
    assert all(unsynced <= step < unsynced + piece for step in steps[:-1])
    assert steps[-1] < unsynced


def test_a_sync_that_fails_on_the_way_is_told_and_no_more_is_written(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors(tmp_path / "x", laid_out({"a": torch.ones(UNSYNCED_BYTES)}))
    assert UNSYNCED_BYTES <= (tmp_path / "x").stat().st_size < 2 * UNSYNCED_BYTES


class Stuck(FileIO):
    """A file of a broken file system, which takes nothing more and gives no error."""

    def write(self, raw):
        return super().write(raw) if self.tell() == 0 else 0


def test_a_file_system_that_writes_nothing_is_an_error_and_no_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "FileIO", Stuck)
    with pytest.raises(OSError, match=r"Input/output error: .*/x"):
        write_tensors(tmp_path / "x", laid_out({"a": torch.ones(3)}))


def test_a_file_system_that_takes_no_advice_gets_the_file_and_one_that_does_not_sync_is_told_of(
    tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    write_tensors(tmp_path / "x", laid_out({"a": torch.ones(3)}))
    assert safetensors.torch.load_file(tmp_path / "x")["a"].tolist() == [1, 1, 1]
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        write_tensors(tmp_path / "y", laid_out({"a": torch.ones(3)}))


LIMITED = """
import pathlib, resource, sys, torch
from offbeat.recovery.tensor_file import laid_out, write_tensors

resource.setrlimit(resource.RLIMIT_FSIZE, (100_001, 100_001))
try:
    write_tensors(pathlib.Path(sys.argv[1]), laid_out({"a": torch.ones(50_000)}))
except OSError as error:
    print(error.strerror)
"""


def test_a_write_that_the_system_cuts_short_is_gone_on_with_and_its_error_is_told(tmp_path):
    told = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path / "x"], check=True, capture_output=True, text=True
    )
    assert told.stdout == "File too large\n"
    assert (tmp_path / "x").stat().st_size == 100_001


def cached_bytes(path):
    """Count what of a file is in the page cache, by reading what can be read without waiting for the disk."""
    page = bytearray(mmap.PAGESIZE)
    found = 0
    number = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)  # what is looked at brings no neighbours in
        for place in range(0, path.stat().st_size, mmap.PAGESIZE):
            try:
                found += os.preadv(number, [page], place, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
    finally:
        os.close(number)
    return found


def drop(path):
    """Drop a file from the page cache, as far as its file system has one."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def test_what_was_saved_leaves_the_page_cache(tmp_path):
    """Where there is one to leave: some file systems are nothing but memory, and some cannot tell."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    tensors = {"a": torch.ones(UNSYNCED_BYTES // 4), "b": torch.ones(100_000)}
    safetensors.torch.save_file(tensors, plain)
    drop(plain)
    try:
        has_left = cached_bytes(plain) < plain.stat().st_size / 2
    except OSError as error:
        assert error.errno in (errno.EOPNOTSUPP, errno.EINVAL)  # noqa: PT017  of a file system that cannot tell
        has_left = False
    if not has_left:
        pytest.skip(f"{tmp_path} is on a file system whose files do not leave memory, or that cannot tell")
    write_tensors(ours, laid_out(tensors))
    assert cached_bytes(ours) < ours.stat().st_size / 2


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -3e38, 3e38, math.inf, -math.inf, math.nan]), max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    chunk=st.integers(1, 4),
)
def test_numbers_are_finite_if_each_is_and_a_sum_that_overflows_says_nothing(values, dtype, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "CHUNK", chunk)
        assert snapshot.are_finite(torch.tensor(values).to(dtype)) == all(map(math.isfinite, values))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_number_among_the_largest_of_its_type_is_found(dtype, value):
    wide = torch.complex128 if dtype.is_complex else torch.float64
    largest = torch.finfo(dtype).max
    numbers = torch.full((2 * snapshot.CHUNK + 3,), largest, dtype=wide)
    assert snapshot.are_finite(numbers.to(dtype))
    numbers[-1] = complex(0, value) if dtype.is_complex else value
    held = numbers.to(dtype)
    assert snapshot.are_finite(held) == bool(held.to(wide).isfinite().all())


def test_a_snapshot_is_in_this_machine_s_memory_whatever_torch_s_default_device():
    with torch.device("meta"):
        copied = snapshot.Buffers().take({"a": torch.ones(3, device="cpu")})
    assert copied["a"].device.type == "cpu"
    assert copied["a"].tolist() == [1, 1, 1]
