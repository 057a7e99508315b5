"""A learning rate that is scaled while the optimizer steps stands as it was set whatever the step does."""

import pytest
import torch
from torch.optim.lr_scheduler import MultiplicativeLR
from torch.optim.optimizer import register_optimizer_step_post_hook

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


def one_that_is_based(step, *, is_hooked, rate=1.0):
    """Make an optimizer of one number, whose step is made of its base class's, around which torch has hooks.

    It has them there, too, if somebody has made one of the base class.
    """

    class Base(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad * group["lr"])

    class OfBase(Base):
        def step(self, closure=None):
            step(self.param_groups[0], super().step)

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    if is_hooked:
        Base([parameter], 1.0)
    return OfBase([parameter], rate), parameter


def halves_before(group, step):
    group["lr"] = group["lr"] * 0.5
    step()


def halves_behind(group, step):
    step()
    group["lr"] = group["lr"] * 0.5


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("step", [halves_before, halves_behind])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_step_that_multiplies_its_rate_does_not_keep_the_scale_in_it(is_hooked, step, is_tensor, caplog):
    live, parameter = one_that_is_based(
        step, is_hooked=is_hooked, rate=torch.tensor(1.0) if is_tensor else 1.0
    )
    lr_scale.scale(live, 0.25)
    for number in range(4):
        was = parameter.item()
        live.step()
        assert was - parameter.item() == 0.25 * 0.5 ** (number + (step is halves_before))
        assert live.param_groups[0]["lr"] == 0.5 ** (number + 1)
    lr_scale.unscale(live, 0.25)
    live.step()
    assert live.param_groups[0]["lr"] == 0.5**5
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("the step of OfBase has set its learning rate to 0.125 while that was multiplied")
    assert "multiplied by 0.25, which is taken as part of it: as 0.5." in said


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_step_that_sets_its_rate_anew_is_told_of_once(is_hooked, caplog):
    def sets(group, step):
        group["lr"] = 0.5
        step()

    live, parameter = one_that_is_based(sets, is_hooked=is_hooked)
    for number in range(3):
        with lr_scale.scaled(live, 4.0):
            live.step()
        assert parameter.item() == -0.5 * (number + 1), "by its own rate"
        assert live.param_groups[0]["lr"] == 0.125
    (said,) = (record.message for record in caplog.records)
    assert "to 0.5 while that was multiplied by 4, which is taken as part of it: as 0.125" in said
    assert "If the step computes the rate anew" in said


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_step_that_has_another_rate_for_that_of_its_base_class_has_the_same_behind_it(is_hooked):
    seen = []

    def warms_up(group, step):
        rate = group["lr"]
        group["lr"] = rate / 4
        step()
        group["lr"] = rate
        seen.append(rate)

    live, parameter = one_that_is_based(warms_up, is_hooked=is_hooked)
    lr_scale.scale(live, 0.5)
    for _ in range(3):
        live.step()
        assert live.param_groups[0]["lr"] == 1.0
    assert seen == [0.5] * 3
    assert parameter.item() == -3 * 0.125


@pytest.mark.parametrize("is_hooked", [False, True])
def test_all_that_a_step_does_goes_by_the_scaled_rate_and_its_hooks_see_none(is_hooked):
    seen, of_hooks = [], []

    def decays(group, step):
        seen.append(group["lr"])
        step()
        seen.append(group["lr"])

    live, _ = one_that_is_based(decays, is_hooked=is_hooked)
    lr_scale.scale(live, 0.5)
    live.register_step_pre_hook(lambda *_: of_hooks.append(live.param_groups[0]["lr"]))
    live.register_step_post_hook(lambda *_: of_hooks.append(live.param_groups[0]["lr"]))
    live.step()
    assert seen == [0.5, 0.5]
    assert of_hooks == [1.0] * (2 + 2 * is_hooked)
    assert live.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("raises", [False, True])
def test_a_tensor_that_groups_share_is_scaled_once(kind, raises, monkeypatch, caplog):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    rate = torch.tensor(1.0)
    live = kind([{"params": [parameter]} for parameter in parameters], lr=rate)
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    with lr_scale.scaled(live, 0.5):
        live.step()
        assert [p.item() for p in parameters] == pytest.approx([-0.5] * 3)
        if raises:
            monkeypatch.setattr(live, "_init_group", fails)
            with pytest.raises(TypeError):
                live.step()
    assert all(group["lr"] is rate for group in live.param_groups)
    assert rate == 1.0
    assert not caplog.records


