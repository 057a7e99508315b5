"""Parameter servers in a process of their own, driven from a test: real sockets between real processes."""

import multiprocessing
from contextlib import contextmanager

import offbeat

START_TIMEOUT_S = 40


class Remote:
    """A server in the host process; its methods are `ParameterServer`'s."""

    def __init__(self, host, key, address):
        self._host, self._key, self.address = host, key, address

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: self._host.call(self._key, name, arguments, keywords)


class Host:
    """One process that holds any number of servers."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @contextmanager
    def serving(self, model=None, **keywords):
        """Start a server and stop it after the block."""
        server = Remote(self, *self.call(None, "start", (model,), keywords))
        try:
            yield server
        finally:
            server.stop()

    def call(self, key, name, arguments=(), keywords=None):
        self.pipe.send((key, name, arguments, keywords or {}))
        assert self.pipe.poll(START_TIMEOUT_S), f"the host process does not answer {name}"
        good, value = self.pipe.recv()
        if not good:
            raise value
        return value

    def close(self):
        self.pipe.close()
        self.process.join(START_TIMEOUT_S)
        assert self.process.exitcode == 0


def _serve(pipe):
    servers = {}

    def start(model, **keywords):
        server = offbeat.ParameterServer(model, **keywords)
        server.start()
        servers[len(servers)] = server
        return len(servers) - 1, server.address

    while True:
        try:
            key, name, arguments, keywords = pipe.recv()
        except EOFError:
            return
        try:
            method = start if key is None else getattr(servers[key], name)
            pipe.send((True, method(*arguments, **keywords)))
        except Exception as error:  # noqa: BLE001  the test is told
            pipe.send((False, error))
