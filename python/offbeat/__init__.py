"""Offbeat: asynchronous training for PyTorch, on machines that are unequal, unreliable and far apart.

This file lists and does no work: each name is loaded when it is first used. So `import offbeat` is quick,
starts no thread and needs neither torch nor numpy, and a machine without torch can still run a server.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat import errors, optim, schedule, staleness, tracking
    from offbeat.accumulator import AsyncGradientAccumulator
    from offbeat.averaging import AsyncModelAverager
    from offbeat.client import Client
    from offbeat.distributed import init_distributed
    from offbeat.history import History
    from offbeat.monitor import AsyncTrainingMonitor
    from offbeat.receipt import Receipt
    from offbeat.recovery.trainer import FaultTolerantTrainer
    from offbeat.server import ParameterServer
    from offbeat.sharding import partition
    from offbeat.trainer import AsyncTrainer
    from offbeat.worker import AsyncWorker

    __version__: str

__all__ = [
    "AsyncGradientAccumulator",
    "AsyncModelAverager",
    "AsyncTrainer",
    "AsyncTrainingMonitor",
    "AsyncWorker",
    "Client",
    "FaultTolerantTrainer",
    "History",
    "ParameterServer",
    "Receipt",
    "__version__",
    "averaging",
    "errors",
    "init_distributed",
    "optim",
    "partition",
    "schedule",
    "staleness",
    "tracking",
]

# No name here may also be the name of a module: importing that module would put it in the name's place.
_MODULE_OF = {
    "AsyncGradientAccumulator": "offbeat.accumulator",
    "AsyncModelAverager": "offbeat.averaging",
    "AsyncTrainer": "offbeat.trainer",
    "AsyncTrainingMonitor": "offbeat.monitor",
    "AsyncWorker": "offbeat.worker",
    "Client": "offbeat.client",
    "FaultTolerantTrainer": "offbeat.recovery.trainer",
    "History": "offbeat.history",
    "ParameterServer": "offbeat.server",
    "Receipt": "offbeat.receipt",
    "init_distributed": "offbeat.distributed",
    "partition": "offbeat.sharding",
}
_SUBMODULES = frozenset({"averaging", "errors", "optim", "schedule", "staleness", "tracking"})


def __getattr__(name: str) -> object:
    """Load a public name at its first use (PEP 562), and keep it."""
    value: object
    if name in _MODULE_OF:
        value = _loaded(name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"offbeat.{name}")
    elif name == "__version__":
        value = _installed_version()
    else:
        raise AttributeError(
            f"module 'offbeat' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    globals()[name] = value
    return value


def _loaded(name: str) -> object:
    try:
        module = importlib.import_module(_MODULE_OF[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ModuleNotFoundError(
            f"offbeat.{name} needs torch, which is not installed here: pip install torch; "
            f"offbeat.ParameterServer and offbeat.Client run without it",
            name="torch",
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a tenth of a second: only for who asks

    try:
        return version("offbeat")
    except PackageNotFoundError as error:
        raise AttributeError(
            "offbeat has no version here: it is imported from a source tree that was never installed"
        ) from error
