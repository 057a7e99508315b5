"""A stretch of network between workers and their server, on which things go wrong as planned."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
import threading
from collections import Counter

from support.fault_plan import (
    CALM,
    DOWN,
    UP,
    Blackhole,
    Course,
    Cut,
    HalfClose,
    Hold,
    LostReply,
    Way,
    plan_of,
)

CHUNK_BYTES = 64 << 10
TIMEOUT_S = 20
LOOK_S = 0.001
"""Between two looks at what only the kernel knows."""
ARRIVAL_S = 5
"""How long a cut waits for what went before it to arrive: a peer that does not read has no room for it."""
SLICE_S = 0.02
"""How much of a throttled way's bytes goes on at a time."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: what is closed so sends no FIN."""


class FaultProxy:
    """Passes connections on to a server, and disturbs each by its plan (`fault_plan`); for a `with` block.

    Workers connect to `address`. `counts` says what it has done: `connections`, `cuts`, `half_closes`,
    `holds`, `blackholes`; `unreachable`, where the server took no connection; `lost_replies` to pushes whose
    receipt had come from the server and did not get to the worker; `truncated_pushes`, of which the server
    had something when they were broken off, and no receipt had come.

    Args:
        server: Its address.
        plans: As `fault_plan.plan_of` takes them.
    """

    def __init__(self, server, plans=CALM):
        host, _, port = server.rpartition(":")
        self._server, self._plans = (host.strip("[]"), int(port)), plans
        self._counts, self._changed = Counter(), threading.Condition()
        self._links = set()
        self._is_healed = False
        self._errors = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Little room, inherited by what is accepted: a worker is to be held in its push, not behind it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fault proxy")

    @property
    def counts(self):
        """What it has done so far; what it has not done is 0."""
        with self._changed:
            return Counter(self._counts)

    def wait_for(self, name, number=1, timeout_s=TIMEOUT_S):
        """Wait until something has been done so often."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._counts[name] >= number, timeout_s)
            assert done, f"{name} did not get to {number}: {self._counts}"

    def lead_to(self, server):
        """Pass later connections on to another address."""
        host, _, port = server.rpartition(":")
        self._server = (host.strip("[]"), int(port))

    def heal(self):
        """End all that is wrong: what is held goes on, black holes are reset, later connections are calm."""
        self._command(self._heal)

    def lose_the_rest(self):
        """Throw away what is held and what follows it that way, and pass the end of it on."""
        self._command(lambda: [link.lose_the_rest() for link in self._links])

    def cut(self, *, reset=True):
        """Cut all connections that there are."""
        self._command(lambda: [link.cut(reset=reset) for link in self._links])

    def close(self):
        """End every connection that still stands."""
        self._command(self._end.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the proxy does not end"
        if self._errors:
            raise ExceptionGroup("the proxy itself has failed", self._errors)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.close()

    def count(self, **numbers):
        with self._changed:
            self._counts.update(numbers)
            self._changed.notify_all()

    def _command(self, what):
        self._loop.call_soon_threadsafe(what)

    def _run(self):
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self):
        accepting = self.begin(self._accept())
        await self._end.wait()
        accepting.cancel()
        running = [link.running for link in self._links]
        for link in self._links:
            link.end()
        await asyncio.wait([accepting, *running])
        self._listener.close()

    async def _accept(self):
        number = 0
        while True:
            worker, _ = await self._loop.sock_accept(self._listener)
            try:
                plan = CALM if self._is_healed else plan_of(self._plans, number)
            except Exception:
                worker.close()
                raise
            number += 1
            link = Link(self, worker, plan)
            self._links.add(link)
            link.running = self.begin(link.run(self._server))
            link.running.add_done_callback(lambda _, link=link: self._links.discard(link))
            self.count(connections=1)

    def begin(self, coroutine):
        """Run something beside; what it raises is told at the end."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task):
        if not task.cancelled() and task.exception() is not None:
            self._errors.append(task.exception())

    def _heal(self):
        self._is_healed = True
        for link in self._links:
            link.heal()


