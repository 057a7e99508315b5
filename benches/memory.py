"""What the server has resident, beside what its `status()` says that it holds.

    python benches/memory.py --params 25e6 --workers 4

For SGD, Adam, and both with whole pushes as one transaction. The first worker asks for the status while the
others push; the line has the largest total seen, and what a server has resident that holds next to nothing.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator

import harness
import offbeat_client

SYSTEMS = ("offbeat", "offbeat:adam", "offbeat:model", "offbeat:adam+model")
NUM_PARAMS_OF_NEXT_TO_NOTHING = 1000
STATUS_INTERVAL_S = 0.1


class AskingWorker(offbeat_client.ClientWorker):
    """A worker that also asks the server what it holds, if it is the first."""

    def __init__(self, load: harness.Load, address: str, rank: int) -> None:
        super().__init__(load, address, rank)
        self._next_s = time.monotonic() if rank == 0 else float("inf")
        self._largest: harness.Line = {"total_bytes": 0}

    def step(self) -> None:
        """Push, pull, and ask now and then."""
        super().step()
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + STATUS_INTERVAL_S
            memory = self._client.status()["memory"]
            self._largest = max(self._largest, memory, key=lambda m: m["total_bytes"])

    def report(self) -> harness.Line:
        """Add the largest that was seen."""
        return {**super().report(), "memory": self._largest}


def measure(load: harness.Load) -> Iterator[harness.Line]:
    """Measure every system under a load; a line each."""
    asking = {
        system.name: dataclasses.replace(system, worker=AskingWorker) for system in offbeat_client.SYSTEMS
    }
    little = dataclasses.replace(load, num_params=NUM_PARAMS_OF_NEXT_TO_NOTHING, seconds=0.5)
    base_mb = harness.measure(asking["offbeat"], little)["server_load_peak_mb"]
    for name in SYSTEMS:
        yield {**harness.measure(asking[name], load), "base_mb": base_mb}


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=25e6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    load = harness.Load(num_params=int(args.params), num_workers=args.workers, seconds=args.seconds)
    for line in measure(load):
        harness.show(line)


if __name__ == "__main__":
    main()
