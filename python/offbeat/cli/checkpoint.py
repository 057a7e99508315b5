"""`offbeat checkpoint`: what a server or a trainer has kept is looked at, verified, or taken out.

It needs no server. A trainer's is told by its manifest (`training_checkpoint.py`).
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offbeat.arrays import as_state
from offbeat.checkpoints import MANIFEST, NAME
from offbeat.cli import kept_token, model_file, training_checkpoint
from offbeat.cli.checkpoint_report import report
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.parser import Parser, file
from offbeat.cli.reading import Reading
from offbeat.cli.say import flush_output, output, say
from offbeat.cli.signals import Signals, Stopped
from offbeat.cli.wording import plain
from offbeat.errors import CheckpointError, ConfigError
from offbeat.recovery.directory import is_trainers

__all__ = ["add_arguments", "run"]

ACTIONS = {
    "inspect": "tell what is in a checkpoint, or in a directory of them",
    "verify": "read checkpoints to their end, and do with them what a server's start would do",
    "export": "write the model of the newest good checkpoint to a file",
}

PREFIX = "checkpoint-"
"""What is in the name of a checkpoint's folder."""

LIVES = "life.json"
"""What its lives have reserved."""
OWN = ("lock", LIVES, "life.new", ".new", ".old", *kept_token.FILES)
"""What a server has beside its checkpoints, or will make there."""

REMEDY = (
    "give the directory that a server has as --checkpoint-dir, or one of the folders checkpoint-… in it; or "
    "what a FaultTolerantTrainer has as checkpoint_dir, or one of the folders save-… in it"
)


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.add_actions(ACTIONS)
    for action in parser.actions.values():
        action.add_argument(
            "path",
            type=file,
            metavar="PATH",
            help="a server's --checkpoint-dir or a trainer's checkpoint_dir, or a checkpoint's folder in it",
        )
    parser.actions["inspect"].add_argument(
        "--json", action="store_true", help="everything there is to tell, as one object"
    )
    export = parser.actions["export"]
    export.add_argument(
        "file", type=file, metavar="FILE", help="parameters and buffers go there, as .safetensors"
    )
    export.add_argument("--force", action="store_true", help="replace the file if there is one")


def run(arguments: Namespace) -> int:
    """Do what the command was asked for."""
    path: Path = arguments.path
    if not path.is_dir():
        what = "is no folder" if path.exists() else "is not there"
        raise ConfigError(f"{path} {what}: {REMEDY}")
    is_of_training = is_trainers(path)
    if not is_of_training:
        _see_that_it_is_a_server_s(path)
    match arguments.action:
        case "inspect":
            inspect = training_checkpoint.inspect if is_of_training else _inspect
            inspect(path, as_json=arguments.json)
        case "verify":
            (training_checkpoint.verify_all if is_of_training else _verify)(path)
        case _:
            _export(path, arguments.file, force=arguments.force, is_of_training=is_of_training)
    return ExitCode.OK


def _see_that_it_is_a_server_s(path: Path) -> None:
    """Refuse what is nobody's, with what both kinds of it are.

    Raises:
        ConfigError: If it is.
    """
    from offbeat._offbeat import checkpoint_names

    try:
        checkpoint_names(path)
    except ConfigError as error:
        raise ConfigError(f"{path} is no directory of checkpoints, nor a checkpoint: {REMEDY}") from error


def _inspect(path: Path, *, as_json: bool) -> None:
    from offbeat._offbeat import inspect_checkpoints

    told = inspect_checkpoints(path)
    output(told if as_json else report(json.loads(told), path))


def _verify(path: Path) -> None:
    """Print a line about each checkpoint.

    Raises:
        CheckpointError: If one is not good, or there is none; or if what is beside them keeps a server from
            starting.
    """
    from offbeat._offbeat import checkpoint_names

    names = checkpoint_names(path)
    wrong = []
    if names is not None:
        told, lets_start = _verdict_on_lives(path)
        output(plain(told))
        flush_output()
        if not lets_start:
            wrong.append(f"{path}: no server would start there, because of its {LIVES}")
    verdicts = []
    for line, is_good in _verdicts(path, names):
        output(plain(line))
        flush_output()  # the next may take its time
        verdicts.append(is_good)
    if num_bad := verdicts.count(False):
        wrong.append(f"{path}: {num_bad} of {len(verdicts)} cannot be used")
    elif True not in verdicts:
        wrong.append(f"there is no checkpoint in {path}" + (" any more" if verdicts else ""))
    if wrong:
        raise CheckpointError("; ".join(wrong))


