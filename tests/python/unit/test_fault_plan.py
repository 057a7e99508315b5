"""Plans of faults: where each is due in what a worker and its server send, and which a seed makes."""

import re
import struct
from pathlib import Path

import pytest

from support.fault_plan import (
    CALM,
    DOWN,
    UP,
    Blackhole,
    Bytes,
    Course,
    Cut,
    HalfClose,
    Hold,
    LostReply,
    Plan,
    after,
    before,
    inside,
    plan,
    plan_of,
    seeded,
)
from support.wire import HEADER_BYTES, KINDS, MAGIC, Frames, read

HEADER_RS = Path(__file__).parents[3] / "rust/core/src/wire/header.rs"
NUMBERS = {kind: number for number, kind in KINDS.items()}
PAYLOAD_BYTES = 100


def frame(kind, request=0, sequence=0, num_bytes=PAYLOAD_BYTES):
    fields = struct.pack("<4sHBxII8xQ", MAGIC, 1, NUMBERS[kind], request, num_bytes, sequence)
    return fields.ljust(HEADER_BYTES, b"\0") + bytes(range(num_bytes))


def push(number):
    """A push of two fragments, as the worker sends it."""
    fragments = [frame("Fragment", sequence=number) for _ in range(2)]
    return b"".join([frame("Push", request=100 + number, sequence=number), *fragments])


def answer(number, last="Receipt"):
    return b"".join(frame(kind, request=100 + number, sequence=number) for kind in ("Root", "Root", last))


def course(steps):
    """What a course has passed on before its first fault, and the fault."""
    passed = b""
    for step in steps:
        if not isinstance(step, bytes):
            return passed, step
        passed += step
    return passed, None


# ---------------------------------------------------------------------------------------- frames


def test_the_kinds_are_those_of_the_header():
    text = HEADER_RS.read_text("utf-8")
    body = re.search(r"pub enum Kind \{(.*?)\n\}", text, re.DOTALL).group(1)
    kinds = {int(number): kind for kind, number in re.findall(r"^    (\w+) = (\d+),$", body, re.MULTILINE)}
    assert len(kinds) > 20
    assert kinds == KINDS
    assert f"pub const HEADER_BYTES: usize = {HEADER_BYTES};" in text


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 164, 165, 10_000])
def test_frames_are_found_however_the_bytes_come(size):
    stream = push(1) + frame("PullEnd", num_bytes=0) + push(2)
    frames, pieces, begun = Frames(), [], []
    for start in range(0, len(stream), size):
        for found, place, piece in frames.pieces(stream[start : start + size]):
            if place == 0:
                begun.append(found)
            pieces.append(piece)
    assert b"".join(pieces) == stream
    whole = ["Push", "Fragment", "Fragment"]
    assert [found.kind for found in begun] == [*whole, "PullEnd", *whole]
    assert frames.rest() == b""


def test_a_header_is_read():
    found = read(frame("Receipt", request=7, sequence=1 << 40, num_bytes=3)[:HEADER_BYTES])
    assert (found.kind, found.request, found.sequence, found.num_bytes) == ("Receipt", 7, 1 << 40, 67)


@pytest.mark.parametrize("foreign", [b"GET / HTTP/1.1\r\n\r\n", b"OFBX" + bytes(100), b"x"])
def test_what_is_no_frame_goes_through_as_it_comes(foreign):
    stream = push(1) + foreign + push(2)
    frames = Frames()
    pieces = [piece for byte in stream for _, _, piece in frames.pieces(bytes([byte]))]
    assert b"".join(pieces) == stream


def test_a_header_that_is_never_complete_is_not_kept():
    frames = Frames()
    assert list(frames.pieces(b"OFBT and more")) == []
    assert frames.rest() == b"OFBT and more"


# ---------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_fault_after_n_bytes_is_after_just_so_many(size):
    stream = push(1)
    for number in range(1, len(stream) + 1):
        fault = Cut(Bytes(number))
        cut = Course(plan(fault))
        assert cut.begin() == []
        chunks = (stream[start : start + size] for start in range(0, len(stream), size))
        steps = (step for chunk in chunks for step in cut.steps(UP, chunk))
        assert course(steps) == (stream[:number], fault)


def test_a_fault_after_no_bytes_is_due_before_anything_comes():
    faults = (Cut(Bytes(0)), Hold(Bytes(0, DOWN)), Hold(Bytes(1)), Hold(before("Push")))
    assert Course(plan(*faults)).begin() == [faults[0], faults[1]]


HEAD = HEADER_BYTES + PAYLOAD_BYTES
PLACES = {
    before("Push"): 0,
    before("Push", 2): 3 * HEAD,
    after("Push", 2): 4 * HEAD,
    before("Fragment", 4): 5 * HEAD,
    inside("Fragment", 2, push=3, payload_byte=17): 8 * HEAD + HEADER_BYTES + 17,
    inside("Fragment", 1, push=3): 7 * HEAD + HEADER_BYTES,
    after("Fragment", 2, push=3): 9 * HEAD,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [1, 99, 10_000])
