"""What a member at a server does or leaves undone holds up no other."""

import operator
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import offbeat
from offbeat.averaging import EASGD, Average, DiLoCo
from offbeat.errors import ClosedError, ConnectionLostError, StateError
from support.averaging import LOSS, Counter, held_number, model, step, warned
from support.fault_proxy import FaultProxy
from support.waiting import wait_for

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("members_in_one_process")]

AT_ONCE_S = 20.0


@pytest.fixture
def server():
    with offbeat.ParameterServer(transaction="model") as running:
        yield running


def averaging(trained, server, **settings):
    """Make a member that averages after each iteration."""
    settings = {"averaging_frequency": 1, "overlap": False} | settings
    return offbeat.AsyncModelAverager(
        trained, 1, 0, communication_backend="tcp", server_address=server.address, **settings
    )


class Member:
    """A member that averages after each iteration, and can be told how far to train on a thread."""

    def __init__(self, server, **settings):
        self.model = model()
        self.averager = averaging(self.model, server, **settings)
        self.live = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, number=0):
        self.averager.step(step(self.model, self.live, 0, number))

    def behind(self):
        """Train an iteration on a thread; give that."""
        thread = threading.Thread(target=self.train, daemon=True)
        thread.start()
        return thread

    def behind_until_interrupted(self):
        """Train an iteration on a thread; give what tells whether an interrupt has ended that."""
        is_interrupted = Future()

        def train():
            try:
                self.train()
            except KeyboardInterrupt:
                is_interrupted.set_result(True)
            else:
                is_interrupted.set_result(False)

        threading.Thread(target=train, daemon=True).start()
        return is_interrupted


def until_entered(server, num):
    wait_for(lambda: server.status()["rounds"]["open_entrants"] == num)


def acquainted(server, *members):
    """Let all of them be in one round: from then on each waits for the others."""
    members[0].train()
    for number, member in enumerate(members[1:], 1):
        entering = [member.behind()]
        until_entered(server, 1)
        entering += [other.behind() for other in members[:number]]
        for thread in entering:
            thread.join(AT_ONCE_S)
    assert all(member.averager.world_size == len(members) for member in members)


def test_one_that_closes_in_mid_round_and_lives_on_is_waited_for_no_more(server):
    stays, leaves = Member(server, overlap=True), Member(server, overlap=True)

    def average():
        stays.train()
        wait_for(stays.averager._turns.rounds.is_there)

    average()
    leaves.train()  # its round waits for the other, which is at work
    until_entered(server, 1)
    assert not leaves.averager._turns.rounds.is_there()
    leaves.averager.close()
    average()  # in which the one that leaves is still
    assert stays.averager.world_size == 2
    wait_for(lambda: [w["state"] for w in server.status()["workers"]].count("finished") == 1)
    average()
    assert stays.averager.world_size == 1
    with pytest.raises(ClosedError, match="takes part no more"):
        leaves.averager.train_step(
            inputs=torch.ones(1, 6), targets=torch.zeros(1).long(), optimizer=leaves.live, loss_fn=LOSS
        )
    stays.averager.close()


def test_one_that_has_given_up_a_round_begins_the_next_when_its_thread_is_through(server):
    """As a FaultTolerantTrainer gives up one, whose `train` broke off and is called again."""
    ones = [Counter(by=1.0), Counter(by=3.0)]
    stays = averaging(ones[0].model, server, overlap=True)
    ones[0].train(stays)
    wait_for(stays._turns.rounds.is_there)  # from then on it is waited for
    gives_up = averaging(ones[1].model, server, overlap=True)
    ones[1].train(gives_up)
    until_entered(server, 1)
    gives_up.give_up()
    ones[1].train(gives_up)
    assert gives_up.is_under_way
    gives_up.give_up()
    ending = [threading.Thread(target=one.flush, daemon=True) for one in (gives_up, stays)]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()
    assert ones[0].value == ones[1].value == held_number(server)
    stays.close()
    gives_up.close()


