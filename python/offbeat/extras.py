"""What comes with an extra of Offbeat's, as `offbeat[top]`, and what is said where it is missing."""

import importlib
from types import ModuleType

from offbeat.errors import ConfigError

__all__ = ["lacks", "load"]

EXTRAS = {
    "matplotlib": "plot",
    "prometheus_client": "metrics",
    "rich": "top",
    "tensorboard": "tensorboard",
}
"""Packages that are imported when they are needed, by the extra that brings them."""


def lacks(package: str, what: str) -> str | None:
    """Tell what to install for `what`, where a package is missing; None where it is there."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # it is there, and lacks something itself
            raise
        distribution = package.replace("_", "-")
        return (
            f"{what} needs {distribution}, which is not installed here: pip install {distribution} (of an "
            f"Offbeat from an index, pip install 'offbeat[{EXTRAS[package]}]' brings it)"
        )
    return None


def load(module: str, what: str) -> ModuleType:
    """Import a module of a package that `what` needs.

    Raises:
        ConfigError: If the package is not installed; it says what to install.
    """
    if fault := lacks(module.partition(".")[0], what):
        raise ConfigError(fault)
    return importlib.import_module(module)
