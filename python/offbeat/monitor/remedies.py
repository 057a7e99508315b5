"""The remedies by name: what each needs, and how it is made."""

from collections.abc import Callable
from typing import NamedTuple

from offbeat.monitor.going_back import Rollback
from offbeat.monitor.ladder import Growth
from offbeat.monitor.leaving_out import Quarantine
from offbeat.monitor.remedy import MOST_REPEATS, Find, OnGradients, Remedy
from offbeat.monitor.tuning import ReduceLr, SyncOften, TightenStaleness

__all__ = ["NEEDS", "REMEDIES", "Numbers", "make", "until_when"]


class Numbers(NamedTuple):
    """What the monitor's keywords say that a remedy goes by.

    Attributes:
        lr_factor: Of "reduce_lr".
        pause_timeout_s: Of "pause".
    """

    lr_factor: float
    pause_timeout_s: float | None


def until_when(timeout_s: float | None) -> str:
    """Say what a paused run waits for, and for how long: whoever reads that has to do something."""
    at_most = (
        "for ever: pause_timeout_s is None"
        if timeout_s is None
        else f"{timeout_s:g} s at most, pause_timeout_s"
    )
    return f"waits for resume(), from a callback or another thread ({at_most})"


_MAKERS: dict[str, Callable[[Find, Numbers], Remedy]] = {
    "alert": lambda *_: OnGradients("told", "nothing was done", drops=False, is_mending=False),
    "clip": lambda *_: OnGradients(
        "gradients above their range are scaled down to it, and dropped where not finite",
        "gradients are left as they are",
    ),
    "reject": lambda *_: OnGradients("gradients out of range are dropped", "gradients are used again"),
    "increase_sync_frequency": lambda find, _: SyncOften(find),
    "tighten_staleness": lambda find, _: TightenStaleness(find),
    "reduce_lr": lambda find, numbers: ReduceLr(find, numbers.lr_factor),
    "quarantine": lambda find, _: Quarantine(find),
    "rollback": lambda find, _: Rollback(find),
    "pause": lambda _, numbers: OnGradients(
        f"training {until_when(numbers.pause_timeout_s)}",
        "training had gone on",
        repeats=MOST_REPEATS,
        growth=Growth(),  # somebody has looked, and let it go on
        is_mending=False,
    ),
}

REMEDIES = tuple(_MAKERS)
"""Their names."""

NEEDS = {
    "clip": "model=, whose gradients it scales",
    "reject": "model=, whose gradients it drops",
    "increase_sync_frequency": "something with an averaging_frequency or a sync_frequency that can be set, "
    "as an AsyncModelAverager of this model has, or an AsyncTrainer that averages; an AsyncWorker's "
    "update_frequency is chosen when it is made",
    "tighten_staleness": "something with a max_staleness that can be set (updates; None: no bound), as the "
    "ParameterServer has, in its process",
    "reduce_lr": "a live torch optimizer, what trains this model with one, or the ParameterServer itself, in "
    "whose process the learning rate of an optimizer of offbeat.optim is",
    "quarantine": "the AsyncWorker of this model, or something with quarantine(worker_id) and "
    "release(worker_id); a ParameterServer cannot leave out a worker of another process",
    "rollback": "a ParameterServer with checkpoint_dir= (an AsyncWorker's model is its server's), a "
    "FaultTolerantTrainer whose model is its own (a module, or an AsyncTrainer with strategy='local'; those "
    "who train together go back to none in mid-run), or something with rollback()",
}
"""What would do, for those that need something."""


def make(name: str, find: Find, numbers: Numbers) -> Remedy:
    """Make a remedy of its name.

    Args:
        name: One of `REMEDIES`.
        find: Gives what there is to act on.
        numbers: That it may go by.
    """
    return _MAKERS[name](find, numbers)
