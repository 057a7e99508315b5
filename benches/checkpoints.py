"""What a server's checkpoints cost: pushes without them and with them, in turns, and the server's memory.

    python benches/checkpoints.py                        25e6 parameters, two workers, about six minutes
    python benches/checkpoints.py --every 30 --dir /data   as often, and on the disk, that you mean to use

A server that writes a checkpoint every few seconds beside one that writes none, each with workers that push
as fast as they can. A round is four measurements, without, with, with, without, or the other way around, so
that a machine that slows down meanwhile favours neither. One line of JSON: updates a second of every
measurement, the ratio of each round, what the server had resident at most, and how long its last save took;
then a summary.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

import harness
import machine
import offbeat
import offbeat_client
from harness import LEARNING_RATE, Announce, BenchError, Line, Load, System

BYTES_PER_PARAMETER = 4
FIRST_SAVE_TIMEOUT_S = 120.0
PAUSE_S = 0.05


def serve(load: Load, announce: Announce, stop: Event, *, directory: Path | None, every_s: float) -> None:
    """Run a server; workers may come when the first checkpoint is there, so that all they see is the rhythm.

    Raises:
        BenchError: If no checkpoint could be written.
    """
    rule = offbeat.optim.SGD(lr=LEARNING_RATE)
    model = {offbeat_client.TENSOR: np.zeros(load.num_params, np.float32)}
    saving = {"checkpoint_dir": directory, "checkpoint_frequency": f"{every_s}s"} if directory else {}
    with offbeat.ParameterServer(model, optimizer=rule, **saving) as server:
        if directory:
            _await_first(server, stop)
        announce(server.address)
        stop.wait()


def _await_first(server: offbeat.ParameterServer, stop: Event) -> None:
    end_s = time.monotonic() + FIRST_SAVE_TIMEOUT_S
    while (checkpoints := server.status()["checkpoints"])["version"] is None:
        if checkpoints["failed"] or time.monotonic() > end_s:
            raise BenchError(f"no first checkpoint was written: {checkpoints}")
        stop.wait(PAUSE_S)


class Worker(offbeat_client.ClientWorker):
    """Pushes and pulls, and tells of the checkpoints that were written meanwhile."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        super().__init__(load, address, rank)
        self._version_before = self.num_warm_ups * load.num_workers

    def report(self) -> Line:
        """Add what the server says of its last checkpoint.

        Raises:
            BenchError: If a save failed, or none was begun under load.
        """
        line = super().report()
        checkpoints = self._client.status()["checkpoints"]
        if checkpoints is None:
            return line
        if checkpoints["failed"] or checkpoints["version"] <= self._version_before:
            raise BenchError(f"no checkpoint was written under load, give it more seconds: {checkpoints}")
        return {**line, "write_s": checkpoints["write_s"]}


def measure(load: Load, every_s: float | None, parent: Path) -> Line:
    """Measure once, with checkpoints if there is a time between them."""
    system = partial(System, name="offbeat", worker=Worker)
    if every_s is None:
        return harness.measure(system(serve=partial(serve, directory=None, every_s=0.0)), load)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=parent) as directory:
        return harness.measure(system(serve=partial(serve, directory=Path(directory), every_s=every_s)), load)


def compare(load: Load, every_s: float, num_rounds: int, parent: Path) -> Line:
    """Measure without checkpoints and with them, in turns."""
    without: list[list[Line]] = []
    beside: list[list[Line]] = []
    for number in range(num_rounds):
        is_first = number % 2 == 1
        lines = [
            (is_saving, measure(load, every_s if is_saving else None, parent))
            for is_saving in (is_first, not is_first, not is_first, is_first)
        ]
        without.append([line for is_saving, line in lines if not is_saving])
        beside.append([line for is_saving, line in lines if is_saving])
        harness.show({"round": number + 1, "of": num_rounds, "ratio": _ratio(without[-1], beside[-1])})
    ratios = [_ratio(*both) for both in zip(without, beside, strict=True)]
    peaks_mb = [
        max(line["server_load_peak_mb"] for lines in rounds for line in lines) for rounds in (without, beside)
    ]
    model_mb = load.num_params * BYTES_PER_PARAMETER / 1e6
    return {
        "bench": "checkpoints",
        "n_params": load.num_params,
        "workers": load.num_workers,
        "seconds": load.seconds,
        "every_s": every_s,
        "without_updates_per_s": [line["updates_per_s"] for lines in without for line in lines],
        "with_updates_per_s": [line["updates_per_s"] for lines in beside for line in lines],
        "ratios": ratios,
        "ratio": round(statistics.median(ratios), 3),
        "without_peak_mb": peaks_mb[0],
        "with_peak_mb": peaks_mb[1],
        "extra_models": round((peaks_mb[1] - peaks_mb[0]) / model_mb, 2),
        "write_s": statistics.median(line["write_s"] for lines in beside for line in lines),
    }


def _ratio(without: list[Line], beside: list[Line]) -> float:
    rates = [sum(line["updates_per_s"] for line in lines) for lines in (without, beside)]
    return round(rates[1] / rates[0], 3)


def summary(line: Line) -> list[str]:
    """Say what the line means beside its targets."""
    say = partial("{:<52}{:>8}   {}".format)
    lowest, highest = min(line["ratios"]), max(line["ratios"])
    return [
        say(
            f"pushes with a checkpoint every {line['every_s']:g} s, of those without",
            line["ratio"],
            f"target: at least 0.9 ({lowest} to {highest})",
        ),
        say("models' worth of memory more", line["extra_models"], "target: at most 1"),
        say("a save, s", round(line["write_s"], 2), "no target: what the disk gives"),
    ]


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from checkpoint to checkpoint")
    parser.add_argument("--seconds", type=float, default=22.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=machine.ROOT / ".out", help="where they are written")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    load = Load(num_params=int(given.params), num_workers=given.workers, seconds=given.seconds)
    line = compare(load, given.every, given.rounds, given.dir)
    harness.show(line)
    print()
    print("\n".join(summary(line)))


if __name__ == "__main__":
    main()
