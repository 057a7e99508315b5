"""What `server` and `launch` share: the run's options, the server they make, and how a worker joins."""

import logging
import os
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat import ParameterServer, log, optim, schedule, staleness
from offbeat.address import THIS_MACHINE
from offbeat.cli import model_file, notation
from offbeat.cli.background import Background, LogHandler
from offbeat.cli.exit_codes import ExitCode, code_of, first_failure
from offbeat.cli.options import as_typed
from offbeat.cli.parser import count, file, positive_int
from offbeat.cli.signals import Signals, Stopped
from offbeat.errors import ConfigError, OffbeatError, StateError
from offbeat.extras import lacks

__all__ = [
    "add_run_options",
    "join_lines",
    "logged_to",
    "make_server",
    "not_saved",
    "run_options_given",
    "stop",
]

GIVEN = "<the secret given as --token>"
"""In the place of a token that is not shown and that no variable holds."""

OPTIMIZERS: Mapping[str, type[optim.OptimizerSpec]] = {
    cls.__name__: cls
    for cls in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.DelayedNesterov)
}
POLICIES: Mapping[str, type[staleness.StalenessPolicy]] = {
    cls.name: cls
    for cls in (
        staleness.Constant,
        staleness.AdaptiveLR,
        staleness.Inverse,
        staleness.Polynomial,
        staleness.Hinge,
        staleness.GradientFiltering,
        staleness.MomentumCorrection,
    )
}
SCHEDULES: Mapping[str, type[schedule.Schedule]] = {
    cls.name: cls for cls in (schedule.Constant, schedule.Step, schedule.Cosine, schedule.Linear)
}


def add_run_options(parser: ArgumentParser) -> None:
    """Add what decides over a run: `ParameterServer`'s keywords of the same names."""
    run = parser.add_argument_group(
        "the run", "objects are written as in Python: 'SGD(lr=0.1, momentum=0.9)'"
    )
    run.add_argument(
        "--model", type=file, metavar="FILE", help="initial values, .safetensors; default: the first worker's"
    )
    run.add_argument(
        "--save", type=_place, metavar="FILE", help="write the model there at the end, .safetensors"
    )
    run.add_argument("--optimizer", metavar="SPEC", help="runs on the server; default: the first worker's")
    run.add_argument(
        "--lr-schedule", metavar="SPEC", help="'linear' or 'cosine' fall to 0 over --max-samples"
    )
    run.add_argument(
        "--max-samples", type=positive_int, metavar="N", help="the run ends for all after so many samples"
    )
    run.add_argument(
        "--staleness-policy",
        action="append",
        metavar="SPEC",
        help="what late pushes are worth; may be repeated",
    )
    run.add_argument(
        "--max-staleness", type=count, metavar="N", help="a push more updates late than this is rejected"
    )
    run.add_argument(
        "--no-momentum-correction",
        action="store_true",
        help="one shared velocity on the server, as in torch.optim",
    )
    run.add_argument(
        "--transaction", default="fragment", metavar="KIND", help="'fragment' (default) or 'model'"
    )
    run.add_argument("--run-id", metavar="NAME", help="name of the run; default: a random one")
    run.add_argument(
        "--checkpoint-dir",
        type=_directory,
        metavar="DIR",
        help="keep checkpoints there, and go on from the newest",
    )
    run.add_argument(
        "--checkpoint-frequency",
        type=_frequency,
        metavar="N",
        help="between two: updates, or a time such as 500ms, 30s, 5m or 1h; default: 1000",
    )
    run.add_argument(
        "--resume", default="auto", metavar="HOW", help="'auto' (default), 'must', or 'never' to begin anew"
    )


def _place(text: str) -> model_file.Place:
    given = file(text)
    try:
        return model_file.Place(given, given.parent if given.is_absolute() else Path.cwd())
    except OSError as error:
        raise ArgumentTypeError("the working directory is gone; go to one that is there") from error


def _directory(text: str) -> str:
    """Leave the text as it is, where a `Path` would take "./~amy", a folder's name, for amy's home."""
    file(text)
    return text


def _frequency(text: str) -> int | str:
    """Take digits for a count, which Python has as a number."""
    return int(text) if re.fullmatch("[0-9]{1,20}", text) else text  # a count has no more digits than that


