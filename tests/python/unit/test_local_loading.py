"""An optimizer's state comes back as it was saved, and what the optimizer itself makes of it stays."""

import copy
import functools
import gc
import threading
import weakref
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat.local.loading import bring_back

LOSS = nn.CrossEntropyLoss()
BRIEF = [(torch.full((4, 6), float(number)).bfloat16(), torch.arange(4) % 5) for number in range(6)]
MADE = {
    "averager": functools.partial(offbeat.AsyncModelAverager, averaging_frequency=2, overlap=False),
    "accumulator": functools.partial(offbeat.AsyncGradientAccumulator, accumulation_steps=2),
    "trainer": functools.partial(offbeat.AsyncTrainer, strategy="average"),
    "local trainer": functools.partial(offbeat.AsyncTrainer, strategy="local"),
}


class Odd(torch.optim.SGD):
    """Remembers of each parameter what a checkpoint can hold and torch does not load as it was."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if "odd" not in (state := self.state[p]):
                    third = torch.full_like(p, 1 / 3, dtype=torch.float32)
                    counted = OrderedDict(last=(torch.tensor(2**24 + 1), "nested"))
                    odd = {
                        "name": "text",
                        "raw": b"\0\xff",
                        "seen": Counter("abba"),
                        "history": [third, None],
                    }
                    state |= {"tag": "text", "array": np.arange(3.0), "odd": odd | {"counted": counted}}
                    state |= {"arrays": [np.array(1.5), {"mask": np.array([True])}]}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def train(ours, optimizer, *, batches=BRIEF, epochs=1):
    if isinstance(ours, offbeat.AsyncTrainer):
        ours.train(dataloader=batches, epochs=epochs, optimizer=optimizer, loss_fn=LOSS, progress=False)
        return
    for inputs, targets in batches:
        ours.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=LOSS)


def leaves(state):
    """Take a state to pieces, with the type of each."""
    if isinstance(state, dict):
        return [type(state), *((key, leaves(value)) for key, value in state.items())]
    if isinstance(state, list | tuple):
        return [type(state), *map(leaves, state)]
    if isinstance(state, deque):
        return [type(state), state.maxlen, leaves(list(state))]
    if isinstance(state, torch.Tensor | np.ndarray):
        return [type(state), state.dtype, state.tolist()]
    return [type(state), state]


def remembered(optimizer):
    """Take all that an optimizer's state has to pieces, in the order of its parameters, and then all else."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return [leaves(optimizer.state[p]) for p in parameters] + [leaves(others)]


def rule_of_torch():
    return torch.optim.Optimizer._process_value_according_to_param_policy


