"""`offbeat checkpoint` for what a `FaultTolerantTrainer` has kept. It needs no torch, and changes nothing."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offbeat import plain_json
from offbeat.cli import model_file
from offbeat.cli.reading import Reading
from offbeat.cli.say import flush_output, output, say
from offbeat.cli.wording import columns, duration, plain
from offbeat.errors import CheckpointError, ConfigError, DamagedError
from offbeat.recovery.choice import left_behind
from offbeat.recovery.directory import DAMAGED, entries, fault_of_name, name_of, names
from offbeat.recovery.folder import Tell, survey, verify
from offbeat.recovery.manifest import MANIFEST, MODEL, Manifest

__all__ = ["export", "inspect", "refuse_among", "verify_all"]


LOOKED_AT = "by manifests and the lengths of files: what is in these, `offbeat checkpoint verify` compares"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A checkpoint of a directory.

    Attributes:
        name: Of its folder.
        manifest: What it says; None where it cannot be used.
        fault: Then, why; else None.
        is_damaged: And that it will not be better tomorrow, as one that may not be read will.
    """

    name: str
    manifest: Manifest | None
    fault: str | None = None
    is_damaged: bool = False


def inspect(path: Path, *, as_json: bool) -> None:
    """Print what manifests say; of other files only the lengths are looked at.

    Raises:
        CheckpointError: If the one at the path is damaged, or cannot be read.
    """
    if _is_one(path):
        manifest = survey(path)
        output(_json("checkpoint", _told(manifest)) if as_json else _one(path, manifest))
        return
    found = _surveyed(path)
    aside = sorted(entry.name for entry in path.iterdir() if entry.name.startswith(DAMAGED))
    if as_json:
        told = [
            {"name": e.name, "error": e.fault, "checkpoint": e.manifest and _told(e.manifest)} for e in found
        ]
        output(_json("directory", {"checkpoints": told, "set_aside": aside}))
    else:
        output(_directory(path, found, aside))


def verify_all(path: Path) -> None:
    """Read each checkpoint to its end, and print a line about it.

    Raises:
        CheckpointError: If one is not good, or there is none.
    """
    verdicts = []
    for line, is_good in _verdicts(path):
        output(plain(line))
        flush_output()  # the next may take its time
        verdicts.append(is_good)
    if num_bad := verdicts.count(False):
        raise CheckpointError(f"{path}: {num_bad} of {len(verdicts)} cannot be used")
    if True not in verdicts:
        raise CheckpointError(f"there is no checkpoint in {path}" + (" any more" if verdicts else ""))


def export(path: Path, to: Path, settle: Callable[[], object]) -> str:
    """Write the model of the newest checkpoint that is good to a file; newer ones are warned of.

    What a rollback has left behind comes after all else.

    Args:
        path: Of one, or of several.
        to: The file.
        settle: Called when nothing is left to do but to give it its name.

    Returns:
        What was done.

    Raises:
        CheckpointError: If there is none.
        ConfigError: If the file would be among a trainer's.
        OSError: If it cannot be written.
    """
    for folder in sorted(_folders(path), key=_left_behind(path).__contains__):
        try:
            with Reading(folder.name) as tell:
                manifest = _verified(path, folder, tell)
        except DamagedError as error:
            if os.path.lexists(folder):
                if _is_one(path):
                    raise
                say(f"WARNING: a newer checkpoint is damaged, and passed over: {plain(str(error))}")
        else:
            model_file.copy(folder / MODEL, to, before_replacing=settle)
            return f"the model of {folder.name}, step {manifest.step:,}, is in {to}"
    raise CheckpointError(f"there is no good checkpoint in {path}")


def refuse_among(path: Path, to: Path) -> None:
    """Let no file be put among a trainer's.

    Raises:
        ConfigError: If it would be.
    """
    given = Path(os.path.realpath(path))
    place = given.parent if _is_one(given) else given
    if Path(os.path.realpath(to)).is_relative_to(place):
        raise ConfigError(f"FILE: {to} is among a trainer's checkpoints: give another name or folder")


def _is_one(path: Path) -> bool:
    return (path / MANIFEST).exists() and not (path / MANIFEST).is_dir()


def _verified(path: Path, folder: Path, tell: Tell) -> Manifest:
    """Read a checkpoint to its end, as a start does: that of a directory has to be under its own name.

    Args:
        path: What the user named: the folder, or the directory that it is in.
        folder: Where it is.
        tell: Told how far it is.

    Raises:
        DamagedError: If it is not as it was written.
        CheckpointError: If it cannot be read.
    """
    manifest = verify(folder, tell)
    if folder != path and (fault := fault_of_name(folder, manifest)) is not None:
        raise DamagedError(fault)
    return manifest


