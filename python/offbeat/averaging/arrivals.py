"""Members that nobody waits for: each brings its way to a server, which steps, and goes on from there."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from offbeat import log
from offbeat.averaging import waiting
from offbeat.averaging.company import lost_of
from offbeat.averaging.held import Arrays, array_of
from offbeat.averaging.members import Heard, Said
from offbeat.averaging.methods import DiLoCo, Kept, Memory, Method
from offbeat.averaging.presence import LOST, Connect
from offbeat.averaging.served import REREAD, Served
from offbeat.averaging.unbearable import for_arrivals
from offbeat.checks import refuse
from offbeat.client import Client
from offbeat.local.flat import slices
from offbeat.optim import DelayedNesterov

if TYPE_CHECKING:
    from offbeat.receipt import Receipt

__all__ = ["Arrivals", "guided"]

NAMED = "member-"
"""What the names begin with by which members come: one that comes back has the same."""
TOTALS = "samples and iterations"
"""Of all members, whose pushes count them up at the server: the one tensor of whole numbers."""

Counts = np.ndarray[Any, np.dtype[np.int64]]
"""Samples and iterations."""


@dataclass(frozen=True, kw_only=True)
class _Guided(DiLoCo):
    """What a member does where the server takes the outer step: it goes to where that has led."""

    keeps: ClassVar[tuple[Kept, ...]] = ()

    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Go to the server's parameters."""
        del own, memory, num_members
        return mean


def guided(method: Method) -> Method:
    """Give what a member does, of the outer step that the server is to take."""
    assert isinstance(method, DiLoCo)  # noqa: S101  else it was refused
    return _Guided(**{field.name: getattr(method, field.name) for field in fields(method)})


