"""What communication costs a training where it is overlapped: an MLP of 25e6 parameters, batch 32, AdamW.

    PYTHONPATH=python python benches/overlap.py [--rounds 6] [--every 10] [--kind averaging]
        [--without wire] [--device cpu] [--quick]

Two member processes, one thread each, train the same model in turns: without communication, a plain loop of
torch's; averaging it every 10 steps behind the training, over gloo and over Offbeat's own transport with a
server in a process of its own; and gathering 4 micro-batches to an update, without communication and with.
"gloo" is a process group whose members are on one machine, and so add up through its memory; "wire" is the
same with that switched off, so that what they send goes over the loopback, as it would go between machines;
"bare" is torch's loop again, beside an all-reduce of as many bytes in each window and nothing of ours, which
is what gloo and the kernel cost by themselves on this machine.

All turns of a member have one model and one optimizer, so that they have the same memory. Each begins with
periods that are not timed, until the first update behind a sum has been made: one where averaging, and two
where gathering, whose updates are one period late. So as many rounds begin as end in what is timed, and what
a turn takes once is not in it: where a second set of gradients is first written to, the kernel clears pages
that the machine has not had in use, which takes several times as long as clearing them again. What the steps
before take is told by itself ("at first"). The order is turned around from round to round, and what is
compared is the time per step within a round, the mean of both members.

With `--device cuda` both members train on one GPU, and what is sent still goes through the host's memory.

Where there are as many members as cores, what communication computes (it copies, adds and divides) is taken
from training: "processor" is what a step costs of it, on all threads of a member (getrusage), "kernel" what
of that is the system's, as for the loopback, and "training thread" what of it is on the thread that trains.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import machine
import members
import offbeat
from harness import Line
from offbeat.local.shared_memory import SWITCH
from recovery import QUICK_SIZES, SIZES, make_model

BATCH = 32
LEARNING_RATE = 1e-4
TARGET_PERCENT = 10.0
PERIODS = {"averaging": 3, "accumulating": 6}
"""Timed in each turn."""
FIRST_PERIODS = {"averaging": 1, "accumulating": 2}
"""Not timed, at the beginning of each turn, in all arms of a kind."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        kind: What it is compared with: the arm of the same kind that has no communication.
        name: For people.
    """

    kind: str
    name: str


ARMS = (
    Arm("averaging", "alone"),
    Arm("averaging", "gloo"),
    Arm("averaging", "wire"),
    Arm("averaging", "tcp"),
    Arm("accumulating", "alone"),
    Arm("accumulating", "bare"),
    Arm("accumulating", "wire"),
    Arm("accumulating", "gloo"),
)

Step = Callable[[torch.Tensor, torch.Tensor], None]


class Member:
    """All ways to train of one member process."""

    def __init__(self, address: str, given: argparse.Namespace) -> None:
        every, accumulated, device = given.every, given.accumulated, given.device
        self._device = torch.device(device)
        self._sizes = QUICK_SIZES if given.quick else SIZES
        self._model = make_model(self._sizes).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._loss = nn.CrossEntropyLoss()
        self._every, self._accumulated = every, accumulated
        self._batches = self._data()
        how: dict[str, Any] = {
            "averaging_frequency": every,
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
            "device": device,
        }
        self._averagers = {"tcp": offbeat.AsyncModelAverager(self._model, server_address=address, **how)}
        self._accumulators = {}
        for name, switch in (("gloo", "1"), ("wire", "0")):
            os.environ[SWITCH] = switch
            self._averagers[name] = offbeat.AsyncModelAverager(
                self._model, communication_backend="gloo", **how
            )
            self._accumulators[name] = offbeat.AsyncGradientAccumulator(
                self._model, accumulated, overlap=True, device=device
            )
        del os.environ[SWITCH]
        self._bare = torch.zeros(sum(p.numel() for p in self._model.parameters()), device=self._device)
        self._work: distributed.Work | None = None
        self._at = 0

    def _data(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(distributed.get_rank())
        inputs = torch.randn(1024, self._sizes[0], generator=generator).split(BATCH)  # type: ignore[no-untyped-call]
        targets = torch.randint(0, self._sizes[-1], (1024,), generator=generator).split(BATCH)  # type: ignore[no-untyped-call]
        there = [(x.to(self._device), y.to(self._device)) for x, y in zip(inputs, targets, strict=True)]
        return itertools.cycle(there)

    def turn(self, arm: Arm, periods: int) -> Line:
        """Train for the first periods, and then for those that are timed."""
        step = self._step(arm)
        length = self._every if arm.kind == "averaging" else self._accumulated
        self._at = 0
        distributed.barrier()
        first_s = self._seconds(step, length * FIRST_PERIODS[arm.kind])
        before = *_processor(), time.thread_time(), self._num_bytes(arm), _loopback()
        seconds = self._seconds(step, length * periods)
        after = *_processor(), time.thread_time(), self._num_bytes(arm), _loopback()
        used = [b - a for a, b in zip(before, after, strict=True)]
        distributed.barrier()
        self._end(arm)
        return {
            "seconds": seconds,
            "first_s": first_s,
            "processor_s": (used[0] + used[1]) / len(seconds),
            "kernel_s": used[1] / len(seconds),
            "training_thread_s": used[2] / len(seconds),
            "added_bytes": used[3] / periods if _is_averager(arm) else self._num_gathered(arm),
            "loopback_bytes": used[4] / periods,
        }

    def _seconds(self, step: Step, num: int) -> list[float]:
        """Make so many steps; give what each took."""
        seconds = []
        for _ in range(num):
            begin = time.perf_counter()
            step(*next(self._batches))
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _step(self, arm: Arm) -> Step:
        if arm.kind == "averaging":
            return self._alone if arm.name == "alone" else self._averaged(self._averagers[arm.name])
        if arm.name in self._accumulators:
            return self._gathered(self._accumulators[arm.name])
        return {"alone": self._gathered_alone, "bare": self._gathered_bare}[arm.name]

    def _alone(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        loss = self._loss(self._model(inputs), targets)
        loss.backward()
        self._optimizer.step()
        loss.item()

    def _averaged(self, averager: offbeat.AsyncModelAverager) -> Step:
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            averager.train_step(inputs=inputs, targets=targets, optimizer=self._optimizer, loss_fn=self._loss)

        return step

    def _gathered_alone(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = self._loss(self._model(inputs), targets)
        (loss / self._accumulated).backward()
        self._at += 1
        if self._at % self._accumulated == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
        loss.item()

    def _gathered_bare(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._gathered_alone(inputs, targets)
        if self._at % self._accumulated == 0:
            self._wait_bare()
            self._work = distributed.all_reduce(self._bare, async_op=True)

    def _wait_bare(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _gathered(self, accumulator: offbeat.AsyncGradientAccumulator) -> Step:
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            accumulator.train_step(
                inputs=inputs, targets=targets, optimizer=self._optimizer, loss_fn=self._loss
            )

        return step

    def _num_bytes(self, arm: Arm) -> int:
        """Tell what this member has added up over members, where it is counted."""
        return self._averagers[arm.name].bytes_sent if _is_averager(arm) else 0

    def _num_gathered(self, arm: Arm) -> int:
        """Give the bytes of gradients that this member brings to each sum."""
        return 0 if arm.name == "alone" else self._bare.nbytes

    def _end(self, arm: Arm) -> None:
        if arm.name == "bare":
            self._wait_bare()
        elif arm.name != "alone":
            (self._averagers if arm.kind == "averaging" else self._accumulators)[arm.name].flush()


def _is_averager(arm: Arm) -> bool:
    return arm.kind == "averaging" and arm.name != "alone"


def _processor() -> tuple[float, float]:
    """Tell the seconds of all threads of this process: in the program, and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def _loopback() -> int:
    """Tell what the machine's loopback has carried, once counted."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


_kept: list[Member] = []


def begin(rank: int, address: str, given: argparse.Namespace) -> None:
    """Make what a member has, in its process."""
    del rank
    _kept.append(Member(address, given))


def turn(rank: int, arm: Arm, periods: int) -> Line:
    """Train in a member's process."""
    del rank
    return _kept[0].turn(arm, periods)


