"""From a plain loop of torch to asynchronous training in three lines, and the import.

    python examples/three_lines.py                                   # the plain loop
    offbeat launch --workers 2 examples/three_lines.py asynchronous  # the same in two processes that average

`plain` is a loop as it is in any tutorial, and knows nothing of Offbeat; `asynchronous` is that loop with
three more lines, and nothing else changed: each process trains on samples of its own at its own speed, and
their models are averaged behind the training. (`offbeat launch` starts a server, at which they meet, and the
processes, and tells each where the server is and which of them it is. Where processes are started in another
way, the first of them starts the server.)
"""

# pyright: reportUnknownMemberType=false
# torch does not say what its optimizers take and give.

import sys

import torch
from torch import nn

import offbeat

STEPS = 200


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(64, 20, generator=generator)
    return features, (features[:, :10].sum(1) > features[:, 10:].sum(1)).long()


def plain(model: nn.Module, generator: torch.Generator) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs, targets = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not say what it returns
        optimizer.step()


def asynchronous(model: nn.Module, generator: torch.Generator) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = offbeat.AsyncModelAverager(model, averaging_frequency=20, communication_backend="tcp")  # one
    for _ in range(STEPS):
        inputs, targets = batch(generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averager.step(samples=len(inputs))  # two
    averager.flush()  # three


def main() -> None:
    is_plain = sys.argv[1:] != ["asynchronous"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    (plain if is_plain else asynchronous)(model, torch.Generator().manual_seed(torch.seed()))
    inputs, targets = batch(torch.Generator().manual_seed(0))
    accuracy = (model(inputs).argmax(1) == targets).float().mean()
    print(f"{'plain' if is_plain else 'asynchronous'}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
