"""A trainer's strategies: which trains when, what each has a use for, and what changes between them."""

import logging
import types

import pytest
import torch

import offbeat
from offbeat import averaging, optim
from offbeat.errors import ConfigError
from offbeat.trainer.settings import Sync, Syncs
from support.trainer_loop import DATA, LOSS, loop, model, plain, same, train


def test_callbacks_find_the_strategy_of_the_batch_and_of_the_epoch_that_they_hear_of():
    class Notes:
        def __init__(self):
            self.seen, self.shown = [], []

        def on_step(self, trainer, step):
            self.seen.append((step.epoch, repr(trainer.strategy)))

        def on_epoch_end(self, trainer, epoch):
            self.seen.append((epoch, "end", repr(trainer.strategy)))
            self.shown.append(repr(trainer))

    notes = Notes()
    trainer = offbeat.AsyncTrainer(
        plain(), strategy={0: "local", 1: averaging.Average(), 3: "local"}, callbacks=notes
    )
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    by_epoch = ["'local'", "Average()", "Average()"]
    assert notes.seen == [
        noted for epoch, by in enumerate(by_epoch) for noted in ((epoch, by), (epoch, "end", by))
    ]
    assert ["strategy 'local', 1 epochs" in notes.shown[0], "3 epochs" in notes.shown[2]] == [True, True]
    assert trainer.strategy == "local", "of the next train"
    trainer.strategy = {0: "local", 4: averaging.Average()}
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=1)
    assert notes.seen[-2:] == [(3, "'local'"), (3, "end", "'local'")]
    assert trainer.strategy == averaging.Average()


def test_a_strategy_that_a_callback_sets_as_an_epoch_ends_is_found_at_once_and_trains_the_next():
    found = []

    class Sets:
        def on_step(self, trainer, step):
            found.append((step.epoch, type(trainer._stage.strategy).__name__))

        def on_epoch_end(self, trainer, epoch):
            found.append(trainer.strategy)
            if epoch == 0:
                trainer.strategy = {0: "accumulate", 1: "local"}
                found.append(trainer.strategy)
            if epoch == 1:
                trainer.strategy = "accumulate"
                found.append(trainer.strategy)

    trainer = offbeat.AsyncTrainer(plain(), 0, 1, 1, strategy={0: "local", 1: "accumulate"}, callbacks=Sets())
    train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    # The first one set says "accumulate" of the epoch that has ended, and is found so; the next has its own.
    first, second, third = (0, "Local"), (1, "Local"), (2, "Accumulated")
    assert found == [first, "local", "accumulate", second, "local", "accumulate", third, "accumulate"]


def test_an_interrupted_train_leaves_the_strategy_that_the_next_begins_with():
    class Ends:
        def on_epoch_end(self, trainer, epoch):
            raise RuntimeError(repr(trainer.strategy))

    trainer = offbeat.AsyncTrainer(plain(), strategy={0: "local", 1: averaging.Average()}, callbacks=Ends())
    with pytest.raises(RuntimeError, match="'local'"):
        train(trainer, optim.SGD(lr=0.1), data=DATA[:1], epochs=3)
    assert trainer.strategy == averaging.Average()


@pytest.mark.parametrize(("every", "warned"), [(9, 0), (10, 1)])
def test_an_epoch_of_less_than_one_update_is_warned_of_once(every, warned, caplog):
    def breaks():
        yield DATA[0]
        raise ZeroDivisionError

    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=every, strategy="accumulate")
    with pytest.raises(ZeroDivisionError):  # a batch that is no part of the next epoch
        train(trainer, optim.SGD(lr=0.1), data=breaks(), epochs=1)
    train(trainer, optim.SGD(lr=0.1))
    other = offbeat.AsyncTrainer(model(), regular_sync_frequency=every, strategy="accumulate")
    other.model.load_state_dict(trainer.model.state_dict())
    other.load_state_dict(trainer.state_dict(), optimizer=optim.SGD(lr=0.1))
    train(other, optim.SGD(lr=0.1), epochs=1)  # which may be the rest of one
    told = 'an epoch is of 9 batches, and strategy "accumulate" makes an update of every 10 of a member\'s'
    assert caplog.text.count("an epoch is of") == caplog.text.count(told) == warned


@pytest.mark.parametrize(
    ("keywords", "is_told"),
    [
        ({"strategy": "average"}, True),
        ({"strategy": "gossip"}, True),
        ({"strategy": "average", "process_group": False}, False),
        ({}, False),
    ],
)
def test_who_averages_with_nobody_is_told_so(keywords, is_told, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    train(offbeat.AsyncTrainer(model(), **keywords), optim.SGD(lr=0.1))
    assert caplog.text.count("averages with nobody: this process trains alone") == is_told
    names_a_server = is_told and keywords["strategy"] != "gossip"  # whose members meet at none
    assert ("'tcp'" in caplog.text, "server_address=" in caplog.text) == (names_a_server, names_a_server)


def test_an_update_that_is_made_as_another_frequency_begins_is_of_no_batch_for_callbacks():
    told = []
    callback = types.SimpleNamespace(on_step=lambda _, step: told.append((step.step, step.is_update)))
    trainer = offbeat.AsyncTrainer(plain(), 1, 2, 3, strategy="accumulate", overlap=False, callbacks=callback)
    train(trainer, optim.SGD(lr=0.1), data=DATA[:3], epochs=2)
    gathered, made, flushed = (0, False), (1, True), (2, False)
    assert told == [gathered, made, (1, False), flushed, flushed, (3, True)]


@pytest.mark.parametrize("is_set", [False, True])
def test_a_strategy_begins_with_its_epoch_or_when_it_is_set_and_keeps_model_and_optimizer(is_set):
    class Setter:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 0:
                trainer.strategy = averaging.DiLoCo(lr=0.5)

    ours, theirs = model(), model()
    how = {"callbacks": [Setter()]} if is_set else {"strategy": {0: "local", 1: averaging.DiLoCo(lr=0.5)}}
    trainer = offbeat.AsyncTrainer(ours, regular_sync_frequency=4, overlap=1, **how)
    train(trainer, optim.Adam(lr=0.01))
    assert trainer.strategy == averaging.DiLoCo(lr=0.5)
    live = torch.optim.Adam(theirs.parameters(), lr=0.01)
    loop(theirs, live, epochs=1)
    averager = offbeat.AsyncModelAverager(
        theirs, averaging_frequency=4, overlap=1, method=averaging.DiLoCo(lr=0.5)
    )
    for inputs, targets in DATA:
        averager.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
    averager.flush()
    assert same(ours, theirs)


def test_a_strategy_that_is_set_within_an_epoch_is_that_of_the_next_batch():
    rounds = []

    class Setter:
        def on_step(self, trainer, step):
            strategy = trainer._stage.strategy
            rounds.append((type(strategy).__name__, strategy.version))
            if step.step == 4:
                trainer.strategy = "average"

    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=2, callbacks=Setter())
    train(trainer, optim.SGD(lr=0.1), epochs=1)
    assert rounds == [("Local", 0)] * 4 + [("Averaged", n) for n in (0, 1, 1, 2, 2)]


def test_a_strategy_that_cannot_be_set_is_refused_and_changes_nothing():
    trainer = offbeat.AsyncTrainer(model())
    for given, told in [
        ("avrage", "unknown strategy 'avrage'; did you mean 'average'"),
        ({1: "local"}, 'strategy says nothing of epoch 0, which is the first: give one for it, as in {0: "l'),
        ({0: "local", 2.5: "averge"}, "unknown strategy 'averge'.*; strategy has the epoch 2.5"),
        ({0: "local", -1: "average"}, "strategy has the epoch -1"),
        ({0: "local", 3: 5}, "strategy is 5"),
        (averaging.DiLoCo, "method is the class DiLoCo"),
        ("parameter_server", "nobody says where it is"),
    ]:
        with pytest.raises(ConfigError, match=told):
            trainer.strategy = given
    assert trainer.strategy == "local"


def test_the_warm_up_is_of_the_trainers_first_epochs():
    syncs = Syncs(2, Sync(10, overlap=False), Sync(100, overlap=True))
    assert [syncs.at(epoch).every for epoch in range(4)] == [10, 10, 100, 100]

    seen = []

    class Seen:
        def on_step(self, trainer, step):
            averager = trainer._stage.strategy.averager
            seen.append((step.epoch, averager.averaging_frequency, averager.overlap))

    trainer = offbeat.AsyncTrainer(model(), 2, 3, 5, strategy="diloco", overlap=1, callbacks=[Seen()])
    for _ in range(3):  # counted over all calls
        train(trainer, optim.SGD(lr=0.1), epochs=1)
    assert seen == [(0, 3, False)] * 9 + [(1, 3, False)] * 9 + [(2, 5, 1)] * 9


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, None),
        (
            {"warm_up_epochs": 2, "warm_up_sync_frequency": 10, "regular_sync_frequency": 100},
            "warm_up_epochs=2",
        ),
        (
            {"warm_up_sync_frequency": 2, "regular_sync_frequency": 3},
            "warm_up_sync_frequency=2, regular_sync_freq",
        ),
        ({"strategy": {0: "local", 3: "average"}, "regular_sync_frequency": 3}, None),  # to come
    ],
)
def test_local_says_once_that_frequencies_have_no_effect_and_warns_where_some_were_given(given, told, caplog):
    caplog.set_level(logging.INFO, logger="offbeat")
    train(offbeat.AsyncTrainer(model=model(), **given), optim.SGD(lr=0.1), epochs=3)
    said = [one for one in caplog.records if "of meeting others have no effect" in one.message]
    assert [one.levelname for one in said] == ["INFO" if told is None else "WARNING"]
    assert told is None or f"({told}" in said[0].message
    assert not any("meet every" in line for line in caplog.messages)


@pytest.mark.parametrize(("first", "num"), [("local", 1), ("average", 0)])
def test_a_warm_up_that_is_over_before_members_meet_is_warned_of(first, num, caplog):
    strategy = {0: first, 1: "local", 2: "average"}
    ours = offbeat.AsyncTrainer(model(), 1, warm_up_sync_frequency=2, strategy=strategy, process_group=False)
    train(ours, optim.SGD(lr=0.1), epochs=3)
    said = [line for line in caplog.messages if "the warm-up is over before" in line]
    assert len(said) == num
    assert all("(warm_up_epochs=1, warm_up_sync_frequency=2): warm_up_epochs counts" in line for line in said)


@pytest.mark.parametrize("when", ["in mid-run", "between two"])
def test_frequencies_that_had_effect_before_local_was_set_are_not_said_to_have_none(when, caplog):
    class Leaves:
        def on_epoch_end(self, trainer, epoch):
            if when == "in mid-run":
                trainer.strategy = "local"

    ours = offbeat.AsyncTrainer(
        model(), regular_sync_frequency=3, strategy="average", process_group=False, callbacks=Leaves()
    )
    train(ours, optim.SGD(lr=0.1), epochs=2)
    ours.strategy = "local"
    train(ours, None, epochs=1)
    assert not any("have no effect" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"server_address": "10.0.0.1:5000"}, ["server_address is '10.0.0.1:5000', and no strategy is at a"]),
        (
            {"strategy": "accumulate", "server_address": "10.0.0.1:5000", "token": "t", "overlap": 3},
            ["server_address is '10.0.0.1:5000'", "token is given, and no strategy", "overlap is 3"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "process_group": False},
            ["server_address is '10.0.0.1:5000', and those that average meet in a process group"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "communication_backend": "gloo"},
            ["server_address is '10.0.0.1:5000', and those that average meet in a process group"],
        ),
        (
            {"strategy": "average", "server_address": "10.0.0.1:5000", "worker_id": "amy"},
            ["worker_id is 'amy', and only \"parameter_server\" has names"],
        ),
        (
            {"communication_backend": "gloo", "asynchronous": True},
            ["communication_backend is 'gloo', and no strategy averages", "asynchronous is True, and no"],
        ),
        (
            {
                "strategy": {0: "average", 1: "parameter_server"},
                "server_address": "10.0.0.1:5000",
                "communication_backend": "tcp",
                "process_group": False,
            },
            ["which adds up either differences or gradients in one run", "process_group is given, and no"],
        ),
        ({"strategy": "average", "communication_backend": "tpc"}, ["unknown communication_backend 'tpc'"]),
        ({"strategy": "average", "communication_backend": "tcp"}, ["give server_address='HOST:PORT'"]),
        (
            {"strategy": "parameter_server", "server_address": "10.0.0.1", "seed": -1},
            ["server_address: '10.0.0.1' is not an address; give HOST:PORT", "seed is -1"],
        ),
    ],
)
def test_what_no_strategy_has_a_use_for_is_refused_with_value_and_remedy(keywords, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), **keywords)
    for text in told:
        assert text in str(refused.value)


def test_a_process_group_that_no_strategy_meets_in_is_refused():
    given = {"process_group": object(), "server_address": "127.0.0.1:1"}
    for strategy in ("local", "parameter_server"):
        with pytest.raises(
            ConfigError, match="process_group is given, and no strategy's members meet in one"
        ):
            offbeat.AsyncTrainer(model(), strategy=strategy, **given)


@pytest.mark.parametrize(
    "keywords",
    [
        {
            "strategy": {0: "local", 1: "parameter_server"},
            "server_address": "h:1",
            "token": "t",
            "worker_id": "a",
        },
        {"strategy": {0: "local", 1: "average"}, "server_address": "h:1", "token": "t"},
        {"strategy": {0: "average", 1: "parameter_server"}, "server_address": "h:1", "process_group": False},
        {"strategy": {0: "accumulate", 1: "average"}, "overlap": 3, "process_group": False},
        {"strategy": "local", "process_group": False, "overlap": False},
    ],
)
def test_what_one_of_several_strategies_has_a_use_for_is_taken(keywords):
    offbeat.AsyncTrainer(model(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        (
            {"strategy": {0: "local", 5: averaging.DiLoCo(fragments=1000)}},
            ["fragments is 1000, and the model has 6 parameters"],
        ),
        (
            {"strategy": "average", "overlap": 200, "warm_up_epochs": 1, "callbacks": 5},
            ["overlap is 200, and a round begins every 100 iterations", "callbacks has 5"],
        ),
        (
            {"strategy": averaging.DiLoCo(fragments=4), "warm_up_epochs": 1, "warm_up_sync_frequency": 3},
            ["fragments is 4, and they are all averaged within 3 iterations"],
        ),
        (
            {"strategy": {0: "local", 1: averaging.DiLoCo(delay=3)}},
            ["delay and activation are for asynchronous"],
        ),
        (
            {"strategy": "diloco", "asynchronous": True},
            ["asynchronous is True and communication_backend None"],
        ),
        (
            {"strategy": {0: "diloco", 1: "average"}, "asynchronous": True, "server_address": "h:1"},
            ["asynchronous is True and method Average()"],
        ),
        ({"strategy": {0: "local", 9: "gossip"}, "server_address": "h:1"}, ["whose members meet in twos"]),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_before_its_epoch_comes(keywords, told):
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), **keywords)
    for text in told:
        assert str(refused.value).count(text) == 1


def test_a_strategy_is_asked_for_the_frequencies_of_its_own_epochs():
    four = averaging.DiLoCo(fragments=4)
    how = {"warm_up_epochs": 1, "warm_up_sync_frequency": 3}
    trainer = offbeat.AsyncTrainer(model(), strategy={0: "local", 1: four}, **how)
    assert trainer.strategies == {0: "local", 1: four}
    with pytest.raises(ConfigError, match="within 3 iterations"):
        trainer.strategy = four
    train(trainer, optim.SGD(lr=0.1), epochs=1)
    trainer.strategy = four  # the warm-up is over


def test_an_alpha_that_is_too_strong_for_all_members_is_refused_before_its_epoch_comes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"alpha is 0\.6 and there are 4 members"):
        offbeat.AsyncTrainer(
            model(), strategy={0: "local", 1: averaging.EASGD(alpha=0.6)}, server_address="h:1"
        )
