"""Where in its data a run is, so that another process goes on with the next batch.

Three kinds of source: a dataset in an order of our own, whose next batch follows from (seed, epoch, batch); a
loader that tells its place itself, by `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader
does; and any other, which is set back to the start of the pass and read up to the place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from offbeat import log
from offbeat.errors import ConfigError
from offbeat.local.batches import Epochs, Given, batches_of
from offbeat.local.generators import Generators
from offbeat.recovery import rng
from offbeat.recovery.digest import digest_of

__all__ = ["Data", "Described", "Place", "data_of", "warn_of_workers"]

Kind = Literal["dataset", "stateful", "replayed"]


@dataclass(frozen=True, slots=True)
class Place:
    """Between two batches.

    Attributes:
        epoch: Passes that were finished.
        batch: Batches taken of the one that was not.
    """

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Described:
    """What must be the same for a place to mean the same.

    Attributes:
        kind: How the place is found again.
        samples: Of the dataset; None where nobody knows.
        batches: Of one pass, likewise.
        batch_size: Likewise.
    """

    kind: Kind
    samples: int | None
    batches: int | None
    batch_size: int | None

    def to_plain(self) -> dict[str, Any]:
        """Give it as plain values."""
        return asdict(self)

    def differences(self, told: dict[str, Any]) -> list[str]:
        """Word in what a checkpoint's differs, which is in plain values."""
        if told["kind"] != self.kind:
            return [f"the data is {_KINDS[self.kind]}, and the checkpoint's was {_KINDS[told['kind']]}"]
        words = {
            "samples": "the dataset has {} samples, and had {}",
            "batch_size": "the batch size is {}, and was {}",
            "batches": "a pass has {} batches, and had {}",
        }
        own = asdict(self)
        found = [text.format(own[key], told[key]) for key, text in words.items() if own[key] != told[key]]
        return [f"{text} when the checkpoint was made" for text in found[:2]]  # the third follows from them


_KINDS = {
    "dataset": "a dataset= in batches of ours",
    "stateful": "a dataloader= with a state_dict",
    "replayed": "a dataloader= without a state_dict, or an iterable dataset",
}


class Data(Protocol):
    """Where batches come from."""

    described: Described

    def begin(self, epoch: int) -> Iterator[Any]:
        """Begin a pass."""

    def bring_back(self, state: Any, restore: Callable[[], None]) -> None:  # noqa: ANN401  as `state` gave it
        """Have all as it was between two passes; `begin` comes next. `restore` as for `resume`."""

    def resume(self, place: Place, state: Any, restore: Callable[[], None]) -> Iterator[Any]:  # noqa: ANN401  likewise
        """Go on in a pass.

        Args:
            place: In it.
            state: As `state` gave it.
            restore: Gives the global random generators their states at the place. To be called when what the
                pass has drawn from them is drawn.
        """

    def state(self) -> Any:  # noqa: ANN401  a nest
        """Give what `resume` wants besides the place, between two batches."""


def data_of(
    dataset: "Dataset[Any] | None",
    dataloader: Iterable[Any] | None,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    member: str,
    device: torch.device,
    is_deterministic: bool = False,
    is_ended: Callable[[], bool] = lambda: False,
) -> Data:
    """Make a source of what `train` was given.

    Args:
        dataset: This or a loader.
        dataloader: This or a dataset.
        epochs: How many passes.
        batch_size: Of a dataset.
        seed: Likewise: its order follows from this and the number of the pass,
        member: and from this.
        device: Where is trained.
        is_deterministic: Whether a source that cannot give the same bits after a crash is warned of.
        is_ended: Whether the reading of batches that are not trained on is to end.

    Raises:
        ConfigError: As `offbeat.local.batches.batches_of`.
    """
    source = batches_of(
        dataset,
        dataloader,
        epochs=epochs,
        batch_size=batch_size,
        order=f"recovery/{seed}{member}",
        pin_memory=device.type == "cuda",
    )
    if isinstance(source, Epochs) and not isinstance(dataset, IterableDataset):
        samples = len(cast(Sized, dataset))
        return _Ordered(source, Described("dataset", samples, len(source), batch_size), Generators(dataset))
    tells = _tells_its_place(dataloader)
    if is_deterministic:
        warn_of_workers("dataloader", dataloader)
    if tells:
        return _Stateful(source, dataloader, _describe("stateful", source, dataloader))
    described = _describe("replayed", source, dataloader)
    if isinstance(source, Epochs):
        described = replace(described, batch_size=batch_size)
    return _Replayed(
        source,
        dataset if dataloader is None else dataloader,
        described,
        device,
        is_ended,
        is_exact=is_deterministic and not _keeps_workers(dataloader),
    )


