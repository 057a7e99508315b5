"""The answer to one push."""

from typing import Literal, NamedTuple

__all__ = ["Receipt", "Verdict"]

Verdict = Literal["admit", "damp", "reject"]


class Receipt(NamedTuple):
    """What became of a push. A rejection is a receipt, not an exception; only a fault raises.

    One is made with every push, and a named tuple is made in a quarter of a frozen dataclass's time.

    Attributes:
        term: The life of the store that answered; versions compare only within one.
        version: The model's version with this push counted; of a rejected one, the version that rejected it.
        staleness: Updates the model had seen between this push's read and its admission, >= 0.
        weight: What the push was worth, in 0..1: the mean over the parameters it moved, each fragment of
            which has a staleness of its own; 0.0 where it moved none of those it brought. 1.0 where no other
            push came between, and where it is applied and brought no parameters.
        verdict: "admit" (as it was), "damp" (with a weight below 1) or "reject" (nothing of it).
        applied: Whether any of it was applied.
        duplicate: Whether this answers a push that was answered before (a retry).
        reason: Short name of why it, or some of it, was rejected, such as "stale"; else None. "unknown" is a
            reason of a newer server, which `detail` says in words.
        detail: The reason in words, with its values; empty if there is none.
    """

    term: int
    version: int
    staleness: int
    weight: float
    verdict: Verdict
    applied: bool
    duplicate: bool
    reason: str | None = None
    detail: str = ""
