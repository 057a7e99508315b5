"""The fault proxy does to connections what its plans say, and nothing else."""

import contextlib
import random
import select
import socket
import threading
import time

import pytest

from support import fault_proxy
from support.fault_plan import DOWN, UP, Blackhole, Bytes, Cut, HalfClose, Hold, Line, plan
from support.fault_proxy import RESET, FaultProxy

TIMEOUT_S = 20
DATA = random.Random(1).randbytes(300_000)  # noqa: S311  nobody is to guess it


class Peer:
    """One end of a connection."""

    def __init__(self, connection):
        connection.settimeout(TIMEOUT_S)
        self.socket, self.read = connection, b""
        self._sending, self._was_reset = None, False

    def send(self, data):
        """Send in a thread: the other end may not read."""
        self._sending = threading.Thread(target=self._send, args=(data,), daemon=True)
        self._sending.start()

    def _send(self, data):
        try:
            self.socket.sendall(data)
        except ConnectionResetError:  # the kernel says so once, here or where it is read
            self._was_reset = True
        except BrokenPipeError:  # or where it is written again
            pass

    def reads(self, number):
        """Read just so many bytes."""
        while number > len(self.read):
            chunk = self.socket.recv(number - len(self.read))
            assert chunk, f"it ends after {len(self.read)} bytes"
            self.read += chunk
        return self.read

    def reads_all(self):
        """Read to the end; return what came, and how it ended."""
        try:
            while chunk := self.socket.recv(1 << 16):
                self.read += chunk
        except ConnectionResetError:
            self._was_reset = True
        if self._sending is not None:
            self._sending.join(TIMEOUT_S)
        return self.read, "reset" if self._was_reset else "end"

    def has_nothing(self):
        """Look, without waiting, that nothing has come."""
        return select.select([self.socket], [], [], 0)[0] == []


