"""Who waits for other members, or for a server that is silent, says so, and for whom."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat import telling
from support.averaging import LOSS, SPEC, Counter, batch, model, step, warned
from support.command import command
from support.freezing import freeze, wake
from support.group import together
from support.ports import free_port
from support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("members_in_one_process"),
]

SOON_S = 0.1
NEVER_S = 1000.0


class Announcing(logging.Handler):
    """Keeps what is said of a wait, and makes a file by which another process sees that there was one."""

    def __init__(self, path):
        super().__init__(logging.WARNING)
        self.path, self.texts = Path(path), []

    def emit(self, record):
        if "has waited" in (text := record.getMessage()):
            self.texts.append(text)
            self.path.touch()


def late(rank, path, where):
    """Let the second member come late: once the first has said that it waits."""
    announcing, before = Announcing(path), telling.LONG_S
    logging.getLogger("offbeat").addHandler(announcing)
    telling.LONG_S = NEVER_S if rank else SOON_S

    def come(place):
        if rank and place == where:
            wait_for(Path(path).exists, timeout_s=60)

    trained = model(seed=rank)
    try:
        come("made")
        if where == "sum":
            ours = offbeat.AsyncGradientAccumulator(trained, accumulation_steps=1)
        else:
            method = "gossip" if where == "partner" else "average"
            ours = offbeat.AsyncModelAverager(trained, averaging_frequency=1, method=method)
        for place in ("sum", "round", "partner"):
            come(place)
        for number in range(3):
            inputs, targets = batch(rank, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        come("flush")
        ours.flush()
        ours.close()
    finally:
        telling.LONG_S = before
        logging.getLogger("offbeat").removeHandler(announcing)
    return announcing.texts


@pytest.mark.parametrize("where", ["made", "round", "partner", "flush", "sum"])
def test_a_member_of_a_group_that_waits_says_for_whom_and_how_long(where, tmp_path):
    first, second = together(late, 2, str(tmp_path / "told"), where)
    assert first
    assert f"member 0 of 2 has waited {SOON_S:g} s for member 1, to put the " in first[0]
    assert "up to 60 s" in first[0], "as the group is made in these tests"
    assert second == []


def test_who_makes_a_process_group_says_that_the_others_have_not_come(monkeypatch):
    monkeypatch.setattr("offbeat.distributed.LONG_S", SOON_S)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with warned() as told, pytest.raises(offbeat.errors.ConnectError):
        offbeat.init_distributed("gloo", rank=0, world_size=2, timeout_s=1)
    assert len(told) == 1
    assert "process 0 of 2 has waited 0.1 s at 127.0.0.1:" in told[0]
    assert "up to 1 s" in told[0]


def at(address, trained, num=1):
    return offbeat.AsyncModelAverager(
        trained, num, 0, communication_backend="tcp", server_address=address, averaging_frequency=1,
        overlap=False,
    )  # fmt: skip


def test_a_member_at_a_server_that_waits_for_a_round_says_who_is_there(monkeypatch):
    with offbeat.ParameterServer(transaction="model") as server:
        ones = Counter(), Counter()
        ours = [at(server.address, one.model) for one in ones]
        ones[0].train(ours[0])  # for whom the other waits, now that it has been in a round
        monkeypatch.setattr(telling, "LONG_S", SOON_S)
        with warned() as told:
            waiting = threading.Thread(target=ones[1].train, args=(ours[1],), daemon=True)
            waiting.start()
            wait_for(lambda: told)
            monkeypatch.setattr(telling, "LONG_S", NEVER_S)  # of the other's wait nothing is told
            ones[0].train(ours[0])
            waiting.join(20)
            assert not waiting.is_alive()
        names = [one._turns.members._presence.name for one in ours]
        (text,) = told
        assert text.startswith(f"{names[1]} has waited 0.1 s for a round of averaging to end: 1 member(s) ")
        assert f"the others there are: {names[0]} (" in text
        assert "does not tell" not in text, "it is the one that has not come"
        for one in ours:
            one.close()


def test_a_member_that_waits_with_others_says_that_the_server_does_not_tell_which_they_are(monkeypatch):
    with offbeat.ParameterServer(transaction="model") as server, ThreadPoolExecutor(3) as threads:
        ones = [Counter() for _ in range(3)]
        ours = list(threads.map(lambda one: at(server.address, one.model, 3), ones))
        here = threads.submit(ones[1].train, ours[1])
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        monkeypatch.setattr(telling, "LONG_S", SOON_S)
        with warned() as told:
            waiting = threads.submit(ones[2].train, ours[2])
            wait_for(lambda: told)
        monkeypatch.setattr(telling, "LONG_S", NEVER_S)
        ones[0].train(ours[0])
        here.result(20)
        waiting.result(20)
        first, second, _ = (one._turns.members._presence.name for one in ours)
        assert "2 member(s) have come" in told[0]
        assert f"{first} (" in told[0]
        assert f"{second} (" in told[0]
        assert "of whom the server does not tell which have come" in told[0]
        for one in ours:
            one.close()


def test_a_server_that_is_stopped_in_mid_round_is_told_of(monkeypatch):
    monkeypatch.setattr("offbeat.averaging.meeting.ASK_S", 0.3)
    trained = model()
    with command("server", "--transaction", "model", "--port", "0") as server, ThreadPoolExecutor() as pool:
        address = server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]
        ours = at(address, trained)
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        ours.step(step(trained, live, 0, 0))
        freeze(server)
        monkeypatch.setattr(telling, "LONG_S", SOON_S)
        try:
            with warned() as told:
                waiting = pool.submit(ours.flush)
                wait_for(lambda: told)
                assert not waiting.done()
        finally:
            wake(server)
        waiting.result(30)
        assert "the server does not answer, though it takes connections" in told[0]
        ours.close()


def test_what_takes_no_longer_than_the_wait_before_is_not_told_of_again(monkeypatch):
    monkeypatch.setattr(telling, "LONG_S", SOON_S)
    waits = telling.Waits()
    with warned() as told:
        for number in (1, 2):
            with waits.telling(lambda waited_s: f"{waited_s}"):
                wait_for(lambda number=number: len(told) == number)
        with waits.telling(lambda _: "nobody has waited for long"):
            pass
        with telling.telling(None, after_s=0.0):
            pass
    first, second = map(float, told)
    assert first == SOON_S
    assert second >= 2 * first
