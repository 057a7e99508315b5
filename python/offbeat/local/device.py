"""Where a model is trained."""

import torch

from offbeat.errors import ConfigError

__all__ = ["usable_device"]


def usable_device(given: str | torch.device) -> torch.device:
    """Take a device on which torch can have tensors here.

    Raises:
        ConfigError: If it is none.
    """
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {given!r}, which torch does not know: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, and torch sees no CUDA device here")
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each backend has errors of its own, of many lines
        raise ConfigError(
            f"device is {device}, and torch cannot use that here ({_first_sentence(error)}): take a "
            f'device that is there, such as "cpu"'
        ) from error
    return device


def _first_sentence(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
