"""What a start goes on from: the checkpoint that a strategy wants, verified, or the one before it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from offbeat import log
from offbeat.errors import CheckpointError, ConfigError, DamagedError, ModelMismatchError
from offbeat.local.loss import wake
from offbeat.recovery.account import Account
from offbeat.recovery.choice import Mode, ends_again, made_under, preferred, ranked
from offbeat.recovery.directory import Directory, entries, is_servers, name_of
from offbeat.recovery.files import read
from offbeat.recovery.folder import verify
from offbeat.recovery.keepers import bring_back
from offbeat.recovery.manifest import MANIFEST, Manifest
from offbeat.recovery.modes import Modes, modes_of, overlaid, set_modes, words_of_others
from offbeat.recovery.place import Data
from offbeat.recovery.saver import parameters_of
from offbeat.recovery.snapshot import are_finite
from offbeat.recovery.trainee import Trainee

__all__ = ["Found", "Strategy", "find", "go_on"]

ANEW = (
    "recovery_strategy='none', overwrite=True, for one start alone: a command that a supervisor repeats "
    "would begin anew each time"
)
"""How a new run begins where another was."""

OTHER_SETTINGS = (
    "To change a setting in a run that goes on, give a live optimizer and let a hook of it set that in its "
    "param_groups, or on the model, before each step (register_step_pre_hook); to begin anew with it, take "
    f"{ANEW}"
)
"""What to do about settings that the run does not have."""


OWN_SEED = "/seed "
"""With which a member's part of the order begins where an `AsyncTrainer` was made with a seed."""

WHERE_IT_ENDS_SO = (
    "Mend the data, set a lower learning rate by a hook of the optimizer's step (register_step_pre_hook), or "
    "let AsyncTrainingMonitor(model, remediation_strategy='reject') drop such gradients"
)
"""What to do about it, where to train again is not enough."""


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

    @property
    def request(self) -> str:
        """Words that are the same where the same is asked for: each checkpoint has those of its run."""
        match self.name:
            case "path":
                return str(self.path)
            case "best":
                return f"best ({self.mode} {self.monitor})"
            case _:
                return self.name


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
        is_behind: Whether there are newer ones that are not good, which the strategy goes back past.
    """

    path: Path
    manifest: Manifest
    model: dict[str, Any]
    rest: dict[str, Any]
    damaged: tuple[str, ...]
    warnings: tuple[str, ...]
    is_behind: bool = False


def find(
    directory: Directory, strategy: Strategy, *, module: nn.Module, is_done: Callable[[Manifest], bool]
) -> Found | None:
    """Find what to go on from; None if the run begins.

    "best" and a path go back once: where the newest checkpoints were made under this very strategy, they are
    what has come of that, and the newest of them is gone on from. Else each start would throw them away.
    "last_good" asks for one that is good at each start. It throws away nothing that is good, since it takes
    the newest of these. The end of what it was asked for is an end where all is finite, though its loss be
    beyond the band, as after a harder last epoch: training once more would end there again. A model that
    became NaN is no end; but where it was gone back from already, and nothing good has come of that, training
    once more would end there again, at each start.

    What a rollback in mid-run has left behind comes after all else. What is damaged is warned of, and the
    next that the strategy wants is taken. Nothing is renamed.

    Args:
        directory: Where they are.
        strategy: Which is wanted.
        module: What is trained.
        is_done: Whether a checkpoint has all that `train` is asked for.

    Raises:
        CheckpointError: If there are checkpoints and none can be used, if one cannot be read, the one at the
            path is damaged, or "last_good" has gone back from an end that is not good and come to it again.
        ConfigError: If a run is to begin where something is.
    """
    if strategy.name == "none":
        _make_room(directory, overwrite=strategy.overwrite)
        return None
    found = entries(directory.path)
    faults = {entry.name: entry.damage for entry in found if entry.damage is not None}
    manifests = preferred([entry.manifest for entry in found if entry.manifest is not None])
    for damage in faults.values():
        _warn(damage)
    if (taken := _first_whole(directory, _ours(strategy, manifests), faults)) is not None:
        log.announce(
            f"{taken.path} was made under the same recovery_strategy, {strategy.request!r}: the run goes on "
            f"from there, and not once more from an older one; to go back to that all the same, give its "
            f"path and another checkpoint_dir"
        )
        return taken
    if strategy.name == "last_good":
        ends = [m for m in made_under(strategy.request, manifests)[:1] if is_done(m)]
        beyond = [m for m in ends if not m.is_good and math.isfinite(m.loss)]
        taken = _first_whole(directory, beyond, faults)
        if taken is not None and _is_finite(taken, module):
            log.announce(
                f"{taken.path} is not good (its loss, {taken.manifest.loss:.4g}, is beyond its band), and is "
                f"the end of the run, with all finite: nothing is trained; to train once more from an older "
                f"one, give its path and another checkpoint_dir"
            )
            return taken
    if strategy.path is not None:
        return _at(strategy.path, faults)
    wanted = ranked(strategy.name, manifests, monitor=strategy.monitor, mode=strategy.mode)
    if (taken := _first_whole(directory, wanted, faults)) is not None:
        newer = [m for m in manifests if m.number > taken.manifest.number]
        bad = [m for m in newer if not m.is_good]
        is_behind = strategy.name == "last_good" and bool(bad)
        if is_behind:
            is_end = newer[0].request == strategy.request and is_done(newer[0])
            _tell_of_bad(bad[0], taken, directory, is_end=is_end)
        return replace(taken, is_behind=is_behind)
    if faults:
        raise CheckpointError(
            f"{directory.path}: all checkpoints that would serve are damaged: {'; '.join(faults.values())}; "
            f"a new run begins with {ANEW}"
        )
    return None


def _tell_of_bad(bad: Manifest, taken: Found, directory: Directory, *, is_end: bool) -> None:
    """Tell that a start goes back past a checkpoint that is not good.

    Raises:
        CheckpointError: If that is the end of the run, and what is gone back to has led there before.
    """
    what = (
        f"{directory.path / name_of(bad.number, bad.step)} is not good (its loss is {bad.loss:.4g}, or "
        f"parameters are not finite)"
    )
    if is_end and ends_again(bad, taken.manifest):
        raise CheckpointError(
            f"{what} and is the end of the run, to which recovery_strategy 'last_good' has come once more "
            f"since it went back to {taken.path.name}. {WHERE_IT_ENDS_SO}; then go on from "
            f"recovery_strategy={str(taken.path)!r}. 'latest' gives the run as it has ended"
        )
    log.announce(
        f"{what}: recovery_strategy 'last_good' goes back to {taken.path.name}; to go on from the newest all "
        f"the same, take 'latest'"
    )


def _ours(strategy: Strategy, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Give what has come of a strategy that goes back once, where that is to go on."""
    if strategy.name in ("latest", "last_good"):
        return []  # the one never goes back, the other never beyond the newest that is good
    return made_under(strategy.request, manifests)


