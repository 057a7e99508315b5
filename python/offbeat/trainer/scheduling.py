"""A learning rate that a scheduler of torch's moves: after each step of the optimizer, or each epoch."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat import log, process, trained_by
from offbeat.checks import Faults
from offbeat.errors import ConfigError
from offbeat.local.optimizer import are_equal
from offbeat.metrics import Meter, Metric, MetricObject, meters
from offbeat.naming import unknown

__all__ = [
    "Given",
    "Interval",
    "Scheduling",
    "as_it_was_after_failure",
    "bring_back_scheduler",
    "faults_of_scheduler",
    "idle_faults",
    "measured_apart_faults",
    "meter_of",
    "scheduler_for",
    "scheduling_of",
    "shared_faults",
    "step_by",
]

Given: TypeAlias = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None
"""A scheduler, or what makes one of the optimizer."""

Interval: TypeAlias = Literal["epoch", "step"]

INTERVALS = ("epoch", "step")

GIVEN = (
    "T_0", "T_max", "T_mult", "_milestones", "_schedule_phases", "cooldown", "end_factor", "eta_min",
    "factor", "gamma", "milestones", "mode", "patience", "power", "start_factor", "step_ratio", "step_size",
    "threshold", "total_iters", "total_size", "total_steps",
)  # fmt: skip
"""What torch's schedulers are made with, and do not move themselves; one of a user's own may."""


class Scheduling:
    """Moves the learning rate of one `train`.

    Attributes:
        meter: Measures over an epoch what the scheduler goes by; None where it goes by nothing.
    """

    def __init__(self, scheduler: LRScheduler | None, interval: Interval, meter: Meter | None) -> None:
        self.scheduler = scheduler
        self.meter = meter
        self._interval = interval

    @property
    def is_measured(self) -> bool:
        """Whether the scheduler goes by a metric."""
        return self.meter is not None

    @contextmanager
    def steps(self, live: torch.optim.Optimizer | None, model: nn.Module) -> Iterator[None]:
        """Follow each step of an optimizer, whoever makes it, but for those whose batch a monitor dropped."""
        if self.scheduler is None or live is None or self._interval != "step":
            yield
            return
        scheduler = self.scheduler

        def follow(*_: object) -> None:
            if not trained_by.has_dropped(model):
                scheduler.step()

        hook = live.register_step_post_hook(follow)
        try:
            yield
        finally:
            hook.remove()

    def end_epoch(self) -> None:
        """Follow an epoch."""
        if self.scheduler is not None and self._interval == "epoch":
            step_by(self.scheduler, self.meter)


def step_by(scheduler: Any, meter: Meter | None) -> None:  # noqa: ANN401  any in the manner of torch's
    """Let a scheduler step, by what was measured since its step before where it goes by that.

    Where nothing was, it does not: to torch's, the NaN of no batch is an epoch without progress.
    """
    if meter is None:
        scheduler.step()
    elif meter.is_empty:
        log.warn(
            f"{type(scheduler).__name__} does not step after this epoch: no batch was measured in it, by "
            f"which it could go"
        )
    else:
        scheduler.step(meter.read())


def faults_of_scheduler(given: object, interval: object, metric: object) -> list[str]:
    """Tell what is wrong with these, before there is an optimizer."""
    faults = Faults()
    if interval not in INTERVALS:
        faults.append(unknown("scheduler_interval", interval, INTERVALS))
    if isinstance(given, type) and issubclass(given, LRScheduler):
        faults.append(
            f"scheduler is the class {given.__name__}: give a scheduler of your optimizer, or "
            f"functools.partial({given.__name__}, ...), which is made of it"
        )
    elif given is not None and not isinstance(given, LRScheduler) and not callable(given):
        faults.append(
            f"scheduler is {given!r}: give one of torch.optim.lr_scheduler, or a function that makes one of "
            f"the optimizer"
        )
    if metric is not None:
        faults.catch(lambda: _one_meter(metric))
    return faults


def idle_faults(given: object, interval: object, metric: object) -> list[str]:
    """Tell what is given for a scheduler, where there is none."""
    if given is not None:
        return []
    faults = []
    if interval == "step":
        faults.append(
            'scheduler_interval is "step", and there is no scheduler, which would step then: give '
            "scheduler=, or leave it out"
        )
    if metric is not None:
        faults.append("scheduler_metric is given, and no scheduler, which would go by it: leave it out")
    return faults


def measured_apart_faults(metric: Metric | None) -> list[str]:
    """Tell what is wrong with a scheduler that goes by a metric where all members' rates have to be the same.

    By the loss of the same validation data they may be, as all have the same model.

    Args:
        metric: Of each one's own training batches; None: of the validation data.
    """
    if metric is None:
        return []
    return [
        (
            "scheduler goes by scheduler_metric, which each member measures on batches of its own, and with "
            "'accumulate' in a process group all need the same learning rate: take a scheduler that goes by "
            "no metric, or leave scheduler_metric out and give all members the same validation="
        )
    ]


def shared_faults(metric: object, others: Sequence[object]) -> list[str]:
    """Tell whether a scheduler's metric is one of those that log lines read and reset."""
    if isinstance(metric, MetricObject) and any(metric is other for other in others):
        return ["scheduler_metric is one of metrics, and keeps one account for both: give two objects"]
    return []


