"""The release wheel as others get it: what is in it, what it asks for, and that it works where torch is not.

It is installed into an empty environment without a network: what is tested is our wheel, not pip's way to
others. Its dependencies are those of this environment, linked one by one, so that nothing else is there.
"""

import email
import os
import re
import shlex
import subprocess
import sys
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from safetensors.numpy import load_file, save_file

import offbeat
from support.command import command

REPOSITORY = Path(__file__).parents[3]
PACKAGE = REPOSITORY / "python" / "offbeat"
MAX_WHEEL_BYTES = 10_000_000
TIMEOUT_S = 50

CLIENT = """
import importlib.util, sys
import numpy as np, offbeat
assert importlib.util.find_spec("torch") is None
with offbeat.Client(sys.argv[1], worker_id="amy") as client:
    parameters = client.pull()
    for _ in range(3):
        receipt = client.push_pull({"w": np.ones_like(parameters["w"])}, out=parameters, samples=4)
        assert receipt.applied
    print(offbeat.__file__, parameters["w"].tolist())
"""

IMPORT = """
import os, sys
import offbeat
print(offbeat.__file__, len(os.listdir("/proc/self/task")), *sys.modules)
"""


@pytest.fixture(scope="module")
def wheel():
    wheels = sorted((REPOSITORY / "dist").glob("offbeat-*.whl"))
    if len(wheels) != 1:
        pytest.fail(f"{len(wheels)} wheels in {REPOSITORY / 'dist'}: run `make wheel`, then this")
    with zipfile.ZipFile(wheels[0]) as inside:
        for name, file in sources().items():
            if name not in inside.namelist() or inside.read(name) != file.read_bytes():
                pytest.fail(f"{wheels[0].name} is older than {file}: run `make wheel`, then this")
    return wheels[0]


def sources():
    """What the package consists of, but for the extension, by its name in the wheel."""
    files = [file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".pyi") or file.name == "py.typed"]
    assert len(files) > 30
    return {file.relative_to(PACKAGE.parent).as_posix(): file for file in files}


def said(wheel, name):
    """A file of the wheel's metadata, which is written like the head of a mail."""
    with zipfile.ZipFile(wheel) as inside:
        return email.message_from_bytes(inside.read(f"offbeat-{offbeat.__version__}.dist-info/{name}"))


def needed(lines):
    """Names of the projects that must be there, on this machine and without any extra."""
    requirements = [Requirement(line) for line in lines]
    return [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


# -- what it is


def test_it_has_less_than_ten_megabytes(wheel):
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_one_wheel_serves_every_python_from_3_11_on(wheel):
    assert wheel.name.startswith(f"offbeat-{offbeat.__version__}-cp311-abi3-")
    tags = said(wheel, "WHEEL").get_all("Tag")
    assert tags
    assert all(tag.startswith("cp311-abi3-") for tag in tags)
    assert said(wheel, "METADATA")["Requires-Python"] == ">=3.11"


def test_it_needs_at_most_four_others_and_torch_is_none_of_them(wheel):
    names = needed(said(wheel, "METADATA").get_all("Requires-Dist"))
    assert "numpy" in names
    assert len(names) <= 4
    assert "torch" not in names


def test_it_holds_the_package_its_stub_and_its_marker_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as inside:
        names = {name for name in inside.namelist() if not name.endswith("/")}
    about = {name for name in names if name.startswith(f"offbeat-{offbeat.__version__}.dist-info/")}
    assert names - about == {*sources(), "offbeat/_offbeat.abi3.so"}
    assert {"offbeat/py.typed", "offbeat/_offbeat.pyi"} <= names
    assert any(name.endswith("/LICENSE") for name in about)


# -- what it does where there is nothing but what it asks for


@pytest.fixture(scope="module")
def home(wheel, tmp_path_factory):
    """An environment of the wheel and its dependencies."""
    home = tmp_path_factory.mktemp("home")
    venv.create(home, symlinks=True)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    waiting, done = needed(said(wheel, "METADATA").get_all("Requires-Dist")), set()
    while waiting:
        name = waiting.pop()
        if name not in done:
            done.add(name)
            found = metadata.distribution(name)
            waiting += needed(found.requires or [])
            for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
                (site / top).symlink_to(found.locate_file(top))
    pip(home, "install", "--no-deps", "--no-index", str(wheel))
    return home


def pip(home, *arguments):
    line = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), *arguments]
    done = subprocess.run(
        [*line, "--disable-pip-version-check"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def python(program, *arguments, cwd, **environment):
    """Run an interpreter in which this repository is not to be found."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [program, *arguments],
        env=inherited | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_asks_for_all_that_it_needs(home):
    pip(home, "check")


def test_server_client_and_status_work_without_torch(home, tmp_path):
    model, trained = tmp_path / "model.safetensors", tmp_path / "trained.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, model)

    def run(*arguments):
        program = (str(home / "bin" / "offbeat"),)
        return command(*arguments, program=program, cwd=tmp_path, PYTHONPATH="")

    options = ["--port", "0", "--model", str(model), "--save", str(trained), "--optimizer", "SGD(lr=0.5)"]
    with run("server", "--keep-running", *options) as server:
        address = shlex.split(server.line("OFFBEAT_SERVER="))[0].partition("=")[2]
        file, _, w = python(home / "bin" / "python", "-c", CLIENT, address, cwd=tmp_path).partition(" ")
        assert Path(file).is_relative_to(home)
        assert w == "[-1.5, -1.5, -1.5]\n"
        with run("status", address) as status:
            assert status.ends() == 0, status.said
        assert "version 3, 12 samples" in status.said
        assert re.search("^amy +finished ", status.said, re.MULTILINE)
        server.signal()
        assert server.ends() == 0, server.said
    assert load_file(trained)["w"].tolist() == [-1.5, -1.5, -1.5]


@pytest.mark.parametrize("torch", ["beside torch", "without torch"])
def test_import_of_the_installed_package_is_quick_loads_no_torch_and_starts_no_thread(home, tmp_path, torch):
    site = next(home.glob("lib/*/site-packages"))
    where = {
        "beside torch": (sys.executable, {"PYTHONPATH": str(site)}),
        "without torch": (home / "bin" / "python", {}),
    }
    program, environment = where[torch]
    file, tasks, *modules = python(program, "-c", IMPORT, cwd=tmp_path, **environment).split()
    assert Path(file).is_relative_to(home)
    assert tasks == "1"
    assert not {"torch", "numpy", "offbeat._offbeat"} & set(modules)

    def seconds():
        begun = time.perf_counter()
        python(program, "-c", "import offbeat", cwd=tmp_path, **environment)
        return time.perf_counter() - begun

    # The best of several, interpreter start included: others may be using this machine.
    assert min(seconds() for _ in range(7)) < 0.3
