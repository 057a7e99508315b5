"""A run's state and the files of its checkpoint: one is made of the other."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from offbeat.errors import CheckpointError, UnsupportedTensorError
from offbeat.recovery.folder import write_synced
from offbeat.recovery.manifest import MODEL, STATE, TENSORS, FileEntry
from offbeat.recovery.nest import Flat, unflatten
from offbeat.recovery.tensor_file import Layout, laid_out, write_tensors

__all__ = ["Parts", "check", "read", "write"]


@dataclass(frozen=True, slots=True)
class Parts:
    """A state, taken apart.

    Attributes:
        model: The model's, in a file of its own, which anybody can load.
        rest: All else.
    """

    model: Flat
    rest: Flat


def check(parts: Parts) -> None:
    """Check that there are files for it.

    Raises:
        UnsupportedTensorError: If it has more tensors than one can name.
    """
    _layouts(parts)


def write(folder: Path, parts: Parts) -> tuple[FileEntry, ...]:
    """Write the files, and get them to the disk; the manifest is not among them.

    Raises:
        OSError: If one cannot be written, or the state has grown to more than they can hold: then nothing
            was written.
    """
    try:
        model, rest = _layouts(parts)
    except UnsupportedTensorError as error:
        raise OSError(str(error)) from error
    skeletons = {"model": parts.model.skeleton, "rest": parts.rest.skeleton}
    return (
        write_tensors(folder / MODEL, model),
        write_tensors(folder / TENSORS, rest),
        write_synced(folder / STATE, json.dumps(skeletons, allow_nan=False).encode()),
    )


def _layouts(parts: Parts) -> tuple[Layout, Layout]:
    return laid_out(parts.model.tensors), laid_out(parts.rest.tensors)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the model's state and all else; the files have been verified.

    Raises:
        CheckpointError: If they are none of ours.
    """
    try:
        model, rest = (safetensors.torch.load_file(folder / name) for name in (MODEL, TENSORS))
        skeletons = json.loads((folder / STATE).read_bytes())
        return unflatten(skeletons["model"], model), unflatten(skeletons["rest"], rest)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
