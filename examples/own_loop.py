"""A training loop of one's own: everything is as in plain torch, but for `worker.step()`.

python examples/own_loop.py
"""

import torch
from torch import nn

from offbeat import AsyncWorker, ParameterServer, optim

STEPS = 200


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(64, 20, generator=generator)
    return features, (features[:, :10].sum(1) > features[:, 10:].sum(1)).long()


def main() -> None:
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    generator = torch.Generator()
    with (
        ParameterServer(model, optimizer=optim.SGD(lr=0.1, momentum=0.9)) as server,
        AsyncWorker(server.address) as worker,
    ):
        for step in range(1, STEPS + 1):
            inputs, targets = batch(generator)
            loss = nn.functional.cross_entropy(worker.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say what it returns
            nn.utils.clip_grad_norm_(worker.model.parameters(), 1.0)
            receipt = worker.step(samples=len(inputs))
            if step % 50 == 0 and receipt is not None:
                print(f"step {step}, version {receipt.version}, loss {loss.item():.3f}")
        held_out = [batch(generator) for _ in range(10)]
        print(f"accuracy {worker.evaluate(held_out):.3f}")


if __name__ == "__main__":
    main()