@contextlib.contextmanager
def through(*plans):
    """Two peers with a proxy between them, once for each plan: the proxy, and pairs of worker and server."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(TIMEOUT_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        proxy = stack.enter_context(FaultProxy(address, plans))
        pairs = []
        for _ in plans:
            host, port = proxy.address.split(":")
            worker = stack.enter_context(socket.create_connection((host, int(port))))
            server = stack.enter_context(listener.accept()[0])
            pairs.append((Peer(worker), Peer(server)))
        yield proxy, *pairs


def passes(pair):
    """Send something the undisturbed way down: what came to the proxy before it, has been seen to."""
    worker, server = pair
    server.socket.sendall(b"!")
    assert worker.reads(1) == b"!"


SLOW = Line(latency_s=0.05, bytes_per_s=2e6)
LINES = {
    "as it is": plan(),
    "latency": plan(up=Line(latency_s=0.05), down=Line(latency_s=0.05)),
    "throttled": plan(up=Line(bytes_per_s=2e6), down=Line(bytes_per_s=2e6)),
    "both": plan(up=SLOW, down=SLOW),
}


@pytest.mark.parametrize("line", LINES)
def test_bytes_pass_unchanged_and_no_sooner_than_the_line_lets_them(line):
    up, down = LINES[line].up, LINES[line].down
    with through(LINES[line]) as (proxy, (worker, server)):
        began = time.monotonic()
        worker.send(DATA)
        assert server.reads(len(DATA)) == DATA
        server.send(DATA[::-1])
        assert worker.reads(len(DATA)) == DATA[::-1]
        at_least_s = sum(way.latency_s + len(DATA) / (way.bytes_per_s or float("inf")) for way in (up, down))
        assert time.monotonic() - began >= 0.9 * at_least_s
        worker.socket.shutdown(socket.SHUT_WR)
        assert server.reads_all() == (DATA, "end")
        server.socket.close()
        assert worker.reads_all() == (DATA[::-1], "end")
    assert proxy.counts == {"connections": 1}


@pytest.mark.parametrize("number", [1, 63, 64, 65, 1000, 65_536, 65_537, 299_999, 300_000])
@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_after_n_bytes_lets_just_those_arrive(number, way, reset):
    with through(plan(Cut(Bytes(number, way), reset))) as (proxy, (worker, server)):
        sender, receiver = (worker, server) if way is UP else (server, worker)
        sender.send(DATA)
        assert receiver.reads_all() == (DATA[:number], "reset" if reset else "end")
        assert sender.reads_all() == (b"", "reset" if reset else "end")
        if not reset:
            receiver.socket.close()
            sender.socket.close()
    assert proxy.counts == {"connections": 1, "cuts": 1, "truncated_pushes": 0, "lost_replies": 0}


def test_what_went_the_other_way_before_a_cut_has_arrived_too():
    with through(plan(Cut(Bytes(5)))) as (_, (worker, server)):
        server.send(DATA)
        worker.reads(1000)
        worker.send(b"12345")
        assert worker.reads_all()[0] == DATA[: len(worker.read)]
        assert server.reads_all() == (b"12345", "reset")


def test_a_cut_before_anything_reaches_no_server():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultProxy(f"127.0.0.1:{listener.getsockname()[1]}", plan(Cut(Bytes(0)))) as proxy,
    ):
        for _ in range(2):
            with socket.create_connection(proxy.address.split(":")) as worker:
                assert Peer(worker).reads_all() == (b"", "reset")
        proxy.wait_for("cuts", 2)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_half_close_ends_one_way_and_the_other_goes_on():
    with through(plan(HalfClose(Bytes(1000)))) as (proxy, (worker, server)):
        worker.send(DATA)
        assert server.reads_all() == (DATA[:1000], "end")
        server.send(DATA)
        assert worker.reads(len(DATA)) == DATA
        server.socket.shutdown(socket.SHUT_WR)
        assert worker.reads_all() == (DATA, "end")
    assert proxy.counts["half_closes"] == 1
    assert proxy.counts["cuts"] == 0


@pytest.mark.parametrize("heals", ["on command", "by itself"])
def test_what_is_held_goes_on_when_it_is_healed(heals):
    held = Hold(Bytes(1000), heal_after_s=0.05 if heals == "by itself" else None)
    with through(plan(held)) as (proxy, (worker, server)):
        worker.send(DATA)
        proxy.wait_for("holds")
        assert server.reads(1000) == DATA[:1000]
        server.send(b"the other way is open")
        assert worker.reads(21) == b"the other way is open"
        if heals == "on command":
            assert server.has_nothing()
            proxy.heal()
        assert server.reads(len(DATA)) == DATA
    assert proxy.counts == {"connections": 1, "holds": 1}


def test_both_ways_may_be_held():
    with through(plan(Hold(Bytes(3), both_ways=True)), plan()) as (proxy, (worker, server), other):
        worker.send(b"123456")
        proxy.wait_for("holds")
        server.socket.sendall(b"abc")
        assert server.reads(3) == b"123"
        passes(other)
        assert worker.has_nothing()
        proxy.heal()
        assert server.reads(6) == b"123456"
        assert worker.reads(3) == b"abc"


def test_the_rest_of_what_is_held_may_be_lost():
    with through(plan(Hold(Bytes(1000)))) as (proxy, (worker, server)):
        worker.send(DATA)
        proxy.wait_for("holds")
        proxy.lose_the_rest()
        server.send(b"go on")
        assert worker.reads(5) == b"go on"
        worker.socket.close()
        assert server.reads_all() == (DATA[:1000], "end")


@pytest.mark.parametrize("heals", ["on command", "by itself"])
def test_a_black_hole_takes_everything_and_gives_nothing_until_it_is_healed(heals):
    hole = Blackhole(Bytes(1000), heal_after_s=0.05 if heals == "by itself" else None)
    with through(plan(hole), plan()) as (proxy, (worker, server), other):
        worker.send(DATA)
        proxy.wait_for("blackholes")
        if heals == "on command":
            server.socket.sendall(b"an answer")
            server.socket.shutdown(socket.SHUT_WR)
            passes(other)
            assert worker.has_nothing()
            proxy.heal()
        assert worker.reads_all() == (b"", "reset")
        assert server.reads_all() == (DATA[:1000], "reset")
    assert proxy.counts["blackholes"] == proxy.counts["cuts"] == 1


def test_a_black_hole_takes_the_ends_of_connections_too():
    with through(plan(Blackhole(Bytes(3))), plan()) as (proxy, (worker, server), other):
        worker.send(b"123456")
        proxy.wait_for("blackholes")
        assert server.reads(3) == b"123"
        worker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        worker.socket.close()
        passes(other)
        assert server.has_nothing()
        proxy.heal()
        assert server.reads_all() == (b"123", "reset")


def test_a_cut_does_not_wait_for_a_peer_that_does_not_read(monkeypatch):
    monkeypatch.setattr(fault_proxy, "ARRIVAL_S", 0.05)
    with through(plan(Cut(Bytes(3)))) as (proxy, (worker, server)):
        server.send(bytes(20_000_000))
        worker.reads(1)
        worker.send(b"123456")
        proxy.wait_for("cuts")
        assert server.reads_all() == (b"123", "reset")


def test_connections_are_cut_on_command_and_later_ones_are_not():
    with through(plan(), plan()) as (proxy, *pairs):
        for worker, server in pairs:
            worker.send(b"abc")
            assert server.reads(3) == b"abc"
        proxy.cut()
        for pair in pairs:
            assert [peer.reads_all()[1] for peer in pair] == ["reset", "reset"]
        proxy.wait_for("cuts", 2)
        with socket.create_connection(proxy.address.split(":")):
            proxy.wait_for("connections", 3)
        assert proxy.counts["cuts"] == 2


def test_what_is_healed_stays_calm():
    with through(plan(Cut(Bytes(1000))), plan(Cut(Bytes(1000)))) as (proxy, (worker, server), other):
        other[0].send(DATA)
        assert other[1].reads_all() == (DATA[:1000], "reset")
        worker.send(DATA[:500])
        assert server.reads(500) == DATA[:500]
        proxy.heal()
        server.send(b"healed")
        assert worker.reads(6) == b"healed"
        worker.send(DATA[500:])
        assert server.reads(len(DATA)) == DATA
    assert proxy.counts["cuts"] == 1


def test_each_connection_has_the_plan_of_its_number():
    with through(plan(), plan(Cut(Bytes(3))), plan()) as (proxy, *pairs):
        for worker, _ in pairs:
            worker.send(b"123456")
        due = [b"123456", b"123", b"123456"]
        assert [server.reads(len(data)) for data, (_, server) in zip(due, pairs, strict=True)] == due
        assert pairs[1][1].reads_all() == (b"123", "reset")
        proxy.wait_for("cuts")
        assert proxy.counts["cuts"] == 1


def test_a_server_that_is_not_there_is_told_by_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with FaultProxy(address) as proxy:
        with socket.create_connection(proxy.address.split(":")) as worker:
            assert Peer(worker).reads_all() == (b"", "reset")
        assert proxy.counts == {"connections": 1, "unreachable": 1}


def test_a_plan_that_fails_is_not_kept_quiet():
    def fails(number):
        raise ZeroDivisionError

    proxy = FaultProxy("127.0.0.1:9", fails)
    with (
        pytest.raises(ExceptionGroup, match="the proxy itself has failed") as told,
        proxy,
        socket.create_connection(proxy.address.split(":")) as worker,
    ):
        assert Peer(worker).reads_all()[0] == b""
    assert isinstance(told.value.exceptions[0], ZeroDivisionError)