class Arrivals(Served):
    """A server that takes an outer step of delayed Nesterov whenever a member arrives with its way.

    A member pushes what it is away from the parameters that it has gone out from, pulls what the server has
    made of all that came, and goes on from there; nobody is waited for but the server. A push counts once,
    whatever breaks: one whose answer was lost is found, or found missing, when the server is met again.

    What one counts by: the outer step adds up what comes, so that a member that does twice the steps has
    twice the say already. A push is scaled by its batches' size beside the mean of all members' batches; of
    BatchNorm's statistics it moves the server's by its share of the samples that came since its last push.

    Attributes:
        receipt: Of the newest push: its staleness, and what it was worth; None before the first.
    """

    arrives_alone = True

    def __init__(
        self,
        connect: Connect,
        parameters: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[torch.Tensor],
        *,
        num_expected: int,
        method: DiLoCo,
        ask: Callable[..., Mapping[str, Any]],
    ) -> None:
        """Begin with the server's parameters; bring this model, and the outer step, where it has none.

        Args:
            connect: As `Served`, but that pushes are gradients, under a name that stays the same.
            parameters: Each once, with its name.
            statistics: Of the model's BatchNorm layers.
            num_expected: As `Served`; also the delay, where the method does not say it.
            method: The outer step.
            ask: As `Served`.

        Raises:
            ConfigError: If the server takes another outer step, or adds differences up, or is set as these
                cannot bear; see `unbearable`.
            UnsupportedTensorError: As `Served`; so are the next two.
            ModelMismatchError: If the server has another model.
            ConnectError: If it cannot be reached.
        """
        self.receipt: Receipt | None = None
        self._method = method
        self._num_expected = num_expected
        self._said: Said | None = None
        self._reference: Arrays = {}  # parameters that this member went out from
        self._unsettled: Arrays = {}  # where it had come to with a push that was not answered
        self._tally = 0  # of this member's pushes at the server, before that one
        self._counts = np.zeros(2, np.int64)
        self._counted_of_said = np.zeros(2, np.int64)  # which a lost server leaves to be said once more
        self._counts_unsettled = np.zeros(2, np.int64)
        self._share = 1.0 / num_expected
        self._enrolled_s = 0.0  # when it last became one of those who are waited for
        super().__init__(connect, parameters, statistics, terms="", num_expected=num_expected, ask=ask)

    def make_alike(self, tensors: Sequence[torch.Tensor], *, apart: Mapping[int, int]) -> int:
        """Give this member what the server has, which since the last of a `flush` is the same for all."""
        del apart
        self._tensors = dict(zip(self._tensors, tensors, strict=True))
        if self._presence.is_met:  # else what it has is old, and this member's own model is better
            self._take_over()
        return 0

    def go_out_anew(self) -> None:
        """Begin once more with what the server has."""
        self._end_given_up()
        self._said = None
        self._counted_of_said[:] = 0
        self._unsettled = {}  # whatever became of that push: the model is another one
        self._go_out()  # from what was heard last, which the model has, where the server is away
        try:
            if not self._presence.is_met:
                self._meet()
            self._presence.met().pull(out=self._mean)
        except LOST as error:
            self._presence.pause(error)
            return
        self._presence.go_on()
        self._take_over()

    @staticmethod
    def _names_of_statistics(num: int) -> list[str]:
        # By these names they are buffers at the server, which an outer step does not move.
        return [f"BatchNorm {number // 2}.running_{('mean', 'var')[number % 2]}" for number in range(num)]

    # ------------------------------------------------------------------ on the thread

    def _round(self, said: Said) -> Heard:
        self._said = said
        return super()._round(said)

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
        """Push and pull; who has ended waits, before it pulls, until all have.

        Returns:
            How many have not ended; that what this member wishes for holds, since each goes by its own; and
            that nothing is left to come.
        """
        del wish, room, new  # what is new, the way of more samples has
        assert not is_mean  # noqa: S101  the outer step's method writes into what it gets
        client, said = self._presence.met(), self._said
        assert said is not None  # noqa: S101  what is own was said
        num_at_work = 1
        num_brought = self._bring(client, own, samples) if weight else 0
        if not is_at_work:
            with self._company.telling_whom_it_misses(client, is_at_work=False):
                entered = client.enter(0.0, at_work=False)
            client.gather(entered.round)
            num_at_work = entered.at_work
            self._company.tell_who_was_given_up(client, entered)
            self._company.count(entered.members)
        before = int(self._mean[TOTALS][0])
        client.pull(out=self._mean)
        came = int(self._mean[TOTALS][0]) - before
        # Else there is nowhere to go; who is not finite goes to what the server has, though nobody came.
        self._version += bool(weight or came or not said.is_finite)
        if num_brought and came > 0:
            self._share = min(num_brought / came, 1.0)
        self._go_out({self._names[id(parameter)] for parameter in said.parameters})
        self._said = None  # whose memory is used again
        self._counted_of_said[:] = 0
        return num_at_work, True, True

    def _bring(self, client: Client, own: Arrays, samples: int) -> int:
        """Push the way, and give of how many samples it is."""
        assert self._said is not None  # noqa: S101  what is own was said
        counts = np.array([samples, self._said.iterations]) - self._counted_of_said
        if not counts[0]:
            return 0  # it had arrived, and its answer was lost
        worth = _worth(self._counts + counts, self._mean[TOTALS] + counts)
        way = {
            name: (self._reference[name] - value) * worth
            for name, value in own.items()
            if name in self._reference
        }
        status = client.status()
        self._company.see_who_is_there(status["workers"], named=NAMED)
        self._tally = _tally(status, client)
        self._unsettled = {name: own[name].copy() for name in way}
        self._counts_unsettled = counts
        receipt = client.push(way | self._counted(own, counts), samples=int(counts[0]))
        while receipt.reason in REREAD:
            client.pull(out=self._mean)
            self._tally = _tally(client.status(), client)  # a server that goes on from a checkpoint: less
            receipt = client.push(way | self._counted(own, counts), samples=int(counts[0]))
        self._has_arrived()  # what was admitted is the server's now; what was not, is not wanted
        was_given_up = _was_given_up(status, client, since_s=time.monotonic() - self._enrolled_s)
        if was_given_up or (self.receipt is not None and receipt.term != self.receipt.term):
            self._enrol(client)
        if was_given_up:
            log.warn(
                "the server had given this member up, as it does whom it does not hear of for a lease "
                "(10 s): did its process stand still, or the network? Others wait for it in flush() again, "
                "from here on; who has ended meanwhile has nothing of what it learns from now on"
            )
        self.receipt = receipt
        if not receipt.applied:
            log.warn(
                f"what this member has learnt of {counts[0]} samples is lost, and it goes on from the "
                f"server's parameters: its push is not taken: {receipt.detail}"
            )
        return int(counts[0])

    def _has_arrived(self) -> None:
        self._reference |= self._unsettled
        self._unsettled = {}
        self._counts += self._counts_unsettled
        self._counted_of_said += self._counts_unsettled

    def _counted(self, own: Arrays, counts: Counts) -> Arrays:
        """Give the values of all that is no parameter."""
        share = np.float32(self._share)
        moved = {n: self._mean[n] + share * (own[n] - self._mean[n]) for n in self._statistics}
        return moved | {TOTALS: self._mean[TOTALS] + counts}

    def _take_over(self) -> None:
        """Give this member what the server has, and let it go out from there, also in what is frozen."""
        super()._take_over()
        self._go_out()

    def _go_out(self, names: Collection[str] | None = None) -> None:
        """Measure from what the server has by now: these parameters, or all.

        What no push of this member has, as it is frozen, stays where it is here, while others may train it.
        """
        names = self._names.values() if names is None else names
        self._reference |= {name: self._mean[name].copy() for name in names}

    # ------------------------------------------------------------------ meeting

    def _brought(self) -> Arrays:
        brought = super()._brought()
        if self._said is not None:  # in mid-run the model is trained on; what is pushed was taken before
            parts = slices(self._said.parameters, self._said.values)
            for parameter, part in zip(self._said.parameters, parts, strict=True):
                brought[self._names[id(parameter)]] = array_of(part)
        return brought | {TOTALS: np.zeros(2, np.int64)}

    def _agree(self, client: Client) -> None:
        refuse(for_arrivals(client.run))
        brought = self._sound(self._brought())
        is_ours = client.init(brought)
        client.set_optimizer(self._outer_step(client))
        self._mean = client.pull(out=brought)
        self._settle(client)
        self._company.note_lost(client.status()["workers"])
        if is_ours or not self._reference:
            self._go_out()
        self._enrol(client)

    def _outer_step(self, client: Client) -> DelayedNesterov:
        """Give the outer step: delayed by as much as the server's, where this member does not say."""
        method, there = self._method, client.run["optimizer"]
        delay = method.delay
        if delay is None and there is not None:
            delay = there["groups"][0]["rule"].get("delay")
        return DelayedNesterov(
            lr=method.lr,
            momentum=method.momentum,
            delay=self._num_expected if delay is None else delay,
            activation=method.activation,
        )

    def _settle(self, client: Client) -> None:
        """Find out what became of a push that was not answered."""
        if self._unsettled and _tally(client.status(), client) > self._tally:
            self._has_arrived()
        self._unsettled = {}

    def _enrol(self, client: Client) -> None:
        """Be one of those who are waited for at the end, as long as the server does not give it up."""
        self._enrolled_s = time.monotonic()
        entered = client.enter(0.0, grace_s=0.0)
        client.gather(entered.round)
        self._company.see(entered.members)

    def _reread(self, client: Client) -> None:
        """Nothing: its way is measured from where it went out."""

    def _begin_together(self, num_expected: int) -> None:
        """Wait for those who are started with this member, as long as nobody has arrived."""
        client = self._presence.met()
        if self.size >= num_expected or self.has_gone_on:
            return
        with self._telling_of_the_others(num_expected):
            entered = client.enter(0.0, grace_s=waiting.BEGIN_S, at_least=num_expected)
        client.gather(entered.round)
        self._company.see(entered.members)
        self._company.warn_of_missing(num_expected)


def _tally(status: Mapping[str, Any], client: Client) -> int:
    """Tell how many pushes the server has applied that came under this member's name."""
    workers = status["workers"]
    return next((int(worker["applied"]) for worker in workers if worker["id"] == client.worker_id), 0)


def _was_given_up(status: Mapping[str, Any], client: Client, *, since_s: float) -> bool:
    """Tell whether the server has taken this member for lost within so many seconds: it is not waited for.

    By its state nobody can tell: it is heard again before it asks.
    """
    ages_s = (float(d["age_s"]) for d in lost_of(status) if d["worker"] == client.worker_id)
    return any(age_s < since_s for age_s in ages_s)


def _worth(own: Counts, of_all: Counts) -> np.float32:
    """Give the size of this member's batches beside that of all members' batches.

    It is computed of whole numbers, so that it is 1 to the bit where all batches are as large, or all are
    this member's.
    """
    (samples, iterations), (all_samples, all_iterations) = own.tolist(), of_all.tolist()
    return np.float32(samples * all_iterations / max(iterations * all_samples, 1))
