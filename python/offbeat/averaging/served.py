"""Members that meet at an Offbeat server: they come, go and die without stopping the others."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat import log, process
from offbeat.averaging import waiting
from offbeat.averaging.company import Company
from offbeat.averaging.held import Arrays, array_of, check_held, holds, set_share
from offbeat.averaging.members import NEXT_TO_NOTHING, Heard, Said, differing_terms, worded_terms
from offbeat.averaging.presence import LOST, Connect, Presence
from offbeat.averaging.unbearable import for_a_mean
from offbeat.averaging.waiting import at_the_server, for_the_others, for_those_before, telling
from offbeat.checks import refuse
from offbeat.client import Client
from offbeat.errors import (
    ClosedError,
    ConnectError,
    NonFiniteError,
    OffbeatError,
    OffbeatTimeoutError,
    OtherTermsError,
)
from offbeat.local.behind import LEAVING_S, Behind
from offbeat.local.flat import Flat, slices
from offbeat.rounds import Entered, New
from offbeat.telling import Waits

__all__ = ["REREAD", "Served"]

NOWHERE = -1, -1
"""Round and version of whom has been in none."""

REREAD = ("server_rolled_back", "slept")
"""Reasons that are no judgement on a push, which can come again once the member has read anew: the server was
started again in between, or had given up the member, which stood still."""

FOR_ITS_MEAN = (
    "waiting for the round of averaging that others are in to end, to begin with its mean; the server waits "
    "for none of them for long that dies in it, or hangs"
)
"""How the wait of one that has come is worded."""

MOST_READS = 3
"""Times that one who has come reads the mean where others end a round meanwhile, and begin the next: with a
slower link than theirs it would read for ever."""

SEEK_S = 0.5
"""How long training stands still, once, to see whether the server of a round that takes long is there."""


class Served(process.Live):
    """A server that holds the members' mean, to which each adds its share of the way it has come.

    In a round a member enters with what it weighs, is told its share when all who are there have entered,
    pushes its way since the mean it had last, times that share, waits until the others have pushed theirs,
    and pulls the new mean. The way of one that dies in between is not in it; one that comes later begins with
    the mean. All of that is done on a thread, behind training. Where the server is lost, averaging pauses.
    What a member has not brought to a round, for that reason or because it was measured from a mean of before
    the server was started again, or before it stood still itself, or because it was away when all changed
    what they do, it keeps, and brings to the next.

    The server holds float32. It refuses who averages by another method or other settings than those who are
    there, and tells in which round all have come to wish for another.

    Attributes:
        has_gone_on: The mean was others' when this member came.
        lingers: Who has ended waits for one that has just come, and was in no round yet; not where members
            end together only to go on in another way.
    """

    is_alone = False
    is_waited_for = False
    meets_in_twos = False
    arrives_alone = False
    _instead = "make an averager in the process that is to have one"
    _exit_turn = -1  # before its client, which is in a call while a round is under way

    def __init__(
        self,
        connect: Connect,
        parameters: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[torch.Tensor],
        *,
        terms: str,
        num_expected: int,
        ask: Callable[..., Mapping[str, Any]],
    ) -> None:
        """Begin with the server's mean; bring this model where it has none.

        Args:
            connect: Makes a client whose pushes are differences, in so many seconds, under a name if one is
                given.
            parameters: Each once, with its name.
            statistics: Of the model's BatchNorm layers.
            terms: By what this member averages, which has to be the same in all.
            num_expected: Where the run begins here, how many are waited for, up to a minute.
            ask: Asks for the server's status without the client, which waits in a call where that is needed.

        Raises:
            UnsupportedTensorError: If a parameter's values are not all float32's, too.
            NonFiniteError: If one is not finite.
            ModelMismatchError: If the server has another model.
            StateError: If those who are there average by other terms.
            ConfigError: If the server is set as no mean can bear; see `unbearable`.
            ConnectError: If it cannot be reached.
        """
        self._company = Company()
        self._presence = Presence(connect, on_another_run=self._company.lose)
        self._behind = Behind[Heard]("offbeat-averaging")
        self._ask, self._waits = ask, Waits()
        self._terms = terms
        self._names = {id(parameter): name for name, parameter in parameters}
        self._tensors: dict[str, torch.Tensor] = dict(parameters)
        self._statistics = self._names_of_statistics(len(statistics))
        self._tensors |= dict(zip(self._statistics, statistics, strict=True))
        check_held(self._tensors)
        self._mean: Arrays = {}
        self._version = -1
        self._last = NOWHERE  # the round that this member was in last, and the model's version after it
        self._is_closed = self.has_gone_on = self._has_missed = self._has_waited = False
        self._cause: str | None = None  # why it leaves at its end; None: it has finished
        self._has_left = threading.Event()
        self.lingers = True
        self._waits_for_those_before = False
        self._meet(waiting.BEGIN_S)
        try:
            self.has_gone_on = bool(self._presence.met().status()["version"])
            self._begin_together(num_expected)
        except BaseException:
            self._presence.drop()
            raise
        self._take_over()
        process.register(self)

    @property
    def size(self) -> int:
        """Members in the newest round."""
        return self._company.size

    @property
    def away(self) -> str | None:
        """How the newest try to reach the server has failed; None: it has not."""
        return self._presence.away

    def sought(self) -> str | None:
        """Ask the server, where a round still holds it for there: its client may be coming back to it."""
        if self.away is None:
            try:
                self._ask(SEEK_S)
            except ConnectError as error:
                return str(error)
            except OffbeatError:  # it takes connections
                pass
        return self.away

    @property
    def has_just_lost_it(self) -> bool:
        """Whether it was there until then: what is there by now is to be met still."""
        return self._presence.has_just_lost_it

    @property
    def shown(self) -> str:
        """What it is called at the server, and how many there are, for people."""
        num = f"{self.size} in its newest round" if self._company.is_known else "in no round yet"
        return f"{self.name} at the server, {num}"

    @property
    def name(self) -> str | None:
        """What the server calls it, in the order in which they came: no rank. None: it has not met it yet."""
        return self._presence.name

    @property
    def is_closed(self) -> bool:
        """Whether it takes part no more."""
        return self._is_closed

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Of the model, each once."""
        return [self._tensors[name] for name in self._names.values()]

    def take_back(self) -> bool:
        """Give this model the newest mean heard, where its parameters are others; tell whether so."""
        values = zip(self.parameters, self._names.values(), strict=True)
        if all(holds(tensor, self._mean[name]) for tensor, name in values):
            return False
        self._take_over()
        return True

    def partner(self, number: int) -> int | None:
        """Nobody: a server puts together what all have."""
        del number
        return None

    def begin(self, said: Said) -> None:
        """Do a round on a thread of its own.

        Raises:
            ClosedError: If this is closed.
        """
        self._check_open()
        self._behind.begin(lambda: self._round(said), device=said.statistics.device)

    def is_there(self) -> bool:
        """Look whether the thread has ended."""
        return self._behind.has_ended()

    def finish(self) -> Heard:
        """Wait for the thread."""
        with nullcontext() if self.is_there() else self.telling():
            self._behind.wait()
        return self._behind.take()

    def of_before(
        self, heard: Heard, values: Flat, statistics: torch.Tensor, *, is_finite: bool
    ) -> tuple[Flat, torch.Tensor] | None:
        """Give what the server has, which was heard."""
        del values, statistics, is_finite
        return heard.means, heard.statistics

    def telling(self) -> AbstractContextManager[None]:
        """For those at the server, or for itself."""
        return self._waits.telling(self._waiting)

    def is_alike(self, value: object) -> bool:
        """Nobody asks: of what a member takes up of its own, the others need nothing."""
        del value
        return True

    def make_alike(self, tensors: Sequence[torch.Tensor], *, apart: Mapping[int, int]) -> int:
        """Give all who are there the mean of what they have; each has to call this.

        Args:
            tensors: What they have.
            apart: What may differ; the most samples among it are what this one's counts; where nobody has
                any, all count as much.

        Returns:
            How many of them are at work: one that has come since the round in which all had ended.

        Raises:
            ClosedError: If this is closed.
        """
        self._check_open()
        self._tensors = dict(zip(self._tensors, tensors, strict=True))  # moved, it has new buffers
        self._end_given_up()
        num_at_work, is_brought = 0, False
        try:
            if not self._presence.is_met:
                self._meet()
            while not is_brought:  # else it comes again, in a round that the others may not be in
                own = {name: array_of(tensor) for name, tensor in self._tensors.items()}
                with self.telling():
                    num, _, is_brought = self._exchange(
                        own,
                        own,
                        weight=max([NEXT_TO_NOTHING, *apart.values()]),
                        samples=0,
                        is_at_work=False,
                        wish=self._terms,
                    )
                num_at_work = max(num_at_work, num)
        except LOST as error:
            self._presence.pause(error)
            return 0
        self._presence.go_on()
        self._take_over()
        if not num_at_work and self.lingers:
            with suppress(*LOST):  # all is done, and this only tells
                self._company.tell_of_newcomers(self._presence.met().status())
        return num_at_work

    def state(self) -> list[list[float]]:
        """Nothing: a round tells all that there is to know."""
        return []

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """From nothing."""

    def note_progress(self, iterations: int) -> None:
        """Tell the server that this member trains, however seldom it averages.

        Not in a round, whose thread has the client; its calls tell that themselves as they end.
        """
        if self.is_there():
            self._presence.note_progress(iterations)

    def end_by(self, failure: BaseException | None) -> None:
        """Say goodbye, after the round under way: whoever stays is waited for in each round by the others."""
        if self._is_closed:
            return  # and what is to be said is known
        self._is_closed = True
        failure = process.failure_in(failure)
        self._cause = None if failure is None else process.cause_of(failure)  # what it holds is not to wait

        def leave() -> None:
            try:
                self._presence.drop(finished=self._cause is None, cause=self._cause)
                process.release(self)
            finally:
                self._has_left.set()

        self._behind.after(leave)

    def _at_exit(self, failure: BaseException | None) -> None:
        """Let a round under way end, as others count on what is said in it; its client breaks it off then."""
        failure = process.failure_in(failure)
        if not self._is_closed:  # else what was to be said as the round ends is what is said now
            self._cause = None if failure is None else process.cause_of(failure)
        under_way = self._behind.under_way
        if self._cause is None and under_way is not None and not self._has_waited:
            self._has_waited = True  # Ctrl-C in it does not begin it anew
            if self._is_closed:
                self._has_left.wait(LEAVING_S)
            else:
                futures.wait([under_way], LEAVING_S)
        self._presence.drop(finished=self._cause is None, cause=self._cause, is_at_exit=True)

    @staticmethod
    def _names_of_statistics(num: int) -> list[str]:
        return [f"BatchNorm statistics {number}" for number in range(num)]

    def wait_for_those_before(self) -> None:
        """Before the end, wait for those who were there with this member, where the server has lost its run.

        It knows nobody then, and would end with each of them alone. Who has come is waited for from there on.
        """
        self._check_open()
        self._end_given_up()
        try:
            if not self._presence.is_met:
                self._meet()
            self._presence.go_on()
            if self._company.num_before == 1:
                return
            client = self._presence.met()
            self._waits_for_those_before = True
            try:
                with self._telling_by_status(self._words_for_those_before):
                    entered = client.enter(
                        0.0,
                        grace_s=waiting.BEGIN_S,
                        at_least=self._company.num_before,
                        terms=self._terms or None,
                    )
            finally:
                self._waits_for_those_before = False
            gathered = client.gather(entered.round)
            self._reread(client)
        except LOST as error:
            self._presence.pause(error)
            return
        if entered.round == 1:  # others have made none before it
            self._last = entered.round, gathered.version
        self._company.end_wait()

    def _end_given_up(self) -> None:
        """Wait for a round of which nobody takes notice any more: its thread has the client."""
        with nullcontext() if self.is_there() else self.telling():
            self._behind.end()

    def _waiting(self, waited_s: float) -> str | None:
        """Find out for whom this member waits; None: it does not, or it is told already why."""
        try:
            status = self._ask()
        except OffbeatTimeoutError:
            return (
                f"this member has waited {waited_s:g} s for a round of averaging to end, and the server does "
                f"not answer, though it takes connections: its process may be stopped, or busy; waiting on "
                f"(Ctrl-C ends the wait)"
            )
        except OffbeatError:  # it is gone, and soon that is told: averaging pauses
            return None
        if self._waits_for_those_before:
            return self._words_for_those_before(status)
        return at_the_server(status, own=self._presence.name, had=self._presence.names, waited_s=waited_s)

    def _words_for_those_before(self, status: Mapping[str, Any]) -> str:
        return for_those_before(status, num_before=self._company.num_before)

    # ------------------------------------------------------------------ on the thread

    def _round(self, said: Said) -> Heard:
        try:
            if not self._presence.is_met:
                self._meet()
            heard = self._averaged(said)
        except LOST as error:
            self._presence.pause(error)
            return _not_brought(said, int(said.is_at_work), are_agreed=said.wish == self._terms)
        except BaseException:
            self._presence.drop()  # else the others would wait for what it has not ended
            raise
        self._presence.go_on()
        return heard

    def _averaged(self, said: Said) -> Heard:
        own: Arrays = {}
        room: Arrays = {}
        is_mean = False  # what is in the room at the end stays the mean that the next way is measured from
        names = [self._names[id(parameter)] for parameter in said.parameters]
        parts = slices(said.parameters, said.room)
        new = {names[number]: samples for number, samples in said.weights.items()}
        if said.weight or any(new.values()):
            # The room takes the way, and then the mean: fresh memory costs more than what is written into it.
            values = slices(said.parameters, said.values)
            own = {name: part.cpu().numpy() for name, part in zip(names, values, strict=True)}
            is_near = all(part.device.type == "cpu" for part in parts)  # else what is own is a copy already
            is_mean = is_near and said.are_means_read
            room = {n: part.numpy() for n, part in zip(names, parts, strict=True)} if is_near else dict(own)
            start = 1
            for name in self._statistics:
                end = start + self._tensors[name].numel()
                own[name] = array_of(said.statistics[start:end].view(self._tensors[name].shape))
                room[name] = own[name]
                start = end
        before = self._version
        self._terms = said.terms
        if said.keeps:
            self._look_for_missed()
        num_at_work, are_agreed, is_brought = self._exchange(
            own,
            room,
            weight=said.weight,
            samples=round(said.samples),
            is_at_work=said.is_at_work,
            wish=said.wish,
            is_mean=is_mean,
            new=new,
        )
        if not is_brought:  # there is another round to come, for this member at least
            return _not_brought(said, max(num_at_work, 1), are_agreed=are_agreed)
        for name, part in zip(() if is_mean else names, () if is_mean else parts, strict=True):
            part.copy_(torch.from_numpy(self._mean[name]))
        statistics = said.statistics.clone()
        start = 1
        for name in self._statistics:
            end = start + self._mean[name].size
            statistics[start:end].copy_(torch.from_numpy(self._mean[name]).flatten())
            start = end
        has_missed, self._has_missed = self._has_missed, False
        # Where nobody had anything to add, there is no step to be made of it.
        weight = float(self.size) if self._version != before or has_missed else 0.0
        return Heard(
            said.room,
            weight,
            weight,
            num_at_work,
            said.metric,
            said.rate,
            statistics,
            are_agreed=are_agreed,
            has_missed=has_missed,
            num_not_finite=int(not said.is_finite),
            drift=said.drift,
        )

    def _look_for_missed(self) -> None:
        """See whether others have made rounds since this member was in one.

        Who is waited for is in each of them. One that was given up, or has just come, is not: what it keeps
        is of before those rounds, and an outer step from there would go their way once more.
        """
        status = self._presence.met().status()
        closed, version = int(status["rounds"]["closed"]), int(status["version"])
        last, last_version = self._last
        if 0 < closed != last:  # fewer: the server was started again, and counts anew
            has_missed = version != last_version  # in some rounds nobody adds anything
        else:  # in its life before, perhaps; of the last round all may have come after this member had heard
            has_missed = closed < last and version > last_version + self.size
        if has_missed and not self._has_missed:
            log.info(
                "others have made rounds without this member: what it has kept of rounds before begins anew "
                "with the mean of the next"
            )
        self._has_missed |= has_missed

    def _exchange(
        self,
        own: Arrays,
        room: Arrays,
        *,
        weight: float,
        samples: int,
        is_at_work: bool,
        wish: str,
        is_mean: bool = False,
        new: Mapping[str, float] | None = None,
    ) -> tuple[int, bool, bool]:
        """Enter, push, gather and pull.

        Args:
            own: What this member has to add to the mean.
            room: As much memory, which may be the same: what is in it becomes the share that is pushed.
            weight: Of it.
            samples: That it comes of.
            is_at_work: This member has not ended.
            wish: The terms wanted.
            is_mean: The room has the mean from here on, rather than the memory that has it.
            new: What is in a round for the first time, by name, with the samples that have led to it.

        One that waits for itself, under the name that it had, does not end with this round: first it is in
        the round by its new name, so that nobody ends without it, and then the old one is done with.

        Returns:
            How many members have not ended; whether all wish for these terms, or nobody for others; and
            whether there is nothing left of this member's that is to come in another round.

        Raises:
            StateError: If those who are there average by other terms.
        """
        client = self._presence.met()
        former = self._presence.former_names()
        is_at_work |= bool(former)
        with self._company.telling_whom_it_misses(client, is_at_work=is_at_work):
            linger_s = waiting.LINGER_S if self.lingers and not is_at_work else None
            entered = client.enter(
                weight,
                at_work=is_at_work,
                linger_s=linger_s,
                terms=self._terms,
                wish=wish,
                new=_said_of(new or {}),
            )
        self._presence.leave_as(former)
        was_away = self._presence.take_part()
        if self._company.is_known and not was_away:  # else it is told of what was lost in between
            self._company.tell_who_was_lost(client, entered, self._last[0])
        are_agreed = entered.agreed or wish == self._terms
        self._terms = wish if are_agreed else self._terms
        is_brought = not weight
        if shares := _shares(entered, own, new or {}):
            is_brought = self._push(client, own, room, shares, max(samples, 1), number=entered.round)
        elif weight:  # the others have changed while it was away, and it has been told of that here
            log.warn(
                f"the way of this member is not in round {entered.round}, and comes with the next: the "
                f"others went on to {worded_terms(self._terms)} while it was away"
            )
        gathered = client.gather(entered.round)
        if gathered.missing:
            log.warn(
                f"round {entered.round} is without the shares of {gathered.missing} of its {entered.members} "
                f"members: they were lost, or did nothing"
            )
        self._mean = client.pull(out=self._outside(room) | room if is_mean else self._mean)
        self._version = gathered.version
        self._last = entered.round, gathered.version
        self._company.count(entered.members)
        return entered.at_work, are_agreed, is_brought

    def _outside(self, room: Arrays) -> Arrays:
        """Give the mean of what is not in the room, as of what is frozen, in memory of its own.

        Else it would hold the whole room of a round before, for as long as it is frozen.
        """
        return {
            name: array if array.base is None else array.copy()
            for name, array in self._mean.items()
            if name not in room
        }

    def _push(
        self,
        client: Client,
        own: Arrays,
        room: Arrays,
        shares: Mapping[str, float],
        samples: int,
        *,
        number: int,
    ) -> bool:
        """Push the way from the mean, times the share of each; nothing where it is too large for float32.

        Returns:
            False: it is to come again, measured from what the server has by then.
        """
        for name, array in own.items():
            set_share(room[name], array, self._mean[name], shares[name])
        try:
            receipt = client.push(room, samples=samples)
        except NonFiniteError as error:
            log.warn(f"this member is so far from the mean that it adds nothing to a round: {error}")
            return True
        if receipt.reason in REREAD:
            log.warn(
                f"the way of this member is not in round {number}, and comes with the next: {receipt.detail}"
            )
            return False
        if not receipt.applied:
            log.warn(
                f"what this member has learnt of {samples} samples is lost: the server does not take it in "
                f"round {number}: {receipt.detail}"
            )
        else:  # of which the version is, should the server be lost before the round's end
            self._last = self._last[0], self._last[1] + 1
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("it was closed, and takes part no more: make a new one")

    def _meet(self, tries_s: float | None = None) -> None:
        """Connect, and bring this model if the server has none.

        Raises:
            ConfigError: If the server is set as no mean can bear; see `unbearable`.
        """
        self._presence.meet(self._agree, tries_s=tries_s)

    def _agree(self, client: Client) -> None:
        arrays = self._sound(self._brought())
        refuse(for_a_mean(client.run))
        client.init(arrays)
        status = client.status()
        self._company.note_lost(status["workers"])
        closed = self._read_between_rounds(client, status, arrays)
        if self._last == NOWHERE:
            self._last = closed, self._version

    def _read_between_rounds(self, client: Client, status: Mapping[str, Any], out: Arrays) -> int:
        """Read the mean that a round has led to: in its midst some have added their shares, and others not.

        Nobody waits for one that has only come, so that the next may close while it reads.

        Args:
            client: This member's, which is in no round.
            status: The server's.
            out: What to read into.

        Returns:
            How many rounds have closed.
        """
        closed: int = status["rounds"]["closed"]
        for _ in range(MOST_READS):
            with telling(FOR_ITS_MEAN):
                self._version = client.gather(closed).version if closed else status["version"]
            self._mean = client.pull(out=out)  # of that version or a newer one, never an older
            status = client.status()
            before, closed = closed, status["rounds"]["closed"]
            if closed == before:
                return closed
        log.info(
            "others ended a round in each of %d times that their mean was read: this member begins with what "
            "it has read last, which may be of between two rounds",
            MOST_READS,
        )
        return closed

    def _reread(self, client: Client) -> None:
        """Take what the server has, from which this member's way is measured."""
        client.pull(out=self._mean)

    def _brought(self) -> Arrays:
        """Give what a server that has nothing is to begin with."""
        return {name: array_of(tensor) for name, tensor in self._tensors.items()}

    def _sound(self, brought: Arrays) -> Arrays:
        """Put the mean that this member had last in the place of a model that is not finite.

        No server begins with such a one; at a server that goes on the member has a mean to come to.
        """
        if not self._mean or all(np.isfinite(array).all() for array in brought.values()):
            return brought
        return brought | {name: self._mean[name].copy() for name in self._tensors}

    def _begin_together(self, num_expected: int) -> None:
        """Wait for those who are started with this member; of a run that goes on already nobody is.

        Raises:
            StateError: If those who are there average by other terms.
        """
        client = self._presence.met()
        if (theirs := client.status()["rounds"].get("terms", self._terms)) != self._terms:
            raise OtherTermsError(differing_terms(self._terms, theirs))
        if num_expected <= 1 or self.has_gone_on:
            return
        with self._telling_of_the_others(num_expected):
            entered = client.enter(0.0, grace_s=waiting.BEGIN_S, at_least=num_expected, terms=self._terms)
        gathered = client.gather(entered.round)
        client.pull(out=self._mean)
        self._last = entered.round, gathered.version
        self._company.count(entered.members)
        self._company.warn_of_missing(num_expected)

    def _telling_of_the_others(self, num_expected: int) -> AbstractContextManager[None]:
        return self._telling_by_status(lambda status: for_the_others(status, num_expected=num_expected))

    def _telling_by_status(
        self, words: Callable[[Mapping[str, Any]], str | None]
    ) -> AbstractContextManager[None]:
        def found() -> str | None:
            try:
                return words(self._ask())
            except OffbeatError:  # it is gone, or silent, and soon that is told
                return None

        return telling(found)

    def _take_over(self) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(torch.from_numpy(self._mean[name]))


def _shares(entered: Entered, names: Iterable[str], new_names: Iterable[str]) -> dict[str, float]:
    """Give the share by which each is to go into a round; of none, where this member has no share in it."""
    shares = dict.fromkeys(names, entered.share)
    if entered.new_share is not None:
        shares |= {name: entered.new_share for name in new_names if name in shares}
    return shares if any(shares.values()) else {}


def _said_of(new: Mapping[str, float]) -> New | None:
    """Give what the server is told of what is new: the most samples that have led to any of it."""
    if not new:
        return None
    of = hashlib.sha256(json.dumps(sorted(new)).encode()).digest()
    return New(max(new.values()), int.from_bytes(of[:8], "little"))


def _not_brought(said: Said, num_at_work: int, *, are_agreed: bool) -> Heard:
    """Give what leaves a member as it is, with all that it has said still to be said."""
    return Heard(
        said.values,
        0.0,
        0.0,
        num_at_work,
        said.metric,
        said.rate,
        said.statistics,
        are_agreed=are_agreed,
        is_brought=False,
    )
