"""Batches: where they come from, in which order, and what is in them."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sized
from types import GeneratorType
from typing import Any, TypeGuard, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from offbeat.checks import objects, refuse
from offbeat.errors import ConfigError
from offbeat.naming import a_class

__all__ = [
    "MAKE_PAIRS",
    "Epochs",
    "Given",
    "batches_of",
    "check_any",
    "count",
    "gives_once",
    "is_map_style",
    "loaded",
    "moved",
    "no_batch",
    "split",
]

MAKE_PAIRS = (
    "make it such (a DataLoader with `collate_fn=`), of several tensors as ((one, other), targets), whose "
    "pair forward gets as its one argument"
)
"""What to do where a batch is none."""

_ONCE = "builtins", "itertools", DataLoader.__module__
"""Modules whose iterators give what they have once: after that they are empty."""

_FIRST_DIMENSION = "give inputs or targets whose first dimension is the batch's"


class Epochs:
    """A dataset in batches, in an order that follows from (run id, worker id, epoch) alone.

    The global random state is neither used nor moved: the same shuffle on every worker, which is what a
    global seed gives, cost 1 to 2 points of accuracy.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, order: str, *, pin_memory: bool) -> None:
        """`order` names the sequence of orders; (order, epoch) determines one."""
        self._order = order
        self._batch_size = batch_size
        self._generator = torch.Generator()
        self._sampler: _Permutation | None = None
        if not isinstance(dataset, IterableDataset):
            if not hasattr(dataset, "__len__"):
                raise ConfigError(
                    f"dataset is of type {type(dataset).__name__}, which has no length: give a dataset that "
                    f"has one, or a dataloader= instead"
                )
            self._sampler = _Permutation(len(cast(Sized, dataset)), self._generator)
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._sampler,
            generator=self._generator,
            pin_memory=pin_memory,
        )

    def epoch(self, number: int, *, skipped: int = 0) -> Iterable[Any]:
        """Give the batches of one pass; a dataset that has a `set_epoch` is told the number.

        Args:
            number: Of the pass.
            skipped: Batches at its start that are left out, without a look at their samples.

        Raises:
            ConfigError: If there are some, and the dataset has no order to leave them out of.
        """
        _tell_epoch(self._loader, number)
        if self._sampler is not None:
            self._sampler.first = skipped * self._batch_size
        elif skipped:
            raise ConfigError("batches of an iterable dataset cannot be skipped: it gives its own order")
        digest = hashlib.sha256(f"{self._order}/{number}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self._loader

    def __len__(self) -> int:
        """Count the batches of one pass; TypeError where nobody knows."""
        return len(self._loader)


class Given:
    """A loader of the user's, used as it is, once per epoch; what has a `set_epoch` is told the number."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def epoch(self, number: int) -> Iterable[Any]:
        """Give the batches of one pass."""
        _tell_epoch(self._loader, number)
        return self._loader

    def __len__(self) -> int:
        """Count the batches of one pass; TypeError where nobody knows."""
        return len(cast(Sized, self._loader))


def _tell_epoch(loader: Iterable[Any], number: int) -> None:
    """Tell the number of a pass to whatever of a loader has a `set_epoch`.

    A `DistributedSampler`, or a stream that shuffles itself, gives every pass the same order otherwise.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    parts = (loader, *samplers, getattr(loader, "dataset", None))
    for part in {id(part): part for part in parts}.values():  # each once
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)


def batches_of(
    dataset: Dataset[Any] | None,
    dataloader: Iterable[Any] | None,
    *,
    epochs: int,
    batch_size: int,
    order: str,
    pin_memory: bool,
) -> Epochs | Given:
    """Make a source of what `train` was given: a dataset or a loader, one of the two.

    Raises:
        ConfigError: If it is both, neither, a class, a loader for a dataset or the reverse, a dataset without
            a length, or what gives no batches, or gives them only once where there are several epochs.
    """
    if dataloader is None:
        if dataset is None:
            raise ConfigError("train takes a dataset= or a dataloader=, one of the two, and got neither")
        refuse(objects(dataset=dataset))
        if isinstance(dataset, DataLoader):
            raise ConfigError(f"dataset is {a_class(dataset)}, which gives batches: give it as dataloader=")
        if (
            isinstance(dataset, tuple | list)
            and len(dataset) > 0
            and all(hasattr(part, "shape") for part in dataset)
        ):
            raise ConfigError(
                f"dataset is {a_class(dataset)} of tensors, and no dataset, which gives a pair "
                f"(inputs, targets) for each index: give "
                f"dataset=torch.utils.data.TensorDataset(inputs, targets)"
            )
        return Epochs(dataset, batch_size, order, pin_memory=pin_memory)
    if dataset is not None:
        raise ConfigError("train takes a dataset= or a dataloader=, one of the two, and got both")
    _refuse_what_gives_nothing("dataloader", dataloader)
    if is_map_style(dataloader):
        raise ConfigError(
            f"dataloader is {a_class(dataloader)}, a dataset: give it as dataset=; or, where its "
            f"items are whole batches, dataloader=DataLoader(it, batch_size=None)"
        )
    if epochs > 1 and gives_once(dataloader):
        raise ConfigError(
            f"the dataloader is {a_class(dataloader)}, which gives its batches once, and epochs is "
            f"{epochs}: give what begins anew at each pass, such as a DataLoader or a list, or epochs=1"
        )
    return Given(dataloader)


