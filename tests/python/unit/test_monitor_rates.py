"""What a monitor says of a learning rate that is higher soon after a range was made."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import AsyncTrainingMonitor
from offbeat.local import lr_scale
from support.small_net import net

LINEAR = torch.optim.lr_scheduler.LinearLR


def said_of(
    caplog,
    metrics=("loss", "gradient_norm"),
    *,
    by_step=lambda optimizer: None,
    optimizers=None,
    num_steps=300,
    **keywords,
):
    """Train, with what follows each step; give what was said of the rate."""
    model = net()
    made = [torch.optim.SGD(model.parameters(), lr=0.1)] if optimizers is None else optimizers(model)
    follow = by_step(made[0])
    monitor = AsyncTrainingMonitor(model, list(metrics), **keywords)
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        for step in range(num_steps):
            model.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            for optimizer in made:
                optimizer.step()
            if follow is not None:
                follow(step)
    monitor.close()
    return [record.message for record in caplog.records if "a learning rate of" in record.message]


def rising(num_steps, every=1):
    """Let the rate rise from a hundredth, at each so many steps."""

    def made(optimizer):
        scheduler = LINEAR(optimizer, 0.01, 1.0, num_steps)
        return lambda step: scheduler.step() if (step + 1) % every == 0 else None

    return made


def train(model, optimizer, rates, caplog, *, closure=False):
    """Train at these rates; give what was said of them."""

    def backward():
        model.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            if not closure:
                backward()
            optimizer.step(*([backward] if closure else []))
    return [record.message for record in caplog.records if "a learning rate of" in record.message]


@pytest.mark.parametrize(
    ("metrics", "remedy"), [(["gradient_norm"], "alert"), (["update_ratio"], "alert"), (["loss"], "clip")]
)
def test_a_rate_that_rises_on_is_warned_of_once_with_what_to_do(metrics, remedy, caplog):
    (said,) = said_of(caplog, metrics, by_step=rising(50), remediation_strategy=remedy)
    assert "a learning rate of the SGD is 0.05446 by now, and was 0.04852 at most while" in said
    assert f"the range of {metrics[0] if remedy == 'alert' else remedy} was made" in said
    assert "Give warm_up= as many as the steps in which the rate rises, and 25 more" in said


@pytest.mark.parametrize("every", [10, 30])
def test_so_is_one_that_rises_from_epoch_to_epoch(every, caplog):
    (said,) = said_of(caplog, by_step=rising(60, every=every))
    assert "of the SGD is 0.00595 by now" in said if every == 10 else "of the SGD is 0.00265 by now" in said


@pytest.mark.parametrize(
    ("metrics", "given"),
    [
        (["gradient_norm"], {"by_step": rising(20)}),
        (["gradient_norm"], {"by_step": rising(50), "warm_up": 75}),
        (["gradient_norm"], {"by_step": rising(10, every=300), "num_steps": 700}),
        (["loss"], {"by_step": rising(50)}),
    ],
)
def test_one_that_has_risen_by_then_or_rises_much_later_or_that_nothing_follows_is_not(
    metrics, given, caplog
):
    assert said_of(caplog, metrics, **given) == []


def test_each_group_of_each_optimizer_is_compared_with_itself(caplog):
    def two(model):
        return [
            torch.optim.AdamW(model[0].parameters(), lr=1e-3),
            torch.optim.SGD(model[2].parameters(), lr=0.1),
        ]

    def grouped(model):
        groups = [{"params": model[2].parameters(), "lr": 0.1}, {"params": model[0].parameters(), "lr": 1e-5}]
        return [torch.optim.SGD(groups)]

    def second_rises(optimizer):
        def follow(step):
            optimizer.param_groups[1]["lr"] = 1e-5 * min(step + 2, 100)

        return follow

    assert said_of(caplog, optimizers=two) == []
    (said,) = said_of(caplog, optimizers=grouped, by_step=second_rises)
    assert "is 0.00028 by now, and was 0.00025 at most" in said


class NoRate(torch.optim.SGD):
    """As one that makes its own rates, and has none that is a number."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = rate

    def step(self, closure=None):
        del closure