@contextmanager
def as_it_was_after_failure(given: torch.optim.Optimizer | LRScheduler | None) -> Iterator[None]:
    """Leave an optimizer or a scheduler, and those inside it, as they were if something fails in here.

    Most schedulers set the learning rate as they are made, and each puts its own step around the optimizer's;
    a state that is loaded replaces what the optimizer remembers, and, of several schedulers in one, some.
    """
    undo = [_undoing(one) for one in _with_inner(given)]
    try:
        yield
    except BaseException:
        for one in undo:
            try:
                one()
            except Exception as error:  # noqa: BLE001  of another's class; what failed first is what to tell
                log.warn(f"what failed could not be undone whole: {process.cause_of(error)}")
        raise


def _with_inner(given: torch.optim.Optimizer | LRScheduler | None) -> list[Any]:
    """Give it with those that it is around."""
    found: list[Any] = []
    left: list[object] = [given]
    seen: set[int] = set()  # an attribute may hold itself
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, LRScheduler):
            lambdas = getattr(one, "lr_lambdas", ())  # of which torch loads what is no function
            lambdas = lambdas if isinstance(lambdas, list | tuple) else ()
            found += [one, *(each for each in lambdas if not inspect.isroutine(each))]
            left += (value for name, value in vars(one).items() if name != "optimizer")
        elif isinstance(one, torch.optim.Optimizer):
            found.append(one)
            left += (value for name, value in vars(one).items() if name not in ("state", "param_groups"))
    return found


def _undoing(one: Any) -> Callable[[], None]:  # noqa: ANN401  an optimizer, a scheduler or a part of it
    """Give what makes it again what it is now."""
    own = dict(vars(one)) if hasattr(one, "__dict__") else None
    held = _read(one, "state")  # one around another may have the other's
    entries = dict(held) if isinstance(held, dict) else {}
    lists = _read(one, "param_groups")
    there = list(lists) if isinstance(lists, list | tuple) else []  # where it has them by now
    groups = [{name: _copied(name, value) for name, value in group.items()} for group in there]

    def undo() -> None:
        if own is not None:
            vars(one).clear()
            vars(one).update(own)
        if isinstance(held, dict):
            held.clear()
            held.update(entries)
        if isinstance(lists, list):
            lists[:] = there
        for group, before in zip(there, groups, strict=True):
            group.clear()
            group.update(before)

    return undo


def bring_back_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:  # noqa: ANN401  as in `step_by`
    """Load a scheduler's state; of what it was made with here that stays another's, warn.

    Raises:
        ConfigError: If it does not take it, as one of several, of which the state had more.
    """
    others = _others(scheduler, saved)
    try:
        scheduler.load_state_dict(saved)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the {type(scheduler).__name__} does not take the state's ({type(error).__name__}: {error}): "
            f"make it as it was made where the state was taken"
        ) from error
    if others:
        log.warn(
            f"the {type(scheduler).__name__} is made with {', '.join(others)}, which stays: the schedule is "
            f"that of the state. For a longer run make it as long from the beginning, or set it in a callback"
        )


