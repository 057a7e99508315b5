"""What the demo trains: two models, each with the settings that the single process and the workers share."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

__all__ = ["CNN", "MLP", "TASKS", "Task", "cnn", "mlp"]

NUM_CLASSES = 10
PIXELS = 28 * 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One model and how it is trained: SGD with momentum, the rate falling straight to 0 over all samples.

    Attributes:
        name: Short name.
        title: What it is, for people.
        build: Makes the module; from module level, so that another process can be told of it.
        lr: Learning rate of the first batch.
        momentum: SGD's.
        batch_size: Samples per batch and push.
        num_samples: Samples of the whole run, all workers together.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    lr: float
    momentum: float = 0.9
    batch_size: int = 64
    num_samples: int

    @property
    def log_frequency(self) -> int:
        """Steps between two points of a loss curve, such that it has some 150."""
        return max(5, self.num_samples // self.batch_size // 150)


def mlp() -> nn.Module:
    """Make a perceptron 784-256-128-10."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )


def cnn() -> nn.Module:
    """Make a convolutional network with BatchNorm, small enough for one core."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, NUM_CLASSES),
    )


# Both ways of training get the same rate. A single process could take 0.03 for the CNN too and end 0.4 points
# higher; four workers would then end 3 points below it. BatchNorm makes weights indifferent to their length:
# a rate too large for stale gradients blows them up at the begin, after which they hardly turn any more.
MLP = Task(name="mlp", title="MLP 784-256-128-10", build=mlp, lr=0.03, num_samples=480_000)
CNN = Task(name="cnn", title="CNN with BatchNorm", build=cnn, lr=0.01, num_samples=180_000)
TASKS = (MLP, CNN)
