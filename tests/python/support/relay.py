"""A stretch of network between a worker and its server, which holds or loses what the worker sends."""

import contextlib
import socket
import threading

CHUNK_BYTES = 64 << 10
TIMEOUT_S = 20


class Relay:
    """Passes TCP connections on to a server. One that sends more than `limit` bytes is held there.

    `reached` is set when just so many bytes have gone on to the server. After `go_on()` the rest follows;
    after `lose_the_rest()` what the worker still sends is thrown away, and its end is passed on.
    """

    def __init__(self, server, limit):
        host, _, port = server.rpartition(":")
        self._server, self._limit = (host, int(port)), limit
        self.reached, self._losing, self._released = (threading.Event() for _ in range(3))
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Little room, inherited by what is accepted: the worker is to be held in its push, not behind it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets, self._threads = [], []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def go_on(self):
        self._released.set()

    def lose_the_rest(self):
        self._losing.set()
        self._released.set()

    def close(self):
        """End every connection that still stands."""
        self.lose_the_rest()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(TIMEOUT_S)
        _end(*self._sockets)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for each in (self._listener, *self._sockets):
            each.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                worker, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += (worker, server)
                for way in ((worker, server, self._limit), (server, worker, None)):
                    thread = threading.Thread(target=self._pass, args=way)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source, target, limit):
        passed = 0
        try:
            while chunk := source.recv(CHUNK_BYTES if limit is None else min(CHUNK_BYTES, limit - passed)):
                target.sendall(chunk)
                passed += len(chunk)
                if passed == limit:
                    self.reached.set()
                    self._released.wait()
                    limit = None
                    if self._losing.is_set():
                        while source.recv(CHUNK_BYTES):
                            pass
                        break
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one of the two has gone: the other is told
            _end(source, target)


def _end(*sockets):
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
