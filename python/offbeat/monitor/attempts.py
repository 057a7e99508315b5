"""What going back has come to since the loss was in its range last. A pure value."""

from dataclasses import dataclass, replace

__all__ = ["Attempts"]

LEAST_PLACES = 2
"""On so many no loss is in the range, where it is the data: one alone may have been astray already."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often it was gone back, and where to.

    Attributes:
        num: How often, since a loss was in its range before one.
        places: Those known steps or versions that it went to since something was not finite, each older than
            the one before.
        is_well: Whether a loss was in its range since the last; without one that is judged, a step.
    """

    num: int = 0
    places: tuple[int, ...] = ()
    is_well: bool = True

    def after(self, place: int | None = None) -> "Attempts":
        """Give them with one more, to a place that may not be known."""
        before = Attempts() if self.is_well else self
        is_older = place is not None and all(place < other for other in before.places)
        # A newer one may have been kept when all was astray.
        places = (*before.places, place) if place is not None and is_older else before.places
        return Attempts(before.num + 1, places, is_well=False)

    def after_range(self) -> "Attempts":
        """Give them where a loss is in its range: the next is the first of others."""
        return replace(self, is_well=True)

    def after_unusable(self) -> "Attempts":
        """Give them where something is not finite: that no loss is in the range is another matter."""
        return replace(self, places=())

    def is_to_stay(self, most: int) -> bool:
        """Tell whether the next need go no further than the last.

        Not where no loss has been in the range since: what it went to may have been astray, too. That is
        tried no more often than what is lost is: of an older model the loss may be above the range as well.

        Args:
            most: How often what is lost goes back.
        """
        return self.is_well or self.num >= most

    def were_in_vain(self, most: int) -> bool:
        """Tell whether no loss was in its range on any of them, as many as are tried.

        Args:
            most: How many: known places, each older than the one before. The last may be the one before once
                more, where none older is kept.
        """
        is_tried = self.num >= most > 0 and len(self.places) >= min(most, LEAST_PLACES)
        return is_tried and not self.is_well