class Link:
    """One connection: a worker's to the proxy, and the proxy's to the server."""

    def __init__(self, proxy, worker, plan):
        self._proxy, self._worker, self._server = proxy, worker, None
        self._course, self._lines = Course(plan), {UP: plan.up, DOWN: plan.down}
        self._loop = asyncio.get_running_loop()
        self._gates = {way: asyncio.Event() for way in Way}
        for gate in self._gates.values():
            gate.set()
        self._swallowed = set()
        """Ways of which nothing passes any more."""
        self._is_black = False
        self._over, self._cut, self._is_broken = asyncio.Event(), None, False
        self._is_ending = False
        self.running = None

    # -- what the proxy may ask for

    def cut(self, *, reset):
        self._cut_by(Cut(None, reset))

    def end(self):
        self._is_ending = True
        self._over.set()

    def heal(self):
        self._course.calm()
        self._go_on()

    def lose_the_rest(self):
        held = [way for way, gate in self._gates.items() if not gate.is_set()]
        if held:
            self._swallow(*held)
            self._go_on()

    # -- its life

    async def run(self, server):
        try:
            faults = self._course.begin()
            is_refused = any(isinstance(fault, Cut) for fault in faults)
            if not is_refused and not await self._connect(server):
                return
            for fault in faults:
                self._have(fault, fault.at.way)
            if not is_refused:
                await self._pass_on()
            await self._finish()
        finally:
            for end in (self._worker, self._server):
                if end is not None:
                    end.close()

    async def _connect(self, server):
        family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await self._loop.sock_connect(connection, server)
        except OSError:
            connection.close()
            self._proxy.count(unreachable=1)
            _reset(self._worker)
            return False
        self._server = connection
        for end in (self._worker, self._server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    async def _pass_on(self):
        """Pass bytes on, until both ways have ended or it is over."""
        ways = [self._proxy.begin(self._pass_way(way)) for way in Way]
        await self._until_over(ways)
        if self._is_black:
            await self._over.wait()

    async def _finish(self):
        """End both connections as they are to end: cut, or because one of the two has gone."""
        ends = [end for end in (self._worker, self._server) if end is not None]
        if self._cut is not None:
            for end in ends:
                await self._until_arrived(end)
            for end in ends:
                (_reset if self._cut.reset else _shut)(end)
            self._proxy.count(cuts=1, **self._lost)
        if self._is_broken:
            for end in ends:
                _shut(end)
        if self._is_broken or (self._cut is not None and not self._cut.reset):
            await self._read_out(ends)

    async def _read_out(self, ends):
        """Read what still comes until both ends have closed: for what is left, the kernel sends a reset."""
        if self._is_ending:
            return
        self._over.clear()
        reading = [asyncio.create_task(self._drain(end)) for end in ends]
        await self._until_over(reading)

    async def _until_over(self, tasks):
        """Wait until all of them have ended, or it is over; then they have ended, too."""
        waits = [asyncio.create_task(self._over.wait()), asyncio.create_task(asyncio.wait(tasks))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(*waits, *tasks)

    async def _drain(self, end):
        with contextlib.suppress(OSError):  # it has gone
            while await self._loop.sock_recv(end, CHUNK_BYTES):
                pass

    # -- one way

    async def _pass_way(self, way):
        source, target = (self._worker, self._server) if way is UP else (self._server, self._worker)
        latency_s = self._lines[way].latency_s
        # Without latency nothing is read ahead, so that a sender is held where its bytes are.
        came = asyncio.Queue(1 if latency_s == 0.0 else 0)
        reading = asyncio.create_task(self._read(source, came, latency_s))
        try:
            while chunk := await self._next(came):
                for step in self._course.steps(way, chunk):
                    if isinstance(step, bytes):
                        await self._send(way, target, step)
                    else:
                        self._have(step, way)
                    if self._over.is_set():
                        return
            await self._send(way, target, self._course.rest(way))
            if not self._is_black:
                _shut(target)
        except OSError:  # one of the two has gone: the other is told
            if not self._is_black:
                self._is_broken = self._cut is None
                self._over.set()
        finally:
            await _cancelled(reading)

    async def _read(self, source, came, latency_s):
        chunk = b"begin"
        while chunk:
            try:
                chunk = await self._loop.sock_recv(source, CHUNK_BYTES)
            except OSError as error:
                await came.put((self._loop.time() + latency_s, error))
                return
            await came.put((self._loop.time() + latency_s, chunk))

    async def _next(self, came):
        due, chunk = await came.get()
        await self._until(due)
        if isinstance(chunk, OSError):
            raise chunk
        return chunk

    async def _send(self, way, target, data):
        bytes_per_s = self._lines[way].bytes_per_s
        size = len(data) if bytes_per_s is None else max(1, int(bytes_per_s * SLICE_S))
        for start in range(0, len(data), max(1, size)):
            await self._gates[way].wait()
            if way in self._swallowed:
                return
            part = data[start : start + size]
            await self._loop.sock_sendall(target, part)
            if bytes_per_s is not None:
                await self._until(self._loop.time() + len(part) / bytes_per_s)

    async def _until(self, time):
        if (left_s := time - self._loop.time()) > 0:
            await asyncio.sleep(left_s)

    # -- faults

    def _have(self, fault, way):
        match fault:
            case Cut() | LostReply():
                self._cut_by(fault)
            case HalfClose():
                self._swallow(way)
                _shut(self._server if way is UP else self._worker)
                self._proxy.count(half_closes=1)
            case Hold(both_ways=both_ways):
                for held in Way if both_ways else (way,):
                    self._gates[held].clear()
                self._heal_later(fault)
                self._proxy.count(holds=1)
            case Blackhole():
                self._is_black = True
                self._swallow(*Way)
                self._heal_later(fault)
                self._proxy.count(blackholes=1)

    def _cut_by(self, fault):
        if self._cut is None:
            self._cut, self._lost = fault, self._losses()
            self._over.set()

    def _swallow(self, *ways):
        if not self._swallowed:
            self._proxy.count(**self._losses())
        self._swallowed.update(ways)

    def _losses(self):
        """Count what is lost, once."""
        return {} if self._swallowed else self._course.lost()

    def _heal_later(self, fault):
        if fault.heal_after_s is not None:
            self._loop.call_later(fault.heal_after_s, self._go_on)

    def _go_on(self):
        for gate in self._gates.values():
            gate.set()
        if self._is_black:
            self._cut_by(Cut(None))

    # -- the two ends

    async def _until_arrived(self, end):
        deadline = self._loop.time() + ARRIVAL_S

        def is_due():
            return self._is_ending or self._loop.time() >= deadline or not _num_unacknowledged(end)

        while not is_due():  # noqa: ASYNC110  the kernel tells nobody
            await asyncio.sleep(LOOK_S)


async def _cancelled(*tasks):
    """Cancel tasks and wait for their end: what they use is to be closed."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _num_unacknowledged(end):
    """Count the bytes that the peer's kernel does not have yet; 0 where the peer has gone."""
    return struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)))[0]


def _reset(end):
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    end.close()


def _shut(end):
    with contextlib.suppress(OSError):  # it has gone
        end.shutdown(socket.SHUT_WR)
