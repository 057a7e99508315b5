"""The same bits each time: torch's deterministic algorithms, and as many threads, while one trains."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offbeat.errors import StateError

__all__ = ["deterministic"]

WORKSPACE, WORKSPACE_SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What cuBLAS needs to be deterministic (CUDA's documentation, cuBLAS, "Results reproducibility")."""

NAMED = re.compile(r"(\S.*?) does not have a deterministic implementation")
"""How torch says which operation it is."""


@contextmanager
def deterministic(*, num_threads: int) -> Iterator[None]:
    """Let torch compute the same bits each time; afterwards it is set as before.

    Sums over several threads depend on how many there are, so their number is fixed. Workers of a DataLoader
    draw their seeds from the random state that its pass began with.

    Args:
        num_threads: Of torch.

    Raises:
        StateError: From inside, where an operation has no deterministic form; names it.
    """
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    threads, workspace = torch.get_num_threads(), os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)
        torch.use_deterministic_algorithms(True)  # noqa: FBT003  its only parameter
        cudnn.deterministic, cudnn.benchmark = True, False
        if num_threads != threads:
            torch.set_num_threads(num_threads)
        yield
    except RuntimeError as error:
        if (named := NAMED.search(str(error))) is None:
            raise
        raise StateError(
            f"deterministic=True, and {named[1].strip()} has no deterministic form on this device: use "
            f"another operation, or another device, or deterministic=False"
        ) from error
    finally:
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        cudnn.deterministic, cudnn.benchmark = flags
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
