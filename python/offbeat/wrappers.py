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
        kinds = [cls.__name__ for cls in type(module).__mro__ if cls.__module__.partition(".")[0] == "torch"]
        held = [key for kind in kinds if (key := _WRAPPED.get(kind)) in children]
        if not held:
            return module
        module = children[held[0]]
