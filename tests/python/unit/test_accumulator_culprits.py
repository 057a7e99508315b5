"""Whose losses were not finite comes out of numbers that were added up."""

import pytest

from offbeat.accumulator.culprits import culprits_in, num_numbers, told, worded


@pytest.mark.parametrize("culprits", [[], [0], [1, 49, 50, 119], list(range(120))], ids=len)
def test_sums_over_many_members_tell_each_of_them(culprits):
    each = [told(rank, 120, is_finite=rank not in culprits) for rank in range(120)]
    sums = [sum(numbers) for numbers in zip(*each, strict=True)]
    assert len(sums) == num_numbers(120) == 3
    assert culprits_in(sums) == culprits


def test_one_that_is_alone_sends_and_says_nothing():
    assert told(0, 1, is_finite=False) == []
    assert worded([], 1) == ""


def test_it_is_said_whose_they_were():
    assert worded([3], 5) == " (a loss of member 3 was)"
    assert worded([1, 3, 4], 5) == " (a loss of member 1 and of 2 more was)"
    assert worded([], 5) == " (while the losses of all members were finite)"
