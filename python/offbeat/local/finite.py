"""Whether what trains stays finite: seen where losses are read anyway, and told once, when it begins."""

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offbeat import log, trained_by
from offbeat.history import History
from offbeat.local.buffers import has_values

__all__ = ["Finiteness", "not_finite", "words_of"]

MOST_WAITING = 1000
"""Losses that stay on their device until somebody looks: each is a tensor there, with memory of its own."""

MOST_NAMED = 3
"""Names in a warning: where one is not finite, most are."""


IN_SPITE_OF_A_MONITOR = (
    'a monitor has dropped what was computed since, which does not mend them: put "rollback" behind its '
    "remedies, where a FaultTolerantTrainer trains, or start again from a checkpoint, as with "
    "FaultTolerantTrainer(recovery_strategy='last_good')"
)
"""What a user can do whose monitor does what a trainer would advise."""


class Finiteness:
    """Looks at the losses of one `train`, and at the parameters where a loss is not finite, and at the end.

    A loss that is not finite, with parameters that are, is of a batch that was kept out, by a monitor
    perhaps, which has told so itself; or of one whose gradients were finite.
    """

    def __init__(self, module: nn.Module, history: History, *, remedy: str) -> None:
        """Begin.

        Args:
            module: What is trained.
            history: Gets the first step.
            remedy: What there is to do about it where it trains.
        """
        self._module = module
        self._history = history
        self._remedy = remedy
        self._losses: list[torch.Tensor] = []  # on their device, until somebody waits for it
        self._steps: list[int] = []
        self._has_told = False  # of a loss
        self._is_lost = False  # all that comes is no news
        self._has_told_of_statistics = False
        self._skipped_since: int | None = None  # for parameters that a monitor has found not to be finite

    def add(self, loss: torch.Tensor, step: int) -> None:
        """Take the loss of a batch that was trained on, which belongs to a step.

        Waits for nothing, except where nobody has looked for a long time.
        """
        self._skipped_since = None
        if not self._is_lost:
            self._losses.append(loss.detach().reshape(()))
            self._steps.append(step)
            if len(self._losses) >= MOST_WAITING:
                self.look()

    def skip(self, step: int) -> None:
        """Hear of a batch of which nothing came, by the step that it belongs to.

        What a monitor's own count says is of no use: it goes over all calls of `train`, or is a caller's.
        """
        if not trained_by.is_lost(self._module):
            self._skipped_since = None
        elif self._skipped_since is None:
            self._skipped_since = step

    def look(self) -> None:
        """Read the losses since the last look, and warn if one is the first that is not finite."""
        values = torch.stack(self._losses).cpu().double().tolist() if self._losses else []  # one wait for all
        found = [
            (step, value) for step, value in zip(self._steps, values, strict=True) if not math.isfinite(value)
        ]
        self._losses.clear()
        self._steps.clear()
        if found:
            self._find(*found[0])
        self._look_at_statistics()

    def begin_anew(self) -> None:
        """Take down what was not finite, and tell of none of it: all is as it was before, and news again."""
        values = torch.stack(self._losses).cpu().double().tolist() if self._losses else []
        for step, value in zip(self._steps, values, strict=True):
            if not math.isfinite(value) and self._history.first_non_finite is None:
                self._history.first_non_finite = step
        self._losses.clear()
        self._steps.clear()
        self._has_told = self._is_lost = self._has_told_of_statistics = False
        self._skipped_since = None

    def end(self) -> None:
        """Look, and at the parameters as well: the last step's may have been the first.

        Or all batches since were skipped, for a monitor that has found them so.
        """
        self.look()
        if not self._is_lost and not_finite(self._module):
            self._find(self._history.steps, None, since=self._skipped_since)

    def _look_at_statistics(self) -> None:
        if self._is_lost:
            return
        names, has_told = _statistics_not_finite(self._module), self._has_told_of_statistics
        self._has_told_of_statistics = bool(names)
        if names and not has_told:
            log.warn(
                f"at step {self._history.steps} running statistics are not finite, {_some(names)}, as after "
                f"a batch of huge inputs, or of NaN whose step a GradScaler has skipped: training goes on, "
                f"for it does not read them; what the model gives in eval mode is of no use, and stays so: "
                f"look at the data, and call reset_running_stats() of those layers, after which they are "
                f"learnt anew"
            )

    def _find(self, step: int, loss: float | None, since: int | None = None) -> None:
        if self._history.first_non_finite is None:
            self._history.first_non_finite = step if since is None else since
        names = not_finite(self._module)
        is_news = bool(names) or not (self._has_told or trained_by.is_watched(self._module))
        self._has_told, self._is_lost = self._has_told or is_news, bool(names)
        if is_news:
            remedy = self._remedy if since is None else IN_SPITE_OF_A_MONITOR
            log.warn(f"{words_of(step, loss, names, since)}; {remedy}")


def not_finite(module: nn.Module) -> list[str]:
    """Name the parameters of a module that have a NaN or an infinity; waits for the device."""
    return [name for name, p in module.named_parameters() if p.requires_grad and not bool(p.isfinite().all())]


def _statistics_not_finite(module: nn.Module) -> list[str]:
    """Name the running statistics of batch norms in training that have a NaN or an infinity.

    Of a buffer in general nobody knows whether it is to be finite: a mask is not. To look at a DTensor would
    take all its processes. Waits once for each device.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for prefix, part in module.named_modules():
        if not (isinstance(part, _NormBase) and part.training):
            continue
        for key, buffer in (("running_mean", part.running_mean), ("running_var", part.running_var)):
            if type(buffer) is torch.Tensor and has_values(buffer):
                name = f"{prefix}.{key}".removeprefix(".")
                by_device.setdefault(buffer.device, {})[name] = buffer.isfinite().all()
    return [
        name
        for are_finite in by_device.values()
        for name, is_finite in zip(are_finite, torch.stack(list(are_finite.values())).tolist(), strict=True)
        if not is_finite
    ]


def words_of(step: int, loss: float | None, names: list[str], since: int | None = None) -> str:
    """Say what is not finite, and since when.

    Args:
        step: Of the loss; where that is None, the last.
        loss: The first that is not finite.
        names: Of parameters that are not.
        since: The first step that met such ones, where that is known.
    """
    if not names:
        return (
            f"at step {step} the loss is {loss}, and the parameters are finite: training goes on; look at "
            f"the inputs and targets of that batch"
        )
    begin = f"at step {step} the loss is {loss}" if loss is not None else f"training has ended at step {step}"
    then = "" if since is None else f" since step {since}"
    return (
        f"{begin}, and parameters are not finite{then}, {_some(names)}: what is "
        f"trained from there on learns nothing"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"
