"""The trainer and the worker on a device."""

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


def without_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def batches(num, *, scale_of=lambda number: 1.0, begin=0):
    found = []
    for number in range(begin, begin + num):
        random = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 6, generator=random)
        found.append((inputs * scale_of(number), inputs[:, :5].argmax(1)))
    return found


def same(ours, theirs):
    states = ours.state_dict(), theirs.state_dict()
    return states[0].keys() == states[1].keys() and all(
        map(torch.equal, states[0].values(), states[1].values())
    )


def loop(trained, data, epochs, device, *, amp, clip):
    """What a user would write."""
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device) if amp == "fp16" else None
    for inputs, targets in data * epochs:
        live.zero_grad()
        with torch.autocast(device, dtype=DTYPES[amp], enabled=amp != "none"):
            loss = LOSS(trained(inputs.to(device)), targets.to(device))
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(live)
        nn.utils.clip_grad_norm_(trained.parameters(), clip)
        if scaler is None:
            live.step()
        else:
            scaler.step(live)
            scaler.update()
    return scaler


@pytest.mark.parametrize("amp", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
def test_training_is_a_plain_loop(device, strategy, amp):
    # Which in half precision become infinite, on the way back at the least: those batches are skipped.
    data = batches(9, scale_of=lambda number: 3e4 if amp == "fp16" and number % 4 == 1 else 1.0)
    make = without_statistics if amp == "fp16" else model
    ours, theirs = make().to(device), make().to(device)
    every = 1 if strategy == "accumulate" else 3
    trainer = offbeat.AsyncTrainer(
        ours, strategy=strategy, device=device, amp=amp, max_grad_norm=0.5, regular_sync_frequency=every
    )
    history = trainer.train(
        dataloader=data, epochs=2, optimizer=optim.SGD(lr=0.1, momentum=0.9), loss_fn=LOSS, progress=False
    )
    scaler = loop(theirs, data, 2, device, amp=amp, clip=0.5)
    assert same(ours, theirs)
    assert history.steps + history.skipped == 18
    if scaler is not None:
        assert trainer.scaler.state_dict() == scaler.state_dict()
        assert history.skipped >= 1


def test_it_learns_is_measured_and_predicts_in_order(device):
    data = batches(40)
    trainer = offbeat.AsyncTrainer(model(), device=device)
    trainer.train(
        dataloader=data, epochs=15, optimizer=optim.AdamW(lr=0.01), loss_fn=LOSS, progress=False,
        validation=batches(5, begin=500),
    )  # fmt: skip
    held_out = batches(20, begin=1000)
    accuracy = trainer.evaluate(held_out)
    predicted = trainer.predict([inputs for inputs, _ in held_out])
    rows = predicted if isinstance(predicted, torch.Tensor) else torch.cat(list(predicted))
    targets = torch.cat([targets for _, targets in held_out])
    assert accuracy > 0.8
    assert (rows.cpu().argmax(1) == targets).float().mean().item() == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's compiler imports what is so
@pytest.mark.parametrize("how", ["compile", "gradient_checkpointing"])
def test_a_compiled_model_and_recomputed_activations_learn_too(device, how):
    compiled = True if device == "cuda" else "eager"  # whose compiler is not on each machine
    ours = model() if how == "compile" else without_statistics()
    trainer = offbeat.AsyncTrainer(
        ours, device=device, amp="bf16", **{how: compiled if how == "compile" else True}
    )
    history = trainer.train(
        dataloader=batches(20), epochs=8, optimizer=optim.AdamW(lr=0.01), loss_fn=LOSS, progress=False
    )
    assert trainer.model is ours
    assert history.steps == 160
    assert trainer.evaluate(batches(20, begin=1000)) > 0.7


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, *, inputs):
        return nn.functional.dropout(torch.tanh(self.inner(inputs)), 0.3)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.part, self.last = nn.Linear(6, 16), ByKeyword(), nn.Linear(16, 5)

    def forward(self, inputs):
        return self.last(self.part(inputs=self.first(inputs)))


def test_the_second_pass_of_a_part_drops_what_the_first_has_dropped(device):
    trained = []
    for parts in (False, ["part"]):
        torch.manual_seed(7)
        trained.append(Dropped())
        trainer = offbeat.AsyncTrainer(trained[-1], device=device, gradient_checkpointing=parts)
        trainer.train(
            dataloader=batches(8), epochs=1, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, progress=False
        )
    assert same(*trained)


def test_strategies_are_switched_in_a_run(device):
    ours = model()
    trainer = offbeat.AsyncTrainer(
        ours,
        strategy={0: "local", 1: "average", 2: "accumulate", 3: "diloco"},
        regular_sync_frequency=2,
        device=device,
    )
    history = trainer.train(
        dataloader=batches(8), epochs=4, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, progress=False
    )
    assert history.samples == 4 * 8 * 8
    assert all(value.isfinite().all() for value in ours.state_dict().values())
    kept = trainer.state_dict()
    other = offbeat.AsyncTrainer(
        model(3),
        strategy={0: "local", 1: "average", 2: "accumulate", 3: "diloco"},
        regular_sync_frequency=2,
        device=device,
    )
    other.model.load_state_dict(ours.state_dict())
    other.load_state_dict(kept, optimizer=optim.SGD(lr=0.1))
    assert same(other.model, ours)
    for ahead in (trainer, other):
        ahead.train(
            dataloader=batches(8), epochs=1, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, progress=False
        )
    assert same(other.model, ours)


def test_a_worker_trains_with_its_statistics(device):
    with offbeat.ParameterServer(model(), optimizer=optim.SGD(lr=0.1), host="127.0.0.1", port=0) as server:
        with offbeat.AsyncWorker(server.address, model(1), 8, device=device) as worker:
            history = worker.train(dataloader=batches(12), epochs=3, loss_fn=LOSS, progress=False)
            worker.flush()
        held = server.state_dict()
    assert history.steps == 36
    theirs = model()
    live = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for inputs, targets in batches(12) * 3:
        live.zero_grad()
        LOSS(theirs(inputs), targets).backward()
        live.step()
    for name, value in theirs.state_dict().items():
        assert np.allclose(np.asarray(held[name]), value.numpy(), rtol=1e-4, atol=1e-5), name
