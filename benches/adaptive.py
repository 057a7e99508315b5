"""What `averaging_policy="adaptive"` saves: rounds against the best fixed frequency in its range.

    PYTHONPATH=python python benches/adaptive.py [--metrics loss_variance,parameter_variance] [--quick]

Four members train Fashion-MNIST on shards of unlike sizes, with unlike shares of each class, over gloo. Five
fixed frequencies, from the least of the adaptive range to the most, and the adaptive policy, which begins in
the middle, are run with three seeds each. A round ends an iteration after it began, so that a run is the
same each time, whatever else the machine does.

The start is chosen such that the best fixed frequency lies inside the range: where members differ so little
that the most is as good as any, no policy that begins below it can need fewer rounds.

The best fixed frequency is the one with the fewest rounds among those whose median accuracy is within half a
point of the highest median. The policy is to need at most 0.8 of its rounds, and to be at most half a point
less accurate.
"""

import argparse
import json
import os
import statistics
from dataclasses import dataclass, replace

import fashion
import machine
import members
from fashion import Plan, Result

EPOCHS = 4.0
START = 20
"""Iterations from average to average at first, in the middle of the range."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the start: the fixed frequencies; the outer two are the policy's bounds where none are given."""
SKEW = 0.5
SHARE_TARGET = 0.8
POINTS = 0.5
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """Of one setting.

    Attributes:
        name: Of the setting.
        results: One of each seed.
    """

    name: str
    results: list[Result]

    @property
    def rounds(self) -> float:
        """The median."""
        return statistics.median(result.rounds for result in self.results)

    @property
    def percent(self) -> float:
        """The median accuracy."""
        return fashion.median(self.results)

    def __str__(self) -> str:
        each = ", ".join(f"{100 * result.accuracy:.2f}" for result in self.results)
        return f"{self.name:28} {self.rounds:4g} rounds, {self.percent:.2f} % ({each})"


def train(group: members.Members, name: str, seeds: int, base: Plan, how: dict[str, object]) -> Outcome:
    """Train with each seed."""
    found = []
    for seed in range(seeds):
        plan = replace(base, seed=seed, averager={"overlap": 1, **how})
        results: list[Result] = group.call(fashion.member, plan, timeout_s=TIMEOUT_S)
        found.append(results[0])
    outcome = Outcome(name, found)
    print(outcome, flush=True)
    return outcome


def best_of(fixed: list[Outcome]) -> Outcome:
    """Choose as the text above says."""
    highest = max(outcome.percent for outcome in fixed)
    return min((o for o in fixed if o.percent >= highest - POINTS), key=lambda outcome: outcome.rounds)


def main() -> None:
    """Train everything, and print what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--metrics", default="loss_variance", help="that the policy is to go by")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument(
        "--quick", action="store_true", help="two members, one seed, a quarter of an epoch: does it run?"
    )
    given = parser.parse_args()
    seeds, epochs = (1, 0.25) if given.quick else (given.seeds, given.epochs)
    shares = fashion.QUICK_SHARES if given.quick else fashion.SHARES
    base = Plan(seed=0, epochs=epochs, skew=SKEW, shares=shares)
    print(json.dumps(machine.describe()))
    with members.members(len(shares)) as group:
        fixed = [
            train(
                group,
                f"every {round(START * factor)}",
                seeds,
                base,
                {"averaging_frequency": round(START * factor)},
            )
            for factor in FACTORS
        ]
        adaptive = []
        for metric in given.metrics.split(","):
            how = {"averaging_frequency": START, "averaging_policy": "adaptive", "adaptation_metric": metric}
            adaptive.append(train(group, f"adaptive, {metric}", seeds, base, how))
            print(
                f"    frequencies, seed 0: {[f'{every:g}' for every in adaptive[-1].results[0].frequencies]}"
            )
    best = best_of(fixed)
    print(f"\nthe best fixed frequency is {best}")
    for outcome in adaptive:
        share, behind = outcome.rounds / best.rounds, best.percent - outcome.percent
        is_met = share <= SHARE_TARGET and behind <= POINTS
        print(
            f"{outcome.name}: {share:.2f} of its rounds, {behind:+.2f} points behind; target: at most "
            f"{SHARE_TARGET:g} and {POINTS:g}: {'met' if is_met else 'MISSED'}"
        )
    print(f"load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
