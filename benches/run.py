"""Measure the installed Offbeat beside its peers and the reference in C, and write RESULTS.md.

    make bench                          everything, 5 rounds: about half an hour
    make bench ARGS=--quick             one short round, about five minutes; leaves RESULTS.md alone

Machines are noisy: the same program can be twice as fast a minute later. So only what was measured within one
block of one round is compared: for one size and one number of workers the reference in both its modes, every
system, and the reference again. All lines go to a file, from which summary.py makes the page.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import machine
import measure
import reference
import store
import summary
from harness import BenchError, Line

OUT = machine.ROOT / ".out"
RESULTS = Path(__file__).parent / "RESULTS.md"
SECONDS = {10_000: 1.0, 1_000_000: 1.5, 25_000_000: 4.0}
"""Per size, of one measurement; as long as it takes for some tens of updates of the largest."""
NUM_WORKERS = (1, 2, 4)
SYSTEMS = ("offbeat", "offbeat:2", "pysock", "gloo:ps")
MLP_SYSTEMS = ("mlp:single", "mlp:hogwild", "mlp:ddp", "mlp:pysock", "mlp:offbeat", "mlp:offbeat:2")
MLP_WORKERS = 2
MLP_SECONDS = 3.0
MEMORY_PARAMS = 25_000_000
MEMORY_WORKERS = 4
MEMORY_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        num_rounds: How often, at most.
        budget_s: After how long no further round is begun that would not end in time.
        seconds: Of one measurement, by size.
        num_workers: With how many workers each.
        systems: What pushes and pulls.
        mlp_systems: What trains.
        mlp_seconds: Of one training.
        memory_seconds: Of one measurement of memory; 0 for none.
        limits: Whether memory's and loopback's own limits are measured.
        store: Whether the store alone is measured, by the crate's bench.
    """

    num_rounds: int
    budget_s: float
    seconds: dict[int, float]
    num_workers: tuple[int, ...]
    systems: tuple[str, ...]
    mlp_systems: tuple[str, ...]
    mlp_seconds: float
    memory_seconds: float
    limits: bool
    store: bool


