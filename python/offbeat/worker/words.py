"""Which optimizer computes where, in a line: for the log, the history and whoever reads them."""

import json
from typing import Any

import torch

__all__ = ["NONE_YET", "of_live", "of_run"]

NONE_YET = "none yet: the server waits for one"


def of_live(optimizer: torch.optim.Optimizer, update_frequency: int) -> str:
    """Describe an optimizer that runs on the worker."""
    group = optimizer.param_groups[0]
    steps = "after each step" if update_frequency == 1 else f"every {update_frequency} steps"
    return f"{type(optimizer).__name__}(lr={group.get('lr')}) on the worker; the difference is pushed {steps}"


def of_run(run: str) -> str:
    """Describe the optimizer that runs on the server, from the run's configuration as JSON."""
    config: dict[str, Any] = json.loads(run)
    spec = config.get("optimizer")
    if spec is None:
        return NONE_YET
    rules = " and ".join(_rule(group) for group in spec["groups"])
    momentum = ", its momentum in the workers" if config.get("momentum_correction") else ""
    return f"{rules} on the server{momentum}"


def _rule(group: dict[str, Any]) -> str:
    rule = dict(group["rule"])
    name = rule.pop("name")
    if rule.pop("decoupled_weight_decay", False):
        name = "AdamW"
    settings = {"lr": group["lr"]} | {key: value for key, value in rule.items() if value}
    where = "" if group["pattern"] == "*" else f" for {group['pattern']}"
    return f"{name}({', '.join(f'{key}={value}' for key, value in settings.items())}){where}"
