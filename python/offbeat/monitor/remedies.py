"""The remedies by name: what each needs, and how it is made."""

from collections.abc import Callable

from offbeat.monitor.leaving_out import Quarantine, Rollback
from offbeat.monitor.remedy import MOST_REPEATS, Find, OnGradients, Remedy
from offbeat.monitor.tuning import ReduceLr, SyncOften, TightenStaleness

__all__ = ["NEEDS", "REMEDIES", "make"]

_MAKERS: dict[str, Callable[[Find, float], Remedy]] = {
    "alert": lambda *_: OnGradients("told", "nothing was done", drops=False),
    "clip": lambda *_: OnGradients(
        "gradients above their range are scaled down to it", "gradients are left as they are"
    ),
    "reject": lambda *_: OnGradients("gradients out of range are dropped", "gradients are used again"),
    "increase_sync_frequency": lambda find, _: SyncOften(find),
    "tighten_staleness": lambda find, _: TightenStaleness(find),
    "reduce_lr": ReduceLr,
    "quarantine": lambda find, _: Quarantine(find),
    "rollback": lambda find, _: Rollback(find),
    "pause": lambda *_: OnGradients(
        "training waits for resume()", "training had gone on", repeats=MOST_REPEATS, is_patient=True
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
    "tighten_staleness": "something with a max_staleness that can be set; a ParameterServer's is chosen when "
    "it is made",
    "reduce_lr": "a live torch optimizer, what trains this model with one, or the ParameterServer itself, in "
    "whose process the learning rate of an optimizer of offbeat.optim is",
    "quarantine": "the AsyncWorker of this model, or something with quarantine(worker_id) and "
    "release(worker_id); a ParameterServer cannot leave out a worker of another process",
    "rollback": "a ParameterServer with checkpoint_dir=, or something with rollback()",
}
"""What would do, for those that need something."""


def make(name: str, find: Find, *, lr_factor: float) -> Remedy:
    """Make a remedy of its name.

    Args:
        name: One of `REMEDIES`.
        find: Gives what there is to act on.
        lr_factor: Of "reduce_lr".
    """
    return _MAKERS[name](find, lr_factor)