def _surveyed(path: Path) -> list[_Seen]:
    """Tell of each checkpoint what its manifest says, or why it cannot be used; of other files lengths."""
    found = []
    for name in names(path):
        try:
            manifest = survey(path / name)
            if (fault := fault_of_name(path / name, manifest)) is not None:
                raise DamagedError(fault)
            found.append(_Seen(name, manifest))
        except CheckpointError as error:
            if os.path.lexists(path / name):  # else removed by its trainer meanwhile
                found.append(_Seen(name, None, str(error), isinstance(error, DamagedError)))
    return found


def _folders(path: Path) -> list[Path]:
    return [path] if _is_one(path) else [path / name for name in names(path)]


def _left_behind(path: Path) -> set[Path]:
    """Give the folders of what a rollback has gone back from."""
    if _is_one(path):
        return set()
    told = [entry.manifest for entry in entries(path) if entry.manifest is not None]
    behind = left_behind(told)
    return {path / name_of(m.number, m.step) for m in told if m.number in behind}


def _verdicts(path: Path) -> Iterator[tuple[str, bool | None]]:
    """Give what is to be said of each checkpoint, and whether it is good; None if it has gone meanwhile."""
    for folder in _folders(path):
        try:
            with Reading(folder.name) as tell:
                _verified(path, folder, tell)
        except CheckpointError as error:
            yield (
                (str(error), False)
                if os.path.lexists(folder)
                else (f"{folder}: gone, removed by its trainer", None)
            )
        else:
            yield f"{folder}: ok", True


def _told(manifest: Manifest) -> dict[str, Any]:
    return asdict(manifest)


def _json(kind: str, told: dict[str, Any]) -> str:
    return plain_json.dumps({"kind": f"training {kind}"} | told, indent=2)


def _end(manifest: Manifest) -> str:
    ends = []
    if manifest.is_stopped:
        ends.append("stopped" + ("" if manifest.stop_reason is None else f" ({manifest.stop_reason})"))
    elif manifest.is_finished:
        ends.append("finished")
    if manifest.is_end_due:
        ends.append("to end together with the others yet")
    return "".join(f", {end}" for end in ends)


def _one(path: Path, manifest: Manifest) -> str:
    files = ", ".join(f"{file.name} {_size(file.bytes)}" for file in manifest.files)
    band = "not known yet" if manifest.band is None else f"at most {manifest.band:.6g}"
    lines = {
        "checkpoint": f"{path.name}, of {_when(manifest)}, by Offbeat {manifest.offbeat} "
        f"and torch {manifest.torch}",
        "training": f"step {_step(manifest)}, {manifest.samples:,} samples, {duration(manifest.seconds)}"
        + _end(manifest),
        "next": f"batch {manifest.batch + 1:,} of epoch {manifest.epoch + 1:,}",
        "optimizer": manifest.optimizer,
        "parameters": f"{manifest.num_parameters:,}",
        "loss": f"{manifest.loss:.6g}, of the newest steps; its band: {band}",
        "good": "yes"
        if manifest.is_good
        else "no: parameters that are not finite, or a loss beyond its band",
        "monitored": "-" if manifest.monitored is None else f"{manifest.monitor} {manifest.monitored:.6g}",
        "files": f"{files}; {_size(_bytes(manifest))} in all",
    }
    return columns([[name, value] for name, value in lines.items()], left=2)


def _directory(path: Path, found: list[_Seen], aside: list[str]) -> str:
    count = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
    lines = [f"{count} of a training in {path}, newest first" if found else f"no checkpoint yet in {path}"]
    if found:
        head = ["checkpoint", "written", "good", "step", "epoch", "loss", "monitored", "size"]
        lines += ["", columns([head, *map(_row, found)], left=3), "", LOOKED_AT]
    lines += [seen.fault for seen in found if seen.fault is not None]
    if aside:
        lines.append(f"set aside: {', '.join(aside)}")
    return "\n".join(plain(line) for text in lines for line in text.split("\n"))


def _row(seen: _Seen) -> list[str]:
    told = seen.manifest
    if told is None:
        return [seen.name, "damaged" if seen.is_damaged else "unusable", *"------"]
    return [
        seen.name,
        _when(told),
        "yes" if told.is_good else "no",
        _step(told),
        f"{told.epoch + bool(told.batch):,}",  # the one under way, or just ended, as log lines count
        f"{told.loss:.4g}",
        "-" if told.monitored is None else f"{told.monitored:.4g}",
        _size(_bytes(told)),
    ]


def _step(manifest: Manifest) -> str:
    """Give the step; and of which one the values are, where a rollback went back to that."""
    again = "" if manifest.again_step is None else f" ({manifest.again_step:,} again)"
    return f"{manifest.step:,}{again}"


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files)


def _when(manifest: Manifest) -> str:
    return datetime.fromtimestamp(manifest.written_unix_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
