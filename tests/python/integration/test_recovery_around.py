"""A `FaultTolerantTrainer` around an averager, a trainer or a worker: killed with `kill -9`, it goes on."""

import copy
import functools
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import ConfigError, ModelMismatchError, StateError
from offbeat.recovery import directory
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support import fault_tolerant
from support.averaging import LOSS, arrays, model, warned
from support.fault_tolerant import SAMPLES, in_process
from support.group import together

pytestmark = pytest.mark.timeout(200)

BATCH = torch.ones(8, 6), torch.arange(8) % 5

STEPS = 25
"""Of batches, of which a pass has 12."""


def finished(folder, out, **keywords):
    assert in_process(fault_tolerant.train, folder, out=out, **keywords) == 0
    return json.loads(out.read_text("utf-8"))


def killed(target, *arguments, **keywords):
    assert in_process(target, *arguments, **keywords) == -signal.SIGKILL


# ---------------------------------------------------------------------------------------- alone


@pytest.mark.parametrize(
    ("wrap", "steps"),
    [
        (fault_tolerant.averaged, STEPS),
        (fault_tolerant.trained_in_half, STEPS),
        (fault_tolerant.trained_in_turns, 26),
    ],
)
def test_what_trains_alone_ends_with_the_bits_of_a_run_that_was_not_killed(wrap, steps, tmp_path):
    run = {"wrap": wrap, "checkpoint_frequency": 4, "waits": True, "max_steps": steps}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    assert whole["counts"][0] == steps
    killed(fault_tolerant.train, tmp_path / "kept", kill=("step", 19), **run)
    assert directory.names(tmp_path / "kept")
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


def test_sigterm_in_the_middle_of_a_window_loses_nothing_of_it(tmp_path):
    run = {"wrap": fault_tolerant.trained_in_turns, "checkpoint_frequency": 4, "waits": True, "max_steps": 26}
    whole = finished(tmp_path / "whole", tmp_path / "whole.json", **run)
    assert in_process(fault_tolerant.train, tmp_path / "kept", kill=("term", 31), **run) == 143
    assert finished(tmp_path / "kept", tmp_path / "result.json", **run) == whole


SIGTERM_IN_MID_RUN = """
import os, signal, sys, torch, offbeat
worker = offbeat.AsyncWorker(sys.argv[1], local_batch_size=8)
trainer = offbeat.FaultTolerantTrainer(worker, sys.argv[2], 10)
def loss_fn(outputs, targets):
    if worker.steps_made == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.nn.functional.cross_entropy(outputs, targets)
data = torch.utils.data.TensorDataset(torch.rand(80, 6), torch.arange(80) % 5)
trainer.train(dataset=data, epochs=2, optimizer=offbeat.optim.SGD(lr=0.1), loss_fn=loss_fn)
"""
"""Without a `with` block, and so without anybody who could tell the worker by what the process ends."""


def test_one_that_sigterm_has_stopped_has_left_and_not_finished(serve, tmp_path):
    torch.manual_seed(0)
    server = serve(nn.Linear(6, 5))
    ended = subprocess.run(
        [sys.executable, "-c", SIGTERM_IN_MID_RUN, server.address, str(tmp_path / "kept")],
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 143, ended.stderr
    (worker,) = server.status()["workers"]
    assert (worker["state"], worker["cause"]) == ("left", "left before its work was done: SystemExit: 143")


@pytest.mark.parametrize("steps_made", [3, 19], ids=["in mid-run", "in the last step"])
def test_one_whose_sigterm_was_caught_and_that_trains_to_its_end_has_finished(steps_made, serve, tmp_path):
    torch.manual_seed(0)
    server = serve(nn.Linear(6, 5))
    script = SIGTERM_IN_MID_RUN.replace("steps_made == 3", f"steps_made == {steps_made}")
    caught = script.replace("trainer.train(", "train = lambda: trainer.train(") + (
        "try:\n    train()\nexcept SystemExit:\n    print(train().stopped)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", caught, server.address, str(tmp_path / "kept")],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "epochs\n"), ended.stderr
    (worker,) = server.status()["workers"]
    assert worker["state"] == "finished"


def in_rounds(module):
    return offbeat.AsyncModelAverager(module, averaging_frequency=4, method="diloco", overlap=3)


def trained_in_rounds(module):
    return offbeat.AsyncTrainer(module, strategy="diloco", regular_sync_frequency=4, overlap=3)


