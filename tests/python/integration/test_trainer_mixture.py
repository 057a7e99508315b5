"""AsyncTrainer whose members push to a parameter server for a while, and average in a process group after it.

What they have trained goes on from the one into the other, and back: a server that has a model takes theirs,
if no push of others' is lost by that. Checkpoints of before members begin, or end, to meet and of after it
are no run together.
"""

import json
import logging
import os
import shutil
import signal
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, ConnectionLostError, ModelMismatchError, StateError
from offbeat.recovery import directory
from offbeat.recovery.saver import Saver
from support.averaging import warned
from support.fault_tolerant import started, waited
from support.group import together
from support.ports import free_port
from support.trainer_group import BATCHES, EVERY, LOSS, Begins, data_of, member_of, model, values_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TURNS = ["parameter_server", "average", "diloco", "gossip", "parameter_server", "local"]
PUSHING = [0, 4]
"""Which of these push."""
LOST = '"parameter_server" goes on from the model that the server has'


def num_groups():
    return len(distributed.distributed_c10d._world.pg_map)


class Turns:
    """Sets another strategy after some batches."""

    def __init__(self, by_batch):
        self.by_batch, self.batches, self.used = by_batch, 0, []

    def on_step(self, trainer, step):
        self.batches += 1
        self.used.append(type(trainer._stage.strategy).__name__)
        if self.batches in self.by_batch:
            trainer.strategy = self.by_batch[self.batches]


def trained(rank, address, optimizer, how):
    """Train by all of `TURNS`, each for as many batches; say what came of it.

    Args:
        rank: Of this member.
        address: Of the server.
        optimizer: "live" or "spec".
        how: "epochs": by a dict; "set": in mid-epoch, by a callback.
    """
    ours = model(seed=rank)  # members begin unlike one another, and the server's is another still
    begins, turns = Begins(ours), Turns({})
    strategy, epochs, batches = dict(enumerate(TURNS)), len(TURNS), data_of(rank)
    if how == "set":
        turns.by_batch = {BATCHES * number: name for number, name in enumerate(TURNS) if number}
        strategy, epochs, batches = TURNS[0], 1, batches * len(TURNS)
    live = torch.optim.Adam(ours.parameters(), lr=0.01)
    # Before one of them averages a backend is refused, and is the group's, as the server is taken.
    settings = {"communication_backend": "gloo"} if how == "epochs" else {}
    groups = num_groups()
    with warned() as told, member_of(ours, address, strategy, callbacks=turns, **settings) as trainer:
        history = trainer.train(
            dataloader=batches,
            epochs=epochs,
            optimizer=live if optimizer == "live" else optim.Adam(lr=0.01),
            loss_fn=begins,
            progress=False,
        )
        kept = {int(entry["step"]) for entry in trainer.optimizer.state.values()}
        is_live = trainer.optimizer is live
        losses = []
        for values in [*begins.values[::BATCHES], values_of(ours)]:
            for parameter, value in zip(ours.parameters(), values, strict=True):
                parameter.data.copy_(torch.from_numpy(value))
            losses.append(trainer.evaluate(data_of(99, 4), LOSS))
    return {
        "begins": begins.values[::BATCHES],
        "losses": losses,
        "used": turns.used[::BATCHES],
        "told": told,
        "steps": history.steps,
        "receipts": history.receipts,
        "optimizer": history.optimizer,
        "kept": kept,
        "is_live": is_live,
        "groups": num_groups() - groups,
    }


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "how", "size"), [("spec", "epochs", 3), ("live", "epochs", 2), ("live", "set", 2)]
)
def test_members_move_from_pushes_to_averages_and_back_in_one_run(serve, optimizer, how, size):
    server = serve(model(seed=9))
    found = together(trained, size, server.address, optimizer, how)
    first, *others = found
    pushes = BATCHES // EVERY * len(PUSHING)
    for one in found:
        assert one["used"] == ["Served", "Averaged", "Averaged", "Averaged", "Served", "Local"]
        # Each learns, and nothing is lost on any way.
        losses = one["losses"]
        assert losses[0] > losses[1] > losses[2] > losses[3] > losses[4] > losses[5]
        assert losses[-1] < losses[3]
        # The optimizer here: a live one steps everywhere; a server's own is none of it, and counts pushes.
        by_all = BATCHES * len(TURNS)
        here = by_all if optimizer == "live" else by_all - BATCHES * len(PUSHING)
        assert (one["kept"], one["is_live"]) == ({here}, optimizer == "live")
        assert one["steps"] == (by_all if optimizer == "live" else here + pushes)
        assert one["receipts"] == {"applied": pushes}
        assert one["optimizer"].startswith(
            "Adam(lr=0.01); strategy 'parameter_server', then Average(), then "
        )
        assert [text for text in one["told"] if "is lost" in text] == []
        assert [text for text in one["told"] if "the first member has" in text] == []
        assert one["groups"] == 0
    # Who averages goes on from one model, which after the pushes is the server's, with those of all.
    for other in others:
        assert all(equal(first["begins"][turn], other["begins"][turn]) for turn in (1, 2, 3))
    states = [worker["state"] for worker in server.status()["workers"]]
    assert states == ["finished"] * size * len(PUSHING)
    assert server.status()["version"] == size * pushes


