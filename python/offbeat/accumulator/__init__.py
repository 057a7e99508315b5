"""Many small batches as one large one, whose way over the network is behind the next one's work."""

from offbeat.accumulator.accumulator import AsyncGradientAccumulator

__all__ = ["AsyncGradientAccumulator"]
