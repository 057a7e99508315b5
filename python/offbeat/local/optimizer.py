"""The optimizer of a module that is trained here, of whatever a user may give for one."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.local.saved import settings_of
from offbeat.module import named_parameters
from offbeat.optim import OptimizerSpec, as_spec

__all__ = [
    "LocalOptimizer",
    "Named",
    "are_equal",
    "check_holds",
    "check_steps_alone",
]

Named = Iterable[tuple[str, torch.Tensor]]


class LocalOptimizer:
    """The one optimizer of a module: made at the first call that gives one, and kept with its state.

    A spec becomes the torch optimizer of its name over the module's parameters, with the spec's groups; a
    class of torch's, or a `functools.partial` of one, is made with them. A live optimizer is used as it is.

    Attributes:
        settings: Of its groups as they were first given, in this life or the one that this goes on from:
            much moves them in a run.
    """

    def __init__(self, module: nn.Module, *, called: str = "model") -> None:
        """`called`: how the user names the module, for errors that show a call."""
        self._module = module
        self._called = called
        self._given: object = None
        self._live: torch.optim.Optimizer | None = None
        self.settings: list[dict[str, Any]] = []

    @property
    def live(self) -> torch.optim.Optimizer | None:
        """The live optimizer, if there is one yet."""
        return self._live

    def use(self, given: object, *, steps_here: bool = True) -> torch.optim.Optimizer:
        """Give the live optimizer; make it of what is given, if there is none yet.

        Args:
            given: A spec of `offbeat.optim`, a class of it or of torch, a ``functools.partial`` of such a
                class, or a live optimizer of the module's parameters. The same again, or its equal, keeps the
                state. None: the one that there is.
            steps_here: What steps it here has the gradients of one batch. False: its owner's loop steps it.

        Raises:
            ConfigError: If it is none of these, does not fit the module, or is another than before; nothing
                is changed then.
        """
        if steps_here and self._live is not None:
            check_steps_alone(self._live)
        if self._live is None:
            if given is None:
                raise ConfigError(
                    "there is no optimizer: give optimizer=offbeat.optim.SGD(lr=...), or a live one, such as "
                    f"torch.optim.SGD({self._called}.parameters(), lr=...)"
                )
            self._live = self._made(given, steps_here=steps_here)
            self._given = given
            self.settings = [settings_of(group) for group in self._live.param_groups]
        elif given is not None and given is not self._live and not are_equal(given, self._given):
            raise ConfigError(
                f"optimizer is {_shown(given)}, and this model is trained with {_shown(self._given)}, whose "
                f"state would be lost: give that one, or none; its learning rate is in its param_groups"
            )
        return self._live

    def trial(self) -> "LocalOptimizer":
        """Give one to be kept instead of this if all is right: itself, or an empty one while this is empty.

        What was to be refused leaves no optimizer behind so, and what is taken is made once.
        """
        return LocalOptimizer(self._module, called=self._called) if self._live is None else self

    def _made(self, given: object, *, steps_here: bool) -> torch.optim.Optimizer:
        if isinstance(given, torch.optim.Optimizer):
            if steps_here:
                check_steps_alone(given)
            check_holds(given, named_parameters(self._module), called=self._called)
            return given
        if isinstance(given, OptimizerSpec):
            return _of_spec(given, self._module)
        if (made := _of_class(given, [p for _, p in _names(self._module)])) is not None:
            check_steps_alone(made)
            return made
        return _of_spec(as_spec(given), self._module)


def check_holds(optimizer: torch.optim.Optimizer, parameters: Named, *, called: str) -> set[int]:
    """Give the ids of what a live optimizer holds: all that a model has to train, and only the model's.

    Args:
        optimizer: What the user gave.
        parameters: The model's, each with its name.
        called: How the user names the model, for the call that the errors show.

    Raises:
        ConfigError: If it lacks one, or holds others.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = type(optimizer).__name__
    remedy = f"build it from the model: {name}({called}.parameters(), ...)"
    or_freeze = "or, to train a part alone, freeze the rest first: parameter.requires_grad_(False)"
    own = set()
    for parameter_name, parameter in parameters:
        own.add(id(parameter))
        if parameter.requires_grad and id(parameter) not in held:
            raise ConfigError(
                f"the {name} does not hold the model's parameter {parameter_name!r}: {remedy}; {or_freeze}"
            )
    if held - own:
        raise ConfigError(f"the {name} holds tensors that are not parameters of {called}: {remedy}")
    return held