def measure(
    group: members.Members, arms: Sequence[Arm], num_rounds: int, *, is_quick: bool
) -> dict[Arm, list[list[Line]]]:
    """Let arms take turns; give by arm, round and member what came out."""
    found: dict[Arm, list[list[Line]]] = {arm: [] for arm in arms}
    for number in range(num_rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            periods = 1 if is_quick else PERIODS[arm.kind]
            lines = group.call(turn, arm, periods, timeout_s=TIMEOUT_S)
            found[arm].append(lines)
            step_ms = 1e3 * statistics.fmean(statistics.fmean(line["seconds"]) for line in lines)
            print(f"round {number + 1}, {arm.kind} {arm.name}: {step_ms:.1f} ms a step", flush=True)
    return found


def summary(found: dict[Arm, list[list[Line]]], every: dict[str, int]) -> list[str]:
    """Say what a step takes in each arm, and what communication costs."""
    rows = []
    for arm, rounds in found.items():
        lines = list(itertools.chain.from_iterable(rounds))
        steps_ms = sorted(1e3 * s for line in lines for s in line["seconds"])
        first_ms = 1e3 * statistics.fmean(s for line in lines for s in line["first_s"])
        own_ms = 1e3 * statistics.median(line["processor_s"] for line in lines)
        kernel_ms = 1e3 * statistics.median(line["kernel_s"] for line in lines)
        thread_ms = 1e3 * statistics.median(line["training_thread_s"] for line in lines)
        added_mb = max(line["added_bytes"] for line in lines) / 1e6
        carried_mb = statistics.median(line["loopback_bytes"] for line in lines) / 1e6
        rows.append(
            f"{arm.kind:13}{arm.name:6} mean {statistics.fmean(steps_ms):6.1f}, median "
            f"{statistics.median(steps_ms):6.1f}, p99 {steps_ms[int(0.99 * len(steps_ms))]:7.1f}, longest "
            f"{steps_ms[-1]:7.1f}, at first {first_ms:6.1f} ms a step; processor {own_ms:6.1f}, "
            f"kernel {kernel_ms:6.1f}, training thread {thread_ms:6.1f} ms; "
            f"every {every[arm.kind]} steps {added_mb:.0f} MB a member, {carried_mb:.0f} MB on the loopback"
        )
    for arm in found:
        if arm.name != "alone":
            time, processor = (_costs(found, arm, of) for of in (_step_s, _processor_s))
            verdict = "met" if statistics.median(time) <= TARGET_PERCENT else "MISSED"
            target = (
                "nothing of ours" if arm.name == "bare" else f"target: at most {TARGET_PERCENT:g}: {verdict}"
            )
            rows.append(
                f"cost of {arm.kind}, {arm.name}: {_spread(time)} of step time; {target}; "
                f"{_spread(processor)} of a member's processor time"
            )
    bare = Arm("accumulating", "bare")
    for ours in (Arm("accumulating", name) for name in ("wire", "gloo")):
        if ours in found and bare in found:
            time, processor = (_costs(found, ours, of, bare) for of in (_step_s, _processor_s))
            rows.append(
                f"accumulating, {ours.name}, against bare: {_spread(time)} of step time; "
                f"{_spread(processor)} of a member's processor time"
            )
    return rows


def _step_s(line: Line) -> float:
    return statistics.fmean(line["seconds"])


def _processor_s(line: Line) -> float:
    seconds: float = line["processor_s"]
    return seconds


def _costs(
    found: dict[Arm, list[list[Line]]], arm: Arm, of: Callable[[Line], float], than: Arm | None = None
) -> list[float]:
    """Give by round what an arm costs more than another, or the one without communication, in percent."""
    pairs = zip(found[arm], found[than or Arm(arm.kind, "alone")], strict=True)
    return [100 * (sum(map(of, one)) / sum(map(of, two)) - 1) for one, two in pairs]


def _spread(costs: list[float]) -> str:
    first, median, third = statistics.quantiles(costs, n=4) if len(costs) > 1 else costs * 3
    return f"{median:.1f} % (rounds {min(costs):.1f} to {max(costs):.1f}, half {first:.1f} to {third:.1f})"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=10, help="steps from average to average")
    parser.add_argument("--accumulated", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--kind", choices=list(PERIODS), help="of arms; all if not given")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=["gloo", "wire", "tcp", "bare"],
        help="arms of this name",
    )
    parser.add_argument("--device", default="cpu", help="where both members train")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, two rounds of one period: does it run?"
    )
    given = parser.parse_args()
    print(json.dumps(machine.describe()))
    rounds = 2 if given.quick else given.rounds
    without = {*given.without, *([] if given.device == "cpu" else ["wire"])}  # on a GPU "gloo" is the same
    arms = [arm for arm in ARMS if given.kind in {None, arm.kind} and arm.name not in without]
    server = offbeat.ParameterServer(host="127.0.0.1", port=0, transaction="model")
    with server, members.members(2) as group:
        group.call(begin, server.address, given, timeout_s=TIMEOUT_S)
        found = measure(group, arms, rounds, is_quick=given.quick)
    print()
    print("\n".join(summary(found, {"averaging": given.every, "accumulating": given.accumulated})))
    print(f"load afterwards: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
