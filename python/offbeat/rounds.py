"""What a client is told of a round, in which workers put together what each has made on its own."""

from typing import NamedTuple

__all__ = ["Entered", "Gathered", "New"]


class New(NamedTuple):
    """A part of a push that is in a round for the first time: other samples have led to it than to the rest.

    Attributes:
        samples: What its share is measured by, 0 or more.
        of: Which part: a number below 2^64 that is the same where that is.
    """

    samples: float
    of: int


class Entered(NamedTuple):
    """A round that has closed, with this client in it.

    Attributes:
        round: Its number, from 1 in each life of the server.
        share: This client's part of all samples in the round, 0..1: what it is to scale its push by. Those of
            all members add up to 1; where nobody has any samples, all are 0.
        members: How many are in the round.
        at_work: How many of these go on after it.
        agreed: Whether what this client wished for holds from now on: all who take part were in the round and
            wished for the same, or it had come into force while this client was away, whose share is 0 then.
        new_share: Likewise of the samples of what is new, where all members have said so of the same part;
            None: `share` is of all that is pushed.
    """

    round: int
    share: float
    members: int
    at_work: int
    agreed: bool = True
    new_share: float | None = None


class Gathered(NamedTuple):
    """A round that is over: what its members pushed is in the model.

    Attributes:
        missing: Shares of members that were lost or went before they had gathered.
        version: The model's version when the server said so.
    """

    missing: int
    version: int
