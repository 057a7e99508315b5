"""What buffers, such as BatchNorm's running statistics, held before a window that may break them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from offbeat import log
from offbeat.local.buffers import few, fits, put_values

__all__ = ["KeptBuffers", "is_kept", "is_ruined"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Copies, taken before a window was begun.

    Attributes:
        values: By the buffer's name.
        seen: Samples that the buffers had seen.
    """

    values: dict[str, torch.Tensor]
    seen: int


class KeptBuffers:
    """Copies of a model's buffers, each window's in the memory of one before it.

    They are copied for each window, and looked at only where something was not finite: a copy is one pass
    over little memory, for which nothing waits, and a look would wait for the device. What forwards write to
    is not known before, so all are copied that are `few`; of one that is too large for that it is told when
    it is found to be not finite any more. A window that was begun behind a broken one may have copies that
    are broken as well, so where updates are late those of two windows are kept.

    Attributes:
        seen: Samples that the buffers have seen since those of all members were made alike.
    """

    def __init__(self, model: nn.Module | None, *, are_late: bool) -> None:
        """Begin with nothing.

        Args:
            model: Whose buffers; None: somebody else sees to them, and nothing is kept.
            are_late: An update that is refused is of the window before the newest.
        """
        self.seen = 0
        self._model = model
        self._are_late = are_late
        self._kept: list[Kept] = []  # the newest first
        self._is_open = False  # the newest one's window has not ended
        self._large: dict[str, torch.Tensor] = {}  # of those without a copy: whether they are to be finite

    def begin(self) -> None:
        """Keep what is there before a window's first micro-batch.

        Where one was begun that came to nothing, as its forward failed, this is in its place: the window
        before it is under way still.
        """
        if self._is_open:
            memory = self._kept.pop(0).values
        else:
            is_full = len(self._kept) == 1 + self._are_late
            memory = self._kept.pop().values if is_full else {}
        now = self._now()
        copied = {} if self._model is None else few(self._model, now)
        for name in now.keys() - copied.keys() - self._large.keys():
            self._large[name] = _are_finite(now[name])
        values = {
            name: memory[name] if fits(memory.get(name), buffer) else torch.empty_like(buffer)
            for name, buffer in copied.items()
        }
        if values:
            with torch.no_grad():
                torch._foreach_copy_(list(values.values()), list(copied.values()))
        self._kept.insert(0, Kept(values, self.seen))
        self._is_open = True

    def end(self) -> None:
        """Take note that the window that was begun is whole, and an update of it is due."""
        self._is_open = False

    def put_back(self, *, is_refused: bool = False) -> None:
        """Let no number stay that became NaN or infinite: then all are as before the window that it is of.

        Args:
            is_refused: The update is an error, which changes nothing: so all go back, whatever they hold.
                Where updates are late they stay if they are finite, having seen another window by now.
        """
        now = self._now() if self._kept else {}
        for kept in self._kept:
            if (is_refused and not self._are_late) or is_ruined(now, kept.values):
                put_values(kept.values, now)
                self.seen = kept.seen
        self._tell_of_large(now)

    def forget(self) -> None:
        """Keep nothing: no window is gathered or under way."""
        self._kept.clear()
        self._is_open = False

    def bring(self, seen: int) -> None:
        """Go on where a state was taken, in mid-window perhaps, with the buffers that are there now."""
        self.seen = seen
        self.forget()
        self.begin()

    def _tell_of_large(self, now: Mapping[str, torch.Tensor]) -> None:
        """Warn, once of each, of those that are not finite any more and cannot go back."""
        for name, were_finite in self._large.items():
            if name in now and bool(were_finite) and not bool(_are_finite(now[name])):
                were_finite.zero_()  # and it is not told again
                log.warn(
                    f"the model's buffer {name!r} became NaN or infinite, and stays so: copies are kept of "
                    f"the smallest buffers, of as many numbers as are trained, and this one has "
                    f"{now[name].numel():,}. Bring it back from a checkpoint, and look at what writes to it"
                )

    def _now(self) -> dict[str, torch.Tensor]:
        if self._model is None:
            return {}
        return {name: b.detach() for name, b in self._model.named_buffers() if is_kept(b)}


def is_kept(buffer: torch.Tensor) -> bool:
    """Tell whether a buffer may be a statistic: of floats, or a count.

    Not what quantized weights are stored in, which may be larger than all parameters.
    """
    is_statistic = (buffer.is_floating_point() and buffer.itemsize > 1) or buffer.is_complex()
    return buffer.layout is torch.strided and (is_statistic or buffer.numel() == 1)


def is_ruined(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a number that was finite is so no more; one that was infinite, as in a mask, is well."""
    return any(
        bool((value.isfinite() & ~now[name].isfinite()).any())
        for name, value in before.items()
        if name in now and now[name].shape == value.shape
    )


def _are_finite(buffer: torch.Tensor) -> torch.Tensor:
    """Tell, where the buffer is, and without memory as large as it, which `isfinite` takes."""
    numbers = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return torch.stack(torch.aminmax(numbers)).isfinite().all()
