"""What a method keeps of a fragment's parameters, through changes of which of them are trained."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offbeat.averaging.methods import Kept, Memory, Method
from offbeat.errors import ConfigError
from offbeat.local.flat import Flat, empty, pack, slices

__all__ = ["FragmentMemory"]


class FragmentMemory:
    """Flat memory, float32 at least, for what a method keeps of the parameters that are trained."""

    def __init__(self, method: Method, parameters: Sequence[nn.Parameter], *, is_begun: bool) -> None:
        """`is_begun`: the parameters are what all members have; else the first mean says what that is."""
        self._keeps = method.keeps
        self._parameters: list[nn.Parameter] = []
        self._flats: dict[Kept, Flat] = {kept: {} for kept in self._keeps}
        self._are_fresh: list[bool] = []
        self.fit(parameters)
        if is_begun:
            self._are_fresh = [False] * len(self._parameters)

    def fit(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep room for these parameters: of those that were there what is kept, of others nothing."""
        if [id(p) for p in parameters] == [id(p) for p in self._parameters]:
            return
        old = {id(p): number for number, p in enumerate(self._parameters)}
        for kept, before in self._flats.items():
            parts = slices(self._parameters, before)
            blank = [p if kept == "reference" else None for p in parameters]
            values = [
                parts[old[id(p)]] if id(p) in old else b for p, b in zip(parameters, blank, strict=True)
            ]
            self._flats[kept] = pack(parameters, values) if parameters else {}
        self._are_fresh = [id(p) not in old or self._are_fresh[old[id(p)]] for p in parameters]
        self._parameters = list(parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of what something is kept: of those that were trained when it was last needed."""
        return list(self._parameters)

    def begin_with(self, mean: Flat) -> None:
        """Take the members' mean for the reference of what there is none of yet."""
        if "reference" in self._flats and any(self._are_fresh):
            there = slices(self._parameters, self._flats["reference"])
            means = slices(self._parameters, mean)
            for reference, value, is_fresh in zip(there, means, self._are_fresh, strict=True):
                if is_fresh:
                    reference.copy_(value)
        self._are_fresh = [False] * len(self._parameters)

    def led_to(self, values: Flat) -> list[torch.Tensor]:
        """Give where rounds have led so far, by parameter: to the reference, and else to these values."""
        theirs = slices(self._parameters, values)
        if "reference" not in self._flats:
            return theirs
        parts = zip(self.parts("reference"), theirs, self._are_fresh, strict=True)
        return [value if is_fresh else reference for reference, value, is_fresh in parts]

    def begin_anew(self) -> None:
        """Keep nothing of before the next mean, as one that joins then."""
        self._are_fresh = [True] * len(self._parameters)
        for tensor in self._flats.get("velocity", {}).values():
            tensor.zero_()

    def of(self, dtype: torch.dtype) -> Memory:
        """Give what is kept of the parameters of a dtype."""
        return {kept: flat[dtype] for kept, flat in self._flats.items()}

    def parts(self, kept: Kept) -> list[torch.Tensor]:
        """Give what is kept, by parameter, as views."""
        return slices(self._parameters, self._flats[kept])

    def scale_velocity(self, factor: float) -> None:
        """Multiply it, if there is one."""
        for tensor in self._flats.get("velocity", {}).values():
            tensor.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Give copies of what is kept, by parameter."""
        state: dict[str, Any] = {
            kept: [part.clone() for part in slices(self._parameters, flat)]
            for kept, flat in self._flats.items()
        }
        return state | {"are_fresh": list(self._are_fresh)}

    @staticmethod
    def check(method: Method, parameters: Sequence[nn.Parameter], state: Mapping[str, Any]) -> None:
        """See that a state is of this method and these parameters.

        Raises:
            ConfigError: If it is not.
        """
        shapes = [list(p.shape) for p in parameters]
        for kept in method.keeps:
            theirs = [list(part.shape) for part in state.get(kept, ())]
            if theirs != shapes:
                raise ConfigError(
                    f"the state has a {kept} of {len(theirs)} tensors of other shapes than the {len(shapes)} "
                    f"parameters that are trained here: it is of another model or method"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check` has let pass, of the parameters that there is room for."""
        for kept in self._keeps:
            flat = empty(self._parameters) if self._parameters else {}
            for part, value in zip(slices(self._parameters, flat), state[kept], strict=True):
                part.copy_(value)
            self._flats[kept] = flat
        self._are_fresh = [bool(is_one) for is_one in state["are_fresh"]]
