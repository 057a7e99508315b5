"""Accumulation, fault tolerance, warm-up and a monitor, each in a few lines.

    python examples/tour_family.py [DIRECTORY]

One process, on random numbers: each part is there to be read and taken over. With `offbeat launch` or
torchrun, and `offbeat.init_distributed("gloo")` first, accumulation is of several processes, as averaging is
in `tour_members.py`.
Checkpoints go to DIRECTORY, where the same command goes on; without one, to a folder that is removed.
"""

import logging
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat import (
    AsyncGradientAccumulator,
    AsyncModelAverager,
    AsyncTrainer,
    AsyncTrainingMonitor,
    FaultTolerantTrainer,
    optim,
)

features = torch.randn(2048, 20)
train_dataset = TensorDataset(features, (features.sum(1) > 0).long())
dataloader = DataLoader(train_dataset, batch_size=32, shuffle=True)
loss_fn = nn.CrossEntropyLoss()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


def accumulate() -> None:
    optimizer = optim.SGD(lr=0.5)
    # ------------------------------------------------------------ to be taken over as it stands
    # Create an asynchronous gradient accumulator
    accumulator = AsyncGradientAccumulator(
        model=layers(),
        accumulation_steps=16,  # Accumulate gradients from 16 batches
        device="cpu",
    )

    # Train with asynchronous gradient accumulation
    for epoch in range(10):
        for batch in dataloader:
            inputs, targets = batch
            loss = accumulator.train_step(
                inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=loss_fn
            )
            if accumulator.is_update_step():
                print(f"Epoch {epoch}, Loss: {loss}")
    # ------------------------------------------------------------ to here
    accumulator.flush()
    print(f"accumulated: {accumulator.updates} updates of {accumulator.effective_batch_size} samples")


def survive(directory: str) -> None:
    # ------------------------------------------------------------ to be taken over as it stands
    # Create a fault-tolerant trainer
    trainer = FaultTolerantTrainer(
        model=layers(),
        checkpoint_dir=directory,
        checkpoint_frequency=1000,  # Checkpoint every 1000 iterations
        recovery_strategy="latest",  # Use the latest checkpoint for recovery
        device="cpu",
    )

    # Train with fault tolerance
    trainer.train(
        dataset=train_dataset,
        epochs=10,
        optimizer=optim.Adam(lr=0.001),
        loss_fn=nn.CrossEntropyLoss(),
    )
    # ------------------------------------------------------------ to here
    print(f"survived: {trainer.history.steps} steps, resumed from {trainer.resumed_from}")


def tune() -> None:
    model = layers()
    # ------------------------------------------------------------ to be taken over as it stands
    # Example: Adaptive averaging frequency
    averager = AsyncModelAverager(
        model=model,
        averaging_policy="adaptive",
        min_averaging_frequency=50,
        max_averaging_frequency=500,
        adaptation_metric="loss_variance",
    )

    # Example: Gradient accumulation for effective batch size increase
    accumulator = AsyncGradientAccumulator(
        model=layers(),
        base_batch_size=32,
        target_batch_size=512,  # Effective batch size after accumulation
        adaptive_accumulation=True,  # Adjust accumulation based on system performance
    )

    # Example: Warm-up configuration
    trainer = AsyncTrainer(
        model=layers(),
        warm_up_epochs=2,  # More synchronous updates during first 2 epochs
        warm_up_sync_frequency=10,  # Synchronize every 10 batches during warm-up
        regular_sync_frequency=100,  # Synchronize every 100 batches after warm-up
    )

    # Example: Divergence monitoring
    monitor = AsyncTrainingMonitor(
        model=model,
        divergence_metrics=["loss_variance", "gradient_norm"],
        alert_threshold=0.5,
        remediation_strategy="increase_sync_frequency",
    )
    # ------------------------------------------------------------ to here
    for inputs, targets in dataloader:
        averager.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn)
        accumulator.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn)
    history = trainer.train(dataloader=dataloader, epochs=3, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn)
    print(
        f"tuned: {history.steps} steps, {len(monitor.report().alerts)} alerts, {accumulator.updates} updates"
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    accumulate()
    with tempfile.TemporaryDirectory() as temporary:
        survive(sys.argv[1] if len(sys.argv) > 1 else temporary)
    tune()
