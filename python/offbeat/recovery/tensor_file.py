"""A .safetensors file that is on the disk when it is written, with its digest, and leaves nothing in memory.

The safetensors library writes a file whole, and such a file must then be read again for its digest. Here each
piece is hashed while it is in the processor's cache, and what has been written is got to the disk and dropped
from the page cache on the way: beside a training that is what makes a save cheap. Dirty pages never pile
up, no new memory is touched for a copy that nobody reads, and a user's data set stays cached.
`benches/recovery.py` measures it.

The format is the library's: 8 bytes with the header's length, the header as JSON, the tensors one after the
other. Those of larger elements come first, so that each lies at a multiple of its own element's size.
"""

import errno
import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from offbeat.errors import UnsupportedTensorError
from offbeat.recovery.manifest import FileEntry

__all__ = ["DTYPES", "Layout", "laid_out", "write_tensors"]

DTYPES = {
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls torch's types."""

PIECE_BYTES = 2**20
"""Hashed and written at once: it stays in the processor's cache between the two."""
UNSYNCED_BYTES = 2**25
"""Written before it is got to the disk; as many stay in the page cache at most."""
LARGEST_HEADER_BYTES = 100_000_000
"""What the library reads at most; a file with more would be no checkpoint."""
_HEADER_UNIT = 8
"""The header is filled up with spaces to a multiple of it, so that the tensors are aligned."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What comes in a file, one after the other.

    Attributes:
        header: With its length before it.
        tensors: In the order in which it has them.
    """

    header: bytes
    tensors: Iterable[torch.Tensor]


def laid_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Say what comes where.

    Args:
        tensors: By name, which is any but "__metadata__"; of `DTYPES`.

    Raises:
        UnsupportedTensorError: If nobody could read the header, so many or so long are the names.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    return Layout(_header(ordered), ordered.values())


def write_tensors(path: Path, layout: Layout) -> FileEntry:
    """Write a new file, and get it to the disk.

    Args:
        path: Where to.
        layout: Of tensors that are contiguous and on the CPU.

    Returns:
        The file, with the digest of what was given to the system.

    Raises:
        OSError: If it cannot be written.
    """
    with _Written(path) as written:
        written.add(memoryview(layout.header))
        for tensor in layout.tensors:
            written.add(_bytes(tensor))
        return written.end()


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _HEADER_UNIT)
    if len(raw) > LARGEST_HEADER_BYTES:
        one = list(tensors)[len(tensors) // 2]  # most likely of those that are so many
        raise UnsupportedTensorError(
            f"{len(tensors)} tensors, as {reprlib.repr(one)}, have {len(raw)} bytes of names and shapes, and "
            f".safetensors allows {LARGEST_HEADER_BYTES}: keep many numbers as one array, and not as numpy's "
            f"numbers in a list"
        )
    return len(raw).to_bytes(8, "little") + raw


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Give what a contiguous tensor has in memory, which is little-endian as the format is."""
    in_a_row = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous one of no or one element may say 0
    return in_a_row.view(torch.uint8).numpy().data


class _Written:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._num_bytes = self._num_synced = 0

    def __enter__(self) -> Self:
        self._file = FileIO(self._path, "xb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, raw: memoryview) -> None:
        for begin in range(0, len(raw), PIECE_BYTES):
            piece = raw[begin : begin + PIECE_BYTES]
            self._digest.update(piece)
            self._num_bytes += len(piece)
            while piece:
                num_written = self._file.write(piece)
                if not num_written:  # as a broken file system may say, again and again
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(self._path))
                piece = piece[num_written:]
            if self._num_bytes - self._num_synced >= UNSYNCED_BYTES:
                self._sync()

    def end(self) -> FileEntry:
        self._sync()
        return FileEntry(self._path.name, self._num_bytes, self._digest.hexdigest())

    def _sync(self) -> None:
        number = self._file.fileno()
        os.fsync(number)
        if hasattr(os, "posix_fadvise"):  # which macOS has not
            with suppress(OSError):  # an advice: a file system that takes none has the file all the same
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        self._num_synced = self._num_bytes