def test_a_way_that_float32_cannot_hold_adds_nothing_and_holds_up_nobody(server):
    near, far = Member(server), Member(server)
    acquainted(server, near, far)
    with torch.no_grad():
        far.model[0].bias.fill_(3e38)
    for value, num_told in (
        (3e38, 0),
        (-3e38, 1),
    ):  # from the mean, of which it then is a half, and from there
        with torch.no_grad():
            far.model[0].bias.fill_(value)
        with warned() as told:
            entering = far.behind()
            until_entered(server, 1)
            near.train()
            entering.join(AT_ONCE_S)
        assert not entering.is_alive()
        assert len([text for text in told if "so far from the mean" in text]) == num_told
    assert all(
        torch.equal(a, b) for a, b in zip(near.model.parameters(), far.model.parameters(), strict=True)
    )
    assert server.status()["rounds"]["missing"] == 0
    near.averager.close()
    far.averager.close()


def test_one_whose_push_fails_leaves_so_that_nobody_waits_for_it(server, monkeypatch):
    stays, fails = Member(server), Member(server)
    acquainted(server, stays, fails)

    def failing(*_, **__):
        raise MemoryError("no room for it")

    entering = stays.behind()
    until_entered(server, 1)
    monkeypatch.setattr(fails.averager._turns.members._presence.met(), "push", failing)
    with pytest.raises(MemoryError):
        fails.train()
    entering.join(AT_ONCE_S)
    assert not entering.is_alive()
    assert server.status()["rounds"]["missing"] == 1
    stays.averager.close()
    fails.averager.close()


@pytest.mark.parametrize(
    ("failure", "parting"),
    [
        (ZeroDivisionError("boom"), ("left", "left before its work was done: ZeroDivisionError: boom")),
        (SystemExit(0), ("finished", "finished")),
    ],
)
def test_one_whose_block_ends_by_an_exception_leaves_and_the_server_says_by_which(server, failure, parting):
    with pytest.raises(type(failure)), averaging(model(), server):
        raise failure
    (worker,) = server.status()["workers"]
    assert (worker["state"], worker["cause"]) == parting


