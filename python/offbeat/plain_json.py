"""JSON that every reader takes: it has no word for NaN and the infinities, which are written as null."""

import json
import math

__all__ = ["dumps"]


def dumps(data: object, *, indent: int | None = None) -> str:
    """Write dicts, lists, tuples, strings and numbers as JSON; a number that is not finite is null."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
