"""Which parameters optimizers have stepped."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from offbeat.local.stepped import Stepped


def parameters(num):
    made = [nn.Parameter(torch.zeros(1)) for _ in range(num)]
    for parameter in made:
        parameter.grad = torch.ones(1)
    return made


class Alike(torch.optim.SGD):
    """One that equals others, and has no hash."""

    __hash__ = None

    def __eq__(self, other):
        return type(other) is type(self)


class AlikeWithHash(Alike):
    """One that others take the place of in a dictionary."""

    def __hash__(self):
        return 1


@pytest.mark.parametrize("made", [torch.optim.SGD, Alike, AlikeWithHash])
def test_parameters_of_optimizers_that_have_stepped_since_are_told(made):
    one, other, third, foreign = parameters(4)
    stepped = Stepped([one, other, third])
    first, second = made([one, other], lr=0.1), made([third, foreign], lr=0.1)
    before = stepped.number
    assert stepped.since(before) == set()
    first.step()
    between = stepped.number
    second.step()
    assert stepped.since(before) == {id(one), id(other), id(third)}
    assert stepped.since(between) == {id(third)}
    assert stepped.since(stepped.number) == set()


def added(live, parameter):
    live.add_param_group({"params": [parameter]})


def put_in(live, parameter):
    live.param_groups[0]["params"].append(parameter)


def set_anew(live, parameter):
    live.param_groups[0]["params"] = [*live.param_groups[0]["params"], parameter]


def made_of_others(live, parameter):
    kept = live.param_groups[0]["params"]
    live.param_groups.clear()
    live.add_param_group({"params": [*kept, parameter]})


@pytest.mark.parametrize("change", [added, put_in, set_anew, made_of_others])
def test_parameters_that_come_into_an_optimizer_later_are_told_too(change):
    one, other = parameters(2)
    stepped = Stepped([one, other])
    live = torch.optim.SGD([one], lr=0.1)
    live.step()
    before = stepped.number
    change(live, other)
    live.step()
    assert stepped.since(before) == {id(one), id(other)}


def test_an_optimizer_that_is_gone_has_stepped_all_the_same_and_is_not_kept_alive():
    one, other = parameters(2)
    stepped = Stepped([one, other])
    live = torch.optim.SGD([other], lr=0.1)
    live.step()
    before, alive = stepped.number, []
    for _ in range(10):
        gone = torch.optim.SGD([one], lr=0.1)
        gone.step()
        alive.append(weakref.ref(gone))
        del gone
    gc.collect()
    assert [reference() for reference in alive] == [None] * 10
    assert stepped.since(before) == {id(one)}
    stepped.forget(stepped.number)
    assert stepped.since(0) == set()
    live.step()
    assert stepped.since(0) == {id(other)}


def test_who_counts_is_not_kept_alive():
    (one,) = parameters(1)
    counts = weakref.ref(Stepped([one]))
    torch.optim.SGD([one], lr=0.1).step()
    gc.collect()
    assert counts() is None


def test_threads_step_while_another_reads():
    every = parameters(4)
    stepped = Stepped(every)
    failed = []

    def step_many(parameter):
        try:
            for _ in range(200):
                torch.optim.SGD([parameter], lr=0.1).step()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=step_many, args=(parameter,)) for parameter in every]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert stepped.since(0) <= {id(parameter) for parameter in every}
    for thread in threads:
        thread.join()
    assert failed == []
    assert stepped.number == 800
    assert stepped.since(0) == {id(parameter) for parameter in every}


def test_a_step_that_is_compiled_is_counted_and_compiled_once():
    (parameter,) = parameters(1)
    stepped = Stepped([parameter])
    live = torch.optim.SGD([parameter], lr=0.1, fused=True)
    compiled = torch.compile(live.step, backend="eager")
    compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            compiled()
    assert stepped.number == 6
    assert stepped.since(5) == {id(parameter)}


def test_who_makes_an_optimizer_for_each_epoch_makes_no_list_that_grows():
    one, other = parameters(2)
    stepped = Stepped([one, other])
    for number in range(50):
        torch.optim.SGD([one], lr=0.1).step()
        if number == 25:
            between = stepped.number
            torch.optim.SGD([other], lr=0.1).step()
    assert len(stepped._gone) + len(stepped._steps) < 6
    assert stepped.since(between) == {id(one), id(other)}
    assert stepped.since(between + 1) == {id(one)}
    assert stepped.since(stepped.number) == set()