@pytest.mark.parametrize("rate", [None, "own", torch.ones(3)])
def test_a_rate_that_is_no_number_costs_no_training(rate, caplog):
    assert said_of(caplog, optimizers=lambda model: [NoRate(model.parameters(), rate)]) == []


def test_a_rate_that_is_a_tensor_counts_as_well(caplog):
    def made(model):
        return [torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))]

    (said,) = said_of(caplog, optimizers=made, by_step=rising(50))
    assert "of the SGD is 0.05446 by now" in said


def test_new_ranges_are_looked_at_anew_and_those_of_another_process_not(caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    rates = [1e-3] * 30 + [1e-2] * 5
    assert len(train(model, optimizer, rates, caplog)) == 1
    monitor.reset()
    assert len(train(model, optimizer, rates, caplog)) == 1
    state = monitor.state_dict()
    monitor.close()
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    monitor.load_state_dict(state)
    assert train(model, optimizer, rates, caplog) == []


def test_an_optimizer_that_is_made_later_is_compared_with_what_its_parameters_had_before(caplog):
    model = net()
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    assert train(model, first, [0.1] * 40, caplog) == []
    assert train(model, second, [0.1 * n / 50 for n in range(1, 51)], caplog) == []
    monitor.reset()
    assert train(model, first, [1e-4] * 30, caplog) == []
    (said,) = train(model, second, [1e-1], caplog)
    assert "is 0.1 by now, and was 0.0001 at most" in said


@pytest.mark.parametrize("closure", [True, False])
def test_a_rate_that_a_remedy_lets_go_of_has_not_risen(closure, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    lr_scale.scale(optimizer, 0.5)
    assert train(model, optimizer, [0.1] * 40, caplog, closure=closure) == []
    lr_scale.unscale(optimizer, 0.5)
    assert train(model, optimizer, [0.1] * 10, caplog, closure=closure) == []
    assert len(train(model, optimizer, [0.2], caplog, closure=closure)) == 1
    monitor.close()


@pytest.mark.parametrize(("num_before", "is_said"), [(10, True), (24, True), (30, False)])
def test_a_resume_in_the_warm_up_goes_on_looking(num_before, is_said, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = [0.01 * n for n in range(1, 100)]
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    said = train(model, optimizer, rates[:num_before], caplog)
    state = monitor.state_dict()
    monitor.close()
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    monitor.load_state_dict(state)
    assert (train(model, optimizer, rates[num_before:], caplog) != []) == is_said
    assert (said != []) == (not is_said)


def test_a_rate_of_numpy_s_counts_as_well(caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    assert len(train(model, optimizer, [np.float32(1e-3)] * 30 + [np.float32(0.1)], caplog)) == 1
    monitor.close()


def test_a_group_that_leaves_is_not_what_another_is_compared_with(caplog):
    model = net()
    groups = [
        {"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (1e-4, 0.1, 0.1, 0.1), strict=True)
    ]
    optimizer = torch.optim.SGD(groups)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    assert train(model, optimizer, [1e-4] * 40, caplog) == []
    optimizer.param_groups.pop(0)
    assert train(model, optimizer, [0.1] * 10, caplog) == []
    monitor.close()


@pytest.mark.parametrize("given", [{}, {"strategy": "accumulate", "regular_sync_frequency": 4}])
def test_a_trainer_s_scheduler_is_looked_at_as_well(given, caplog):
    model = nn.Linear(4, 2)
    trainer = offbeat.AsyncTrainer(model, **given)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"])
    data = torch.utils.data.TensorDataset(torch.ones(1600, 4), torch.zeros(1600, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        trainer.train(
            dataloader=torch.utils.data.DataLoader(data, batch_size=4),
            epochs=1,
            optimizer=optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            scheduler=LINEAR(optimizer, 0.01, 1.0, 100),
            scheduler_interval="step",
        )
    monitor.close()
    assert len([record for record in caplog.records if "a learning rate of" in record.message]) == 1
