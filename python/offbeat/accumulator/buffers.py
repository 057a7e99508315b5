"""Running statistics that a window which came to nothing has spoilt: they go back to before it."""

from collections import deque

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offbeat import log

__all__ = ["Statistics"]

NUM_COPIES = 2
"""Of as many windows' beginnings: with ``overlap`` a window is known to be NaN at the end of the next one."""


class Statistics:
    """Those of the norms of a model, which follow each batch in its forward pass, NaN or not.

    An update that is NaN is dropped, and changes no parameter; a mean that has become NaN would stay so for
    good. Other buffers are not kept: they may be as large as the model, as the average of its values.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find them."""
        self._named = [
            (f"{name}.{part}" if name else part, buffer)
            for name, module in model.named_modules()
            if isinstance(module, _NormBase)
            for part in ("running_mean", "running_var")
            if isinstance(buffer := getattr(module, part, None), torch.Tensor)
        ]
        self._copies: deque[list[torch.Tensor]] = deque(maxlen=NUM_COPIES)

    def keep(self) -> None:
        """Take note of what they are as a window begins."""
        if self._named:
            self._copies.append([buffer.detach().clone() for _, buffer in self._named])

    def heal(self) -> list[str]:
        """Bring those that are not finite back to the newest that was, and say so; give their names.

        Waits for the device.
        """
        healed = []
        for place, (name, buffer) in enumerate(self._named):
            if _is_finite(buffer):
                continue
            kept = next((each[place] for each in reversed(self._copies) if _is_finite(each[place])), None)
            if kept is not None:
                with torch.no_grad():
                    buffer.copy_(kept)
                healed.append(name)
        if healed:
            others = f" and {len(healed) - 1} other running statistics" if healed[1:] else ""
            log.warn(
                f"{healed[0]}{others} had become NaN or infinite with data of an update that was dropped: "
                f"what they were before is back"
            )
        return healed


def _is_finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())
