"""Which columns of a table a terminal has room for, and how wide each is there: pure.

Cut evenly, a table of twelve columns has nothing to read in any of them on 80. So those that matter least are
left out whole, and only such are cut short as can be read so: a name, a cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GAP", "Column", "Heading", "fit"]

GAP = 2
"""Cells between two columns."""


class Heading(NamedTuple):
    """Of a column, as `Column` has it."""

    name: str
    rank: int = 0
    least: int | None = None
    is_number: bool = False

    def over(self, widths: Sequence[int]) -> "Column":
        """Make the column of cells so wide."""
        return Column(name=self.name, width=max(len(self.name), *widths), least=self.least, rank=self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        width: Of its widest cell, with the heading.
        least: It may be cut down to so much; None: it is whole, or not there.
        rank: Those of a higher one are left out first; one of 0 is there in any case.
    """

    name: str
    width: int
    least: int | None = None
    rank: int = 0

    @property
    def needed(self) -> int:
        """What it takes at least."""
        return self.width if self.least is None else min(self.width, self.least)


def fit(columns: Sequence[Column], room: int) -> dict[str, int]:
    """Choose columns, and give each its width.

    Args:
        columns: In the table's order.
        room: What the table may take, in cells.

    Returns:
        Widths by name, in the table's order, of those that are there. They fit, with gaps between them,
        unless those of rank 0 alone do not.
    """
    kept = list(columns)
    while _taken(kept) > room and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    widths = {column.name: column.needed for column in kept}
    spare = room - _taken(kept)
    for column in sorted(kept, key=lambda column: column.rank):
        more = max(0, min(spare, column.width - widths[column.name]))
        widths[column.name] += more
        spare -= more
    return widths


def _taken(columns: Sequence[Column]) -> int:
    return sum(column.needed for column in columns) + GAP * max(0, len(columns) - 1)
