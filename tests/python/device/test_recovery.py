"""A killed run goes on with the same bits on a device, its own random numbers among them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import (
    BATCH_SIZE,
    Killer,
    Noisy,
    digest,
    in_process,
    loss_of,
    model,
    order,
    result,
    waited,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

KILLED_BY = -9
STEPS = 60


class OwnNoise(nn.Module):
    """Draws from the generator of the device, in a forward."""

    def forward(self, inputs):
        return inputs + 0.1 * torch.randn_like(inputs) * torch.rand((), device=inputs.device)


def train(folder, device, kill, out):
    module, killer = nn.Sequential(OwnNoise(), model()), Killer(*kill)
    if device == "cuda":
        torch.cuda.manual_seed(5)

    def loss_fn(outputs, targets):
        killer("step")
        return loss_of(outputs, targets)

    Saver.save = waited(Saver.save)
    trainer = FaultTolerantTrainer(module, folder, checkpoint_frequency=10, device=device, deterministic=True)
    live = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=7)
    history = trainer.train(
        dataset=Noisy(),
        batch_size=BATCH_SIZE,
        epochs=100,
        max_steps=STEPS,
        optimizer=live,
        scheduler=torch.optim.lr_scheduler.StepLR(live, step_size=2, gamma=0.9),
        grad_scaler=scaler,
        loss_fn=loss_fn,
        metrics=["loss", order],
        log_frequency=1,
    )
    told = result(trainer, history) | {
        "scaler": str(scaler.state_dict()),
        "resumed": str(trainer.resumed_from),
    }
    if device == "cuda":
        told["device's random"] = digest([torch.cuda.get_rng_state()])
    Path(out).write_text(json.dumps(told), "utf-8")


def test_a_killed_run_goes_on_with_the_same_bits(device, tmp_path):
    assert in_process(train, tmp_path / "whole", device, (None, 0), tmp_path / "whole.json") == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole.pop("resumed") == "None"
    for kill in (7, 25, 12):  # within a life; between two saves
        assert in_process(train, tmp_path / "broken", device, ("step", kill), tmp_path / "no") == KILLED_BY
    assert in_process(train, tmp_path / "broken", device, (None, 0), tmp_path / "broken.json") == 0
    broken = json.loads((tmp_path / "broken.json").read_text())
    assert broken.pop("resumed") != "None"
    assert broken == whole


def test_a_checkpoint_of_one_device_is_gone_on_with_on_another(device, tmp_path):
    def train_to(number, where):
        module = model()
        trainer = FaultTolerantTrainer(module, tmp_path, checkpoint_frequency=10, device=where)
        trainer.train(
            dataset=Noisy(),
            batch_size=BATCH_SIZE,
            epochs=100,
            max_steps=number,
            optimizer=torch.optim.AdamW(trainer.model.parameters(), lr=0.01),
            loss_fn=loss_of,
        )
        return trainer

    before = train_to(20, device)
    after = train_to(20, "cpu")
    assert after.resumed_from is not None
    for a, b in zip(before.model.state_dict().values(), after.model.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b)
    for a, b in zip(before.optimizer.state.values(), after.optimizer.state.values(), strict=True):
        assert torch.equal(a["exp_avg"].cpu(), b["exp_avg"])
    assert train_to(30, "cpu").history.steps == 30
    assert train_to(40, device).history.steps == 40


def test_saving_takes_what_was_there_while_training_goes_on(device, tmp_path):
    """Large enough that copies are under way as the next steps write to what they copy."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2000, 1000))

        def forward(self, inputs):
            return inputs.sum() * 0 + self.weight.sum()

    trainer = FaultTolerantTrainer(Counted(), tmp_path, checkpoint_frequency=3, device=device)
    trainer.train(
        dataset=torch.utils.data.TensorDataset(torch.ones(400, 1), torch.zeros(400, 1)),
        batch_size=8,
        epochs=1,
        max_steps=47,
        optimizer=offbeat.optim.SGD(lr=1.0),
        loss_fn=lambda outputs, targets: -outputs,  # a step adds 1 to each number
    )
    from safetensors.torch import load_file

    found = sorted(tmp_path.rglob("*.safetensors"))
    assert found
    for path in found:
        for name, value in load_file(path).items():
            if name.endswith("weight"):
                assert value.min() == value.max(), f"{path} was torn"