def test_ctrl_c_as_a_wait_ends_leaves_the_round_to_be_waited_for_again(server, monkeypatch):
    stays, breaks_off = Member(server), Member(server)
    acquainted(server, stays, breaks_off)
    members = breaks_off.averager._turns.members

    @contextmanager
    def broken_off():
        monkeypatch.undo()
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(members, "telling", broken_off)
    interrupted = breaks_off.behind_until_interrupted()
    until_entered(server, 1)
    stays.train()
    assert interrupted.result(AT_ONCE_S)
    before = breaks_off.averager.averaging_round
    threads = [member.behind() for member in (stays, breaks_off)]
    for thread in threads:
        thread.join(AT_ONCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert breaks_off.averager.averaging_round > before
    assert server.status()["rounds"]["missing"] == 0
    stays.averager.close()
    breaks_off.averager.close()


def test_members_that_are_set_differently_are_told_in_what(server):
    first = Member(server)
    first.train()
    for settings, said in (
        ({"method": "diloco"}, r"method is DiLoCo\(lr=0.7, .*\) here and Average\(\) there"),
        ({"averaging_frequency": 7}, "averaging_frequency is 7 here and 1 there"),
    ):
        with pytest.raises(StateError, match=f"otherwise than those at the server: {said}: give the same"):
            Member(server, **settings)
    first.train()
    assert first.averager.averaging_round == 2, "nobody waits for those"
    # Both come before either has been in a round, and so before the server could tell.
    first.averager.close()
    one, other = Member(server), Member(server, method="easgd")
    one.train()
    with pytest.raises(
        StateError, match=r"takes part in rounds by .*easgd.*, and those who are there by .*average"
    ):
        other.train()
    one.train()
    assert one.averager.averaging_round == 2


def test_members_change_method_and_frequency_in_the_same_round(server):
    one, other = Member(server), Member(server)
    acquainted(server, one, other)
    one.averager.method = "diloco"
    one.averager.averaging_frequency = 2

    def both():
        entering = other.behind()
        until_entered(server, 1)
        one.train()
        entering.join(AT_ONCE_S)
        assert not entering.is_alive()

    both()
    assert one.averager.method == other.averager.method == Average()
    other.averager.method = "diloco"
    other.averager.averaging_frequency = 2
    both()
    assert one.averager.method == other.averager.method == DiLoCo()
    assert one.averager.averaging_frequency == other.averager.averaging_frequency == 2
    rounds = one.averager.averaging_round
    for member in (one, other):
        member.train()  # the first of two
    both()
    assert one.averager.averaging_round == rounds + 1
    assert all(
        torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_a_state_s_frequency_is_wished_for_at_a_server_and_in_force_once_all_want_it(server):
    first = Counter()
    with averaging(first.model, server) as ours:
        ours.averaging_frequency, ours.overlap = 3, 2
        first.train(ours, 2)
        assert (ours.averaging_frequency, ours.overlap) == (3, 2)
        state = ours.state_dict()
    with offbeat.ParameterServer(transaction="model") as other, averaging(Counter().model, other) as alone:
        alone.model.load_state_dict(first.model.state_dict())
        with warned() as told:
            alone.load_state_dict(state)
        assert (alone.averaging_frequency, alone.overlap) == (1, False)
        assert not told
        alone.step(1)
        assert (alone.averaging_frequency, alone.overlap) == (3, 2)


def test_members_that_train_other_parameters_are_told_and_freeze_them_in_the_same_round(server):
    one, other = Member(server), Member(server)
    acquainted(server, one, other)
    frozen = model()
    frozen[0].requires_grad_(requires_grad=False)
    with pytest.raises(StateError) as refused:
        averaging(frozen, server)
    text = str(refused.value)
    assert re.search("trained parameters are 2 of 4, [0-9a-f]{8} here and 4 of 4 there: give the same", text)
    assert "(requires_grad)" in text

    def both():
        with torch.no_grad():
            other.model[0].bias.fill_(7.0)
        entering = other.behind()
        until_entered(server, 1)
        one.train()
        entering.join(AT_ONCE_S)
        assert not entering.is_alive()
        return torch.equal(one.model[0].bias, other.model[0].bias)

    one.model[0].requires_grad_(requires_grad=False)
    with warned() as told:
        assert [both() for _ in range(3)] == [True] * 3, "one alone has frozen it"
    assert [text for text in told if "members want different things" in text and "requires_grad" in text]
    other.model[0].requires_grad_(requires_grad=False)
    assert [both() for _ in range(2)] == [True, False], "from the round on in which all want it"
    with pytest.raises(StateError, match=r"4 of 4 here and 2 of 4, "):
        Member(server)
    averaging(frozen, server).close()
    one.averager.close()
    other.averager.close()


def test_one_that_is_away_when_all_change_method_follows_them(server):
    with FaultProxy(server.address) as proxy:
        stays, away = Member(server), Member(proxy)
        acquainted(server, stays, away)
        stays.averager.method = away.averager.method = "diloco"
        proxy.cut()
        wait_for(lambda: any(worker["state"] == "lost" for worker in server.status()["workers"]))
        stays.train()
        assert stays.averager.method == DiLoCo(), "all who are there wished for it"
        for method in (DiLoCo(), DiLoCo()):
            entering = away.behind()
            until_entered(server, 1)
            stays.train()
            entering.join(AT_ONCE_S)
            assert not entering.is_alive()
            assert away.averager.method == method
        assert server.status()["rounds"]["missing"] == 0
        assert away.averager.world_size == 2
        stays.averager.close()
        away.averager.close()


@pytest.mark.parametrize(
    ("what", "wish", "iterations"),
    [("method", DiLoCo(lr=1.0, momentum=0.0), 1), ("averaging_frequency", 2, 2)],
)
def test_what_one_learns_that_is_away_when_all_change_is_brought_in_the_round_after(
    server, what, wish, iterations
):
    """In the next round, in which it is told, it is with nothing, and stays as it is."""
    with FaultProxy(server.address) as proxy:
        ones = [Counter(by=1.0), Counter(by=5.0)]
        stays = averaging(ones[0].model, server)
        ones[0].train(stays)
        away = averaging(ones[1].model, proxy)

        def both(num_stays, num_away):
            entering = threading.Thread(target=ones[1].train, args=(away, num_away), daemon=True)
            entering.start()
            until_entered(server, 1)
            ones[0].train(stays, num_stays)
            entering.join(AT_ONCE_S)
            assert not entering.is_alive()

        both(1, 1)
        assert [one.value for one in ones] == [4.0, 4.0], "(2 + 6) / 2"
        for averager in (stays, away):
            setattr(averager, what, wish)
        proxy.cut()
        wait_for(lambda: any(worker["state"] == "lost" for worker in server.status()["workers"]))
        ones[0].train(stays)
        assert getattr(stays, what) == wish, "all who are there want it"
        both(iterations, 1)
        assert getattr(away, what) == wish
        assert [one.value for one in ones] == [5.0 + iterations, 9.0]
        both(iterations, iterations)
        samples = iterations, 1 + iterations
        values = 5.0 + 2 * iterations, 9.0 + 5 * iterations
        mean = sum(map(operator.mul, samples, values)) / sum(samples)
        assert [one.value for one in ones] == [pytest.approx(mean)] * 2
        assert held_number(server) == ones[0].value
        stays.close()
        away.close()


@pytest.mark.parametrize("method", [DiLoCo(lr=1.0, momentum=0.5), EASGD()])
def test_one_that_was_away_from_rounds_of_others_begins_with_the_mean_as_one_that_joins(server, method):
    """Its outer step, or its spring, would be from where the others were before them."""
    with FaultProxy(server.address) as proxy:
        ones = [Counter(), Counter()]
        stays = averaging(ones[0].model, server, method=method)
        ones[0].train(stays)
        away = averaging(ones[1].model, proxy, method=method)

        def both():
            entering = threading.Thread(target=ones[1].train, args=(away,), daemon=True)
            entering.start()
            until_entered(server, 1)
            ones[0].train(stays)
            entering.join(AT_ONCE_S)
            assert not entering.is_alive()

        both()
        both()
        proxy.cut()
        wait_for(lambda: any(worker["state"] == "lost" for worker in server.status()["workers"]))
        ones[0].train(stays, 10)
        own = ones[1].value + 1.0
        both()
        kept = 0.0 if isinstance(method, DiLoCo) else 1.0 - 0.9 / 2
        mean = held_number(server)
        assert ones[1].value == pytest.approx(mean + kept * (own - mean), rel=1e-6)
        stays.close()
        away.close()


def test_a_round_s_mean_is_within_a_millionth_of_the_exact_one(server):
    members = [Member(server) for _ in range(3)]
    acquainted(server, *members)
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        weight = members[0].model[0].weight
        values = [weight.detach() + torch.randn(weight.shape, generator=random) for _ in members]
        sizes = [1, 4, 7]
        exact = sum(size * value.double() for size, value in zip(sizes, values, strict=True)) / sum(sizes)
        entering = []
        for member, value, size in zip(members, values, sizes, strict=True):
            with torch.no_grad():
                member.model[0].weight.copy_(value)
            entering.append(threading.Thread(target=member.averager.step, args=(size,), daemon=True))
            entering[-1].start()
        for thread in entering:
            thread.join(AT_ONCE_S)
        for member in members:
            off = (member.model[0].weight.detach().double() - exact).abs().max()
            assert off <= 1e-6 * exact.abs().max()


def test_of_members_that_measured_from_an_older_mean_the_next_round_has_all_by_their_samples(server):
    ones, averagers = [], []

    def join(by, samples):
        ones.append(Counter(by, samples))
        averagers.append(averaging(ones[-1].model, server, averaging_frequency=2))

    def both(do):
        entering = threading.Thread(target=do, args=(1,), daemon=True)
        entering.start()
        until_entered(server, 1)
        do(0)
        entering.join(AT_ONCE_S)
        assert not entering.is_alive()

    def train(number):
        ones[number].train(averagers[number], 2)

    def flush(number):
        averagers[number].flush()

    join(by=1.0, samples=1)
    train(0)
    join(by=5.0, samples=3)
    both(train)
    assert ones[0].value == ones[1].value == 2.0 + (2 * 2.0 + 6 * 10.0) / 8
    before = held_number(server)
    server.load_state_dict(server.state_dict())  # a life of its own, of which nobody has read anything
    both(train)
    assert [one.value for one in ones] == [before + 2.0, before + 10.0]
    both(train)
    before += (4 * 4.0 + 12 * 20.0) / 16  # of two rounds each
    assert held_number(server) == ones[0].value == ones[1].value == before
    server.load_state_dict(server.state_dict())
    for one, averager in zip(ones, averagers, strict=True):
        one.train(averager)  # up to no round
    both(flush)
    before += (1 * 1.0 + 3 * 5.0) / 4
    assert held_number(server) == ones[0].value == ones[1].value == before
    for averager in averagers:
        averager.close()


@pytest.mark.parametrize("settings", [{}, {"method": "diloco", "asynchronous": True}])
def test_who_waits_for_the_others_to_begin_says_so_and_for_how_long(server, monkeypatch, settings):
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.1)
    monkeypatch.setattr("offbeat.averaging.waiting.BEGIN_S", 1.5)
    place = {"communication_backend": "tcp", "server_address": server.address}
    with warned() as told:
        offbeat.AsyncModelAverager(model(), 3, 0, **place, **settings).close()
    assert len(told) == 2
    assert "1 of 3 are there; after 1.5 s at most" in told[0]
    assert "as where a FaultTolerantTrainer of the others is done, give their number (world_size=)" in told[0]
    assert told[1].startswith("1 of 3 members have come, and begin without the others")
    assert told[1].endswith("one that was refused, as for other settings, has said why itself")


def test_who_waits_though_all_have_come_to_begin_says_for_whom_of_before_the_servers_restart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.5)
    settings = {"transaction": "model", "checkpoint_dir": tmp_path}

    with ThreadPoolExecutor(2) as threads:

        def begin(server):
            place = {"communication_backend": "tcp", "server_address": server.address}
            return list(
                threads.map(lambda rank: offbeat.AsyncModelAverager(model(), 2, rank, **place), range(2))
            )

        with offbeat.ParameterServer(**settings) as first:
            port = int(first.address.rpartition(":")[2])
            gone = begin(first)
            names = [averager._turns.members._presence.name for averager in gone]
            first.stop(restarting=True)
        with warned() as told, offbeat.ParameterServer(port=port, **settings) as again:
            for averager in begin(again) + gone:
                averager.close()
    waiting = [text for text in told if text.startswith("all 2 members that begin together are there")]
    assert len(waiting) == 2
    assert all(name in text for text in waiting for name in names)
    assert not [text for text in told if "2 of 2" in text]


