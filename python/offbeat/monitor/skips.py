"""Whether a `torch.amp.GradScaler` skips a step: of an optimizer that does not step no hook hears."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Skips", "is_told_to_skip"]


class _Scale(NamedTuple):
    """What a scaler multiplies by, and how many steps since that last changed."""

    scale: float
    steps: float


class Skips:
    """Those of one scaler, as its scale tells: it is multiplied by less than 1 then, and else never falls.

    Where it had grown meanwhile it may be what it was; but steps towards its growth are counted from 0 anew.
    What somebody else has set is not told from that: a scale that was set lower is taken for a skip, and one
    that was set higher hides one. Of a scaler that grows at each step (``growth_interval=1``) one is not seen
    that follows a growth within the time that is asked about.
    """

    def __init__(self, scaler: Any) -> None:  # noqa: ANN401  torch has several classes of them
        """Begin now.

        Args:
            scaler: Any that has `get_scale`; None: there is none, and no step is skipped.
        """
        self._scaler = scaler
        self._then = self._now()

    def begin(self) -> None:
        """Ask from now on about what comes after this."""
        self._then = self._now()

    def are_any(self) -> bool:
        """Tell whether there was one since then; waits for the device."""
        return _has_fallen(self._then, self._now())

    def take(self) -> bool:
        """Tell so, and begin anew."""
        now = self._now()
        has_fallen = _has_fallen(self._then, now)
        self._then = now
        return has_fallen

    def _now(self) -> _Scale:
        if self._scaler is None:
            return _Scale(0.0, 0.0)
        give = getattr(self._scaler, "state_dict", None)
        state = give() if callable(give) else None
        known: Mapping[str, Any] = state if isinstance(state, Mapping) else {}  # one that is off has none
        scale, steps = known.get("scale"), known.get("_growth_tracker")
        return _Scale(float(self._scaler.get_scale() if scale is None else scale), float(steps or 0))


def _has_fallen(then: _Scale, now: _Scale) -> bool:
    return now.scale < then.scale or (now.scale == then.scale and now.steps == 0 < then.steps)


def is_told_to_skip(optimizer: "torch.optim.Optimizer | None") -> bool:
    """Tell whether a scaler has told an optimizer not to step, as it tells a fused one; waits for that."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)
