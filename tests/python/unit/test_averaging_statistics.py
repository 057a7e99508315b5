"""BatchNorm's running statistics on their way to and from the members' mean."""

import pytest
import torch
from torch import nn

from offbeat.averaging.statistics import Statistics


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_numbers_of_a_device_without_float64_are_made_on_the_cpu(kind):
    """The layer itself is on the CPU, so that this runs where there is no such device."""
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(3)
    layer(torch.randn(8, 3))
    statistics = Statistics(layer)
    taken = statistics.take(torch.device(kind))
    before = torch.cat([layer.running_mean, layer.running_var])
    assert (taken.values.dtype, taken.values.device.type) == (torch.float64, "cpu")
    assert torch.equal(taken.values[1:].float(), before)
    layer(torch.randn(8, 3))
    since = torch.cat([layer.running_mean, layer.running_var])
    statistics.settle(taken.values + 1.0, taken)
    now = torch.cat([layer.running_mean, layer.running_var])
    assert torch.allclose(now, since + 0.9), "what came since is kept, and the share that is left replaced"
