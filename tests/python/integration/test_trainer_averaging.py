"""AsyncTrainer with members that average at a server: they come, go and die without stopping one another."""

import copy
import itertools
import json
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import averaging, optim
from offbeat.errors import ConfigError, StateError
from support.averaging import arrays, model, warned
from support.group import together
from support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.05, momentum=0.9)


@pytest.fixture
def server():
    with offbeat.ParameterServer(transaction="model") as running:
        yield running


def data_of(rank, length):
    random = torch.Generator().manual_seed(100 + rank)
    sizes = [2 + (rank + number) % 4 for number in range(length)]
    return [(torch.randn(n, 6, generator=random), torch.randint(5, (n,), generator=random)) for n in sizes]


def fit(trainer, data, epochs=1):
    return trainer.train(dataloader=data, epochs=epochs, optimizer=SPEC, loss_fn=LOSS, progress=False)


def plain_loop(data):
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in data:
        optimizer.zero_grad()
        LOSS(trained(inputs), targets).backward()
        optimizer.step()
    return trained


def held(server):
    return [np.asarray(value) for value in server.state_dict().values()]


class Dies:
    """Ends this process, without a word, once it has averaged with the other."""

    def __init__(self, gone):
        self.gone = gone

    def on_step(self, trainer, step):
        averager = trainer._stage.strategy.averager
        if averager.world_size == 2 and averager.averaging_round >= 2:
            self.gone.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Sizes:
    """Takes down of how many members rounds were."""

    def __init__(self):
        self.by_round = {}

    def on_step(self, trainer, step):
        averager = trainer._stage.strategy.averager
        self.by_round[averager.averaging_round] = averager.world_size


def member(rank, address, here):
    gone = here / "gone"

    def data():
        batches = data_of(rank, 40)
        while not gone.exists():
            yield from batches
        yield from batches

    trained, sizes = model(seed=rank), Sizes()
    with offbeat.AsyncTrainer(
        trained,
        strategy="average",
        regular_sync_frequency=4,
        overlap=False,
        server_address=address,
        callbacks=Dies(gone) if rank == 1 else sizes,
    ) as trainer:
        history = fit(trainer, data())
    np.savez(here / "model.npz", *arrays(trained))
    (here / "said").write_text(json.dumps([history.stopped, *sizes.by_round.values()]))


