"""The monitor on a device: what it takes back, parameters and buffers, is what the CPU takes back."""

import logging
import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim

pytestmark = pytest.mark.timeout(200)

LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


def batches(num):
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 6, generator=random) for _ in range(num)]
    return [(each, each[:, :5].argmax(1)) for each in inputs]


def trained(device, bad, *, fused=False, amp=False, with_bad=True):
    """Give a model, and how many were dropped, after a user's loop with some batches that are NaN."""
    ours = model().to(device)
    live = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=8.0) if amp else None
    with offbeat.AsyncTrainingMonitor(
        ours, ["loss", "non_finite"], remediation_strategy="reject", grad_scaler=scaler
    ) as monitor:
        for number, (inputs, targets) in enumerate(batches(12)):
            if number in bad and not with_bad:
                continue
            live.zero_grad()
            spoilt = inputs * math.nan if number in bad else inputs
            with torch.autocast(device, dtype=torch.float16, enabled=amp):
                loss = LOSS(ours(spoilt.to(device)), targets.to(device))
            if scaler is None:
                loss.backward()
                live.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(live)
                scaler.update()
    return ours, monitor.report().num_dropped


@pytest.mark.parametrize("fused", [False, True])
def test_a_dropped_batch_leaves_nothing(device, fused):
    bad = (0, 4, 11)
    ours, dropped = trained(device, bad, fused=fused)
    theirs, _ = trained(device, bad, fused=fused, with_bad=False)
    assert dropped == len(bad)
    assert {buffer.device.type for buffer in ours.buffers()} == {device}
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("fused", [False, True])
def test_of_a_batch_whose_step_a_grad_scaler_skips_buffers_keep_nothing_that_is_broken(device, fused):
    ours, _ = trained(device, (3, 7, 11), fused=fused, amp=True)
    theirs, _ = trained(device, (3, 7, 11), fused=fused, amp=True, with_bad=False)
    assert all(buffer.isfinite().all() for buffer in ours.buffers())
    # Where the optimizer isn't told, the batch after it is lost to them, too. Parameters lose none.
    for name, value in dict(theirs.state_dict() if fused else theirs.named_parameters()).items():
        if name != "1.num_batches_tracked":  # which counts such a batch, as without a monitor
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-2, atol=1e-3)


def test_statistics_that_a_finite_batch_has_made_infinite_are_told_of(device, caplog):
    data = batches(6)
    data[3] = data[3][0] * 1e30, data[3][1]
    trainer = offbeat.AsyncTrainer(model(), device=device, strategy="local")
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        trainer.train(dataloader=data, epochs=2, optimizer=optim.SGD(lr=0.01), loss_fn=LOSS, progress=False)
    assert (
        sum("running statistics are not finite, 1.running_var" in one.message for one in caplog.records) == 1
    )


@pytest.mark.slow
def test_a_monitor_sees_what_is_not_finite_and_rolls_back(device, tmp_path):
    trainer = offbeat.FaultTolerantTrainer(model(), tmp_path, checkpoint_frequency=5, device=device)
    live = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    spoilt = []

    @torch.no_grad()
    def spoil(*_):
        if trainer.history.steps + 1 == 30 and not spoilt:
            spoilt.append(True)
            for parameter in trainer.model.parameters():
                parameter.mul_(math.nan)

    live.register_step_post_hook(spoil)
    monitor = offbeat.AsyncTrainingMonitor(
        trainer.model, ["loss", "gradient_norm", "update_ratio"], remediation_strategy="rollback", patience=1
    )
    trainer.train(dataloader=batches(20), epochs=4, optimizer=live, loss_fn=LOSS)
    assert spoilt
    assert monitor.report().alerts
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
