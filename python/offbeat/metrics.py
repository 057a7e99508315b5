"""What `train` and `evaluate` measure: means over samples, taken without waiting for the device.

A metric is "loss", "accuracy", a callable that gets (outputs, targets), or a torchmetrics object. Each
becomes a meter that is updated per batch and read per log line; only the reading waits for the device. A
torchmetrics collection becomes as many as it has members.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import nn

from offbeat import process
from offbeat.checks import objects, refuse
from offbeat.errors import ConfigError
from offbeat.naming import a_class, unknown

__all__ = [
    "Mean",
    "Meter",
    "Metric",
    "MetricObject",
    "accuracy",
    "apart",
    "is_collection",
    "listed",
    "meters",
]


@runtime_checkable
class MetricObject(Protocol):
    """An object in the manner of torchmetrics: it gathers batches and computes over all of them."""

    def update(self, outputs: Any, targets: Any, /) -> None:  # noqa: ANN401  whatever the user's takes
        """Take one batch."""

    def compute(self) -> Any:  # noqa: ANN401  a number, or a tensor that holds one
        """Give the value over all batches since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""


#: Name, function of (outputs, targets), or object with `update`, `compute` and `reset`.
Metric: TypeAlias = str | Callable[[Any, Any], float | torch.Tensor] | MetricObject

_NAMES = ("loss", "accuracy")


class Meter(Protocol):
    """One metric, being measured."""

    @property
    def name(self) -> str:
        """What it is called in records and results."""

    @property
    def is_empty(self) -> bool:
        """Whether there was no batch since the last reading, which would give NaN."""

    def update(self, outputs: object, targets: object, loss: torch.Tensor | None, samples: int) -> None:
        """Take one batch."""

    def read(self) -> float:
        """Give the value over the batches since the last reading, and begin anew. Waits for the device."""


def meters(
    metrics: Metric | Iterable[Metric], *, name: str = "metrics", keeps: Sequence[object] = ()
) -> list[Meter]:
    """Make the meters for what a user asked for.

    Args:
        metrics: As given.
        name: By which keyword.
        keeps: As of `apart`: an object that another meter is at work with is taken apart from it.

    Raises:
        ConfigError: For an unknown name (with the nearest), for what is no metric, for a name given twice.
    """
    made: list[Meter] = [meter for metric in listed(metrics) for meter in _meters(metric, name, keeps)]
    names = [meter.name for meter in made]
    if twice := sorted({one for one in names if names.count(one) > 1}):
        raise ConfigError(
            f"two metrics are called {twice[0]!r}, and results are told apart by name: give torchmetrics "
            f"objects names in a torchmetrics.MetricCollection({{name: object, …}}), functions by def"
        )
    return made


def listed(metrics: Metric | Iterable[Metric]) -> list[Metric]:
    """Give one metric, or several, as a list of them."""
    if isinstance(metrics, str | MetricObject) or callable(metrics) or not isinstance(metrics, Iterable):
        return [metrics]
    return list(metrics)


def is_collection(metrics: object) -> bool:
    """Whether these are metrics with names in the manner of torchmetrics' `MetricCollection`."""
    return isinstance(metrics, nn.ModuleDict) and isinstance(metrics, MetricObject)


def apart(metric: Metric, keeps: Sequence[object]) -> Metric:
    """Give a metric that keeps its own account another one, to measure beside what it measures.

    Args:
        metric: That measures training.
        keeps: What it may have hold of, and that is not to be copied with it, such as the model.

    Raises:
        ConfigError: If it cannot be copied.
    """
    if not isinstance(metric, MetricObject):
        return metric
    parts = [part for one in keeps if isinstance(one, nn.Module) for part in _parts(one)]
    memo = {id(one): one for one in (*keeps, *parts) if one is not metric}
    try:
        return copy.deepcopy(metric, memo)
    except Exception as error:
        raise ConfigError(
            f"metrics has {a_class(metric)} that cannot be copied ({process.cause_of(error)}), and keeps one "
            f"account, of training, where validation= and evaluate() need their own: give a function, or do "
            f"without validation=, and give evaluate() another object of it"
        ) from error


