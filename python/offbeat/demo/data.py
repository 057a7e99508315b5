"""The pictures that the demo and the tests train on, read with nothing but numpy.

Fashion-MNIST is looked for where Debian's package `dataset-fashion-mnist` puts it, then in torchvision's
layout; the handwritten digits that scikit-learn carries stand in for it, and say that they are not the
benchmark. Nothing is fetched from anywhere.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError

__all__ = ["ImageData", "load", "load_digits", "load_fashion_mnist", "read_idx"]

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts its four files."""

DEFAULT_DATA_DIR = Path("data")
"""The root that torchvision's own examples use."""

TORCHVISION_SUBDIR = Path("FashionMNIST", "raw")
"""Where torchvision puts the files below the root it is given."""

_SIDE = 28
_NUM_CLASSES = 10
_IDX_UINT8 = 0x08  # the element type of all four files; IDX knows five others


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageData:
    """Pictures and their classes, in a part to train on and a part to judge by.

    Attributes:
        train_images: float32 in [0, 1], shape ``[N, 1, 28, 28]``.
        train_labels: int64 in [0, 10), shape ``[N]``.
        test_images: float32 in [0, 1], shape ``[M, 1, 28, 28]``.
        test_labels: int64 in [0, 10), shape ``[M]``.
        name: What it is, for people.
        is_benchmark: Whether accuracies on it compare with published ones.
    """

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    name: str
    is_benchmark: bool


def load(data_dir: Path | None = None) -> ImageData:
    """Load Fashion-MNIST, or the stand-in where it is not on this machine.

    Args:
        data_dir: Where to look for Fashion-MNIST, and nowhere else: the folder of its four files, or a root
            that was given to torchvision. None looks where Debian's package puts them and then below
            ``./data``, and takes the digits where neither has them.

    Raises:
        ConfigError: If `data_dir` does not hold the files, a file is damaged, or there is no data at all.
    """
    if data_dir is not None:
        folder = _folder_with_files([data_dir, data_dir / TORCHVISION_SUBDIR])
        if folder is None:
            raise ConfigError(
                f"no Fashion-MNIST in {data_dir}: neither there nor in {data_dir / TORCHVISION_SUBDIR} "
                f"are {_file_names()} (each may end in .gz)"
            )
        return load_fashion_mnist(folder)
    folder = _folder_with_files([DEBIAN_DIR, DEFAULT_DATA_DIR / TORCHVISION_SUBDIR])
    return load_digits() if folder is None else load_fashion_mnist(folder)


def load_fashion_mnist(folder: Path) -> ImageData:
    """Load the four files of Fashion-MNIST, packed by gzip or not, from one folder.

    Raises:
        ConfigError: If a file is missing or damaged, or images and labels do not belong together.
    """
    train_images, train_labels = _read_part(folder, "train")
    test_images, test_labels = _read_part(folder, "t10k")
    return ImageData(
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        name="Fashion-MNIST",
        is_benchmark=True,
    )


def load_digits() -> ImageData:
    """Load scikit-learn's 1797 digits, drawn three times larger in the middle of a 28 × 28 picture.

    The last fifth, written by other people than the rest, is the part to judge by.

    Raises:
        ConfigError: If scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ConfigError(
            "no data to train on: install Debian's package dataset-fashion-mnist, name a folder that has "
            "Fashion-MNIST, or install scikit-learn for its digits (pip install scikit-learn)"
        ) from error
    small, labels = cast(
        "tuple[NDArray[np.float64], NDArray[np.int64]]", datasets.load_digits(return_X_y=True)
    )
    images = (small.reshape(-1, 8, 8) / 16.0).astype(np.float32)  # its values run from 0 to 16
    images = images.repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None]
    num_train = len(images) * 4 // 5
    return ImageData(
        train_images=images[:num_train],
        train_labels=labels[:num_train].astype(np.int64),
        test_images=images[num_train:],
        test_labels=labels[num_train:].astype(np.int64),
        name="digits of scikit-learn (not the benchmark)",
        is_benchmark=False,
    )


def read_idx(path: Path, *, item_shape: Sequence[int]) -> NDArray[np.uint8]:
    """Read a file in the IDX format, whose header must say what is expected and whose length must fit it.

    Args:
        path: The file; packed by gzip if its name ends in ``.gz``.
        item_shape: Shape of one item, ``(28, 28)`` for pictures and ``()`` for labels.

    Returns:
        uint8, shape ``[N, *item_shape]``.

    Raises:
        ConfigError: If the file cannot be read, is not IDX, differs in length from what its header says, or
            holds other items.
    """
    try:
        # The bytes are counted, never trusted: a packed file can promise, or unpack to, any size.
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            return _parse_idx(file, path, tuple(item_shape))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse_idx(file: BinaryIO, path: Path, item_shape: tuple[int, ...]) -> NDArray[np.uint8]:
    num_dims = 1 + len(item_shape)
    header = file.read(4 + 4 * num_dims)
    magic = bytes((0, 0, _IDX_UINT8, num_dims))
    if header[:4] != magic:
        raise ConfigError(
            f"{path} is not the IDX file expected: it starts with {header[:4].hex()}, not with {magic.hex()}"
        )
    if len(header) < 4 + 4 * num_dims:
        raise ConfigError(f"{path} ends inside its header, after {len(header)} bytes")
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))
    if shape[1:] != item_shape:
        raise ConfigError(f"{path} holds items of shape {shape[1:]}, not {item_shape}")
    num_bytes = math.prod(shape)
    body = _read_at_most(file, num_bytes + 1)
    if len(body) != num_bytes:
        found = f"only {len(body)}" if len(body) < num_bytes else "more"
        raise ConfigError(f"{path} should hold {num_bytes} bytes after its header, and holds {found}")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _read_at_most(file: BinaryIO, limit_bytes: int) -> bytes:
    """Read to the end or to the limit; memory grows with what arrives, not with what the header promised."""
    chunks = []
    while limit_bytes > 0 and (chunk := file.read(min(limit_bytes, 1 << 20))):
        chunks.append(chunk)
        limit_bytes -= len(chunk)
    return b"".join(chunks)


def _read_part(folder: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images_path, labels_path = (_find(folder, name) for name in _names_of(part))
    images = read_idx(images_path, item_shape=(_SIDE, _SIDE))
    labels = read_idx(labels_path, item_shape=())
    if len(images) != len(labels) or len(images) == 0:
        raise ConfigError(f"{images_path} has {len(images)} pictures and {labels_path} {len(labels)} labels")
    if labels.max() >= _NUM_CLASSES:
        raise ConfigError(f"{labels_path} has label {labels.max()}; the classes are 0 to {_NUM_CLASSES - 1}")
    return images[:, None].astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _names_of(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _file_names() -> str:
    return ", ".join((*_names_of("train"), *_names_of("t10k")))


def _find(folder: Path, name: str) -> Path:
    """Return the file's path, packed or not: torchvision keeps both."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"{folder} has neither {name} nor {name}.gz")


def _folder_with_files(folders: Sequence[Path]) -> Path | None:
    """Return the first folder with any of the files; that one must then have all of them."""
    names = (*_names_of("train"), *_names_of("t10k"))
    for folder in folders:
        if any((folder / f"{name}{suffix}").is_file() for name in names for suffix in ("", ".gz")):
            return folder
    return None
