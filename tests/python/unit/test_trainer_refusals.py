"""What a trainer cannot do is refused, all at once, and nothing has changed."""

import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, StateError
from support.trainer_loop import DATA, LOSS, blocks, live_of, loop, model, plain, same, train


def test_a_batch_without_a_sample_is_refused_before_it_is_accumulated():
    trained = plain()
    trainer = offbeat.AsyncTrainer(trained, strategy="accumulate", regular_sync_frequency=2)
    live = torch.optim.Adam(trained.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"the batch has no sample.*drop_last"):
        trainer.train(
            dataloader=[DATA[0], (torch.empty(0, 6), torch.empty(0).long())], loss_fn=LOSS, optimizer=live
        )
    assert not live.state, "it is no micro-batch of a window"


@pytest.mark.parametrize("around", ["local", "average", "averager", "module"])
def test_a_batch_without_a_sample_is_refused_before_it_trains(around, tmp_path):
    trained = plain()
    run = {"dataloader": [DATA[0], (torch.empty(0, 6), torch.empty(0).long())], "loss_fn": LOSS}
    run["optimizer"] = live = torch.optim.Adam(trained.parameters(), lr=0.1)
    if around in ("local", "average"):
        trainer = offbeat.AsyncTrainer(trained, strategy=around)
    else:
        wraps = trained if around == "module" else offbeat.AsyncModelAverager(trained)
        trainer = offbeat.FaultTolerantTrainer(wraps, tmp_path)
    with pytest.raises(ConfigError, match=r"the batch has no sample.*drop_last"):
        trainer.train(**run)
    assert {float(state["step"]) for state in live.state.values()} == {1.0}


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (lambda self, trainer: None, r"on_epoch_end\(trainer\) cannot be called with \(trainer, epoch\)"),
        (lambda self, trainer, epoch, logs: None, r"on_epoch_end\(trainer, epoch, logs\) cannot be called"),
    ],
)
def test_a_hook_that_takes_other_arguments_is_refused_before_anything_is_trained(hook, told):
    kind = type("Mine", (), {"on_epoch_end": hook, "on_train_end": lambda self, *args: None})
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncTrainer(model(), callbacks=kind())


