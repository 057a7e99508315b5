"""AsyncTrainer against a parameter server."""

import contextlib
import copy
import functools
import itertools
import logging
import math
import types

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, ConnectionLostError, ModelMismatchError, StateError
from offbeat.trainer import served
from support.host import Host
from support.ports import free_port

LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def batch(number, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    return scale * torch.randn(7, 6, generator=generator), torch.randint(5, (7,), generator=generator)


DATA = [batch(number) for number in range(8)]


def loop(trained, live, data=DATA, epochs=1, clip=None):
    for _ in range(epochs):
        for inputs, targets in data:
            live.zero_grad()
            LOSS(trained(inputs), targets).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            live.step()


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.fixture
def trainer_of(serve, stack):
    """Make a server and a trainer of its."""

    def make(trained, regular=1, *, server=None, **keywords):
        server = server or serve(model())
        keywords = {"warm_up_epochs": 0, "strategy": "parameter_server"} | keywords
        made = offbeat.AsyncTrainer(
            trained, regular_sync_frequency=regular, server_address=server.address, **keywords
        )
        return server, stack.enter_context(made)

    return make


def fit(trainer, optimizer, **keywords):
    keywords = {"dataloader": DATA, "loss_fn": LOSS, "progress": False} | keywords
    return trainer.fit(optimizer=optimizer, **keywords)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("is_live", [True, False])
def test_one_worker_that_pushes_each_batch_is_a_plain_loop(trainer_of, is_live, clip):
    ours, theirs = model(), model()
    _, trainer = trainer_of(ours, max_grad_norm=clip)
    given = torch.optim.SGD(ours.parameters(), lr=0.1) if is_live else optim.SGD(lr=0.1)
    history = fit(trainer, given)
    loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), clip=clip)
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-6, atol=1e-7)
    assert (history.steps, history.receipts, history.records[-1].version) == (8, {"applied": 8}, 8)
    assert history.records[-1].staleness == 0.0


@pytest.mark.parametrize(("is_live", "steps"), [(False, 4 + 2), (True, 16)])
def test_the_warm_up_pushes_more_often_and_a_worker_of_the_same_name_goes_on(trainer_of, is_live, steps):
    ours = model()
    server, trainer = trainer_of(ours, 5, warm_up_epochs=1, warm_up_sync_frequency=2, worker_id="amy")
    given = torch.optim.SGD(ours.parameters(), lr=0.1) if is_live else optim.SGD(lr=0.1)
    history = fit(trainer, given, epochs=2)
    assert (history.steps, history.receipts) == (steps, {"applied": 4 + 2})
    assert server.status()["version"] == 6
    assert {w["id"] for w in server.status()["workers"]} == {"amy"}
    assert same(ours, _pulled(server))


def _pulled(server):
    theirs = model()
    theirs.load_state_dict(server.state_dict(), strict=True)
    return theirs


def test_a_batch_whose_scaled_gradients_are_not_finite_pushes_nothing_and_is_counted(trainer_of):
    wild = [batch(number, 3000.0 if number % 4 == 1 else 1.0) for number in range(8)]
    server, trainer = trainer_of(model(), amp="fp16")
    history = fit(trainer, optim.SGD(lr=0.01), dataloader=wild)
    assert trainer.skipped_steps == history.skipped >= 2
    assert history.receipts == {"applied": 8 - history.skipped}
    assert history.steps == server.status()["version"] == 8 - history.skipped


def test_an_alert_on_a_batch_that_is_skipped_costs_no_other(trainer_of):
    ours, losses = model(), []

    def loss_fn(outputs, targets):
        losses.append(LOSS(outputs, targets) * (math.inf if len(losses) == 4 else 1.0))
        return losses[-1]

    _, trainer = trainer_of(ours, amp="fp16")
    trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 8.0})
    with offbeat.AsyncTrainingMonitor(ours, remediation_strategy="reject") as monitor:
        history = fit(trainer, optim.SGD(lr=0.01), loss_fn=loss_fn)
    assert monitor.report().num_alerts == {"loss": 1}
    assert (history.skipped, history.receipts, monitor.report().num_dropped) == (1, {"applied": 7}, 0)


