"""One process that holds the servers of all boundary tests."""

import pytest

from support.host import Host


@pytest.fixture(scope="session")
def host():
    made = Host()
    yield made
    made.close()
