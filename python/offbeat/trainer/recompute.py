"""Gradient checkpointing: what a forward pass computed is thrown away, and computed again for the backward.

By `torch.utils.checkpoint`, which also gives the second pass the random state of the first.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import checkpoint

from offbeat.errors import ConfigError
from offbeat.naming import a_class, unknown

__all__ = ["Recomputed", "parts_of"]


def parts_of(model: nn.Module, given: bool | Iterable[str]) -> list[nn.Module]:  # noqa: FBT001  as users give it
    """Choose the parts of a model that are computed twice.

    Args:
        model: The whole.
        given: Their names, as `named_modules` has them; True: all parts of each `nn.Sequential` that have
            parameters, the model itself or right below it; False: none.

    Raises:
        ConfigError: If there is no such part, one is within another, or one keeps batch statistics, which a
            second pass would count twice, or a spectral norm.
    """
    if given is False:
        return []
    named = dict(model.named_modules(remove_duplicate=False))
    names = _of_sequentials(model) if given is True else _names(given, named)
    faults = []
    for name in names:
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            faults.append(
                f"{name!r} is within {outer!r}, and would be computed three times: name one of the two"
            )
        for inner, module in named[name].named_modules():
            if what := _written(module):
                place = f"{name}.{inner}" if inner else name
                faults.append(f"{place!r} is {a_class(module)}, whose {what}: name parts without one")
    if faults:
        raise ConfigError("gradient_checkpointing: " + "; ".join(faults))
    return list({id(named[name]): named[name] for name in names}.values())


def _written(module: nn.Module) -> str:
    """Word what of a module a forward pass writes, so that a second one is another; empty for nothing."""
    if isinstance(module, _NormBase) and module.track_running_stats:
        return "running statistics a second pass would count twice"
    # A part's own hook is not in its forward, but the weights that it leaves are read there anew: where the
    # part was used once more in between, by then they are another's.
    if (isinstance(module, _SpectralNorm) and hasattr(module, "_u")) or any(
        isinstance(hook, SpectralNorm)
        for hook in module._forward_pre_hooks.values()  # noqa: SLF001
    ):
        return "spectral norm a second pass would estimate anew, and compute by other weights"
    return ""


class Recomputed:
    """Parts of a model that are computed twice in `passes`, and are as they were elsewhere."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Take them."""
        # The same at each pass: what `torch.compile` made of a model is for these.
        self._twice = [(part, _Twice(part)) for part in parts]

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Make forward and backward passes in here, and as little else as can be: callbacks may save a model.

        A backward pass computes, too, where a part is within what else is computed twice, and has to find
        there what the forward pass has.
        """
        own = [(part, part.__dict__.get("forward")) for part, _ in self._twice]
        for (part, twice), (_, forward) in zip(self._twice, own, strict=True):
            twice.own = forward
            part.__dict__["forward"] = twice
        try:
            yield
        finally:
            for part, forward in own:
                if forward is None:
                    del part.__dict__["forward"]
                else:
                    part.__dict__["forward"] = forward


class _Twice:
    """The forward pass of a part.

    Attributes:
        own: The forward that it has beside its class's, if there is one.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self.own: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as those of any module
        forward = _of_class(self._part) if self.own is None else self.own

        def by_place(named: dict[str, Any], *args: Any) -> Any:  # noqa: ANN401
            return forward(*args, **named)

        # Keywords come as an argument by place: torch takes some for its own, and keeps the random state of
        # the devices of tensors by place alone.
        return checkpoint(by_place, kwargs, *args, use_reentrant=False)


def _of_class(part: nn.Module) -> Any:  # noqa: ANN401  any function
    """Look its `forward` up as Python would if it had none beside its class's."""
    found = inspect.getattr_static(type(part), "forward")
    return found.__get__(part, type(part)) if hasattr(type(found), "__get__") else found


def _of_sequentials(model: nn.Module) -> list[str]:
    outer = [("", model), *model.named_children()] if not isinstance(model, nn.Sequential) else [("", model)]
    found = [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in outer
        if isinstance(part, nn.Sequential)
        for name, child in part.named_children()
        if any(True for _ in child.parameters())
    ]
    if not found:
        raise ConfigError(
            f"gradient_checkpointing is True, and the {type(model).__name__} is and holds no nn.Sequential: "
            f"give the names of its parts that are to be computed twice"
        )
    return found


def _names(given: object, named: dict[str, nn.Module]) -> list[str]:
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"gradient_checkpointing is {given!r}: give True, False, or names of the model's parts"
        )
    known = [name for name in named if name]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError("gradient_checkpointing: " + "; ".join(unknown("part", n, known) for n in wrong))
    return list(dict.fromkeys(names))