@pytest.mark.parametrize("is_live", [True, False])
def test_a_batch_that_a_monitor_leaves_out_is_skipped_and_counts_in_no_mean(trainer_of, is_live):
    ours, steps = model(), []
    told = types.SimpleNamespace(on_step=lambda _, step: steps.append(step.is_skipped))
    _, trainer = trainer_of(ours, callbacks=[told])
    spoilt = [batch(number, math.nan if number == 4 else 1.0) for number in range(8)]
    given = torch.optim.SGD(ours.parameters(), lr=0.1) if is_live else optim.SGD(lr=0.1)
    with offbeat.AsyncTrainingMonitor(ours, ["non_finite"], remediation_strategy="reject"):
        history = fit(trainer, given, dataloader=spoilt)
    assert steps == [number == 4 for number in range(8)]
    assert (history.skipped, trainer.skipped_steps, history.steps) == (1, 1, 7)
    assert (history.receipts, history.first_non_finite) == ({"applied": 7}, None)
    assert math.isfinite(history.records[-1].metrics["loss"])


def test_the_first_step_here_is_judged_after_pushes_to_an_optimizer_there(trainer_of):
    ours = model()
    _, trainer = trainer_of(ours)
    with offbeat.AsyncTrainingMonitor(ours, ["non_finite"], remediation_strategy="reject") as monitor:
        fit(trainer, optim.SGD(lr=0.1))
        trainer.strategy = "local"
        fit(trainer, optim.SGD(lr=0.1), dataloader=[batch(1, scale=math.nan)])
    assert monitor.report().num_dropped == 1
    assert all(bool(parameter.isfinite().all()) for parameter in ours.parameters())


def test_a_monitor_that_is_to_reduce_the_rate_of_an_optimizer_on_the_server_says_what_to_give(trainer_of):
    ours = model()
    _, trainer = trainer_of(ours)
    with offbeat.AsyncTrainingMonitor(ours, remediation_strategy="reduce_lr") as monitor:
        fit(trainer, optim.SGD(lr=0.01))
        (alert,) = monitor.observe(99, loss=float("inf"))
    assert "could not be done: the optimizer runs on the server" in alert.result
    assert "give acts_on= the ParameterServer" in alert.result


def test_the_end_of_the_budget_ends_the_training(serve, trainer_of):
    server = serve(model(), max_samples=21)
    _, trainer = trainer_of(model(), server=server)
    history = fit(trainer, optim.SGD(lr=0.1))
    assert history.stopped == "budget"
    assert history.receipts["applied"] == 3


def test_a_budget_that_ends_with_a_pass_leaves_no_number_out(serve, trainer_of):
    epochs = []

    class Seen:
        def on_epoch_end(self, trainer, epoch):
            epochs.append(epoch)

    server = serve(model(), max_samples=7 * len(DATA))
    _, trainer = trainer_of(model(), regular=len(DATA) + 1, server=server, callbacks=Seen())
    history = fit(trainer, optim.SGD(lr=0.1), epochs=3)  # what is gathered is pushed when a pass ends
    assert (history.stopped, history.epochs, epochs) == ("budget", 2, [0, 1])  # the second one's is too much
    assert trainer.state_dict()["epochs"] == 2


def test_what_was_trained_without_the_server_is_said_to_be_lost_where_it_has_a_model(trainer_of, caplog):
    ours = model()
    strategies = {0: "parameter_server", 1: "local", 2: "parameter_server"}
    _, trainer = trainer_of(ours, strategy=strategies)
    fit(trainer, torch.optim.SGD(ours.parameters(), lr=0.1), epochs=2)
    assert "goes on from the model that the server has" not in caplog.text
    history = fit(trainer, None, epochs=1)
    assert caplog.text.count('epoch 2: "parameter_server" goes on from the model that the server has') == 1
    assert history.optimizer == "SGD(lr=0.1); strategy 'local', then 'parameter_server'"


def test_it_is_said_to_be_lost_also_where_a_first_try_to_go_on_there_has_failed(caplog):
    port = free_port()
    ours = model()
    strategies = {0: "local", 1: "parameter_server"}
    with offbeat.AsyncTrainer(ours, strategy=strategies, server_address=f"127.0.0.1:{port}") as trainer:
        fit(trainer, torch.optim.SGD(ours.parameters(), lr=0.1))
        with offbeat.ParameterServer(nn.Linear(3, 3), port=port), pytest.raises(ModelMismatchError):
            fit(trainer, None)
        assert "is lost" not in caplog.text
        with offbeat.ParameterServer(model(), port=port):
            fit(trainer, None)
            fit(trainer, None)
    assert caplog.text.count('epoch 1: "parameter_server" goes on from the model that the server has') == 1


