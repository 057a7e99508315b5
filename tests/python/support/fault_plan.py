"""What is to go wrong on a connection and where, decided without a socket or a clock.

A plan has faults (`Cut`, `LostReply`, `HalfClose`, `Hold`, `Blackhole`), each with its place: after a number
of bytes (`Bytes`), or in a frame (`before`, `inside`, `after`); and how slow each way is (`Line`). `seeded`
makes plans of a seed and the connection's number, and of nothing else.
"""

import enum
import random
from collections import Counter
from dataclasses import dataclass, replace

from support.wire import HEADER_BYTES, Frame, Frames

OF_A_PUSH = ("Push", "Grant", "Root", "Receipt", "Refused")
"""Kinds whose request may be a push's."""
LAST_OF_A_PUSH = ("Receipt", "Refused")
"""When one of these comes, the server is done with the push."""


class Way(enum.Enum):
    """Which way bytes go."""

    UP = "from the worker to the server"
    DOWN = "from the server to the worker"


UP, DOWN = Way.UP, Way.DOWN

# ------------------------------------------------------------------------------------------ places


@dataclass(frozen=True)
class Bytes:
    """Where just so many bytes have gone one way; 0 is before there is a connection to the server."""

    number: int
    way: Way = UP


@dataclass(frozen=True)
class InFrame:
    """Where just so many bytes of a frame have gone, its header among them; None is all of them."""

    kind: str
    nth: int = 1
    """Counted from 1, among those of its kind."""
    push: int | None = None
    """The same, among those that belong to the connection's push of this number, counted from 1."""
    byte: int | None = 0


Place = Bytes | InFrame


def before(kind, nth=1, *, push=None):
    """Where nothing of a frame has gone yet, as in `before("Receipt", push=5)`."""
    return InFrame(kind, nth, push)


def inside(kind, nth=1, *, push=None, payload_byte=0):
    """Where so many bytes of a payload have gone, as in `inside("Fragment", 2, push=3, payload_byte=17)`."""
    return InFrame(kind, nth, push, HEADER_BYTES + payload_byte)


def after(kind, nth=1, *, push=None):
    """Where all of a frame has gone."""
    return InFrame(kind, nth, push, None)


# ------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Cut:
    """Both ends lose the connection, by a reset (RST) or in order (FIN); what went before has arrived."""

    at: Place
    reset: bool = True


@dataclass(frozen=True)
class LostReply:
    """A push is applied and nobody hears of it: when the server has answered, the answer is dropped."""

    push: int
    """Of the connection, counted from 1."""
    reset: bool = True


@dataclass(frozen=True)
class HalfClose:
    """This way ends, as if its sender had shut it down, and what still comes is lost; the other goes on."""

    at: Place


@dataclass(frozen=True)
class Hold:
    """What comes waits, and goes on when the connection is healed: a line that is down and comes back."""

    at: Place
    both_ways: bool = False
    heal_after_s: float | None = None


@dataclass(frozen=True)
class Blackhole:
    """Whatever comes is swallowed, ends too, either way; when it is healed, both ends are reset."""

    at: Place
    heal_after_s: float | None = None


Fault = Cut | LostReply | HalfClose | Hold | Blackhole


@dataclass(frozen=True, kw_only=True)
class Line:
    """How fast one way is."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """What becomes of one connection."""

    faults: tuple[Fault, ...] = ()
    up: Line = Line()
    down: Line = Line()


CALM = Plan()


def plan(*faults, up=CALM.up, down=CALM.down):
    """Say what becomes of a connection, as in `plan(LostReply(push=5), up=Line(latency_s=0.01))`."""
    return Plan(faults, up, down)


def plan_of(plans, number):
    """Choose a connection's plan by its number, counted from 0 in the order in which connections came.

    Args:
        plans: One for all connections, a list or dict by number (the others are calm), or a function of it.
        number: Of the connection.
    """
    if isinstance(plans, Plan):
        return plans
    if callable(plans):
        return plans(number)
    by_number = plans if isinstance(plans, dict) else dict(enumerate(plans))
    return by_number.get(number, CALM)


def any_plan(numbers):
    """Make up a plan with some fault or none, for pushes of some hundred kilobytes."""
    way = numbers.choice((UP, DOWN))
    push = numbers.randint(1, 8)
    faults = (
        (),
        (Cut(Bytes(numbers.randint(0, 2_000_000), way), reset=numbers.random() < 0.5),),
        (Cut(inside("Fragment", numbers.randint(1, 8), payload_byte=numbers.randint(0, 4000))),),
        (Cut(after("Push", push)),),
        (LostReply(push),),
        (HalfClose(Bytes(numbers.randint(0, 2_000_000), way)),),
        (Hold(Bytes(numbers.randint(0, 2_000_000), way), heal_after_s=numbers.uniform(0.0, 0.5)),),
        (Blackhole(Bytes(numbers.randint(0, 2_000_000), way), heal_after_s=numbers.uniform(0.0, 0.5)),),
    )
    line = Line(latency_s=numbers.choice((0.0, 0.0, numbers.uniform(0.0, 0.02))))
    return Plan(numbers.choice(faults), line, replace(line, bytes_per_s=numbers.choice((None, None, 1e7))))


def seeded(seed, choose=any_plan):
    """Make plans, each of the seed and the connection's number alone; `choose` gets a `random.Random`."""
    return lambda number: choose(random.Random(f"{seed}/{number}"))  # noqa: S311  nobody is to guess it