def _is_finite(found: Found, module: nn.Module) -> bool:
    """Whether all parameters are finite: a finite loss may hide one that is not."""
    return all(are_finite(found.model[name]) for name in parameters_of(module, found.model))


def _first_whole(directory: Directory, wanted: Sequence[Manifest], faults: dict[str, str]) -> Found | None:
    """Read the first checkpoint that is not damaged, and take down why those before it were not taken."""
    for manifest in wanted:
        name = name_of(manifest.number, manifest.step)
        if name in faults:  # as it was found to be before
            continue
        try:
            verify(directory.path / name)
        except DamagedError as error:
            faults[name] = str(error)
            _warn(str(error))
            continue
        return _read(directory.path / name, manifest, faults)
    return None


def _at(path: Path, faults: dict[str, str]) -> Found:
    if is_servers(path):
        raise ConfigError(
            f"recovery_strategy is the path {str(path)!r}, which is a server's checkpoint, and not a "
            f"trainer's: give a folder save-…. To begin with its model, write that to a file by `offbeat "
            f"checkpoint export`, and load it into the model first"
        )
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            f"recovery_strategy is the path {str(path)!r}, which is no checkpoint: give a folder save-… that "
            f"has a {MANIFEST}, or a strategy for those in checkpoint_dir"
        )
    return _read(path, verify(path), faults)


def _read(path: Path, manifest: Manifest, faults: dict[str, str]) -> Found:
    model, rest = read(path)
    return Found(path, manifest, model, rest, tuple(faults), tuple(faults.values()))


def _bring_back(trainee: Trainee, saved: Modes | None, left: Modes | None) -> None:
    """Bring a module's modes back, but for what a user has set since the `train` before."""
    now = modes_of(trainee.module)
    wake(trainee.module)
    if left is not None and not any(now["training"].values()):  # `eval()`, to look at it, is no such wish
        now = now | {"training": left["training"]}
    wanted = saved if saved is None or left is None else overlaid(saved, left, now)
    if trainee.agree(wanted):
        set_modes(trainee.module, wanted or modes_of(trainee.module))
    else:  # members train the same parameters, or none of them begins
        log.warn(
            "members' checkpoints are of different times, and of different parameters that were trained "
            "(requires_grad) or modules in training mode: these stay as they are here"
        )


