"""From the lines that run.py wrote to RESULTS.md: medians, spreads, ratios, and which targets were met.

    python benches/summary.py .out/bench.jsonl > benches/RESULTS.md

The reference of a block is its better mode, the mean of before and after; a ratio is taken within a block,
and its median over the rounds. Spreads are the smallest and the largest of the rounds.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Line

SYSTEM = "offbeat"
MODEL_BYTES_PER_PARAM = 4
RATIO_TARGETS = {10_000: 0.7, 1_000_000: 0.8, 25_000_000: 0.8}
"""Share of the reference's updates per second, by size, at every number of workers."""
SERVER_TARGETS_AT = (25_000_000, 4)
"""Parameters and workers where the server's processor time and memory count."""
CPU_TARGET_S_PER_GB = 0.30
MEMORY_TARGET_MODELS = 1.5
MEMORY_TARGET_MB = 60.0
FORMULA_TOLERANCE = 0.05
"""Share by which resident memory may exceed what `status()` says; the allocator and the sockets take some."""
MEMORY_TERMS = ("roots", "ledgers", "pinned", "idle", "staging")
"""Of the memory that `status()` tells."""
MLP_TARGET = 1.1
"""Offbeat's samples per second with one push in flight, over Python sockets'."""
MLP_BATCH = 32
APPLY_TARGET = 0.9
"""The store's update of a whole model, as a share of the same arithmetic done in place."""
QUEUED_TARGET = 0.75
"""Time of four pushes that wait on one fragment together, as a share of four that come one by one."""

