"""An attribute of somebody's that is set, and set back, where what is set may come into force later."""

import weakref
from typing import Any

__all__ = ["Attribute", "attribute_of"]


class Attribute:
    """An attribute that is ours to set until somebody else does.

    An averager's frequency follows what it was set to once all members want it, and reads as before until
    then. So what was wanted is remembered: else the next half would be of the old value, and to set it back
    before it is in force would look as if somebody had done so already.

    Attributes:
        thing: Whose.
    """

    def __init__(self, thing: object, name: str) -> None:
        self.thing = thing
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

    def is_of(self, thing: object, name: str) -> bool:
        """Tell whether it is this one."""
        return self.thing is thing and self._name == name

    def __str__(self) -> str:
        wanted = self.wanted()
        is_there = getattr(self.thing, self._name) == wanted
        return f"{self._name} {'is' if is_there else 'is to be'} {wanted!r}"


_known: weakref.WeakValueDictionary[tuple[int, str], Attribute] = weakref.WeakValueDictionary()


def attribute_of(thing: object, name: str) -> Attribute:
    """Give the attribute of an object's, the same as long as somebody keeps it: also to another monitor."""
    known = _known.get((id(thing), name))  # which keeps the object, whose id is no other's
    if known is None:
        _known[id(thing), name] = known = Attribute(thing, name)
    return known