def _make_room(directory: Directory, *, overwrite: bool) -> None:
    if (others := directory.others()) and not overwrite:
        raise ConfigError(
            f"recovery_strategy is 'none', and checkpoint_dir {str(directory.path)!r} is not empty (there is "
            f"{others[0]}): give an empty one, or overwrite=True, which removes the checkpoints in it, at "
            f"each start: in a command that a supervisor repeats take 'latest'"
        )
    directory.clear()


def _warn(damage: str) -> None:
    log.warn(f"a checkpoint is damaged, and the one before it is looked at: {damage}")


def go_on(
    found: Found,
    directory: Directory,
    *,
    trainee: Trainee,
    data: Data,
    account: Account,
    seed: int | None,
    member: str,
    left: Modes | None,
    may_go_back: bool,
) -> None:
    """Bring a run to where a checkpoint was, and set aside those that were damaged.

    Args:
        found: The checkpoint.
        directory: Where the damaged ones are.
        trainee: What is trained.
        data: On what.
        account: Of the run.
        seed: Of the order of a dataset, if one was given.
        member: From what else that order would follow here without one.
        left: The modes in which the `train` before in this process has left the module; None without.
        may_go_back: Whether a start may choose an older checkpoint.

    Raises:
        ModelMismatchError: If what is trained is not what the checkpoint is of.
        ConfigError: If the data is not. Nothing is changed in either case.
    """
    state = {"model": found.model} | found.rest["trained"]
    theirs = found.rest["seed"]
    others = data.described.differences(found.rest["described"])
    if seed is not None and data.described.kind == "dataset" and seed != theirs:
        was_given = found.rest.get("is_seed_given", True)  # which older checkpoints do not tell
        then = (
            f"was {theirs} when the checkpoint was made" if was_given else "none was given then: leave it out"
        )
        others.append(f"seed is {seed}, and {then}")
    if seed is None and data.described.kind == "dataset":
        others += _of_own_seed(member, found.rest)
    if differences := trainee.differences(state):
        is_other_model = bool(trainee.differences_of_model(state))
        remedy = (
            "build the model that was saved, and give all else as then" if is_other_model else "give the same"
        )
        raise ModelMismatchError(
            f"{found.path} is of another run: {'; '.join([*differences, *others])}: {remedy}, or begin anew "
            f"in another checkpoint_dir"
        )
    if others:
        raise ConfigError(
            f"{found.path} is of other data: {'; '.join(others)}: give the same, or begin anew in another "
            f"checkpoint_dir"
        )
    modes = found.rest.get("modes")  # which older checkpoints do not have
    notes = trainee.notes(state)
    if modes is not None and left is None:
        notes += words_of_others(modes_of(trainee.module), **modes)
    if notes:
        log.warn(f"{'; '.join(notes)}: what the checkpoint has is taken, {found.path}. {OTHER_SETTINGS}")
    _bring_back(trainee, None if modes is None else modes["now"], left)
    trainee.load_state_dict(state)
    account.load_state_dict(found.rest["account"])
    bring_back(trainee.keepers, found.rest.get("keepers", ()))  # which older checkpoints do not have
    for name in found.damaged:
        directory.set_aside(name)
    log.announce(f"goes on from step {found.manifest.step:,}, as {found.path} has it")
    if may_go_back and (what := _not_finite(found, trainee.module)) is not None:
        log.warn(
            f"{what} in {found.path}, which this goes on from: recovery_strategy='last_good' goes back to "
            f"the newest checkpoint that is good"
        )


def _of_own_seed(member: str, rest: dict[str, Any]) -> list[str]:
    """Word how the seed that an AsyncTrainer was made with is not the run's; who gives none takes that."""
    theirs = rest["member"]
    if not member.startswith(OWN_SEED) or member == theirs:
        return []
    if theirs.startswith(OWN_SEED):
        then = f"was {theirs.removeprefix(OWN_SEED)} when the checkpoint was made"
    elif theirs:
        then = "none was given then: leave it out"
    else:
        then = f"train(seed={rest['seed']}) was given then"
    return [f"the AsyncTrainer's seed is {member.removeprefix(OWN_SEED)}, and {then}"]


def _not_finite(found: Found, module: nn.Module) -> str | None:
    """Word what a checkpoint has that is not finite; None if all is."""
    if found.manifest.is_good:
        return None
    if not _is_finite(found, module):
        return "parameters are not finite"
    return None if math.isfinite(found.manifest.loss) else "the loss is not finite"
