"""What is reduced where it is: memory that is a gradient's own, and that of no other tensor."""

import pytest
import torch
from torch import nn

from offbeat.accumulator import parcel
from offbeat.accumulator.parcel import Parcel


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    monkeypatch.setattr(parcel, "LARGE", 1)


def parameters():
    return [
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
    ]


def opened(packed, times):
    for one in packed.sums:
        one.mul_(times)  # as an all-reduce of so many equal members
    return packed.open()


def test_a_large_gradient_is_summed_in_its_memory_and_a_narrow_one_in_a_wide_copy():
    like = parameters()
    gradients = [torch.randn(p.shape).to(p.dtype) for p in like]
    wanted = [g.clone() * 3 for g in gradients]
    packed = Parcel(like, gradients, scale=1.0)
    assert sorted(str(one.dtype) for one in packed.sums) == ["torch.float32"] * 3 + ["torch.float64"]
    parts = opened(packed, 3)
    assert parts[0].data_ptr() == gradients[0].data_ptr()
    assert parts[3].data_ptr() == gradients[3].data_ptr()
    assert parts[1].dtype == torch.bfloat16
    assert parts[2].stride() == like[2].stride()
    for part, one in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part, one)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_piece_of_other_memory_is_copied_and_what_is_around_it_stays(scale):
    whole = torch.ones(6, 4)
    like = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))]
    parts = opened(Parcel(like, [whole[:3], whole[:3]], scale=scale), 2)
    assert all(torch.equal(part, torch.full((3, 4), 2 * scale)) for part in parts)
    assert torch.equal(whole, torch.ones(6, 4))


def test_what_is_not_there_is_zeros_and_a_quotient_is_of_all():
    like = parameters()
    packed = Parcel(like, [None] * 4, scale=0.1)
    for one in packed.sums:
        assert not one.any()
        one.fill_(6.0)
    packed.divide(3.0)
    assert all(
        torch.equal(part, torch.full_like(p, 2.0)) for part, p in zip(packed.open(), like, strict=True)
    )


def test_nothing_is_nothing():
    packed = Parcel([], [], scale=1.0)
    packed.divide(2.0)
    assert packed.sums == packed.open() == []
