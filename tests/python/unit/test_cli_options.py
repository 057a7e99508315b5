"""What Python words for Python is worded for who has typed options; what somebody has said stays."""

import re

import pytest

from offbeat.cli import main
from offbeat.cli.options import OPTIONS, as_typed, typed
from offbeat.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("worded", "for_options"),
    [
        (
            "checkpoint_frequency is '5m', and there is no checkpoint_dir: say where",
            "--checkpoint-frequency is '5m', and there is no --checkpoint-dir: say where",
        ),
        (
            "host is '::' but there is no token: give token= (or set it), or say insecure=True",
            "--host is '::' but there is no token: give --token (or set it), or say --insecure",
        ),
        (
            "linger_s is nan: a time; port is -1: give 0 to 9, or None for none; transaction is 3: it is",
            "--linger is nan: a time; --port is -1: give 0 to 9, or leave it out; --transaction is 3: it is",
        ),
        ('host "x" is not an address of this machine', '--host "x" is not an address of this machine'),
        ("unknown resume 'x'; did you", "unknown --resume 'x'; did you"),
        ("anew in: say where, or leave resume out", "anew in: say where, or leave --resume out"),
        ('a new run begins; resume="must" refuses to', "a new run begins; `--resume must` refuses to"),
        (
            "did not get in error=give both the same (token= or",
            "did not get in error=give both the same (--token or",
        ),
        ("leave momentum_correction=False out, and", "leave --no-momentum-correction out, and"),
        ("to go on, give more max_samples, or none", "to go on, give more --max-samples, or none"),
    ],
)
def test_keywords_become_the_options_that_they_are_given_as(worded, for_options):
    assert typed(worded) == for_options


@pytest.mark.parametrize(
    "text",
    [
        "the port is open, the workers' token is another, and host and model are those of before",
        "its samples are used up max_samples=100",
        'a worker left cause="ConfigError: max_samples is 0, or None" worker="a"',
        "a worker leaves worker=a cause=left before its end: ConfigError: max_samples is 0, or None",
        "a worker is lost worker=run_id last_seen_s=10",
        "/srv/run_id/checkpoint-000001: ok, and ./max_samples, too",
        """the checkpoint is of run "max_samples", not of 'run_id', nor of 'it\\'s run_id'""",
    ],
)
def test_what_is_no_keyword_or_somebody_s_value_is_left_as_it_is(text):
    assert typed(text) == text


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError])
def test_an_error_keeps_its_class_and_where_it_came_from(kind):
    with pytest.raises(kind, match=r"^look at --checkpoint-dir$") as caught, as_typed():
        raise kind("look at checkpoint_dir")
    assert str(caught.value.__cause__) == "look at checkpoint_dir"


def test_each_option_is_one_that_the_server_takes(capsys):
    assert main.main(["server", "--help"]) == 0
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {*OPTIONS.values(), "--insecure", "--no-momentum-correction"} <= known
