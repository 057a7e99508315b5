"""A run's state and the files of its checkpoint: one is made of the other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from offbeat.errors import CheckpointError
from offbeat.recovery.folder import entry_of
from offbeat.recovery.manifest import MODEL, STATE, TENSORS, FileEntry
from offbeat.recovery.nest import Flat, unflatten

__all__ = ["Parts", "read", "write"]


@dataclass(frozen=True, slots=True)
class Parts:
    """A state, taken apart.

    Attributes:
        model: The model's, in a file of its own, which anybody can load.
        rest: All else.
    """

    model: Flat
    rest: Flat


def write(folder: Path, parts: Parts) -> tuple[FileEntry, ...]:
    """Write the files, and get them to the disk; the manifest is not among them.

    Raises:
        OSError: If one cannot be written.
    """
    for name, tensors in ((MODEL, parts.model.tensors), (TENSORS, parts.rest.tensors)):
        _save(tensors, folder / name)
    skeletons = {"model": parts.model.skeleton, "rest": parts.rest.skeleton}
    (folder / STATE).write_text(json.dumps(skeletons, allow_nan=False), "utf-8")
    return tuple(entry_of(folder / name) for name in (MODEL, TENSORS, STATE))


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


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # as of a full disk
        raise OSError(f"{path.name}: {error}") from error