Cell = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """What came out over the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        if not self.values:
            return "–"
        median, low, high = (_short(x) for x in (self.median, min(self.values), max(self.values)))
        return median if len(self.values) == 1 else f"{median} [{low}–{high}]"


@dataclass(frozen=True)
class Target:
    """A figure that was promised, and what came out."""

    what: str
    bound: str
    measured: Spread
    is_met: bool

    @property
    def verdict(self) -> str:
        """The word for it."""
        if not self.measured.values:
            return "not measured"
        return "met" if self.is_met else "**missed**"


def read(path: Path) -> list[Line]:
    """Read a file of lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def page(lines: list[Line]) -> str:
    """Write the whole page."""
    good = [line for line in lines if "error" not in line]
    parts = [
        "# Results\n\nWritten by `make bench`; do not edit.",
        _about(lines),
        _targets_table(targets(good)),
        _how_to_read(),
        *_push_pull_tables(good),
        _mlp_table(good),
        _memory_table(good),
        _limits_table(good),
        _failures(lines),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---------------------------------------------------------------------------------------------- figures


def reference_rates(lines: list[Line]) -> dict[tuple[int, Cell], float]:
    """Take of each block, by round and cell, the reference's updates per second."""
    by_mode: dict[tuple[int, Cell], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["kind"] == "reference":
            by_mode[line["round"], _cell(line)][line["mode"]].append(line["updates_per_s"])
    return {block: max(statistics.mean(v) for v in modes.values()) for block, modes in by_mode.items()}


def ratios(lines: list[Line], system: str, cell: Cell) -> Spread:
    """Divide a system's updates per second by the reference's of the same block."""
    reference = reference_rates(lines)
    return _spread(
        _of(lines, "push_pull", system, cell),
        lambda line: line["updates_per_s"] / reference[line["round"], cell],
        where=lambda line: (line["round"], cell) in reference,
    )


def targets(lines: list[Line]) -> list[Target]:
    """Hold what was measured against what was promised."""
    found = []
    for num_params, bound in RATIO_TARGETS.items():
        for num_workers in sorted({w for n, w in _cells(lines) if n == num_params}):
            ratio = ratios(lines, SYSTEM, (num_params, num_workers))
            what = f"updates/s, share of the C reference, N = {_size(num_params)}, W = {num_workers}"
            found.append(Target(what, f"≥ {bound}", ratio, _at_least(ratio, bound)))
    num_params, num_workers = SERVER_TARGETS_AT
    at = f"N = {_size(num_params)}, W = {num_workers}"
    own = _of(lines, "push_pull", SYSTEM, SERVER_TARGETS_AT)
    cpu = _spread(own, lambda line: line["server_cpu_s_per_gb"])
    cpu_target = f"≤ {CPU_TARGET_S_PER_GB:.2f}"
    found.append(Target(f"server CPU s/GB, {at}", cpu_target, cpu, _at_most(cpu, CPU_TARGET_S_PER_GB)))
    resident = _spread(own, lambda line: line["server_load_peak_mb"])
    bound = MEMORY_TARGET_MODELS * num_params * MODEL_BYTES_PER_PARAM / 1e6 + MEMORY_TARGET_MB
    limit = f"≤ {MEMORY_TARGET_MODELS} models + {MEMORY_TARGET_MB:.0f} MB = {bound:.0f}"
    found.append(Target(f"server MB resident, SGD, {at}", limit, resident, _at_most(resident, bound)))
    for line in lines:
        if line["kind"] == "memory" and line["system"] != SYSTEM:
            predicted = line["base_mb"] + line["memory"]["total_bytes"] / 1e6
            measured = Spread((line["server_load_peak_mb"],))
            what = (
                f"server MB resident, {line['system']}, N = {_size(line['n_params'])}, W = {line['workers']}"
            )
            limit = f"≤ the formula's {predicted:.0f} + {FORMULA_TOLERANCE:.0%}"
            is_met = _at_most(measured, predicted * (1 + FORMULA_TOLERANCE))
            found.append(Target(what, limit, measured, is_met))
    apply = _spread(_store(lines, "update_25M_vs_in_place_simd"), lambda line: line["share"])
    what = "store alone, an update of 25e6, share of the same in place"
    found.append(Target(what, f"≥ {APPLY_TARGET}", apply, _at_least(apply, APPLY_TARGET)))
    queued = _spread(_store(lines, "four_queued_vs_four_separate"), lambda line: 1 / line["share"])
    what = "store alone, four queued pushes, time over four separate ones'"
    found.append(Target(what, f"≤ {QUEUED_TARGET}", queued, _at_most(queued, QUEUED_TARGET)))
    gain = _mlp_ratios(lines, "mlp:offbeat", "mlp:pysock")
    found.append(
        Target("MLP samples/s, over Python sockets", f"≥ {MLP_TARGET}", gain, _at_least(gain, MLP_TARGET))
    )
    return found


def _mlp_ratios(lines: list[Line], system: str, peer: str) -> Spread:
    rates = {
        (line["system"], line["round"]): line["updates_per_s"] for line in lines if line["kind"] == "mlp"
    }
    rounds = sorted({number for _, number in rates})
    both = [n for n in rounds if (system, n) in rates and (peer, n) in rates]
    return Spread(tuple(rates[system, n] / rates[peer, n] for n in both))


def _of(lines: list[Line], kind: str, system: str, cell: Cell) -> list[Line]:
    return [x for x in lines if x["kind"] == kind and x["system"] == system and _cell(x) == cell]


def _store(lines: list[Line], bench: str) -> list[Line]:
    return [line for line in lines if line["kind"] == "store" and line["system"] == f"store:{bench}"]


def _spread(
    lines: Iterable[Line], value: Callable[[Line], float], where: Callable[[Line], bool] = lambda _: True
) -> Spread:
    return Spread(tuple(value(line) for line in lines if where(line)))


def _cell(line: Line) -> Cell:
    return line["n_params"], line["workers"]


def _cells(lines: list[Line]) -> list[Cell]:
    return sorted({_cell(line) for line in lines if line["kind"] == "push_pull"})


def _at_least(spread: Spread, bound: float) -> bool:
    return bool(spread.values) and spread.median >= bound


def _at_most(spread: Spread, bound: float) -> bool:
    return bool(spread.values) and spread.median <= bound


# ---------------------------------------------------------------------------------------------- the page


def _about(lines: list[Line]) -> str:
    about = next(line for line in lines if line["kind"] == "machine")
    end: Line = next((line for line in lines if line["kind"] == "end"), {})
    num_rounds = len({line["round"] for line in lines if "round" in line})
    offbeat = about["offbeat"]
    if isinstance(offbeat, dict):
        offbeat = ", ".join(f"{key} {value}" for key, value in offbeat.items())
    rows = [
        ("command", f"`{about['command']}`, {about['date']}, {end.get('minutes', '?')} min"),
        ("rounds", f"{num_rounds} of {about['num_rounds']}"),
        ("processor", f"{about['cpu']}, {about['cores']} cores, {about['memory']}"),
        ("kernel", f"Linux {about['kernel']}; load average before the start {about['load_before']}"),
        ("versions", f"Python {about['python']}, numpy {about['numpy']}, torch {about['torch']}"),
        ("compilers", f"{about['gcc']} (-O3 -march=native); {about['rustc']}"),
        ("offbeat", f"{offbeat}; commit {about['commit']}"),
    ]
    return _table(("", ""), rows)


def _targets_table(found: list[Target]) -> str:
    rows = [(t.what, t.bound, str(t.measured), t.verdict) for t in found]
    num_missed = sum(t.verdict == "**missed**" for t in found)
    num_measured = sum(bool(t.measured.values) for t in found)
    count = f"{num_measured - num_missed} of {num_measured} measured are met. The median decides."
    return f"## Targets\n\n{count}\n\n" + _table(("what", "target", "measured", ""), rows)


def _how_to_read() -> str:
    return """## How to read this

Each worker pushes N float32 gradients and pulls the N updated parameters, over and over, on loopback; one
server process, W worker processes, one thread of arithmetic each. Figures are medians over the rounds, with
the smallest and the largest in brackets. GB/s counts both directions. The share is of the reference in C in
the same block: its better mode, the mean of before and after; it has no protocol, no checksum and no locks.
Server MB (10^6 bytes) is the most resident under load; in parentheses the most ever, with the start."""


def _push_pull_tables(lines: list[Line]) -> Iterable[str]:
    for cell in _cells(lines):
        num_params, num_workers = cell
        systems = sorted({x["system"] for x in lines if x["kind"] == "push_pull" and _cell(x) == cell})
        entries = [(s, _of(lines, "push_pull", s, cell)) for s in systems]
        modes = sorted({x["mode"] for x in lines if x["kind"] == "reference" and _cell(x) == cell})
        for mode in modes:
            own = [x for x in lines if x["kind"] == "reference" and _cell(x) == cell and x["mode"] == mode]
            entries.append((f"C reference, {mode}", own))
        entries.sort(key=lambda entry: -_rate(entry[1]).median)
        rows = [_push_pull_row(lines, name, own, cell) for name, own in entries]
        yield f"## N = {_size(num_params)}, W = {num_workers}\n\n" + _table(
            ("system", "updates/s", "GB/s", "p50 ms", "p99 ms", "share of C", "server CPU s/GB", "server MB"),
            rows,
        )


def _push_pull_row(lines: list[Line], name: str, own: list[Line], cell: Cell) -> Sequence[str]:
    load_peak = _spread(own, lambda x: x["server_load_peak_mb"], where=lambda x: "server_load_peak_mb" in x)
    peak = _spread(own, lambda x: x["server_peak_mb"])
    memory = (
        f"{_short(load_peak.median)} ({_short(peak.median)})" if load_peak.values else _short(peak.median)
    )
    return (
        name,
        str(_rate(own)),
        _short(_spread(own, lambda x: x["gb_per_s"]).median),
        _short(_spread(own, lambda x: x["p50_ms"]).median),
        _short(_spread(own, lambda x: x["p99_ms"]).median),
        str(ratios(lines, name, cell)),
        str(_spread(own, lambda x: x["server_cpu_s_per_gb"])),
        memory,
    )


def _rate(lines: list[Line]) -> Spread:
    return _spread(lines, lambda line: line["updates_per_s"])


def _mlp_table(lines: list[Line]) -> str:
    own = [line for line in lines if line["kind"] == "mlp"]
    if not own:
        return ""
    by_system = {s: [x for x in own if x["system"] == s] for s in sorted({x["system"] for x in own})}
    rows = [
        (
            name.removeprefix("mlp:"),
            str(entries[0]["workers"]),
            str(_spread(entries, lambda x: x["updates_per_s"] * MLP_BATCH)),
            _short(_spread(entries, lambda x: x["p50_ms"]).median),
            str(_mlp_ratios(lines, name, "mlp:pysock")),
        )
        for name, entries in sorted(by_system.items(), key=lambda item: -_rate(item[1]).median)
    ]
    return (
        f"## Training: MLP 784-256-128-10, batch {MLP_BATCH}, SGD\n\n"
        "`offbeat:2` has two pushes in flight. `hogwild` shares memory and has no wire.\n\n"
        + _table(("system", "W", "samples/s", "p50 ms a step", "over Python sockets"), rows)
    )


def _memory_table(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if line["kind"] == "memory":
            held = line["memory"]
            parts = [held[f"{part}_bytes"] for part in MEMORY_TERMS]
            rows.append(
                (
                    line["system"],
                    *(f"{part / 1e6:.0f}" for part in parts),
                    f"{line['base_mb'] + held['total_bytes'] / 1e6:.0f}",
                    f"{line['server_load_peak_mb']:.0f} ({line['server_peak_mb']:.0f})",
                    f"{line['server_load_peak_mb'] * 1e6 / line['n_params'] / MODEL_BYTES_PER_PARAM:.2f}",
                )
            )
    if not rows:
        return ""
    line = next(line for line in lines if line["kind"] == "memory")
    return (
        f"## The server's memory, N = {_size(line['n_params'])}, W = {line['workers']}\n\n"
        "MB. The terms are `status()`'s at its largest total under load; a server that holds next to nothing "
        f"has {line['base_mb']} MB.\n\n"
        + _table(("system", *MEMORY_TERMS, "with base", "resident", "models"), rows)
    )


def _limits_table(lines: list[Line]) -> str:
    own = [line for line in lines if line["kind"] == "limit"]
    if not own:
        return ""
    rows = [
        (
            line["system"].removeprefix("limit:"),
            _size(line["n_params"]) if "n_params" in line else "",
            _short(line["gb_per_s"]) if "gb_per_s" in line else "",
            _short(line["gparams_per_s"]) if "gparams_per_s" in line else "",
            f"{line['p50_us']} µs a round trip" if "p50_us" in line else "",
        )
        for line in own
    ]
    return "## Limits of this machine\n\n" + _table(("what", "N", "GB/s", "G parameters/s", ""), rows)


def _failures(lines: list[Line]) -> str:
    failed = [line for line in lines if "error" in line]
    if not failed:
        return ""
    rows = [
        (f"{x.get('system', x['kind'])}, N = {x.get('n_params', '')}, W = {x.get('workers', '')}", x["error"])
        for x in failed
    ]
    return "## What could not be measured\n\n" + _table(("what", "why"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _short(number: float) -> str:
    """Write three digits or so, never as a power of ten."""
    if number >= 1000:
        return f"{number:.0f}"
    return f"{number:.3g}"


def _size(num_params: int) -> str:
    mantissa, exponent = num_params, 0
    while mantissa and mantissa % 10 == 0:
        mantissa, exponent = mantissa // 10, exponent + 1
    return f"{mantissa}e{exponent}" if exponent > 2 else str(num_params)


if __name__ == "__main__":
    print(page(read(Path(sys.argv[1]))), end="")
