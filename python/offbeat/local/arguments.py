"""What every `train` is told of how long and by which loss, checked together."""

from offbeat.checks import Faults, at_least_one, functions

__all__ = ["faults_of_train", "of_autocast", "of_loss_fn"]


def of_loss_fn(loss_fn: object) -> list[str]:
    """Tell what is wrong with a loss function, before it is given a batch."""
    return functions("a function of (outputs, targets), such as nn.CrossEntropyLoss()", loss_fn=loss_fn)


def of_autocast(autocast: object) -> list[str]:
    """Tell what is wrong with what a forward pass is to run in."""
    if autocast is None or (hasattr(type(autocast), "__enter__") and hasattr(type(autocast), "__exit__")):
        return []
    return [f"autocast is {autocast!r:.100}: give torch.autocast(device_type, dtype), or leave it out"]


def faults_of_train(
    *, epochs: object, log_frequency: object, max_steps: object, loss_fn: object, progress: object
) -> Faults:
    """Tell what is wrong with these; a `max_steps` of None is no limit."""
    limit = {} if max_steps is None else {"max_steps": max_steps}
    faults = Faults(at_least_one(epochs=epochs, log_frequency=log_frequency, **limit))
    faults += of_loss_fn(loss_fn)
    if progress is not None and not isinstance(progress, bool):
        faults.append(f"progress is {progress!r:.100}: give True for a bar, False for nothing, or None")
    return faults