def check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what calls for gradients while it steps, as LBFGS does: there are those of one batch.

    Raises:
        ConfigError: If its `step` needs a closure.
    """
    kind: Any = type(optimizer)  # which to mypy has no hash
    if _needs_closure(kind):
        name = type(optimizer).__name__
        raise ConfigError(
            f"{name}.step() needs a closure, which it calls for gradients as often as it likes, and here it "
            f"has the gradients of one batch: give an optimizer whose step() works with these, such as "
            f"torch.optim.SGD or Adam"
        )


@functools.cache  # asked at each step
def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _of_spec(spec: OptimizerSpec, module: nn.Module) -> torch.optim.Optimizer:
    """Make the torch optimizer that computes what a spec says, with a group for each that has tensors."""
    kind = getattr(torch.optim, type(spec).__name__, None)
    if kind is None:
        raise ConfigError(
            f"{type(spec).__name__} runs on the server alone, and this one steps here: give one of torch's, "
            f"such as offbeat.optim.SGD(lr=...)"
        )
    defaults = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "groups"}  # type: ignore[arg-type]
    groups = [*spec.groups, {"pattern": "*"}]
    members: list[list[torch.Tensor]] = [[] for _ in groups]
    for names, parameter in _names(module):
        first = next(i for i, g in enumerate(groups) if any(_matches(g["pattern"], name) for name in names))
        members[first].append(parameter)
    given = [
        {"params": parameters} | {name: value for name, value in group.items() if name != "pattern"}
        for group, parameters in zip(groups, members, strict=True)
        if parameters
    ]
    made: torch.optim.Optimizer = kind(given, **defaults)
    return made


def _of_class(given: object, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Make an optimizer of a class of torch's, or a partial of one; None where it is no such."""
    kind = given.func if isinstance(given, functools.partial) else given
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        return None
    if isinstance(given, functools.partial) and given.args:
        raise ConfigError(
            f"{_shown(given)} holds parameters: leave them out, or call it and pass the live optimizer"
        )
    make: Callable[..., torch.optim.Optimizer] = given  # type: ignore[assignment]  # looked at above
    try:
        return make(parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_shown(given)} cannot be made for this model: {error}") from error


def _names(module: nn.Module) -> Iterable[tuple[list[str], nn.Parameter]]:
    """Give each parameter once, with all names that it has in the plain module's `state_dict()`."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in named_parameters(module):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return [(names[key], parameter) for key, parameter in found.items()]


def _matches(pattern: str, name: str) -> bool:
    """As the server does: `*` is anything, `?` one character, and all else, `[` too, itself."""
    parts = ({"*": ".*", "?": "."}.get(c) or re.escape(c) for c in pattern)
    return re.fullmatch("".join(parts), name, re.DOTALL) is not None


def are_equal(given: object, before: object) -> bool:
    """Whether two things that a user gave ask for the same; partials do so that hold the same arguments."""
    if isinstance(given, functools.partial) and isinstance(before, functools.partial):
        return (given.func, given.args, given.keywords) == (before.func, before.args, before.keywords)
    return type(given) is type(before) and bool(given == before)


def _shown(given: object) -> str:
    if isinstance(given, torch.optim.Optimizer):
        return f"a live {type(given).__name__}"
    if isinstance(given, functools.partial):
        keywords = ", ".join(f"{name}={value!r}" for name, value in given.keywords.items())
        return f"functools.partial({getattr(given.func, '__name__', given.func)}, {keywords})"
    return given.__name__ if isinstance(given, type) else repr(given)
