"""The pages are true: tests they name exist, links lead somewhere, tables say what signatures say."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat import averaging, optim, schedule, staleness
from offbeat.averaging.methods import METHODS
from offbeat.monitor.detector import METRICS
from offbeat.monitor.remedies import REMEDIES
from offbeat.optim.base import IGNORED

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / f"{name}.md"
    for name in ("README", "ARCHITECTURE", "RELIABILITY", "SECURITY", "CONTRIBUTING", "CHANGELOG")
]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def tables(text):
    """Give the rows of each table as lists of cells, under the heading that it stands below."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")
        elif line.startswith("|") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(heading, []).append(cells)
    return {heading: rows[1:] for heading, rows in found.items()}  # without their headings


# ------------------------------------------------------------------------------- rules.md and SECURITY.md


def rules_of(page):
    """Give the rows of a page's tables, each behind its heading."""
    return [
        (heading, *row) for heading, rows in tables((ROOT / page).read_text("utf-8")).items() for row in rows
    ]


RULES = {
    "docs/rules.md": rules_of("docs/rules.md"),
    "SECURITY.md": [rule for rule in rules_of("SECURITY.md") if rule[0].startswith("What is defended")],
}
NUM_NAMED = {"docs/rules.md": 200, "SECURITY.md": 50}
"""So many tests are named at least."""
NAMED = re.compile(r"`([\w./-]+\.(?:py|rs))::(\w+)`")


@functools.cache
def declared_in(path):
    """Name the tests of a file; of Rust's, also those inside `proptest!`."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        tree = ast.parse(text)
        return {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
    between = r"(?:#\[[^\]]*\]\s*|//[^\n]*\n\s*)*"
    return set(re.findall(rf"#\[(?:tokio::)?test[^\]]*\]\s*{between}(?:async )?fn (\w+)\(", text))


def assert_exist(named):
    for file, test in named:
        path = ROOT / file if file.startswith("rust/") else ROOT / "tests/python" / file
        assert path.is_file(), file
        assert test in declared_in(path), f"{file}::{test}"


@pytest.mark.parametrize("page", RULES)
def test_every_test_that_a_rule_names_exists(page):
    named = [(file, test) for rule in RULES[page] for file, test in NAMED.findall(rule[-1])]
    assert len(named) > NUM_NAMED[page]
    assert_exist(named)


@pytest.mark.parametrize("page", RULES)
def test_every_rule_has_a_test_and_every_cell_of_tests_holds_nothing_else(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert len(RULES[page]) > NUM_NAMED[page] // 3
    for heading, *rule, tests in RULES[page]:
        assert all(rule), (heading, rule)
        for test in tests.split("<br>"):
            command = re.fullmatch(r"`make (\w+)`", test)
            assert NAMED.fullmatch(test) or (command and command[1] in targets), (rule, test)


@pytest.mark.parametrize("page", RULES)
def test_no_rule_is_listed_twice(page):
    rules = [rule[:-1] for rule in RULES[page]]
    assert len(set(rules)) == len(rules)


# ---------------------------------------------------------------------------------------- RELIABILITY.md

RELIABILITY = (ROOT / "RELIABILITY.md").read_text("utf-8")


def test_every_guarantee_has_tests_that_exist_and_says_what_was_tried():
    guarantees = [row for rows in tables(RELIABILITY).values() for row in rows]
    assert len(guarantees) > 15
    for what, tests, tried in guarantees:
        named = [NAMED.fullmatch(test) for test in tests.split("<br>")]
        assert all(named), (what, tests)
        assert_exist([match.groups() for match in named])
        assert tried, what


def test_each_file_of_tests_under_make_chaos_is_of_a_guarantee():
    files = {path.name for path in (ROOT / "tests/python/chaos").glob("test_*.py")}
    assert len(files) >= 5
    assert {Path(file).name for file, _ in NAMED.findall(RELIABILITY) if file.startswith("chaos/")} == files


# ---------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


def test_every_page_is_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or not page.is_file() or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#:]+)\)", page.read_text("utf-8"))
        todo += [(page.parent / link).resolve() for link in links]
    assert len(reached) >= 5
    assert {page.resolve() for page in PAGES} <= reached


# ---------------------------------------------------------------------------------------- keywords.md

KEYWORDS = tables((ROOT / "docs/keywords.md").read_text("utf-8"))


NAMES_OF_TABLES = [
    "ParameterServer",
    "Client",
    "AsyncWorker",
    "AsyncWorker.train",
    "AsyncWorker.evaluate",
    "AsyncGradientAccumulator",
    "AsyncGradientAccumulator.train_step",
    "AsyncModelAverager",
    "AsyncModelAverager.train_step",
    "AsyncModelAverager.evaluate",
    "FaultTolerantTrainer",
    "FaultTolerantTrainer.train",
    "AsyncTrainingMonitor",
    "AsyncTrainingMonitor.observe",
    "AsyncTrainer",
    "AsyncTrainer.train",
    "init_distributed",
    "tracking.JSONL",
    "tracking.CSV",
    "tracking.TensorBoard",
    "tracking.watch",
    "tracking.Run.plot",
    "History.plot",
]


def defaults_of(function):
    """Give a signature's keywords in order, and their defaults; of what has none, the word."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: "required" if p.default is p.empty else p.default for p in parameters if p.name != "self"}


