"""Flat memory: what is used again is nobody's any more."""

import re
from pathlib import Path

import pytest
import torch

from offbeat.local.flat import LARGE, Room, pack, slices

LIKE = [
    torch.arange(12.0).view(3, 4),
    torch.arange(5, dtype=torch.float64),
    torch.ones(2, dtype=torch.bfloat16),
]


def addresses(flat):
    return {kind: tensor.data_ptr() for kind, tensor in flat.items()}


def test_memory_that_nobody_holds_is_used_again_also_for_less():
    room = Room(1)
    flat = pack(LIKE, LIKE, room=room)
    first = addresses(flat)
    assert set(first) == {torch.float32, torch.float64}
    del flat
    again = pack(LIKE, LIKE, room=room)
    assert addresses(again) == first
    assert all(
        torch.equal(part, one.to(part.dtype)) for part, one in zip(slices(LIKE, again), LIKE, strict=True)
    )
    del again
    less = pack(LIKE[:1], [None], room=room)
    assert less[torch.float32].data_ptr() == first[torch.float32]
    assert torch.equal(less[torch.float32], torch.zeros(12))


def test_what_is_held_through_a_view_alone_is_nobody_elses():
    room = Room(2)
    flat = pack(LIKE, LIKE, room=room)
    held = slices(LIKE, flat)[0].detach()[1:]
    first = flat[torch.float32].data_ptr()
    del flat
    other = pack(LIKE, [None] * len(LIKE), room=room)
    assert other[torch.float32].data_ptr() != first
    assert torch.equal(held, LIKE[0][1:])
    del held
    assert room.empty(LIKE)[torch.float32].data_ptr() == first


def test_what_is_more_than_is_kept_comes_from_the_system_and_what_is_larger_replaces():
    room = Room(1)
    one, two = pack(LIKE, LIKE, room=room), pack(LIKE, LIKE, room=room)
    assert not set(addresses(one).values()) & set(addresses(two).values())
    del one, two
    larger = [torch.ones(100)]
    flat = pack(larger, larger, room=room)
    first = addresses(flat)
    del flat
    assert addresses(pack(larger, larger, room=room)) == first


def test_values_are_scaled_in_the_wide_dtype_whatever_their_strides():
    values = [LIKE[0].t().contiguous().t(), LIKE[1], LIKE[2], None]
    flat = pack([*LIKE, LIKE[0]], values, scale=0.1)
    wanted = [0.1 * LIKE[0], 0.1 * LIKE[1], LIKE[2].float() * 0.1, torch.zeros(3, 4)]
    assert all(
        torch.equal(part, one) for part, one in zip(slices([*LIKE, LIKE[0]], flat), wanted, strict=True)
    )


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address):
    """What Linux notes of the memory at an address (man proc_pid_smaps, VmFlags)."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", name):
            begin, end = (int(number, 16) for number in name.split("-"))
            is_there = begin <= address < end
        elif is_there and name == "VmFlags:":
            return rest.split()
    return None


@pytest.mark.skipif(not THP.exists(), reason="a kernel without large pages")
def test_large_memory_that_is_kept_is_of_large_pages_and_is_used_again():
    room = Room(1)
    like = [torch.ones(LARGE // 4 - 5), torch.ones(5)]
    flat = pack(like, like, room=room)
    first = flat[torch.float32].data_ptr()
    assert "hg" in flags_of(first)
    part = slices(like, flat)[1]
    del flat
    assert pack(like, [None, None], room=room)[torch.float32].data_ptr() != first, "a view holds it"
    assert torch.equal(part, torch.ones(5))
    del part
    assert pack(like[:1], like[:1], room=room)[torch.float32].data_ptr() == first
