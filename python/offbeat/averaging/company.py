"""Who else is at a member's server: how many they are, and what is told of those who are missing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from offbeat import log
from offbeat.averaging import waiting
from offbeat.averaging.waiting import (
    ENDED,
    LINGER_S,
    UNDER_ANOTHER,
    missed,
    missed_of,
    newcomers,
    telling,
)
from offbeat.client import Client
from offbeat.rounds import Entered

__all__ = ["Company", "lost_of"]


class Company:
    """The members of rounds, as one of them gets to know.

    Attributes:
        size: Of the newest round.
        is_known: There was one.
        num_before: How many there were at a server that has lost its run, while they are missed; else 1.
    """

    def __init__(self) -> None:
        """Begin with this member alone."""
        self.size, self.is_known = 1, False
        self.num_before, self._has_waited = 1, False
        self._lost: set[str] = set()  # of whom it is known
        self._missed: str | None = None  # of whom it was told that they are waited for
        self._left_out: set[int] = set()  # incarnations without which this ended, as was told

    def note_lost(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Take note of who was lost or left before this member came; `workers`: as a status has them."""
        self._lost = {worker["id"] for worker in workers if worker["state"] in ("lost", "left")}

    def lose(self) -> None:
        """Take note that the server has lost its run, and knows none of those who were there."""
        self.num_before = max(self.num_before, self.size)

    def end_wait(self) -> None:
        """Take note that those of before were waited for: who has not come by now is missing at the end."""
        self._has_waited = True

    def see(self, num_members: int) -> None:
        """Take note of how many there are."""
        self.size, self.is_known = max(num_members, 1), True

    def see_who_is_there(self, workers: Sequence[Mapping[str, Any]], *, named: str) -> None:
        """Take note of how many there are, where no round tells it: also of who is lost, and may train on.

        Args:
            workers: As a status has them.
            named: What the names of members begin with; others are of those who look on.
        """
        there = (w for w in workers if w["id"].startswith(named) and w["state"] not in ENDED)
        self.see(sum(w["state"] != "lost" or w["id"] not in self._lost for w in there))

    def count(self, num_members: int) -> None:
        """Take note of how many were in a round, and warn of those of before who have not come to the end."""
        self.see(num_members)
        if self.size < self.num_before:
            if not self._has_waited:
                return
            log.warn(
                f"this ends with {self.size} of {self.num_before} members: the others have not come within "
                f"{waiting.BEGIN_S:g} s to the server, which was started again without its run and knows "
                f"nobody of before; what they have learnt is not in this model. A server that keeps "
                f"checkpoints (checkpoint_dir=) knows them"
            )
        self.num_before, self._has_waited = 1, False

    def warn_of_missing(self, num_expected: int) -> None:
        """Warn where not all have come who were to begin together."""
        if self.size < num_expected:
            log.warn(
                f"{self.size} of {num_expected} members have come, and begin without the others, who may "
                f"come later; one that was refused, as for other settings, has said why itself"
            )

    def tell_who_was_lost(self, client: Client, entered: Entered, last: int) -> None:
        """Say why a round has fewer members than this one's last had, where not all that went have ended.

        Args:
            client: This member's.
            entered: Into the round.
            last: The number of the last one that this member was in.
        """
        if entered.members >= self.size:
            return
        if (num_without := entered.round - last - 1) > 0:
            log.warn(
                f"the others have made {num_without} round(s) of averaging without this member, which the "
                f"server had given up, as it does whom it does not hear of for a lease (10 s), or who does "
                f"nothing in a round: did its process stand still? Its last round had {self.size} members, "
                f"and this one has {entered.members}; who has ended since has nothing of what it learns"
            )
            return
        workers = client.status()["workers"]
        lost = {w["id"]: f"was given up ({w['cause']})" for w in workers if w["state"] == "lost"}
        lost |= dict.fromkeys(missed_of(workers), UNDER_ANOTHER)
        lost |= {w["id"]: w["cause"] for w in workers if w["state"] == "left"}
        news = [f"{name} {what}" for name, what in lost.items() if name not in self._lost]
        if news:
            log.warn(
                f"round {entered.round} has {entered.members} member(s), and the one before had {self.size}: "
                f"{', '.join(news)}"
            )
        self._lost = set(lost)

    def tell_who_was_given_up(self, client: Client, entered: Entered) -> None:
        """Say, once of each, with whom others do not end that the server has given up, and may train on.

        Args:
            client: This member's.
            entered: Into a round in which those are who end together, where nobody waits before.
        """
        if entered.members >= self.size:
            return
        status = client.status()
        there = {w["id"] for w in status["workers"] if w["state"] not in ENDED} - {client.worker_id}
        causes = {d["worker"]: d["cause"] for d in lost_of(status) if d["worker"] in there - self._lost}
        if causes:
            names = ", ".join(f"{name} was given up ({cause})" for name, cause in causes.items())
            log.warn(
                f"this ends with {entered.members} member(s), and there were {self.size}: {names}; what "
                f"comes of those from now on is not in this model"
            )
        self._lost |= set(causes)

    def tell_of_newcomers(self, status: Mapping[str, Any]) -> None:
        """Say, once of each, without whom all have ended who has come to the server: it was in no round.

        Args:
            status: The server's, after all rounds.
        """
        come = newcomers(status)
        news = [text for incarnation, text in come.items() if incarnation not in self._left_out]
        if news:
            log.warn(
                f"this has ended without {', '.join(news)}, at the server, and in no round of averaging: "
                f"members that have all ended wait for such a one for up to {LINGER_S:g} s, once; what it "
                f"learns is not in this model"
            )
        self._left_out.update(come)

    @contextmanager
    def telling_whom_it_misses(self, client: Client, *, is_at_work: bool) -> Iterator[None]:
        """Say once of each who they are that a server waits for at the end, and that may never come.

        Args:
            client: This member's.
            is_at_work: It is not at its end, and waits for them no longer than a lease.
        """
        text = None if is_at_work else missed(client.status())
        is_news, self._missed = text != self._missed, text
        with telling(text if is_news else None):
            yield


def lost_of(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Give the departures, oldest first, of workers that the server took for lost, if only for a while."""
    return [departure for departure in status["departures"] if departure["state"] == "lost"]
