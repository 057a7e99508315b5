"""`offbeat env`: what it reads from the system's files, and that it shows no secret."""

import json
import os

import pytest

from offbeat.cli import env, main


def test_secrets_are_not_shown_and_others_are():
    shown = env.environment(
        {
            "OFFBEAT_TOKEN": "abc",
            "OFFBEAT_SERVER": "h:1",
            "HTTPS_PROXY": "http://user:abc@proxy",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "OMP_NUM_THREADS": "2",
            "HOME": "/root",
            "RANKING": "1",
            "RANK": "3",
        }
    )
    assert "abc" not in json.dumps(shown)
    assert shown["OFFBEAT_SERVER"] == "h:1"
    assert shown.keys() == {"OFFBEAT_TOKEN", "OFFBEAT_SERVER", "HTTPS_PROXY", "OMP_NUM_THREADS", "RANK"}


def test_what_torch_was_built_for_is_told_apart_from_what_is_here():
    assert env.cuda("13.2", []) == "torch built for CUDA 13.2; no GPU that it can use here"
    assert env.cuda("13.2", ["H100", "A100"]) == "torch built for CUDA 13.2; H100, A100"
    assert env.cuda(None, []) == "torch built without CUDA; no GPU that it can use here"


def test_processor_is_read():
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2GHz\nflags\t\t: fpu avx avx2 fma sse4_2\n"
    assert env.cpu(text) == ("Some CPU @ 2GHz", ["sse4_2", "avx", "fma", "avx2"])
    assert env.cpu("processor : 0\nFeatures : fp asimd sve\n") == (None, ["asimd", "sve"])
    assert env.cpu("") == (None, [])


def test_the_containers_share_of_the_cores_is_read():
    assert env.cores_of_cgroup("150000 100000\n") == "1.5"
    assert env.cores_of_cgroup("max 100000\n") == "no limit"
    assert env.cores_of_cgroup("") == "no limit"


def test_memory_is_read():
    assert (
        env.memory("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n") == "2.0 GiB, 1.0 GiB of it available"
    )
    assert env.memory("") == "unknown"


@pytest.mark.parametrize("asked", [["--format", "json"], ["--json"]])
def test_json_has_what_the_text_has(capsys, monkeypatch, asked):
    monkeypatch.setenv("OFFBEAT_TOKEN", "very-secret")
    assert main.main(["env"]) == 0
    text = capsys.readouterr().out
    assert main.main(["env", *asked]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "very-secret" not in text + json.dumps(facts)
    assert facts["offbeat"]["profile"] in ("release", "debug")
    assert facts["machine"]["cores"] == os.cpu_count()
    for section, values in facts.items():
        assert section in text
        assert all(name in text for name in values)
