"""A digest tells nested values from others, and the same ones from none."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from offbeat.recovery.digest import digest_of

ONE, OTHER = torch.arange(3.0), torch.arange(1.0, 4.0)


@dataclass
class Sample:
    inputs: object
    name: str = ""


class Graph:
    def __init__(self, nodes):
        self.nodes, self.itself = nodes, self


VALUES = {
    "a number": 1,
    "another": 2,
    "a float": 1.5,
    "a text": "1",
    "nothing": None,
    "a list": [1, 2],
    "in another order": [2, 1],
    "a mapping": {"a": 1},
    "another key": {"b": 1},
    "a set": {1, 2, 3},
    "a tensor": torch.arange(6.0),
    "of another shape": torch.arange(6.0).view(2, 3),
    "of another dtype": torch.arange(6),
    "of other values": torch.arange(6.0) + torch.tensor([0, 0, 0, 0, 0, 1]),
    "an array": np.arange(6.0),
    "of other numbers": np.arange(1.0, 7.0),
    "of objects": np.array([1, "a"], dtype=object),
    "a numpy number": np.float32(3),
    "another numpy number": np.float32(4),
    "two": (ONE, OTHER),
    "two in another order": (OTHER, ONE),
    "by name": {"a": ONE, "b": OTHER},
    "by other names": {"a": OTHER, "b": ONE},
    "in a dataclass": Sample(ONE),
    "another in it": Sample(OTHER),
    "in an object": Graph(ONE),
    "another in that": Graph(OTHER),
    "in a deque": deque([ONE]),
    "sparse": torch.eye(3).to_sparse(),
    "of other places": torch.eye(3).flip(0).to_sparse(),
}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": ONE, "b": OTHER}, {"b": OTHER, "a": ONE}),
        (
            {"inputs": ONE, "path": "/here/3.png", "s": 0.25},
            {"inputs": ONE, "path": "/there/job/3.png", "s": 0.5},
        ),
        (Sample(ONE, "here"), Sample(ONE, "there")),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (torch.arange(12.0).view(3, 4).t(), torch.arange(12.0).view(3, 4).t().contiguous()),
        (np.arange(12.0).reshape(3, 4).T, np.ascontiguousarray(np.arange(12.0).reshape(3, 4).T)),
    ],
    ids=["order of a mapping", "beside tensors", "of a dataclass", "of a set", "strides", "numpy's"],
)
def test_what_is_no_sample_does_not_count(one, other):
    assert digest_of(one) == digest_of(other)


def test_of_what_is_not_in_order_the_same_values_are_looked_at_as_of_a_copy():
    pixels = torch.randn(16, 3, 20, 20)
    strided = pixels.to(memory_format=torch.channels_last)
    assert not strided.is_contiguous()
    assert digest_of(pixels) == digest_of(strided)
    assert digest_of(pixels.numpy()) == digest_of(np.asfortranarray(pixels.numpy()))


def test_what_differs_has_another_digest_and_what_does_not_the_same():
    digests = [digest_of(value) for value in VALUES.values()]
    assert len(set(digests)) == len(VALUES)
    assert digests == [digest_of(value) for value in VALUES.values()]


def test_what_came_before_counts():
    assert digest_of(1, before=digest_of(2)) != digest_of(1, before=digest_of(3)) != digest_of(1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(4, dtype=torch.cfloat).conj(),
        torch.ones(4, dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.zeros(0),
        torch.tensor(3),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda tensor: str(tensor.layout) + str(tensor.dtype),
)
def test_any_tensor_has_one(tensor):
    assert digest_of(tensor) == digest_of(tensor.clone())
    assert digest_of(tensor) != digest_of([])


@pytest.mark.parametrize("length", [1023, 1024, 1025, 2047, 5000])
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_of_much_a_part_is_looked_at_with_its_end_and_of_a_state_all(make, length):
    one, other = make(length), make(length)
    other[-1] = 1
    assert digest_of(one) != digest_of(other)
    inside = make(length)
    inside[7] = 1
    assert digest_of(one, most=None) != digest_of(inside, most=None)
