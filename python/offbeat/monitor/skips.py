"""Whether a `torch.amp.GradScaler` skips a step: of an optimizer that does not step no hook hears."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Skips", "is_told_to_skip"]


class Skips:
    """Those of one scaler, as its scale tells: it is multiplied by less than 1 then, and else never falls.

    Where it had grown meanwhile it may be what it was; but steps towards its growth are counted from 0 anew.
    A scale that somebody has set lower is taken for a skip. Of a scaler that grows at each step
    (``growth_interval=1``) one is not seen that follows a growth within the time that is asked about.
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
        return self._now() < self._then

    def take(self) -> bool:
        """Tell so, and begin anew."""
        then, self._then = self._then, self._now()
        return self._then < then

    def _now(self) -> tuple[float, float]:
        if self._scaler is None:
            return 0.0, 0.0
        state: dict[str, Any] = getattr(self._scaler, "state_dict", dict)()
        scale = (
            state["scale"] if "scale" in state else self._scaler.get_scale()
        )  # one that is off has no state
        return float(scale), float(state.get("_growth_tracker", 0))


def is_told_to_skip(optimizer: "torch.optim.Optimizer | None") -> bool:
    """Tell whether a scaler has told an optimizer not to step, as it tells a fused one; waits for that."""
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)