def test_who_waits_at_the_end_for_one_of_before_the_servers_restart_says_for_whom(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.1)
    settings = {"transaction": "model", "checkpoint_dir": tmp_path, "rejoin_grace_s": 0.5}
    with offbeat.ParameterServer(**settings) as first:
        port = int(first.address.rpartition(":")[2])
        stays, dies = Member(first), Member(first)
        acquainted(first, stays, dies)
        first.stop(restarting=True)
    name = dies.averager._turns.members._presence.name
    with warned() as told, offbeat.ParameterServer(port=port, **settings) as again:
        stays.averager._turns.rounds.end_alike()  # as at the end of `flush`
        assert [worker["state"] for worker in again.status()["workers"] if worker["id"] == name] == ["lost"]
        for member in (stays, dies):
            member.averager.close()
    waiting = [text for text in told if text.startswith(f"waiting for {name}, who may be training still")]
    assert len(waiting) == 1
    assert "five times its rejoin_grace_s" in waiting[0]


def test_one_that_joins_begins_with_the_mean_and_no_velocity_and_comes_to_where_the_others_are(server):
    settings = {"method": DiLoCo(lr=0.5, momentum=0.5)}
    first, late = Counter(), Counter()
    stays = averaging(first.model, server, **settings)
    first.train(stays, 4)
    joins = averaging(late.model, server, **settings)
    assert late.value == held_number(server) != first.value, "where the outer step was taken from"
    apart = []
    for _ in range(12):
        entering = threading.Thread(target=late.train, args=(joins,), daemon=True)
        entering.start()
        until_entered(server, 1)
        first.train(stays)
        entering.join(AT_ONCE_S)
        apart.append(abs(first.value - late.value))
    assert apart[0] > 0.2
    assert apart[-1] < apart[0] / 500, "for want of what the others had kept"
    for averager in (stays, joins):
        averager.close()