def odd(built):
    return Odd(built.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", MADE)
def test_what_torch_does_not_load_as_it_was_comes_back_as_it_was(kind):
    ours, other = MADE[kind](model().bfloat16()), MADE[kind](model().bfloat16())
    train(ours, odd(ours.model))
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(ours.state_dict(), optimizer=odd(other.model))
    assert len(remembered(ours.optimizer)) == 5
    assert remembered(other.optimizer) == remembered(ours.optimizer)


def test_it_comes_back_so_from_a_run_s_checkpoint_and_the_run_ends_with_the_same_bits(tmp_path):
    def run(folder, max_steps):
        ours = offbeat.FaultTolerantTrainer(model().bfloat16(), tmp_path / folder, checkpoint_frequency=2)
        optimizer = odd(ours.model)
        ours.train(dataloader=BRIEF, epochs=2, max_steps=max_steps, optimizer=optimizer, loss_fn=LOSS)
        return remembered(optimizer), leaves(dict(ours.model.state_dict()))

    whole = run("whole", 9)
    run("broken", 5)
    assert run("broken", 9) == whole


class Entered(torch.optim.SGD):
    """Remembers of each parameter one thing, which need be no dict, and something of none."""

    entry = staticmethod(dict)

    def step(self, closure=None):
        del closure  # and changes no parameter, as SGD would want its own entries
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self.entry()
        self.state["all"] = {"mean": np.arange(2.0), "seen": Counter("ab"), "last": OrderedDict(a="text")}


def brought_back(first, then):
    """Let an optimizer make a step, and give it with another that has its state, which stays as it is."""
    ours, other = (kind(model().bfloat16().parameters(), lr=0.1) for kind in (first, then))
    ours.step()
    state = ours.state_dict()
    before = leaves(state["state"])
    bring_back(other, state)
    assert leaves(state["state"]) == before
    return ours, other, state


@pytest.mark.parametrize(
    "entry",
    [
        lambda: OrderedDict(a=torch.ones(2), b="text"),
        lambda: Counter("abba"),
        lambda: {"last": deque([torch.full((2,), 1 / 3), "text"], maxlen=3)},
        lambda: deque([np.arange(3), torch.full((2,), 1 / 3)]),
        lambda: [np.arange(3), torch.full((2,), 1 / 3)],
        lambda: (torch.full((2,), 1 / 3), {"a": [np.float32(1)]}),
        lambda: np.arange(3.0),
        lambda: "text",
    ],
)
def test_an_entry_and_what_is_of_no_parameter_come_back_as_they_were_too(entry):
    kind = type("Kind", (Entered,), {"entry": staticmethod(entry)})
    ours, other, _ = brought_back(kind, kind)
    assert remembered(other) == remembered(ours)


class Third(Entered):
    entry = staticmethod(
        lambda: {
            "old": np.arange(3.0),
            "phase": "running",
            "stats": {"kept": np.arange(2.0), "mean": torch.full((2,), 1 / 3), "name": "text"},
            "steps": [torch.full((2,), 1 / 3)],
            "packed": torch.full((4,), 1 / 3),
            "gone": 1,
        }
    )


class Settled(Third):
    """Makes some things of its own of its state, when it is loaded."""

    def __setstate__(self, state):
        super().__setstate__(state)
        for entry in [self.state[p] for group in self.param_groups for p in group["params"]]:
            entry["new"] = entry.pop("old")
            entry["doubled"] = entry["new"] * 2
            entry["phase"] = "resumed"
            entry["stats"].setdefault("count", 0)
            entry["steps"].append(0)
            entry["packed"] = torch.zeros(4, dtype=torch.float64)
            del entry["gone"]
        self.param_groups[0]["table"] = [*sorted(entry["new"])[:1], entry["doubled"]]


def test_what_an_optimizer_makes_of_its_own_state_stays():
    _, other, _ = brought_back(Third, Settled)
    third = torch.full((2,), 1 / 3)
    for group in other.param_groups:
        for p in group["params"]:
            assert leaves(other.state[p]) == leaves(
                {
                    "phase": "resumed",
                    "stats": {"kept": np.arange(2.0), "mean": third, "name": "text", "count": 0},
                    "steps": [third, 0],
                    "packed": torch.zeros(4, dtype=torch.float64),
                    "new": np.arange(3.0),
                    "doubled": np.arange(3.0) * 2,
                }
            )

    assert leaves(other.param_groups[0]["table"]) == leaves([np.float64(0), np.arange(3.0) * 2])


class Super(Third):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_loaded = True


def test_an_optimizer_that_adds_to_torch_s_way_of_loading_has_its_state_as_it_was():
    ours, other, _ = brought_back(Third, Super)
    assert other.is_loaded
    assert remembered(other) == remembered(ours)


def test_hooks_are_given_the_state_that_was_saved_and_what_they_make_of_it_is_loaded():
    """As `register_load_state_dict_pre_hook` is documented with: parameters are told by their names."""
    first, second = (torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2))
    ours = Third([("first", first), ("second", second)], lr=0.1)
    ours.step()
    ours.state[second]["stats"]["mean"] = torch.full((2,), 2 / 3)
    other = Third([("second", second), ("first", first)], lr=0.1)
    seen = []

    def by_name(loading, state):
        place = {
            name: i
            for g in state["param_groups"]
            for name, i in zip(g["param_names"], g["params"], strict=True)
        }
        names = [name for g in loading.param_groups for name in g["param_names"]]
        seen.extend(type(entry["old"]) for entry in state["state"].values() if "old" in entry)
        lists = {i: [*state["state"][place[name]]["old"]] for i, name in enumerate(names)}
        assert list(lists.values()) == [[0, 1, 2]] * 2
        return state | {"state": {i: state["state"][place[name]] for i, name in enumerate(names)}}

    other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(lambda loading: seen.append(loading.state[first]["phase"]))
    bring_back(other, ours.state_dict())
    assert seen == [np.ndarray, np.ndarray, "running"]
    assert leaves(other.state[first]) == leaves(ours.state[first])
    assert leaves(other.state[second]) == leaves(ours.state[second])
    assert "__setstate__" not in vars(other)
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