def _others(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:  # noqa: ANN401  as in `step_by`
    """Word what a scheduler was made with, where a state has something else; of those in it, too."""
    own = vars(scheduler)
    given = GIVEN if type(scheduler).__module__ == torch.optim.lr_scheduler.__name__ else ()
    words = [
        f"{name.lstrip('_')}={own[name]!r} where the state has {saved[name]!r}"
        for name in given
        if name in own and name in saved and _differ(own[name], saved[name])
    ]
    inner = zip(own.get("_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    for one, state in inner:
        words += [f"a {type(one).__name__} with {other}" for other in _others(one, state)]
    return words


def _differ(own: object, saved: object) -> bool:
    try:
        return bool(own != saved)
    except (RuntimeError, ValueError):  # of tensors and arrays there is one answer for each element
        return False


def _copied(name: str, value: Any) -> Any:  # noqa: ANN401  of a parameter group
    try:
        return value if name == "params" else copy.deepcopy(value)
    except Exception:  # noqa: BLE001  there is no copy of a lock, say, and nobody changes what it is
        return value


def _read(one: object, name: str) -> Any:  # noqa: ANN401  whatever a class makes of it
    try:
        return getattr(one, name, None)
    except Exception:  # noqa: BLE001  as of one that is not ready yet
        return None


def scheduling_of(
    given: Any,  # noqa: ANN401  looked at already
    interval: Interval,
    metric: Metric | None,
    live: torch.optim.Optimizer | None,
    before: tuple[object, LRScheduler] | None,
    *,
    is_validated: bool = False,
) -> Scheduling:
    """Make a scheduler of what was given, and see that it is of the optimizer.

    Args:
        given: A scheduler, what makes one, or None.
        interval: When it steps.
        metric: What it goes by.
        live: The optimizer; None where that is on a server.
        before: What was given to the `train` before, and the scheduler that came of it: the same, or its
            equal, goes on.
        is_validated: Whether the model is measured after each epoch, by whose loss a scheduler goes then that
            goes by a metric and is told none.

    Raises:
        ConfigError: If they do not fit one another.
    """
    if given is None:
        return Scheduling(None, interval, None)
    if live is None:
        raise ConfigError(
            "the optimizer runs on the server, and so does its learning rate: give ParameterServer "
            "lr_schedule= in place of scheduler=, or a live optimizer here"
        )
    scheduler = scheduler_for(given, live, before)
    meter = meter_of(scheduler, interval, metric, is_validated=is_validated)
    return Scheduling(scheduler, interval, meter)


def scheduler_for(
    given: Any,  # noqa: ANN401  looked at already
    live: torch.optim.Optimizer,
    before: tuple[object, LRScheduler] | None,
) -> LRScheduler:
    """Give the scheduler that is meant, or make it.

    Raises:
        ConfigError: If it is none, or of another optimizer.
    """
    if isinstance(given, LRScheduler):
        scheduler = given
    else:
        scheduler = before[1] if before is not None and are_equal(given, before[0]) else _made(given, live)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"scheduler gave {scheduler!r}: it makes one of torch.optim.lr_scheduler")
    if scheduler.optimizer is not live:
        raise ConfigError(
            f"the {type(scheduler).__name__} is of another optimizer than the {type(live).__name__} that "
            f"trains this model: give a function that makes one, such as "
            f"functools.partial({type(scheduler).__name__}, ...)"
        )
    return scheduler


def _made(given: Any, live: torch.optim.Optimizer) -> Any:  # noqa: ANN401  whatever came
    try:
        return given(live)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"scheduler is {given!r:.200}, which cannot make one of the {type(live).__name__}: "
            f"{process.cause_of(error)}; give all that it needs, as functools.partial(StepLR, step_size=10) "
            f"does"
        ) from error


def meter_of(
    scheduler: object,
    interval: str,
    metric: Metric | None,
    *,
    is_validated: bool,
) -> Meter | None:
    """Make what measures by what a scheduler goes; None where it goes by no metric.

    Args:
        scheduler: That was given, or made.
        interval: When it steps.
        metric: What it goes by, as given.
        is_validated: As `scheduling_of` has it.

    Raises:
        ConfigError: If these do not fit one another.
    """
    name = type(scheduler).__name__
    if not _takes_metric(scheduler):
        if metric is not None:
            raise ConfigError(f"scheduler_metric is given, and {name} goes by no metric: leave it out")
        return None
    if interval == "step":
        raise ConfigError(f'scheduler_interval is "step", and {name} goes by an epoch\'s mean: take "epoch"')
    if metric is None and not is_validated:
        raise ConfigError(
            f'{name} goes by a metric: give scheduler_metric="loss", say, or validation=, by whose loss it '
            f"goes then"
        )
    goes_by = "loss" if metric is None else metric
    if isinstance(scheduler, ReduceLROnPlateau):
        _check_mode(scheduler.mode, goes_by)
    return _one_meter(goes_by)


BETTER = {"loss": "min", "accuracy": "max"}
"""Of which metrics less is better, and of which more."""


def _check_mode(mode: str, metric: Metric) -> None:
    """See that ReduceLROnPlateau does not take each step forward for one back.

    Raises:
        ConfigError: If it does.
    """
    better = BETTER.get(metric) if isinstance(metric, str) else None
    if better is not None and mode != better:
        raise ConfigError(
            f"ReduceLROnPlateau has mode={mode!r} and goes by {metric!r}, of which "
            f"{'less' if better == 'min' else 'more'} is better: make it with mode={better!r}, or it lowers "
            f"the rate while the model gets better"
        )


def _takes_metric(scheduler: object) -> bool:
    """Whether `step` wants one, as that of ReduceLROnPlateau does, also where it passes on what comes."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    step = getattr(scheduler, "step", None)
    return callable(step) and any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in inspect.signature(step).parameters.values()
    )


def _one_meter(metric: Any) -> Meter:  # noqa: ANN401  whatever came
    found = meters(metric, name="scheduler_metric")
    if len(found) != 1:
        raise ConfigError(f"scheduler_metric is {len(found)} metrics: give one")
    return found[0]
