"""Host memory for tensors that the extension cannot read or write where they are.

On a device, or in an order other than C's (channels_last, a transposed view). CUDA tensors go through pinned
memory on a side stream, so that the copies overlap each other and wait for nothing but what they read.
"""

from collections.abc import Sequence

import torch

__all__ = ["HostCopies", "host_like", "is_direct"]

_STRIDED = torch.strided  # asked for with each tensor of each step


def is_direct(tensor: torch.Tensor) -> bool:
    """Tell whether the extension can use a tensor's own memory: on the host, dense, in C order, as it is.

    (A tensor with torch's lazy negation, as autograd may leave one for `theta` in `conj(complex(x, theta))`,
    has the memory of another with the other sign.)
    """
    return tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous() and not tensor.is_neg()


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor's values, in C order; pinned where the tensor is on CUDA.

    Pinned memory comes from torch's caching allocator, which hands a block out again only when the copies
    that use it are done.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class HostCopies:
    """Copies between tensors and host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._written: list[torch.cuda.Event] = []

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give each tensor's values on the host in C order; what is so already is given as it is.

        Returns when the values are there.
        """
        fetched: list[torch.Tensor] = []
        used: set[torch.device] = set()
        for tensor in tensors:
            source = tensor.detach()
            if is_direct(source):
                fetched.append(source)
            elif source.is_cuda:
                fetched.append(self._fetch_cuda(source, first=source.device not in used))
                used.add(source.device)
            else:
                fetched.append(source.cpu().resolve_neg().contiguous())
        for device in used:
            self._streams[device].synchronize()
        return fetched

    def store(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Write host memory into tensors. On CUDA the copies are only queued: see `wait`."""
        with torch.no_grad():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=target.is_cuda)
        for device in {target.device for target in targets if target.is_cuda}:
            self._written.append(torch.cuda.current_stream(device).record_event())

    def wait(self) -> None:
        """Wait until what `store` queued has been read, so that its host memory may be written again."""
        for event in self._written:
            event.synchronize()
        self._written.clear()

    def _fetch_cuda(self, source: torch.Tensor, *, first: bool) -> torch.Tensor:
        device = source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if first:
            stream.wait_stream(torch.cuda.current_stream(device))
        target = host_like(source)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return target
