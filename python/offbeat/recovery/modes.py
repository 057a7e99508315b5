"""Which parameters of a module are trained, and which of its modules are in training mode.

A callback may change both in the middle of a run, as where a backbone is unfrozen after two epochs, and no
`state_dict` has them.
"""

from torch import nn

from offbeat.module.table import unwrap

__all__ = ["Modes", "modes_of", "overlaid", "set_modes", "words_of_others"]

Modes = dict[str, dict[str, bool]]
"""By "requires_grad" and "training", then by the name of a parameter or a module."""


def modes_of(module: nn.Module) -> Modes:
    """Give a module's modes as they are."""
    plain = unwrap(module)
    return {
        "requires_grad": {name: p.requires_grad for name, p in plain.named_parameters()},
        "training": {name: part.training for name, part in plain.named_modules()},
    }


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Bring them back; what has a name that is not among them stays."""
    plain = unwrap(module)
    for name, parameter in plain.named_parameters():
        wanted = modes["requires_grad"].get(name, parameter.requires_grad)
        if wanted != parameter.requires_grad:
            parameter.requires_grad_(wanted)
    for name, part in plain.named_modules():
        part.training = modes["training"].get(name, part.training)


def overlaid(saved: Modes, left: Modes, now: Modes) -> Modes:
    """Give saved modes, and in their place those that were changed after a module was left in some.

    Args:
        saved: In a checkpoint.
        left: As the module was left.
        now: As it is.
    """
    return {
        kind: there | {name: on for name, on in now[kind].items() if on != left[kind].get(name)}
        for kind, there in saved.items()
    }


def words_of_others(own: Modes, began: Modes, now: Modes) -> list[str]:
    """Word where parameters are neither trained as when a run began nor as it has it now.

    Args:
        own: As given here.
        began: As the run began.
        now: As the checkpoint has it.
    """
    others = [
        name
        for name, on in own["requires_grad"].items()
        if on not in (began["requires_grad"].get(name, on), now["requires_grad"].get(name, on))
    ]
    if not others:
        return []
    on = own["requires_grad"][others[0]]
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [f"requires_grad of {others[0]!r}{more} is {on}, and the checkpoint's run began with {not on}"]
