"""How many samples a push is of."""

import operator

from offbeat.errors import ConfigError

__all__ = ["MAX_SAMPLES", "sample_count"]

#: Of one push; the server takes no more.
MAX_SAMPLES = 2**32


def sample_count(samples: object) -> int:
    """Take a number of samples.

    Raises:
        ConfigError: If it is no whole number, or out of range.
    """
    try:
        count = 0 if isinstance(samples, bool) else operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if 1 <= count <= MAX_SAMPLES:
        return count
    raise ConfigError(f"samples is {samples!r}: give a whole number of samples, from 1 to {MAX_SAMPLES}")
