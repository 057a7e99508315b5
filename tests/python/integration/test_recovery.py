"""A run that is killed, wherever, and started again ends with the bits of one that was not."""

import json
import random
import re
import shutil
import signal
import sys

import pytest
import torch

from offbeat.recovery import directory
from offbeat.recovery import folder as folder_of
from support import fault_tolerant
from support.command import command
from support.fault_tolerant import NUM_STEPS, in_process

SEED = 20
STEPS = sorted(random.Random(SEED).sample(range(2, NUM_STEPS), 10))  # noqa: S311  a plan, no secret
CALLS = range(1, 92, 10)
"""Of those with which checkpoints are written and removed, some 100: each is another of another save."""
KILL_POINTS = [("step", n) for n in STEPS] + [("save", n) for n in CALLS]


def finished(folder, out, **keywords):
    assert in_process(fault_tolerant.train, folder, out=out, **keywords) == 0
    return json.loads(out.read_text("utf-8"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    place = tmp_path_factory.mktemp("uninterrupted")
    return finished(place / "kept", place / "result.json")


def killed(folder, kill, **keywords):
    assert in_process(fault_tolerant.train, folder, kill=kill, **keywords) == -signal.SIGKILL


def test_a_process_begins_with_all_loaded():
    """Else each spends seconds of processor time on that, and some tests wait in vain on a busy machine."""
    assert in_process(fault_tolerant.check_preloaded) == 0


def test_the_run_has_what_may_differ(uninterrupted):
    assert [row[0] for row in uninterrupted["records"]] == list(range(1, NUM_STEPS + 1))
    assert len({row[2] for row in uninterrupted["records"]}) == NUM_STEPS  # each step's loss is its own
    assert uninterrupted["counts"][2] == 16  # passes, and an order of its own in each
    assert len({row[3] for row in uninterrupted["records"]}) > 0.9 * NUM_STEPS


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kill", KILL_POINTS, ids=lambda kill: f"{kill[0]}{kill[1]}")
def test_a_run_that_is_killed_anywhere_ends_with_the_same_bits(kill, uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    killed(folder, kill)
    assert finished(folder, tmp_path / "result.json") == uninterrupted


@pytest.mark.sampled(0)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_twenty_times_ends_with_the_same_bits(uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    for life in range(20):
        # After a save or two, or within one.
        killed(folder, ("step", 14 + life % 5) if life % 2 else ("save", 3 + life), checkpoint_frequency=5)
    step = int(directory.names(folder)[0].rpartition("-")[2])
    assert 0 < step < NUM_STEPS  # it got somewhere, and no life came to the end
    assert finished(folder, tmp_path / "result.json") == uninterrupted


LOADERS = {
    "a loader that tells its place": fault_tolerant.stateful,
    "torchdata's StatefulDataLoader": fault_tolerant.of_torchdata,
    "a plain DataLoader": fault_tolerant.plain,
    "a plain DataLoader with two workers": fault_tolerant.with_workers,
    "a plain DataLoader with a generator": fault_tolerant.with_generator,
    "an iterable dataset": fault_tolerant.iterable,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
def test_any_source_of_batches_goes_on_where_it_was(data, tmp_path):
    run = {"data": data, "checkpoint_frequency": 10, "max_steps": 50}  # of 12 batches a pass
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    killed(tmp_path / "kept", ("step", 18), **run)
    killed(tmp_path / "kept", ("step", 25), **run)
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


@pytest.mark.parametrize("data", [fault_tolerant.of_torchdata, fault_tolerant.of_torchdata_with_workers])
def test_torchdata_s_loader_goes_on_where_it_was_in_a_pass_and_between_two(data, tmp_path):
    run = {"data": data, "checkpoint_frequency": 6, "max_steps": 30}  # of 12 batches a pass
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    folder = tmp_path / "kept"
    for batches, newest in ((15, 12), (9, 18)):
        killed(folder, ("step", batches), waits=True, **run)
        assert directory.names(folder)[0].endswith(f"-step-{newest}")
    assert finished(folder, tmp_path / "result.json", **run) == whole


def test_a_time_for_a_frequency_changes_nothing_but_where_it_goes_on(uninterrupted, tmp_path):
    killed(tmp_path / "kept", ("step", 120), checkpoint_frequency="10ms")
    assert directory.names(tmp_path / "kept")
    assert finished(tmp_path / "kept", tmp_path / "result.json") == uninterrupted


# ---------------------------------------------------------------------------------------- a rollback

WENT = {
    "NaN": ["went back to step 50"],
    "NaN twice": ["went back to step 50", "went back to step 25"],
    "late": ["went back to step 50"],
}
"""Where each guard leads, whoever kills it."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Give what came of a run that goes back and was not killed, by its guard."""
    place, known = tmp_path_factory.mktemp("guarded"), {}

    def whole(guard):
        if guard not in known:
            out = place / f"{guard}.json"
            known[guard] = finished(place / guard, out, guard=guard)
            told = json.loads((place / f"{guard}.json-went").read_text("utf-8"))
            assert [text for text in told if "went back" in text] == WENT[guard]
        return known[guard]

    return whole


BACK_KILLS = [
    ("NaN", ("step", 30)),
    ("NaN", ("step", 60)),
    ("NaN", ("step", 61)),  # the step of which the alert is
    ("NaN", ("step", 62)),  # right after the rollback: its checkpoint is there
    ("NaN", ("step", 70)),
    ("NaN", ("step", 150)),
    ("NaN twice", ("step", 63)),
    ("NaN twice", ("step", 67)),
    ("NaN twice", ("step", 90)),
    ("late", ("step", 70)),  # between the alert and the rollback
    ("late", ("step", 79)),  # and a checkpoint was saved meanwhile
    ("late", ("step", 90)),
    *(("NaN", ("save", number)) for number in range(19, 40)),  # of the checkpoint that the rollback writes
]


def test_a_run_that_goes_back_ends_elsewhere_than_one_without_a_fault(guarded, uninterrupted):
    whole = guarded("NaN")
    assert whole["model"] != uninterrupted["model"]
    assert whole["counts"] == uninterrupted["counts"]
    orders = [[row[3] for row in told["records"]] for told in (whole, uninterrupted)]
    assert [a for a, b in zip(*orders, strict=True) if a != b] == ["nan"]  # the data has gone on


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("guard", "kill"), BACK_KILLS, ids=str)
def test_a_run_that_goes_back_and_is_killed_anywhere_ends_with_the_same_bits(guard, kill, guarded, tmp_path):
    killed(tmp_path / "kept", kill, guard=guard)
    assert finished(tmp_path / "kept", tmp_path / "result.json", guard=guard) == guarded(guard)


def test_a_run_that_is_killed_right_after_a_rollback_has_gone_back(tmp_path):
    killed(tmp_path / "kept", ("step", 62), guard="NaN")
    newest = directory.entries(tmp_path / "kept")[0].manifest
    assert (newest.step, newest.again_step, newest.is_good) == (61, 50, True)


@pytest.mark.parametrize("step", [58, 80])
def test_sigterm_before_or_after_a_rollback_changes_nothing_of_it(step, guarded, tmp_path):
    folder = tmp_path / "kept"
    assert in_process(fault_tolerant.train, folder, kill=("term", step), guard="NaN") == 143
    assert finished(folder, tmp_path / "result.json", guard="NaN") == guarded("NaN")


# ---------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run of three checkpoints that was killed."""
    folder = tmp_path_factory.mktemp("broken_off") / "kept"
    killed(folder, ("step", 90), waits=True)
    assert len(directory.names(folder)) == 3
    return folder


def damages(num, seed):
    """Cut short, or flip a bit of, a file each: `num` ways, most of them where most bytes are."""
    chance = random.Random(seed)  # noqa: S311
    files = ["manifest.json", "model.safetensors", "state.safetensors", "state.json"]
    return [(chance.choice(["cut", "flip"]), files[i % len(files)], chance.random()) for i in range(num)]


def damage(path, how, share):
    raw = bytearray(path.read_bytes())
    place = int(share * len(raw))
    if how == "cut":
        del raw[place:]
    else:
        raw[place] ^= 1 << int(share * 1e6) % 8
    path.write_bytes(raw)


@pytest.mark.parametrize("part", range(5))
def test_a_damaged_newest_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    part, broken_off, tmp_path, caplog
):
    newest, before, _ = directory.names(broken_off)
    cases = damages(100, SEED)[part::5]
    assert len(cases) == 20
    for number, (how, file, share) in enumerate(cases):
        folder = tmp_path / str(number)
        shutil.copytree(broken_off, folder)
        damage(folder / newest / file, how, share)
        caplog.clear()
        trainer = fault_tolerant.trained(folder, max_steps=76)
        assert trainer.resumed_from == folder / before
        (why,) = trainer.passed_over
        assert newest in why
        assert file in why
        assert why in caplog.text
        assert (folder / f"damaged-{newest}").is_dir()


def test_what_came_of_the_one_before_is_the_same_to_the_bit(broken_off, uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(broken_off, folder)
    damage(folder / directory.names(folder)[0] / "model.safetensors", "flip", 0.5)
    assert finished(folder, tmp_path / "result.json") == uninterrupted


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "state.safetensors", "state.json"])
def test_a_file_that_is_missing_or_a_link_is_damage(file, broken_off, tmp_path):
    for number, ruin in enumerate([lambda path: path.unlink(), link]):
        folder = tmp_path / str(number)
        shutil.copytree(broken_off, folder)
        newest, before, _ = directory.names(folder)
        ruin(folder / newest / file)
        trainer = fault_tolerant.trained(folder, max_steps=76)
        assert trainer.resumed_from == folder / before
        assert file in trainer.passed_over[0]


def link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def test_a_file_or_a_link_under_a_checkpoint_s_name_is_passed_over_and_set_aside(
    broken_off, tmp_path, caplog
):
    folder = tmp_path / "kept"
    shutil.copytree(broken_off, folder)
    newest = directory.names(folder)[0]
    shutil.copytree(folder / newest, tmp_path / "another's")
    (folder / "save-009997-step-9997").symlink_to(tmp_path / "nothing")
    (folder / "save-009996-step-9996").symlink_to("save-009996-step-9996")
    (folder / "save-009998-step-9998").symlink_to(tmp_path / "another's")
    (folder / "save-009999-step-9999").write_bytes(b"a file")
    trainer = fault_tolerant.trained(folder, max_steps=76)
    assert trainer.resumed_from == folder / newest
    assert [why.partition(": ")[0] for why in trainer.passed_over] == [
        f"{folder}/save-009999-step-9999 is no folder",
        f"{folder}/save-009998-step-9998",
        f"{folder}/save-009997-step-9997 is a link to nothing",
        f"{folder}/save-009996-step-9996 is a link to nothing",
    ]
    assert all(why in caplog.text for why in trainer.passed_over)
    assert (folder / "damaged-save-009999-step-9999").read_bytes() == b"a file"
    again = fault_tolerant.trained(folder, max_steps=3, recovery_strategy="none", overwrite=True)
    assert again.resumed_from is None
    assert not list(folder.glob("damaged-*"))
    folder_of.verify(tmp_path / "another's")


def test_where_all_are_damaged_no_run_begins_by_itself(broken_off, tmp_path):
    folder = tmp_path / "kept"
    shutil.copytree(broken_off, folder)
    for name in directory.names(folder):
        damage(folder / name / "state.json", "cut", 0.5)
    before = directory.names(folder)
    said = r"all checkpoints that would serve are damaged: .*save-.*; .*save-.*overwrite=True, for one start"
    with pytest.raises(OSError, match=said):
        fault_tolerant.trained(folder, max_steps=76)
    assert directory.names(folder) == before


def test_a_checkpoint_s_model_is_a_plain_file_that_a_module_takes(broken_off):
    import safetensors.torch

    module = fault_tolerant.model()
    newest = directory.names(broken_off)[0]
    module.load_state_dict(safetensors.torch.load_file(broken_off / newest / "model.safetensors"))
    assert all(torch.isfinite(p).all() for p in module.parameters())


# ---------------------------------------------------------------------------------------- an end, a lock


def test_sigterm_saves_and_leaves_with_143_and_the_run_goes_on_with_the_same_bits(uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    assert in_process(fault_tolerant.train, folder, kill=("term", 33)) == 143
    assert re.fullmatch(r"save-\d+-step-33", directory.names(folder)[0])
    assert finished(folder, tmp_path / "result.json") == uninterrupted


SOURCES = {"a dataset": None} | {name: data for name, data in LOADERS.items() if "workers" not in name}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("data", SOURCES.values(), ids=SOURCES)
def test_sigterm_while_a_batch_is_made_costs_no_bit(data, tmp_path):
    run = {"data": data, "max_steps": 30}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    kill = "term in a sample", 44  # in the sixth batch
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == 143
    assert directory.names(tmp_path / "kept")
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


def test_sigterm_at_the_end_of_a_pass_costs_no_bit_and_makes_no_pass_twice(tmp_path):
    run = {"data": fault_tolerant.stateful, "max_steps": 30}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    kill = "term at the end of a pass", 2
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == 143
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


LONE = {
    "a module": {},
    "a trainer in turns": {"wrap": fault_tolerant.trained_in_turns},
    "an averager": {"wrap": fault_tolerant.averaged},
}


MEASURES = {"validation": fault_tolerant.shuffled, "epochs": 3}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Give what came of a run that was not broken off, by what it was given."""
    place, known = tmp_path_factory.mktemp("measured"), {}

    def whole(given):
        if (name := repr(given)) not in known:
            folder = place / str(len(known))
            known[name] = finished(folder, folder.with_suffix(".json"), **MEASURES | given)
            assert [epoch for epoch, *_ in known[name]["validation"]] == [0, 1, 2]
        return known[name]

    return whole


@pytest.mark.sampled(3)
@pytest.mark.parametrize("given", LONE.values(), ids=LONE)
@pytest.mark.parametrize("epoch", [0, 2], ids=["in mid-run", "after the last pass"])
def test_sigterm_breaks_a_validation_off_which_the_next_life_makes_first(epoch, given, measured, tmp_path):
    kill = "term in a validation", epoch * fault_tolerant.MEASURED + 11  # in the second batch of it
    folder, run = tmp_path / "kept", MEASURES | given
    assert in_process(fault_tolerant.train, folder, kill=kill, **run) == 143
    newest = directory.entries(folder)[0].manifest
    assert (newest.epoch, newest.is_validation_due, newest.is_finished) == (epoch + 1, True, False)
    assert finished(folder, tmp_path / "result.json", **run) == measured(given)


def test_a_validation_is_due_until_a_life_has_made_it(measured, tmp_path):
    folder, last = tmp_path / "kept", 2 * fault_tolerant.MEASURED
    for number in (last + 11, 3):
        kill = "term in a validation", number
        assert in_process(fault_tolerant.train, folder, kill=kill, **MEASURES) == 143
        newest = directory.entries(folder)[0].manifest
        assert (newest.number, newest.is_validation_due) == (2, True)  # the first was due at step 25
    assert finished(folder, tmp_path / "result.json", **MEASURES) == measured({})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("data", SOURCES.values(), ids=SOURCES)
def test_sigterm_in_a_validation_costs_no_bit_whatever_gives_the_batches(data, measured, tmp_path):
    kill, run = ("term in a validation", fault_tolerant.MEASURED + 11), MEASURES | {"data": data}
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == 143
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == measured({"data": data})


@pytest.mark.parametrize("kill", ["int in a validation", "term of all in a validation"])
def test_a_validation_is_broken_off_by_ctrl_c_and_where_its_workers_are_ended_too(
    kill, measured, tmp_path, capfd
):
    given = {"validation": fault_tolerant.shuffled_by_workers} if "of all" in kill else {}
    code, run = BY_CTRL_C if "int" in kill else 143, MEASURES | given
    number = 11  # of a worker's own, where there are some
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=(kill, number), **run) == code
    assert directory.entries(tmp_path / "kept")[0].manifest.is_validation_due
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == measured(given)
    assert "int" in kill or "Traceback" not in capfd.readouterr().err


WITH_WORKERS = {"workers of a pass": fault_tolerant.with_workers, "kept": fault_tolerant.with_kept_workers}


@pytest.mark.parametrize("data", WITH_WORKERS.values(), ids=WITH_WORKERS)
@pytest.mark.parametrize(
    "kill", [("term of all", 17), ("term of all in a sample", 48)], ids=["in a step", "in a worker"]
)
def test_sigterm_to_a_trainer_and_its_loader_s_workers_saves_all_the_same(kill, data, tmp_path, capfd):
    run = {"data": data, "max_steps": 30, "deterministic": False}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == 143
    assert directory.names(tmp_path / "kept"), "all that was trained is lost"
    ended = finished(tmp_path / "kept", tmp_path / "result.json", **run)
    orders = [[row[3] for row in told["records"]] for told in (ended, whole)]
    assert orders[0] == orders[1]  # what workers that are kept draw at random is in no state
    assert ended == whole or data is fault_tolerant.with_kept_workers
    assert "Traceback" not in capfd.readouterr().err


def test_sigterm_to_all_while_batches_are_read_again_leaves_with_143(tmp_path, capfd):
    run = {"data": fault_tolerant.with_workers, "checkpoint_frequency": 5, "waits": True, "max_steps": 30}
    killed(tmp_path / "kept", ("step", 11), **run)
    names = directory.names(tmp_path / "kept")
    kill = "term of all in a sample", 4  # of a worker's first batch, which is one of those that are dropped
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == 143
    assert directory.names(tmp_path / "kept") == names
    assert "Traceback" not in capfd.readouterr().err


BY_CTRL_C = 1
"""The exit code of a process of multiprocessing's that KeyboardInterrupt has ended."""


@pytest.mark.parametrize("kill", [("int", 33), ("int in a sample", 250)], ids=["in a step", "in a batch"])
def test_ctrl_c_saves_and_raises_and_the_run_goes_on_with_the_same_bits(kill, uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    assert in_process(fault_tolerant.train, folder, kill=kill) == BY_CTRL_C
    assert re.fullmatch(r"save-\d+-step-33", directory.names(folder)[0])
    assert finished(folder, tmp_path / "result.json") == uninterrupted


@pytest.mark.parametrize(
    "kill", [("int of all", 17), ("int of all in a sample", 48)], ids=["in a step", "in a worker"]
)
def test_ctrl_c_on_a_terminal_whose_loader_s_workers_get_it_too_costs_no_bit(kill, tmp_path):
    run = {"data": fault_tolerant.with_workers, "max_steps": 30}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=kill, **run) == BY_CTRL_C
    assert directory.names(tmp_path / "kept"), "all that was trained is lost"
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


INTERRUPTED = (
    sys.executable,
    "-c",
    """
import signal, sys, threading, torch, offbeat

def loss_fn(outputs, targets):
    steps.append(1)
    handler = signal.getsignal(signal.SIGINT)
    if len(steps) == 6:
        print("ready", flush=True)
        while signal.getsignal(signal.SIGINT) is handler: threading.Event().wait(0.05)
        print("noted", flush=True)
        while sys.argv[2] == "twice": threading.Event().wait(0.05)
    return torch.nn.functional.cross_entropy(outputs, targets)

steps = []
data = torch.utils.data.TensorDataset(torch.ones(4000, 4), torch.zeros(4000, dtype=torch.long))
trainer = offbeat.FaultTolerantTrainer(torch.nn.Linear(4, 3), sys.argv[1])
try:
    trainer.train(dataset=data, optimizer=offbeat.optim.SGD(lr=0.1), loss_fn=loss_fn)
finally:
    print(trainer.history.stopped)
    print("handlers are back", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
""",
)
"""A run that waits for Ctrl-C in its sixth step, and for another one where it is to come twice."""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_a_second_ctrl_c_ends_a_run_at_once_and_unsaved(times, tmp_path):
    with command(str(tmp_path / "kept"), times, program=INTERRUPTED) as trainer:
        trainer.line("ready")
        trainer.signal(signal.SIGINT)
        trainer.line("noted")
        if times == "twice":
            trainer.signal(signal.SIGINT)
        assert trainer.ends() == -signal.SIGINT, trainer.said
    assert trainer.said.count("Ctrl-C: training ends after the step under way") == 1
    assert {"interrupted\n", "handlers are back True\n"} <= set(trainer.out)
    saved = [] if times == "twice" else ["save-000001-step-6"]
    assert directory.names(tmp_path / "kept") == saved, trainer.said
    path = tmp_path / "kept" / "save-000001-step-6"
    ended = f"ended after step 6; to go on, run the same command, which goes on from {path}\n"
    assert (ended in trainer.err) is (times == "once")


LAUNCHED = """
import signal, sys, threading, torch, offbeat

def loss_fn(outputs, targets):
    steps.append(1)
    handler = signal.getsignal(signal.SIGINT)
    if len(steps) == 6:
        print("ready", flush=True)
        while signal.getsignal(signal.SIGINT) is handler: threading.Event().wait(0.05)
    return torch.nn.functional.cross_entropy(outputs, targets)

steps = []
data = torch.utils.data.TensorDataset(torch.ones(4000, 4), torch.zeros(4000, dtype=torch.long))
trainer = offbeat.FaultTolerantTrainer(torch.nn.Linear(4, 3), sys.argv[1])
trainer.train(dataset=data, optimizer=offbeat.optim.SGD(lr=0.1), loss_fn=loss_fn)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_launch_lets_its_workers_save(number, tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(LAUNCHED, "utf-8")
    with command("launch", "--workers", "1", str(script), str(folder)) as launch:
        launch.line("ready")
        launch.signal(number)
        assert launch.ends() == 130, launch.said
    assert directory.names(folder) == ["save-000001-step-6"], launch.said


def test_a_killed_trainer_s_loader_workers_keep_nobody_out(tmp_path):
    folder = tmp_path / "kept"
    run = {"data": fault_tolerant.with_workers, "max_steps": 20}
    killed(folder, ("step", 8), **run)
    assert in_process(fault_tolerant.train, folder, **run) == 0


def test_a_finished_run_gives_its_history_and_trains_nothing(uninterrupted, tmp_path):
    folder = tmp_path / "kept"
    first = finished(folder, tmp_path / "first.json")
    names = directory.names(folder)
    again = finished(folder, tmp_path / "again.json", kill=("step", 1))  # which does not come
    assert first == again == uninterrupted
    assert directory.names(folder) == names