def warn_of_workers(keyword: str, loader: object) -> None:
    """Warn of a loader whose workers draw what nobody can bring back, where the same bits are asked for.

    Args:
        keyword: As what it was given.
        loader: Any.
    """
    tells = _tells_its_place(loader)
    if getattr(loader, "num_workers", None) and (tells or _keeps_workers(loader)):
        remedy = "a plain DataLoader" if tells else "persistent_workers=False"
        log.warn(
            f"deterministic=True, and what the workers of a {type(loader).__name__} ({keyword}=) draw at "
            f"random is in no state of it: the order of samples will be the same after a crash, and the "
            f"samples where they follow from their index; give num_workers=0, {remedy}, or a dataset"
        )


FINISHED = "_iterator_finished"
"""In a state of torchdata's StatefulDataLoader that was taken behind a pass.

It makes two iterators then, and not one, as the next pass begins, each of which draws from the global random
generator. So they are made while that is not yet what it was.
"""


class _Ordered:
    def __init__(self, source: Epochs, described: Described, generators: Generators) -> None:
        self.described = described
        self._source = source
        self._generators = generators

    def begin(self, epoch: int) -> Iterator[Any]:
        return iter(self._source.epoch(epoch))

    def bring_back(self, state: Any, restore: Callable[[], None]) -> None:  # noqa: ANN401  of Data
        self._generators.set(state["generators"])
        restore()

    def resume(self, place: Place, state: Any, restore: Callable[[], None]) -> Iterator[Any]:  # noqa: ANN401  of Data
        batches = self._source.epoch(place.epoch, skipped=place.batch)  # first: it may make a generator
        self.bring_back(state, restore)
        return iter(batches)

    def state(self) -> Any:  # noqa: ANN401  of Data
        return {"generators": self._generators.states()}


class _Stateful:
    def __init__(self, source: Epochs | Given, loader: Any, described: Described) -> None:  # noqa: ANN401  any such
        self.described = described
        self._source = source
        self._loader = loader
        self._generators = Generators(loader)

    def begin(self, epoch: int) -> Iterator[Any]:
        return iter(self._source.epoch(epoch))

    def bring_back(self, state: Any, restore: Callable[[], None]) -> None:  # noqa: ANN401  of Data
        own = state["loader"]
        self._loader.load_state_dict(own)
        if isinstance(own, Mapping) and own.get(FINISHED):
            iter(self._loader)
        self._generators.set(state["generators"])
        restore()

    def resume(
        self,
        place: Place,
        state: Any,  # noqa: ANN401  of Data
        restore: Callable[[], None],
    ) -> Iterator[Any]:
        if not place.batch:
            self.bring_back(state, restore)
            return self.begin(place.epoch)
        batches = self._source.epoch(place.epoch)  # told first: a `set_epoch` may begin the pass anew
        self._loader.load_state_dict(state["loader"])
        batches = iter(batches)
        self._generators.set(state["generators"])  # which a loader's own state leaves out
        restore()
        return batches

    def state(self) -> Any:  # noqa: ANN401  of Data
        return {"loader": self._loader.state_dict(), "generators": self._generators.states()}


