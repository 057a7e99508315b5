"""What is the same wherever the model is: each test here runs on the CPU and, where there is one, on CUDA.

    python -m pytest tests/python/device

`make test` runs these as all others; on a machine with a GPU it tries both.
"""

import pytest
import torch

import offbeat

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def device(request):
    return request.param


@pytest.fixture
def meeting_place():
    """Serve models, in this process; give the address."""
    with offbeat.ParameterServer(host="127.0.0.1", port=0, transaction="model") as server:
        yield server.address
