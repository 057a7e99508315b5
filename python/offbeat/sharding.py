"""Shares of a dataset, one per worker."""

import operator
from collections.abc import Sized
from typing import SupportsIndex, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset, Subset

from offbeat.errors import ConfigError

__all__ = ["partition"]

Sample_co = TypeVar("Sample_co", covariant=True)


def partition(dataset: Dataset[Sample_co], rank: int, world_size: int) -> Subset[Sample_co]:
    """Give the share of a dataset that belongs to one of several workers.

    Every `world_size`-th sample, from sample `rank` on: the shares are disjoint, together they are the whole
    dataset, their lengths differ by one at most, and a dataset that is sorted by class is not dealt out class
    by class. Nothing is copied.

    Both numbers are those with which the workers were started, as `init_distributed` returns them. An
    averager's are none to share by: at a server its `world_size` is who was in the newest round.

    Args:
        dataset: A dataset with a length.
        rank: Which share, 0 to `world_size - 1`.
        world_size: How many shares there are, at least 1.

    Returns:
        A `torch.utils.data.Subset` of `dataset`.

    Raises:
        ConfigError: If the dataset is iterable only, if a number is none or out of its range, or if there are
            fewer samples than shares.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> import torch
        >>> list(offbeat.partition(TensorDataset(torch.arange(7)), 1, 3).indices)
        [1, 4]
    """
    if not _are_whole(rank, world_size):
        raise ConfigError(
            f"rank is {rank!r} and world_size is {world_size!r}: give whole numbers; from the environment, "
            f'int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"])'
        )
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank is {rank} and world_size is {world_size}: there must be at least one share, and shares "
            f"are numbered 0 to world_size - 1; give what offbeat.init_distributed() returns (an averager's "
            f"world_size at a server is who was in its newest round)"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so its samples cannot be numbered: give each worker "
            f"its own stream instead (every world_size-th sample from number rank on)"
        )
    length = len(cast(Sized, dataset))
    if length < world_size:
        raise ConfigError(f"{length} samples cannot be shared among {world_size} workers")
    return Subset(dataset, range(rank, length, world_size))


def _are_whole(*numbers: object) -> bool:
    try:
        for number in numbers:
            operator.index(cast(SupportsIndex, number))  # a float tensor has an `__index__`, which raises
    except TypeError:
        return False
    return not any(isinstance(number, bool) for number in numbers)
