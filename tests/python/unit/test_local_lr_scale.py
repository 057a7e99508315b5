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


def test_a_closure_sees_the_rate_that_was_set_and_gives_what_it_gave():
    live, rates = adam(), []
    lr_scale.scale(live, 0.25)
    assert live.step(lambda: rates.append(live.param_groups[0]["lr"]) or 3.0) == 3.0
    assert rates == [1.0]
    assert live.param_groups[0]["params"][0].tolist() == pytest.approx([0.75] * 2)
    assert live.param_groups[0]["lr"] == 1.0


def test_a_schedule_in_a_closure_goes_on_as_without_the_scale():
    live = adam()
    scheduler = MultiplicativeLR(live, lambda _: 0.5)
    lr_scale.scale(live, 0.25)
    for _ in range(3):
        live.step(scheduler.step)
    assert live.param_groups[0]["lr"] == 0.125


def test_a_scale_that_is_taken_back_in_a_closure_is_gone_for_that_step():
    live = adam()
    lr_scale.scale(live, 0.25)
    live.step(lambda: lr_scale.unscale(live, 0.25))
    assert live.param_groups[0]["params"][0].tolist() == pytest.approx([0.0] * 2, abs=1e-6)
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


def one_that_sets_its_rate(change, is_before):
    """Give a class of optimizers with a schedule of its own, and its base class."""

    class Base(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class SetsItsRate(Base):
        def step(self, closure=None):
            if not is_before:
                super().step(closure)
            self.param_groups[0]["lr"] = change(self.param_groups[0]["lr"])
            return super().step(closure) if is_before else None

    return Base, SetsItsRate


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_step_that_multiplies_its_rate_does_not_keep_the_scale_in_it(
    is_hooked, is_before, is_tensor, caplog
):
    base, kind = one_that_sets_its_rate(lambda rate: rate * 0.5, is_before)
    parameters = adam().param_groups[0]["params"]
    live = kind(parameters, lr=torch.tensor(1.0) if is_tensor else 1.0)
    if is_hooked:
        base(parameters)
    lr_scale.scale(live, 0.25)
    for number in range(4):
        was = parameters[0].detach().clone()
        live.step()
        made = 0.25 * 0.5 ** (number + is_before)
        assert (was - parameters[0]).tolist() == [made] * 2
        assert live.param_groups[0]["lr"] == 0.5 ** (number + 1)
    lr_scale.unscale(live, 0.25)
    live.step()
    assert live.param_groups[0]["lr"] == 0.5**5
    if is_before:  # else torch may have put it back behind the step of the base class
        (said,) = (record.message for record in caplog.records)
        assert said.startswith("the step of SetsItsRate has set its learning rate to 0.125 while that was")
        assert "multiplied by 0.25, which is taken as part of it: 0.5 stays" in said


def test_a_step_that_sets_its_rate_anew_is_told_of_once(caplog):
    _, kind = one_that_sets_its_rate(lambda _: 0.5, is_before=True)
    live = kind(adam().param_groups[0]["params"], lr=1.0)
    for _ in range(3):
        with lr_scale.scaled(live, 4.0):
            live.step()
    assert live.param_groups[0]["params"][0].tolist() == [-0.5] * 2, "by its own rate"
    (said,) = (record.message for record in caplog.records)
    assert "to 0.5 while that was multiplied by 4, which is taken as part of it: 0.125 stays" in said
    assert "If the step computes the rate anew" in said


def test_a_rate_that_is_set_after_a_step_that_raised_is_as_it_was_set(monkeypatch):
    live = adam()
    lr_scale.scale(live, 0.25)
    live.step()
    monkeypatch.setattr(live, "_init_group", fails)
    with pytest.raises(TypeError):
        live.step()
    monkeypatch.undo()
    live.param_groups[0]["lr"] = 0.5
    live.step()
    assert live.param_groups[0]["lr"] == 0.5


def test_what_is_scaled_for_some_steps_alone_multiplies_what_else_is():
    parameter = torch.nn.Parameter(torch.ones(1))
    live = torch.optim.SGD([parameter], lr=1.0)
    lr_scale.scale(live, 0.5)
    with lr_scale.scaled(live, 4.0):
        parameter.grad = torch.ones(1)
        live.step()
        assert parameter.item() == -1.0
        with pytest.raises(ZeroDivisionError):
            live.step(lambda: 1 / 0)
    live.step()
    assert parameter.item() == -1.5
    lr_scale.unscale(live, 0.5)


def test_a_step_that_raises_leaves_no_scale_in_the_rate_that_it_has_set():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.5
            fails()

    live = Fails(adam().param_groups[0]["params"], lr=1.0)
    lr_scale.scale(live, 0.5)
    with pytest.raises(MemoryError), lr_scale.scaled(live, 4.0):
        live.step()
    live.load_state_dict(live.state_dict())
    assert live.param_groups[0]["lr"] == 0.5
    lr_scale.unscale(live, 0.5)


def test_an_optimizer_that_makes_its_own_rate_is_left_to_it():
    class MakesItsOwn(torch.optim.SGD):
        def step(self, closure=None):
            self.seen = self.param_groups[0]["lr"]

    live = MakesItsOwn(adam().param_groups[0]["params"], lr=1.0)
    live.param_groups[0]["lr"] = None
    with lr_scale.scaled(live, 4.0):
        live.step()
    assert (live.seen, live.param_groups[0]["lr"]) == (None, None)


def test_rates_that_are_loaded_in_the_midst_of_a_step_are_those_that_stay():
    live = adam()
    saved = live.state_dict()
    saved["param_groups"][0]["lr"] = 0.125

    class Loads(torch.optim.SGD):
        def step(self, closure=None):
            self.load_state_dict(saved)

    loads = Loads(live.param_groups[0]["params"], lr=1.0)
    lr_scale.scale(loads, 0.25)
    loads.step()
    assert loads.param_groups[0]["lr"] == 0.125


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
