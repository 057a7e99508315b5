"""`offbeat demo`: two models, four unequal workers, a single process beside them. `make demo` calls it."""

import importlib
import logging
import os
from argparse import Namespace
from pathlib import Path

from offbeat import log
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.parser import Parser, count, file
from offbeat.cli.say import flush_output, output
from offbeat.errors import ConfigError

__all__ = ["add_arguments", "run"]

NEEDED = ("torch", "matplotlib")


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.add_argument("--json", type=file, metavar="FILE", help="write everything that was found there")
    parser.add_argument(
        "--png",
        type=file,
        metavar="FILE",
        default="offbeat-demo.png",
        help="the picture; default: %(default)s",
    )
    parser.add_argument(
        "--seed",
        type=count,
        default=0,
        metavar="N",
        help="of initial values and orders; default: %(default)s",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where Fashion-MNIST is")
    parser.add_argument("--quick", action="store_true", help="see that it works, not how well")


def run(arguments: Namespace) -> int:
    """Run the demo; report on stdout, progress on stderr."""
    for option, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path is not None and (why := _not_writable(path)):
            raise ConfigError(f"{option}: {path} cannot be written: {why}")
    try:
        for name in NEEDED:  # told before minutes of training, not after
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the demo needs {' and '.join(NEEDED)}, and {error.name} is not installed: pip install "
            f"{error.name} (of an Offbeat from an index, pip install 'offbeat[demo]' brings all)",
            name=error.name,
        ) from error
    from offbeat.demo import progress, report
    from offbeat.demo.run import DemoConfig, run_demo

    log.LOGGER.addHandler(logging.NullHandler())  # the bar is enough
    config = DemoConfig(seed=arguments.seed, data_dir=arguments.data_dir, quick=arguments.quick)
    result = run_demo(config, progress.choose())
    # The files first: what is printed may find no room.
    report.write_png(result, arguments.png)
    if arguments.json is not None:
        report.write_json(result, arguments.json)
    output(report.table(result))
    output(f"the picture is {arguments.png}")
    if arguments.json is not None:
        output(f"the data is {arguments.json}")
    if not result.is_benchmark:
        output("This is not the benchmark: Fashion-MNIST was not found, and scikit-learn's digits stood in.")
        flush_output()  # a report that is lost is an error, whatever it was of
        return ExitCode.NOT_THE_BENCHMARK
    return ExitCode.OK


def _not_writable(path: Path) -> str | None:
    """Say, before minutes of training, why a file could not be written after them; None where it could."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return "it is a folder"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return None
