"""What a `FaultTolerantTrainer` was given, checked: each check words what is wrong."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from offbeat.checks import Faults, objects
from offbeat.errors import ConfigError
from offbeat.local.parameters import of_puller
from offbeat.metrics import Mean, Metric, meters
from offbeat.naming import unknown
from offbeat.recovery.choice import STRATEGIES, Mode
from offbeat.recovery.values import is_overlapping
from offbeat.trainer.scheduling import meter_of

__all__ = [
    "mean_of",
    "means_of",
    "mode_of",
    "of_choices",
    "of_dataset_alone",
    "of_model",
    "of_scaler",
    "of_scheduler",
    "scheduler_meter_of",
    "scheduler_of",
    "strategy_of",
    "words_of",
]


def of_model(model: object) -> list[str]:
    """Tell why this cannot be trained here."""
    if not isinstance(model, nn.Module):
        return [
            (
                f"model is of type {type(model).__name__}: give an nn.Module, or the AsyncWorker, "
                f"AsyncModelAverager or AsyncTrainer of one, whose strategy may be 'accumulate'"
            )
        ]
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        return ["model has parameters without a shape yet: run one batch through it first"]
    if any(nn.parameter.is_lazy(buffer) for buffer in model.buffers()):
        return ["model has buffers without a shape yet: run one batch through it first"]
    if not any(p.requires_grad for p in model.parameters()):
        return [f"model is a {type(model).__name__} without parameters to train"]
    if found := of_puller(model):
        return found
    return [
        f"model has {name!r}, whose elements share their memory, so that no values can be brought back into "
        f"it: give the module a clone() of it"
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and is_overlapping(tensor)
    ]


def strategy_of(given: object) -> tuple[str, Path | None]:
    """Take a strategy by its name, or a path.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(given, str) and given in STRATEGIES:
        return given, None
    if isinstance(given, str | os.PathLike):
        path = Path(os.path.expanduser(os.fspath(given))).absolute()  # noqa: PTH111  as checkpoint_dir's
        if isinstance(given, os.PathLike) or os.sep in given or path.exists():
            return "path", path
    raise ConfigError(unknown("recovery_strategy", given, STRATEGIES) + ", or the path of a checkpoint")


def mean_of(given: Metric | None, *, name: str) -> Mean | None:
    """Make the meter of what is monitored, say; `name` is the keyword of it.

    Raises:
        ConfigError: If it is no one metric.
    """
    if given is None:
        return None
    made = means_of(given, name=name)
    if len(made) != 1:
        raise ConfigError(f"{name} is {given!r}: give one metric")
    return made[0]


def means_of(given: Metric | Iterable[Metric], *, name: str) -> list[Mean]:
    """Make meters whose state a checkpoint can hold.

    Raises:
        ConfigError: If one is no metric, or keeps an account of its own.
    """
    made = meters(given, name=name)
    means = [meter for meter in made if isinstance(meter, Mean)]
    if others := [meter.name for meter in made if not isinstance(meter, Mean)]:
        raise ConfigError(
            f"{name}: {others[0]} keeps an account of its own, which a checkpoint cannot: give 'loss', "
            f"'accuracy' or a function of (outputs, targets) whose mean is wanted; evaluate() takes any"
        )
    return means


def of_choices(mode: object, reduction: object, **flags: object) -> list[str]:
    """Tell which of these are none of what there is to choose from; `flags` are True or False."""
    faults = [] if mode in (None, "min", "max") else [f'mode is {mode!r}: give "min" or "max"']
    if reduction not in ("mean", "sum"):
        faults.append(f'loss_reduction is {reduction!r}: give "mean" or "sum"')
    faults += [
        f"{name} is {value!r}: give True or False"
        for name, value in flags.items()
        if not isinstance(value, bool)
    ]
    return faults