def test_who_has_averaged_alone_brings_that_to_a_server_with_a_model_that_nobody_has_trained(serve, caplog):
    ours, theirs = model(), model()
    server = serve(ours)
    strategy = {0: "average", 1: "parameter_server"}
    places = {"server_address": server.address, "process_group": False}
    with offbeat.AsyncTrainer(ours, strategy=strategy, **places) as trainer:
        fit(trainer, torch.optim.SGD(ours.parameters(), lr=0.1), epochs=2)
    assert "is lost" not in caplog.text
    loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), epochs=2)
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, plain, atol=1e-6)


def pushed_by_one_else(server):
    with offbeat.AsyncWorker(server.address, model()) as worker:
        live = torch.optim.SGD(worker.model.parameters(), lr=0.01)
        worker.train(dataloader=DATA, optimizer=live, loss_fn=LOSS, progress=False)


@pytest.mark.parametrize("how", ["state", "close"])
@pytest.mark.parametrize(
    ("happens", "is_brought"),
    [
        (lambda server: None, True),
        (pushed_by_one_else, False),
        (lambda server: server.load_state_dict(model().state_dict()), False),
    ],
    ids=["nothing", "pushes", "other values"],
)
def test_members_bring_what_they_have_made_where_a_server_is_as_they_left_it(
    serve, happens, is_brought, how, caplog
):
    """Also a process that goes on from a state, and one that has closed its trainer as it left."""
    server = serve(model())
    places = {"server_address": server.address, "process_group": False}
    strategies = {0: "parameter_server", 1: "average", 2: "parameter_server"}
    ours = model()
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(offbeat.AsyncTrainer(ours, strategy=strategies, **places))
        fit(trainer, live)
        if how == "close":
            trainer.close()
        fit(trainer, live)
        happens(server)
        values = copy.deepcopy(ours.state_dict())
        if how == "state":
            state, ours = trainer.state_dict(), model()
            ours.load_state_dict(values)
            trainer.close()
            trainer = stack.enter_context(offbeat.AsyncTrainer(ours, strategy=strategies, **places))
            live = torch.optim.SGD(ours.parameters(), lr=0.1)
            trainer.load_state_dict(state, optimizer=live)
        live.param_groups[0]["lr"] = 0.0  # what it pushes is nothing
        before = copy.deepcopy(server.state_dict())
        fit(trainer, None)
    assert caplog.text.count("is lost") == (not is_brought)
    assert "is not in it" not in caplog.text
    kept = values if is_brought else before
    now = server.state_dict()
    assert all(np.allclose(now[name], kept[name], atol=1e-6) for name in kept)


def test_of_two_that_come_by_themselves_the_second_finds_the_first_s_model(serve, caplog):
    """Neither was there before, and what the one has brought is not what the server's owner gave it."""
    server = serve(model())
    places = {"server_address": server.address, "process_group": False}
    strategies = {0: "average", 1: "parameter_server"}
    values = []
    with contextlib.ExitStack() as stack:
        for number in range(2):
            ours = model()
            trainer = stack.enter_context(
                offbeat.AsyncTrainer(ours, 0, 1, 100, strategy=strategies, **places)
            )
            live = torch.optim.SGD(ours.parameters(), lr=0.1 + number)
            fit(trainer, live)
            values.append(copy.deepcopy(ours.state_dict()))
            live.param_groups[0]["lr"] = 0.0
            fit(trainer, None)
            assert caplog.text.count("is lost") == number
    now = server.state_dict()
    assert all(np.allclose(now[name], value, atol=1e-6) for name, value in values[0].items())


def test_who_closes_a_trainer_that_has_averaged_is_told_that_a_server_goes_on_without_that(serve, caplog):
    server = serve(model())
    ours = model()
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    places = {"server_address": server.address, "process_group": False}
    with offbeat.AsyncTrainer(ours, strategy={0: "average", 1: "parameter_server"}, **places) as trainer:
        fit(trainer, live)
        trainer.close()
        fit(trainer, live)
    assert caplog.text.count("is lost") == 1
    assert "or close() was called in between" in caplog.text