def test_a_place_in_a_frame_is_where_it_says(place, size):
    stream = b"".join(map(push, (1, 2, 3, 4)))
    cut = Course(plan(Cut(place)))
    chunks = (stream[start : start + size] for start in range(0, len(stream), size))
    passed, fault = course(step for chunk in chunks for step in cut.steps(UP, chunk))
    assert fault == Cut(place)
    assert len(passed) == PLACES[place]


def test_an_answer_is_known_by_its_push():
    cut = Course(plan(Cut(before("Receipt", push=2))))
    list(cut.steps(UP, push(7) + push(9)))
    pulled = frame("Root", request=1) + frame("PullEnd", request=1, num_bytes=0)
    passed, fault = course(cut.steps(DOWN, pulled + answer(7) + answer(9)))
    assert fault is not None
    assert passed == pulled + answer(7) + answer(9)[: 2 * HEAD]


def test_two_faults_at_one_place_both_happen_and_each_once():
    faults = (Hold(after("Push")), HalfClose(Bytes(HEAD)))
    steps = list(Course(plan(*faults)).steps(UP, push(1) + push(2)))
    assert [step for step in steps if not isinstance(step, bytes)] == list(faults)
    assert b"".join(step for step in steps if isinstance(step, bytes)) == push(1) + push(2)


# ---------------------------------------------------------------------------------------- what is lost


@pytest.mark.parametrize("last", ["Receipt", "Refused"])
def test_of_a_lost_reply_nothing_passes_and_it_is_cut_when_the_server_is_done(last):
    lost = Course(plan(LostReply(2)))
    up = push(1) + push(2)
    assert course(lost.steps(UP, up)) == (up, None)
    grant = frame("Grant", request=102, num_bytes=0)
    assert course(lost.steps(DOWN, answer(1) + grant)) == (answer(1) + grant, None)
    assert list(lost.steps(DOWN, answer(2, last)[: 2 * HEAD])) == []
    assert lost.lost() == {"truncated_pushes": 1, "lost_replies": 0}
    assert list(lost.steps(DOWN, answer(2, last)[2 * HEAD :])) == [LostReply(2)]
    assert lost.lost() == {"truncated_pushes": 0, "lost_replies": 1}


def test_pushes_are_open_from_their_first_byte_to_the_last_of_their_receipt():
    calm = Course(CALM)
    assert calm.lost() == {"truncated_pushes": 0, "lost_replies": 0}
    list(calm.steps(UP, push(1)[:HEADER_BYTES]))
    assert calm.lost()["truncated_pushes"] == 1
    list(calm.steps(UP, push(1)[HEADER_BYTES:] + push(2)))
    assert calm.lost()["truncated_pushes"] == 2
    list(calm.steps(DOWN, answer(1)[:-1]))
    assert calm.lost() == {"truncated_pushes": 1, "lost_replies": 1}
    list(calm.steps(DOWN, answer(1)[-1:]))
    assert calm.lost() == {"truncated_pushes": 1, "lost_replies": 0}


def test_what_is_calm_has_no_faults_left_but_a_reply_that_is_lost_in_part():
    calmed = Course(plan(Cut(after("Push", 3)), LostReply(1), LostReply(2)))
    list(calmed.steps(UP, push(1)))
    calmed.calm()
    assert course(calmed.steps(UP, push(2) + push(3))) == (push(2) + push(3), None)
    assert course(calmed.steps(DOWN, answer(2))) == (answer(2), None)
    assert list(calmed.steps(DOWN, answer(1))) == [LostReply(1)]


# ---------------------------------------------------------------------------------------- plans


def test_plans_are_given_for_all_for_some_or_by_a_function():
    one, other = plan(Cut(Bytes(1))), plan(Cut(Bytes(2)))
    assert [plan_of(one, number) for number in range(2)] == [one, one]
    assert [plan_of([one, other], number) for number in range(3)] == [one, other, CALM]
    assert [plan_of({2: one}, number) for number in range(3)] == [CALM, CALM, one]
    assert plan_of(lambda number: plan(Cut(Bytes(number))), 2) == other


def test_a_seed_makes_the_same_plans_in_whatever_order():
    numbers = range(300)
    plans = [seeded(7)(number) for number in numbers]
    assert plans == [seeded(7)(number) for number in reversed(numbers)][::-1]
    assert plans != [seeded(8)(number) for number in numbers]
    assert all(isinstance(made, Plan) for made in plans)
    kinds = {type(fault) for made in plans for fault in made.faults}
    assert kinds == {Cut, LostReply, HalfClose, Hold, Blackhole}
    assert any(made.up.latency_s for made in plans)
    assert any(made.down.bytes_per_s for made in plans)
    assert CALM in plans


def test_a_seed_may_choose_among_plans_of_one_s_own():
    choose = seeded("x", lambda numbers: plan(Cut(Bytes(numbers.randint(1, 6)))))
    made = [choose(number) for number in range(50)]
    assert made == [choose(number) for number in range(50)]
    assert {each.faults[0].at.number for each in made} == {1, 2, 3, 4, 5, 6}