def with_statistics(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


class AsBegun:
    """Takes down what the model is, and the server's, as one batch begins of this member and of all."""

    def __init__(self, trained, address, number):
        self.address, self.number, self.calls = address, number, 0
        self.here, self.there, self.term = {}, {}, 0
        trained.register_forward_pre_hook(self)

    def __call__(self, module, inputs):
        del inputs
        if self.calls == self.number:
            self.here = {name: value.numpy().copy() for name, value in module.state_dict().items()}
            with offbeat.Client(self.address) as client:
                self.there, self.term = client.pull(), client.status()["term"]
            distributed.barrier()  # nobody pushes before
        self.calls += 1


class OneElse:
    """Lets a worker that is no member push at the end of an epoch of theirs."""

    def __init__(self, rank, address, epoch):
        self.is_here, self.address, self.epoch = rank == 0, address, epoch

    def on_epoch_end(self, trainer, epoch):
        del trainer
        if not self.is_here or epoch != self.epoch:
            return
        with offbeat.AsyncWorker(self.address, with_statistics(0)) as worker:
            live = torch.optim.SGD(worker.model.parameters(), lr=0.05)
            worker.train(dataloader=data_of(7, 1), optimizer=live, loss_fn=LOSS, progress=False)


def back_at_the_server(rank, address, strategies, epoch_of_others):
    """Train by strategies of which the last pushes; say how that began."""
    ours, num = with_statistics(rank), len(strategies)
    begun = AsBegun(ours, address, BATCHES * (num - 1))
    one_else = OneElse(rank, address, epoch_of_others)
    with (
        warned() as told,
        member_of(ours, address, dict(enumerate(strategies)), callbacks=one_else) as trainer,
    ):
        history = trainer.train(
            dataloader=data_of(rank),
            epochs=num,
            optimizer=torch.optim.SGD(ours.parameters(), lr=0.05),
            loss_fn=LOSS,
            progress=False,
        )
    lost = [text for text in told if "is lost" in text]
    return begun.here, begun.there, begun.term, lost, history.receipts


@pytest.mark.parametrize(
    "strategies",
    [
        ("average", "parameter_server"),
        ("accumulate", "parameter_server"),
        ("gossip", "parameter_server"),
        ("parameter_server", "average", "parameter_server"),
        ("parameter_server", "average", "accumulate", "parameter_server"),
    ],
)
def test_who_goes_on_at_a_server_with_a_model_brings_what_all_have_made_together(serve, strategies):
    initial = with_statistics(9).state_dict()
    server = serve(with_statistics(9))
    found = together(back_at_the_server, 2, server.address, strategies, None)
    for here, there, term, lost, receipts in found:
        assert (term, lost) == (2, [])
        assert equal(here.values(), there.values())
        assert equal(here.values(), found[0][0].values())
        same = [name for name in initial if np.array_equal(here[name], initial[name].numpy())]
        assert set(same) <= {"0.bias"}  # which BatchNorm takes out again
        assert receipts == {"applied": BATCHES // EVERY * strategies.count("parameter_server")}


@pytest.mark.parametrize(
    ("strategies", "epoch"),
    [
        (("average", "parameter_server"), 0),
        (("parameter_server", "average", "parameter_server"), 1),
    ],
)
def test_no_push_of_one_who_is_no_member_is_lost_to_what_members_bring(serve, strategies, epoch):
    server = serve(with_statistics(9))
    found = together(back_at_the_server, 2, server.address, strategies, epoch)
    for here, there, term, lost, receipts in found:
        assert term == 1
        assert equal(here.values(), there.values())
        (told,) = lost
        assert f"{LOST} (it was pushed to, was given other values or was started again since" in told
        assert receipts == {"applied": BATCHES // EVERY * strategies.count("parameter_server")}


def brought_again(rank, port):
    """Average, and go on at a server that has another model, or optimizer, where another is next time."""
    ours, said, term = model(seed=rank), [], None
    servers = [None, (wider(), None), (model(seed=9), optim.SGD(lr=0.1)), (model(seed=9), None)]
    address = f"127.0.0.1:{port}"
    live = torch.optim.SGD(ours.parameters(), lr=0.05)
    with member_of(ours, address, {0: "average", 1: "parameter_server"}) as trainer, warned() as told:
        for served in servers:
            if is_host := rank == 0 and served is not None:
                server = offbeat.ParameterServer(served[0], optimizer=served[1], port=port)
                server.start()
            distributed.barrier()
            own = values_of(ours)
            try:
                history = trainer.train(
                    dataloader=data_of(rank, 2), optimizer=live, loss_fn=LOSS, progress=False
                )
                said.append((history.stopped, None))
            except (ModelMismatchError, ConfigError, StateError) as error:
                said.append((type(error).__name__, str(error)))
                assert equal(own, values_of(ours))
            distributed.barrier()
            if is_host:
                term = server.status()["term"]
                server.stop()
    return said, term, [text for text in told if "is lost" in text]


def wider():
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 5))


def test_where_the_first_cannot_bring_it_all_hear_so_and_bring_it_by_the_next_train():
    found = together(brought_again, 2, free_port())
    for rank, (said, _, lost) in enumerate(found):
        kinds = [kind for kind, _ in said]
        first = ["ModelMismatchError", "ConfigError"]
        assert kinds == ["epochs", *(["StateError"] * 2 if rank else first), "epochs"]
        assert lost == []
    assert "the first member could not bring to the server" in found[1][0][1][1]
    assert found[0][1] == 2


class Uneven:
    """Batches of which the second member has half still to come when the first has ended its first pass."""

    def __init__(self, rank):
        self.rank, self.is_first = rank, True

    def __iter__(self):
        for number, batch in enumerate(data_of(self.rank)):
            if self.is_first and self.rank == 1 and number == BATCHES // 2:
                distributed.barrier()
            yield batch
        if self.is_first and self.rank == 0:
            distributed.barrier()
        self.is_first = False


def unevenly(rank, address, then):
    ours = model(seed=rank)
    begins = Begins(ours)
    strategy = {0: "parameter_server", 1: then}
    with warned() as told, member_of(ours, address, strategy) as trainer:
        trainer.train(
            dataloader=Uneven(rank), epochs=2, optimizer=optim.SGD(lr=0.1), loss_fn=begins, progress=False
        )
    return begins.values[BATCHES], told


@pytest.mark.parametrize("then", ["average", "gossip", "accumulate"])
def test_what_one_member_pushes_after_another_has_ended_is_in_what_all_go_on_from(serve, then):
    server = serve(model(seed=9))
    found = together(unevenly, 2, server.address, then)
    pushed = [np.asarray(value) for value in server.state_dict().values()]
    for began, told in found:
        assert equal(began, pushed)
        assert not [text for text in told if "is lost" in text]


def closed_apart(rank, address, closing):
    """Push, train alone and average, where some members close the trainer between the first two."""
    ours = model()
    live = torch.optim.SGD(ours.parameters(), lr=0.05)
    with warned() as told, member_of(ours, address, "parameter_server") as trainer:
        for strategy in ("parameter_server", "local", "average"):
            trainer.strategy = strategy
            trainer.train(dataloader=data_of(rank, 4), optimizer=live, loss_fn=LOSS, progress=False)
            if strategy == "parameter_server" and rank in closing:
                trainer.close()
    return [text for text in told if "is lost" in text or "is not in it" in text]


@pytest.mark.parametrize("closing", [[0], [1], [0, 1]])
def test_members_of_whom_some_have_closed_the_trainer_before_they_trained_alone_meet_all_the_same(
    serve, closing
):
    found = together(closed_apart, 2, serve(model(seed=9)).address, closing)
    # What was trained alone is lost, but for the first one's.
    assert [len(told) for told in found] == [0, 1]
    assert "Average() goes on from the model that the first member has" in found[1][0]


def with_budget(rank, address, strategy, then=None):
    """Train by a strategy, and set another then, if one is given; give what is told of a server's budget."""
    ours = model(seed=rank)
    with warned() as told, member_of(ours, address, strategy) as trainer:
        trainer.train(
            dataloader=data_of(rank), epochs=2, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, progress=False
        )
        if then is not None:
            trainer.strategy = then
    return [text for text in told if "the server's max_samples is 100000" in text]


@pytest.mark.parametrize("then", ["average", "accumulate", "local"])
def test_a_budget_that_ends_members_before_they_are_to_meet_is_warned_of(serve, then):
    server = serve(model(seed=9), max_samples=100_000)
    found = together(with_budget, 2, server.address, {0: "parameter_server", 1: then})
    assert [len(told) for told in found] == [then != "local"] * 2


def test_a_budget_is_nothing_to_members_that_have_met_before(serve):
    server = serve(model(seed=9), max_samples=100_000)
    assert together(with_budget, 2, server.address, {0: "average", 1: "parameter_server"}) == [[], []]


@pytest.mark.parametrize("then", ["average", "accumulate", "local"])
def test_a_budget_is_warned_of_where_members_are_told_in_mid_run_that_they_are_to_meet(serve, then):
    server = serve(model(seed=9), max_samples=100_000)
    found = together(with_budget, 2, server.address, "parameter_server", then)
    assert [len(told) for told in found] == [then != "local"] * 2


class Stops:
    """Stops the server as the first epoch ends, when all have pushed; another one begins with what it had."""

    def __init__(self, rank, port):
        self.is_host, self.port, self.server, self.values = rank == 0, port, None, model(seed=9).state_dict()

    def start(self):
        if self.is_host:
            begun = model()
            begun.load_state_dict(self.values)
            self.server = offbeat.ParameterServer(begun, port=self.port)
            self.server.start()
        distributed.barrier()

    def on_epoch_end(self, trainer, epoch):
        del trainer
        if epoch == 0:
            distributed.barrier()
            if self.is_host:
                self.values = self.server.state_dict()
                self.server.stop()
            distributed.barrier()


def without_its_server(rank, port):
    """Push, and average when the server has gone; say what came of it, and of the next train."""
    ours, said, stops = model(seed=rank), [], Stops(rank, port)
    stops.start()
    begins = Begins(ours)
    live = torch.optim.SGD(ours.parameters(), lr=0.05)
    strategy = {0: "parameter_server", 1: "average"}
    with warned() as told, member_of(ours, f"127.0.0.1:{port}", strategy, callbacks=stops) as trainer:
        for epochs in (2, 1):
            try:
                history = trainer.train(
                    dataloader=data_of(rank), epochs=epochs, optimizer=live, loss_fn=begins, progress=False
                )
                said.append(history.stopped)
            except (ConnectionLostError, StateError) as error:
                said.append(f"{type(error).__name__}: {error}")
                stops.start()
    if stops.server is not None:
        stops.server.stop()
    kept = [value.numpy() for value in stops.values.values()]
    return said, begins.values[BATCHES], kept, [text for text in told if "is lost" in text]


def test_where_the_first_cannot_take_what_all_have_pushed_all_hear_so_and_it_does_by_the_next_train():
    found = together(without_its_server, 2, free_port())
    pushed = found[0][2]
    for rank, (said, begun, _, lost) in enumerate(found):
        first = "StateError: the first member could not take what all have pushed" if rank else "ServerClosed"
        assert said[0].startswith(first)
        assert said[1:] == ["epochs"]
        assert equal(begun, pushed)
        # Nobody knows here that this server was given all of it; the first may have had that already.
        assert len(lost) <= 1 - rank
        assert all("is lost, unless that server was given it" in text for text in lost)


def in_two_trains(rank, address, closing):
    """Push in one call of `train`, and average in the next; some members close the trainer in between."""
    with warned() as told, member_of(model(), address, {0: "parameter_server", 1: "average"}) as trainer:
        for _ in range(2):
            trainer.train(dataloader=data_of(rank), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, progress=False)
            if rank in closing:
                trainer.close()
    return [text for text in told if "what others have pushed to the server since is not in it" in text]


@pytest.mark.parametrize("closing", [[], [0], [1], [0, 1]])
def test_where_the_first_closes_a_trainer_between_pushes_and_averages_all_are_told_what_is_not_in_the_model(
    serve, closing
):
    found = together(in_two_trains, 2, serve(model(seed=9)).address, closing)
    assert [len(told) for told in found] == [0 in closing] * 2
    assert all(text.startswith("epoch 1: Average() goes on from") for told in found for text in told)


class Sets:
    """Chooses what comes after the first epoch."""

    def __init__(self, strategy):
        self.strategy = strategy

    def on_epoch_end(self, trainer, epoch):
        if epoch == 0:
            trainer.strategy = self.strategy


def going_on(rank, address, strategies, optimizer):
    """Push for an epoch, and go on by a strategy of this member's; give what is said of that."""
    ours, groups = model(), num_groups()
    group = distributed.new_group(timeout=timedelta(seconds=5))
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    settings = {"callbacks": Sets(strategies[rank])}
    trainer = member_of(ours, address, {0: "parameter_server", 9: "average"}, process_group=group, **settings)
    with trainer:
        try:
            history = trainer.train(
                dataloader=data_of(rank),
                epochs=2,
                optimizer=live if optimizer == "live" else optim.SGD(lr=0.1),
                loss_fn=LOSS,
                progress=False,
            )
        except (ConnectionLostError, StateError) as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = history.stopped
    return told, num_groups() - groups - 1


@pytest.mark.parametrize(
    ("strategies", "optimizer", "told"),
    [
        (["average", "diloco"], "live", ["StateError: this member goes on with strategy"] * 2),
        (["average", "average"], "spec", ["StateError: the optimizer of this train runs on the server"] * 2),
        (["average", "parameter_server"], "live", ["ConnectionLostError: what is next (member 0", "epochs"]),
    ],
)
def test_what_members_cannot_go_on_with_together_is_told_and_hangs_nowhere(
    serve, strategies, optimizer, told
):
    server = serve(model(seed=9))
    found = together(going_on, 2, server.address, strategies, optimizer)
    for (said, left), expected in zip(found, told, strict=True):
        assert said.startswith(expected)
        assert "flush()" not in said, "a trainer has none"
        assert left == 0
    assert all(worker["state"] in {"finished", "left"} for worker in server.status()["workers"])


def gone_on_apart(rank, folder, strategy, ahead):
    """Go on from checkpoints of two epochs, and then of the first; say how it went.

    Between those a strategy by which members meet has begun, or ended, or both.
    """
    Saver.save = waited(Saver.save)
    ours, own, said, last = model(), folder / str(rank), [], len(strategy)
    first = folder / f"{rank} of the first epoch"
    for epochs, is_moved in ((1, False), (last, False), (last + 1, rank != ahead), (last + 1, rank == ahead)):
        if is_moved:
            shutil.rmtree(own)
            shutil.copytree(first, own)
        with offbeat.AsyncTrainer(ours, 0, 1, EVERY, strategy=strategy, overlap=False) as member:
            trainer = offbeat.FaultTolerantTrainer(member, own, checkpoint_frequency=8)
            try:
                history = trainer.train(
                    dataset=TensorDataset(*map(torch.cat, zip(*data_of(rank), strict=True))),
                    batch_size=8,
                    epochs=epochs,
                    optimizer=optim.SGD(lr=0.1),
                    loss_fn=LOSS,
                )
            except StateError as error:
                said.append(str(error))
            else:
                said.append((history.stopped, history.steps))
        if epochs == 1:
            shutil.copytree(own, first)
    return said


@pytest.mark.parametrize(
    ("strategy", "first", "last", "ahead"),
    [
        (("local", "average"), "local", "Average()", 1),
        (("local", "average", "local"), "local", "local", 0),
        (("average", "local"), "Average()", "local", 1),
        (("average", "local", "average"), "Average()", "Average()", 0),
        (("average", "diloco"), "Average()", "DiLoCo(", 1),
    ],
)
def test_checkpoints_of_before_and_after_a_meeting_begins_or_ends_are_refused_in_all_members(
    strategy, first, last, ahead, tmp_path
):
    found = together(gone_on_apart, 2, tmp_path, dict(enumerate(strategy)), ahead)
    num = len(strategy)
    for rank, (begun, gone_on, told, ended) in enumerate(found):
        assert [begun, gone_on] == [("epochs", BATCHES), ("epochs", num * BATCHES)]
        epoch, kind = (num - 1, last) if rank == ahead else (0, first)
        in_table = f"({epoch + 1} in the table that `offbeat checkpoint inspect` makes of a directory)"
        shown = f"epoch {epoch} as strategy= counts them {in_table}, strategy {kind}"
        assert f"this member's checkpoint is of {shown.replace('local', repr('local'))}" in told
        assert "cannot go on with another's: a strategy by which members meet in the process group" in told
        assert ended == ("epochs", (num + 1) * BATCHES)


class Dies(logging.Handler):
    """Kills this process as it has ended one strategy together with the others, and is to begin another."""

    def emit(self, record):
        if record.getMessage().startswith("epoch 1 goes on with strategy"):
            os.kill(os.getpid(), signal.SIGKILL)


def lived(rank, port, folder, *, address, strategy, timeout_s, dies):
    """Train to the end, or until this process or another is gone; write what came of it."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    offbeat.init_distributed("gloo", rank=rank, world_size=2, timeout_s=timeout_s)
    Saver.save = waited(Saver.save)
    if dies:
        logging.getLogger("offbeat").setLevel(logging.INFO)
        logging.getLogger("offbeat").addHandler(Dies())
    ours = model(seed=rank)
    with member_of(ours, address, strategy, overlap=False) as member:
        history = offbeat.FaultTolerantTrainer(member, folder / str(rank), checkpoint_frequency=8).train(
            dataset=TensorDataset(*map(torch.cat, zip(*data_of(rank), strict=True))),
            batch_size=8,
            epochs=2,
            optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
            loss_fn=LOSS,
        )
    came = [history.stopped, history.steps, [value.tolist() for value in values_of(ours)]]
    (folder / f"{rank}.json").write_text(json.dumps(came), "utf-8")


@pytest.mark.parametrize(
    ("strategy", "saved"),
    [
        ({0: "parameter_server", 1: "average"}, 8),
        ({0: "average", 1: "diloco"}, 8),
        ({0: "local", 1: "average"}, BATCHES),
    ],
    ids=["from a server", "from a group", "from alone"],
)
def test_where_a_member_dies_as_strategies_change_all_go_on_from_checkpoints_that_fit(
    serve, strategy, saved, tmp_path
):
    server = serve(model(seed=9))
    address = server.address if strategy[0] == "parameter_server" else None

    def life(timeout_s, *, dies):
        port = free_port()
        run = {"address": address, "strategy": strategy, "timeout_s": timeout_s}
        processes = [
            started(lived, rank, port, tmp_path, dies=dies and rank == 1, **run) for rank in range(2)
        ]
        for process in processes:
            process.join(60)
        return [process.exitcode for process in processes]

    assert life(10, dies=True) == [1, -signal.SIGKILL]
    newest = [directory.names(tmp_path / str(rank))[0] for rank in range(2)]
    assert [int(name.rpartition("-")[2]) for name in newest] == [saved, 8]
    assert life(30, dies=False) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2))
    assert first[:2] == second[:2] == ["epochs", 2 * BATCHES]
    assert first[2] == second[2]
