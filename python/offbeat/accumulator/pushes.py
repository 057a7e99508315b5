"""Updates that are a worker's pushes: which optimizer, and who waits for whom, is the worker's affair."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offbeat.accumulator.updates import Scaler, on
from offbeat.errors import ConfigError
from offbeat.receipt import Receipt

if TYPE_CHECKING:
    from offbeat.worker import AsyncWorker

__all__ = ["PushedUpdates", "worker_faults"]


class PushedUpdates:
    """Each update is a step of the worker's, of one batch as large as the window.

    Attributes:
        receipt: The newest that came in.
    """

    own = None  # the optimizer's state is the worker's, or the server's

    def __init__(self, worker: "AsyncWorker", parameters: Sequence[nn.Parameter], scaler: Scaler) -> None:
        self.receipt: Receipt | None = None
        self._worker = worker
        self._parameters = parameters
        self._scaler = scaler

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The worker's."""
        return self._worker.optimizer

    def use(self, optimizer: object) -> torch.optim.Optimizer:
        """Give the worker's.

        Raises:
            ConfigError: If another is given.
        """
        if optimizer is not None and optimizer is not self.optimizer:
            raise ConfigError(
                f"optimizer is {optimizer!r}, and the worker has its own: give AsyncWorker(optimizer=...), "
                f"and worker.optimizer or nothing here"
            )
        return self.optimizer

    def make(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        number: int,
        samples: int,
        scale: float,
        gain: float,
        whose: str = "",
    ) -> bool:
        """Push a gradient, and tell whether that was done; see `LocalUpdates.make`.

        Raises:
            NonFiniteError: From the worker, which looks at what it pushes.
        """
        del number, gain, whose
        if all(gradient is None for gradient in gradients):
            return False  # of nothing that counts
        optimizer = self.optimizer
        with (
            on(self._parameters, gradients),
            self._scaler.unscaled(gradients, optimizer, scale) as is_finite,
        ):
            if is_finite:
                self._seen(self._worker.step(samples))
            else:
                optimizer.zero_grad()  # the worker puts back what the batch broke in buffers
            return is_finite

    def end(self) -> None:
        """Wait for what is in flight."""
        for receipt in self._worker.flush():
            self._seen(receipt)

    def _seen(self, receipt: Receipt | None) -> None:
        if receipt is not None:
            self.receipt = receipt


def worker_faults(
    worker: Any,  # noqa: ANN401  whatever was given
    model: object,
    device: torch.device | None,
    **others: object,
) -> list[str]:
    """Tell what is wrong with a worker, and with what does not go together with it.

    Args:
        worker: To push by.
        model: As given; None is the worker's.
        device: As given.
        others: `overlap`, `adaptive_accumulation` and `process_group`, as given.
    """
    from offbeat.worker import AsyncWorker

    if not isinstance(worker, AsyncWorker):
        return [f"worker is {worker!r}: give an offbeat.AsyncWorker, or None"]
    faults = []
    if model is not None and model is not worker.model:
        faults.append("model and worker are given, and the worker has another model: leave model out")
    if worker.update_frequency != 1:
        faults.append(
            f"the worker's update_frequency is {worker.update_frequency}, and the accumulator gathers "
            f"batches itself: make the worker with update_frequency=1, and choose accumulation_steps"
        )
    if others["overlap"] is False and worker.in_flight != 1:
        faults.append(
            f"overlap is False and the worker's in_flight {worker.in_flight}, which pushes behind the next "
            f"window's work: make the worker with in_flight=1, or take overlap=True"
        )
    if others["adaptive_accumulation"] is True:
        faults.append(
            "adaptive_accumulation and worker are given, and an update's learning rate is not here to be "
            "scaled: leave one of them out"
        )
    if others["process_group"] not in (None, False):
        faults.append("process_group and worker are given: its server adds up what workers push; give one")
    if device not in (None, torch.device("cpu"), worker.device):
        faults.append(f"device is {device} and the worker's {worker.device}: leave device out")
    return faults