def gives_once(batches: Iterable[Any]) -> bool:
    """Whether this is a generator, or an iterator of Python's own or of a DataLoader.

    Another loader's own may begin anew; where it does not, `no_batch` tells.
    """
    once = isinstance(batches, GeneratorType) or type(batches).__module__ in _ONCE
    return once and isinstance(batches, Iterator)


def no_batch(epoch: int) -> ConfigError:
    """Give the error of a pass, counted from 0, that gave no batch, where there is to be one."""
    return ConfigError(
        f"the data gave no batch in epoch {epoch + 1}, so that there is nothing to train on: look at its "
        f"length, at drop_last, and whether it can be gone through again"
    )


def loaded(data: Iterable[Any] | Dataset[Any], batch_size: int, *, name: str = "loader") -> Iterable[Any]:
    """Give batches of what gives batches, or of a dataset, in its order; `name` is the keyword of it.

    Raises:
        ConfigError: If it is neither, or a tensor, whose rows would be taken for batches.
    """
    if isinstance(data, torch.Tensor):
        raise ConfigError(
            f"{name} is a tensor of shape {list(data.shape)}, whose rows would be taken for batches: "
            f"give a list of batches, as [inputs], or a TensorDataset of it"
        )
    _refuse_what_gives_nothing(name, data)
    return DataLoader(data, batch_size=batch_size) if is_map_style(data) else cast(Iterable[Any], data)


def _refuse_what_gives_nothing(name: str, value: object) -> None:
    refuse(objects(**{name: value}))
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise ConfigError(
            f"{name} is {value!r}, which gives no batches: give a DataLoader, or another iterable"
        )


def is_map_style(data: object) -> TypeGuard[Dataset[Any]]:
    """Whether this is a torch dataset that gives a sample for each index."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


class _Permutation(Sampler[int]):
    """Every index once, in the order that the generator gives.

    Attributes:
        first: So many at the start are left out.
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        self.first = 0
        self._length = length
        self._generator = generator

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._length, generator=self._generator)[self.first :].tolist()

    def __len__(self) -> int:
        return self._length


def split(batch: object, *, instead: str = MAKE_PAIRS, whose: str = "the loader") -> tuple[Any, Any]:
    """Take a batch apart into (inputs, targets).

    Args:
        batch: As the loader gave it.
        instead: What to do where it is none.
        whose: Who gave it.

    Raises:
        ConfigError: If it is anything but a pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:  # noqa: PLR2004  inputs and targets
        return batch[0], batch[1]
    what = a_class(batch) + (f" of {len(batch)}" if isinstance(batch, Sized) else "")
    raise ConfigError(f"a batch is a pair (inputs, targets), and {whose} gave {what}; {instead}")


def moved(value: object, device: torch.device) -> Any:  # noqa: ANN401  as it was, moved
    """Bring all tensors in a nest of tuples, lists and mappings to a device; what is given stays.

    Types are kept, but mappings that cannot be copied with their items become dicts. What has a
    `to` of its own, as a PackedSequence or transformers' BatchEncoding, is moved by that.
    """
    if isinstance(value, torch.Tensor):
        # Of a copy to the CPU that nobody waits for, the memory would be read before it is there.
        return value.to(device, non_blocking=device.type != "cpu")
    if callable(to := getattr(value, "to", None)):
        return to(device)
    if isinstance(value, Mapping):
        items = {key: moved(item, device) for key, item in value.items()}
        if not _is_copied_with_its_items(value):
            return items
        clone = copy.copy(value)  # not by its class, which may take other arguments, as a defaultdict's
        clone.update(items)
        return clone
    if isinstance(value, tuple | list):
        moves = [moved(item, device) for item in value]
        return type(value)(*moves) if hasattr(value, "_fields") else type(value)(moves)
    return value


def _is_copied_with_its_items(mapping: Mapping[Any, Any]) -> TypeGuard[MutableMapping[Any, Any]]:
    """Whether what is written into a copy is not written into the mapping: another's inner dict is shared."""
    knows_how = isinstance(mapping, MutableMapping) and hasattr(mapping, "__copy__")  # as a UserDict does
    return isinstance(mapping, dict) or knows_how


def count(inputs: object, targets: object, *, instead: str = _FIRST_DIMENSION) -> int:
    """Count a batch's samples: the length of the first tensor's first dimension, or of packed sequences.

    Args:
        inputs: What the model takes.
        targets: What the loss takes.
        instead: What to do where there is nothing to count.

    Raises:
        ConfigError: If no tensor has one.
    """
    for tensor in (*_tensors(inputs), *_tensors(targets)):
        if tensor.ndim:
            return tensor.shape[0]
    raise ConfigError(f"a batch without a tensor that has a batch dimension cannot be counted; {instead}")


def check_any(samples: int) -> None:
    """See that a batch has a sample: the mean loss over none is NaN, and a step by it may move the model.

    Raises:
        ConfigError: If it has none.
    """
    if not samples:
        raise ConfigError(
            "the batch has no sample, so there is nothing to train on: skip it, or make the loader so "
            "that it gives none (drop_last=True, where its last batch is empty)"
        )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data[: value.batch_sizes[0]]  # the first step of each sequence; `data` has all steps
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
