"""What a start goes on from: the checkpoint that a strategy wants, verified, or the one before it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat import process
from offbeat.errors import CheckpointError, ConfigError, ModelMismatchError
from offbeat.recovery.account import Account
from offbeat.recovery.choice import Mode, ranked
from offbeat.recovery.directory import Directory, entries
from offbeat.recovery.files import read
from offbeat.recovery.folder import verify
from offbeat.recovery.keepers import bring_back
from offbeat.recovery.manifest import MANIFEST, DamagedError, Manifest
from offbeat.recovery.place import Data
from offbeat.recovery.trainee import Trainee

__all__ = ["Found", "Strategy", "find", "go_on"]

OTHER_SETTINGS = (
    "To change a setting in a run that goes on, give a live optimizer and let a hook of it set that in its "
    "param_groups before each step (register_step_pre_hook); to begin anew with it, take "
    "recovery_strategy='none', overwrite=True"
)
"""What to do about settings that the run does not have."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """What `recovery_strategy` says.

    Attributes:
        name: One of `choice.STRATEGIES`; "path" for a path.
        path: That path, else None.
        monitor: What "best" goes by.
        mode: Likewise.
        overwrite: Whether "none" may remove what is there.
    """

    name: str
    path: Path | None
    monitor: str | None
    mode: Mode
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to go on from, read.

    Attributes:
        path: Its folder.
        manifest: What it says.
        model: The model's state.
        rest: All else.
        damaged: Names of those in the directory that would have come before it, and are damaged.
        warnings: Why, each.
    """

    path: Path
    manifest: Manifest
    model: dict[str, Any]
    rest: dict[str, Any]
    damaged: tuple[str, ...]
    warnings: tuple[str, ...]


def find(directory: Directory, strategy: Strategy) -> Found | None:
    """Find what to go on from; None if the run begins.

    What is damaged is warned of, and the next that the strategy wants is taken. Nothing is renamed.

    Raises:
        CheckpointError: If there are checkpoints and none can be used, if one cannot be read, or the one at
            the path is damaged.
        ConfigError: If a run is to begin where something is.
    """
    match strategy.name:
        case "none":
            _make_room(directory, overwrite=strategy.overwrite)
            return None
        case "path":
            assert strategy.path is not None  # noqa: S101  "path" has one
            return _at(strategy.path)
    found = entries(directory.path)
    faults = {entry.name: entry.damage for entry in found if entry.damage is not None}
    manifests = [entry.manifest for entry in found if entry.manifest is not None]
    name_of = {entry.manifest.number: entry.name for entry in found if entry.manifest is not None}
    for damage in faults.values():
        _warn(damage)
    for manifest in ranked(strategy.name, manifests, monitor=strategy.monitor, mode=strategy.mode):
        name = name_of[manifest.number]
        try:
            verify(directory.path / name)
        except DamagedError as error:
            faults[name] = str(error)
            _warn(str(error))
            continue
        return _read(directory.path / name, manifest, faults)
    if faults:
        raise CheckpointError(
            f"{directory.path}: all checkpoints that would serve are damaged: {'; '.join(faults.values())}; "
            f"a new run begins with recovery_strategy='none', overwrite=True"
        )
    return None


def _at(path: Path) -> Found:
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            f"recovery_strategy is the path {str(path)!r}, which is no checkpoint: give a folder save-… that "
            f"has a {MANIFEST}, or a strategy for those in checkpoint_dir"
        )
    return _read(path, verify(path), {})


def _read(path: Path, manifest: Manifest, faults: dict[str, str]) -> Found:
    model, rest = read(path)
    return Found(path, manifest, model, rest, tuple(faults), tuple(faults.values()))


def _make_room(directory: Directory, *, overwrite: bool) -> None:
    if (others := directory.others()) and not overwrite:
        raise ConfigError(
            f"recovery_strategy is 'none', and checkpoint_dir {str(directory.path)!r} is not empty (there is "
            f"{others[0]}): give an empty one, or overwrite=True, which removes the checkpoints in it"
        )
    directory.clear()


def _warn(damage: str) -> None:
    process.warn(f"a checkpoint is damaged, and the one before it is looked at: {damage}")


def go_on(
    found: Found,
    directory: Directory,
    *,
    trainee: Trainee,
    data: Data,
    account: Account,
    seed: int | None,
) -> None:
    """Bring a run to where a checkpoint was, and set aside those that were damaged.

    Args:
        found: The checkpoint.
        directory: Where the damaged ones are.
        trainee: What is trained.
        data: On what.
        account: Of the run.
        seed: Of the order of a dataset, if one was given.

    Raises:
        ModelMismatchError: If what is trained is not what the checkpoint is of.
        ConfigError: If the data is not. Nothing is changed in either case.
    """
    state = {"model": found.model} | found.rest["trained"]
    theirs = found.rest["seed"]
    others = data.described.differences(found.rest["described"])
    if seed is not None and data.described.kind == "dataset" and seed != theirs:
        others.append(f"seed is {seed}, and was {theirs} when the checkpoint was made")
    if differences := trainee.differences(state):
        raise ModelMismatchError(f"{found.path} is of another run: {'; '.join([*differences, *others])}")
    if others:
        raise ConfigError(
            f"{found.path} is of other data: {'; '.join(others)}: give the same, or begin anew in another "
            f"checkpoint_dir"
        )
    if notes := trainee.notes(state):
        process.warn(f"{'; '.join(notes)}: what the checkpoint has is taken, {found.path}. {OTHER_SETTINGS}")
    trainee.load_state_dict(state)
    account.load_state_dict(found.rest["account"])
    bring_back(trainee.keepers, found.rest.get("keepers", ()))  # which older checkpoints do not have
    for name in found.damaged:
        directory.set_aside(name)
    process.announce(f"goes on from step {found.manifest.step:,}, as {found.path} has it")