# ------------------------------------------------------------------------------------------ a connection


@dataclass(frozen=True)
class Numbered:
    """A frame, and the how-manieth it is."""

    frame: Frame
    nth: int
    push: int | None
    """The number of the push that it belongs to."""
    nth_of_push: int

    def place_of(self, at):
        """Give the byte of it at which a place is, or None."""
        nth = self.nth if at.push is None else self.nth_of_push
        if (at.kind, at.nth, at.push or self.push) != (self.frame.kind, nth, self.push):
            return None
        return self.frame.num_bytes if at.byte is None else min(at.byte, self.frame.num_bytes)


class Course:
    """What has come of a connection so far, and so which of its faults are due."""

    def __init__(self, plan):
        self._frames = {way: Frames() for way in Way}
        self._passed = dict.fromkeys(Way, 0)
        self._now = dict.fromkeys(Way)
        self._due = [fault for fault in plan.faults if not isinstance(fault, LostReply)]
        self._lost_replies = {fault.push: fault for fault in plan.faults if isinstance(fault, LostReply)}
        self._seen = Counter()
        self._pushes = {}
        """Their numbers, by their requests."""
        self._open, self._answered = set(), set()
        """Pushes of which the server has something and the worker no receipt; and whose receipt has come."""

    def begin(self):
        """Give the faults that are due before anything has gone."""
        return [fault for way in Way for fault in self._reached(way, 0)]

    def steps(self, way, chunk):
        """Give what is to be done with bytes that came, in order: bytes go on, faults happen."""
        for frame, place, piece in self._frames[way].pieces(chunk):
            if place == 0:
                self._now[way] = None if frame is None else self._number(frame)
            yield from self._piece(way, self._now[way], place, piece)

    def calm(self):
        """Have no faults any more, but for an answer that is lost in part already."""
        self._due = []
        self._lost_replies = {push: fault for push, fault in self._lost_replies.items() if push in self._open}

    def rest(self, way):
        """Give the bytes that still wait when one way ends."""
        return self._frames[way].rest()

    def lost(self):
        """Count what is lost where the connection ends now: pushes cut short, and receipts that had come."""
        lost = {"truncated_pushes": self._open - self._answered, "lost_replies": self._open & self._answered}
        return {name: len(pushes) for name, pushes in lost.items()}

    def _number(self, frame):
        if frame.kind == "Push":
            self._pushes[frame.request] = len(self._pushes) + 1
        if frame.kind in OF_A_PUSH:
            push = self._pushes.get(frame.request)
        else:
            push = len(self._pushes) if frame.kind == "Fragment" else None
        self._seen.update([frame.kind, (frame.kind, push)])
        if frame.kind in LAST_OF_A_PUSH and push is not None:
            self._answered.add(push)
        return Numbered(frame, self._seen[frame.kind], push, self._seen[frame.kind, push])

    def _piece(self, way, now, place, piece):
        lost_reply = None if now is None else self._lost_replies.get(now.push)
        if lost_reply and now.frame.kind in (*LAST_OF_A_PUSH, "Root"):
            if now.frame.kind != "Root" and place == 0:
                yield lost_reply
            return
        while True:
            yield from self._reached(way, place)
            if not piece:
                return
            number = min([len(piece), *self._ahead(way, place)])
            self._pass(way, now, place + number, number)
            yield piece[:number]
            piece, place = piece[number:], place + number

    def _pass(self, way, now, place, number):
        self._passed[way] += number
        if now is None:
            return
        if now.frame.kind == "Push":
            self._open.add(now.push)
        elif now.frame.kind in LAST_OF_A_PUSH and place == now.frame.num_bytes:
            self._open.discard(now.push)

    def _distance(self, fault, way, place):
        """Count the bytes until a fault of this way is due; None where it is elsewhere, or is over."""
        at, now = fault.at, self._now[way]
        if isinstance(at, Bytes):
            distance = at.number - self._passed[way] if at.way is way else None
        else:
            there = None if now is None else now.place_of(at)
            distance = None if there is None else there - place
        return None if distance is None or distance < 0 else distance

    def _reached(self, way, place):
        reached = [fault for fault in self._due if self._distance(fault, way, place) == 0]
        self._due = [fault for fault in self._due if fault not in reached]
        return reached

    def _ahead(self, way, place):
        distances = (self._distance(fault, way, place) for fault in self._due)
        return [distance for distance in distances if distance]