def test_one_that_joins_while_shares_are_pushed_begins_with_the_mean_of_all_of_them(server, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.1)
    first, second = Member(server), Member(server)
    acquainted(server, first, second)
    client = second.averager._turns.members._presence.met()
    push, may_push, version = client.push, threading.Event(), server.status()["version"]

    def held(*arguments, **settings):
        assert may_push.wait(2 * AT_ONCE_S)
        return push(*arguments, **settings)

    monkeypatch.setattr(client, "push", held)
    entering = [first.behind(), second.behind()]
    wait_for(lambda: server.status()["version"] == version + 1)
    with warned() as told, ThreadPoolExecutor() as pool:
        joining = pool.submit(Member, server)
        wait_for(lambda: [text for text in told if "to begin with its mean" in text] or joining.done())
        may_push.set()
        late = joining.result(AT_ONCE_S)
    for thread in entering:
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()
    assert all(map(torch.equal, late.model.parameters(), first.model.parameters()))
    for member in (first, second, late):
        member.averager.close()


def test_those_who_end_do_so_with_one_that_has_just_come_and_was_in_no_round(server):
    first, second = Member(server), Member(server)
    acquainted(server, first, second)
    late = Member(server)
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(one.averager.flush) for one in (first, second)]
        until_entered(server, 2)
        for number in range(3):
            late.train(number)
        late.averager.flush()
        for one in ended:
            one.result(timeout=AT_ONCE_S)
    held = [torch.cat([p.flatten() for p in one.model.parameters()]) for one in (first, second, late)]
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[0], held[2])
    assert [one.averager.world_size for one in (first, second, late)] == [3, 3, 3]


