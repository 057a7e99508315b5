"""What `torch.compile` and torch's data parallelism put around a module, told by their classes' names.

By name, since who asks which of our objects train a module has no need of torch; it may be behind one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["inside"]

_WRAPPED = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}


def inside(module: "nn.Module") -> "nn.Module":
    """Take off all of it. A module that has none, or is sharded, is given as it is."""
    while True:
        children = vars(module).get("_modules", ())  # a scripted module has its own
        held = [key for cls in type(module).__mro__ if (key := _WRAPPED.get(cls.__name__)) in children]
        if not held:
            return module
        module = children[held[0]]
