"""A run that is killed and started again ends with the bits of one that was not."""

import json
import signal

import pytest

from support import fault_tolerant
from support.fault_tolerant import NUM_STEPS, in_process


def finished(folder, out, **keywords):
    assert in_process(fault_tolerant.train, folder, out=out, **keywords) == 0
    return json.loads(out.read_text("utf-8"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    place = tmp_path_factory.mktemp("uninterrupted")
    return finished(place / "kept", place / "result.json")


def test_one(uninterrupted, tmp_path):
    kill = ("step", 60)
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill) == -signal.SIGKILL
    assert finished(tmp_path / "kept", tmp_path / "result.json") == uninterrupted
    assert len(uninterrupted["records"]) == NUM_STEPS
