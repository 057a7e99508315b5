"""An attribute of somebody's that is set, and set back, where what is set may come into force later."""

from typing import Any

__all__ = ["Attribute"]


class Attribute:
    """An attribute that is ours to set until somebody else does.

    An averager's frequency follows what it was set to once all members want it, and reads as before until
    then. So what was wanted is remembered: else the next half would be of the old value, and to set it back
    before it is in force would look as if somebody had done so already.

    Attributes:
        thing: Whose.
        depth: Changes of it that are in effect.
    """

    def __init__(self, thing: object, name: str) -> None:
        self.thing = thing
        self.depth = 0
        self._name = name
        self._seen = self._wanted = getattr(thing, name)

    def wanted(self) -> Any:  # noqa: ANN401  of an attribute of any type
        """Give what we want it to be, or what somebody else has set it to since."""
        now = getattr(self.thing, self._name)
        if now not in (self._seen, self._wanted):
            self._seen = self._wanted = now
        return self._wanted

    def want(self, value: object) -> None:
        """Set it."""
        setattr(self.thing, self._name, value)
        self._seen, self._wanted = getattr(self.thing, self._name), value

    def __str__(self) -> str:
        wanted = self.wanted()
        is_there = getattr(self.thing, self._name) == wanted
        return f"{self._name} {'is' if is_there else 'is to be'} {wanted!r}"