def _parts(module: nn.Module) -> list[object]:
    """Give what a model is made of, but for metrics in it, as Lightning's have, and what is theirs alone."""
    found: dict[int, object] = {}
    waiting = [module]
    while waiting:
        part = waiting.pop()
        found[id(part)] = part
        found |= {id(one): one for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
        waiting += [
            one for one in part.children() if id(one) not in found and not isinstance(one, MetricObject)
        ]
    return list(found.values())


def accuracy(outputs: object, targets: object) -> torch.Tensor:
    """Compute the share of right answers in 0..1, a scalar tensor on the outputs' device.

    Outputs of shape (N,), (N, 1) or (N, 1, …) are logits of one class, right where their sign says what the
    target says, of the same shape or without dim 1; otherwise the class is the argmax over dim 1, and targets
    are class indices or of the outputs' shape.

    Raises:
        ConfigError: If the shapes do not fit.
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise ConfigError(
            f'"accuracy" compares tensors, and got {type(outputs).__name__} and {type(targets).__name__}: '
            f"give a callable of (outputs, targets) instead"
        )
    if outputs.ndim == 0:
        raise ConfigError('"accuracy" got outputs without a batch dimension: give a callable instead')
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        logits = outputs.detach() if outputs.ndim == 1 else outputs.detach().squeeze(1)
        has_dim_1 = targets.ndim == logits.ndim + 1 and targets.shape[1] == 1
        guessed, wanted = logits > 0, (targets.squeeze(1) if has_dim_1 else targets) > 0.5  # noqa: PLR2004  of 0 and 1
    else:
        guessed = outputs.detach().argmax(dim=1)
        wanted = targets.argmax(dim=1) if targets.shape == outputs.shape else targets
    if guessed.shape != wanted.shape:
        raise ConfigError(
            f'"accuracy" got outputs of shape {list(outputs.shape)} and targets of shape '
            f"{list(targets.shape)}, which do not fit: give a callable of (outputs, targets) instead"
        )
    return (guessed == wanted).float().mean()


MOST_WAITING = 1000
"""Values that stay on their device until they are read: each is a tensor there, with memory of its own."""


class Mean:
    """A mean over samples. Values stay on the device until they are read, then are summed in float64.

    Where many have come since the last reading, they are read all the same, and their sum is kept.
    """

    def __init__(self, name: str, of: Callable[[Any, Any], float | torch.Tensor] | None) -> None:
        self.name = name
        self._of = of
        self._values: list[float | torch.Tensor] = []
        self._samples: list[int] = []
        self._folded, self._folded_samples = 0.0, 0  # the sum of values that are kept no more, and of what

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return not (self._samples or self._folded_samples)

    def update(self, outputs: object, targets: object, loss: torch.Tensor | None, samples: int) -> None:
        """Take one batch."""
        value = loss if self._of is None else self._of(outputs, targets)
        if self._of is None and loss is None:
            raise ConfigError(
                'the metric "loss" needs a loss function, and none was given: train first, with loss_fn=, or '
                "give the loss function itself as the metric"
            )
        self._values.append(_number(self.name, value, "per batch, the mean over its samples"))
        self._samples.append(samples)
        if len(self._values) >= MOST_WAITING:
            self._fold()

    def read(self) -> float:
        """Give the value over the batches since the last reading, and begin anew. Waits for the device."""
        self._fold()
        mean = self._folded / self._folded_samples if self._folded_samples else float("nan")
        self._folded, self._folded_samples = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Give what was taken since the last reading, as plain numbers. Waits for the device."""
        return {
            "values": self._numbers(),
            "samples": list(self._samples),
            "folded": (self._folded, self._folded_samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next reading is what it would have been."""
        self._values, self._samples = list(state["values"]), list(state["samples"])
        self._folded, self._folded_samples = state.get("folded", (0.0, 0))  # which older states do not have

    def _fold(self) -> None:
        numbers = self._numbers()
        self._folded += sum(value * n for value, n in zip(numbers, self._samples, strict=True))
        self._folded_samples += sum(self._samples)
        self._values.clear()
        self._samples.clear()

    def _numbers(self) -> list[float]:
        """Give the values that wait as plain numbers, with one wait for all that are not."""
        waiting = [value.reshape(()) for value in self._values if isinstance(value, torch.Tensor)]
        read = iter(torch.stack(waiting).cpu().double().tolist() if waiting else ())
        return [next(read) if isinstance(value, torch.Tensor) else value for value in self._values]


class _Object:
    """A torchmetrics object: it keeps its own account."""

    def __init__(
        self, metric: MetricObject, name: str | None = None, *, keeps: Sequence[object] = ()
    ) -> None:
        self.name = name or type(metric).__name__
        self.is_empty = True
        at_work = _at_work.get(id(metric))
        if at_work is not None and not at_work.is_empty:
            metric = cast(MetricObject, apart(metric, keeps))
        self._metric = metric
        metric.reset()

    def update(self, outputs: object, targets: object, loss: torch.Tensor | None, samples: int) -> None:  # noqa: ARG002  of Meter
        if isinstance(outputs, torch.Tensor):
            outputs = outputs.detach()
        _at_work[id(self._metric)] = self
        self._metric.update(outputs, targets)
        self.is_empty = False

    def read(self) -> float:
        if self.is_empty:  # nothing came of any batch since, and of none there is no value
            return float("nan")
        value = float(_number(self.name, self._metric.compute(), "over all batches"))
        self._metric.reset()
        self.is_empty = True
        return value


_at_work: MutableMapping[int, _Object] = weakref.WeakValueDictionary()
"""By whom an object was updated last: one that training measures by may be given to an evaluation in between,
and keeps what it has of the training. By its id, which is no other's while the meter lives, that holds it."""


def _number(name: str, value: Any, over: str) -> float | torch.Tensor:  # noqa: ANN401  whatever came
    """See that a metric gave one number, `over` what; a tensor is not read."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return value.detach()
        what = f"a tensor of shape {list(value.shape)}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):
            what = f"{type(value).__name__} {value!r:.100}"
    raise ConfigError(f"the metric {name!r} gave {what}: a metric is one number {over}")


def _meters(metric: Metric, keyword: str, keeps: Sequence[object]) -> list[Meter]:
    refuse(objects(**{keyword: metric}))  # a class is callable, and has the methods that are looked for
    if is_collection(metric):  # its members share no state: items() gives each a copy
        return [_Object(member, name, keeps=keeps) for name, member in cast(Any, metric).items()]
    return [_meter(metric, keyword, keeps)]


def _meter(metric: Metric, keyword: str, keeps: Sequence[object]) -> Meter:
    if isinstance(metric, str):
        if metric not in _NAMES:
            known = unknown("metric", metric, _NAMES)
            raise ConfigError(f"{keyword}: {known}, a callable, or a torchmetrics object")
        return Mean(metric, accuracy if metric == "accuracy" else None)
    if isinstance(metric, MetricObject):
        return _Object(metric, keeps=keeps)
    if callable(metric):
        return Mean(getattr(metric, "__name__", type(metric).__name__), metric)
    raise ConfigError(
        f"{keyword}: {metric!r} is no metric: give {' or '.join(map(repr, _NAMES))}, a callable of "
        f"(outputs, targets), or an object with update, compute and reset"
    )
