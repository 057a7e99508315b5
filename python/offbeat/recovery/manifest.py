"""The manifest of a trainer's checkpoint: what it is of, its files with their digests, and a seal of itself.

It is written last. Each byte of it counts: it is read by comparing it with what would be written, so that any
that was changed is noticed, as in the files by their digests.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from offbeat.errors import CheckpointError, DamagedError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MODEL",
    "STATE",
    "TENSORS",
    "FileEntry",
    "Manifest",
    "kind_of",
]

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
"""The model's own tensors, by the names of its `state_dict`."""
TENSORS = "state.safetensors"
"""All others: the optimizer's, of random generators, of the loader."""
STATE = "state.json"
"""What is no tensor, and where in it the tensors belong."""

FILES = (MODEL, TENSORS, STATE)
KIND = "offbeat training"
"""In the manifest, what tells it from a server's."""
FORMAT = 1
_NUM_DIGITS = 64
"""Of a SHA-256 in hexadecimal."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file beside the manifest.

    Attributes:
        name: One of `FILES`.
        bytes: Its length.
        sha256: Its digest, in hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint is of.

    Attributes:
        number: Saves are counted per directory; the newest has the highest.
        step: Steps made, of the optimizer, over all lives of the run.
        epoch: Passes over the data that were finished.
        batch: Batches of the one that was not.
        samples: Trained on.
        seconds: Wall time of training, over all lives.
        written_unix_s: When.
        is_finished: Whether all was done that `train` had been asked for, or it was stopped.
        is_good: Whether the parameters are finite and the loss is within the band.
        loss: Mean of the newest steps; NaN before the first.
        band: What the loss may be at most; None while it is not known.
        monitored: Of what `monitor` names, the mean since the last checkpoint that broke
            nothing off, or since the start; None without.
        monitor: That name; None without.
        monitored_samples: Of how many samples that mean is; None where older ones do not tell.
        is_short: Whether these are too few for it to be the best.
        request: As which `recovery_strategy` the run was asked for, in words; None likewise.
        gone_back_to: Number of the checkpoint to which the life that wrote this went back, past newer ones
            that were not good; None where it did not, and where older ones do not tell.
        epochs: Passes that `train` was asked for, in all; None where older ones do not tell.
        max_steps: Steps, likewise; None for no limit.
        is_stopped: Whether `stop()` was called before that.
        stop_reason: What was given to it.
        again_number: Number of the checkpoint that a rollback has gone back to as this was written, whose
            values this has once more, and its judgement; None where it is of no rollback.
        again_step: The step that those values are of; None likewise, and where the rollback's own checkpoint
            could not be written, so that this is the first which says that there was one.
        is_validation_due: Whether a signal has broken off what belongs after the newest pass: to measure the
            model, and then the scheduler's step.
        is_end_due: Whether all is trained, and others at a server were still to be ended together with.
        num_parameters: Of the model.
        optimizer: Its class.
        offbeat: Version that wrote this.
        torch: Likewise.
        files: All others, in order.
    """

    number: int
    step: int
    epoch: int
    batch: int
    samples: int
    seconds: float
    written_unix_s: float
    is_finished: bool
    is_good: bool
    loss: float
    band: float | None
    monitored: float | None
    monitor: str | None
    num_parameters: int
    optimizer: str
    offbeat: str
    torch: str
    files: tuple[FileEntry, ...]
    monitored_samples: int | None = None
    is_short: bool = False
    request: str | None = None
    gone_back_to: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    is_stopped: bool = False
    stop_reason: str | None = None
    again_number: int | None = None
    again_step: int | None = None
    is_validation_due: bool = False
    is_end_due: bool = False

    @property
    def values_step(self) -> int:
        """The step that the model's values are of."""
        return self.step if self.again_step is None else self.again_step

    def to_bytes(self) -> bytes:
        """Write it."""
        body = {name: _plain(value) for name, value in asdict(self).items()}
        return _sealed({"kind": KIND, "format": FORMAT} | body)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read it.

        Raises:
            DamagedError: If it is not as it was written.
            CheckpointError: If it is of another format, or tells more than this version knows of.
        """
        told = _opened(raw)
        if told.pop("kind", None) != KIND:
            raise CheckpointError(f"{MANIFEST} is of no trainer's checkpoint")
        if (found := told.pop("format", None)) != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} is of format {found}, and this Offbeat reads format {FORMAT}: use Offbeat "
                f"{told.get('offbeat')}, which wrote it"
            )
        try:
            # Under its seal what is unknown is no damage, but of a newer version.
            if unknown := _unknown(told):
                raise CheckpointError(
                    f"{MANIFEST} tells of {', '.join(map(repr, unknown))}, which this Offbeat does not know: "
                    f"use Offbeat {told.get('offbeat')}, which wrote it, or a newer one; nothing is wrong "
                    f"with it"
                )
            files = tuple(FileEntry(**entry) for entry in told.pop("files"))
            manifest = cls(files=files, **{name: _number(name, value) for name, value in told.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{MANIFEST} does not say what it should ({error})") from error
        if tuple(entry.name for entry in files) != FILES:
            raise DamagedError(f"{MANIFEST} names other files than {', '.join(FILES)}")
        return manifest


def kind_of(raw: bytes) -> str | None:
    """Tell what a manifest says that it is of, be it whole or not; None where it says nothing.

    A server's says nothing: it was there first.
    """
    start = raw[: len(KIND) + 2 * _NUM_DIGITS]
    return KIND if KIND.encode() in start else None


def _sealed(body: Mapping[str, Any]) -> bytes:
    def text(seal: str) -> bytes:
        return (json.dumps({"kind": body["kind"], "sha256": seal} | dict(body), indent=1) + "\n").encode()

    return text(hashlib.sha256(text("")).hexdigest())


def _opened(raw: bytes) -> dict[str, Any]:
    told: Any = None
    try:
        told = json.loads(raw)
        del told["sha256"]
        is_whole = _sealed(told) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        is_whole = False
    if not is_whole:
        raise DamagedError(f"{MANIFEST} is not as it was written")
    return dict(told)


def _unknown(told: Mapping[str, Any]) -> list[str]:
    """Give what is told of, and no field here."""
    names = [name for name in told if name not in _FIELDS]
    for entry in told["files"]:
        names += [name for name in entry if name not in _OF_FILES]
        names += [] if entry["name"] in FILES else [entry["name"]]
    return [*dict.fromkeys(names)]


def _plain(value: object) -> object:
    """JSON has no word for what is not finite."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


_FIELDS = frozenset(f.name for f in fields(Manifest))
_OF_FILES = frozenset(f.name for f in fields(FileEntry))
_FLOATS = frozenset(f.name for f in fields(Manifest) if "float" in str(f.type))


def _number(name: str, value: object) -> Any:  # noqa: ANN401  of the field's type
    return float(value) if name in _FLOATS and isinstance(value, str) else value
