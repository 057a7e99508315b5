"""The demo's pictures: found where they may be, read exactly, refused when damaged."""

import gzip
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.demo import data
from offbeat.errors import ConfigError

NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


def idx(array: np.ndarray) -> bytes:
    """Encode in the IDX format: two zeros, type, number of dimensions, sizes, elements."""
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_set(folder, *, num_train: int = 6, num_test: int = 4, packed: bool = True) -> dict[str, np.ndarray]:
    """Write a small data set under Fashion-MNIST's names and return its arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    arrays = {
        NAMES[0]: rng.integers(0, 256, (num_train, 28, 28)),
        NAMES[1]: rng.integers(0, 10, num_train),
        NAMES[2]: rng.integers(0, 256, (num_test, 28, 28)),
        NAMES[3]: rng.integers(0, 10, num_test),
    }
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.fixture
def no_system_data(monkeypatch, tmp_path):
    """Neither Debian's files nor any below the current directory."""
    monkeypatch.setattr(data, "DEBIAN_DIR", tmp_path / "debian")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_images_are_scaled_and_labels_kept(tmp_path, packed):
    arrays = write_set(tmp_path, packed=packed)
    found = data.load(tmp_path)
    assert (found.name, found.is_benchmark) == ("Fashion-MNIST", True)
    assert found.train_images.dtype == found.test_images.dtype == np.float32
    assert found.train_labels.dtype == found.test_labels.dtype == np.int64
    assert found.train_images.shape == (6, 1, 28, 28)
    assert found.test_images.shape == (4, 1, 28, 28)
    np.testing.assert_array_equal(
        found.train_images[:, 0], arrays[NAMES[0]].astype(np.float32) / np.float32(255)
    )
    np.testing.assert_array_equal(found.test_labels, arrays[NAMES[3]])
    assert found.train_images.max() <= 1.0


def test_torchvision_root_is_understood(tmp_path):
    write_set(tmp_path / "FashionMNIST" / "raw", packed=False)
    assert data.load(tmp_path).is_benchmark


def test_debian_files_are_found_without_being_named(no_system_data):
    write_set(no_system_data / "debian")
    assert data.load().is_benchmark


def test_torchvision_files_below_the_current_directory_are_found(no_system_data):
    write_set(no_system_data / "data" / "FashionMNIST" / "raw")
    assert data.load().is_benchmark


def test_digits_stand_in_and_say_so(no_system_data):
    pytest.importorskip("sklearn")
    found = data.load()
    assert not found.is_benchmark
    assert "not the benchmark" in found.name
    assert found.train_images.shape == (1437, 1, 28, 28)
    assert found.test_images.shape == (360, 1, 28, 28)
    assert found.train_images.dtype == np.float32
    assert found.train_labels.dtype == np.int64
    assert (found.train_images.min(), found.train_images.max()) == (0.0, 1.0)
    assert set(found.test_labels.tolist()) == set(range(10))


def test_named_folder_without_data_is_refused_not_replaced_by_digits(tmp_path):
    with pytest.raises(ConfigError, match=r"no Fashion-MNIST in .*FashionMNIST/raw"):
        data.load(tmp_path)


def test_no_data_and_no_scikit_learn_says_what_to_install(no_system_data, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"dataset-fashion-mnist.*pip install scikit-learn"):
        data.load()


def test_missing_file_is_named(tmp_path):
    write_set(tmp_path)
    (tmp_path / f"{NAMES[2]}.gz").unlink()
    with pytest.raises(ConfigError, match=f"has neither {NAMES[2]} nor"):
        data.load(tmp_path)


def test_images_without_their_labels_are_refused(tmp_path):
    write_set(tmp_path, packed=False)
    (tmp_path / NAMES[1]).write_bytes(idx(np.zeros(5)))
    with pytest.raises(ConfigError, match=r"has 6 pictures and .* 5 labels"):
        data.load(tmp_path)


def test_label_outside_the_classes_is_refused(tmp_path):
    write_set(tmp_path, packed=False)
    (tmp_path / NAMES[1]).write_bytes(idx(np.full(6, 10)))
    with pytest.raises(ConfigError, match="has label 10; the classes are 0 to 9"):
        data.load(tmp_path)


LABELS = idx(np.arange(5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with , not with 00000801"),
        (b"\x1f\x8b\x08\x00 still packed", "starts with 1f8b0800"),
        (b"\x00\x00\x0d\x01" + LABELS[4:], "starts with 00000d01"),  # elements that are float32
        (b"\x00\x00\x08\x03" + LABELS[4:], "starts with 00000803"),  # pictures
        (LABELS[:6], "ends inside its header, after 6 bytes"),
        (LABELS[:-1], "should hold 5 bytes after its header, and holds only 4"),
        (LABELS + b"\x00", "should hold 5 bytes after its header, and holds more"),
        (b"\x00\x00\x08\x01\xff\xff\xff\xff" + LABELS[8:], "should hold 4294967295 bytes .* only 5"),
    ],
)
def test_damaged_file_is_refused_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data.read_idx(path, item_shape=())


def test_items_of_another_shape_are_refused(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx(np.zeros((2, 32, 32))))
    with pytest.raises(ConfigError, match=r"holds items of shape \(32, 32\), not \(28, 28\)"):
        data.read_idx(path, item_shape=(28, 28))


@pytest.mark.parametrize(
    "content",
    [
        b"not packed at all",
        gzip.compress(LABELS)[:-9],
        gzip.compress(LABELS)[:10] + b"\xff" * 30,
        gzip.compress(LABELS)[:-8] + b"\x00" * 8,
    ],
    ids=["not gzip", "cut short", "damaged", "wrong checksum"],
)
def test_damaged_packing_is_refused(tmp_path, content):
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"labels\.gz cannot be read"):
        data.read_idx(path, item_shape=())


def test_unreadable_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        data.read_idx(tmp_path / "absent", item_shape=())


@given(sizes=st.tuples(*[st.integers(0, 6)] * 3), seed=st.integers(0, 2**32 - 1))
def test_what_was_written_is_read(tmp_path_factory, sizes, seed):
    array = np.random.default_rng(seed).integers(0, 256, sizes).astype(np.uint8)
    path = tmp_path_factory.mktemp("idx") / "file.gz"
    path.write_bytes(gzip.compress(idx(array)))
    np.testing.assert_array_equal(data.read_idx(path, item_shape=sizes[1:]), array)


@pytest.mark.skipif(not data.DEBIAN_DIR.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_the_real_files_are_whole():
    found = data.load_fashion_mnist(data.DEBIAN_DIR)
    assert (len(found.train_images), len(found.test_images)) == (60_000, 10_000)
    assert np.bincount(found.test_labels).tolist() == [1000] * 10