def test_a_batch_that_is_no_pair_is_refused_with_what_a_trainer_s_user_can_do():
    three = [(torch.zeros(2, 6), torch.zeros(2), torch.zeros(2, dtype=torch.long))]
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError, match=r"gave a tuple of 3; .*collate_fn.*AsyncModelAverager") as caught:
        train(trainer, optim.SGD(lr=0.1), data=three)
    assert "worker." not in str(caught.value)
    with pytest.raises(ConfigError, match=r"gave a tuple of 3; .*collate_fn") as caught:
        trainer.evaluate(three)
    assert "worker." not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: offbeat.AsyncTrainer(model(), max_epochs=3), "'max_epochs'; did you mean train(epochs=…)?"),
        (lambda: offbeat.AsyncTrainer(model(), warmup_epochs=3), "did you mean 'warm_up_epochs'?"),
        (
            lambda: offbeat.AsyncTrainer(model()).train(batch_size=8, loss_fn=LOSS),
            "'batch_size'; did you mean AsyncTrainer(local_batch_size=…)?",
        ),
        (lambda: offbeat.AsyncTrainer(model()).fit(epoch=8, loss_fn=LOSS), "did you mean 'epochs'?"),
        (
            lambda: offbeat.AsyncModelAverager(model(), optimizer=optim.SGD(lr=0.1)),
            "did you mean train_step(optimizer=…)?",
        ),
    ],
)
def test_a_keyword_of_another_call_is_answered_with_that_call(call, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        call()


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
def test_a_loss_without_a_way_back_is_refused_before_anything_is_trained(strategy):
    trained = model()
    before = copy.deepcopy(list(trained.parameters()))
    with (
        offbeat.AsyncTrainer(trained, strategy=strategy) as trainer,
        pytest.raises(ConfigError, match="loss without a way back to the model: it was detached"),
    ):
        trainer.train(
            dataloader=DATA,
            optimizer=optim.SGD(lr=0.1),
            loss_fn=lambda outputs, targets: LOSS(outputs.detach(), targets),
            progress=False,
        )
    assert all(map(torch.equal, before, trained.parameters()))


def test_a_hook_that_is_mistyped_is_refused_with_the_nearest_though_others_are_right():
    class Mistyped:
        on_click = print  # nobody's hook
        on_steps = 3  # no method

        def on_step(self, trainer, step):
            pass

        def on_epochs_end(self, trainer, epoch):
            pass

        def onTrainEnd(self, trainer, history):  # noqa: N802  as others would write it
            pass

    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(model(), callbacks=[Mistyped()])
    known = "Known: on_step, on_log, on_epoch_end, on_train_end"
    assert f"unknown hook 'on_epochs_end'; did you mean 'on_epoch_end'? {known}" in str(refused.value)
    assert f"unknown hook 'onTrainEnd'; did you mean 'on_train_end'? {known}" in str(refused.value)
    assert str(refused.value).count("unknown hook") == 2


@pytest.mark.parametrize(
    ("normed", "part", "place"),
    [
        (nn.utils.parametrizations.spectral_norm, "0", r"0\.0\.parametrizations\.weight\.0"),
        (nn.utils.parametrizations.spectral_norm, "0.0", r"0\.0\.parametrizations\.weight\.0"),
        (nn.utils.spectral_norm, "0", r"0\.0"),
        (nn.utils.spectral_norm, "0.0", r"0\.0"),
    ],
)
def test_a_part_that_estimates_a_spectral_norm_is_not_computed_twice(normed, part, place):
    """Its second pass would go by other weights than its loss."""
    model = nn.Sequential(nn.Sequential(normed(nn.Linear(6, 16)), nn.Tanh()), nn.Linear(16, 5))
    with pytest.raises(ConfigError, match=rf"'{place}' is a .*, whose spectral norm a second pass would"):
        offbeat.AsyncTrainer(model, gradient_checkpointing=[part])
    offbeat.AsyncTrainer(model, gradient_checkpointing=["1"])


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncTrainer(
            nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
            warm_up_epochs=-1,
            warm_up_sync_frequency=0,
            regular_sync_frequency="30s",
            strategy="gossipp",
            local_batch_size=True,
            device="tpu9",
            callbacks=[5],
            max_grad_norm=-1.0,
            amp="fp8",
            compile=3,
            gradient_checkpointing=True,
            loss_reduction="max",
            overlap=0,
            server_address=5,
            worker_id="",
            trackers=5,
            seed=-1,
        )
    for told in [
        "warm_up_epochs is -1",
        "warm_up_sync_frequency is 0",
        "regular_sync_frequency is '30s'",
        "unknown strategy 'gossipp'",
        "local_batch_size is True",
        "device is 'tpu9'",
        "callbacks has 5: give objects with any of on_step",
        "max_grad_norm is -1.0",
        "unknown amp 'fp8'",
        "compile is 3",
        "'0' is a BatchNorm1d, whose running statistics a second pass would count twice",
        "'1' is an InstanceNorm1d, whose running statistics a second pass would count twice",
        "compile and gradient_checkpointing do not go together",
        "unknown loss_reduction 'max'",
        "overlap is 0",
        "server_address is 5",
        "worker_id is ''",
        "trackers has 5",
        "seed is -1",
    ]:
        assert told in str(refused.value)
    with pytest.raises(
        ConfigError, match="unknown keyword of AsyncTrainer 'stratgy'; did you mean 'strategy'"
    ):
        offbeat.AsyncTrainer(model(), stratgy="local")


def test_all_that_is_wrong_with_a_train_is_told_at_once_and_nothing_changes():
    trainer = offbeat.AsyncTrainer(model())
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ConfigError) as refused:
        trainer.train(
            epochs=0,
            loss_fn=3,
            metrics="acuracy",
            log_frequency=0,
            scheduler=StepLR,
            scheduler_interval="batch",
            max_steps=0,
            progress="yes",
            trackers=7,
        )
    for told in [
        "epochs is 0",
        "loss_fn is 3",
        "unknown metric 'acuracy'",
        "log_frequency is 0",
        "scheduler is the class StepLR",
        "unknown scheduler_interval 'batch'",
        "max_steps is 0",
        "progress is 'yes': give True for a bar, False for nothing, or None",
        "trackers has 7",
        "a dataset= or a dataloader=",
    ]:
        assert told in str(refused.value)
    with pytest.raises(ConfigError, match="there is no optimizer: give optimizer="):
        train(trainer, None)
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"scheduler": functools.partial(ReduceLROnPlateau)}, "ReduceLROnPlateau goes by a metric: give"),
        (
            {
                "scheduler": functools.partial(ReduceLROnPlateau),
                "scheduler_interval": "step",
                "scheduler_metric": "loss",
            },
            "ReduceLROnPlateau goes by an epoch's mean",
        ),
        ({"scheduler": lambda live: StepLR(live, 2), "scheduler_metric": "loss"}, "StepLR goes by no metric"),
        ({"scheduler_metric": "loss"}, "scheduler_metric is given, and no scheduler"),
        ({"scheduler_interval": "step"}, 'scheduler_interval is "step", and there is no scheduler'),
        (
            {"scheduler": functools.partial(ReduceLROnPlateau), "scheduler_metric": 5},
            "scheduler_metric: 5 is no metric",
        ),
        ({"scheduler": lambda live: 5}, "scheduler gave 5"),
        (
            {"scheduler": functools.partial(StepLR)},
            r"StepLR.*cannot make one of the SGD: TypeError: .*step_size.*step_size=10",
        ),
        ({"scheduler": lambda live: OneCycleLR(live, 0.1)}, "cannot make one of the SGD: ValueError: "),
        (
            {"scheduler": StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 2)},
            "the StepLR is of another optimizer than the SGD",
        ),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused_and_no_optimizer_stays_behind(keywords, told):
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError, match=told):
        train(trainer, optim.SGD(lr=0.1), **keywords)
    assert trainer.optimizer is None
    train(trainer, optim.Adam(lr=0.01), epochs=1)
    assert type(trainer.optimizer) is torch.optim.Adam


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        (
            {"scheduler": lambda live: OneCycleLR(live, 0.1, total_steps=9), "scheduler_metric": "loss"},
            "metric",
        ),
        ({"scheduler": lambda live: OneCycleLR(live, 0.1, total_steps=9), "max_steps": 0}, "max_steps is 0"),
    ],
)
def test_a_refused_train_leaves_a_live_optimizer_as_it_was(keywords, told):
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=torch.tensor(0.3), momentum=0.8)
    before, own = copy.deepcopy(live.state_dict()), set(vars(live))
    trainer = offbeat.AsyncTrainer(trained)
    with pytest.raises(ConfigError, match=told):
        train(trainer, live, **keywords)
    assert live.state_dict() == before
    assert set(vars(live)) == own