def mode_of(monitor: str | None) -> Mode:
    """Tell whether less or more of a metric is better, where nobody says: of losses less is.

    Raises:
        ConfigError: If it is neither a loss nor "accuracy": of an F1 score the worst would pass for the best.
    """
    if monitor == "accuracy":
        return "max"
    if monitor is None or monitor.lower().endswith("loss") or "cross_entropy" in monitor:
        return "min"
    raise ConfigError(
        f"monitor is {monitor!r}, and nothing says whether less or more of it is better: give mode='min' or "
        f"mode='max'"
    )


def of_scaler(scaler: object) -> list[str]:
    """Tell why this is no GradScaler of torch's."""
    if scaler is None or isinstance(scaler, torch.amp.GradScaler):
        return []
    return objects(grad_scaler=scaler) or [f"grad_scaler is {scaler!r}: give a torch.amp.GradScaler, or None"]


def of_dataset_alone(*, seed: object, batch_size: object) -> list[str]:
    """Tell which of these are given, beside a dataloader."""
    faults = []
    if seed is not None:
        faults.append(f"seed is {seed!r}, which is for dataset=: a dataloader has an order of its own")
    if batch_size is not None:
        faults.append(
            f"batch_size is {batch_size!r}, which is for dataset=: a dataloader makes its own batches, so "
            f"leave it out"
        )
    return faults


def of_scheduler(given: object, step: object, metric: Metric | None, *, is_validated: bool) -> list[str]:
    """Tell what is wrong with a scheduler, with when it is to step, or with what it goes by."""
    faults = Faults()
    if step not in ("epoch", "step"):
        faults.append(f'scheduler_interval is {step!r}: give "epoch" or "step"')
    faults.catch(lambda: mean_of(metric, name="scheduler_metric"))
    if given is not None:
        faults.catch(lambda: check_scheduler(given))
        if not faults and _is_live(given):
            faults.catch(lambda: scheduler_meter_of(given, str(step), metric, is_validated=is_validated))
        return faults
    if step == "step":
        faults.append('scheduler_interval is "step", and there is no scheduler: give one, or leave it out')
    if metric is not None:
        faults.append("scheduler_metric is given, and no scheduler, which would go by it: leave it out")
    return faults


def check_scheduler(given: object) -> None:
    """See that this is a learning rate scheduler, or may make one.

    Raises:
        ConfigError: If it is neither.
    """
    if not _is_live(given) and not callable(given):
        raise ConfigError(
            f"scheduler is {given!r}: give a scheduler of torch's, or what makes one of the optimizer, such "
            f"as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
        )


def _is_live(given: object) -> bool:
    methods = (getattr(given, name, None) for name in ("step", "state_dict"))
    return all(map(callable, methods)) and not isinstance(given, type)


def scheduler_meter_of(
    scheduler: object, step: str, metric: Metric | None, *, is_validated: bool
) -> Mean | None:
    """Make what measures by what a scheduler goes, as `offbeat.trainer.scheduling.meter_of`; None without."""
    if scheduler is None:
        return None
    made = meter_of(scheduler, step, metric, is_validated=is_validated)
    return cast(Mean | None, made)  # of a metric that was seen to be a mean


def scheduler_of(given: Any, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401  any such
    """Give the live scheduler of an optimizer.

    Raises:
        ConfigError: If it is none, or of another optimizer.
    """
    if hasattr(given, "state_dict") and not isinstance(given, type):
        if getattr(given, "optimizer", optimizer) is not optimizer:
            raise ConfigError("scheduler is of another optimizer than the one that trains: give that one's")
        return given
    try:
        made = given(optimizer)
    except (TypeError, ValueError) as error:
        is_short = isinstance(given, type) and "required positional argument" in str(error)
        needs_more = f": give functools.partial({given.__name__}, …) of it" if is_short else ""
        raise ConfigError(
            f"scheduler {given!r} cannot be made for this optimizer: {error}{needs_more}"
        ) from error
    if not hasattr(made, "state_dict"):
        raise ConfigError(f"scheduler {given!r} made a {type(made).__name__}, which is no scheduler")
    check_scheduler(made)
    return made


def words_of(optimizer: str) -> str:
    """Say which optimizer runs, and where: a class's name is of one in this process."""
    return f"{optimizer}, in this process" if optimizer.isidentifier() else optimizer