@pytest.mark.parametrize("wrap", [in_rounds, trained_in_rounds])
def test_no_save_moves_a_bit_of_a_round_under_way(wrap, tmp_path, monkeypatch):
    """Not one at each step, nor one after SIGTERM in mid-round, with which another life goes on."""
    monkeypatch.setattr(
        Saver, "save", fault_tolerant.waited(Saver.save)
    )  # else a slow disk lets them be fewer
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 5)
    left = [0]

    def loss_fn(outputs, targets):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return LOSS(outputs, targets)

    def train(folder, every):
        trainer = FaultTolerantTrainer(wrap(model()), tmp_path / folder, checkpoint_frequency=every)
        trainer.train(
            dataset=data, batch_size=8, epochs=3, optimizer=optim.Adam(lr=0.05), loss_fn=loss_fn, seed=1
        )
        return [value.copy() for value in arrays(trainer.model)]

    rarely, often = train("rarely", 1000), train("often", 1)
    assert len(directory.names(tmp_path / "often")) == 3
    left[0] = 5  # a round began with the fourth, and ends with the seventh
    with pytest.raises(SystemExit):
        train("ended", 1000)
    assert directory.names(tmp_path / "ended") == ["save-000001-step-7"]
    for values in (often, train("ended", 1000)):
        assert all((a == b).all() for a, b in zip(rarely, values, strict=True))


# ---------------------------------------------------------------------------------------- a worker


def seen_until(folder, count):
    """Give the samples of so many batches of the lives before, and forget the rest."""
    path = folder.with_name(f"{folder.name}-seen")
    lines = path.read_text("utf-8").splitlines()
    path.write_text("".join(f"{line}\n" for line in lines[:count]), "utf-8")


def seen(folder):
    lines = folder.with_name(f"{folder.name}-seen").read_text("utf-8").splitlines()
    return [sample for line in lines for sample in json.loads(line)]


@pytest.mark.parametrize(
    ("is_live", "update_frequency", "steps"), [(False, 1, 36), (False, 5, 9), (True, 1, 36)]
)
def test_a_worker_that_is_killed_goes_on_from_its_place_with_the_server_s_model(
    is_live, update_frequency, steps, tmp_path
):
    """Each pass has every sample once, over both lives; what was pushed since the save is pushed again."""
    folder = tmp_path / "kept"
    run = {"is_live": is_live, "update_frequency": update_frequency}
    with offbeat.ParameterServer(fault_tolerant.model()) as server:
        killed(fault_tolerant.work, folder, server.address, kill=("step", 33), **run)
        save = directory.names(folder)[0]
        saved_step = int(save.rpartition("-")[2])
        version = server.status()["version"]
        assert 0 < saved_step <= version
        at_save = json.loads((folder / save / "manifest.json").read_text("utf-8"))
        seen_until(folder, at_save["epoch"] * 12 + at_save["batch"])
        out = tmp_path / "result.json"
        assert in_process(fault_tolerant.work, folder, server.address, out=out, **run) == 0
        found = json.loads(out.read_text("utf-8"))
        assert server.status()["version"] == version + steps - saved_step
    assert found["resumed_from"] == str(folder / save)
    assert found["counts"] == [steps, 3 * SAMPLES, 3, "epochs"]
    assert found["receipts"] == {"applied": steps}
    assert [step for step, _ in found["records"]] == list(range(1, steps + 1))
    assert found["records"][-1][1] == version + steps - saved_step  # the server's version, which went on
    samples = seen(folder)
    for epoch in range(3):
        assert sorted(samples[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert set(found["moments"]) == ({steps} if is_live else set())


def test_a_worker_s_checkpoint_is_of_its_server_s_run(serve, tmp_path):
    def train(server, **keywords):
        with offbeat.AsyncWorker(server.address, model()) as worker:
            trainer = FaultTolerantTrainer(worker, tmp_path)
            data = TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.long))
            return trainer.train(dataset=data, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, **keywords)

    first = serve(model())
    assert train(first).steps == 2  # batches of the worker's size
    assert train(first, epochs=2).steps == 4
    with pytest.raises(ModelMismatchError, match=r"server's run is .* whose model is not there"):
        train(serve(model()), epochs=3)


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        ({"recovery_strategy": "last_good"}, {}, "the model is the server's.*server.rollback"),
        ({"device": "meta"}, {}, "device is meta, and the AsyncWorker's is cpu"),
        ({"loss_reduction": "sum"}, {}, "loss_reduction is 'sum', and the AsyncWorker's is 'mean'"),
        ({}, {"grad_scaler": torch.amp.GradScaler("cpu")}, "grad_scaler is given"),
        (
            {},
            {"scheduler": lambda live: torch.optim.lr_scheduler.StepLR(live, 1)},
            "scheduler is given, and the optimizer runs on the server.*lr_schedule=",
        ),
    ],
)
def test_what_does_not_go_with_a_worker_is_refused(made, asked, said, serve, tmp_path):
    with (
        offbeat.AsyncWorker(serve(model()).address, model()) as worker,
        pytest.raises(ConfigError, match=said),
    ):
        FaultTolerantTrainer(worker, tmp_path / "kept", **made).train(
            dataset=TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
            **asked,
        )
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("around", ["worker", "trainer"])
def test_where_the_model_is_a_server_s_no_trainer_goes_back_and_the_server_s_rollback_is_named(
    around, serve, tmp_path
):
    server, module = serve(model(), optimizer=optim.SGD(lr=0.1)), model()
    at = {"server_address": server.address}
    with (
        offbeat.AsyncWorker(model=module, **at)
        if around == "worker"
        else offbeat.AsyncTrainer(module, strategy="parameter_server", **at)
    ) as trains:
        trainer = FaultTolerantTrainer(trains, tmp_path)
        with pytest.raises(StateError, match=r"is (the|a) server's, .*call server\.rollback\(\) there"):
            trainer.rollback()
        with pytest.raises(
            ConfigError, match=r"'rollback', which has nothing to act on.*ParameterServer with"
        ):
            AsyncTrainingMonitor(module, remediation_strategy="rollback")


