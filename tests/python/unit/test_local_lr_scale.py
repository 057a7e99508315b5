"""A learning rate that is scaled while the optimizer steps stands as it was set whatever the step does."""

import pytest
import torch
from torch.optim.lr_scheduler import MultiplicativeLR

from offbeat.local import lr_scale


def adam(rate=1.0):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.Adam([parameter], lr=rate)


def fails(**_):
    raise MemoryError("out of memory")


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_that_raises_leaves_the_rate_that_was_set(by_name):
    live = adam()
    scheduler = MultiplicativeLR(live, lambda _: 0.5)
    lr_scale.scale(live, 0.25)
    with pytest.raises(MemoryError):
        live.step(closure=fails) if by_name else live.step(fails)
    assert live.param_groups[0]["lr"] == 1.0
    scheduler.step()
    live.step()
    assert live.param_groups[0]["lr"] == 0.5
    lr_scale.unscale(live, 0.25)
    live.step()
    assert live.param_groups[0]["lr"] == 0.5


def test_a_closure_is_called_at_the_scaled_rate_and_gives_what_it_gave():
    live, rates = adam(), []
    lr_scale.scale(live, 0.25)
    assert live.step(lambda: rates.append(live.param_groups[0]["lr"]) or 3.0) == 3.0
    assert rates == [0.25]
    assert live.param_groups[0]["lr"] == 1.0


def test_what_is_saved_after_a_step_that_raised_is_the_rate_that_was_set():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return self.fail()

        def fail(self):
            pass

    live = Fails(adam().param_groups[0]["params"], lr=1.0)
    lr_scale.scale(live, 0.25)
    live.step()
    live.fail = fails
    # Torch calls hooks of the class's own step, and of the one that it calls.
    with pytest.raises(MemoryError):
        live.step()
    assert live.state_dict()["param_groups"][0]["lr"] == 1.0
    live.fail = lambda: None
    live.step()
    assert live.state_dict()["param_groups"][0]["lr"] == 1.0
    lr_scale.unscale(live, 0.25)


class Alike(torch.optim.SGD):
    """One that equals others, and has no hash."""

    __hash__ = None

    def __eq__(self, other):
        return type(other) is type(self)


def test_optimizers_that_are_equal_are_scaled_each_for_itself():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    scaled, other = (Alike([parameter], lr=1.0) for parameter in parameters)
    lr_scale.scale(scaled, 0.5)
    scaled.step()
    other.step()
    assert [parameter.item() for parameter in parameters] == [-0.5, -1.0]
    lr_scale.unscale(scaled, 0.5)
    scaled.step()
    assert [parameter.item() for parameter in parameters] == [-1.5, -1.0]
