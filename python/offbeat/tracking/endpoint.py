"""`GET /metrics` over HTTP, beside a server: read-only, and bounded in what a client can cost.

Every connection asks once, on a thread of its own, and ends by a deadline, however slowly its client reads or
writes. There are only so many at a time; where all places are taken, the one that has had its place longest
gives it up: who asks is done in milliseconds, and who would keep others out keeps no place. A new answer is
made a few times a second at most, whoever asks.
"""

import errno
import ipaddress
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from offbeat import log
from offbeat.address import THIS_MACHINE
from offbeat.errors import AddressInUseError, ConfigError

__all__ = ["MetricsEndpoint"]

PATH = "/metrics"
DEADLINE_S = 10.0
"""For a connection as a whole. Prometheus gives up after as long."""

MAX_CONNECTIONS = 16
"""At a time."""

ROOM_S = 0.25
"""So long a newcomer waits for the place of one that was cut off for it, before it is closed itself."""

FRESH_S = 0.25
"""How old what is answered may be."""

BREATH_S = 0.1
"""After a connection that could not be taken, as where there are no descriptors left."""


class MetricsEndpoint:
    """Answers `GET /metrics` with what `read` gives, from `start` to `close`.

    Args:
        read: Makes the answer; called on a thread of the endpoint's, one call at a time.
        content_type: The answer's.
        host: Where to listen.
        port: The same; 0 takes a free one.
        deadline_s: How long one connection may last.

    Raises:
        AddressInUseError: If the port is taken.
        ConfigError: If there can be no listening there for another reason.
    """

    def __init__(
        self,
        read: Callable[[], bytes],
        *,
        content_type: str,
        host: str,
        port: int,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._kept = _Kept(read, FRESH_S)
        self._content_type = content_type
        self._deadline_s = deadline_s
        self._is_local = host in THIS_MACHINE
        self._listener = _listen(host, port)
        self._closed = threading.Event()
        # Taken twice by one thread where a server is collected while that one holds it, and closes this.
        self._lock = threading.RLock()
        self._has_ended = threading.Condition(self._lock)  # a connection
        self._threads: dict[
            socket.socket, threading.Thread
        ] = {}  # of the connections that there are, oldest first
        self._were_cut: set[socket.socket] = set()  # of these, such as have to end
        # A daemon, which calls nothing of the extension's: where nobody closes the server, Python waits for
        # all other threads before it tells anybody that the process ends.
        self._accepting = threading.Thread(target=self._accept, name="offbeat-metrics", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, "HOST:PORT"."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Begin to answer; who has connected since it listens is answered, too."""
        _open.add(self)
        self._accepting.start()

    def close(self) -> None:
        """Listen no more, and cut off what is under way; closing twice is fine."""
        _open.discard(self)
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
        with self._lock:
            threads = dict(self._threads)
        for connection in threads:
            _cut(connection)
        all_threads = (self._accepting, *threads.values())
        if threading.current_thread() not in all_threads:  # else they may wait for what this one holds
            for thread in all_threads:
                if thread.ident is not None:
                    thread.join(self._deadline_s)
        self._listener.close()

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, without a word to the other side."""
        self._closed.set()
        for inherited in (self._listener, *self._threads):
            if (number := inherited.detach()) >= 0:  # its threads, which would close it, are not here
                os.close(number)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._closed.wait(BREATH_S)
                continue
            with self._lock:
                self._make_room()
                is_taken = len(self._threads) < MAX_CONNECTIONS and not self._closed.is_set()
                if is_taken:
                    self._threads[connection] = threading.Thread(
                        target=self._serve, args=(connection,), name="offbeat-metrics-answer"
                    )
            if not is_taken:
                connection.close()
                continue
            try:
                self._threads[connection].start()
            except RuntimeError:  # no thread can be had, or the process ends
                self._end(connection)

    def _make_room(self) -> None:
        """Cut off the oldest connection where there is no place for another, and wait for its end; locked."""
        if len(self._threads) < MAX_CONNECTIONS:
            return
        oldest = next((known for known in self._threads if known not in self._were_cut), None)
        if oldest is not None:
            self._were_cut.add(oldest)
            _cut(oldest)
        self._has_ended.wait_for(lambda: len(self._threads) < MAX_CONNECTIONS, ROOM_S)

    def _serve(self, connection: socket.socket) -> None:
        deadline = threading.Timer(self._deadline_s, _cut, [connection])
        deadline.daemon = True
        try:
            deadline.start()
            with suppress(OSError, ValueError):  # the client has gone, or was cut off
                _Handler(connection, self)
        finally:
            deadline.cancel()
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._threads.pop(connection, None)
            self._were_cut.discard(connection)
            self._has_ended.notify_all()
        connection.close()

    def answer(self, path: str, host: str | None) -> tuple[HTTPStatus, str, bytes]:
        """Answer a request.

        Args:
            path: What was asked for.
            host: Whom the client believes to ask.

        Returns:
            Status, content type and content.
        """
        if self._is_local and not _names_this_machine(host):
            # A page in a browser here, whose own name leads to this machine (DNS rebinding).
            return _plain(HTTPStatus.FORBIDDEN, "Host names another machine than this one")
        if path.partition("?")[0] != PATH:
            return _plain(HTTPStatus.NOT_FOUND, f"there is only {PATH}")
        try:
            return HTTPStatus.OK, self._content_type, self._kept.read()
        except Exception:  # noqa: BLE001  whatever it is: the client is told, and the log
            log.warn("the metrics cannot be told", exc_info=True)
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "the metrics cannot be told; the log says why")


class _Kept:
    """Makes an answer anew only where the last one is no longer fresh."""

    def __init__(self, read: Callable[[], bytes], fresh_s: float) -> None:
        self._read, self._fresh_s = read, fresh_s
        self._turn = threading.Lock()
        self._text = b""
        self._until = float("-inf")

    def read(self) -> bytes:
        with self._turn:
            if time.monotonic() >= self._until:
                self._text = self._read()
                self._until = time.monotonic() + self._fresh_s
            return self._text


class _Handler(BaseHTTPRequestHandler):
    """One request of HTTP/1.0, after which the connection ends; all methods but GET are refused (501)."""

    server_version = "offbeat"
    sys_version = ""

    def __init__(self, connection: socket.socket, endpoint: MetricsEndpoint) -> None:
        self._endpoint = endpoint
        super().__init__(connection, None, cast(Any, None))

    def do_GET(self) -> None:
        status, content_type, content = self._endpoint.answer(self.path, self.headers.get("Host"))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's name
        """Say nothing: its own would go to stderr."""


def _plain(status: HTTPStatus, words: str) -> tuple[HTTPStatus, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{words}\n".encode()


def _names_this_machine(host: str | None) -> bool:
    """Whether a Host header names this machine by what only this machine is called; none names nobody."""
    if host is None:
        return True
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name in THIS_MACHINE:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"metrics_port {port} on {host} is taken by another process: give another one, or 0 for a "
                "free one"
            ) from error
        raise ConfigError(f"metrics_port {port} on {host} cannot be listened on: {error}") from error


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_open: weakref.WeakSet[MetricsEndpoint] = weakref.WeakSet()


def _after_fork() -> None:
    for endpoint in list(_open):
        endpoint.forget()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
