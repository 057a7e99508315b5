"""The command line's frame: what is refused and how, and that each kind of end has its number."""

import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from offbeat import errors
from offbeat.cli import exit_codes, main
from offbeat.cli.exit_codes import ExitCode, code_of
from offbeat.cli.signals import Signals, handlers

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        (["launch", "--workers", "2", "--lr", "0.1", "train.py"], "'--lr-schedule'"),
        (["sever"], "'server'"),
        (["lunch", "--workers", "2"], "'launch'"),
        (["--versoin"], "'--version'"),
        (["server", "--max-sample", "3"], "'--max-samples'"),
        (["server", "--optimizer", "SDG"], "'SGD'"),
        (["server", "--optimizer", "SGD(lr=1, momentun=0.9)"], "'momentum'"),
        (["server", "--staleness-policy", "adaptve_lr"], "'adaptive_lr'"),
        (["server", "--staleness-policy", "AdaptiveLR(factr=0.9)"], "'factor'"),
        (["server", "--lr-schedule", "Cosin(total=3)"], "'cosine'"),
        (["server", "--transaction", "fragmant"], "'fragment'"),
        (["launch", "--worker", "4", "train.py"], "'--workers'"),
        (["status", "--fromat", "json"], "'--format'"),
        (["checkpoint", "verfy", "kept"], "'verify'"),
        (["checkpoint", "export", "kept", "a.safetensors", "--froce"], "'--force'"),
    ],
)
def test_unknown_names_come_with_the_nearest_known_one(capsys, given, nearest):
    code, out, err = run(capsys, *given)
    assert (code, out) == (ExitCode.USAGE, "")
    assert f"did you mean {nearest}?" in err
    assert err.startswith("offbeat: ")
    assert err.count("\n") == 1, "one sentence, no traceback"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("given", ["-1", "nan"])
def test_a_timeout_that_is_no_time_is_refused_and_not_waited_for(capsys, given):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        code, out, err = run(capsys, "status", address, "--timeout", given)
    assert (code, out) == (ExitCode.USAGE, "")
    assert f"--timeout is {float(given)}: it is a number of seconds, 0 or more" in err


