"""Checkpoints to be disturbed."""

import pytest

from support.kept import Kept


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    return Kept(tmp_path_factory.mktemp("kept"))
