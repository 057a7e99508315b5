"""What users may give for a tensor, and what is refused with its name, shape and dtype."""

import array
import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from offbeat import arrays
from offbeat.errors import ConfigError, ModelMismatchError, UnsupportedTensorError

VALUES = [1.0, -2.5, 3.0]


class OnlyDlpack:
    """Something with `__dlpack__` and no buffer."""

    def __init__(self, inside):
        self.inside = inside

    def __dlpack__(self, **keywords):
        return self.inside.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.inside.__dlpack_device__()


@pytest.mark.parametrize(
    "given",
    [
        np.array(VALUES, np.float32),
        np.array(VALUES, ">f4"),
        np.array([VALUES, VALUES], np.float32).T[:, 0],
        array.array("f", VALUES),
        memoryview(np.array(VALUES, np.float32)),
        torch.tensor(VALUES),
        torch.nn.Parameter(torch.tensor(VALUES)),
        torch._neg_view(-torch.tensor(VALUES)),
        OnlyDlpack(np.array(VALUES, np.float32)),
    ],
    ids=["numpy", "big endian", "strided", "array", "memoryview", "tensor", "Parameter", "negated", "dlpack"],
)
def test_whatever_has_a_buffer_or_dlpack_is_taken(given):
    taken, code = arrays.as_array("w", given)
    assert code == "f32"
    assert taken.dtype == np.float32
    assert taken.tolist() == VALUES


@pytest.mark.parametrize(
    "given",
    [
        np.array(VALUES, ml_dtypes.bfloat16),
        torch.tensor(VALUES, dtype=torch.bfloat16),
        torch._neg_view(-torch.tensor(VALUES, dtype=torch.bfloat16)),
    ],
    ids=["ml_dtypes", "torch", "negated"],
)
def test_bfloat16_is_taken_as_its_bits(given):
    taken, code = arrays.as_array("w", given)
    assert (code, taken.dtype) == ("bf16", np.uint16)
    assert taken.view(ml_dtypes.bfloat16).tolist() == VALUES


def test_taking_copies_nothing_that_need_not_be_copied():
    for given in (np.zeros(3, np.float32), torch.zeros(3)):
        taken, _ = arrays.as_array("w", given)
        taken[1] = 5
        assert given[1] == 5
        assert arrays.contiguous(taken) is taken


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.array(["a"]), "str"),
        ([1.0, 2.0], "list"),
        (1.0, "float"),
        (object(), "object"),
    ],
)
def test_what_no_tensor_can_be_is_refused_by_name(given, said):
    with pytest.raises(UnsupportedTensorError, match=rf"'head\.w'.*{said}"):
        arrays.as_array("head.w", given)


def test_table_keeps_the_dicts_order_and_tells_parameters_from_buffers():
    given = {
        "z": np.zeros((2, 3), np.float32),
        "a": torch.zeros(4, dtype=torch.bfloat16),
        "n": np.int64(7),
        "m": np.zeros(2, bool),
        "h": np.zeros(1, np.float16),
    }
    table, values = arrays.describe(given)
    read = [(t["name"], t["shape"], t["dtype"], t["role"]) for t in json.loads(table)]
    assert read == [
        ("z", [2, 3], "f32", "parameter"),
        ("a", [4], "bf16", "parameter"),
        ("n", [], "i64", "buffer"),
        ("m", [2], "bool", "buffer"),
        ("h", [1], "f16", "parameter"),
    ]
    assert [v.nbytes for v in values] == [24, 8, 8, 2, 2]


def test_float64_is_refused_by_name_in_every_tensor_that_has_it():
    given = {"a": np.zeros(2), "b": np.zeros(2, np.float32), "c": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(UnsupportedTensorError, match=r"'a' has dtype float64.*'c' has dtype float64"):
        arrays.describe(given)


def test_name_that_is_no_string_is_refused():
    with pytest.raises(ConfigError, match="3 is no name"):
        arrays.describe({3: np.zeros(2, np.float32)})


def test_wrong_shape_or_dtype_names_the_tensor_and_both():
    (entry,) = arrays.read_table(arrays.describe({"w": np.zeros((2, 3), np.float32)})[0])
    for given in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float64)):
        taken, code = arrays.as_array("w", given)
        shape = re.escape(str(given.shape))
        both = rf"'w' has shape {shape} and dtype {given.dtype}.*\(2, 3\).*float32"
        with pytest.raises(ModelMismatchError, match=both):
            entry.check(taken, code, "the push")


def test_out_that_cannot_be_written_in_place_is_refused():
    (entry,) = arrays.read_table(arrays.describe({"w": np.zeros((2, 3), np.float32)})[0])
    fixed = np.zeros((2, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        arrays.writable("w", fixed, entry)
    with pytest.raises(ConfigError, match="not C-contiguous"):
        arrays.writable("w", np.zeros((3, 2), np.float32).T, entry)


class Elsewhere(torch.Tensor):
    """A tensor that is not in the host's memory, as far as one can be told without a device."""

    device = torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.full(3, -1, ">f4"), "of foreign byte order"),
        (memoryview(np.full(3, -1, ">f4")), "of foreign byte order"),
        (torch.zeros(3).as_subclass(Elsewhere), "on cuda:3"),
        (torch._neg_view(torch.zeros(3)), "negated lazily by torch"),
    ],
    ids=["big endian", "big-endian memoryview", "device", "negated"],
)
def test_out_of_which_a_copy_would_be_written_is_refused(given, said):
    (entry,) = arrays.read_table(arrays.describe({"w": np.zeros(3, np.float32)})[0])
    with pytest.raises(ConfigError, match=rf"out\['w'\] is {said}, so it cannot be written in place; give"):
        arrays.writable("w", given, entry)


def test_bfloat16_without_ml_dtypes_is_uint16():
    code = (
        "import sys\n"
        "sys.modules['ml_dtypes'] = None\n"
        "import numpy as np\n"
        "from offbeat import arrays\n"
        "assert arrays.dtype_of('bf16') == np.uint16\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_torch_is_not_imported_for_arrays(run_python):
    loaded = run_python(
        "import sys, numpy\n"
        "from offbeat import arrays\n"
        "arrays.describe({'w': numpy.zeros(2, numpy.float32)})\n"
        "print('torch' in sys.modules)"
    )
    assert loaded.split() == ["False"]
