"""For whom a member at a server waits, which is told once it has waited for some seconds."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from offbeat import telling as late

__all__ = [
    "BEGIN_S",
    "ENDED",
    "LINGER_S",
    "UNDER_ANOTHER",
    "at_the_server",
    "for_the_others",
    "for_those_before",
    "missed",
    "missed_of",
    "newcomers",
    "telling",
]

BEGIN_S = 60.0
"""Longest wait for those who begin together, or were together before; as long as one for the server."""
LINGER_S = 10.0
"""How long those who have all ended wait for one that has come and was in no round yet; a default lease."""
TELL_AFTER_S = 3.0
"""Less is no wait that anybody wonders about."""

MISSED = "has not come back since the server was started again"
"""How a status words why one of a server's life before is lost, for whom it waits all the same."""
UNDER_ANOTHER = f"{MISSED}, or has under another name"
"""How that is worded where others may have come back so."""

ENDED = "finished", "left"
"""States, in a status, of workers for whom nobody waits."""


def telling(text: str | Callable[[], str | None] | None) -> AbstractContextManager[None]:
    """Say why this waits, if it does for long; None: there is nothing to say."""
    return late.telling(text, after_s=TELL_AFTER_S)


def at_the_server(
    status: Mapping[str, Any], *, own: str | None, had: Collection[str], waited_s: float
) -> str:
    """Word the wait for a round in which other members are missing.

    Args:
        status: The server's.
        own: This member's name there.
        had: Names that it has or had.
        waited_s: How long it has waited by now.
    """
    come_late = newcomers(status)
    workers = [
        w
        for w in status["workers"]
        if w["state"] not in ENDED and w["id"] not in had and w["incarnation"] not in come_late
    ]
    states = dict.fromkeys(missed_of(workers), UNDER_ANOTHER)
    others = ", ".join(f"{w['id']} ({states.get(w['id'], w['state'])})" for w in workers) or "none"
    come = status["rounds"]["open_entrants"]
    if come > 1:  # this one, and some of the others
        others += " (of whom the server does not tell which have come)"
    text = (
        f"{own or 'this member'} has waited {waited_s:g} s for a round of averaging to end: "
        f"{come} member(s) have come to the one that is open at the server, and "
        f"the others there are: {others}; who trains is waited for until it comes, ends or is lost, and one "
        f"that is at its end has to call flush() or close()"
    )
    if not come_late:
        return text
    names = ", ".join(come_late.values())
    return f"{text}; in no round yet are: {names}; {_FOR_NEWCOMERS}"


def for_the_others(status: Mapping[str, Any], *, num_expected: int) -> str | None:
    """Word the wait for those who begin together.

    Args:
        status: The server's.
        num_expected: How many they are.

    Returns:
        None where all of them are there, and nobody is waited for who is known.
    """
    num_there = status["rounds"]["open_entrants"]
    if num_there >= num_expected:
        names = ", ".join(missed_of(status["workers"])) or None
        return names and (
            f"all {num_expected} members that begin together are there; for a lease (10 s) they wait for "
            f"those who were at the server before it was started again and have not come back: {names}"
        )
    if sum(worker["state"] not in (*ENDED, "lost") for worker in status["workers"]) >= num_expected:
        return (
            f"all {num_expected} members are at the server, and {num_there} have come to its next round: "
            f"waiting for those that train already, each of which comes at its next average; after "
            f"{BEGIN_S:g} s at most this one begins without the others"
        )
    return (
        f"waiting for the members that begin together: {num_there} of {num_expected} are there; after "
        f"{BEGIN_S:g} s at most those who are there begin without the others. If fewer are started, as "
        f"where a FaultTolerantTrainer of the others is done, give their number (world_size=)"
    )


def for_those_before(status: Mapping[str, Any], *, num_before: int) -> str:
    """Word the wait for those who were at a server that has lost its run."""
    num_there = status["rounds"]["open_entrants"]
    return (
        f"waiting for the members of before the server was started again without its run, to end together: "
        f"{num_there} of {num_before} are there; after {BEGIN_S:g} s at most those who are there end without "
        f"the others"
    )


def missed(status: Mapping[str, Any]) -> str | None:
    """Word the wait of one that has ended for those who may not come.

    They were there before the server was started again, or they have come and were in no round yet.

    Args:
        status: The server's.

    Returns:
        None where there are no such.
    """
    words = []
    if names := ", ".join(missed_of(status["workers"])):
        words.append(
            f"waiting for {names}, who may be training still: no word has come from there since the "
            f"server was started again; it gives them five times its rejoin_grace_s (60 s, if it was not "
            f"set) from then on. If they are gone, start them again, or give the server a shorter one "
            f"(rejoin_grace_s=, `--rejoin-grace`)"
        )
    if names := ", ".join(newcomers(status).values()):
        words.append(f"{names}, at the server, in no round of averaging yet: {_FOR_NEWCOMERS}")
    return "; ".join(words) or None


_FOR_NEWCOMERS = (
    f"members that have all ended wait for such a one for up to {LINGER_S:g} s, so that it ends with them"
)


def newcomers(status: Mapping[str, Any]) -> dict[int, str]:
    """Give those who have come and were in no round yet, or not since they were lost: incarnation and name.

    Args:
        status: The server's.
    """
    came = status["rounds"].get("newcomers", ())
    workers = [w for w in status["workers"] if w["incarnation"] in came and w["state"] not in ENDED]
    return {w["incarnation"]: f"{w['id']} ({w['state']})" for w in workers}


def missed_of(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give the names of those who were there before the server was started again, and are waited for.

    Args:
        workers: As a status has them.
    """
    return [worker["id"] for worker in workers if worker["state"] == "lost" and worker["cause"] == MISSED]