def test_what_is_wrong_with_optimizer_scheduler_and_the_rest_is_told_at_once():
    trainer = offbeat.AsyncTrainer(model())
    with pytest.raises(ConfigError) as refused:
        train(trainer, 5, scheduler=StepLR, scheduler_interval="batch", max_steps=0)
    for told in ("optimizer", "scheduler is the class StepLR", "interval 'batch'", "max_steps is 0"):
        assert told in str(refused.value)
    with pytest.raises(ConfigError, match=r"max_steps is 0: .*; .*StepLR goes by no metric"):
        train(
            trainer,
            optim.SGD(lr=0.1),
            scheduler=lambda live: StepLR(live, 2),
            scheduler_metric="loss",
            max_steps=0,
        )
    assert trainer.optimizer is None


@pytest.mark.parametrize(
    ("trained", "given", "told"),
    [
        (nn.Linear(2, 2), True, "the Linear is and holds no nn.Sequential"),
        (blocks(), ["0", "0.inner"], "'0.inner' is within '0', and would be computed three times"),
        (blocks(), ["0.iner"], "unknown part '0.iner'; did you mean '0.inner'"),
        (blocks(), "0", "gradient_checkpointing is '0': give True, False, or names"),
        (blocks(), [], "gradient_checkpointing is \\[\\]"),
    ],
)
def test_parts_that_cannot_be_computed_twice_are_refused_by_name(trained, given, told):
    with pytest.raises(ConfigError, match=told):
        offbeat.AsyncTrainer(trained, gradient_checkpointing=given)


def test_a_model_in_ddp_or_fsdp_is_refused(monkeypatch):
    from torch.distributed import fsdp

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    with pytest.raises(ConfigError, match="a module in FSDP"):
        offbeat.AsyncTrainer(nn.Sequential(Sharded(2, 2)))
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Sharded)
    with pytest.raises(ConfigError, match="a module in DDP"):
        offbeat.AsyncTrainer(nn.Sequential(Sharded(2, 2)))


def test_another_optimizer_is_refused_and_an_equal_one_keeps_its_state():
    ours, theirs = model(), model()
    trainer = offbeat.AsyncTrainer(ours)
    torch.manual_seed(7)
    for spec in (optim.Adam(lr=0.01), optim.Adam(lr=0.01), None):
        trainer.train(dataloader=DATA, optimizer=spec, loss_fn=LOSS, progress=False)
    loop(theirs, live_of(optim.Adam(lr=0.01), theirs), epochs=3)
    assert same(ours, theirs)
    with pytest.raises(ConfigError, match="whose state would be lost"):
        train(trainer, optim.SGD(lr=0.1))


def test_a_model_with_other_parameters_than_at_first_is_refused_by_what_averages():
    trainer = offbeat.AsyncTrainer(model(), regular_sync_frequency=1, strategy="average")
    train(trainer, optim.SGD(lr=0.1))
    trainer.model[0].weight = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(StateError, match="is another object"):
        train(trainer, None)
    assert trainer.history.stopped == "failed"
