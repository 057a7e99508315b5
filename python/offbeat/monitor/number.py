"""A value as a number, whatever it came as."""

from typing import Any

__all__ = ["number"]


def number(value: Any) -> float | None:  # noqa: ANN401  a tensor, perhaps
    """Give a value as a float; None if it is no number."""
    if isinstance(value, str | bytes):  # which float() would read
        return None
    item = getattr(value, "item", None)
    try:
        return float(value if item is None else item())
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return None