class Interrupts(logging.Handler):
    """Ctrl-C comes, once, as a warning is given."""

    has_come = False

    def emit(self, record):
        if "is lost" in record.getMessage() and not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt


def test_ctrl_c_in_a_change_whose_model_the_server_does_not_take_has_the_next_train_come_anew(serve, caplog):
    """With the worker that had joined, it would take what it has itself for what the server has."""
    server = serve(model())
    places = {"server_address": server.address, "process_group": False}
    ours = model()
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    with offbeat.AsyncTrainer(ours, strategy={0: "average", 1: "parameter_server"}, **places) as trainer:
        fit(trainer, live)
        pushed_by_one_else(server)
        values, theirs = copy.deepcopy(ours.state_dict()), copy.deepcopy(server.state_dict())
        handler = Interrupts()
        logging.getLogger("offbeat").addHandler(handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                fit(trainer, live)
        finally:
            logging.getLogger("offbeat").removeHandler(handler)
        assert all(map(torch.equal, values.values(), ours.state_dict().values()))
        caplog.clear()
        live.param_groups[0]["lr"] = 0.0
        fit(trainer, live)
        assert caplog.text.count("is lost") == 1
    now = server.state_dict()
    assert all(np.allclose(now[name], value, atol=1e-6) for name, value in theirs.items())


def test_a_trainer_whose_worker_has_ended_by_itself_is_closed_as_any(serve, trainer_of):
    """As by an `atexit` of the user's own."""
    _, trainer = trainer_of(model())
    fit(trainer, optim.SGD(lr=0.1))
    trainer._stage.strategy.worker.close()
    trainer.close()


@pytest.mark.parametrize("first", ["average", "local"])
def test_a_state_of_a_trainer_that_could_not_begin_at_a_server_goes_on_as_that_would(first, caplog):
    port = free_port()
    places = {"server_address": f"127.0.0.1:{port}"} | (
        {"process_group": False} if first == "average" else {}
    )
    strategies = {0: first, 1: "parameter_server"}
    ours = model()
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    with offbeat.AsyncTrainer(ours, strategy=strategies, **places) as trainer:
        fit(trainer, live)
        values = copy.deepcopy(ours.state_dict())
        with (
            offbeat.ParameterServer(model(), optimizer=optim.SGD(lr=0.1), port=port),
            pytest.raises(ConfigError, match="optimizer"),
        ):
            fit(trainer, None)
        assert all(map(torch.equal, values.values(), ours.state_dict().values()))
        state = trainer.state_dict()
    later = model()
    later.load_state_dict(values)
    live = torch.optim.SGD(later.parameters(), lr=0.1)
    with (
        offbeat.ParameterServer(model(), port=port) as server,
        offbeat.AsyncTrainer(later, strategy=strategies, **places) as trainer,
    ):
        trainer.load_state_dict(state, optimizer=live)
        live.param_groups[0]["lr"] = 0.0
        fit(trainer, None)
        now = server.state_dict()
    assert caplog.text.count("is lost") == (first == "local")
    is_brought = all(np.allclose(now[name], value, atol=1e-6) for name, value in values.items())
    assert is_brought == (first == "average")


def test_a_server_without_a_model_takes_what_was_trained_before(serve, trainer_of, caplog):
    ours, theirs = model(), model()
    server = serve(None)
    _, trainer = trainer_of(ours, server=server, strategy={0: "local", 1: "parameter_server"})
    history = fit(trainer, torch.optim.SGD(ours.parameters(), lr=0.1), epochs=2)
    loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), epochs=2)
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-5, atol=1e-6)
    assert "goes on from the model that the server has" not in caplog.text
    assert history.optimizer == "SGD(lr=0.1); strategy 'local', then 'parameter_server'"


