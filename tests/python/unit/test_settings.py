"""`ParameterServer`'s keywords: what they become, and what is refused, all of it at once."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import offbeat
from offbeat import optim, schedule, staleness
from offbeat.address import start_line
from offbeat.errors import ClosedError, ConfigError, StateError, UnsupportedTensorError

WORD = "open-sesame-of-these-tests"

# Behind `model`, in this order; newer keywords come after these.
KEYWORDS = {
    "port": 0,
    "host": None,
    "optimizer": None,
    "update_rule": "async_sgd",
    "staleness_policy": "constant",
    "staleness_lr_factor": 0.9,
    "max_staleness": None,
    "momentum_correction": None,
    "transaction": "fragment",
    "lr_schedule": None,
    "max_samples": None,
    "token": None,
    "run_id": None,
    "checkpoint_dir": None,
    "checkpoint_frequency": None,
    "resume": "auto",
    "insecure": False,
}


def made(model=None, **keywords):
    return offbeat.ParameterServer(model, **keywords)


def config(**keywords):
    return made(**keywords)._config


def test_the_first_keywords_keep_their_order_and_their_defaults():
    parameters = inspect.signature(offbeat.ParameterServer).parameters
    ours = {name: p.default for name, p in parameters.items() if name != "model"}
    assert dict(list(ours.items())[: len(KEYWORDS)]) == KEYWORDS
    assert next(iter(parameters)) == "model"


def test_a_policy_by_name_takes_its_factor_and_bound_from_their_own_keywords():
    made(port=5000, update_rule="async_sgd", staleness_policy="adaptive_lr", max_staleness=10)
    read = config(staleness_policy="adaptive_lr", staleness_lr_factor=0.8, max_staleness=20)
    assert read["staleness"] == {
        "weights": [{"name": "adaptive_lr", "factor": 0.8}],
        "max_staleness": 20,
        "max_norm": None,
    }


@pytest.mark.parametrize(
    ("given", "every"),
    [
        (None, {"versions": 1000}),
        (1, {"versions": 1}),
        ("30s", {"seconds": 30.0}),
        ("0.5 s", {"seconds": 0.5}),
        ("500ms", {"seconds": 0.5}),
        ("1.5m", {"seconds": 90.0}),
        ("5 m", {"seconds": 300.0}),
        ("1h", {"seconds": 3600.0}),
        (100, {"versions": 100}),
        (2**63 - 1, {"versions": 2**63 - 1}),
    ],
)
def test_a_checkpoint_is_made_every_so_many_updates_or_so_often(tmp_path, given, every):
    read = config(checkpoint_dir=tmp_path, checkpoint_frequency=given, resume="must")["checkpoints"]
    assert read == {"directory": str(tmp_path), "every": every, "resume": "must"}
    assert config()["checkpoints"] is None


def test_a_directory_of_checkpoints_is_where_the_server_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config(checkpoint_dir="kept")["checkpoints"]["directory"] == str(tmp_path / "kept")


def test_the_folder_of_one_checkpoint_is_none_to_keep_checkpoints_in(tmp_path, monkeypatch):
    one = tmp_path / "checkpoint-000007"
    one.mkdir()
    (one / "manifest.json").write_text("{}")
    monkeypatch.chdir(one)
    for given in (one, "."):
        with pytest.raises(ConfigError) as caught:
            made(checkpoint_dir=given)
        assert f"{one} is the folder of one checkpoint" in str(caught.value)
        assert str(caught.value).endswith(f"give the directory of all of them, {tmp_path}")
    gone = tmp_path / "checkpoint-000003"
    with pytest.raises(ConfigError, match="named as one checkpoint is, and is gone: ") as caught:
        made(checkpoint_dir=gone)
    assert str(caught.value).endswith(f"give the directory of all of them, {tmp_path}")
    file = tmp_path / "kept.py"
    file.touch()
    with pytest.raises(ConfigError, match=r"kept\.py'\), which is a file: give the path of a directory"):
        made(checkpoint_dir=file)
    with pytest.raises(ConfigError, match=r"port is -1.*; .*is the folder of one checkpoint.*; .*frequency"):
        made(checkpoint_dir=one, port=-1, checkpoint_frequency=0)
    assert config(checkpoint_dir=tmp_path)["checkpoints"]["directory"] == str(tmp_path)


@pytest.mark.parametrize("given", ["~/kept", Path("~/kept"), "~", "./~nobody-of-that-name/kept"])
def test_a_directory_of_checkpoints_may_be_in_one_s_home(tmp_path, monkeypatch, given):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole = str(tmp_path / given).replace("/~/", "/").removesuffix("/~")
    assert config(checkpoint_dir=given)["checkpoints"]["directory"] == whole


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"checkpoint_frequency": 10}, r"checkpoint_frequency is 10, and there is no checkpoint_dir"),
        ({"resume": "must"}, r"resume is 'must', and there is no checkpoint_dir"),
        ({"resume": "never"}, r"resume is 'never', and there is no checkpoint_dir .*leave resume out"),
        ({"resume": "never", "checkpoint_frequency": 3}, r"frequency is 3, and .*; resume is 'never', and"),
        ({"resume": "nver"}, r"did you mean 'never'"),
        ({"checkpoint_dir": ""}, r"checkpoint_dir is '': give the path"),
        ({"checkpoint_dir": b"kept"}, r"checkpoint_dir is b'kept': give the path"),
        ({"checkpoint_dir": "~nobody-of-that-name/a"}, r"no such user's home .*'\./~nobody-of-that-name/a'"),
        ({"checkpoint_dir": "\udc80"}, r"give a path that is UTF-8"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": 0}, r"checkpoint_frequency is 0: give a number"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": True}, r"is True: give a number of updates"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "0s"}, r"is '0s': give a number of updates"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "5d"}, r"is '5d': .* \(ms, s, m or h\), such as"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "30S"}, r"is '30S': give a number of updates"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "0"}, r"is '0': give a number of updates"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "-5s"}, r"is '-5s': give a number of updates"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": str(2**63)}, r"is '9.*8': give a number"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "9" * 5000}, r"is '9+': give a number"),
        ({"checkpoint_dir": "kept", "checkpoint_frequency": "9" * 400 + "s"}, r"is '9+s': give a number"),
        ({"checkpoint_dir": 3, "checkpoint_frequency": 1.5}, r"checkpoint_dir is 3.*frequency is 1.5"),
    ],
)
def test_checkpoint_keywords_that_cannot_be_used_are_refused_by_name(keywords, said):
    with pytest.raises(ConfigError, match=said):
        made(**keywords)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"update_rule": "async-sdg"}, "did you mean 'async_sgd'"),
        ({"update_rule": "adam"}, "Known: async_sgd"),
        ({"staleness_policy": "adaptive"}, "did you mean 'adaptive_lr'"),
        ({"transaction": "models"}, "did you mean 'model'"),
        ({"lr_schedule": "linaer", "max_samples": 5}, "did you mean 'linear'"),
        ({"optimizer": "sgd"}, r"did you mean offbeat\.optim\.SGD\("),
        ({"port": 70_000}, "port is 70000"),
        ({"port": "5000"}, "port is '5000'"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"momentum_correction": "yes"}, "momentum_correction is 'yes'"),
        ({"momentum_correction": 1}, "momentum_correction is 1: it is True, False or None"),
        ({"insecure": "yes"}, "insecure is 'yes': it is True or False"),
        ({"token": 31337}, "^token is of type int: give a string, or None$"),  # and not which
        ({"run_id": 3}, "run_id is 3: give a string, or None"),
        ({"host": 3}, "^host is 3: give a string, or None$"),
        ({"host": "0.0.0.0"}, "insecure=True"),  # noqa: S104  refused, not bound to
        ({"linger_s": -1}, "linger_s is -1"),
        ({"linger_s": float("inf")}, "linger_s is inf: it is a finite number of seconds"),
        ({"rejoin_grace_s": float("nan")}, "rejoin_grace_s is nan"),
        ({"max_samples": 10**30}, "max_samples is 1000"),
        ({"max_staleness": 10**30}, "max_staleness is 1000"),
        ({"staleness_policy": "adaptive_lr", "staleness_lr_factor": 10**400}, "factor is 1000"),
        ({"rejoin_grace_s": 10**400}, "rejoin_grace_s is 1000"),
        ({"optimizer": optim.Adam(), "momentum_correction": True}, "needs SGD with momentum > 0"),
        (
            {"optimizer": optim.SGD(), "staleness_policy": "momentum_correction"},
            "needs SGD with momentum > 0",
        ),
    ],
)
def test_setting_that_cannot_be_used_is_refused_naming_value_and_remedy(keywords, said):
    with pytest.raises(ConfigError, match=said):
        made(**keywords)


def test_unknown_keyword_names_the_nearest():
    said = r"unknown keyword of ParameterServer 'staleness_polciy'; did you mean 'staleness_policy'\?"
    with pytest.raises(ConfigError, match=said):
        made(staleness_polciy="constant")


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(
        ConfigError, match=r"(?s)port is -1.*update_rule.*staleness policy 'x'.*lr_schedule 'y'"
    ):
        made(port=-1, update_rule="z", staleness_policy="x", lr_schedule="y")


def test_live_optimizer_is_refused_on_the_server():
    live = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a live SGD runs on the worker"):
        made(optimizer=live)


def test_model_is_a_module_a_dict_or_nothing():
    with pytest.raises(ConfigError, match="model is a list"):
        made([1, 2])
    with pytest.raises(ConfigError, match="model is the class Linear"):
        made(torch.nn.Linear)
    with pytest.raises(UnsupportedTensorError, match="'w' has dtype float64"):
        made({"w": np.zeros(2)})


@pytest.mark.parametrize("kind", ["sparse", "meta", "float64"])
def test_module_with_what_cannot_be_held_is_refused_by_name(kind):
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(
        {
            "sparse": lambda w: w.to_sparse(),
            "meta": lambda w: w.to("meta"),
            "float64": lambda w: w.double(),
        }[kind](module.weight.detach())
    )
    with pytest.raises(UnsupportedTensorError, match=f"'weight' is .*{kind}"):
        made(module)


def test_host_and_token_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OFFBEAT_TOKEN", "from the environment")
    monkeypatch.setenv("OFFBEAT_HOST", "127.0.0.1")
    assert (config()["token"], config()["host"]) == ("from the environment", "127.0.0.1")
    assert config(token="mine", host="localhost")["token"] == "mine"  # noqa: S105, S106


def test_schedule_by_name_goes_over_the_runs_samples():
    assert (
        config(lr_schedule="linear", max_samples=100)["schedule"]
        == schedule.Linear(total=100, unit="samples").spec()
    )


def test_objects_say_the_same_as_keywords():
    said = config(staleness_policy=staleness.AdaptiveLR(factor=0.9, max_staleness=10))
    assert said == config(staleness_policy="adaptive_lr", max_staleness=10)


def test_momentum_correction_of_the_server_is_the_optimizers():
    sgd = optim.SGD(momentum=0.9)
    assert config(optimizer=sgd)["optimizer"]["momentum_correction"] is True
    assert config(optimizer=sgd, momentum_correction=False)["optimizer"]["momentum_correction"] is False
    policies = ["momentum_correction", "inverse"]
    assert config(optimizer=sgd, staleness_policy=policies)["momentum_correction"] is True


def test_server_that_is_not_started_says_so():
    unstarted = made()
    for use in (
        unstarted.status,
        unstarted.state_dict,
        unstarted.wait_for_workers,
        lambda: unstarted.address,
    ):
        with pytest.raises(StateError, match=r"server\.start\(\)"):
            use()
    unstarted.stop()
    with pytest.raises(ClosedError):
        unstarted.start()


# -- what it says at the start


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        (
            "127.0.0.1:7",
            False,
            ["this machine only", "OFFBEAT_SERVER=127.0.0.1:7 python", "set OFFBEAT_TOKEN"],
        ),
        ("[::1]:7", True, ["this machine only", "OFFBEAT_TOKEN=$OFFBEAT_TOKEN", "OFFBEAT_HOST"]),
        ("10.0.0.1:7", True, ["OFFBEAT_TOKEN=$OFFBEAT_TOKEN OFFBEAT_SERVER=10.0.0.1:7 python train.py"]),
    ],
)
def test_start_line_says_where_how_to_join_and_how_to_open(address, token, said):
    line = start_line(address, token=WORD if token else None, in_environment=True)
    assert WORD not in line
    assert all(part in line for part in said), line


def test_start_line_names_no_variable_that_is_not_set():
    line = start_line("10.0.0.1:7", token=WORD, in_environment=False)
    assert "joins with: OFFBEAT_TOKEN=<the server's token> OFFBEAT_SERVER=10.0.0.1:7 python" in line
    assert WORD not in line
    assert "$" not in line


@pytest.mark.parametrize("address", ["0.0.0.0:7", "[::]:7"])
def test_start_line_names_a_real_address_for_every_interface(address):
    line = start_line(address, token=WORD, in_environment=True)
    joins = line.split("OFFBEAT_SERVER=")[1]
    assert not joins.startswith(("0.0.0.0", "[::]"))  # noqa: S104
    assert ":7 python" in joins