class Lost(dict):
    """Values on a disk that is no longer there."""

    def values(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [(dict, ValueError, "different number of parameter groups"), (Lost, OSError, "gone")],
)
def test_a_load_that_is_refused_leaves_the_optimizer_and_torch_s_rule_as_they_were(kind, error, said):
    other, rule = Third(model().parameters(), lr=0.1), rule_of_torch()
    with pytest.raises(error, match=said):
        bring_back(other, {"state": kind({0: {"old": np.arange(3.0)}}), "param_groups": []})
    assert "__setstate__" not in vars(other)
    assert not other._optimizer_load_state_dict_pre_hooks
    assert not other.state
    assert rule_of_torch() is rule


def test_a_load_that_is_refused_and_made_again_inside_leaves_nothing_of_ours():
    class Again(Third):
        def load_state_dict(self, state):
            with suppress(ValueError):
                super().load_state_dict(state | {"param_groups": []})
            super().load_state_dict(state)

    ours, other, _ = brought_back(Again, Again)
    assert remembered(other) == remembered(ours)
    assert "__setstate__" not in vars(other)


def test_of_what_was_saved_nothing_is_kept_by_a_hook_that_was_added_meanwhile():
    ours, other = (Third(model().bfloat16().parameters(), lr=0.1) for _ in range(2))
    ours.step()
    kept = []
    other.register_load_state_dict_pre_hook(
        lambda loading, _: kept.append(loading.register_load_state_dict_pre_hook(lambda *_: None))
    )
    state = copy.deepcopy(ours.state_dict())
    saved = weakref.ref(state["state"][0]["packed"])
    bring_back(other, state)
    del state
    gc.collect()
    assert len(kept) == 1
    assert saved() is None


class Outside(torch.optim.Optimizer):
    """Around another, with the other's state in torch's layout, which it gives for reading alone."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    state = property(lambda self: MappingProxyType(self.inner.state))

    def step(self):
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                mean = torch.full_like(p, 1 / 3 + number, dtype=torch.float32)
                packed = torch.full((2,), 1 / 3)
                self.inner.state[p] = {"mean": mean, "nested": [mean * 2], "packed": packed}

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        for entry in self.inner.state.values():
            entry["packed"] = torch.ones(2, dtype=torch.float64)


def test_one_around_another_has_the_other_s_state_as_it_was_and_what_it_makes_of_it_stays():
    ours, other, _ = brought_back(Outside, Outside)
    for own, p in zip(ours.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert leaves(other.state[p]) == leaves(
            ours.state[own] | {"packed": torch.ones(2, dtype=torch.float64)}
        )


class Combined(torch.optim.Optimizer):
    """Around two, one for a half of the parameters each, with plain dicts for torch's hooks."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        half = len(parameters) // 2
        self.parts = [torch.optim.SGD(p, lr=lr, momentum=0.9) for p in (parameters[:half], parameters[half:])]
        self.defaults = {}
        self._optimizer_load_state_dict_pre_hooks = {}
        self._optimizer_load_state_dict_post_hooks = {}

    param_groups = property(lambda self: [group for part in self.parts for group in part.param_groups])
    state = property(lambda self: {p: entry for part in self.parts for p, entry in part.state.items()})

    def step(self):
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    part.state[p]["mean"] = torch.full_like(p, 1 / 3, dtype=torch.float32)

    def state_dict(self):
        first, second = (part.state_dict() for part in self.parts)
        begin = len(first["state"])
        state = first["state"] | {begin + i: entry for i, entry in second["state"].items()}
        moved = [g | {"params": [begin + i for i in g["params"]]} for g in second["param_groups"]]
        return {"state": state, "param_groups": first["param_groups"] + moved}

    def load_state_dict(self, state):
        begin = len(self.parts[0].param_groups[0]["params"])
        for part, group, num in zip(self.parts, state["param_groups"], (0, begin), strict=True):
            own = {i - num: state["state"][i] for i in group["params"]}
            part.load_state_dict({"state": own, "param_groups": [group | {"params": [*own]}]})