def test_a_trainer_at_a_server_goes_on_with_the_server_s_model(serve, tmp_path):
    server = serve(model())
    data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 5)

    def train(epochs):
        trained = model()
        with offbeat.AsyncTrainer(
            trained,
            strategy="parameter_server",
            server_address=server.address,
            regular_sync_frequency=1,
            worker_id="amy",
        ) as trainer:
            around = FaultTolerantTrainer(trainer, tmp_path)
            history = around.train(dataset=data, epochs=epochs, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
            assert trainer.order in directory_text(tmp_path)
        held = server.state_dict()
        assert all(held[name].equal(value) for name, value in trained.state_dict().items())
        return history.steps, history.receipts, server.status()["version"]

    assert train(1) == (2, {"applied": 2}, 2)
    assert train(3) == (6, {"applied": 6}, 6)


def directory_text(folder):
    return (folder / directory.names(folder)[0] / "state.json").read_text("utf-8")


# ---------------------------------------------------------------------------------------- with others


class Stopped(Exception):  # noqa: N818  no error
    pass


def lived(averager, folder, rank, *, stop_at, every, epochs=4):
    """Train a member, up to a batch; give what its model and history are, and where it went on."""
    trained, left = averager.model, [stop_at]
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(40 + 8 * rank, 6, generator=generator)  # nobody has as many batches as another
    data = TensorDataset(inputs, torch.randint(5, (len(inputs),), generator=generator))

    def loss_fn(outputs, targets):
        left[0] -= 1
        if left[0] == 0:
            raise Stopped
        return LOSS(outputs, targets)

    trainer = FaultTolerantTrainer(averager, folder / str(rank), checkpoint_frequency=every)
    steps = 0
    with suppress(Stopped):
        steps = trainer.train(
            dataset=data, batch_size=8, epochs=epochs, optimizer=optim.Adam(lr=0.01), loss_fn=loss_fn
        ).steps
    resumed = 0 if trainer.resumed_from is None else int(trainer.resumed_from.name.rpartition("-")[2])
    moments = {int(entry["step"]) for entry in trainer.optimizer.state.values()}
    return [value.copy() for value in arrays(trained)], steps, resumed, moments


def in_a_group(rank, folder, made, stop_at, every):
    module = model(rank)
    if made == "trainer":
        member = offbeat.AsyncTrainer(module, strategy="slowmo", regular_sync_frequency=5, overlap=False)
    else:
        member = offbeat.AsyncModelAverager(module, averaging_frequency=5, method=made, overlap=False)
    with member:
        return lived(member, folder, rank, stop_at=stop_at[rank], every=every[rank])


@pytest.mark.parametrize("made", ["average", "diloco", "trainer"])
def test_members_of_a_group_go_on_together_from_their_own_places(made, tmp_path):
    """They were saved in different rounds: the first in the second, the second in the first."""
    together(in_a_group, 2, tmp_path, made, [14, 14], [10, 7])
    found = together(in_a_group, 2, tmp_path, made, [0, 0], [10, 7])
    again = together(in_a_group, 2, tmp_path, made, [0, 0], [10, 7])
    for rank, (own, steps, resumed, moments) in enumerate(found):
        assert steps == 4 * (5 + rank)
        assert resumed == [10, 7][rank]
        assert moments == {steps}  # the optimizer went on, too
        assert all((a == b).all() for a, b in zip(own, found[0][0], strict=True))  # and all ended alike
        assert [again[rank][1], again[rank][2]] == [steps, steps]  # a finished run trains nothing


class Banked(nn.Module):
    """Keeps a row of each batch."""

    def __init__(self, rank):
        super().__init__()
        self.net = model(rank)
        self.register_buffer("bank", torch.zeros(0, 6))

    def forward(self, inputs):
        if self.training:
            self.bank = torch.cat([self.bank, inputs[:1]])
        return self.net(inputs)


def in_a_group_with_banks(rank, folder, made, stop_at, every):
    if made == "trainer":
        member = offbeat.AsyncTrainer(
            Banked(rank), strategy="average", regular_sync_frequency=5, overlap=False
        )
    else:
        member = offbeat.AsyncModelAverager(Banked(rank), averaging_frequency=5, overlap=False)
    with member:
        _, steps, resumed, _ = lived(member, folder, rank, stop_at=stop_at, every=every[rank])
    return steps, resumed, len(member.model.bank), float(member.model.bank.sum())


@pytest.mark.parametrize("made", ["average", "trainer"])
def test_members_whose_buffers_have_grown_to_other_sizes_go_on_together(made, tmp_path):
    whole = together(in_a_group_with_banks, 2, tmp_path / "whole", made, 0, [10, 7])
    together(in_a_group_with_banks, 2, tmp_path / "kept", made, 14, [10, 7])
    found = together(in_a_group_with_banks, 2, tmp_path / "kept", made, 0, [10, 7])
    for rank, (steps, resumed, rows, total) in enumerate(found):
        assert (steps, resumed, rows) == (4 * (5 + rank), [10, 7][rank], 4 * (5 + rank))
        assert total == whole[rank][3]


def test_where_a_member_has_no_checkpoint_all_begin_anew(tmp_path):
    together(in_a_group, 2, tmp_path, "average", [13, 12], [5, 100])
    found = together(in_a_group, 2, tmp_path, "average", [0, 0], [5, 100])
    for rank, (own, steps, resumed, moments) in enumerate(found):
        assert (steps, resumed, moments) == (4 * (5 + rank), 0, {steps})
        assert all((a == b).all() for a, b in zip(own, found[0][0], strict=True))


def at_a_server(rank, address, folder, stop_at):
    averager = offbeat.AsyncModelAverager(
        model(rank), 1, 0, 3, communication_backend="tcp", server_address=address, overlap=False
    )
    with averager:
        began = [value.copy() for value in arrays(averager.model)]
        joined = averager.has_joined_others
        return began, joined, lived(averager, folder, rank, stop_at=stop_at, every=4)


def test_a_member_at_a_server_goes_on_with_its_place_and_the_mean_or_brings_its_model_to_a_new_one(tmp_path):
    with offbeat.ParameterServer(transaction="model") as server:
        _, joined, _ = at_a_server(0, server.address, tmp_path, 18)
        assert not joined
        held = server.state_dict()
        began, joined, (_, steps, resumed, moments) = at_a_server(0, server.address, tmp_path, 0)
        assert joined
        names = [name for name, _ in model().named_parameters()]
        assert all((held[name].numpy() == b).all() for name, b in zip(names, began, strict=True))
        assert (steps, moments) == (20, {20})
        assert 0 < resumed < 18
        final = {name: value.clone() for name, value in server.state_dict().items()}
    with offbeat.ParameterServer(transaction="model") as server:  # which knows of nothing
        began, joined, (own, steps, resumed, _) = at_a_server(0, server.address, tmp_path, 0)
        assert not joined
        assert (steps, resumed) == (20, 20)
        assert all((final[name].numpy() == o).all() for name, o in zip(names, own, strict=True))


class Counting(nn.Module):
    """Has what members average and what each has of its own: counts, in numbers of either kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += 1
        return self.norm(self.line(inputs))


@pytest.mark.parametrize("kind", ["averager", "trainer"])
def test_a_member_that_joins_others_brings_back_the_buffers_that_are_not_averaged(
    kind, tmp_path, caplog, monkeypatch
):
    """Each batch is counted once, over both lives; all else is the others' mean, as the log says."""
    monkeypatch.setattr(Saver, "save", fault_tolerant.waited(Saver.save))
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 5)

    def live_once(address, stop_at):
        module, began, left = Counting(), {}, [stop_at]
        if kind == "averager":
            member = offbeat.AsyncModelAverager(
                module, averaging_frequency=3, overlap=False, server_address=address
            )
        else:
            member = offbeat.AsyncTrainer(
                module,
                strategy="average",
                regular_sync_frequency=3,
                overlap=False,
                server_address=address,
            )

        def note(*_):
            began.update({} if began else {n: v.clone() for n, v in module.state_dict().items()})

        def loss_fn(outputs, targets):
            left[0] -= 1
            if left[0] == 0:
                raise Stopped
            return LOSS(outputs, targets)

        module.register_forward_pre_hook(note)
        with member, suppress(Stopped):
            trainer = FaultTolerantTrainer(member, tmp_path / "kept", checkpoint_frequency=4)
            trainer.train(dataset=data, batch_size=8, epochs=4, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn)
        return module, began, trainer.resumed_from

    with offbeat.ParameterServer(transaction="model") as server:
        live_once(server.address, 12)
        mean = server.state_dict()
        assert "which others have made since" not in caplog.text
        with caplog.at_level(logging.INFO, "offbeat"):
            module, began, resumed = live_once(server.address, 0)
    assert caplog.text.count("goes on with the parameters that the server has, which others have made") == 1
    step = int(resumed.name.rpartition("-")[2])
    assert began["line.weight"].equal(mean["line.weight"])
    assert began["norm.running_var"].equal(mean["BatchNorm statistics 1"])
    assert (began["norm.num_batches_tracked"], began["seen"]) == (step, step)
    assert (module.norm.num_batches_tracked, module.seen) == (20, 20)