@pytest.mark.slow
def test_who_has_come_and_trains_nothing_is_waited_for_at_the_end_for_a_moment_and_once(server):
    first, second = Member(server), Member(server)
    acquainted(server, first, second)
    idle = Member(server)
    with warned() as told, ThreadPoolExecutor() as pool:
        for limit_s in (3 * AT_ONCE_S, AT_ONCE_S):
            for one in [pool.submit(one.averager.flush) for one in (first, second)]:
                one.result(timeout=limit_s)
    assert (
        len(
            [
                text
                for text in told
                if "this has ended without worker-2 (joined), at the server, and in no round" in text
            ]
        )
        == 2
    )
    assert len([text for text in told if "ended without" in text]) == 2
    assert idle.averager.averaging_round == 0


def test_those_who_end_together_only_to_go_on_wait_for_nobody_who_was_in_no_round(server):
    first, second = Member(server), Member(server)
    acquainted(server, first, second)
    idle = Member(server)
    with warned() as told, ThreadPoolExecutor() as pool:
        for one in [pool.submit(one.averager.flush_to_go_on) for one in (first, second)]:
            one.result(timeout=AT_ONCE_S)
    assert told == []
    assert idle.averager.averaging_round == 0


def test_a_server_that_goes_once_all_is_done_makes_no_flush_fail(server, monkeypatch):
    member = Member(server)
    member.train()

    def gone(status):
        raise ConnectionLostError(f"it is gone, and was in {status['rounds']}")

    members = member.averager._turns.members
    monkeypatch.setattr(members._company, "tell_of_newcomers", gone)
    with warned() as told:
        member.averager.flush()
    assert told == []
    assert members.away is None
    assert members.take_back() is False, "it has the mean"


def test_who_leaves_while_others_end_is_not_waited_for_as_one_that_has_just_come(server):
    first, second = Member(server), Member(server)
    acquainted(server, first, second)
    with warned() as told, ThreadPoolExecutor() as pool:
        ended = pool.submit(first.averager.flush)
        until_entered(server, 1)
        second.averager.end_by(RuntimeError("it was told to"))
        ended.result(timeout=AT_ONCE_S)
    assert [text for text in told if "ended without" in text] == []
    assert server.status()["rounds"].get("newcomers") is None


def test_one_that_comes_as_the_others_are_through_ends_with_them_all_the_same(server, monkeypatch):
    member, late = Member(server), []
    member.train()
    alike = member.averager._turns.members.make_alike

    def comes_before(tensors, **how):
        if not late:
            late.append(Member(server))
            late.append(late[0].behind())
        return alike(tensors, **how)

    monkeypatch.setattr(member.averager._turns.members, "make_alike", comes_before)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(member.averager.flush)
        wait_for(lambda: len(late) == 2)
        late[1].join(AT_ONCE_S)
        late[0].train(1)
        late[0].averager.flush()
        ended.result(timeout=AT_ONCE_S)
    held = [torch.cat([p.flatten() for p in one.model.parameters()]) for one in (member, late[0])]
    assert torch.equal(*held)
