"""The store alone, by the crate's own bench: its update beside the same in place, and combined pushes."""

import json
import subprocess
from collections.abc import Iterator

import machine
from harness import BenchError, Line

COMMAND = ("cargo", "bench", "--quiet", "-p", "offbeat-core", "--bench", "store")


def build() -> None:
    """Compile it, so that no measurement begins on a machine that is hot from that.

    Raises:
        BenchError: If it cannot be built.
    """
    _run(*COMMAND, "--no-run")


def measure() -> Iterator[Line]:
    """Run it once.

    Yields:
        A line per comparison: `system`, `ours` and `reference` (in `unit`), `share` (reference over ours).

    Raises:
        BenchError: If it cannot be run.
    """
    for text in _run(*COMMAND).splitlines():
        if text.startswith("{"):
            line = json.loads(text)
            per_s = {"ms": 1e3, "us": 1e6}[line["unit"]] / line["ours"]
            yield {
                "system": f"store:{line['bench']}",
                "unit": line["unit"],
                "ours": line["ours"],
                "reference": line["reference"],
                "share": line["reference_over_ours"],
                "updates_per_s": per_s,
            }


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout
