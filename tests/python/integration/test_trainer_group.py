"""Members of a process group that train with AsyncTrainer do what its parts do by hand."""

import json
import os
import signal
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed, nn

import offbeat
from offbeat import averaging, optim
from offbeat.errors import ConfigError, ConnectionLostError, NonFiniteError, StateError
from support.averaging import warned
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1, momentum=0.9)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def data_of(rank, length):
    random = torch.Generator().manual_seed(100 + rank)
    sizes = [2 + (rank + number) % 4 for number in range(length)]
    return [(torch.randn(n, 6, generator=random), torch.randint(5, (n,), generator=random)) for n in sizes]


def arrays(trained):
    return [value.detach().numpy().copy() for value in trained.state_dict().values()]


class Begins:
    """Takes down after which batch a round, or an update, had been made."""

    def __init__(self):
        self.batches, self.at = 0, []

    def on_step(self, trainer, step):
        self.batches += 1
        averager = trainer._stage.strategy.averager
        if averager.averaging_round > (self.at[-1][1] if self.at else 0):
            self.at.append((self.batches, averager.averaging_round))


def trained(rank, lengths, keywords, epochs):
    begins = Begins()
    ours = model(seed=rank)  # all start from the first one's
    trainer = offbeat.AsyncTrainer(
        ours, callbacks=[begins] if keywords.pop("counts", True) else (), **keywords
    )
    history = trainer.train(
        dataloader=data_of(rank, lengths[rank]), epochs=epochs, optimizer=SPEC, loss_fn=LOSS, progress=False
    )
    return arrays(ours), begins.at, history.steps


def by_hand(rank, lengths, method):
    """Two epochs of warm-up, every 3 batches and waiting; then two of every 5."""
    ours = model(seed=rank)
    averager = offbeat.AsyncModelAverager(ours, averaging_frequency=3, overlap=False, method=method)
    for epoch in range(4):
        for inputs, targets in data_of(rank, lengths[rank]):
            averager.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        if epoch == 1:
            averager.flush()
            averager.averaging_frequency, averager.overlap = 5, 2
            averager.flush()
    averager.flush()
    return arrays(ours)


@pytest.mark.parametrize("method", ["average", "diloco", "gossip"])
def test_averaging_members_are_the_averager_by_hand_and_the_warm_up_ends_at_the_same_batch(method):
    lengths = [8, 8]
    keywords = {
        "warm_up_epochs": 2,
        "warm_up_sync_frequency": 3,
        "regular_sync_frequency": 5,
        "overlap": 2,
        "strategy": method,
    }
    ours = together(trained, 2, lengths, keywords, 4)
    theirs = together(by_hand, 2, lengths, method)
    for (mine, begins, steps), hand in zip(ours, theirs, strict=True):
        assert all(map(np.array_equal, mine, hand))
        assert steps == 32
        # After 16 batches, and a meeting of two rounds, every 5 batches, each there 2 batches later.
        assert [at for at, _ in begins] == [3, 6, 9, 12, 15, 17, 23, 28]
    assert all(map(np.array_equal, ours[0][0], ours[1][0]))


def test_members_with_less_to_do_change_together_and_end_alike():
    keywords = {
        "warm_up_epochs": 1,
        "warm_up_sync_frequency": 2,
        "regular_sync_frequency": 4,
        "strategy": {0: "average", 2: "local", 3: averaging.DiLoCo(), 4: "accumulate"},
        "counts": False,
    }
    lengths = [7, 4]
    (one, _, steps), (other, _, _) = together(trained, 2, lengths, keywords, 5)
    assert steps > 28
    # BatchNorm's own count of batches is each member's; all else is the same.
    places = [i for i, name in enumerate(model().state_dict()) if "num_batches" not in name]
    assert all(np.array_equal(one[i], other[i]) for i in places)


class Holds:
    """Counts process groups, and holds every strategy, as a script does that looks at one."""

    def __init__(self):
        self.held, self.num = [], []

    def on_step(self, trainer, step):
        strategy = trainer._stage.strategy
        if not self.held or strategy is not self.held[-1]:
            self.held.append(strategy)
        self.num.append(num_groups())


def changed(rank, before, after):
    trainer = offbeat.AsyncTrainer(model(seed=rank), 0, 1, 2, strategy={0: before, 1: after})
    with trainer, warned() as told:
        trainer.train(dataloader=data_of(rank, 4), epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False)
    return [line for line in told if "the first member has" in line]


@pytest.mark.parametrize("after", ["average", "accumulate"])
def test_who_trained_apart_is_told_that_all_go_on_from_the_first_members_model(after):
    first, (told,) = together(changed, 2, "local", after)
    assert not first, "nothing of its own is lost"
    assert "goes on from the model that the first member has, in which what was trained here without" in told
    assert told.startswith("epoch 1: ")


@pytest.mark.parametrize("before", ["average", "gossip", "easgd", "accumulate"])
def test_who_trained_with_the_others_loses_nothing_by_a_change_and_is_told_nothing(before):
    assert together(changed, 2, before, "diloco") == [[], []]


class StopsOne:
    """Ends the first member's training early."""

    def __init__(self, rank):
        self._rank = rank

    def on_step(self, trainer, step):
        if self._rank == 0 and step.step == 3:
            trainer.stop()


def stopped_in_one(rank, strategy):
    ours = model(seed=rank)
    with offbeat.AsyncTrainer(
        ours, 0, 1, 2, strategy=strategy, callbacks=[StopsOne(rank)], local_batch_size=2
    ) as trainer:
        history = trainer.train(
            dataloader=data_of(rank, 9), epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False
        )
    return [p.detach().numpy().copy() for p in ours.parameters()], history.stopped, history.samples


@pytest.mark.parametrize("strategy", ["average", "diloco", "gossip", "slowmo", "accumulate"])
def test_where_one_member_stops_the_others_train_on_and_all_end_alike(strategy):
    (first, how, samples), (second, theirs, their_samples) = together(stopped_in_one, 2, strategy)
    assert (how, theirs) == ("stop", "epochs")
    assert their_samples > 2 * samples > 0
    assert all(map(np.array_equal, first, second))


def num_groups():
    return len(distributed.distributed_c10d._world.pg_map)


def holding(rank):
    holds = Holds()
    strategies = {0: "accumulate", 2: "average", 3: "gossip", 4: "local"}
    trainer = offbeat.AsyncTrainer(model(), 1, 2, 3, strategy=strategies, callbacks=holds)
    before = num_groups()
    data = data_of(rank, 8)
    trainer.train(dataloader=data, epochs=5, optimizer=SPEC, loss_fn=LOSS, progress=False)
    trainer.strategy = "average"
    trainer.train(dataloader=data, optimizer=SPEC, loss_fn=LOSS, progress=False)
    trainer.close()
    return [number - before for number in holds.num[::8]], num_groups() - before, len(holds.held)


def test_what_a_change_of_strategy_leaves_behind_is_closed():
    """The second epoch's windows are of another length than those of the warm-up before it."""
    for num, left, num_held in together(holding, 2):
        assert (num, left, num_held) == ([1, 1, 1, 1, 0, 1], 0, 5)


def gone_at_a_change(rank, said):
    group = distributed.new_group(timeout=timedelta(seconds=5))
    strategies = {0: "average", 1: "accumulate"}
    trainer = offbeat.AsyncTrainer(model(), 0, 2, 3, strategy=strategies, process_group=group)

    def data():
        yield from data_of(rank, 3)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    told = []
    for _ in range(2):
        try:
            for _ in range(2):
                trainer.train(dataloader=data(), optimizer=SPEC, loss_fn=LOSS, progress=False)
        except ConnectionLostError as error:
            told.append(str(error))
    trainer.close()
    trainer.close()
    said.write_text(json.dumps(told))


def test_where_a_member_has_gone_a_change_of_strategy_says_so_and_hangs_nowhere(tmp_path):
    with pytest.raises(EOFError):
        together(gone_at_a_change, 2, tmp_path / "said")
    told = json.loads((tmp_path / "said").read_text())
    assert len(told) == 2
    assert all("for one is gone or was waited for too long" in text for text in told)


def clip(theirs):
    nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)


def accumulated(rank):
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours, 1, 2, 3, strategy="accumulate", max_grad_norm=0.5)
    data = data_of(rank, 6)
    history = trainer.train(dataloader=data, epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False)
    live = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    live.register_step_pre_hook(lambda *_: clip(theirs))
    for length, overlap in ((2, False), (3, True)):
        accumulator = offbeat.AsyncGradientAccumulator(theirs, length, overlap=overlap)
        for inputs, targets in data:
            accumulator.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
        accumulator.flush()
    return arrays(ours), arrays(theirs), history.steps


def test_accumulating_members_are_the_accumulator_by_hand():
    for ours, theirs, steps in together(accumulated, 2):
        assert all(map(np.array_equal, ours, theirs))
        assert steps == 3 + 2