def test_one_that_is_killed_does_not_stop_the_other(server, tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(member, 2, server.address, tmp_path)
    stopped, *sizes = json.loads((tmp_path / "said").read_text())
    assert stopped == "epochs"
    assert 2 in sizes
    assert sizes[-9:] == [1] * 9  # of the last 40 batches, by 4; the first may be the one that it died in
    with np.load(tmp_path / "model.npz") as found:
        assert all(map(np.array_equal, found.values(), held(server)))


class Stops:
    """Stops the server after some batches."""

    def __init__(self, server, after):
        self.server, self.after = server, after

    def on_step(self, trainer, step):
        if step.step == self.after:
            self.server.stop()


def test_a_run_whose_server_is_lost_goes_on_to_its_end_and_says_so():
    trained = model()
    with offbeat.ParameterServer(transaction="model") as server, warned() as told:
        stops = Stops(server, after=3)
        with offbeat.AsyncTrainer(
            trained, 1, 2, 3, strategy="average", server_address=server.address, callbacks=stops
        ) as trainer:
            history = fit(trainer, data_of(0, 4), epochs=2)
            assert trainer._stage.strategy.averager.averaging_frequency == 2  # as long as nobody answers
    assert (history.stopped, history.steps) == ("epochs", 8)
    assert [text for text in told if text.startswith("what was trained last is not averaged: the members' s")]
    after = plain_loop(data_of(0, 4) * 2)
    assert all(map(torch.equal, trained.parameters(), after.parameters())), "a member alone is a plain loop"


def test_a_train_that_is_called_again_brings_what_was_learnt_while_the_server_was_away(monkeypatch, tmp_path):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    port, trained = free_port(), model()

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with offbeat.AsyncTrainer(
        trained, 0, 2, 2, strategy="average", overlap=False, server_address=f"127.0.0.1:{port}"
    ) as trainer:
        with serving():
            fit(trainer, data_of(0, 4))
        with warned() as told:
            fit(trainer, data_of(0, 4))
        (said,) = [text for text in told if text.startswith("what was trained last is not averaged")]
        assert "as the end of a train() that is called again is one" in said
        assert "flush" not in said
        with serving() as server:
            assert not all(map(np.array_equal, held(server), arrays(trained)))
            fit(trainer, data_of(0, 4))
            assert all(map(np.array_equal, held(server), arrays(trained)))
    for ours, theirs in zip(trained.parameters(), plain_loop(data_of(0, 4) * 3).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # but for rounding, as a difference was added to the mean


def test_a_trainer_whose_block_ends_by_an_exception_leaves_and_the_server_says_by_which(server):
    class Fails:
        def on_step(self, trainer, step):
            raise ZeroDivisionError("boom")

    def train():
        with offbeat.AsyncTrainer(
            model(), 0, 2, 2, strategy="average", server_address=server.address, callbacks=Fails()
        ) as trainer:
            fit(trainer, data_of(0, 4))

    with pytest.raises(ZeroDivisionError):
        train()
    (worker,) = server.status()["workers"]
    assert (worker["state"], worker["cause"]) == (
        "left",
        "left before its work was done: ZeroDivisionError: boom",
    )


def test_a_train_after_close_joins_the_members_anew(server):
    trained = model()
    trainer = offbeat.AsyncTrainer(trained, 0, 2, 2, strategy="average", server_address=server.address)
    for _ in range(2):
        fit(trainer, data_of(0, 4))
        assert all(map(np.array_equal, held(server), arrays(trained)))
        trainer.close()
        (*_, newest) = server.status()["workers"]
        assert newest["state"] not in ("joined", "lost"), "it has said goodbye"


def changing(rank, address, lengths):
    trained = model(seed=rank)
    strategies = {0: "average", 1: averaging.SlowMo(beta=0.3), 2: averaging.DiLoCo(lr=0.5)}
    with (
        pytest.MonkeyPatch.context() as environment,
        offbeat.AsyncTrainer(trained, 1, 2, 3, strategy=strategies, server_address=address) as trainer,
    ):
        environment.setenv("RANK", str(rank))  # as a launcher does, for those who begin together
        environment.setenv("WORLD_SIZE", "2")
        history = fit(trainer, data_of(rank, lengths[rank]), epochs=4)
        return (
            arrays(trained),
            history.steps,
            repr(trainer._stage.strategy.averager.method),
            history.optimizer,
        )


def test_members_change_frequency_and_method_together_at_a_server(server):
    lengths = [9, 5]
    found = together(changing, 2, server.address, lengths)
    for rank, (ours, steps, method, optimizer) in enumerate(found):
        assert steps == 4 * lengths[rank]
        assert method == repr(averaging.DiLoCo(lr=0.5))
        assert optimizer.count(", then ") == 2
        assert all(map(np.array_equal, ours, found[0][0]))


def changing_alone(rank, address):
    class Switches:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 1 and rank == 0:
                trainer.strategy = "diloco"

    with (
        pytest.MonkeyPatch.context() as environment,
        offbeat.AsyncTrainer(
            model(), 0, 2, 2, strategy="average", server_address=address, callbacks=Switches()
        ) as trainer,
        warned() as told,
    ):
        environment.setenv("RANK", str(rank))
        environment.setenv("WORLD_SIZE", "2")
        return fit(trainer, data_of(rank, 6), epochs=3).steps, told


def test_one_that_changes_its_strategy_alone_at_a_server_is_told_and_trains_on(server):
    (steps, told), (other_steps, _) = together(changing_alone, 2, server.address)
    assert steps == other_steps == 18
    (said,) = [
        text
        for text in told
        if text.startswith("of 2 members 1 are not there any more, now that this one has waited")
    ]
    assert "goes on with strategy DiLoCo" in said
    assert "set strategy in all of them, after the same batch of theirs" in said


def set_by_one(rank, address):
    with (
        pytest.MonkeyPatch.context() as environment,
        offbeat.AsyncTrainer(model(), 1, 2, 3 + rank, strategy="average", server_address=address) as trainer,
    ):
        environment.setenv("RANK", str(rank))
        environment.setenv("WORLD_SIZE", "2")
        try:
            fit(trainer, data_of(rank, 8), epochs=2)
        except StateError as error:
            return str(error)
    return None


def test_members_at_a_server_that_are_set_differently_are_told_when_the_warm_up_ends(server):
    for rank, told in enumerate(together(set_by_one, 2, server.address)):
        assert f"other members do not synchronize every {3 + rank} batches from here on" in told


def by_hand(trained, address, asynchronous):
    with offbeat.AsyncModelAverager(
        trained,
        averaging_frequency=3,
        method="diloco",
        overlap=False,
        server_address=address,
        asynchronous=asynchronous,
    ) as averager:
        for epoch in range(2):
            for inputs, targets in data_of(0, 8):
                averager.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            if epoch == 0:
                averager.flush()
                averager.averaging_frequency = 4
                averager.flush()
        averager.flush()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_at_a_server_is_the_averager_by_hand(asynchronous):
    ours, theirs = model(), model()
    with offbeat.ParameterServer(transaction="model") as server:
        how = {"strategy": "diloco", "overlap": False, "asynchronous": asynchronous}
        with offbeat.AsyncTrainer(ours, 1, 3, 4, server_address=server.address, **how) as trainer:
            fit(trainer, data_of(0, 8), epochs=2)
            receipt = trainer._stage.strategy.averager.receipt
        assert (receipt is not None) == asynchronous
        assert all(map(np.array_equal, arrays(ours), held(server)[: len(arrays(ours))]))
    with offbeat.ParameterServer(transaction="model") as server:
        by_hand(theirs, server.address, asynchronous)
    assert all(map(np.array_equal, arrays(ours), arrays(theirs)))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("sizes", [(6, 9, 5), (6, 8, 8, 5)])
def test_a_state_of_a_model_of_other_shapes_is_refused_before_its_member_comes_to_the_server(
    sizes, asynchronous
):
    def made(at, *sizes):
        layers = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
        how = {"strategy": "diloco", "overlap": False, "asynchronous": asynchronous}
        return offbeat.AsyncTrainer(layers, 0, 3, 4, server_address=at.address, **how)

    with offbeat.ParameterServer(transaction="model") as server, made(server, 6, 8, 5) as ours:
        fit(ours, data_of(0, 8))
        state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    with offbeat.ParameterServer(transaction="model") as server:
        with (
            made(server, *sizes) as other,
            pytest.raises(ConfigError, match="build the model that was saved"),
        ):
            other.load_state_dict(state | {"optimizer": None, "scheduler": None})
        with made(server, 6, 8, 5) as own:  # for whom it has no model yet
            own.model.load_state_dict(values)
            own.load_state_dict(state, optimizer=SPEC)
            fit(own, data_of(0, 8))
            assert own.history.steps == 8


def test_the_server_s_address_may_come_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OFFBEAT_SERVER", server.address)
    trained = model()
    with offbeat.AsyncTrainer(
        trained, strategy="average", regular_sync_frequency=4, communication_backend="tcp"
    ) as trainer:
        fit(trainer, data_of(0, 8))
        assert server.status()["rounds"]["closed"] >= 2
    assert all(map(np.array_equal, arrays(trained), held(server)))


def test_what_was_trained_without_a_server_that_has_a_mean_is_said_to_be_lost(server, caplog):
    strategies = {0: "average", 1: "local", 2: "average"}
    with offbeat.AsyncTrainer(model(), strategy=strategies, server_address=server.address) as trainer:
        fit(trainer, data_of(0, 8), epochs=2)
        assert "goes on from the model that the server has" not in caplog.text
        fit(trainer, data_of(0, 8))
    assert caplog.text.count("epoch 2: Average() goes on from the model that the server has") == 1


def test_it_is_said_to_be_lost_also_where_a_first_try_to_average_there_has_failed(caplog):
    port = free_port()
    strategies = {0: "local", 1: "average"}
    address = f"127.0.0.1:{port}"
    with offbeat.AsyncTrainer(model(), strategy=strategies, server_address=address) as trainer:
        fit(trainer, data_of(0, 8))
        with (
            offbeat.ParameterServer(model(), optimizer=optim.SGD(lr=0.1), port=port),
            pytest.raises(ConfigError, match="the server has an optimizer of its own"),
        ):
            fit(trainer, data_of(0, 8))
        assert "is lost" not in caplog.text
        with offbeat.ParameterServer(model(), port=port, transaction="model"):
            fit(trainer, data_of(0, 8))
            trainer.close()
    assert caplog.text.count("epoch 1: Average() goes on from the model that the server has") == 1


def test_one_that_is_started_again_goes_on_from_the_others_mean_of_now(server, tmp_path):
    begun = []

    def note(trained, given):
        if not begun:
            begun.extend(value.copy() for value in arrays(trained))

    def run(folder, epochs, seed):
        trained = model(seed=seed)
        begun.clear()
        trained.register_forward_pre_hook(note)
        with offbeat.AsyncTrainer(
            trained, strategy="average", regular_sync_frequency=4, server_address=server.address
        ) as trainer:
            around = offbeat.FaultTolerantTrainer(trainer, tmp_path / folder)
            history = around.train(dataloader=data_of(seed, 8), epochs=epochs, optimizer=SPEC, loss_fn=LOSS)
        return history.steps

    assert run("one", 1, 0) == 8
    assert run("other", 1, 1) == 8
    mean = held(server)
    assert run("one", 2, 0) == 16
    assert all(map(np.array_equal, begun, mean))