def test_options_of_the_run_beside_a_named_server_are_refused_each_by_name(capsys):
    values = {"--model": "a", "--save": "a", "--optimizer": "SGD", "--lr-schedule": "linear"}
    values |= {"--max-samples": "3", "--staleness-policy": "inverse", "--max-staleness": "0"}
    values |= {"--transaction": "model", "--run-id": "mine"}
    values |= {"--checkpoint-dir": "a", "--checkpoint-frequency": "3", "--resume": "must"}
    given = [word for option in values.items() for word in option] + ["--no-momentum-correction"]
    code, out, err = run(
        capsys, "launch", "--workers", "2", "--server", "localhost:5000", *given, "nowhere.py"
    )
    assert (code, out) == (ExitCode.USAGE, "")
    assert set(re.findall(r"--[a-z-]+", err.partition(": with")[0])) == {*values, "--no-momentum-correction"}
    assert "`offbeat server`" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["server", "--host", "0.0.0.0"], "--new-token"),  # noqa: S104  refused
        (["server", "--token", "a", "--new-token"], "one of the two"),
        (["server", "--model", "nowhere.safetensors"], "nowhere.safetensors"),
        (["server", "--save", "no/such/folder/model.safetensors"], "no/such/folder"),
        (["server", "--max-samples", "0"], "'0' is not a whole number"),
        (["server", "--lr-schedule", "linear"], "give --max-samples N, or"),
        (["server", "--lr-schedule", "Cosine()"], "give --max-samples N, or"),
        (["server", "--max-staleness", "-1"], "--max-staleness: '-1' is not a whole number, 0 or more"),
        (["server", "--lr-schedule", "Step"], "step_size"),
        (["server", "--optimizer", "SGD(lr=open(1))"], "as in Python"),
        (["server", "--optimizer", "SGD(lr=-1)"], "lr is -1: it is a number, 0 or more, and finite"),
        (["server", "--optimizer", "SGD(0.1)"], "has a value without its keyword: write"),
        (["server", "--optimizer", "SGD(lr=0.1"], "since a ) is missing: write"),
        (["server", "--port", "99999"], "offbeat: --port is 99999"),
        (["server", "--port", "http"], "--port: 'http' is not a whole number, 0 or more"),
        (["server", "--linger", "5 min"], "--linger: '5 min' is not a number of seconds"),
        (
            ["server", "--metrics-host", "::1"],
            "--metrics-host is '::1', and there is no --metrics-port: give one",
        ),
        (
            ["server", "--host", "nowhere.invalid", "--insecure"],
            '--host "nowhere.invalid" is not an address of',
        ),
        (["status", "localhost:1", "--timeout", "x"], "--timeout: 'x' is not a number of seconds"),
        (["top", "localhost:1", "--interval", "x"], "--interval: 'x' is not a number of seconds"),
        (["demo", "--png", "/"], "--png: / cannot be written: it is a folder"),
        (["demo", "--seed", "-1"], "--seed: '-1' is not a whole number, 0 or more"),
        (["server", "--linger", "nan"], "offbeat: --linger is nan"),
        (
            ["server", "--metrics-port", "99999"],
            "--metrics-port is 99999: it is 0 (a free one) to 65535, or leave",
        ),
        (
            ["server", "--resume", "never"],
            "--resume is 'never', and there is no --checkpoint-dir to begin anew in",
        ),
        (["server", "--transaction", "x"], "unknown --transaction 'x'"),
        (
            ["server", "--checkpoint-dir", "a", "--checkpoint-frequency", "5 min"],
            "--checkpoint-frequency is '5 min': give a number of updates",
        ),
        (["server", "--new-token", "--checkpoint-dir", __file__], "--checkpoint-dir is '/"),
        (
            ["server", "--staleness-policy", "AdaptiveLR(factor=3)"],
            "--staleness-policy 'AdaptiveLR(factor=3)': ",
        ),
        (
            ["launch", "--workers", "1", "--resume", "must", __file__],
            "--resume is 'must', and there is no --che",
        ),
        (["server", "extra"], "one argument too many"),
        (["launch", "--workers", "2", "nowhere.py"], "nowhere.py"),
        (["launch", "train.py"], "--workers"),
        (["launch", "train.py", "--workers", "2"], "Give --workers N before the script"),
        (["launch", "--workers", "2"], "are required: SCRIPT ("),
        (
            ["launch", "--workers", "2", "--first-rank", "3", "--world-size", "2", "train.py"],
            "have ranks up to 4 (--first-rank 3, --workers 2), and --world-size is 2: give 5 or more",
        ),
        (
            ["launch", "--workers", "2", "--first-rank", "1", "--world-size", "2", "train.py"],
            "give 3 or more",
        ),
        (["launch", "--workers", "3", "--world-size", "2", "train.py"], "give 3 or more"),
        (["launch", "--workers", "2", "--first-rank", "-1", "train.py"], "'-1' is not a whole number, 0 or"),
        (["status"], "OFFBEAT_SERVER"),
        (["demo", "--json", "no/such/folder/demo.json"], "no/such/folder"),
        (["server", "--save", ""], "--save: an empty text names no file"),
        (["server", "--model", ""], "--model: an empty text names no file"),
        (["server", "--token", ""], "--token: an empty token is none"),
        (["status", "--token", "", "localhost:1"], "--token: an empty token is none"),
        (["launch", "--workers", "1", "--save", __file__, __file__], "the model would replace the script"),
        (["checkpoint"], "are required: ACTION ("),
        (["checkpoint", "export", "kept"], "are required: FILE (offbeat checkpoint export --help"),
        (
            ["checkpoint", "inspect", "a", "b"],
            "'b' is one argument too many (offbeat checkpoint inspect --help",
        ),
        (["checkpoint", "verify", ""], "PATH: an empty text names no file"),
        (["checkpoint", "verify", __file__], "is no folder: give the directory"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(capsys, given, said):
    code, out, err = run(capsys, *given)
    assert (code, out) == (ExitCode.USAGE, "")
    assert said in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(capsys):
    code, _, err = run(capsys, "server", "--optimizer", "SDG", "--debug")
    assert code == ExitCode.USAGE
    assert "Traceback" in err
    assert "ConfigError" in err


@pytest.mark.parametrize(
    "given", [["--debug", "inspect", "no"], ["inspect", "--debug", "no"], ["inspect", "no", "--debug"]]
)
def test_debug_is_heard_before_an_action_and_after_it(capsys, given):
    assert "Traceback" in run(capsys, "checkpoint", *given)[2]
    assert "Traceback" not in run(capsys, "checkpoint", "inspect", "no")[2]


def test_debug_after_a_script_is_the_scripts(capsys):
    code, _, err = run(capsys, "launch", "--workers", "1", "nowhere.py", "--debug")
    assert code == ExitCode.USAGE
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "address",
    [
        "localhost:99999",
        "localhost:0",
        pytest.param("localhost:" + "1" * 5000, id="a number of 5000 digits"),
        pytest.param("localhost:" + "0" * 5000, id="5000 zeros"),
        "localhost",
        ":5000",
        "localhost:",
        "local host:1",
        "http://localhost:1",
        "a:1/b",
        "a:²",
    ],
)
def test_what_is_no_address_is_refused_before_a_worker_starts_as_by_its_client(capsys, address):
    code, out, err = run(capsys, "launch", "--workers", "1", "--server", address, __file__)
    assert (code, out) == (ExitCode.USAGE, "")
    assert f"--server: {address!r} is not an address; give HOST:PORT" in err
    code, _, _ = run(capsys, "status", address, "--timeout", "1")
    assert code == ExitCode.USAGE


