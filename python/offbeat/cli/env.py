"""`offbeat env`: what a bug report needs. It imports only what it reports on, and shows no secret."""

import importlib
import json
import os
import platform
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.parser import Parser
from offbeat.cli.say import output

__all__ = ["add_arguments", "describe", "run"]

PACKAGES = (
    "numpy",
    "safetensors",
    "tqdm",
    "torch",
    "torchmetrics",
    "ml_dtypes",
    "matplotlib",
    "scikit-learn",
)

VARIABLES = re.compile(
    r"OFFBEAT_|OMP_|MKL_|OPENBLAS_|KMP_|GOMP_|CUDA_VISIBLE_DEVICES$|PYTORCH_|TORCH_|RUST_|PYTHON"
    r"|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|(HTTP|HTTPS|NO)_PROXY$"
)
"""What changes how Offbeat or torch behaves."""

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|PROXY|CREDENTIAL", re.IGNORECASE)
"""Of these only it is told whether they are set; a proxy's address may hold a password."""

CPU_FEATURES = (
    "sse4_2",
    "avx",
    "fma",
    "avx2",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
)
"""What the kernels here and in torch choose by."""


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.add_format()


def run(arguments: Namespace) -> int:
    """Print it."""
    facts = describe()
    if arguments.format == "json":
        output(json.dumps(facts, indent=2))
        return ExitCode.OK
    for section, values in facts.items():
        output(section)
        for name, value in values.items():
            output(f"  {name:22} {value}")
    return ExitCode.OK


def describe() -> dict[str, dict[str, Any]]:
    """Gather everything, by section."""
    return {
        "offbeat": _build(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": {name: _installed(name) for name in PACKAGES},
        "torch": _torch(),
        "machine": _machine(),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that matter; a secret's value is not among what is shown."""
    return {
        name: "(set, not shown)" if SECRET.search(name) else value
        for name, value in sorted(variables.items())
        if VARIABLES.match(name)
    }


def _build() -> dict[str, Any]:
    try:
        from offbeat import _offbeat
    except ImportError as error:
        return {"extension": f"cannot be loaded: {error}"}
    return dict(_offbeat.build_info())


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> dict[str, Any]:
    if _installed("torch") == "not installed":
        return {}
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # a broken one is what a report may be about
        return {"import": f"fails: {error}"}
    facts = {
        "threads": torch.get_num_threads(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts["CUDA"] = cuda(torch.version.cuda, [torch.cuda.get_device_name(i) for i in range(count)])
    return facts


def cuda(built_for: str | None, devices: Sequence[str]) -> str:
    """Word which CUDA torch was built for, and which GPUs it finds."""
    build = "torch built without CUDA" if built_for is None else f"torch built for CUDA {built_for}"
    return f"{build}; {', '.join(devices) or 'no GPU that it can use here'}"


def _machine() -> dict[str, Any]:
    model, features = cpu(_read(Path("/proc/cpuinfo")))
    return {
        "system": platform.platform(),
        "processor": model or platform.processor() or "unknown",
        "features": " ".join(features),
        "cores": os.cpu_count(),
        "cores usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores of the cgroup": cores_of_cgroup(_read(Path("/sys/fs/cgroup/cpu.max"))),
        "memory": memory(_read(Path("/proc/meminfo"))),
    }


def cpu(cpuinfo: str) -> tuple[str | None, list[str]]:
    """Read the model's name and the features that matter from /proc/cpuinfo's text."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return (model[1] if model else None), [name for name in CPU_FEATURES if name in present]


def cores_of_cgroup(cpu_max: str) -> str:
    """Read how many cores a container may use from cpu.max's text, "QUOTA PERIOD" in microseconds."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return "no limit"
    return f"{int(quota) / int(period):g}"


def memory(meminfo: str) -> str:
    """Read total and available memory from /proc/meminfo's text."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", meminfo, re.MULTILINE))
    if len(found) != 2:  # noqa: PLR2004  both of them
        return "unknown"
    total, available = (int(found[name]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {available:.1f} GiB of it available"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system, or not for us
        return ""
