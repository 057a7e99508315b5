"""What users may give where the server wants an optimizer."""

import functools

from offbeat.errors import ConfigError
from offbeat.naming import nearest
from offbeat.optim.base import OptimizerSpec
from offbeat.optim.rules import SPECS

__all__ = ["as_spec", "is_live"]


def as_spec(optimizer: object) -> OptimizerSpec:
    """Turn what a user may give for a server-side optimizer into its spec.

    Args:
        optimizer: A spec; a class of `offbeat.optim` or `torch.optim`, which means its defaults; or
            ``functools.partial(torch.optim.X, lr=…)``.

    Raises:
        ConfigError: If it is none of these, a live optimizer included, or of a class the server lacks.
    """
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    if isinstance(optimizer, functools.partial):
        if optimizer.args:
            raise ConfigError(
                f"{optimizer!r} holds parameters: leave them out, or call it and pass the live optimizer"
            )
        return _class_of(optimizer.func)(**optimizer.keywords)
    if is_live(optimizer):
        raise ConfigError(
            f"a live {type(optimizer).__name__} runs on the worker and cannot be the server's optimizer; "
            "give a spec instead, such as offbeat.optim.SGD(lr=0.1)"
        )
    return _class_of(optimizer)()


def is_live(optimizer: object) -> bool:
    """Whether this is a `torch.optim.Optimizer`, told without importing torch."""
    names = ("param_groups", "step", "zero_grad", "state_dict")
    return not isinstance(optimizer, type) and all(hasattr(optimizer, name) for name in names)


def _class_of(made_by: object) -> type[OptimizerSpec]:
    if isinstance(made_by, type):
        if issubclass(made_by, OptimizerSpec) and made_by.__name__ in SPECS:
            return made_by
        if made_by.__module__.partition(".")[0] == "torch" and made_by.__name__ in SPECS:
            return SPECS[made_by.__name__]
        raise ConfigError(
            f"{made_by.__module__}.{made_by.__qualname__} does not run on the server, which has "
            f"{', '.join(SPECS)}; pass a live optimizer, which runs on the worker: "
            f"{made_by.__qualname__}(model.parameters(), …)"
        )
    if isinstance(made_by, str):
        near = nearest(made_by.partition("(")[0].rpartition(".")[2], list(SPECS))
        meant = (
            f"did you mean offbeat.optim.{near}(lr=…)? "
            if near
            else "give one such as offbeat.optim.SGD(lr=0.1). "
        )
        known = ", ".join(SPECS)
        raise ConfigError(
            f"optimizer is {made_by!r}, a string, and has to be an object; {meant}Known: {known}"
        )
    raise ConfigError(
        f"{made_by!r} is no optimizer; give offbeat.optim.SGD(lr=0.1) or its like, or a live one"
    )
