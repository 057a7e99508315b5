"""The receipt is a plain frozen value."""

import pickle  # noqa: TID251  that it pickles is the claim

import pytest

import offbeat


def test_receipt_is_frozen_and_pickles():
    receipt = offbeat.Receipt(1, 2, 3, 0.5, "damp", applied=True, duplicate=False)
    assert pickle.loads(pickle.dumps(receipt)) == receipt  # noqa: S301  our own bytes
    assert (receipt.term, receipt.version, receipt.staleness, receipt.weight) == (1, 2, 3, 0.5)
    assert receipt.reason is None
    with pytest.raises(AttributeError):
        receipt.weight = 1.0
