"""Plain Python sockets and numpy: what the simplest code reaches. One connection and thread per worker."""

import socket
import struct
import threading
from multiprocessing.synchronize import Event

import numpy as np

from harness import LEARNING_RATE, Announce, Load, System, Worker

HEADER = struct.Struct("<Q")


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the memory from the connection.

    Raises:
        ConnectionError: If the connection ended before.
    """
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise ConnectionError("the other side has closed the connection")
        view = view[num_bytes:]


def serve(load: Load, announce: Announce, stop: Event) -> None:
    """Add each connection's gradients to one vector, and send that back."""
    parameters = np.zeros(load.num_params, np.float32)

    def attend(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        gradient = np.empty(load.num_params, np.float32)
        header = bytearray(HEADER.size)
        try:
            while True:
                receive_into(connection, memoryview(header))
                assert HEADER.unpack(header) == (load.num_params,)
                receive_into(connection, memoryview(gradient).cast("B"))
                np.multiply(gradient, LEARNING_RATE, out=gradient)
                np.subtract(parameters, gradient, out=parameters)
                connection.sendall(memoryview(parameters).cast("B"))
        except ConnectionError:
            pass

    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        announce(f"127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(load.num_workers):
            threading.Thread(target=attend, args=(listener.accept()[0],), daemon=True).start()
        stop.wait()


class SocketWorker(Worker):
    """Sends a header and the gradients, and receives the parameters."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        del rank
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._header = HEADER.pack(load.num_params)
        self.use(np.ones(load.num_params, np.float32), np.empty(load.num_params, np.float32))

    def use(self, gradient: np.ndarray, parameters: np.ndarray) -> None:
        """Push from and pull into this memory from now on."""
        self._gradient = memoryview(gradient).cast("B")
        self._parameters = memoryview(parameters).cast("B")

    def step(self) -> None:
        """Push and pull."""
        self._connection.sendall(self._header)
        self._connection.sendall(self._gradient)
        receive_into(self._connection, self._parameters)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


SYSTEMS = (System(name="pysock", serve=serve, worker=SocketWorker),)