def test_version_is_the_packages(capsys):
    import offbeat

    assert run(capsys, "--version") == (0, f"offbeat {offbeat.__version__}\n", "")


def test_python_m_offbeat_is_the_command_line():
    asked = [sys.executable, "-m", "offbeat", "statsu"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "unknown command 'statsu'; did you mean 'status'?" in done.stderr


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in main.COMMANDS:
        assert f"  {name}" in out
        assert main.main([name, "--help"]) == 0


def test_without_a_command_the_help_is_printed_and_the_code_is_that_of_misuse(capsys):
    code, out, _ = run(capsys)
    assert code == ExitCode.USAGE
    assert "usage" in out


def test_every_error_has_an_exit_code():
    classes = [getattr(errors, name) for name in errors.__all__]
    codes = {cls.__name__: code_of(cls("message")) for cls in classes}
    assert codes["ConfigError"] == ExitCode.USAGE
    assert codes["ConnectError"] == ExitCode.UNREACHABLE
    assert codes["AuthenticationError"] == ExitCode.NOT_ADMITTED
    assert codes["AddressInUseError"] == ExitCode.ADDRESS_IN_USE
    assert codes["ModelMismatchError"] == ExitCode.BAD_MODEL
    assert codes["ServerClosedError"] == ExitCode.LOST
    assert codes["OffbeatTimeoutError"] == ExitCode.TIMEOUT
    assert codes["ProtocolError"] == ExitCode.PROTOCOL
    # What has none of its own are faults of the program, not of what it was given.
    unexpected = {name for name, code in codes.items() if code == ExitCode.UNEXPECTED}
    faults = {"OffbeatError", "ClosedError", "ForkedError", "StateError", "OtherTermsError", "RejectedError"}
    assert unexpected == faults


def test_an_error_that_nobody_foresaw_is_one_sentence_and_code_1(capsys, monkeypatch):
    def fail(arguments: Namespace) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("offbeat.cli.env.run", fail)
    code, _, err = run(capsys, "env")
    assert code == ExitCode.UNEXPECTED
    assert err == "offbeat: ZeroDivisionError: by zero (--debug shows where)\n"


def test_the_demo_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "demo")
    assert code == ExitCode.MISSING_PACKAGE
    assert "and matplotlib is not installed: pip install matplotlib (" in err


def test_ctrl_c_is_130(capsys, monkeypatch):
    def interrupt(arguments: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("offbeat.cli.env.run", interrupt)
    assert run(capsys, "env") == (130, "", "offbeat: interrupted\n")


def test_who_calls_main_has_its_own_signal_handlers_back(capsys, monkeypatch):
    def install(arguments: Namespace) -> int:
        Signals()
        return 0

    monkeypatch.setattr("offbeat.cli.env.run", install)
    before = handlers()
    assert run(capsys, "env")[0] == 0
    assert handlers() == before


def test_the_documentation_lists_every_exit_code_and_no_other():
    documented = {
        int(number) for number in re.findall(r"^\| (\d+) \|", DOCS.read_text("utf-8"), re.MULTILINE)
    }
    assert documented == {int(code) for code in ExitCode}
    assert len(documented) > 10
    assert exit_codes.SIGNALLED == 128


def test_the_documentation_names_every_option():
    text = DOCS.read_text("utf-8")
    seen = 0
    for name in main.COMMANDS:
        import importlib

        from offbeat.cli.parser import Parser

        parser = Parser(f"offbeat {name}", "")
        importlib.import_module(f"offbeat.cli.{name}").add_arguments(parser)
        for action in parser.actions:
            assert f"`offbeat {name} {action}" in text, f"docs/cli.md does not name offbeat {name} {action}"
        options = {*parser._option_string_actions}.union(
            *(part._option_string_actions for part in parser.actions.values())
        )
        for option in options:
            if option.startswith("--") and option != "--help":
                assert f"`{option}" in text, f"docs/cli.md does not name {option} of offbeat {name}"
                seen += 1
    assert seen > 20


def test_help_of_launch_says_that_the_number_of_workers_is_required(capsys):
    _, said, _ = run(capsys, "launch", "--help")
    assert said.startswith("usage: offbeat launch --workers N [OPTION …] SCRIPT [ARGUMENT …]\n")
    assert "how many processes; required" in said
    assert "default: the first rank + the workers here" in " ".join(said.split())


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_names_what_happens_without_an_option_and_no_value_that_looks_like_one(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert "usage" in out
    assert "none:" not in out