class _Replayed:
    """A pass is made again with the random states that it began with, and its first batches are dropped.

    Between two batches training draws from the global random generators, too, and where a pass is made again
    it does not. So what a pass draws there after its first batch, as a shuffle buffer does, comes from states
    of its own, which follow from those that it began with. A loader that draws once, at the start, as a
    DataLoader does for its sampler, has the order that it has in any other loop.
    """

    def __init__(
        self,
        source: Epochs | Given,
        loader: object,
        described: Described,
        device: torch.device,
        is_ended: Callable[[], bool],
        *,
        is_exact: bool,
    ) -> None:
        """`is_exact`: other batches than at first are refused, and not only warned of."""
        self.described = described
        self._source = source
        self._loader = loader
        self._generators = Generators(loader)
        self._device = device
        self._is_ended = is_ended
        self._is_exact = is_exact
        self._began: dict[str, Any] | None = None
        self._read = ""  # digest of the pass's batches so far

    def begin(self, epoch: int) -> Iterator[Any]:
        began = rng.capture(self._device)
        self._began = {
            "global": began,
            "generators": self._generators.states(),
            "has_workers": _has_workers(self._loader),
        }
        self._read = ""
        batches = iter(self._source.epoch(epoch))
        own: dict[str, Any] | None = None
        while True:
            with nullcontext() if own is None else rng.apart(own, self._device):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._read = digest_of(batch, before=self._read)
            yield batch
            own = rng.derived(began, epoch) if own is None else own

    def bring_back(self, state: Any, restore: Callable[[], None]) -> None:  # noqa: ANN401  of Data
        _begin_with_workers(self._loader, had=state["has_workers"])
        self._generators.set(state["generators"])
        restore()

    def resume(self, place: Place, state: Any, restore: Callable[[], None]) -> Iterator[Any]:  # noqa: ANN401  of Data
        if not place.batch:
            self.bring_back(state, restore)
            return self.begin(place.epoch)
        began = state["began"]
        self._source.epoch(place.epoch)  # a `set_epoch` may make generators; it is told again in `begin`
        _begin_with_workers(self._loader, had=began["has_workers"])
        self._generators.set(began["generators"])
        rng.restore(began["global"], self._device)
        batches = self.begin(place.epoch)
        self._drop(place, batches)
        if not self._is_ended():
            self._compare(place, state.get("read"))
            if isinstance(self._loader, DataLoader | Dataset):  # another may read ahead, on a thread
                self._generators.set(state["generators"])  # from which training may have drawn, too
        restore()
        return batches

    def state(self) -> Any:  # noqa: ANN401  of Data
        return {
            "began": self._began,
            "read": self._read,
            "generators": self._generators.states(),
            "has_workers": _has_workers(self._loader),
        }

    def _compare(self, place: Place, read: str | None) -> None:
        """See that the batches that were read again are those of before; older checkpoints do not tell.

        Raises:
            ConfigError: If they are not, and have to be.
        """
        if read in (None, self._read):
            return
        text = (
            f"the dataloader did not give the same batches again: the {place.batch} of epoch "
            f"{place.epoch + 1} that were read and dropped are not those that the checkpoint was trained on, "
            f"so that samples of this epoch may be left out, and others come twice. It goes by a state of "
            f"its own, or by a random generator that is not found from it, or that training draws from, too: "
            f"give a dataset=, the DataLoader itself, or a loader with state_dict and load_state_dict"
        )
        if self._is_exact:
            raise ConfigError(f"{text}; or deterministic=False, where this is a warning")
        log.warn(text)

    def _drop(self, place: Place, batches: Iterator[Any]) -> None:
        log.warn(
            f"the dataloader cannot tell its place: {place.batch} batches of epoch {place.epoch + 1} are "
            f"read again and dropped; a dataset=, or a loader with state_dict and load_state_dict, such "
            f"as torchdata's StatefulDataLoader, goes on at once"
        )
        for number in range(place.batch):
            if self._is_ended():
                break
            try:
                next(batches)
            except StopIteration:
                raise ConfigError(
                    f"the dataloader gave {number} batches, and epoch {place.epoch + 1} had {place.batch} "
                    f"when the checkpoint was made: give the same data"
                ) from None


def _tells_its_place(loader: object) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _keeps_workers(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


def _has_workers(loader: object) -> bool:
    """Whether a loader has workers from a pass before, which it keeps."""
    return _keeps_workers(loader) and getattr(loader, "_iterator", None) is not None


def _begin_with_workers(loader: Any, *, had: bool) -> None:  # noqa: ANN401  any such
    """Let a loader that keeps its workers have them, or not, as it had when a pass began.

    A pass that starts them draws their seed from the generator that the order comes from, and one that finds
    them there does not: so the order would be another one.
    """
    if had and not _has_workers(loader):
        iter(loader)
    elif not had and _has_workers(loader):
        loader._iterator = None  # noqa: SLF001  torch has no other way


def _describe(kind: Kind, source: Epochs | Given, loader: object) -> Described:
    samples = batches = None
    with suppress(TypeError):  # what nobody knows
        batches = len(source)
    with suppress(TypeError):
        samples = len(cast(Sized, getattr(loader, "dataset", None)))
    size = getattr(loader, "batch_size", None)
    return Described(kind, samples, batches, size if isinstance(size, int) else None)
