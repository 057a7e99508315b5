"""One wheel of Offbeat beside another, under the same loads in turns: whether a change has made it slower.

    python benches/wheels.py OLD.whl NEW.whl                 seven loads, six rounds: about five minutes
    python benches/wheels.py OLD.whl NEW.whl --loads offbeat:1e6:4 --rounds 3 --seconds 3

A load is SYSTEM:PARAMETERS:WORKERS, with a system of `measure.py`. In a round each wheel is measured once
under each load, one right after the other, and which comes first changes from round to round, so that a
machine that drifts favours neither. A line of JSON for each measurement; then, by load, the median of the
rounds' ratios of updates a second, new over old, and their spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import BenchError, Line

MEASURE = Path(__file__).with_name("measure.py")
LOADS = (
    "offbeat:1e4:1",
    "offbeat:1e4:4",
    "offbeat:1e6:4",
    "offbeat:25e6:1",
    "offbeat:25e6:2",
    "offbeat:2:25e6:2",
    "offbeat:adam+model:1e6:2",
)
START_S = 120.0
"""What processes may take besides the measuring itself."""


@dataclass(frozen=True)
class Load:
    """A system under so many parameters and workers."""

    system: str
    num_params: str
    num_workers: str

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Read SYSTEM:PARAMETERS:WORKERS; a system's name may have a colon."""
        try:
            system, num_params, num_workers = text.rsplit(":", 2)
            float(num_params), int(num_workers)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no SYSTEM:PARAMETERS:WORKERS, as offbeat:1e6:4"
            ) from error
        return cls(system, num_params, num_workers)

    def __str__(self) -> str:
        return f"{self.system}, {self.num_params} parameters, {self.num_workers} workers"


def measure(site: str, load: Load, seconds: float) -> Line:
    """Measure the wheel that is unpacked there.

    Raises:
        BenchError: If it cannot be measured.
    """
    words = [load.system, "--params", load.num_params, "--workers", load.num_workers]
    try:
        done = subprocess.run(
            [sys.executable, str(MEASURE), *words, "--seconds", str(seconds)],
            capture_output=True,
            text=True,
            timeout=seconds * 3 + START_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": site},
        )
    except subprocess.CalledProcessError as error:
        raise BenchError(f"{load}: {error.stderr.strip().splitlines()[-1:]}") from error
    line: Line = json.loads(done.stdout)
    return line


def compare(
    sites: tuple[str, str], loads: Sequence[Load], num_rounds: int, seconds: float
) -> dict[Load, list[float]]:
    """Measure both wheels in turns; gives each load's ratios by round, new over old."""
    ratios: dict[Load, list[float]] = {load: [] for load in loads}
    for number in range(num_rounds):
        for load in loads:
            rates = {}
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                line = measure(sites[which], load, seconds)
                rates[which] = line["updates_per_s"]
                harness.show({"bench": "wheels", "wheel": ("old", "new")[which], "round": number + 1, **line})
            ratios[load].append(rates[1] / rates[0])
    return ratios


def summary(ratios: dict[Load, list[float]]) -> list[str]:
    """Say how much faster the new one is."""
    return [
        f"{load!s:<48}{statistics.median(of):>7.3f}   of the old one's updates/s, "
        f"{min(of):.3f} to {max(of):.3f} in {len(of)} rounds"
        for load, of in ratios.items()
    ]


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a wheel, as `make wheel` builds it")
    parser.add_argument("new", type=Path)
    parser.add_argument("--loads", type=Load.parse, nargs="+", default=[Load.parse(load) for load in LOADS])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheels-") as directory:
        old, new = (str(Path(directory, which)) for which in ("old", "new"))
        for wheel, site in ((given.old, old), (given.new, new)):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        ratios = compare((old, new), given.loads, given.rounds, given.seconds)
    print()
    print("\n".join(summary(ratios)))


if __name__ == "__main__":
    main()