def set_by_one(rank):
    trainer = offbeat.AsyncTrainer(
        model(),
        strategy="average",
        warm_up_epochs=1,
        warm_up_sync_frequency=2,
        regular_sync_frequency=3 + rank,
    )
    try:
        trainer.train(dataloader=data_of(rank, 8), epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False)
    except StateError as error:
        return str(error), trainer.history.stopped
    return None


def test_members_that_are_set_differently_are_all_told_when_the_warm_up_ends():
    for rank, (text, stopped) in enumerate(together(set_by_one, 2)):
        assert f"this member goes on with meetings every {3 + rank} batches, and not all others do" in text
        assert stopped == "failed"


def going_on_alone(rank):
    strategies = {0: "average", 1: "local"}
    trainer = offbeat.AsyncTrainer(model(), warm_up_epochs=0, regular_sync_frequency=3, strategy=strategies)
    data = data_of(rank, 8)
    history = trainer.train(dataloader=data, epochs=2 - rank, optimizer=SPEC, loss_fn=LOSS, progress=False)
    return history.stopped, history.steps


def test_one_may_go_on_alone_when_all_have_ended_together():
    assert together(going_on_alone, 2) == [("epochs", 16), ("epochs", 8)]


def windows_of_its_own(rank):
    trainer = offbeat.AsyncTrainer(
        model(), strategy="accumulate", warm_up_epochs=1, regular_sync_frequency=(2, 4)[rank]
    )
    data = data_of(rank, 8)
    return trainer.train(dataloader=data, epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False).stopped


def test_members_that_accumulate_may_have_windows_of_their_own_after_the_warm_up():
    assert together(windows_of_its_own, 2) == ["epochs", "epochs"]


def last_window_is_ill(rank):
    trainer = offbeat.AsyncTrainer(model(), strategy="accumulate", warm_up_epochs=0, regular_sync_frequency=3)
    data = data_of(rank, (7, 4)[rank])
    if rank == 0:
        data[-1][0][0, 0] = float("nan")
    try:
        trainer.train(dataloader=data, optimizer=SPEC, loss_fn=LOSS, progress=False)
    except NonFiniteError:
        return "not finite"
    return trainer.history.stopped


def test_a_last_window_that_is_dropped_in_one_member_holds_up_nobody():
    assert together(last_window_is_ill, 2) == ["not finite", "epochs"]


class Switches:
    """Changes the strategy after the first pass."""

    def __init__(self, to):
        self.to = to

    def on_epoch_end(self, trainer, epoch):
        if epoch == 0:
            trainer.strategy = self.to


def switched_by_one(rank, before, after):
    trainer = offbeat.AsyncTrainer(
        model(),
        warm_up_epochs=0,
        regular_sync_frequency=3,
        strategy=before,
        callbacks=Switches(after) if rank == 0 else (),
    )
    try:
        trainer.train(dataloader=data_of(rank, 8), epochs=2, optimizer=SPEC, loss_fn=LOSS, progress=False)
    except StateError as error:
        return str(error), trainer.history.stopped
    return None


@pytest.mark.parametrize(
    ("before", "after"), [("average", "diloco"), ("accumulate", "average"), ("gossip", "accumulate")]
)
def test_a_strategy_that_one_member_alone_changes_is_told_to_all_and_hangs_nowhere(before, after):
    (first, _), (second, _) = told = together(switched_by_one, 2, before, after)
    assert "this member goes on with strategy " in first
    assert "this member ends its train here" in second
    for text, stopped in told:
        assert "and not all others do" in text
        assert "set strategy in all of them, after the same batch of theirs" in text
        assert stopped == "failed"


def by_a_metric_of_its_own(rank, keywords):
    """Train by a scheduler that goes by a metric; give what is refused, or the rates."""
    ours = model()
    trainer = offbeat.AsyncTrainer(ours, strategy="accumulate", regular_sync_frequency=2, overlap=False)
    live = torch.optim.SGD(ours.parameters(), lr=0.1)
    given = {"validation": data_of(9, 4)} if keywords == "validation" else keywords
    try:
        trainer.train(
            dataloader=data_of(rank, 6),
            epochs=3,
            optimizer=live,
            loss_fn=LOSS,
            progress=False,
            scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(live, patience=0, threshold=1e9),
            **given,
        )
    except ConfigError as error:
        return str(error)
    return live.param_groups[0]["lr"]


def test_where_updates_are_shared_no_rate_goes_by_what_one_member_measures():
    for told in together(by_a_metric_of_its_own, 2, {"scheduler_metric": "loss"}):
        assert "scheduler goes by scheduler_metric, which each member measures on batches of its own" in told
        assert "give all members the same validation=" in told
    one, other = together(by_a_metric_of_its_own, 2, "validation")
    assert one == other < 0.1
