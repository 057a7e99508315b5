"""Rounds of `offbeat.Client`: what each has made on its own is put together, by whoever is there."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, StateError
from offbeat.rounds import Entered, Gathered, New
from support.freezing import freeze, wake
from support.waiting import AT_ONCE_S, wait_for

MODEL = {"w": np.zeros(70_000, np.float32), "b": np.zeros(3, np.float32)}
TIMEOUT_S = 40
GRACE_S = 2

WAITING = """
import sys, offbeat
client = offbeat.Client(sys.argv[1])
try:
    client.enter(1)
except KeyboardInterrupt:
    client.close(finished=False)
    print("interrupted", flush=True)
"""
DYING = """
import sys, offbeat
client = offbeat.Client(sys.argv[1], worker_id="dying", contribution="delta")
while (entered := client.enter(1)).members < 3:
    client.gather(entered.round)
print("in", flush=True)
sys.stdin.readline()
"""


def delta(value):
    return {name: np.full_like(array, value) for name, array in MODEL.items()}


@pytest.fixture
def server(host):
    with host.serving(MODEL) as remote:
        yield remote


@pytest.fixture
def join(server):
    """Make clients, which are closed after the test."""
    with ExitStack() as stack:

        def made(**keywords):
            client = stack.enter_context(offbeat.Client(server.address, contribution="delta", **keywords))
            client.pull()
            return client

        yield made


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def enter_with(client, num):
    """Take part, with nothing to give, until so many are in the round."""
    while (entered := client.enter(1)).members < num:
        client.gather(entered.round)
    return entered


def acquaint(threads, clients):
    """Let all of them be in one round, as those are who have once met."""
    meeting = [threads.submit(enter_with, client, len(clients)) for client in clients]
    (number,) = {one.result(TIMEOUT_S).round for one in meeting}
    gathering = [threads.submit(client.gather, number) for client in clients]
    assert all(one.result(TIMEOUT_S).missing == 0 for one in gathering)
    return number


def take_part(client, samples, value):
    """Give a difference of so much to one round; return what it was told, and what it read then."""
    return give(client, client.enter(samples), value)


def give(client, entered, value):
    receipt = client.push(delta(value * entered.share))
    assert receipt.applied
    assert receipt.weight == 1
    gathered = client.gather(entered.round)
    return entered, gathered, client.pull()


def all_at_once(threads, clients, *arguments):
    return [
        taking.result(TIMEOUT_S) for taking in [threads.submit(take_part, c, *arguments) for c in clients]
    ]


def until_entered(server, num):
    wait_for(lambda: server.status()["rounds"]["open_entrants"] == num)


def test_what_each_has_made_is_put_together_by_its_share_and_all_read_the_same(server, join, threads):
    assert server.status()["rounds"] == {"closed": 0, "missing": 0, "open_entrants": 0}
    clients = [join() for _ in range(3)]
    before = acquaint(threads, clients)
    for number in range(1, 4):
        samples, values = (1, 2, 5), (8.0, 16.0, 40.0)
        taking = [threads.submit(take_part, *one) for one in zip(clients, samples, values, strict=True)]
        told = [one.result(TIMEOUT_S) for one in taking]
        assert [entered for entered, _, _ in told] == [
            Entered(before + number, count / 8, 3, 3) for count in samples
        ]
        assert {gathered for _, gathered, _ in told} == {Gathered(0, 3 * number)}
        for _, _, read in told:
            assert all((array == 30.0 * number).all() for array in read.values())  # 1 + 4 + 25
    assert server.status()["rounds"] == {"closed": before + 3, "missing": 0, "open_entrants": 0}


def test_without_samples_nothing_moves_and_who_has_no_more_data_only_waits(join, threads):
    clients = [join(), join()]
    acquaint(threads, clients)
    told = all_at_once(threads, clients, 0, 7.0)
    assert all(entered.share == 0 and (read["w"] == 0).all() for entered, _, read in told)
    works = threads.submit(take_part, clients[0], 3, 7.0)
    ended = clients[1].enter(0, at_work=False)
    assert (ended.share, ended.members, ended.at_work) == (0, 2, 1)
    clients[1].gather(ended.round)
    assert works.result(TIMEOUT_S)[0].share == 1
    assert (clients[1].pull()["w"] == 7).all()


def test_member_that_is_killed_in_mid_round_holds_nobody_up(server, join, threads):
    clients = [join(), join()]
    meeting = [threads.submit(enter_with, client, 3) for client in clients]
    with subprocess.Popen(
        [sys.executable, "-c", DYING, server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout.readline() == "in\n"
        entered = [one.result(TIMEOUT_S) for one in meeting]
        giving = [threads.submit(give, *one, 6.0) for one in zip(clients, entered, strict=True)]
        wait_for(lambda: server.status()["version"] == 2)  # their pushes are there, and they wait
        program.kill()
        for one in giving:
            _, gathered, read = one.result(AT_ONCE_S)
            assert (gathered.missing, read["w"].max(), read["w"].min()) == (1, 4, 4)
    told = all_at_once(threads, clients, 1, 4.0)
    assert [(entered.members, gathered.missing) for entered, gathered, _ in told] == [(2, 0)] * 2
    assert all((read["w"] == 8).all() for _, _, read in told)
    assert server.status()["rounds"]["missing"] == 1


def test_who_comes_late_is_in_the_next_round_and_who_is_slow_holds_nobody_up_beyond_the_grace(
    server, join, threads
):
    first, late = join(), join()
    assert first.enter(1).members == 1
    waits = threads.submit(take_part, late, 1, 2.0)  # for the first, which is at work
    until_entered(server, 1)
    first.gather(1)
    assert take_part(first, 1, 2.0)[0].members == waits.result(TIMEOUT_S)[0].members == 2
    alone = first.enter(1, grace_s=0.05)
    assert (alone.members, alone.share) == (1, 1)
    first.gather(alone.round)
    waits = threads.submit(first.enter, 1, grace_s=float("inf"))
    until_entered(server, 1)
    late.close()
    assert waits.result(AT_ONCE_S).members == 1


def test_a_standstill_of_the_server_is_taken_out_of_a_rounds_grace(host, server, join, threads):
    clients = [join(), join()]
    acquaint(threads, clients)
    waits = threads.submit(clients[0].enter, 1, grace_s=GRACE_S)
    until_entered(server, 1)
    freeze(host)
    threading.Event().wait(2 * GRACE_S)  # which is what is tested
    wake(host)
    server.status()  # whatever was due by its clock has been done
    assert clients[1].enter(1).members == waits.result(TIMEOUT_S).members == 2


def test_an_answer_is_given_again_and_a_round_that_is_not_known_is_over(join):
    client = join()
    entered = client.enter(3)
    assert client.enter(5, at_work=False) == entered == Entered(1, 1.0, 1, 1)
    assert client.gather(1) == client.gather(1) == client.gather(2**40) == Gathered(0, 0)
    assert client.enter(5).round == 2


def test_ctrl_c_ends_the_wait_of_a_client_and_its_close_ends_the_others(server, join):
    client = join()
    assert client.enter(1).round == 1
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            WAITING,
            server.address,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        until_entered(server, 1)
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=TIMEOUT_S)[0] == "interrupted\n"
    until_entered(server, 0)
    client.gather(1)
    assert client.enter(1).members == 1


def test_other_threads_run_while_a_client_waits_and_are_refused_in_it(server, join, threads):
    client, other = join(), join()
    entered = client.enter(1)
    waits = threads.submit(other.enter, 1)
    until_entered(server, 1)  # which took the GIL, as the wait did not
    with pytest.raises(StateError, match="another thread"):
        other.status()
    client.gather(entered.round)
    assert client.enter(1).members == waits.result(TIMEOUT_S).members == 2


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "3", None, True])
def test_what_cannot_be_entered_with_is_refused_naming_all_of_it(join, samples):
    with pytest.raises(ConfigError) as refused:
        join().enter(samples, at_work=1, grace_s=-1)
    said = str(refused.value)
    assert f"samples is {samples!r}" in said
    assert "at_work is 1" in said
    assert "grace_s is -1" in said


@pytest.mark.parametrize("number", [0, -1, 1.0, "1", None, 2**64])
def test_what_is_no_round_is_refused(join, number):
    with pytest.raises(ConfigError, match=r"round is .*client\.enter"):
        join().gather(number)


def test_differences_are_added_as_they_are_and_another_kind_is_refused(server, join):
    client = join()
    assert client.push(delta(2.5)).applied
    assert (client.pull()["b"] == 2.5).all()
    with pytest.raises(ConfigError, match="second optimizer"):
        client.set_optimizer(optim.SGD(lr=0.1))
    with offbeat.Client(server.address) as other:
        other.pull()
        with pytest.raises(ConfigError, match="this run's pushes carry"):
            other.push(delta(1.0))
    with pytest.raises(ConfigError, match=r"contribution is 'sum': give .gradient. or .delta."):
        offbeat.Client(server.address, contribution="sum")


def test_who_takes_part_by_other_terms_is_refused_naming_both(server, join):
    one, other = join(), join()
    entered = one.enter(1, terms="the mean")
    assert server.status()["rounds"]["terms"] == "the mean"
    with pytest.raises(StateError, match="by the median, and those who are there by the mean"):
        other.enter(1, terms="the median")
    one.gather(entered.round)
    assert one.enter(1, terms="the mean").members == 1, "it is not waited for"


def test_terms_change_when_all_wish_for_it_and_so_many_begin_together(server, join, threads):
    clients = [join(), join(), join()]
    together = {"at_least": 3, "grace_s": float("inf"), "terms": "the mean"}
    waits = [threads.submit(client.enter, 0, **together) for client in clients[:2]]
    until_entered(server, 2)
    first = clients[2].enter(0, **together)
    assert [first.round, *(one.result(TIMEOUT_S).round for one in waits)] == [1, 1, 1]
    for number, wishes in enumerate((["the mode", None, "the mode"], ["the mode"] * 3), 1):
        gathering = [threads.submit(client.gather, number) for client in clients]
        assert all(one.result(TIMEOUT_S).missing == 0 for one in gathering)
        entering = [
            threads.submit(client.enter, 1, terms="the mean", wish=wish)
            for client, wish in zip(clients, wishes, strict=True)
        ]
        assert {one.result(TIMEOUT_S).agreed for one in entering} == {number == 2}
    assert server.status()["rounds"]["terms"] == "the mode"


def test_what_is_new_goes_by_a_share_of_its_own_where_all_say_the_same_of_it(join, threads):
    clients = [join(), join()]
    acquaint(threads, clients)
    last = (1 << 64) - 1
    for of, others, share in (
        (7, New(10, 7), 0.75),
        (last, New(10, last), 0.75),
        (7, New(10, 8), None),
        (7, None, None),
    ):
        waits = threads.submit(clients[0].enter, 0, new=New(30, of))
        entered = clients[1].enter(5, new=others)
        first = waits.result(TIMEOUT_S)
        assert (first.share, first.new_share) == (0, share)
        assert (entered.share, entered.new_share) == (1, None if share is None else 1 - share)
        gathering = [threads.submit(client.gather, entered.round) for client in clients]
        assert all(one.result(TIMEOUT_S).missing == 0 for one in gathering)


@pytest.mark.parametrize("new", [(1, 2), New(-1, 0), New(float("nan"), 0), New(1, -1), New(1, 1 << 64)])
def test_what_cannot_be_new_is_refused_with_the_remedy(new, join):
    with pytest.raises(ConfigError, match=r"new is .*: give New\(samples, of\)"):
        join().enter(1, new=new)


def test_what_cannot_be_terms_is_refused_naming_all_of_it(join):
    with pytest.raises(ConfigError) as refused:
        join().enter(1, at_least=0, terms=1, wish=2)
    assert all(text in str(refused.value) for text in ("at_least is 0", "terms is 1", "wish is 2"))
    with pytest.raises(ConfigError, match="terms has 1025 bytes: give 1024 at most"):
        join().enter(1, terms="x" * 1025)
    with pytest.raises(ConfigError, match=r'wish is "a\\nWARNING": give words without control characters'):
        join().enter(1, wish="a\nWARNING")
