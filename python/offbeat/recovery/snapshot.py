"""A copy of a run's state, taken on the training thread into memory that is used again for the next one."""

from collections.abc import Mapping

import torch

__all__ = ["Buffers", "are_finite"]

CHUNK = 32_768
"""Elements: torch uses one thread for as many, so that training keeps the others."""


class Buffers:
    """Memory of this machine for one copy of each tensor; as large as the state, once."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors; the copies of the call before are overwritten.

        Args:
            tensors: By name, on any device.

        Returns:
            Contiguous copies on the CPU, whole when this returns.
        """
        self._memory = {
            name: self._memory[name] if self._fits(name, tensor) else _like(tensor)
            for name, tensor in tensors.items()
        }
        devices = set()
        for name, tensor in tensors.items():
            self._memory[name].copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type != "cpu":
                torch.get_device_module(device).current_stream(device).synchronize()
        return dict(self._memory)

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        memory = self._memory.get(name)
        return memory is not None and memory.dtype == tensor.dtype and memory.shape == tensor.shape


def are_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a contiguous tensor on the CPU are finite.

    Goes through it in pieces: without memory of its own, and on the calling thread alone. A sum is finite
    only if all its terms are, and takes a tenth of the time; where it is not, as when it overflows, each is
    looked at.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    is_small = tensor.is_floating_point() and tensor.itemsize == 1  # torch computes nothing with these
    pieces = torch.split(tensor.reshape(-1), CHUNK)
    return all(_is_finite(piece.float() if is_small else piece) for piece in pieces)


def _is_finite(piece: torch.Tensor) -> bool:
    return bool(piece.sum().isfinite()) or bool(piece.isfinite().all())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    is_away = tensor.device.type == "cuda"  # from where only pinned memory is filled without a detour
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_away)
