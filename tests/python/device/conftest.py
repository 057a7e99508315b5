"""What is the same wherever the model is: each test here runs on the CPU and, where there is one, on CUDA.

    python -m pytest tests/python/device

`make test` runs these as all others; on a machine with a GPU it tries both.
"""

import pytest

import offbeat
from support.cuda import NO_CUDA


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def device(request):
    return request.param


@pytest.fixture
def meeting_place():
    """Serve models, in this process; give the address."""
    with offbeat.ParameterServer(host="127.0.0.1", port=0, transaction="model") as server:
        yield server.address