class Log:
    """Writes every line to the file as it comes, and tells the progress."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._start_s = time.monotonic()
        self.num_errors = 0

    @property
    def elapsed_s(self) -> float:
        """How long this has been going on."""
        return time.monotonic() - self._start_s

    def write(self, kind: str, line: Line) -> None:
        """Add a line."""
        self._file.write(json.dumps({"kind": kind, **line}) + "\n")
        self._file.flush()

    def take(self, kind: str, about: Line, run: Callable[[], Iterable[Line]]) -> None:
        """Add the lines that come; where a system fails, that is a line too, and the rest goes on."""
        try:
            for line in run():
                self.write(kind, {**line, **about})
                self._say(line)
        except BenchError as error:
            self.num_errors += 1
            self.write(kind, {**about, "error": str(error)})
            self._say({**about, "error": str(error)})

    def _say(self, line: Line) -> None:
        words = [f"{self.elapsed_s:6.0f} s", line.get("system", "")]
        if "n_params" in line:
            words.append(f"N={line['n_params']:.3g} W={line['workers']}")
        words.append(line.get("error") or f"{line.get('updates_per_s', line.get('gb_per_s', 0)):.4g}/s")
        print("  ".join(words), flush=True)


def run(plan: Plan, log: Log) -> None:
    """Measure everything that is planned."""
    reference.build(OUT)
    if plan.limits:
        reference.build_limits(OUT)
        log.take("limit", {}, lambda: reference.limits(OUT))
    if plan.memory_seconds:
        import memory

        load = harness.Load(num_params=MEMORY_PARAMS, num_workers=MEMORY_WORKERS, seconds=plan.memory_seconds)
        log.take("memory", {}, lambda: memory.measure(load))
    longest_s = 0.0
    if plan.store:
        store.build()
    for number in range(plan.num_rounds):
        begin_s = log.elapsed_s
        if number and begin_s + longest_s > plan.budget_s:
            print(f"the time is up after {number} of {plan.num_rounds} rounds", flush=True)
            break
        _round(plan, log, number)
        longest_s = max(longest_s, log.elapsed_s - begin_s)


def _round(plan: Plan, log: Log, number: int) -> None:
    if plan.store:
        log.take("store", {"round": number}, store.measure)
    for num_params in plan.seconds:
        for num_workers in plan.num_workers:
            _block(plan, log, number, num_params, num_workers)
    for name in _turned(plan.mlp_systems, number):
        num_workers = 1 if name == "mlp:single" else MLP_WORKERS
        log.take(
            "mlp",
            {"round": number, "system": name},
            lambda name=name, num_workers=num_workers: _one(name, 0, num_workers, plan.mlp_seconds),
        )


def _block(plan: Plan, log: Log, number: int, num_params: int, num_workers: int) -> None:
    seconds = plan.seconds[num_params]
    cell = {"round": number, "n_params": num_params, "workers": num_workers}

    def references(when: str) -> None:
        for mode in reference.MODES:
            log.take(
                "reference",
                {**cell, "mode": mode, "when": when},
                lambda mode=mode: [reference.measure(OUT, mode, num_params, num_workers, seconds)],
            )

    references("before")
    for name in _turned(plan.systems, number):
        log.take(
            "push_pull",
            {**cell, "system": name},
            lambda name=name: _one(name, num_params, num_workers, seconds),
        )
    references("after")


def _one(name: str, num_params: int, num_workers: int, seconds: float) -> Iterator[Line]:
    system = measure.find(name)
    load = harness.Load(num_params=system.num_params or num_params, num_workers=num_workers, seconds=seconds)
    yield harness.measure(system, load)


def _turned(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Let each round begin with another one, so that none always has the same neighbours in time."""
    by %= max(1, len(names))
    return names[by:] + names[:by]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benches/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="default: 5; 1 if quick")
    parser.add_argument("--quick", action="store_true", help="one round, half as long, without the limits")
    parser.add_argument(
        "--budget-minutes", type=float, default=40, help="begin no round that would end later; default: 40"
    )
    parser.add_argument("--sizes", type=_names, help="default: 1e4,1e6,25e6")
    parser.add_argument("--workers", type=_names, help="default: 1,2,4")
    parser.add_argument("--systems", type=_names, default=SYSTEMS, help=f"default: {','.join(SYSTEMS)}")
    parser.add_argument("--mlp", type=_names, default=MLP_SYSTEMS, help=f"default: {','.join(MLP_SYSTEMS)}")
    parser.add_argument("--seconds-factor", type=float, help="on every duration; default: 1; 0.5 if quick")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument(
        "--no-store", action="store_true", help="not the store alone, for which cargo is needed"
    )
    parser.add_argument("--lines", type=Path, default=OUT / "bench.jsonl", help="default: .out/bench.jsonl")
    parser.add_argument("--results", type=Path, help="default: benches/RESULTS.md; .out/RESULTS.md if quick")
    return parser.parse_args(arguments)


def plan_of(args: argparse.Namespace) -> Plan:
    """From the command line to what is to be measured."""
    factor = args.seconds_factor or (0.5 if args.quick else 1.0)
    sizes = [int(float(size)) for size in args.sizes or SECONDS]
    return Plan(
        num_rounds=args.rounds or (1 if args.quick else 5),
        budget_s=args.budget_minutes * 60,
        seconds={size: SECONDS.get(size, 1.0) * factor for size in sizes},
        num_workers=tuple(int(n) for n in args.workers or NUM_WORKERS),
        systems=args.systems,
        mlp_systems=args.mlp,
        mlp_seconds=MLP_SECONDS * factor,
        memory_seconds=0.0 if args.no_memory else MEMORY_SECONDS * factor,
        limits=not (args.quick or args.no_limits),
        store=not args.no_store,
    )


def main(arguments: list[str]) -> int:
    """Measure, and write the page; 1 if anything could not be measured."""
    args = _parse(arguments)
    plan = plan_of(args)
    results = args.results or (OUT / "RESULTS.md" if args.quick else RESULTS)
    log = Log(args.lines)
    command = shlex.join(["make", "bench", *([f"ARGS={shlex.join(arguments)}"] if arguments else [])])
    log.write("machine", {"command": command, "num_rounds": plan.num_rounds, **machine.describe()})
    try:
        run(plan, log)
    except BenchError as error:
        print(f"benches/run.py: {error}", file=sys.stderr)
        return 1
    log.write("end", {"minutes": round(log.elapsed_s / 60, 1)})
    results.write_text(summary.page(summary.read(args.lines)), encoding="utf-8")
    print(f"{results} is written, from {args.lines}; {log.num_errors} measurements have failed")
    return 1 if log.num_errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