def run_options_given(arguments: Namespace) -> list[str]:
    """Name the run's options that a command line sets to anything but their defaults."""
    parser = ArgumentParser(add_help=False)
    add_run_options(parser)
    defaults = vars(parser.parse_args([])).items()
    return [
        "--" + name.replace("_", "-") for name, default in defaults if getattr(arguments, name) != default
    ]


def make_server(
    arguments: Namespace,
    *,
    host: str | None,
    port: int,
    token: str | None,
    insecure: bool = False,
    linger_s: float = 10.0,
    rejoin_grace_s: float = 60.0,
    metrics_port: int | None = None,
    metrics_host: str = THIS_MACHINE[0],
) -> ParameterServer:
    """Make the server that a command line describes.

    Args:
        arguments: With the options of `add_run_options`.
        host: As in `ParameterServer`.
        port: The same.
        token: The same.
        insecure: The same.
        linger_s: The same.
        rejoin_grace_s: The same.
        metrics_port: The same.
        metrics_host: The same.

    Raises:
        ConfigError: If an option cannot be used.
        OSError: If the model's file cannot be read.
        ModuleNotFoundError: If there are to be metrics, and what writes them is not installed.
    """
    if metrics_port is not None and (fault := lacks("prometheus_client", "--metrics-port")):
        raise ModuleNotFoundError(fault, name="prometheus_client")
    if arguments.save is not None:
        model_file.check_writable(arguments.save.path())
    model = None if arguments.model is None else model_file.load(arguments.model)
    optimizer = _optimizer(arguments.optimizer)
    policies = _policies(arguments.staleness_policy)
    rate = _schedule(arguments.lr_schedule, arguments.max_samples)
    with as_typed():
        return ParameterServer(
            model,
            optimizer=optimizer,
            staleness_policy=policies,
            max_staleness=arguments.max_staleness,
            momentum_correction=False if arguments.no_momentum_correction else None,
            transaction=arguments.transaction,
            lr_schedule=rate,
            max_samples=arguments.max_samples,
            run_id=arguments.run_id,
            checkpoint_dir=arguments.checkpoint_dir,
            checkpoint_frequency=arguments.checkpoint_frequency,
            resume=arguments.resume,
            host=host,
            port=port,
            token=token,
            insecure=insecure,
            linger_s=linger_s,
            rejoin_grace_s=rejoin_grace_s,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )


def _optimizer(text: str | None) -> optim.OptimizerSpec | None:
    if text is None:
        return None
    return notation.read(text, "--optimizer", OPTIMIZERS, "SGD(lr=0.1, momentum=0.9)")


def _policies(texts: list[str] | None) -> staleness.Policy:
    if not texts:
        return "constant"
    return [notation.read(text, "--staleness-policy", POLICIES, "AdaptiveLR(factor=0.9)") for text in texts]


def _schedule(text: str | None, max_samples: int | None) -> schedule.Schedule | str | None:
    if text is None:
        return None
    name = text.strip().removesuffix("()").lower()
    if name in ("linear", "cosine"):
        if max_samples is None:
            raise ConfigError(
                f"--lr-schedule {text} falls to 0 over the run, which has no end: give --max-samples N, or "
                f"the schedule's own length, as in '{name.capitalize()}(total=10000)'"
            )
        return name  # its length is the run's
    short = name.partition("(")[0].rstrip()
    alone = f", or {short} alone, which is as long as --max-samples" if short in ("linear", "cosine") else ""
    return notation.read(text, "--lr-schedule", SCHEDULES, "Cosine(total=10000, warmup=100)", or_else=alone)


