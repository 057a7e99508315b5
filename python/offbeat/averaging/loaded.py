"""What was loaded into a model that has joined others at a server, before anything was trained on it."""

import weakref

import torch

from offbeat import log
from offbeat.averaging.members import Members
from offbeat.averaging.served import Served
from offbeat.local.every_step import before_every_step

__all__ = ["GONE_ON", "Untrained", "keep_to_the_others"]


class Untrained:
    """A member that has joined others, and has not trained since: what its model has become is not learnt.

    Each member that loads values would bring its way from the server's parameters to these; and not as a
    mean, for at a server that goes on members come one after another. In a loop of one's own nobody tells us
    of the first step before it is made, so we listen to all optimizers.
    """

    def __init__(self, members: Members) -> None:
        """Begin where a member has the model that it joined with."""
        self._members = members if isinstance(members, Served) and members.has_gone_on else None
        if self._members is not None:
            self._ids = {id(parameter) for parameter in self._members.parameters}
            before_every_step(_before)
            _untrained.add(self)

    @property
    def is_so(self) -> bool:
        """Whether it is one, and still is."""
        return self._members is not None

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is of this member's model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def train(self) -> None:
        """Begin to train: from what the server has, whatever was loaded."""
        if self._members is not None:
            keep_to_the_others(self._members)
            self.end()

    def end(self) -> None:
        """Have trained: what differs now is learnt."""
        self._members = None
        _untrained.discard(self)


def keep_to_the_others(members: Served) -> bool:
    """Put the server's values back where a model has others, and say so; tell whether it had."""
    if not members.take_back():
        return False
    log.warn(
        "what was loaded into this model after it had joined, or trained since its last round, is not used: "
        "this member goes on from the server's parameters, with its own optimizer and the buffers that are "
        "not averaged. Where members are to go on from what was loaded, load it before averagers "
        "are made, and make them at a server that has no model yet: a new one, or one that is started "
        "without its checkpoints"
    )
    return True


GONE_ON = (
    "this member goes on with the parameters that the server has, which others have made since, and not with "
    "those that it had saved"
)
"""Of one that was started again."""

_untrained: weakref.WeakSet[Untrained] = weakref.WeakSet()


def _before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    for member in list(_untrained) if _untrained else ():  # nearly always there is none
        if member.is_of(optimizer):
            member.train()