def test_it_goes_on_from_local_steps_and_back(trainer_of):
    ours, theirs = model(), model()
    server, trainer = trainer_of(ours, strategy={0: "local", 1: "parameter_server", 2: "local"})
    live = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    fit(trainer, live, epochs=1)
    assert server.status()["version"] == 0
    with pytest.raises(ConfigError, match="lr_schedule= in place of scheduler="):
        fit(
            offbeat.AsyncTrainer(model(), strategy="parameter_server", server_address=server.address),
            optim.SGD(lr=0.1),
            scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        )
    fit(trainer, live, epochs=2)
    assert server.status()["version"] == 8
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    loop(theirs, reference)
    theirs.load_state_dict(model().state_dict())  # the server's own, which a worker takes over
    loop(theirs, reference, epochs=2)
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-5, atol=1e-6)


def test_going_on_here_needs_an_optimizer_that_is_here(trainer_of):
    class Setter:
        def on_step(self, trainer, step):
            trainer.strategy = "local"

    _, trainer = trainer_of(model(), callbacks=Setter())
    with pytest.raises(StateError, match="the optimizer of this train runs on the server"):
        fit(trainer, optim.SGD(lr=0.1))
    assert trainer.history.stopped == "failed"


def test_a_lost_server_is_told_with_what_to_do_with_a_trainer_and_doing_it_goes_on(serve, monkeypatch):
    """There is no worker in the user's hands."""
    monkeypatch.setattr(
        served, "AsyncWorker", functools.partial(offbeat.AsyncWorker, reconnect_timeout_s=0.5)
    )
    host = Host()
    address = host.call(None, "start", (model(),))[1]
    trained = model()

    class Killer:
        def on_step(self, trainer, step):
            host.process.kill()
            host.process.join()

    monkeypatch.setenv("OFFBEAT_SERVER", address)
    trainer = offbeat.AsyncTrainer(
        trained, strategy="parameter_server", regular_sync_frequency=1, callbacks=Killer()
    )
    with pytest.raises(ConnectionLostError, match=r"call the trainer's close\(\)") as caught:
        fit(trainer, optim.SGD(lr=0.1))
    assert "orker" not in str(caught.value).partition(". The model keeps")[2]
    trainer.close()
    kept = copy.deepcopy(trained.state_dict())
    monkeypatch.setenv("OFFBEAT_SERVER", serve(optimizer=optim.SGD(lr=0.0)).address)
    with trainer:
        assert fit(trainer, optim.SGD(lr=0.0)).steps == 8
    assert all(map(torch.equal, trained.state_dict().values(), kept.values()))


def test_an_address_may_come_from_the_environment(monkeypatch, serve):
    with pytest.raises(ConfigError, match='give server_address="HOST:PORT", or set OFFBEAT_SERVER'):
        offbeat.AsyncTrainer(model(), strategy="parameter_server")
    monkeypatch.setenv("OFFBEAT_SERVER", serve(model()).address)
    with offbeat.AsyncTrainer(model(), strategy="parameter_server", regular_sync_frequency=4) as trainer:
        assert fit(trainer, optim.SGD(lr=0.1)).steps == 2


@pytest.mark.parametrize("strategy", ["parameter_server", "average"])
def test_a_server_hears_that_who_measures_its_model_gets_on(strategy, monkeypatch):
    """Else one that measures for longer than a lease would be taken for stalled."""
    told, measured = [], []
    owner, name = {
        "parameter_server": (offbeat.AsyncWorker, "note_measured"),
        "average": (offbeat.Client, "set_progress"),
    }[strategy]
    says = getattr(owner, name)

    def hear(who, steps):
        told.append((steps, len(measured)))
        says(who, steps)

    def seen(outputs, targets):
        del outputs, targets
        measured.append(1)
        return 0.0

    monkeypatch.setattr(owner, name, hear)
    transaction = "model" if strategy == "average" else "fragment"
    with (
        offbeat.ParameterServer(transaction=transaction) as server,
        offbeat.AsyncTrainer(model(), server_address=server.address, strategy=strategy) as trainer,
    ):
        fit(trainer, optim.SGD(lr=0.1), validation=DATA[:4], epochs=1)
        told.clear(), measured.clear()
        trainer.evaluate(DATA[:4], seen)
        trainer.evaluate(DATA[:2], seen)
    by_batch = [steps for steps, number in told if number]
    assert [number for _, number in told if number] == [1, 2, 3, 4, 5, 6]
    assert all(one != other for one, other in itertools.pairwise(by_batch))
