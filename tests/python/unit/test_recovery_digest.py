"""A digest tells nested values from others, and the same ones from none."""

import numpy as np
import pytest
import torch

from offbeat.recovery.digest import digest_of

VALUES = {
    "a number": 1,
    "another": 2,
    "a float": 1.0,
    "a text": "1",
    "nothing": None,
    "a list": [1, 2],
    "a tuple": (1, 2),
    "nested": [[1], 2],
    "a mapping": {"a": 1},
    "another key": {"b": 1},
    "a tensor": torch.arange(6.0),
    "of another shape": torch.arange(6.0).view(2, 3),
    "of another dtype": torch.arange(6),
    "of other values": torch.arange(6.0) + torch.tensor([0, 0, 0, 0, 0, 1]),
    "an array": np.arange(6.0),
    "of other numbers": np.arange(1.0, 7.0),
}


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
