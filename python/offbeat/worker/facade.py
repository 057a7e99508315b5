"""`worker.optimizer`: a `torch.optim.Optimizer` whose `step()` is `worker.step()`.

For code that wants an optimizer in its hands: `GradScaler`, gradient clipping by groups, a loop written for
one.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Never

import torch

from offbeat.errors import ClosedError, ConfigError

__all__ = ["WorkerOptimizer"]


class WorkerOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer, wherever it runs.

    With a live optimizer the parameter groups and the state are that optimizer's own. With one on the server
    there is one group with the worker's parameters, and its learning rate and its state are the server's
    affair.

    Args:
        take: The worker's bound `step`. Held weakly: a worker that goes out of scope leaves at once.
        give_up: The worker's bound method for a batch that is not stepped; held so, too.
        parameters: What it trains.
    """

    def __init__(
        self, take: Callable[[], object], give_up: Callable[[], object], parameters: list[torch.Tensor]
    ) -> None:
        self._is_made = False
        self._live: torch.optim.Optimizer | None = None
        super().__init__(parameters, {})
        self._is_made = True
        self._take = weakref.WeakMethod(take)
        self._give_up = weakref.WeakMethod(give_up)
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

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own signature
        """Let go of the gradients; of a batch that no step has taken, what it broke in buffers goes too.

        Before the next forward pass, so that this one's statistics count.
        """
        is_untaken = any(p.grad is not None for group in self.param_groups for p in group["params"])
        if is_untaken and (give_up := self._give_up()) is not None:
            give_up()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Give a live optimizer's state; with one on the server there is none here."""
        return super().state_dict() if self._live is None else self._live.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a live optimizer's state.

        Raises:
            ConfigError: If the optimizer runs on the server.
        """
        live = self._require_live("load_state_dict()")
        live.load_state_dict(state_dict)
        self._share(live)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give a live optimizer one more group.

        Raises:
            ConfigError: If the optimizer runs on the server.
        """
        if not self._is_made:
            return super().add_param_group(param_group)  # torch's own constructor
        live = self._require_live("add_param_group()")
        live.add_param_group(param_group)
        return self._share(live)

    def follow(self, parameters: list[torch.Tensor], live: torch.optim.Optimizer | None) -> None:
        """Take the groups and the state of a live optimizer, or the parameters as the module has them now."""
        was_live, self._live = self._live is not None, live
        if live is not None:
            self._share(live)
            return
        if was_live:
            self.state, self.param_groups = defaultdict(dict), [_ServerGroup()]
        self.param_groups[0]["params"] = parameters

    @property
    def live(self) -> torch.optim.Optimizer | None:
        """The optimizer that it stands for; None where that runs on the server."""
        return self._live

    def _share(self, live: torch.optim.Optimizer) -> None:
        self.state, self.param_groups = live.state, live.param_groups

    def _require_live(self, call: str) -> torch.optim.Optimizer:
        if self._live is not None:
            return self._live
        raise ConfigError(
            f"{call} of worker.optimizer is for an optimizer on the worker, and this one runs on the server, "
            f"where its groups and its state are"
        )


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
