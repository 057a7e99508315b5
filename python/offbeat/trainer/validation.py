"""Data that a model is not trained on, by which it is measured after each epoch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat.errors import ConfigError
from offbeat.local.batches import gives_once, loaded
from offbeat.local.evaluate import Each, measure
from offbeat.local.loss import LossFunction, LossReduction
from offbeat.metrics import Meter, Metric, apart, listed, meters
from offbeat.naming import a_class

__all__ = ["Validation"]


class Validation:
    """Measures "loss", and what else training measures, with meters of its own."""

    def __init__(
        self,
        data: Iterable[Any] | Dataset[Any],
        metrics: Metric | Iterable[Metric],
        *,
        batch_size: int,
        epochs: int,
        keeps: Sequence[object] = (),
    ) -> None:
        """Take data that gives batches (inputs, targets), or a dataset.

        Args:
            data: As given.
            metrics: What training measures. An object that keeps its own account is copied.
            keeps: What such an object may have hold of, and that is not to be copied with it.
            batch_size: Samples at a time, of a dataset.
            epochs: How often it will be measured.

        Raises:
            ConfigError: If the data gives no batches, or gives them only once where there are several epochs;
                or if a metric cannot be copied.
        """
        self._batches = loaded(data, batch_size, name="validation")
        if epochs > 1 and gives_once(self._batches):
            raise ConfigError(
                f"validation is {a_class(data)}, which gives its batches once, and epochs is {epochs}: give "
                f"what begins anew at each pass, such as a DataLoader or a list"
            )
        found = meters([apart(one, keeps) for one in listed(metrics)])
        has_loss = any(meter.name == "loss" for meter in found)
        self._meters = found if has_loss else [*meters("loss"), *found]

    def measure(
        self,
        module: nn.Module,
        device: torch.device,
        loss_fn: LossFunction,
        reduction: LossReduction,
        *,
        beside: Meter | None,
        each: Each,
    ) -> dict[str, float]:
        """Measure a model in eval mode, without a trace.

        Args:
            module: The model.
            device: Where it is.
            loss_fn: From (outputs, targets) to a scalar.
            reduction: Whether that is a mean or a sum over the batch.
            beside: Sees the batches, too, and is read by whoever gave it.
            each: Is told how many batches were measured.

        Returns:
            Means over all samples, by name.

        Raises:
            ConfigError: If there is no sample.
        """
        every = self._meters if beside is None else [*self._meters, beside]
        if not measure(
            module,
            self._batches,
            every,
            device=device,
            loss_fn=loss_fn,
            reduction=reduction,
            each=each,
            whose="validation",
        ):
            raise ConfigError(
                "validation gave no sample, and of none there is no mean: give data that has some, and gives "
                "them at each pass"
            )
        return {meter.name: meter.read() for meter in self._meters}
