"""Servers and workers of a test: real sockets, closed when the test ends."""

import contextlib

import pytest

import offbeat


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack):
    """Start a server in this process."""

    def start(model=None, **keywords):
        return stack.enter_context(offbeat.ParameterServer(model, **keywords))

    return start


@pytest.fixture
def join(stack):
    """Join a server (or an address) with a worker in this process."""

    def start(server, model=None, *arguments, **keywords):
        address = server if isinstance(server, str) else server.address
        return stack.enter_context(offbeat.AsyncWorker(address, model, *arguments, **keywords))

    return start
