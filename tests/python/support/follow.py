"""A worker that is brought to the newest model, and measures nothing."""

import pytest

from offbeat.errors import ConfigError

__all__ = ["follow"]


def follow(worker):
    """Let a worker pull: `evaluate` does so first, and of nothing has nothing to measure."""
    with pytest.raises(ConfigError, match="gave no sample"):
        worker.evaluate([])
