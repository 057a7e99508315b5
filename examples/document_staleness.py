"""The document's first best practice: a tuned staleness policy. A worker joins it in the same process.

python examples/document_staleness.py
"""

import torch
from torch import nn

from offbeat import AsyncWorker, ParameterServer, optim

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

# ---------------------------------------------------------------- the document's
# Example: Adaptive staleness handling
server = ParameterServer(
    model=model,
    staleness_policy="adaptive_lr",
    staleness_lr_factor=0.9,  # Reduce learning rate by 10% for each staleness level
    max_staleness=20,
)
# ---------------------------------------------------------------- to here

with server, AsyncWorker(server.address, optimizer=optim.SGD(lr=0.1)) as worker:
    for _ in range(20):
        features = torch.randn(32, 20)
        loss = nn.functional.cross_entropy(worker.model(features), (features.sum(1) > 0).long())
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not say what it returns
        receipt = worker.step()
        if receipt is not None:
            print(f"version {receipt.version}: {receipt.staleness} updates late, weight {receipt.weight}")
