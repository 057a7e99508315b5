"""A module that an `AsyncModelAverager` averages with others', batch by batch."""

from dataclasses import replace
from typing import Any

import torch

from offbeat import log
from offbeat.averaging import AsyncModelAverager
from offbeat.averaging.loaded import GONE_ON
from offbeat.checks import Faults
from offbeat.errors import ConnectionLostError
from offbeat.module.table import unwrap
from offbeat.recovery.local import Local
from offbeat.recovery.trainee import Stepped

__all__ = ["Averaged", "Patience"]


class Patience:
    """How long a save is put off for a round that is under way: until none is, or the next one is."""

    def __init__(self) -> None:
        self._since: int | None = None

    def is_over(self, *, is_under_way: bool, number: int) -> bool:
        """Whether to save now.

        Args:
            is_under_way: Whether a round is.
            number: Of rounds that were ended.
        """
        if not is_under_way:
            return True
        if self._since is None:
            self._since = number
        return number != self._since  # it begins anew with another strategy


class Averaged(Local):
    """The loop of a module, and an averager that is told of each step of the optimizer.

    A state is taken where no round is under way, or has just begun, and ends none: a run that is saved has
    the bits of one that is not, and waits for nobody. Of a round under way the next life begins another.
    """

    owner: str | None = None

    def __init__(self, averager: AsyncModelAverager, **local: Any) -> None:  # noqa: ANN401  as `Local` has them
        super().__init__(averager.model, **local)
        self._averager = averager
        self._patience = Patience()

    def step(self, batch: object, epoch: int) -> Stepped:
        """Make a step; average if it is time to. One that a loss scale skips is none for the averager either.

        One whose gradients a monitor dropped is: a member with many of these would keep the others waiting.
        """
        del epoch
        done = self.stepped(batch)
        if done.steps:
            needs_loss = self._averager.goes_by_loss
            loss = float(done.loss) if needs_loss else None
            try:
                self._averager.step(done.samples, loss=loss, optimizer=self.optimizer)
            except ConnectionLostError as error:
                done = replace(done, lost=error)
        self.optimizer.zero_grad()  # which the averager may have measured
        return done

    @property
    def is_settled(self) -> bool:
        """Whether no round is under way; where one always is, the next one has just begun."""
        averager = self._averager
        return self._patience.is_over(is_under_way=averager.is_under_way, number=averager.averaging_round)

    @property
    def is_about_to_settle(self) -> bool:
        """Whether a round is under way of this member alone."""
        return self._averager.is_under_way and self._averager.is_alone

    @property
    def stands_alone(self) -> bool:
        """It does: others' losses are theirs."""
        return True

    @property
    def meets_at_server(self) -> bool:
        """Whether members do."""
        return self._averager.is_at_server

    @property
    def hosts_server(self) -> bool:
        """Whether the averager does."""
        return self._averager.hosts_server

    def bring(self) -> None:
        """Average what is left."""
        self._averager.bring()

    def end(self) -> int:
        """Average what is left, together with the others; losing their server costs no model."""
        try:
            self._averager.flush()
        except ConnectionLostError as error:
            if not self._averager.has_lost_server:
                raise
            log.warn(str(error))
        return 0

    def version(self, steps: int) -> int:
        """Rounds of averaging."""
        del steps
        return self._averager.averaging_round

    def agree(self, value: object) -> bool:
        """Ask the others, where they are a process group; at a server members are on their own."""
        return self._averager.agree(value)

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the loop and the averager's."""
        own = self._averager.state_of_now() | {"optimizer": None}
        self._patience = Patience()
        return super().state_dict() | {"averager": own}

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word what differs of the loop, or of the averager."""
        if found := super().differences(state):
            return found
        faults = Faults()
        faults.catch(lambda: self._averager.check_state(state["averager"]))
        return faults

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state; of the model, where others have gone on meanwhile, what they do not have."""
        if self._averager.is_under_way:  # of a `train` in this process that broke off
            self._averager.give_up()
        others = self._of_others()
        if any(not torch.equal(value.cpu(), state["model"][name]) for name, value in others.items()):
            log.announce(GONE_ON)
        self.load_model(state | {"model": state["model"] | others})
        self.load_rest(state)
        self._averager.load_state_dict(state["averager"], strict=False)

    def _of_others(self) -> dict[str, torch.Tensor]:
        """Give those of the model's values that others have made meanwhile; none where nobody has."""
        if not self._averager.has_joined_others:
            return {}
        shared = {id(tensor) for tensor in self._averager.shared}
        own = unwrap(self.module).state_dict(keep_vars=True)
        return {name: value.detach() for name, value in own.items() if id(value) in shared}

    def _classes(self) -> dict[str, str | None]:
        return super()._classes() | {"wrapper": type(self._averager).__name__}
