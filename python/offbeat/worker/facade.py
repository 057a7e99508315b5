"""`worker.optimizer`: a `torch.optim.Optimizer` whose `step()` is `worker.step()`.

For code that wants an optimizer in its hands: `GradScaler`, gradient clipping by groups, a loop written for
one.
"""

import weakref
from collections.abc import Callable
from typing import Any, Never

import torch

from offbeat.errors import ClosedError, ConfigError

__all__ = ["WorkerOptimizer"]


class WorkerOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer, wherever it runs.

    With a live optimizer the parameter groups are that optimizer's own. With one on the server there is one
    group with the worker's parameters, and its learning rate is the server's affair.

    Args:
        take: The worker's bound `step`. Held weakly: a worker that goes out of scope leaves at once.
        parameters: What it trains.
    """

    def __init__(self, take: Callable[[], object], parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self._take = weakref.WeakMethod(take)
        self.param_groups = [_ServerGroup(group) for group in self.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, as `worker.step()` does, and give back what the closure gave."""
        take = self._take()
        if take is None:
            raise ClosedError("this optimizer's worker is gone: keep the worker as long as you train")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        take()
        return loss

    def follow(self, parameters: list[torch.Tensor], live: torch.optim.Optimizer | None) -> None:
        """Take the groups of a live optimizer, or the parameters as the module has them now."""
        if live is not None:
            self.param_groups = live.param_groups
            return
        if not self.param_groups or not isinstance(self.param_groups[0], _ServerGroup):
            self.param_groups = [_ServerGroup()]
        self.param_groups[0]["params"] = parameters


class _ServerGroup(dict[str, Any]):
    """A parameter group without a learning rate to schedule: an `lr_scheduler` begins by writing one."""

    def setdefault(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  dict's own
        return _refuse() if key in _SCHEDULED else super().setdefault(key, default)

    def __setitem__(self, key: str, value: object) -> None:
        return _refuse() if key in _SCHEDULED else super().__setitem__(key, value)

    def __missing__(self, key: str) -> Never:
        if key in _SCHEDULED:
            _refuse()
        raise KeyError(key)


_SCHEDULED = frozenset({"lr", "initial_lr"})


def _refuse() -> Never:
    raise ConfigError(
        "the optimizer runs on the server, and so does its learning rate: give ParameterServer lr_schedule=, "
        "or call server.set_lr(); a torch lr_scheduler works with a live optimizer"
    )
