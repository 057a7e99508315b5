"""What the figures were measured on, as far as it can be found out."""

import datetime as dt
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from harness import Line

ROOT = Path(__file__).parent.parent


def describe() -> Line:
    """Collect processor, system, versions, the build under test, and how busy the machine is already."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cpu": _first_of("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_of("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": _version_of("numpy"),
        "torch": _version_of("torch"),
        "gcc": _output("gcc", "--version").partition("\n")[0],
        "rustc": _output("rustc", "--version"),
        "commit": _commit(),
        "offbeat": _offbeat(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _first_of(file: str, key: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _offbeat() -> Line | str:
    try:
        extension = importlib.import_module("offbeat._offbeat")
    except ImportError as error:
        return f"not installed: {error}"
    where = Path(str(extension.__file__))
    inside = where.relative_to(ROOT) if where.is_relative_to(ROOT) else where
    return {"file": str(inside), **extension.build_info()}


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _output(
        "git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", "rust", "python"
    )
    return f"{commit}, with changes" if changed else commit


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
