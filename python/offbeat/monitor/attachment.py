"""Where a monitor hears of a model's training: from our own trainers, and before each step of an optimizer.

Hooks hold it weakly: a monitor that nobody keeps hears no more.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offbeat import log, trained_by
from offbeat.local import lr_scale
from offbeat.local.every_step import with_closure
from offbeat.local.finite import not_finite
from offbeat.monitor import step_hook
from offbeat.monitor.buffer_guard import BufferGuard
from offbeat.monitor.gradients import Gradients
from offbeat.monitor.rising_rate import RisingRate

__all__ = ["Attachment"]

Keep = Callable[[], dict[str, Any]]
Bring = Callable[[Mapping[str, Any]], None]
JudgeStep = Callable[[torch.optim.Optimizer | None], bool]
Forget = Callable[[], None]
WasSet = Callable[[object, str], None]
IsLost = Callable[[], bool]


class Hear(Protocol):
    """Takes readings of the step under way, or of the one that was made last."""

    def __call__(self, readings: Mapping[str, Any], *, is_made: bool = False) -> None:
        """Take them."""


class Attachment:
    """Between a model and its monitor.

    Attributes:
        gradients: The model's.
        rising_rate: What looks at the rates of its optimizers.
        acts_on_updates: By what settings the monitor may change an update; empty where it may not.
        parts_members: Why its members would part where they share updates; empty where they would not.
        has_dropped: Whether it dropped those of the batch whose loss it heard last.
        wants: Names of the readings that the monitor judges.
        keeps_for: The class whose state it gives, as a user knows it.
    """

    keeps_for = "AsyncTrainingMonitor"
    acts_on_updates: Sequence[object] = ()
    parts_members = ""
    has_dropped = False
    wants: Collection[str] = ()

    def __init__(
        self,
        model: nn.Module,
        hear: Hear,
        judge_step: JudgeStep,
        *,
        forget: Forget,
        was_set: WasSet,
        is_lost: IsLost,
        keep: Keep,
        bring: Bring,
        scaler: Any,  # noqa: ANN401  torch has several classes of them
        rising_rate: RisingRate,
        is_measured: bool,
        may_drop: bool,
    ) -> None:
        """Attach.

        Args:
            model: Whose training it is.
            hear: The monitor's method that takes readings.
            judge_step: The monitor's method that is asked before a step, with the optimizer that is about to
                make it, if there is one here; False: its gradients are not to be used.
            forget: The monitor's method that hears that there is no such step.
            was_set: The monitor's method that hears of an attribute that a trainer has set anew.
            is_lost: The monitor's method that tells whether it has seen that parameters are not finite.
            keep: The monitor's method that gives its state.
            bring: The monitor's method that goes on from one.
            scaler: As `Gradients` takes it.
            rising_rate: What looks at the rates of its optimizers.
            is_measured: Likewise.
            may_drop: Whether gradients may turn out not to be used.
        """
        self._model = reference = weakref.ref(model)
        self._hear = weakref.WeakMethod(hear)
        self._judge_step = weakref.WeakMethod(judge_step)
        self._forget, self._was_set = weakref.WeakMethod(forget), weakref.WeakMethod(was_set)
        self._is_lost = weakref.WeakMethod(is_lost)
        self._keep, self._bring = weakref.WeakMethod(keep), weakref.WeakMethod(bring)
        self._is_judged = False
        self.rising_rate = rising_rate
        self.gradients = Gradients(
            model,
            scaler,
            is_measured=is_measured,
            are_gathered=lambda: _are_gathered(reference()),
            are_unscaled=lambda: _are_unscaled(reference()),
        )
        self._buffers = BufferGuard(model, scaler) if may_drop else None  # none once this is closed
        trained_by.watch(model, self)
        lr_scale.listen()  # before the hook in which "reduce_lr" may be taken
        step_hook.ask(self)

    def close(self) -> None:
        """Hear no more."""
        step_hook.ask_no_more(self)
        self.gradients.close()
        self._buffers = None
        if (model := self._model()) is not None:
            trained_by.unwatch(model, self)

    def are_shared(self) -> bool:
        """Whether updates of the model are the same in all members of a group: none may drop one alone."""
        model = self._model()
        trainers = [] if model is None else trained_by.trainers_of(model)
        return any(getattr(trainer, "shares_updates", False) for trainer in trainers)

    def are_averaged(self) -> bool:
        """Whether something averages the model with others', now or later, and tells what that shows."""
        model = self._model()
        trainers = [] if model is None else trained_by.trainers_of(model)
        return any(getattr(trainer, "tells_variance", False) for trainer in trainers)

    def is_lost_now(self) -> bool:
        """Whether parameters of the model are not finite; waits for the device."""
        model = self._model()
        return model is not None and bool(not_finite(model))

    @property
    def is_lost(self) -> bool:
        """Whether the monitor has seen that they are not, and knows of nothing that has mended them."""
        is_lost = self._is_lost()
        return is_lost is not None and is_lost()

    def told(self, readings: Mapping[str, Any]) -> None:
        """Hear what a trainer of ours knows."""
        if "loss" in readings:  # of another batch: what was judged before has stepped, or never will
            self._is_judged = self.has_dropped = False
        if (hear := self._hear()) is not None:
            hear(readings)

    def admits(self) -> bool:
        """Judge for a trainer of ours, which may have an optimizer here that steps right after."""
        self._is_judged = self._is_used(None)  # else no step follows
        return self._is_judged

    def skipped(self) -> None:
        """Hear of a step that a loss scale skips: of buffers its batch leaves no broken ones."""
        self._forget_gradients()
        if (buffers := self._buffers) is not None:
            buffers.mend()

    def went_back(self) -> None:
        """Hear that the model has the values of a checkpoint: what was kept of it is of others."""
        self._forget_gradients()
        self.gradients.resume(None)
        if (buffers := self._buffers) is not None:
            buffers.keep()

    def moves(self) -> None:
        """Hear that what moves the parameters next is no step: how far the last one moved them is kept."""
        self.gradients.resume(self.gradients.ratio_since())

    def moved(self) -> None:
        """Hear that a round is over: a batch that is dropped next is to leave what it has made of buffers."""
        if (buffers := self._buffers) is not None:
            buffers.look()
            buffers.keep()

    def averaged(self, readings: Mapping[str, Any]) -> None:
        """Hear what a round has shown. The step is made, and the gradient of the next is to come."""
        if (hear := self._hear()) is not None:
            hear(readings, is_made=True)
            self._forget_gradients()

    def look_for_skipped(self) -> None:
        """See whether a GradScaler has skipped a step of a user's loop, of which no hook hears."""
        if (buffers := self._buffers) is not None:
            buffers.look()

    def was_set(self, thing: object, name: str) -> None:
        """Hear that a trainer has set an attribute of a thing's."""
        if (was_set := self._was_set()) is not None:
            was_set(thing, name)

    def state_dict(self) -> dict[str, Any] | None:
        """Give the monitor's state, for the checkpoint of a run of the model."""
        keep = self._keep()
        return None if keep is None else keep()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Let the monitor go on from there, in a model that has its values back already."""
        if state is not None and (bring := self._bring()) is not None:
            bring(state)
            if (buffers := self._buffers) is not None:
                buffers.keep()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Judge before a step of any optimizer that has parameters of the model."""
        if hasattr(optimizer, "live") or not self._is_ours(optimizer):  # a worker's only stands for another
            return None
        if said := self.rising_rate.see(optimizer):
            log.warn(said)

        def judged(closure: Callable[[], Any]) -> Callable[[], Any]:  # what it steps by is computed in there
            def computed_and_judged() -> object:
                with lr_scale.as_set(optimizer):  # and behind it by what "reduce_lr" has made of it just now
                    loss = closure()
                    self._judge(optimizer)
                return loss

            return computed_and_judged

        changed = with_closure(args, kwargs, judged)
        if changed is None:
            self._judge(optimizer)
            lr_scale.arrange(optimizer)  # likewise
        return changed

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_judged:
            self._is_judged = False
        elif not self._is_used(optimizer):
            self.gradients.drop()

    def _is_used(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Ask the monitor; where the answer is no, buffers are as they were after the step before."""
        judge_step = self._judge_step()
        buffers = self._buffers
        is_skipped = buffers is not None and buffers.take_skip(optimizer)
        is_used = judge_step is None or judge_step(optimizer)
        self.has_dropped = not is_used
        if buffers is not None:
            buffers.settle(is_used=is_used, is_skipped=is_skipped)
        return is_used

    def _forget_gradients(self) -> None:
        if (forget := self._forget()) is not None:
            forget()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._model()
        if model is None:
            return False
        ours = {id(parameter) for parameter in model.parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])


def _are_gathered(model: nn.Module | None) -> bool:
    trainers = [] if model is None else trained_by.trainers_of(model)
    return any(
        getattr(trainer, "gathers_gradients", False) or getattr(trainer, "scaler", None) is not None
        for trainer in trainers
    )


def _are_unscaled(model: nn.Module | None) -> bool:
    # A `FaultTolerantTrainer` has a GradScaler in `train` alone; nothing else comes before its optimizer.
    trainers = [] if model is None else trained_by.trainers_of(model)
    return any(getattr(trainer, "is_training", False) for trainer in trainers)
