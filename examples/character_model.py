"""A language model of characters, trained by asynchronous DiLoCo in processes that wait for nobody.

    python examples/character_model.py [FILE] [--workers 4] [--iterations 2000]

A GRU of one layer reads a text and guesses each next character. Each worker has a part of the text of its
own and trains on it with AdamW; every 50 iterations it brings what it has learnt to a parameter server,
which takes an outer step for each that arrives (delayed Nesterov), and goes on from there. The first worker
is three times as slow as the others, and holds up none of them.

The text is FILE; else the King James Bible, where Debian's package bible-kjv is installed; else what every
Python carries, the half a million characters of its own reference manual (pydoc_data). The last twentieth
of it is kept back to judge by. What comes out is in bits per character: 6 or 7 for characters by chance,
about 2 for words.
"""

import argparse
import math
import multiprocessing
import shutil
import subprocess
import threading
from pathlib import Path
from pydoc_data import topics

import torch
from torch import nn

import offbeat
from offbeat.averaging import DiLoCo

LENGTH = 64
"""Characters that the model reads before its gradients are taken."""
BATCH = 16
EVERY = 50
SLOWER = 3
"""So many times is the first worker slower than the others."""


def text_of(file: Path | None) -> tuple[str, str]:
    """Give a text, and say which one it is."""
    if file is not None:
        return file.read_text("utf-8", errors="replace"), str(file)
    if (bible := shutil.which("bible")) is not None:  # from bible-kjv, with bible-kjv-text
        command = [bible, "-f", "gen1:1-rev22:21"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  it is fixed
        return done.stdout, "the King James Bible, of Debian's bible-kjv"
    return "\n".join(topics.topics.values()), "Python's reference manual, of pydoc_data"


class CharacterModel(nn.Module):
    """Guesses the next character of each that it reads."""

    def __init__(self, num_characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """From characters ``[B, T]``, int64, to logits ``[B, T, num_characters]``, float32."""
        states, _ = self.memory(self.embedding(characters))
        guessed: torch.Tensor = self.guess(states)
        return guessed


def batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    runs = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return runs[:, :-1], runs[:, 1:]


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def bits(model: nn.Module, held_out: torch.Tensor) -> float:
    """Measure bits per character on what nobody has trained on."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [loss_fn(model(i), t) for i, t in (batch(held_out, generator) for _ in range(20))]
    return float(torch.stack(losses).mean()) / math.log(2)


def train(rank: int, address: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    text, _ = text_of(arguments.file)
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    coded = torch.tensor([numbers[character] for character in text])
    held_out = coded[-len(coded) // 20 :]
    share = (len(coded) - len(held_out)) // arguments.workers
    own = coded[rank * share : (rank + 1) * share]
    model = CharacterModel(len(characters), arguments.width)
    generator, never = torch.Generator().manual_seed(rank), threading.Event()
    with offbeat.AsyncModelAverager(
        model,
        arguments.workers,
        rank,
        averaging_frequency=EVERY,
        method=DiLoCo(lr=0.7),
        server_address=address,
        asynchronous=True,
    ) as averager:
        if rank == 0:
            print(f"before: {bits(model, held_out):.2f} bits per character", flush=True)
        for _ in range(arguments.iterations // (SLOWER if rank == 0 else 1)):
            inputs, targets = batch(own, generator)
            averager.train_step(
                inputs=inputs, targets=targets, optimizer=offbeat.optim.AdamW(lr=3e-3), loss_fn=loss_fn
            )
            if rank == 0:
                never.wait(arguments.iteration_ms * (SLOWER - 1) / 1e3)
        rounds = averager.averaging_round
        averager.flush()  # what is left is brought, and all end with the same model
        late = averager.receipt.staleness if averager.receipt is not None else 0
        print(f"worker {rank}: {averager.iterations} iterations, {rounds} outer steps, the last {late} late")
        if rank == 0:
            print(f"after: {bits(model, held_out):.2f} bits per character", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=2000, help="of each worker but the slow one")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--iteration-ms", type=float, default=10.0, help="that a fast one takes, about")
    arguments = parser.parse_args()
    text, name = text_of(arguments.file)
    print(f"text: {name}, {len(text)} characters")
    context = multiprocessing.get_context("spawn")
    with offbeat.ParameterServer(transaction="model") as server:
        workers = [
            context.Process(target=train, args=(rank, server.address, arguments))
            for rank in range(arguments.workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        version = server.status()["version"]
    print(f"{version} outer steps in all")
    if any(worker.exitcode for worker in workers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