def test_a_member_whose_server_is_lost_ends_with_its_own_model_and_saves_it(tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    with offbeat.ParameterServer(transaction="model") as server:
        averager = offbeat.AsyncModelAverager(
            model(), 1, 0, 3, communication_backend="tcp", server_address=server.address, overlap=False
        )
    with averager, warned() as told:
        own, steps, *_ = lived(averager, tmp_path, 0, stop_at=0, every=100)
    assert steps == 20
    assert [
        text for text in told if "the last 20 iteration(s) of member 0 are in its own model alone" in text
    ]
    with offbeat.ParameterServer(transaction="model") as server:
        *_, (kept, _, resumed, _) = at_a_server(0, server.address, tmp_path, 0)
    assert resumed == 20
    assert all((k == o).all() for k, o in zip(kept, own, strict=True))


def test_a_member_that_was_killed_goes_on_with_what_others_have_made_meanwhile(tmp_path):
    folder, out = tmp_path / "killed", tmp_path / "result.json"
    with offbeat.ParameterServer(transaction="model") as server:
        killed(fault_tolerant.meet, folder, server.address, kill=("step", 16))
        (save, _) = directory.names(folder)
        before = server.status()["version"]
        assert in_process(fault_tolerant.meet, tmp_path / "other", server.address) == 0
        assert server.status()["version"] > before
        held = server.state_dict()
        mean = fault_tolerant.digest([held[name] for name, _ in fault_tolerant.model().named_parameters()])
        assert in_process(fault_tolerant.meet, folder, server.address, out=out) == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["began"] == mean
    assert found["resumed_from"] == str(folder / save)
    assert save.endswith("-step-12")
    assert found["counts"] == [24, 2 * SAMPLES, 2, "epochs"]
    assert found["moments"] == [24]


def test_an_averager_that_goes_by_gradients_finds_them_here(tmp_path):
    averager = offbeat.AsyncModelAverager(
        model(),
        averaging_frequency=2,
        averaging_policy="adaptive",
        adaptation_metric="gradient_norm",
        process_group=False,
    )
    data = TensorDataset(torch.eye(6), torch.arange(6) % 5)
    trainer = FaultTolerantTrainer(averager, checkpoint_dir=tmp_path)
    trainer.train(dataset=data, epochs=60, batch_size=3, optimizer=optim.SGD(lr=0.5), loss_fn=LOSS)
    assert averager.averaging_frequency > 2
    assert all(parameter.grad is None for parameter in averager.model.parameters())


# ---------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("wrap", [lambda module: module, offbeat.AsyncTrainer, offbeat.AsyncModelAverager])
def test_other_settings_than_the_checkpoint_s_are_warned_of(wrap, tmp_path, caplog):
    data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    for lr in (0.1, 0.2):
        trainer = FaultTolerantTrainer(wrap(model()), tmp_path)
        trainer.train(dataset=data, epochs=2, max_steps=1, optimizer=optim.SGD(lr=lr), loss_fn=LOSS)
    assert "the optimizer's lr is 0.2, and the checkpoint's run began with 0.1" in caplog.text
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", ["module", "trainer", "averager", "worker"])
def test_an_optimizer_of_other_groups_is_refused_and_nothing_changes(kind, serve, tmp_path):
    data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    wraps = {"module": lambda it: it, "trainer": offbeat.AsyncTrainer, "averager": offbeat.AsyncModelAverager}

    def live_once(around, module, *, split):
        parameters = list(module.parameters())
        groups = [parameters[:1], parameters[1:]] if split else [parameters]
        live = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
        FaultTolerantTrainer(around, tmp_path).train(
            dataset=data, epochs=2, max_steps=1, optimizer=live, loss_fn=LOSS
        )

    def assert_refused(around, module):
        with pytest.raises(ModelMismatchError, match=r"the optimizer's groups have \[\d+\] para"):
            live_once(around, module, split=False)

    if kind == "worker":
        server = serve(model())
        with offbeat.AsyncWorker(server.address, model()) as worker:
            live_once(worker, worker.model, split=True)
        with offbeat.AsyncWorker(server.address, model()) as worker:
            assert_refused(worker, worker.model)
        return
    first, second = model(), model()
    live_once(wraps[kind](first), first, split=True)
    before = [p.detach().clone() for p in second.parameters()]
    assert_refused(wraps[kind](second), second)
    assert all(p.equal(b) for p, b in zip(second.parameters(), before, strict=True))


def test_a_checkpoint_is_of_what_trained(tmp_path):
    def train(wrap, **keywords):
        data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
        FaultTolerantTrainer(wrap(model()), tmp_path).train(
            dataset=data, epochs=2, max_steps=1, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, **keywords
        )

    train(offbeat.AsyncModelAverager)
    with pytest.raises(ModelMismatchError, match="the wrapper is none, and the checkpoint's is AsyncModelAv"):
        train(lambda module: module)
    with pytest.raises(
        ModelMismatchError, match="the wrapper is AsyncTrainer, and the checkpoint's is AsyncMo"
    ):
        train(offbeat.AsyncTrainer)
    with pytest.raises(ModelMismatchError, match="the state is of method"):
        train(lambda module: offbeat.AsyncModelAverager(module, method="diloco"))
    with pytest.raises(ConfigError, match='AsyncTrainer has its own: make it with amp="fp16"'):
        train(offbeat.AsyncTrainer, grad_scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("given", [{"scheduler_metric": "loss"}, {"validation": [BATCH]}])
def test_a_plateau_around_a_worker_goes_by_what_it_measures(given, serve, tmp_path):
    seen = []

    class Seen(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics):
            seen.append(metrics)
            super().step(metrics)

    with offbeat.AsyncWorker(serve(model()).address, model()) as worker:
        live = torch.optim.SGD(worker.model.parameters(), lr=0.1)
        history = FaultTolerantTrainer(worker, tmp_path).train(
            dataloader=[BATCH],
            epochs=3,
            optimizer=live,
            loss_fn=LOSS,
            scheduler=Seen,
            log_frequency=1,
            **given,
        )
    told = history.validation or history.records
    assert seen == [one.metrics["loss"] for one in told]
    assert len(seen) == 3


@pytest.mark.parametrize("scheduler_interval", ["epoch", "step"])
@pytest.mark.parametrize("wrap", [lambda module: module, offbeat.AsyncTrainer, offbeat.AsyncModelAverager])
def test_a_scheduler_that_goes_by_a_metric_and_has_none_is_refused_with_what_this_trainer_has(
    wrap, scheduler_interval, tmp_path
):
    words = {
        "epoch": 'ReduceLROnPlateau goes by a metric: give scheduler_metric="loss", say, or validation=',
        "step": 'scheduler_interval is "step", and ReduceLROnPlateau goes by an epoch',
    }
    with pytest.raises(ConfigError, match=words[scheduler_interval]):
        FaultTolerantTrainer(wrap(model()), tmp_path).train(
            dataset=TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
            scheduler=functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau),
            scheduler_interval=scheduler_interval,
        )


def test_it_does_what_the_trainer_does_and_tells_callbacks_and_trackers(tmp_path):
    class Told:
        def __init__(self):
            self.heard = []

        def on_step(self, _, step):
            self.heard.append(("step", step.step, float(step.loss)))

        def on_epoch_end(self, _, epoch):
            self.heard.append(("epoch", epoch))

        def on_log(self, _, record):
            self.heard.append(("log", record.step, record.metrics))

        def on_train_end(self, _, history):
            self.heard.append(("end", history.stopped))

        def log(self, values, step):
            self.heard.append(("tracked", step, values["loss"]))

        def finish(self):
            pass

    batches = [(torch.randn(8, 6), torch.arange(8) % 5) for _ in range(5)]
    run = {
        "dataloader": batches,
        "epochs": 3,
        "optimizer": optim.SGD(lr=0.1, momentum=0.9),
        "loss_fn": nn.CrossEntropyLoss(),
        "scheduler": lambda live: torch.optim.lr_scheduler.StepLR(live, 4, 0.5),
        "log_frequency": 2,
    }
    found = []
    for name in ("plain", "kept"):
        told, trained = Told(), model()
        trainer = offbeat.AsyncTrainer(
            trained,
            strategy="slowmo",
            regular_sync_frequency=4,
            max_grad_norm=0.3,
            callbacks=told,
            trackers=told,
        )
        if name == "plain":
            trainer.train(**run, scheduler_interval="step", progress=False)
        else:
            FaultTolerantTrainer(trainer, tmp_path).train(**run, scheduler_interval="step")
        found.append((told.heard, [value.copy() for value in arrays(trained)]))
    (heard, plain), (also, kept) = found
    assert heard == also
    assert all((a == b).all() for a, b in zip(plain, kept, strict=True))


def test_a_trainer_s_state_goes_on_between_two_trains():
    batches = [(torch.randn(8, 6), torch.arange(8) % 5) for _ in range(5)]

    def made():
        trained = model()
        trainer = offbeat.AsyncTrainer(
            trained, strategy={0: "diloco", 2: "accumulate"}, warm_up_epochs=1, regular_sync_frequency=3
        )
        return trained, trainer

    def steps_of(live):
        return torch.optim.lr_scheduler.ExponentialLR(live, 0.9)

    run = {"dataloader": batches, "optimizer": optim.Adam(lr=0.05), "loss_fn": LOSS, "scheduler": steps_of}
    whole, trainer = made()
    trainer.train(**run, progress=False)
    state, values = copy.deepcopy((trainer.state_dict(), whole.state_dict()))
    again, other = made()
    again.load_state_dict(values)
    other.load_state_dict(state, optimizer=optim.Adam(lr=0.05), scheduler=steps_of)
    assert other.state_dict().keys() == state.keys()
    assert other.history == trainer.history
    for one in (trainer, other):
        one.train(**run, epochs=2, progress=False)
    assert all((a == b).all() for a, b in zip(arrays(whole), arrays(again), strict=True))
    assert repr(other) == repr(trainer)
    _, third = made()
    with pytest.raises(
        ConfigError, match=r"there is no optimizer here.*give load_state_dict\(state, optimizer="
    ):
        third.load_state_dict(state)
    with pytest.raises(ConfigError, match="the state has a scheduler's, and there is none here"):
        third.load_state_dict(state, optimizer=optim.Adam(lr=0.05))
    assert third.optimizer is None
    with pytest.raises(ConfigError, match="in epoch 0 the strategy is 'local', and the state's was DiLoCo"):
        offbeat.AsyncTrainer(model()).load_state_dict(
            state, optimizer=optim.Adam(lr=0.05), scheduler=steps_of
        )
