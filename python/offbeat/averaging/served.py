"""Members that meet at an Offbeat server: they come, go and die without stopping the others."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat import log
from offbeat.averaging.members import Heard, Said, worded_terms
from offbeat.averaging.waiting import (
    UNDER_ANOTHER,
    at_the_server,
    for_the_others,
    for_those_before,
    missed,
    missed_of,
    telling,
)
from offbeat.checks import refuse
from offbeat.client import Client
from offbeat.errors import (
    ClosedError,
    NonFiniteError,
    OffbeatError,
    OffbeatTimeoutError,
    StateError,
    UnsupportedTensorError,
)
from offbeat.local.flat import PIECE, slices
from offbeat.rounds import Entered
from offbeat.telling import Waits

__all__ = ["Arrays", "Connect", "Served", "array_of"]

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Connect = Callable[[float, str | None], Client]

BEGIN_S = 60.0
"""Longest wait for those who are started together; as long as a client tries to reach its server."""
AGAIN_S = 5.0
"""How long a round tries to reach a server that was lost."""

LOST = (ConnectionError, OffbeatTimeoutError)
"""By what a server is known to be gone, or to take connections and be silent; our own errors are such."""

NOWHERE = -1, -1
"""Round and version of whom has been in none."""

REREAD = ("server_rolled_back", "slept")
"""Reasons that are no judgement on a push, which can come again once the member has read anew: the server was
started again in between, or had given up the member, which stood still."""

_log = logging.getLogger("offbeat")


class Served:
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
        size: Members in the newest round.
        has_gone_on: The mean was others' when this member came.
        away: How the newest try to reach the server has failed; None: it has not.
        has_just_lost_it: It was there until then; what is there by now is to be met still.
    """

    is_alone = False
    is_waited_for = False
    meets_in_twos = False

    def __init__(
        self,
        connect: Connect,
        parameters: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[torch.Tensor],
        *,
        terms: str,
        num_expected: int,
        ask: Callable[[], Mapping[str, Any]],
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
            UnsupportedTensorError: If a parameter is wider than float32.
            ModelMismatchError: If the server has another model.
            StateError: If those who are there average by other terms.
            ConfigError: If the server weighs pushes by their staleness, or rejects late ones.
            ConnectError: If it cannot be reached.
        """
        self.size = 1
        self._is_counted = False  # in `size`
        self._run_id: str | None = None
        self._is_back = False  # since its last round it has met the server anew
        self._num_before = 1  # how many there were at a server whose run is lost, while they are missed here
        self._terms = terms
        self._connect = connect
        self._ask, self._waits = ask, Waits()
        self._names = {id(parameter): name for name, parameter in parameters}
        self._tensors: dict[str, torch.Tensor] = dict(parameters)
        self._statistics = self._names_of_statistics(len(statistics))
        self._tensors |= dict(zip(self._statistics, statistics, strict=True))
        for name, tensor in self._tensors.items():
            if torch.promote_types(tensor.dtype, torch.float32) != torch.float32:
                raise UnsupportedTensorError(
                    f"{name!r} is of {tensor.dtype}, and a server holds float32: cast the model, or take "
                    f"communication_backend='gloo'"
                )
        self._client: Client | None = None
        self._name: str | None = None  # there; the client itself, while it is in a call, does not say it
        self._names_had: set[str] = set()  # in this run
        self._mean: Arrays = {}
        self._version = -1
        self._future: Future[Heard] | None = None
        self._stream: torch.cuda.Stream | None = None  # on which the round under way was begun
        self._is_closed = self.has_gone_on = self._has_missed = self._has_waited = False
        self._waits_for_those_before = False
        self.away: str | None = None
        self.has_just_lost_it = False
        self._last = NOWHERE  # the round that this member was in last, and the model's version after it
        self._known_lost: set[str] = set()
        self._missed: str | None = None  # of whom it was told that they are waited for
        self._meet(BEGIN_S)
        assert self._client is not None  # noqa: S101  it has met
        try:
            self.has_gone_on = bool(self._client.status()["version"])
            self._begin_together(num_expected)
        except BaseException:
            self._drop(finished=False)
            raise
        self._take_over()

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
        before = self._future  # of a round of which nobody takes notice any more: its thread has the client
        future = Future[Heard]()
        device = said.statistics.device
        self._stream = stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def do() -> None:
            try:
                if before is not None:
                    before.exception()
                with _on(stream):
                    heard = self._round(said)
                future.set_result(heard)
            except BaseException as error:  # noqa: BLE001  told where the round is waited for
                future.set_exception(error)

        # A daemon: where the process ends in mid-round, it does not wait for the other members.
        threading.Thread(target=do, name="offbeat-averaging", daemon=True).start()
        self._future = future  # not before: where no thread can be had, nobody would ever end it

    def is_there(self) -> bool:
        """Look whether the thread has ended."""
        return self._future is None or self._future.done()

    def finish(self) -> Heard:
        """Wait for the thread."""
        assert self._future is not None  # noqa: S101  something was begun
        with nullcontext() if self.is_there() else self.telling():
            heard = self._future.result()
        self._future = None
        if self._stream is not None:  # on which what was heard may still be on its way to the device
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return heard

    def telling(self) -> AbstractContextManager[None]:
        """For those at the server, or for itself."""
        return self._waits.telling(self._waiting)

    def is_alike(self, value: object) -> bool:
        """Nobody asks: of what a member takes up of its own, the others need nothing."""
        del value
        return True

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all who are there the mean of what they have, one as the other; each has to call this.

        Raises:
            ClosedError: If this is closed.
        """
        self._check_open()
        self._tensors = dict(zip(self._tensors, tensors, strict=True))  # moved, it has new buffers
        self._end_given_up()
        is_brought = False
        try:
            if self._client is None:
                self._meet()
            while not is_brought:
                own = {name: array_of(tensor) for name, tensor in self._tensors.items()}
                with self.telling():
                    _, _, is_brought = self._exchange(
                        own, own, weight=1.0, samples=0, is_at_work=False, wish=self._terms
                    )
        except LOST as error:
            self._pause(error)
            return
        self._go_on()
        self._take_over()

    def state(self) -> list[list[float]]:
        """Nothing: a round tells all that there is to know."""
        return []

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """From nothing."""

    def note_progress(self, iterations: int) -> None:
        """Tell the server that this member trains, however seldom it averages.

        Not in a round, whose thread has the client; its calls tell that themselves as they end.
        """
        if self.is_there() and (client := self._client) is not None:  # in this order: the thread may drop it
            client.set_progress(iterations)

    def close(self) -> None:
        """Say goodbye, after the round under way: whoever stays is waited for in each round by the others."""
        self._is_closed = True
        if self._future is None:
            self._drop(finished=True)
        else:
            self._future.add_done_callback(lambda _: self._drop(finished=True))

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
            if self._client is None:
                self._meet()
            self._go_on()
            if self._num_before == 1:
                return
            assert self._client is not None  # noqa: S101  it has met
            self._waits_for_those_before = True
            try:
                with self._telling_by_status(self._words_for_those_before):
                    entered = self._client.enter(
                        0.0, grace_s=BEGIN_S, at_least=self._num_before, terms=self._terms or None
                    )
            finally:
                self._waits_for_those_before = False
            gathered = self._client.gather(entered.round)
            self._reread(self._client)
        except LOST as error:
            self._pause(error)
            return
        if entered.round == 1:  # others have made none before it
            self._last = entered.round, gathered.version
        self._has_waited = True

    @property
    def shown(self) -> str:
        """How many there are, for people."""
        return f"{self.size} in its newest round" if self._is_counted else "in no round yet"

    def _end_given_up(self) -> None:
        """Wait for a round of which nobody takes notice any more: its thread has the client."""
        if self._future is not None:
            with self.telling():
                self._future.exception()
            self._future = None

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
        return at_the_server(status, own=self._name, had={*self._names_had}, waited_s=waited_s)

    def _words_for_those_before(self, status: Mapping[str, Any]) -> str:
        return for_those_before(status, num_before=self._num_before, most_s=BEGIN_S)

    # ------------------------------------------------------------------ on the thread

    def _round(self, said: Said) -> Heard:
        try:
            if self._client is None:
                self._meet()
            heard = self._averaged(said)
        except LOST as error:
            self._pause(error)
            return _not_brought(said, int(said.is_at_work), are_agreed=said.wish == self._terms)
        except BaseException:
            self._drop(finished=False)  # else the others would wait for what it has not brought to its end
            raise
        self._go_on()
        return heard

    def _averaged(self, said: Said) -> Heard:
        own: Arrays = {}
        room: Arrays = {}
        is_mean = False  # what is in the room at the end stays the mean that the next way is measured from
        names = [self._names[id(parameter)] for parameter in said.parameters]
        parts = slices(said.parameters, said.room)
        if said.weight:
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
        )

    def _look_for_missed(self) -> None:
        """See whether others have made rounds since this member was in one.

        Who is waited for is in each of them. One that was given up, or has just come, is not: what it keeps
        is of before those rounds, and an outer step from there would go their way once more.
        """
        assert self._client is not None  # noqa: S101  who calls this has met
        status = self._client.status()
        closed, version = int(status["rounds"]["closed"]), int(status["version"])
        last, last_version = self._last
        if 0 < closed != last:  # fewer: the server was started again, and counts anew
            has_missed = version != last_version  # in some rounds nobody adds anything
        else:  # in its life before, perhaps; of the last round all may have come after this member had heard
            has_missed = closed < last and version > last_version + self.size
        if has_missed and not self._has_missed:
            _log.info(
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
    ) -> tuple[int, bool, bool]:
        """Enter, push, gather and pull.

        Args:
            own: What this member has.
            room: As much memory, which may be the same: what is in it becomes the share that is pushed.
            weight: Of it.
            samples: That it comes of.
            is_at_work: This member has not ended.
            wish: The terms wanted.
            is_mean: The room has the mean from here on, rather than the memory that has it.

        One that waits for itself, under the name that it had, does not end with this round: first it is in
        the round by its new name, so that nobody ends without it, and then the old one is done with.

        Returns:
            How many members have not ended; whether all wish for these terms, or nobody for others; and
            whether there is nothing left of this member's that is to come in another round.

        Raises:
            StateError: If those who are there average by other terms.
        """
        client = self._client
        assert client is not None  # noqa: S101  who calls this has met
        former = self._former_names(client)
        is_at_work |= bool(former)
        with self._telling_whom_it_misses(client, is_at_work=is_at_work):
            entered = client.enter(weight, at_work=is_at_work, terms=self._terms, wish=wish)
        self._leave_as(former)
        if self._is_counted and not self._is_back:  # else it is told of what was lost in between
            self._tell_who_was_lost(client, entered)
        self._is_back = False
        are_agreed = entered.agreed or wish == self._terms
        self._terms = wish if are_agreed else self._terms
        is_brought = not weight or self._push(client, own, room, entered, max(samples, 1))
        gathered = client.gather(entered.round)
        if gathered.missing:
            _log.warning(
                "round %d is without the shares of %d of its %d members: they were lost, or did nothing",
                entered.round, gathered.missing, entered.members,
            )  # fmt: skip
        self._mean = client.pull(out=self._outside(room) | room if is_mean else self._mean)
        self._version = gathered.version
        self._last = entered.round, gathered.version
        self._count(entered.members)
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

    def _tell_who_was_lost(self, client: Client, entered: Entered) -> None:
        """Say why a round has fewer members than this one's last had, where not all that went have ended."""
        if entered.members >= self.size:
            return
        if (num_without := entered.round - self._last[0] - 1) > 0:
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
        news = [f"{name} {what}" for name, what in lost.items() if name not in self._known_lost]
        if news:
            _log.warning(
                "round %d has %d member(s), and the one before had %d: %s",
                entered.round, entered.members, self.size, ", ".join(news),
            )  # fmt: skip
        self._known_lost = set(lost)

    def _count(self, num_members: int) -> None:
        """Take note of how many were in a round, and warn of those of before who have not come to the end."""
        self.size, self._is_counted = max(num_members, 1), True
        if self.size < self._num_before:
            if not self._has_waited:
                return
            log.warn(
                f"this ends with {self.size} of {self._num_before} members: the others have not come within "
                f"{BEGIN_S:g} s to the server, which was started again without its run and knows nobody of "
                f"before; what they have learnt is not in this model. A server that keeps checkpoints "
                f"(checkpoint_dir=) knows them"
            )
        self._num_before, self._has_waited = 1, False

    def _push(self, client: Client, own: Arrays, room: Arrays, entered: Entered, samples: int) -> bool:
        """Push the way from the mean, times the share; nothing where that is 0, or too large for float32.

        Returns:
            False: it is to come again, measured from what the server has by then.
        """
        if not entered.share:  # the others have changed while it was away, and it has been told of that here
            _log.warning(
                "the way of this member is not in round %d, and comes with the next: the others went on to "
                "%s while it was away",
                entered.round, worded_terms(self._terms),
            )  # fmt: skip
            return False
        for name, array in own.items():
            _set_share(room[name], array, self._mean[name], entered.share)
        try:
            receipt = client.push(room, samples=samples)
        except NonFiniteError as error:
            log.warn(f"this member is so far from the mean that it adds nothing to a round: {error}")
            return True
        if receipt.reason in REREAD:
            _log.warning(
                "the way of this member is not in round %d, and comes with the next: %s",
                entered.round, receipt.detail,
            )  # fmt: skip
            return False
        if not receipt.applied:
            _log.warning(
                "what this member has learnt of %d samples is lost: the server does not take it in round %d: "
                "%s",
                samples, entered.round, receipt.detail,
            )  # fmt: skip
        else:  # of which the version is, should the server be lost before the round's end
            self._last = self._last[0], self._last[1] + 1
        return True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("it was closed, and takes part no more: make a new one")

    def _meet(self, tries_s: float | None = None) -> None:
        """Connect, and bring this model if the server has none.

        Raises:
            ConfigError: If the server weighs pushes by their staleness, or rejects late ones.
        """
        client = self._connect(AGAIN_S if tries_s is None else tries_s, None)
        if self._run_id not in {None, client.run_id}:
            self._num_before = max(self._num_before, self.size)
            self._names_had.clear()  # there, names that are the same are others'
        try:
            self._agree(client)
        except BaseException:
            client.close(finished=False)
            raise
        self._is_back = self._run_id is not None
        self._client, self._name, self._run_id = client, client.worker_id, client.run_id
        self._names_had.add(self._name)

    def _agree(self, client: Client) -> None:
        arrays = self._sound(self._brought())
        client.init(arrays)
        refuse(_staleness_faults(client.run["staleness"]))
        status = client.status()
        self._known_lost = {worker["id"] for worker in status["workers"] if worker["state"] == "lost"}
        self._version = status["version"]  # or older than what is pulled, never newer
        self._mean = client.pull(out=arrays)
        if self._last == NOWHERE:
            self._last = status["rounds"]["closed"], self._version

    def _former_names(self, client: Client) -> list[str]:
        """Give names that this member had, for which a server waits that was started again."""
        if self._names_had <= {self._name}:
            return []
        return [name for name in missed_of(client.status()["workers"]) if name in self._names_had]

    def _leave_as(self, names: Sequence[str]) -> None:
        """Say goodbye under names that this member had."""
        for name in names:
            try:
                self._connect(AGAIN_S, name).close(finished=False)
            except OffbeatError as error:
                self._names_had.discard(name)  # else it would be at work for ever
                _log.warning(
                    "this member is %s at the server now, which waits for %s, as it was before: it could not "
                    "be told that they are one: %s",
                    self._name, name, error,
                )  # fmt: skip

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

    @contextmanager
    def _telling_whom_it_misses(self, client: Client, *, is_at_work: bool) -> Iterator[None]:
        """Say once of each who they are that a server waits for at the end, and that may never come.

        Who is at work waits for them no longer than a lease.
        """
        text = None if is_at_work else missed(client.status()["workers"])
        is_news, self._missed = text != self._missed, text
        with telling(text if is_news else None):
            yield

    def _begin_together(self, num_expected: int) -> None:
        """Wait for those who are started with this member; of a run that goes on already nobody is.

        Raises:
            StateError: If those who are there average by other terms.
        """
        client = self._client
        assert client is not None  # noqa: S101  it has met
        if (theirs := client.status()["rounds"].get("terms", self._terms)) != self._terms:
            raise StateError(
                f"this member averages by {worded_terms(self._terms)}, and those at the server by "
                f"{worded_terms(theirs)}: give all of them the same, and train the same parameters "
                f"(requires_grad); where machines differ in speed, averaging_policy='time' suits all"
            )
        if num_expected <= 1 or self.has_gone_on:
            return
        with self._telling_of_the_others(num_expected):
            entered = client.enter(0.0, grace_s=BEGIN_S, at_least=num_expected, terms=self._terms)
        gathered = client.gather(entered.round)
        client.pull(out=self._mean)
        self._last = entered.round, gathered.version
        self._count(entered.members)
        if self.size < num_expected:
            self._warn_of_missing(num_expected)

    def _telling_of_the_others(self, num_expected: int) -> AbstractContextManager[None]:
        return self._telling_by_status(
            lambda status: for_the_others(status, num_expected=num_expected, most_s=BEGIN_S)
        )

    def _telling_by_status(
        self, words: Callable[[Mapping[str, Any]], str | None]
    ) -> AbstractContextManager[None]:
        def found() -> str | None:
            try:
                return words(self._ask())
            except OffbeatError:  # it is gone, or silent, and soon that is told
                return None

        return telling(found)

    def _warn_of_missing(self, num_expected: int) -> None:
        log.warn(
            f"{self.size} of {num_expected} members have come, and begin without the others, who may come "
            f"later; one that was refused, as for other settings, has said why itself"
        )

    def _pause(self, error: Exception) -> None:
        if self.away is None:
            log.warn(f"averaging pauses, and training goes on: {error}; it is tried again at each round")
        self.away, self.has_just_lost_it = str(error), self._client is not None
        self._drop(finished=False)

    def _go_on(self) -> None:
        if self.away is not None:
            log.warn("the server is there again: averaging goes on")
        self.away, self.has_just_lost_it = None, False

    def _drop(self, *, finished: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(OffbeatError):  # of a session that is over there is nothing to say goodbye to
                client.close(finished=finished)

    def _take_over(self) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(torch.from_numpy(self._mean[name]))


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    """Have a thread do its work on a device behind what its maker has begun there, and in that one's memory.

    A thread begins with the first device's default stream, which waits for no other: it would read what has
    not been written yet.
    """
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _staleness_faults(staleness: Mapping[str, Any]) -> list[str]:
    """Tell what a server does to late pushes that shares of a mean cannot bear."""
    faults = []
    if any(weight["name"] != "constant" for weight in staleness["weights"]):
        faults.append(
            f"the server weighs what comes late by {staleness['weights']}, and shares of a mean are "
            f"worth the same whenever they come: start it with staleness_policy='constant'"
        )
    if (most := staleness["max_staleness"]) is not None:
        faults.append(
            f"the server's max_staleness is {most}, and of a round's shares each comes later than the one "
            f"before: those rejected would be missing in the mean, and in the models at the end; start it "
            f"without max_staleness (`--max-staleness`)"
        )
    return faults


def _set_share(to: Array, own: Array, mean: Array, share: float) -> None:
    """Set a contiguous array to the way from the mean, times the share; on one core, as numpy does it."""
    to, own, mean = to.reshape(-1), own.reshape(-1), mean.reshape(-1)
    with np.errstate(over="ignore"):
        for start in range(0, len(to), PIECE):
            part = to[start : start + PIECE]
            np.subtract(own[start : start + PIECE], mean[start : start + PIECE], out=part)
            np.multiply(part, np.float32(share), out=part)


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


def array_of(tensor: torch.Tensor) -> Array:
    """Give a copy, float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