class Twice(Entered):
    """Loads itself, and then another whose state is its own from then on."""

    entry = staticmethod(lambda: {"mean": torch.full((2,), 1 / 3)})

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.inner.load_state_dict(state)
        self.state = self.inner.state


@pytest.mark.parametrize("kind", [Combined, Twice])
def test_one_that_has_another_s_state_after_the_load_has_it_as_it_was_too(kind):
    ours, other, _ = brought_back(kind, kind)
    means = [
        [optimizer.state[p]["mean"] for group in optimizer.param_groups for p in group["params"]]
        for optimizer in (ours, other)
    ]
    assert len(means[0]) == 4
    assert leaves(means[1]) == leaves(means[0])


def test_an_optimizer_whose_hooks_are_in_a_plain_dict_is_loaded_and_has_none_of_ours_afterwards():
    class Plain(Third):
        def __init__(self, parameters, lr):
            super().__init__(parameters, lr=lr)
            self._optimizer_load_state_dict_pre_hooks = {}

    ours, other, _ = brought_back(Plain, Plain)
    assert remembered(other) == remembered(ours)
    assert other._optimizer_load_state_dict_pre_hooks == {}


@pytest.mark.parametrize("num", [1, 2])
def test_a_hook_may_remove_itself_and_one_that_is_added_meanwhile_stays(num):
    ours, other = (Third(model().bfloat16().parameters(), lr=0.1) for _ in range(2))
    ours.step()
    ran = []

    def once(loading, state):
        del state
        ran.append("once")
        handles.pop().remove()
        if not handles:
            added.append(loading.register_load_state_dict_pre_hook(lambda *_: ran.append("added")))

    added = []
    handles = [other.register_load_state_dict_pre_hook(once) for _ in range(num)]
    bring_back(other, ours.state_dict())
    assert ran == ["once"] * num
    assert remembered(other) == remembered(ours)
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1
    bring_back(other, ours.state_dict())
    assert ran == ["once"] * num + ["added"]
    added[0].remove()
    assert not other._optimizer_load_state_dict_pre_hooks


class Brief(Entered):
    """Keeps moments in bfloat16, gives them out in float32, and makes them bfloat16 again."""

    entry = staticmethod(lambda: {"mean": torch.full((2,), 1 / 3, dtype=torch.bfloat16)})

    def state_dict(self):
        state = super().state_dict()
        wide = {i: {"mean": e["mean"].float()} for i, e in state["state"].items() if i != "all"}
        return state | {"state": wide}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.state = {p: {"mean": entry["mean"].bfloat16()} for p, entry in self.state.items()}


class Delegating(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        self.inner = Brief(parameters, lr=lr)

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self):
        return self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("kind", [Brief, Delegating])
