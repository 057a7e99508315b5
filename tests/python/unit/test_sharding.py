"""Shares of a dataset are disjoint, complete, and as equal as they can be."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import offbeat
from offbeat.errors import ConfigError


@hypothesis.given(st.integers(1, 200), st.data())
def test_shares_are_disjoint_complete_and_equal_but_for_one(length, data):
    world_size = data.draw(st.integers(1, length))
    dataset = TensorDataset(torch.arange(length))
    shares = [[int(x) for (x,) in offbeat.partition(dataset, r, world_size)] for r in range(world_size)]
    assert sorted(index for share in shares for index in share) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_dataset_sorted_by_class_is_not_dealt_out_class_by_class():
    dataset = TensorDataset(torch.arange(100) // 50)
    share = offbeat.partition(dataset, 1, 2)
    assert {int(x) for (x,) in share} == {0, 1}


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_share_that_does_not_exist_is_refused(rank, world_size):
    with pytest.raises(
        ConfigError, match=rf"rank is {rank} and world_size is {world_size}.* offbeat\.init_distributed\(\)"
    ):
        offbeat.partition(TensorDataset(torch.arange(4)), rank, world_size)


@pytest.mark.parametrize(("rank", "world_size"), [("0", "2"), (0.0, 2), (None, 2), (torch.tensor(1.5), 2)])
def test_ranks_that_are_no_whole_numbers_are_refused_with_the_remedy(rank, world_size):
    with pytest.raises(ConfigError) as caught:
        offbeat.partition(TensorDataset(torch.arange(4)), rank, world_size)
    assert f"rank is {rank!r} and world_size is {world_size!r}: give whole numbers" in str(caught.value)
    assert 'int(os.environ["RANK"])' in str(caught.value)


def test_more_shares_than_samples_are_refused():
    with pytest.raises(ConfigError, match="2 samples cannot be shared among 3"):
        offbeat.partition(TensorDataset(torch.arange(2)), 0, 3)


def test_a_stream_is_refused_with_the_remedy():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(ConfigError, match="Stream has no length"):
        offbeat.partition(Stream(), 0, 1)