def test_a_rate_that_has_a_gradient_is_scaled_as_well():
    rate = torch.tensor(1.0, requires_grad=True)
    parameter = torch.nn.Parameter(torch.zeros(1))
    live = torch.optim.SGD([parameter.clone()], lr=rate, differentiable=True)
    (moved,) = live.param_groups[0]["params"]
    moved.grad = torch.ones(1)
    with lr_scale.scaled(live, 0.5):
        live.step()
    assert moved.item() == -0.5
    assert live.param_groups[0]["lr"] is rate


class Evaluates(torch.optim.Optimizer):
    """One that calls its closure several times, as a line search does, and notes the rate behind each."""

    def __init__(self, parameters, num_times=3):
        super().__init__(parameters, {"lr": 1.0})
        self.num_times, self.rates = num_times, []

    def step(self, closure):
        for _ in range(self.num_times):
            closure()
            self.rates.append(self.param_groups[0]["lr"])


@pytest.mark.parametrize("raises", [False, True])
def test_a_scale_that_comes_in_a_closure_holds_behind_it_and_no_later_closure_sees_it(raises):
    live, seen = Evaluates(adam().param_groups[0]["params"]), []

    def closure():
        with lr_scale.as_set(live):
            seen.append(live.param_groups[0]["lr"])
            if len(seen) == 2:
                lr_scale.scale(live, 0.25)
            if raises and len(seen) == 3:
                fails()

    lr_scale.listen()
    if raises:
        with pytest.raises(MemoryError):
            live.step(closure)
    else:
        live.step(closure)
    assert seen == [1.0] * 3
    assert live.rates == [1.0, 0.25, 0.25][: 3 - raises]
    assert live.param_groups[0]["lr"] == 1.0
    live.step(closure)
    assert (seen, live.rates[-3:]) == ([1.0] * 6, [0.25] * 3)


@pytest.mark.parametrize("raises", [False, True])
def test_whoever_encloses_a_closure_that_is_enclosed_already_sees_no_scale_either(raises):
    live, seen = Evaluates(adam().param_groups[0]["params"], num_times=1), []

    def closure():
        with lr_scale.as_set(live):
            with lr_scale.as_set(live):
                lr_scale.scale(live, 0.25)
            live.param_groups[0]["lr"] *= 0.5
            seen.append(live.param_groups[0]["lr"])
            if raises:
                fails()

    if raises:
        with pytest.raises(MemoryError):
            live.step(closure)
    else:
        live.step(closure)
    assert seen == [0.5]
    assert live.rates == ([] if raises else [0.125])
    assert live.param_groups[0]["lr"] == 0.5


def test_a_hook_of_all_optimizers_steps_sees_no_scale_around_that_of_a_base_class():
    seen = []
    handle = register_optimizer_step_post_hook(lambda one, *_: seen.append(one.param_groups[0]["lr"]))
    try:
        live, _ = one_that_is_based(lambda _, step: step(), is_hooked=True)
        with lr_scale.scaled(live, 4.0):
            live.step()
    finally:
        handle.remove()
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_rate_that_is_set_after_a_step_that_raised_is_as_it_was_set(kind, monkeypatch):
    live = kind(
        adam().param_groups[0]["params"], lr=1.0
    )  # torch may have hooks in AdamW and in its base class
    lr_scale.scale(live, 0.25)
    live.step()
    monkeypatch.setattr(live, "_init_group", fails)
    with pytest.raises(TypeError):
        live.step()
    monkeypatch.undo()
    live.param_groups[0]["lr"] = 0.5
    live.step()
    assert live.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("is_hooked", [False, True])
def test_so_it_is_where_a_step_that_calls_its_base_class_s_raised(is_hooked):
    is_broken = [True]

    def breaks(_, step):
        step()
        if is_broken.pop():
            raise ZeroDivisionError

    live, parameter = one_that_is_based(breaks, is_hooked=is_hooked)
    lr_scale.scale(live, 0.25)
    with pytest.raises(ZeroDivisionError):
        live.step()
    live.param_groups[0]["lr"] = 0.5
    is_broken.append(False)
    live.step()
    assert live.param_groups[0]["lr"] == 0.5
    assert parameter.item() == -0.25 - 0.125


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
