"""A torch module and the server's tensors: which are which, and how bytes get from one to the other.

The user's module is never re-pointed: a push reads gradients where autograd left them, a pull writes into the
parameters' own memory.
"""

from offbeat.module.binding import Binding, Memory, Slot
from offbeat.module.table import Description, TensorSpec, describe, named_parameters, shared_memory

__all__ = [
    "Binding",
    "Description",
    "Memory",
    "Slot",
    "TensorSpec",
    "describe",
    "named_parameters",
    "shared_memory",
]
