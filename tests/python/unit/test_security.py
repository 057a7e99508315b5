"""Nothing that is read is run: no pickle, no eval, nowhere in the package."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "python" / "offbeat"
FORBIDDEN_MODULES = {
    "_pickle",
    "cloudpickle",
    "code",
    "copyreg",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "pickletools",
    "runpy",
    "shelve",
    "yaml",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}
LOADERS = {"torch", "np", "numpy", "joblib"}


def violations(source):
    """Name what runs, or may run, bytes that it is given, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [module, *(f"{module}.{name.name}" for name in names)]
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append((node.lineno, name))
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="load")) if owner in LOADERS:
                found.append((node.lineno, f"{owner}.load"))
                continue
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)):
                if (name, value) in FORBIDDEN_KEYWORDS:
                    found.append((node.value.lineno, f"{name}={value}"))
                continue
            case _:
                continue
        found += [
            (node.lineno, module)
            for module in modules
            if module.split(".")[0] in FORBIDDEN_MODULES or module in {"torch.load", "numpy.load"}
        ]
    return found


def test_nothing_in_the_package_runs_what_it_reads():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert PACKAGE / "cli" / "model_file.py" in files
    assert {str(f): found for f in files if (found := violations(f.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from torch import load",
        "def f(x): return eval(x)",
        "exec(open('x').read())",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "read(path, allow_pickle=True)",
        "read(path, weights_only=False)",
    ],
)
def test_what_would_run_it_is_found(source):
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    ["module.eval()", "re.compile(x)", "json.loads(x)", "read(path, allow_pickle=False)", "'torch.load(x)'"],
)
def test_what_only_looks_like_it_is_not(source):
    assert not violations(source)