def _verdict_on_lives(path: Path) -> tuple[str, bool]:
    """Give what is to be said of a directory's `life.json`, and whether it lets a server start."""
    from offbeat._offbeat import verify_lives

    file = path / LIVES
    try:
        verify_lives(path)
    except CheckpointError as error:
        return str(error), False
    try:
        told = json.loads(file.read_bytes())
    except FileNotFoundError:
        return f"{file}: not there; a server would go by what the checkpoints say", True
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}", False
    used = f"term {told['term']:,} and incarnation {told['last_incarnation']:,}"
    return f"{file}: ok, all up to {used} are taken", True


def _verdicts(path: Path, names: Sequence[str] | None) -> Iterator[tuple[str, bool | None]]:
    """Give what is to be said of each checkpoint, and whether it is good; None if it has gone meanwhile.

    Args:
        path: Where they are.
        names: Theirs; None if it is one itself.
    """
    from offbeat._offbeat import verify_checkpoint

    for folder in [path] if names is None else [path / name for name in names]:
        try:
            with Reading(folder.name) as tell:
                is_there = verify_checkpoint(folder, tell)
        except CheckpointError as error:
            yield str(error), False
        else:
            yield (f"{folder}: ok", True) if is_there else (f"{folder}: gone, removed by its server", None)


def _export(path: Path, to: Path, *, force: bool, is_of_training: bool) -> None:
    """Write a model to a file.

    Raises:
        CheckpointError: If there is no good checkpoint.
        ConfigError: If the file must not or cannot be written.
        KeyboardInterrupt: At a signal. It leaves nothing beside the file.
        OSError: If writing it fails.
    """

    def refuse_to_replace() -> None:
        if not force and to.exists():
            raise ConfigError(f"FILE: {to} is there already: give another name, or --force to replace it")

    def settle() -> None:
        refuse_to_replace()
        signals.leave()

    signals = Signals()
    (training_checkpoint.refuse_among if is_of_training else _refuse_a_server_s)(path, to)
    model_file.check_writable(to, "FILE")
    refuse_to_replace()
    try:
        with signals.raised():
            if is_of_training:
                done = training_checkpoint.export(path, to, settle)
            else:
                name, version, state = _model(path)
                model_file.save(state, to, before_replacing=settle)
                done = f"the model of {name}, version {version:,}, is in {to}"
    except Stopped as stopped:
        raise KeyboardInterrupt from stopped  # also one that would end the process with no clearing up
    output(done)


def _model(path: Path) -> tuple[str, int, dict[str, Any]]:
    """Read the newest good checkpoint: its name, version and model. Newer ones are warned of."""
    from offbeat._offbeat import checkpoint_model

    with Reading(path.name) as tell:
        name, version, passed_over, table, values = checkpoint_model(path, tell)
    for why in passed_over:
        say(f"WARNING: a newer checkpoint is damaged, and passed over: {plain(why)}")
    return name, version, as_state(table, values, tensor=False)


def _refuse_a_server_s(path: Path, to: Path) -> None:
    """Let no model be written over what a server has in its directory.

    Raises:
        CheckpointError: If the directory cannot be read.
        ConfigError: If the file is of a checkpoint, or of the directory of some.
    """
    from offbeat._offbeat import checkpoint_names

    target = Path(os.path.realpath(to))
    folder = target.parent
    if not folder.is_dir():
        return
    is_checkpoint = (folder / MANIFEST).exists() and (PREFIX in folder.name or folder.samefile(path))
    given = Path(os.path.realpath(path))
    place = given.parent if checkpoint_names(path) is None else given
    if is_checkpoint or any(_is_for_a_server(part, place) for part in (target, folder)):
        raise ConfigError(
            f"FILE: {to} is among the files of a server's checkpoints: give another name or folder"
        )


def _is_for_a_server(target: Path, place: Path) -> bool:
    """Whether a server uses that name, there or where there are checkpoints."""
    from offbeat._offbeat import checkpoint_names

    if target.name not in OWN and not NAME.fullmatch(target.name):
        return False
    try:
        return target.parent == place or bool(checkpoint_names(target.parent))
    except (ConfigError, CheckpointError):  # nothing there is a server's, or it cannot be read
        return False
