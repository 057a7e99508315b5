"""A nest of state comes out of its files equal to the bit; what no file holds is named."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.errors import CheckpointError, UnsupportedTensorError
from offbeat.recovery.nest import flatten, unflatten
from offbeat.recovery.tensor_file import DTYPES, laid_out, write_tensors


def round_trip(state, folder=None):
    flat = flatten(state, what="state")
    tensors = {name: tensor.contiguous() for name, tensor in flat.tensors.items()}
    if folder is not None:
        write_tensors(folder / "nest.safetensors", laid_out(tensors))
        tensors = safetensors.torch.load_file(folder / "nest.safetensors")
    return unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), tensors)


def assert_same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (
            a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        )
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype.char, a.shape, a.tobytes()) == (b.dtype.char, b.shape, b.tobytes())
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (key, value), (other_key, other) in zip(a.items(), b.items(), strict=True):
            assert_same(key, other_key)
            assert_same(value, other)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    num_bytes = math.prod(shape) * dtype.itemsize
    pool = st.integers(0, 1) if dtype == torch.bool else st.integers(0, 255)
    raw = draw(st.lists(pool, min_size=num_bytes, max_size=num_bytes))
    return torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def arrays(draw):
    values = draw(st.lists(st.integers(0, 100), max_size=4))
    array = np.array(values, dtype=draw(st.sampled_from("?bBhHiIlLefdF")))
    return array if draw(st.booleans()) or not values else array[0]


keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=3),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors() | arrays()
)
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@given(nests)
def test_any_nest_comes_out_equal_to_the_bit_and_of_the_same_types(state):
    assert_same(round_trip(state), state)


@given(state=nests)
def test_it_does_so_through_a_file(state, tmp_path_factory):
    assert_same(round_trip(state, tmp_path_factory.mktemp("nest")), state)


def test_numbers_that_json_has_no_word_for_are_kept():
    state = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**63, -(2**63) - 1, 10**5000]
    assert_same(round_trip(state), state)


def test_states_of_random_generators_are_kept():
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the one that datasets use
        "torch": torch.get_rng_state(),
    }
    assert_same(round_trip(state), state)


def test_keys_that_would_give_two_tensors_one_name_do_not():
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    assert len(flatten(state, what="state").tensors) == 4
    assert_same(round_trip(state), state)


def test_a_name_that_no_file_may_have_gets_another(tmp_path):
    state = {"__metadata__": torch.ones(1), "": torch.zeros(1)}
    assert_same(round_trip(state, tmp_path), state)


def test_a_parameter_comes_out_as_a_tensor_and_others_keep_their_memory():
    parameter = nn.Parameter(torch.ones(3))
    flat = flatten({"p": parameter}, what="model")
    assert flat.tensors["p"].data_ptr() == parameter.data_ptr()
    assert not flat.tensors["p"].requires_grad


def holding_itself():
    state = []
    state.append(state)
    return state


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"state\['a'\]\[1\] is a builtins.object: a checkpoint holds plain values"),
        (lambda: 0, r"state\['a'\]\[1\] is a builtins.function"),
        ({1, 2}, r"\[1\] is a builtins.set"),
        (1j, r"\[1\] is a builtins.complex"),
        (Text("x"), r"\[1\] is a .*\.Text"),
        (defaultdict(list), r"\[1\] is a collections.defaultdict"),
        (namedtuple("Pair", "x")(1), r"\[1\] is a .*\.Pair"),  # noqa: PYI024  as another's code may have
        (torch.ones(2).to_sparse(), r"\[1\] is torch.sparse_coo"),
        (torch.ones(2, device="meta"), r"\[1\] is on the meta device"),
        (torch.ones(2, dtype=torch.complex128), r"\[1\] is torch.complex128"),
        (np.array(["x"]), r"\[1\] is of numpy's type <U1"),
        (np.array([1], dtype=">i4"), r"\[1\] is of numpy's type >i4"),
        (holding_itself(), r"\[1\]\[0\] holds itself"),
        ({(torch.ones(1),): 1}, r"\[1\] has a tensor for a key"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_its_place(value, said):
    with pytest.raises(UnsupportedTensorError, match=said):
        flatten({"a": [0, value]}, what="state")


def test_all_that_is_refused_is_named_at_once():
    with pytest.raises(UnsupportedTensorError, match=r"\['a'\] is .*; state\['b'\] is "):
        flatten({"a": object(), "b": object()}, what="state")


def test_of_very_many_the_first_are_named_and_the_others_counted():
    told = "; and so of 192 more"
    with pytest.raises(UnsupportedTensorError, match=r"\['7'\] is a builtins.set: [^;]*" + told) as caught:
        flatten({str(number): {1} for number in range(200)}, what="state")
    assert "['8']" not in str(caught.value)


@pytest.mark.parametrize(
    "value", [torch.ones(2), np.ones(2), np.float64(1)], ids=["tensor", "array", "number"]
)
def test_a_tensor_whose_name_no_file_can_hold_is_refused_by_its_place(value):
    with pytest.raises(UnsupportedTensorError, match=r"state\['\\ud800'\] has half a surrogate pair"):
        flatten({"\ud800": value}, what="state")
    assert flatten({"\ud800": 1}, what="state").skeleton == {"dict": {"\ud800": 1}}


@pytest.mark.parametrize(
    "skeleton", [{"tensor": "gone"}, {"what": 1}, {}, {"tuple": 3}, {"float": "zz"}, {"a": 1, "b": 2}]
)
def test_a_skeleton_of_no_nest_is_an_error(skeleton):
    with pytest.raises(CheckpointError, match="no state has a part"):
        unflatten(skeleton, {})


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "made",
    [
        lambda o: SCHEDULERS.MultiStepLR(o, [3, 4]),
        lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 3),
        lambda o: SCHEDULERS.OneCycleLR(o, 0.1, 100),
        lambda o: SCHEDULERS.CyclicLR(o, 0.1, 0.2),
        lambda o: SCHEDULERS.LambdaLR(o, lambda e: 1),
        lambda o: SCHEDULERS.SequentialLR(o, [SCHEDULERS.ConstantLR(o), SCHEDULERS.StepLR(o, 3)], [3]),
        lambda o: SCHEDULERS.ChainedScheduler([SCHEDULERS.ConstantLR(o), SCHEDULERS.ExponentialLR(o, 0.9)]),
    ],
)
def test_states_of_torch_s_schedulers_are_kept(made):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    state = made(optimizer).state_dict()
    assert_same(round_trip(state), state)
