"""What saving costs a training: FaultTolerantTrainer on an MLP of 25e6 parameters, batch 32, AdamW.

    PYTHONPATH=python python benches/recovery.py [--rounds 5] [--every 50] [--directory DIR] [--quick]

Runs with and without saves take turns, each in a directory of its own, and which comes first alternates. What
is compared is the time per step over the same hundred steps, with as many saves and their writing inside as
there are in a long run. The disk counts: give a directory on the one that checkpoints are to be on.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import machine
import offbeat

SIZES = (1024, 3500, 3500, 2500, 10)
"""24.6e6 parameters."""
QUICK_SIZES = (1024, 32, 10)
"""To see that a bench runs."""
TARGET_PERCENT = 10.0
WARM_UP = 20
"""Steps before those that are measured."""
MEASURED = 100
NEVER = 10**9


def make_model(sizes: Sequence[int]) -> nn.Sequential:
    """Build the model, with the same values every time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run(directory: Path, every: int, sizes: Sequence[int]) -> list[float]:
    """Train, and give the seconds of each step that is measured."""
    model = make_model(sizes)
    samples = TensorDataset(torch.randn(1024, sizes[0]), torch.randint(0, sizes[-1], (1024,)))
    times = []
    of = nn.CrossEntropyLoss()

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        times.append(time.perf_counter())
        loss: torch.Tensor = of(outputs, targets)
        return loss

    trainer = offbeat.FaultTolerantTrainer(model, directory, checkpoint_frequency=every)
    trainer.train(
        dataset=samples,
        epochs=100,
        optimizer=offbeat.optim.AdamW(lr=1e-4),
        loss_fn=loss_fn,
        log_frequency=NEVER,
        max_steps=WARM_UP + MEASURED + 1,
    )
    measured = times[WARM_UP:]
    assert len(measured) == MEASURED + 1
    return [after - before for before, after in itertools.pairwise(measured)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps between two saves")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="one round of a small model: does it run?")
    arguments = parser.parse_args()
    rounds, sizes = (1, QUICK_SIZES) if arguments.quick else (arguments.rounds, SIZES)
    print(json.dumps(machine.describe()))
    steps: dict[str, list[list[float]]] = {"without": [], "with": []}
    for number in range(rounds):
        turn = [("without", NEVER), ("with", arguments.every)]
        for which, every in turn if number % 2 == 0 else turn[::-1]:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
                steps[which].append(run(Path(folder), every, sizes))
            mean_ms = 1000 * statistics.fmean(steps[which][-1])
            print(f"round {number + 1}, {which} saves: {mean_ms:.1f} ms a step", flush=True)
    for which, measured in steps.items():
        means = sorted(1000 * statistics.fmean(one) for one in measured)
        every_step = sorted(1000 * step for one in measured for step in one)
        print(
            f"{which:8} median of rounds' means {statistics.median(means):7.1f} ms "
            f"({means[0]:.1f} to {means[-1]:.1f}); of all steps median {statistics.median(every_step):.1f}, "
            f"p99 {every_step[int(0.99 * len(every_step))]:.1f}, longest {every_step[-1]:.1f} ms"
        )
    pairs = zip(steps["with"], steps["without"], strict=True)
    costs = sorted(100 * (statistics.fmean(a) / statistics.fmean(b) - 1) for a, b in pairs)
    verdict = "met" if statistics.median(costs) <= TARGET_PERCENT else "MISSED"
    print(
        f"cost of saving every {arguments.every} steps: {statistics.median(costs):.1f} % of step time "
        f"(of rounds {costs[0]:.1f} to {costs[-1]:.1f}); target: at most {TARGET_PERCENT:g}: {verdict}"
    )
    print(f"load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
