"""A tuned staleness policy: what a push is worth that comes late, and which one comes too late.

    python examples/tour_staleness.py

Two workers of one process. While one holds a gradient back, the other makes updates, more of them each time.
"""

import torch
from torch import nn

from offbeat import AsyncWorker, ParameterServer, optim

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

# ---------------------------------------------------------------- to be taken over as it stands
# Example: Adaptive staleness handling
server = ParameterServer(
    model=model,
    staleness_policy="adaptive_lr",
    staleness_lr_factor=0.9,  # Reduce learning rate by 10% for each staleness level
    max_staleness=20,
)
# ---------------------------------------------------------------- to here


def compute(worker: AsyncWorker) -> None:
    """Leave the gradients of one batch on a worker's model."""
    features = torch.randn(32, 20)
    loss = nn.functional.cross_entropy(worker.model(features), (features.sum(1) > 0).long())
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not say what it returns


with (
    server,
    AsyncWorker(server.address, optimizer=optim.SGD(lr=0.1)) as fast,
    AsyncWorker(server.address) as slow,
):
    for num_updates in (0, 1, 2, 3, 5, 10, 20, 21):
        compute(slow)
        for _ in range(num_updates):
            compute(fast)
            fast.step()
        receipt = slow.step()
        if receipt is not None:
            worth = f"weight {receipt.weight:.2f}" if receipt.applied else f"rejected: {receipt.detail}"
            print(f"version {receipt.version}: {receipt.staleness} updates late, {worth}")