def read(cell):
    return cell if cell == "required" else ast.literal_eval(cell.strip("`"))


def test_each_table_is_held_against_the_code():
    by_tests_below = {
        "Optimizers",
        "Methods of averaging",
        "What a monitor judges",
        "What a monitor does",
        "Staleness policies",
        "Schedules",
    }
    assert set(KEYWORDS) == {*NAMES_OF_TABLES} | by_tests_below


@pytest.mark.parametrize("name", NAMES_OF_TABLES)
def test_table_of_keywords_is_the_signature_in_its_order(name):
    shown = {keyword.strip("`"): read(default) for keyword, default, _, _ in KEYWORDS[name]}
    signature = defaults_of(functools.reduce(getattr, name.split("."), offbeat))
    assert list(shown.items()) == list(signature.items())


def test_optimizers_table_is_that_of_the_signatures():
    names = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"]
    specs = {n for n in optim.__all__ if isinstance(getattr(optim, n), type)} - {"OptimizerSpec"}
    assert set(names) == specs - {"DelayedNesterov"}  # which torch does not have
    columns = list(zip(*KEYWORDS["Optimizers"], strict=True))
    keywords = [cell.strip("`") for cell in columns[0]]
    assert len(set(keywords)) == len(keywords)
    for name, column in zip(names, columns[1:], strict=True):
        shown = {keyword: cell for keyword, cell in zip(keywords, column, strict=True) if cell}
        implemented = {keyword: read(cell) for keyword, cell in shown.items() if cell != "ignored"}
        assert implemented == defaults_of(getattr(optim, name))
        torchs = inspect.signature(getattr(torch.optim, name)).parameters.keys() - {"params"}
        assert shown.keys() == torchs | {"groups"}
        assert shown.keys() - implemented.keys() == torchs & IGNORED


def test_the_optimizer_that_torch_does_not_have_is_shown_with_its_signature():
    (shown,) = re.findall(r"`DelayedNesterov\((.+?)\)`", (ROOT / "docs/keywords.md").read_text("utf-8"))
    defaults = defaults_of(optim.DelayedNesterov)
    assert shown == ", ".join(f"{name}={value!r}" for name, value in defaults.items())


def classes_of(module, base):
    """Give a module's public classes of a kind, by name."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {n: c for n, c in found.items() if isinstance(c, type) and issubclass(c, base) and c is not base}


def test_staleness_table_is_that_of_the_signatures():
    shown = {}
    for cls, name, keyword, default, *_ in KEYWORDS["Staleness policies"]:
        keywords = shown.setdefault((cls.strip("`"), read(name)), {})
        if keyword:
            keywords[keyword.strip("`")] = read(default)
    policies = classes_of(staleness, staleness.StalenessPolicy)
    assert len(policies) == 7
    assert shown == {(cls, policy.name): defaults_of(policy) for cls, policy in policies.items()}


def test_schedules_table_is_that_of_the_signatures():
    shown = {}
    for cls, keyword, default, *_ in KEYWORDS["Schedules"]:
        keywords = shown.setdefault(cls.strip("`"), {})
        if keyword:
            keywords[keyword.strip("`")] = read(default)
    of_all = shown.pop("all")
    schedules = classes_of(schedule, schedule.Schedule)
    assert len(schedules) == 4
    assert {cls: of_all | own for cls, own in shown.items()} == {
        c: defaults_of(s) for c, s in schedules.items()
    }


def test_methods_table_is_that_of_the_signatures():
    shown = [
        (cls.strip("`"), read(name), keyword.strip("`"), default and read(default))
        for cls, name, keyword, default, *_ in KEYWORDS["Methods of averaging"]
    ]
    methods = classes_of(averaging, averaging.Method)
    assert sorted(methods) == sorted(cls.__name__ for cls in METHODS.values())
    implemented = []
    for name, cls in METHODS.items():
        keywords = defaults_of(cls) or {"": ""}  # one row for what takes none
        implemented += [(cls.__name__, name, keyword, default) for keyword, default in keywords.items()]
    assert shown == implemented


@pytest.mark.parametrize(
    ("heading", "names"), [("What a monitor judges", METRICS), ("What a monitor does", REMEDIES)]
)
def test_each_name_that_a_monitor_knows_is_in_its_table_once(heading, names):
    assert len(names) >= 7
    assert [read(name) for name, *_ in KEYWORDS[heading]] == list(names)