def test_what_an_optimizer_casts_itself_stays_cast_also_inside_another(kind):
    _, other, _ = brought_back(kind, kind)
    means = [other.state[p]["mean"] for group in other.param_groups for p in group["params"]]
    assert [leaves(mean) for mean in means] == [leaves(torch.full((2,), 1 / 3, dtype=torch.bfloat16))] * 4


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_count_of_steps_is_as_torch_wants_it(is_fused):
    saved, other, plain = (
        torch.optim.Adam(made.parameters(), lr=0.1, fused=fused)
        for made, fused in [(model(), False), (model(), is_fused), (model(), is_fused)]
    )
    for p in (p for group in saved.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    saved.step()
    state = saved.state_dict()
    for entry in state["state"].values():
        entry["step"] = entry["step"].double()
    state["param_groups"][0]["fused"] = is_fused
    bring_back(other, state)
    plain.load_state_dict(state)
    assert remembered(other) == remembered(plain)


def test_what_another_thread_loads_meanwhile_and_what_is_loaded_afterwards_is_torch_s_to_cast():
    state = {"mean": torch.full((2,), 1 / 3)}
    loaded = []

    class Waiting(Entered):
        def __setstate__(self, given):
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
            super().__setstate__(given)

    def load():
        other = Entered(model().bfloat16().parameters(), lr=0.1)
        other.load_state_dict(other.state_dict() | {"state": {0: state}})
        loaded.extend(entry["mean"].dtype for entry in other.state.values())

    waiting = Waiting(model().bfloat16().parameters(), lr=0.1)
    bring_back(waiting, waiting.state_dict() | {"state": {0: state}})
    load()
    assert loaded == [torch.bfloat16, torch.bfloat16]
    assert [entry["mean"].dtype for entry in waiting.state.values()] == [torch.float32]


def test_two_threads_that_load_wait_for_one_another_without_end_to_neither():
    met, dtypes = threading.Barrier(2, timeout=30), []

    class Meeting(Entered):
        def load_state_dict(self, state):
            met.wait()
            super().load_state_dict(state)
            met.wait()

    def load():
        other = Meeting(model().bfloat16().parameters(), lr=0.1)
        bring_back(other, other.state_dict() | {"state": {0: {"mean": torch.full((2,), 1 / 3)}}})
        dtypes.extend(entry["mean"].dtype for entry in other.state.values())

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == [torch.float32] * 2
    other = Entered(model().bfloat16().parameters(), lr=0.1)
    other.load_state_dict(other.state_dict() | {"state": {0: {"mean": torch.full((2,), 1 / 3)}}})
    assert [entry["mean"].dtype for entry in other.state.values()] == [torch.bfloat16]


def test_a_setting_that_holds_itself_is_loaded_as_with_torch():
    holding = []
    holding.append(holding)
    other = Entered(model().parameters(), lr=0.1)
    state = other.state_dict()
    state["param_groups"][0]["holding"] = holding
    bring_back(other, state)
    (inner,) = other.param_groups[0]["holding"]
    assert inner is other.param_groups[0]["holding"]


class Quantized(Entered):
    """Gives its moments out as int8, and leaves it to torch to make its parameters' dtype of them again."""

    entry = staticmethod(lambda: {"mean": torch.full((2,), 0.5, dtype=torch.bfloat16)})

    def state_dict(self):
        state = super().state_dict()
        small = {
            i: {"code": (e["mean"] * 10).to(torch.int8)} for i, e in state["state"].items() if i != "all"
        }
        return state | {"state": small}

    def load_state_dict(self, state):
        wide = {i: {"mean": entry["code"].float() / 10} for i, entry in state["state"].items()}
        super().load_state_dict(copy.deepcopy(state) | {"state": wide})


class Copying(Third):
    def load_state_dict(self, state):
        before = copy.deepcopy(vars(self))
        super().load_state_dict(copy.deepcopy(state))
        assert before["_optimizer_load_state_dict_pre_hooks"] == {}


@pytest.mark.parametrize("kind", [Quantized, Copying])
def test_what_an_optimizer_has_made_anew_is_torch_s_to_cast_and_what_it_has_copied_is_not(kind):
    ours, other, _ = brought_back(kind, kind)
    entries = [remembered(optimizer)[:4] for optimizer in (ours, other)]
    assert entries[0] == entries[1]


def test_what_parameters_share_they_share_again():
    first = torch.optim.SGD(model().bfloat16().parameters(), lr=0.1)
    count = torch.tensor(3.0)
    bring_back(first, first.state_dict() | {"state": {i: {"count": count} for i in range(4)}})
    counts = [entry["count"] for entry in first.state.values()]
    assert [c.dtype for c in counts] == [torch.float32] * 4
    counts[0].add_(1)
    assert (counts[3].item(), count.item()) == (4, 3)


def test_a_setstate_of_the_optimizer_s_own_is_called_and_stays():
    ours, other = (Third(model().bfloat16().parameters(), lr=0.1) for _ in range(2))
    ours.step()
    given = []
    own = other.__setstate__ = lambda state: (
        given.append(len(state["state"])),
        Third.__setstate__(other, state),
    )
    bring_back(other, ours.state_dict())
    assert given == [5]
    assert vars(other)["__setstate__"] is own
    assert remembered(other) == remembered(ours)


class Slim(torch.optim.Optimizer):
    """Around another, with no state that anybody sees."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.Adam(parameters, lr=lr)
        self.param_groups = self.inner.param_groups
        self.defaults = {}

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        self.inner.step()

    def state_dict(self):
        return [self.inner.state_dict(), 2.0]

    def load_state_dict(self, state):
        self.inner.load_state_dict(state[0])


def test_one_that_shows_no_state_is_loaded_in_its_own_way():
    ours, other = (Slim(model().parameters(), lr=0.1) for _ in range(2))
    ours.step()
    bring_back(other, ours.state_dict())
    assert len(remembered(ours.inner)) == 5
    assert remembered(other.inner) == remembered(ours.inner)


@pytest.mark.parametrize("kind", MADE)
def test_where_the_model_was_cast_since_then_the_state_is_cast_too(kind):
    ours, other = MADE[kind](model().bfloat16()), MADE[kind](model())
    train(ours, offbeat.optim.Adam(lr=0.01))
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(ours.state_dict(), optimizer=offbeat.optim.Adam(lr=0.01))
    moments = [entry["exp_avg"] for entry in other.optimizer.state.values()]
    assert [moment.dtype for moment in moments] == [torch.float32] * 4
    train(other, None, batches=[(inputs.float(), targets) for inputs, targets in BRIEF], epochs=2)


def test_a_parameter_among_what_was_saved_is_one_that_can_be_copied_and_trained():
    class Masters(Entered):
        entry = staticmethod(lambda: {"master": nn.Parameter(torch.full((2,), 1 / 3))})

    _, other, _ = brought_back(Masters, Masters)
    for master in [other.state[p]["master"] for group in other.param_groups for p in group["params"]]:
        assert (master.is_leaf, master.requires_grad, master.dtype) == (True, True, torch.float32)
        assert torch.equal(copy.deepcopy(master), torch.full((2,), 1 / 3))


def test_where_torch_refuses_an_optimizer_s_own_way_out_is_its_own():
    class Lenient(Third):
        def load_state_dict(self, state):
            with suppress(ValueError):
                super().load_state_dict(state)
                return
            self.__setstate__({"state": self.state})
            self.is_fresh = True

    ours, other = (Lenient(made.parameters(), lr=0.1) for made in (model(), nn.Linear(2, 2)))
    ours.step()
    bring_back(other, ours.state_dict())
    assert other.is_fresh
    assert not other.state
    assert "__setstate__" not in vars(other)


class Own(Third):
    """Has a way of its own to load its state."""

    def load_state_dict(self, state):
        self.given = state
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"table": [*state["state"][index]["old"]]}


def test_an_optimizer_that_loads_its_state_in_its_own_way_is_given_it_untouched():
    _, other, state = brought_back(Third, Own)
    assert other.given is state
    assert leaves(other.given["state"]) == leaves(state["state"])
    assert [leaves(dict(entry)) for entry in other.state.values()] == [
        leaves({"table": [*np.arange(3.0)]})
    ] * 4


def test_what_was_cast_and_is_trained_on_after_a_load_leaves_the_state_as_it_was():
    """What torch has not cast is the saved tensor itself, as ever."""
    _, other, state = brought_back(Third, Third)
    before = leaves(state["state"])
    entries = [other.state[p] for group in other.param_groups for p in group["params"]]
    assert len(entries) == 4
    for entry in entries:
        entry["stats"]["mean"].add_(1)
        entry["stats"]["kept"] += 1
        entry["packed"].add_(1)
    assert leaves(state["state"]) == before
