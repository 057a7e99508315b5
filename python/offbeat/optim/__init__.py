"""Optimizers that run on the server: torch.optim's names, keywords, defaults and numerics, as plain values.

`offbeat.optim.SGD(lr=0.1)` is a spec: it holds no tensors, and the server computes with it, in Rust.
`offbeat.optim.SGD(model.parameters(), lr=0.1)` is the live `torch.optim.SGD` of that call: it computes on
the worker, which then pushes differences. These are two algorithms: log and status say which one runs.

torch is imported only for the second form.
"""

from offbeat.optim.base import OptimizerSpec
from offbeat.optim.given import as_spec, is_live
from offbeat.optim.rules import SGD, Adagrad, Adam, AdamW, DelayedNesterov, RMSprop

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DelayedNesterov",
    "OptimizerSpec",
    "RMSprop",
    "as_spec",
    "is_live",
]
