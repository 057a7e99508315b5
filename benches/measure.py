"""Measure one system under one load, and print its line.

    python benches/measure.py offbeat --params 1e6 --workers 2 --seconds 1.5

Systems: offbeat, offbeat:2 (two pushes in flight), offbeat:adam, offbeat:model, offbeat:adam+model, pysock,
gloo:ps, gloo:allreduce. To train a model: mlp:single, mlp:hogwild, mlp:ddp, mlp:pysock, mlp:offbeat,
mlp:offbeat:2.
"""

import argparse
import importlib

import harness

MODULES = {
    "offbeat": "offbeat_client",
    "pysock": "peers.peer_pysock",
    "gloo": "peers.peer_gloo",
    "mlp": "train_mlp",
}
"""Where a system is, by its name up to the colon; loaded when it is asked for, because some load torch."""


def find(name: str) -> harness.System:
    """Load a system.

    Raises:
        BenchError: If there is none of that name, or if what it needs is not installed.
    """
    module = MODULES.get(name.partition(":")[0])
    if module is None:
        raise harness.BenchError(f"there is no system {name!r}: {', '.join(MODULES)}")
    try:
        systems: tuple[harness.System, ...] = importlib.import_module(module).SYSTEMS
    except ImportError as error:
        raise harness.BenchError(f"{name} cannot be loaded here: {error}") from error
    for system in systems:
        if system.name == name:
            return system
    raise harness.BenchError(f"there is no system {name!r}: {', '.join(s.name for s in systems)}")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system")
    parser.add_argument("--params", type=float, default=1e6, help="default: 1e6; the mlp has its own")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    system = find(args.system)
    num_params = system.num_params or int(args.params)
    load = harness.Load(num_params=num_params, num_workers=args.workers, seconds=args.seconds)
    harness.show(harness.measure(system, load))


if __name__ == "__main__":
    main()
