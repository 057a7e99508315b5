"""From Python's words to the command line's: who typed `--max-samples` is not told of `max_samples`.

The server and the extension word what they refuse or warn of for Python. In the words of `offbeat server` and
`launch` their keywords are options; what stands in quotes is somebody's value, and stays.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.errors import OffbeatError

__all__ = ["OPTIONS", "as_typed", "typed"]

OPTIONS = {
    "checkpoint_dir": "--checkpoint-dir",
    "checkpoint_frequency": "--checkpoint-frequency",
    "linger_s": "--linger",
    "lr_schedule": "--lr-schedule",
    "max_samples": "--max-samples",
    "max_staleness": "--max-staleness",
    "metrics_host": "--metrics-host",
    "metrics_port": "--metrics-port",
    "rejoin_grace_s": "--rejoin-grace",
    "run_id": "--run-id",
    "staleness_policy": "--staleness-policy",
    # Words of any sentence, so that only what is said of them as keywords counts:
    "host": "--host",
    "optimizer": "--optimizer",
    "port": "--port",
    "resume": "--resume",
    "token": "--token",
    "transaction": "--transaction",
}
"""The options of the keywords of `ParameterServer` that they are given as."""

_NAMES = "|".join(name for name in OPTIONS if "_" in name)
_WORDS = "|".join(name for name in OPTIONS if "_" not in name)
_KEYWORD = re.compile(
    r"(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)\"(?:[^\"\\]|\\.)*\""  # a value, which stays
    r"|(?<= cause=).*|(?<= worker=)\S+"  # a worker's own words, in the log
    r"|(?P<none>, or None(?: for [a-z ]+)?)"
    r"|(?<![\w./-])(?:"
    r"(?P<off>momentum_correction=False)|(?P<on>insecure=True)|(?P<token>token=(?=[ ,;)]))"
    r"|(?P<name>resume|transaction)=\"(?P<value>\w+)\""
    rf"|(?P<keyword>(?:{_NAMES})(?![\w=/])"
    rf"|(?:(?<=unknown )|(?<=leave )|(?:^|(?<=; )))(?:{_WORDS})(?= ['\"]| out| is | must be ))"
    r")"
)
_IN_PLACE_OF = {
    "none": ", or leave it out",
    "off": "--no-momentum-correction",
    "on": "--insecure",
    "token": OPTIONS["token"],
}
"""Of what the groups find, where that is always the same."""


def typed(text: str) -> str:
    """Word a text for who has typed options."""
    return _KEYWORD.sub(_option, text)


@contextmanager
def as_typed() -> Iterator[None]:
    """Word the errors of what is done in here for who has typed options.

    Raises:
        OffbeatError: What was raised, of its class.
    """
    try:
        yield
    except OffbeatError as error:
        raise type(error)(typed(str(error))) from error


def _option(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "value":
            return f"`{OPTIONS[found['name']]} {found['value']}`"
        case "keyword":
            return OPTIONS[found["keyword"]]
        case group:
            return _IN_PLACE_OF.get(group or "", found[0])