def stop(
    server: ParameterServer,
    place: model_file.Place | None,
    signals: Signals,
    background: Background,
    *,
    restarting: bool = False,
) -> ExitCode:
    """Stop a server, then write its model to a file, if one was asked for and there is a model.

    The second signal that comes meanwhile breaks that off. What goes wrong is said and not raised: it hides
    nothing that has gone wrong before.

    Args:
        server: The server.
        place: Where its model goes, if anywhere.
        signals: Those of the command.
        background: Where is said what goes wrong.
        restarting: Whether its workers are to wait for it to come again.

    Returns:
        How the command ends if nothing else has failed.
    """
    again = ""
    try:
        with signals.raised(but_for=1):
            server.stop(restarting=restarting)
            kept = _last_checkpoint(server)
            if place is None:
                return kept
            state = server.state_dict()  # as it is now: every push that was acknowledged is in it
            path = place.path()
            if not Path(os.path.realpath(path)).parent.is_dir():
                again = "; its folder had gone, and is made again"
            model_file.save(state, path, before_replacing=signals.leave)
    except StateError as error:
        return not_saved(place, str(error), background)
    except Stopped:
        where = place and place.given
        why = f"a signal came before the model was in {where}{_elsewhere(server, place)}"
        code = not_saved(place, why, background)
        return ExitCode(first_failure(code, _last_checkpoint(server)))
    except model_file.ModelLeftError as error:
        background.say(str(error))
        return code_of(error)
    except OSError as error:
        elsewhere = _elsewhere(server, place)
        background.say(f"the model is {'not saved' if elsewhere else 'lost'}: {error}{elsewhere}")
        return code_of(error)
    with suppress(OSError):  # the model is there, whether or not anybody reads where
        print(f"the model is in {path}{again}\n", end="", flush=True)
    return kept


def _elsewhere(server: ParameterServer, place: model_file.Place | None) -> str:
    """Say which checkpoint has a model that is not in its file, and how it is taken out; or nothing."""
    status = server.status()
    kept = status["checkpoints"]
    if place is None or kept is None:
        return ""
    from offbeat._offbeat import checkpoint_names

    try:
        if not checkpoint_names(kept["directory"]):
            return ""
    except OffbeatError:  # it is gone, too
        return ""
    match kept["version"]:
        case None:  # it is of the server before, from which this one has gone on
            as_of = ", as it was then"
        case version if version == status["version"]:
            as_of = ""
        case version:
            as_of = f", as of version {version:,} of {status['version']:,}"
    path = place.path().absolute()
    command = ["offbeat", "checkpoint", "export", kept["directory"], str(path)]
    command += ["--force"] * os.path.exists(path)  # noqa: PTH110  which raises nothing, whatever is in the way
    return (
        f"; the newest checkpoint in {kept['directory']} has it{as_of}: `{shlex.join(command)}` takes it "
        "out, to that file once it can be written, or to another"
    )


def _last_checkpoint(server: ParameterServer) -> ExitCode:
    """Look whether the last checkpoint was written, where some are kept; the log has said why not."""
    checkpoints = server.status()["checkpoints"]
    return ExitCode.FILE if checkpoints is not None and checkpoints["failed"] else ExitCode.OK


def not_saved(place: model_file.Place | None, why: str, background: Background) -> ExitCode:
    """Say why there is no file, if one was asked for.

    Returns:
        How the command ends if nothing else has failed.
    """
    if place is None:
        return ExitCode.OK
    background.say(f"nothing is saved: {why}")
    return ExitCode.NOT_SAVED


def join_lines(address: str, *, token: str | None, has_token: bool, in_environment: bool) -> str:
    """Word how a worker joins, for a shell and for Python, each as a line to copy.

    Args:
        address: The server's, as other machines reach it.
        token: The token, if it may be shown, which is where we made it up.
        has_token: Whether there is one at all.
        in_environment: Whether this process's OFFBEAT_TOKEN is the token, so that a shell here knows it, too.
    """
    shell = f"OFFBEAT_SERVER={address} "
    python = f'offbeat.AsyncWorker("{address}", model=model'
    if has_token and in_environment:
        shell += "OFFBEAT_TOKEN=$OFFBEAT_TOKEN "
        python += ', token=os.environ["OFFBEAT_TOKEN"]'
    elif has_token:
        shell += f"OFFBEAT_TOKEN={shlex.quote(token or GIVEN)} "
        python += f', token="{token or GIVEN}"'
    shell += "python your_script.py"
    return f"A worker joins from a shell with\n    {shell}\nor in Python with\n    {python})"


@contextmanager
def logged_to(background: Background, prefix: str = "") -> Iterator[None]:
    """Show what the server has to log."""
    handler, level = LogHandler(background, prefix), log.LOGGER.level
    log.LOGGER.addHandler(handler)
    if level == logging.NOTSET:
        log.LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.LOGGER.removeHandler(handler)
        log.LOGGER.setLevel(level)
