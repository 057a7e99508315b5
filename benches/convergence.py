"""Whether each method of averaging ends where a single process does: Fashion-MNIST, 4 members, unequal.

    PYTHONPATH=python python benches/convergence.py [--methods average,diloco] [--quick]

Four processes have shards in proportion of about 4 : 3 : 2 : 1, whose shares of each class differ by a third
or so, and train them at speeds in the same proportion, by sleeping. They average in the background, by time,
at a server (what cannot, in a process group), until their data ends. All together they have as many samples
as the single process, which has the same model, batches and falling rate. Methods are as their names make
them; only the rate is another, as is printed. Rates, epochs and the time between rounds were chosen with
other seeds than those trained here.

Printed are the test part's accuracies, of each seed and the medians. Figures move a little from run to run,
for when a round ends is up to the clock. On a machine too busy to keep the pace members' data does not end
together, as it is meant to, and the last ones train alone: how far apart they ended is printed.
"""

import argparse
import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

import fashion
import machine
import members
import offbeat
from fashion import Plan, Result
from offbeat.demo.models import MLP

TARGET_POINTS = 1.0
"""Of accuracy, by which the median may be below the single process's."""
EPOCHS = 36.0
EVERY = 2
"""Iterations of the slowest member from the end of a round to the beginning of the next; a fast one does four
times as many in that time, which is why members go by time and not by iterations."""
SKEW = 10.0
"""See `fashion.Plan`: with 10 a share of a class is its mean, give or take a third."""
PASS_S = 2.0
"""For each member to go through its shard once: as much as lets two cores keep to it for all four."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, eq=False)
class Case:
    """A method, and what else it is given.

    Attributes:
        name: As `method` takes it.
        lr_factor: Of the single process's rate. The mean way of four members is as of one batch of four, for
            which the linear rule (Goyal et al., 2017) has four times the rate; a method whose momentum goes
            on from round to round makes more of the way itself: 1 / (1 - momentum) times as much.
        keywords: Of the averager, besides.
    """

    name: str
    lr_factor: float
    keywords: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("average", 2.0),
    Case("easgd", 2.0),
    Case("diloco", 0.25),
    Case("slowmo", 2.0),
    Case("bmuf", 1.0),
    Case("gossip", 4.0, {"communication_backend": "gloo"}),
)


def period_s(plan: Plan) -> float:
    """Compute the seconds between rounds: `EVERY` batches of a member with the least shard."""
    least = len(fashion.samples().train_labels) * plan.shares[-1] / sum(plan.shares)
    return EVERY * plan.pass_s * MLP.batch_size / least


def train(group: members.Members, case: Case, base: Plan) -> Result:
    """Train with a method once, at a server of its own where it meets at one."""
    how: dict[str, Any] = {
        "method": case.name,
        "averaging_policy": "time",
        "averaging_frequency": f"{period_s(base):g}s",
        **case.keywords,
    }

    def run(how: dict[str, Any]) -> Result:
        plan = replace(base, lr_factor=case.lr_factor, averager=how)
        results: list[Result] = group.call(fashion.member, plan, timeout_s=TIMEOUT_S)
        seconds = [result.seconds for result in results]
        return replace(results[0], spread_s=max(seconds) - min(seconds))

    if how.get("communication_backend", "tcp") != "tcp":
        return run(how)
    with offbeat.ParameterServer(host="127.0.0.1", port=0, transaction="model", linger_s=0.5) as server:
        return run({**how, "server_address": server.address})


def main() -> None:
    """Train everything, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(case.name for case in CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument(
        "--pass", dest="pass_s", type=float, default=PASS_S, help="seconds; more where the machine is slower"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two members, one seed, a quarter of an epoch: does it run?"
    )
    given = parser.parse_args()
    seeds, epochs = (1, 0.25) if given.quick else (given.seeds, given.epochs)
    shares = fashion.QUICK_SHARES if given.quick else fashion.SHARES
    base = Plan(seed=0, epochs=epochs, skew=SKEW, pass_s=given.pass_s, shares=shares)
    cases = [case for case in CASES if case.name in given.methods.split(",")]
    print(json.dumps(machine.describe()))
    with members.members(len(shares)) as group:
        alone = [
            result
            for first in range(0, seeds, len(shares))
            for result in group.call(
                fashion.single,
                [Plan(seed=seed, epochs=epochs) for seed in range(first, min(seeds, first + len(shares)))],
                timeout_s=TIMEOUT_S,
            )
            if result is not None
        ]
        found: dict[Case, list[Result]] = {case: [] for case in cases}
        for seed in range(seeds):
            print(f"seed {seed}, single: {100 * alone[seed].accuracy:.2f} %", flush=True)
            for case in cases:
                result = train(group, case, replace(base, seed=seed))
                found[case].append(result)
                print(
                    f"seed {seed}, {case.name}: {100 * result.accuracy:.2f} %, {result.rounds} rounds, "
                    f"{result.seconds:.1f} s, of the members' last batches "
                    f"{result.spread_s:.1f} s apart",
                    flush=True,
                )
    single = fashion.median(alone)
    print(f"\nsingle process {single:.2f} %")
    for case, results in found.items():
        behind = single - fashion.median(results)
        verdict = "met" if behind <= TARGET_POINTS else "MISSED"
        print(
            f"{case.name:8} at {case.lr_factor:g} times the rate {fashion.median(results):.2f} %, "
            f"{behind:+.2f} points behind; target: at most {TARGET_POINTS:g}: {verdict}"
        )
    print(f"load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
