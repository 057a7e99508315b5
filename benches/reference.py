"""The reference in C and the physical limits: build what is in peers/, run it, read its lines."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness import BenchError, Line

SOURCES = Path(__file__).parent / "peers"
MODES = {"sequential": "0", "pipelined": "1"}
"""Push all, apply, pull all; or by chunk, both directions at once. Which is better depends on the size."""
START_AND_STOP_S = 60.0


def build(target: Path) -> None:
    """Compile the reference into a directory.

    Raises:
        BenchError: If there is no gcc, or it fails.
    """
    target.mkdir(parents=True, exist_ok=True)
    _compile("gcc", "-O3", "-march=native", "-pthread", str(SOURCES / "sock.c"), "-o", str(target / "sock"))


def build_limits(target: Path) -> None:
    """Compile the programs that measure memory and arithmetic.

    Raises:
        BenchError: If a compiler is missing, or fails.
    """
    _compile(
        "gcc", "-O3", "-march=native", "-pthread", str(SOURCES / "limits.c"), "-o", str(target / "limits")
    )
    optimized = ("--edition", "2024", "-C", "opt-level=3", "-C", "target-cpu=native")
    _compile("rustc", *optimized, str(SOURCES / "limits_atomic.rs"), "-o", str(target / "limits_atomic"))


def measure(target: Path, mode: str, num_params: int, num_workers: int, seconds: float) -> Line:
    """Run the reference under a load.

    Raises:
        BenchError: If it fails, or does not end.
    """
    load = (str(num_params), str(num_workers), MODES[mode], str(seconds))
    return _lines(target / "sock", "ps", "tcp", *load, timeout_s=seconds + START_AND_STOP_S)[0]


def limits(target: Path) -> list[Line]:
    """Measure loopback, memory and arithmetic; takes two minutes.

    Raises:
        BenchError: If a program fails.
    """
    return [
        *_lines(target / "sock", "ping", "tcp", "64"),
        *_lines(target / "sock", "stream", "tcp", "1048576"),
        *_lines(target / "limits"),
        *_lines(target / "limits_atomic"),
    ]


def _compile(compiler: str, *arguments: str) -> None:
    if shutil.which(compiler) is None:
        raise BenchError(f"{compiler} is not installed, and the reference has to be compiled")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{compiler} has failed:\n{done.stderr}")


def _lines(program: Path, *arguments: str, timeout_s: float = 300.0) -> list[Line]:
    process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, text=True, process_group=0)
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers wait for one another
            raise BenchError(
                f"{program.name} {' '.join(arguments)} was still running after {timeout_s:.0f} s"
            ) from None
    if process.returncode or not output:
        raise BenchError(f"{program.name} {' '.join(arguments)} ended with exit code {process.returncode}")
    return [json.loads(line) for line in output.splitlines()]
