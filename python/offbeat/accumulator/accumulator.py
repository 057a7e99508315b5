"""`AsyncGradientAccumulator`."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import distributed, nn

from offbeat import log, process, trained_by
from offbeat.accumulator import culprits, lateness
from offbeat.accumulator.adaptation import Adaptation
from offbeat.accumulator.kept_buffers import KeptBuffers
from offbeat.accumulator.members import Alone, Group, Members, Total
from offbeat.accumulator.meter import Meter
from offbeat.accumulator.pushes import PushedUpdates, worker_faults
from offbeat.accumulator.settings import (
    Normalizer,
    count_of,
    extra_faults,
    other_faults,
    settings_by_name,
    size_faults,
    steps_of,
)
from offbeat.accumulator.sizes import Sizes, others_of, warn_of_target, words_of_other
from offbeat.accumulator.state import check_model, check_state, tell_of_steps, total_of_state, total_state
from offbeat.accumulator.unflushed import Unflushed
from offbeat.accumulator.updates import LocalUpdates, Scaler, Updates, are_finite, kept_in
from offbeat.accumulator.window import Sum, Window
from offbeat.checks import Faults, refuse
from offbeat.errors import ClosedError, ConfigError, ConnectionLostError, NonFiniteError, StateError
from offbeat.forgotten import tell_at_end_of_block
from offbeat.local.arguments import of_autocast, of_loss_fn
from offbeat.local.batches import check_any, count, moved
from offbeat.local.device import usable_device
from offbeat.local.group import MAKE_A_GROUP, group_of
from offbeat.local.loss import LossFunction, LossReduction, check_loss, other_reduction, wake
from offbeat.local.lr_scale import factor_of
from offbeat.local.parameters import check_same, each_once, fingerprint, of_model
from offbeat.local.saved import bring_back_told, faults_of_state, state_told
from offbeat.naming import known_attributes, known_keywords
from offbeat.receipt import Receipt

if TYPE_CHECKING:
    from offbeat.worker import AsyncWorker

__all__ = ["AsyncGradientAccumulator", "Normalizer"]

T = TypeVar("T")

_TAKE_A_WORKER = "give worker= an AsyncWorker, which brings each window to a parameter server"
_THROUGH = (
    "This flush() was complete in all members all the same: it is not to be called again for it, where it "
    "would wait for the others' next one"
)
"""What to add to an error that `flush` raises in the end."""


@known_attributes
class AsyncGradientAccumulator:
    """Trains a model with the gradients of several micro-batches at a time, as of one large batch.

    Alone, an update is what one batch of all samples would give: exact for losses that are a mean or a sum
    over the batch, and models without batch statistics (BatchNorm sees micro-batches). With a process group
    of torch's (`offbeat.init_distributed("gloo")`) an update is of all members' micro-batches, weighted by
    their counts; all members start from the first one's model, and their parameters stay equal. Buffers, such
    as BatchNorm's running statistics, are each member's own until `flush`, which gives all their mean (of
    whole numbers, and of sparse ones, the first member's); what a batch that is not finite left there goes
    back to what was there before its window. The largest buffers, such as a table's, have no part in that
    where all together have more numbers than are trained, and than four million: copies would cost too much.
    One that became NaN or infinite is warned of.

    With ``overlap=True`` members reduce a window's sum while they work on the next window: its update is
    made at the end of that, one update late. Late updates bear less momentum and smaller learning rates: with
    a momentum m the largest stable rate is up to 2(1 + m)/(1 - m) times smaller (38 for 0.9, 2 without any),
    and a warning says so from 0.5 on. Lower both, or take ``overlap=False``: with that, and alone, an update
    is made at the end of its own window.

    What belongs to each update, such as clipping or a scheduler that steps, goes into hooks of the optimizer
    (`register_step_pre_hook`, `register_step_post_hook`): `flush` may make two updates, and those of members
    that have more to do. A monitor that clips or drops gradients belongs in every member, set alike.

    Members wait for one another at the ends of windows. One that raises within its window and goes no further
    leaves the others waiting until the process group's timeout (`init_distributed(timeout_s=)`), when they
    raise `ConnectionLostError`; one whose process ends is noticed at once.

    With ``adaptive_accumulation=True`` an update is of as many micro-batches as the gradient's noise is worth
    (the noise scale of McCandlish et al., 2018), or as it takes to hide communication behind computation,
    whichever is more: from 1 to what the sizes say, which it begins with. The learning rate that is set is
    taken for one of a single micro-batch of a single member; while the optimizer steps, and only then, it is
    multiplied by AdaScale's gain (Johnson et al., 2020) for SGD, and by its square root for optimizers that
    divide by what gradients were before. A rate is best set by a scheduler: of an optimizer whose own step
    sets it a warning tells, and one that makes its own, without an ``"lr"``, gets no gain. All members decide
    by the same sums, one update late. Alone, where one micro-batch is enough, each eighth update is of two,
    as of one alone no noise can be seen.

    With a `worker` each window is one push of the worker's: the accumulator owns accumulation, and the
    worker's `update_frequency` is 1. Whether a push travels behind the next window's work is the worker's
    affair (``AsyncWorker(in_flight=2)``), and so is the optimizer. Call `flush` before `worker.evaluate` or
    `worker.train`, which pull a newer model than a window was begun with.

    Args:
        model: An `nn.Module`, complete: its parameters are to stay the same objects. It is brought to
            `device` and trained in place. None: the worker's.
        accumulation_steps: Micro-batches per update and member.
        base_batch_size: Samples in a micro-batch. Where they are of another size (the last of an epoch may be
            shorter), that is warned of once: an update is of so many micro-batches, whatever is in them.
        target_batch_size: Samples in an update, of all members, rounded up to whole micro-batches; with
            `base_batch_size`, in place of `accumulation_steps`.
        overlap: Reduce behind the next window's work. Without others there is nothing to reduce.
        device: Where to train.
        loss_reduction: Whether `loss_fn` gives the ``"mean"`` over a batch or the ``"sum"``.
        normalizer: From a micro-batch's (inputs, targets) to the count that its loss is a mean over, where
            that is not its samples: tokens, or targets that are not ignored. With ``"sum"``: what the sum of
            all is divided by.
        adaptive_accumulation: Let the micro-batches per update follow what is measured.
        grad_scaler: A `torch.amp.GradScaler`, whose `scale`, `unscale_`, `step` and `update` are called here.
            Several accumulators may have the same one. An update whose gradient is not finite is skipped, in
            all members, and counted, where without a scaler it is a `NonFiniteError`. Hooks of the optimizer
            see unscaled gradients.
        worker: An `AsyncWorker` to push by.
        process_group: The members; None: torch's default group where there is one, else this process alone;
            False: alone, whatever there is.

    Attributes:
        model: The module.
        device: Where it is trained.
        updates: Made so far; with a worker, pushed.
        skipped_updates: Those that the scaler found to be not finite.

    Raises:
        ConfigError: Naming all settings that cannot be used; or if this is one of several processes, and
            there is no group of them.
        ModelMismatchError: If members hold different models.
        StateError: If members train different parameters, or what has to be the same for all is another.
        ConnectionLostError: If a member is lost while they meet.

    Example:
        >>> accumulator = offbeat.AsyncGradientAccumulator(nn.Linear(4, 2), accumulation_steps=2)
        >>> for _ in range(2):
        ...     loss = accumulator.train_step(
        ...         inputs=torch.ones(8, 4),
        ...         targets=torch.zeros(8, dtype=torch.long),
        ...         optimizer=offbeat.optim.SGD(lr=0.1),
        ...         loss_fn=nn.CrossEntropyLoss(),
        ...     )
        >>> accumulator.is_update_step(), accumulator.effective_batch_size
        (True, 16)
    """

    gathers_gradients = True
    """For `AsyncTrainingMonitor`: what its optimizer steps by is of several backwards, and measured then."""

    @property
    def shares_updates(self) -> bool:
        """Whether other members have the same parameters, and keep them so; for `AsyncTrainingMonitor`."""
        return self._members.size > 1

    @known_keywords
    def __init__(
        self,
        model: nn.Module | None = None,
        accumulation_steps: int | None = None,
        *,
        base_batch_size: int | None = None,
        target_batch_size: int | None = None,
        overlap: bool = True,
        device: str | torch.device = "cpu",
        loss_reduction: LossReduction = "mean",
        normalizer: Normalizer | None = None,
        adaptive_accumulation: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        worker: "AsyncWorker | None" = None,
        process_group: "distributed.ProcessGroup | Literal[False] | None" = None,
    ) -> None:
        sizes = accumulation_steps, base_batch_size, target_batch_size
        faults = Faults(size_faults(*sizes))
        where = faults.catch(lambda: usable_device(device))
        if worker is None:
            faults += of_model(model)
        else:
            faults += worker_faults(
                worker,
                model,
                where,
                overlap=overlap,
                adaptive_accumulation=adaptive_accumulation,
                process_group=process_group,
            )
            model, where = getattr(worker, "model", model), getattr(worker, "device", where)
            process_group = False
        faults += other_faults(overlap, loss_reduction, normalizer)
        faults += extra_faults(
            model, adaptive_accumulation, grad_scaler, reduction=loss_reduction, normalizer=normalizer
        )
        group = faults.catch(lambda: group_of(process_group, remedies=lambda: [MAKE_A_GROUP, _TAKE_A_WORKER]))
        refuse(faults)
        assert where is not None  # noqa: S101  else there is a fault
        assert model is not None  # noqa: S101
        size = 1 if group is None else distributed.get_world_size(group)
        refuse(trained_by.part_members(model) if size > 1 else [])
        self.model = model.to(where)
        self.device = where
        self.updates = self.skipped_updates = self._samples = 0
        self._most = steps_of(*sizes, size)
        self._sizes = Sizes(base_batch_size)
        self._target_batch_size = target_batch_size
        self._reduction: LossReduction = loss_reduction
        self._normalizer = normalizer
        self._named = each_once(model)
        self._parameters = [parameter for _, parameter in self._named]
        self._scaler = Scaler(grad_scaler, where)
        self._updates: Updates = (
            LocalUpdates(model, self._parameters, self._scaler)
            if worker is None
            else PushedUpdates(worker, self._parameters, self._scaler)
        )
        are_means = loss_reduction == "mean"
        is_divided = are_means or normalizer is not None
        most = self._most if adaptive_accumulation else None
        setting = settings_by_name(
            loss_reduction,
            normalizer,
            most,
            target=target_batch_size,
            overlap=overlap,
            has_scaler=self._scaler.is_there,
        )
        self._members: Members = (
            Alone()
            if group is None or size == 1
            else Group(
                group, self._named, dict(model.named_buffers()), is_divided=is_divided, setting=setting
            )
        )
        self._others = self._others_of(base_batch_size)
        self._window = Window(
            self._parameters,
            are_means=are_means,
            is_divided=is_divided,
            is_measured=adaptive_accumulation,
        )
        self._overlaps = overlap and self._members.size > 1
        self._meter = self._meter_of() if adaptive_accumulation else None
        self._is_under_way = False
        self._due: Total | None = None  # one that has come, and whose time has not
        self._was_update = self._is_broken = False
        self._has_warned = self._has_told_of_lateness = False
        self._unflushed = Unflushed()
        self._flushed: Literal["well", "raised"] | None = None  # and nothing was trained since
        self._is_closed = False
        self._origin = process.Origin(type(self).__name__)
        keeps_buffers = worker is None or worker.keeps_buffers  # else it puts them back itself
        self._buffers = KeptBuffers(model if keeps_buffers else None, are_late=self._overlaps)
        trained_by.register(model, self)
        self._tell_made(is_late=self._overlaps or (worker is not None and worker.in_flight > 1))

    @known_keywords
    def train_step(
        self,
        *,
        inputs: Any,  # noqa: ANN401  whatever the model takes
        targets: Any,  # noqa: ANN401  whatever the loss takes
        optimizer: object = None,
        loss_fn: LossFunction,
        autocast: AbstractContextManager[Any] | None = None,
    ) -> float:
        """Add a micro-batch, and make an update if it is time to.

        Args:
            inputs: What the model takes: a tensor, or a nest of them; brought to the device.
            targets: What the loss takes, likewise.
            optimizer: A spec of `offbeat.optim`, which becomes torch's optimizer; a class; or a live one. The
                same at each call, or its equal; may be left out after the first. With a worker: nothing, or
                ``worker.optimizer``.
            loss_fn: From (outputs, targets) to a scalar.
            autocast: What the model and the loss are computed in, such as
                ``torch.autocast("cpu", torch.bfloat16)``; the backward pass is outside. None: nothing.

        Returns:
            The loss of this micro-batch, as `loss_fn` gave it.

        Raises:
            ConfigError: If the optimizer, the batch (as one without a sample) or the loss cannot be used;
                nothing is added then. What is raised in the backward pass drops the window. Whatever is
                raised, a batch that was not finite leaves no NaN in buffers.
            StateError: If the model has other parameters than when this was made, or members' optimizers are
                set differently.
            NonFiniteError: If the update's gradient is NaN or infinite and there is no scaler, in all
                members; the window it is of is dropped, and buffers are as they were before it. With
                ``overlap=True`` they have seen the next one by then, and are so if they are not finite.
            ConnectionLostError: If a member is lost.
            ClosedError: After `close()`; nothing is trained.
            ForkedError: In a child that was forked since this was made, where there are others.
        """
        self._check_open()
        refuse(of_loss_fn(loss_fn) + of_autocast(autocast))
        samples = count(
            inputs, targets, instead="give inputs or targets whose first dimension is the batch's"
        )
        check_any(samples)
        self._updates.use(optimizer)
        counts = float(samples) if self._normalizer is None else count_of(self._normalizer(inputs, targets))
        if not self._window.batches:
            check_same(self._named, self.model)
            if self._is_under_way and not self._overlaps:
                self._catch_up()  # whose wait was broken off
            self._buffers.begin()
        try:
            self._warn_of_reduction(loss_fn)
            began_s = time.perf_counter()
            inputs, targets = moved(inputs, self.device), moved(targets, self.device)
            wake(self.model)
            with nullcontext() if autocast is None else autocast:
                loss = loss_fn(self.model(inputs), targets)
            check_loss(loss, owner=type(self).__name__)
            shown = loss.detach()
            if counts:  # a mean over nothing is NaN, and no sign of anything
                trained_by.tell(self.model, loss=shown if self._reduction == "mean" else shown / counts)
            self._was_update = False
            self._flushed = None
            return self._add(loss, counts=counts, samples=samples, began_s=began_s)
        except BaseException:  # as Ctrl-C, after which a notebook trains on
            self._buffers.put_back()  # of a window that is dropped, or of a batch that was not added
            raise

    def is_update_step(self) -> bool:
        """Tell whether the last call made an update."""
        return self._was_update

    @property
    def is_broken(self) -> bool:
        """Whether the last micro-batch is of no use, for the scaler will skip its update; for `AsyncTrainer`.

        Neither its loss is finite, nor what its window had gathered with it.
        """
        return self._is_broken

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer that makes the updates; None before the first step."""
        return self._updates.optimizer

    @property
    def receipt(self) -> Receipt | None:
        """With a worker, the newest receipt of its pushes that came in; else None."""
        return self._updates.receipt if isinstance(self._updates, PushedUpdates) else None

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update and member; with ``adaptive_accumulation``, at present."""
        return self._most if self._meter is None else self._meter.adaptation.steps

    @property
    def gain(self) -> float:
        """AdaScale's gain of the newest update: how many of one micro-batch it stands for."""
        return 1.0 if self._meter is None else self._meter.gain

    @property
    def noise_scale(self) -> float | None:
        """The gradient's noise scale, in samples or what `normalizer` counts: the batch that is large enough.

        None where it is not measured: without ``adaptive_accumulation``, and in its first updates. Infinite
        where all that is seen is noise.
        """
        return None if self._meter is None else self._meter.adaptation.noise_scale

    @property
    def effective_batch_size(self) -> int:
        """Samples in an update, of all members.

        Where `base_batch_size` was given, those of a whole window as it is at present: by that size, or,
        where micro-batches turned out to be of another, by the mean of this member's in its newest window.
        Else those of the newest update, 0 before the first.
        """
        usual = self._sizes.usual
        if usual is None:
            return self._samples
        others = usual * (self._members.size - 1) if self._others is None else self._others
        return round((usual + others) * self.accumulation_steps)

    def agree(self, value: object) -> bool:
        """Tell in all members whether a value, as JSON can have it, is the same in all.

        For `AsyncTrainer`; all call it, and no sum is under way.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._check_here()
        return self._members.is_alike(value)

    def gathered(self, value: T) -> list[T]:
        """Give what each member has for a value, as JSON can have it, by rank; as `agree` is called."""
        self._check_here()
        return self._members.gathered(value)

    def flush(self, *, optimizer: object = None) -> None:
        """Make the updates that are due: of a window that is not full, and of one that is under way.

        To be called by every member when its data is at its end: one that has more to do goes on, and those
        that have ended take part with nothing, so that the parameters of all stay equal. An update of others'
        windows alone that is NaN or infinite is dropped here as well, and warned of.

        Args:
            optimizer: As in `train_step`; needed by a member that had no data at all.

        Raises:
            ConfigError: If others make an update and there is no optimizer here. Nothing is lost by that:
                called again with one it goes on, and the others wait for it.
            StateError: As `train_step`.
            NonFiniteError: As `train_step`, of this member's last windows; all else has been done by then, in
                all members, and nothing is left to be flushed: called again, it waits for the others' next
                one.
            ConnectionLostError: As `train_step`.
            ClosedError: As `train_step`.
        """
        self._check_open()
        if optimizer is not None:
            self._updates.use(optimizer)
        self._tell_of_nothing_new()
        num_before = self.updates
        faults: list[NonFiniteError] = []
        if self._window.batches:
            with kept_in(faults):
                self._end_window()
        num_at_work = 1  # as far as is known: nobody is, where a `flush` before was broken off
        if self._is_under_way:
            with kept_in(faults):
                num_at_work = self._update()
        self._updates.end()
        self._buffers.forget()  # what is not finite from here on is of others' windows
        if self._members.size > 1:
            try:
                with self._members.telling():
                    self._end_together(num_at_work)
                trained_by.moved(self.model)
            except ConnectionLostError as error:
                if not faults:
                    raise
                what = str(faults[0]).partition(". This may be caught")[0]
                raise ConnectionLostError(f"{what}; that may have ended another member: {error}") from None
        self._unflushed.end()
        self._was_update = self.updates > num_before
        self._flushed = "raised" if faults else "well"
        if faults:  # not before the end: the others wait there for this member
            raise faults[0] if self._members.size == 1 else NonFiniteError(f"{faults[0]}. {_THROUGH}")

    def close(self) -> None:
        """Take part no more, and give back the members' own process group; the model stays usable.

        What is gathered, or under way, is made no update of: `flush` comes first, in all members. What would
        train after it is refused, alone as well: no other member would have it. May be called twice. A worker
        stays open, which is its owner's to close.
        """
        self._is_closed = True
        trained_by.unregister(self.model, self)
        self._unflushed.end()
        if self._origin.is_here:  # what a child has of the others is the parent's
            self._members.close()
        self._is_under_way, self._due = False, None  # its sum is nobody's now

    def __enter__(self) -> Self:
        """Use the accumulator in a `with` block, at whose end it is closed; it is not flushed there."""
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, and warn of what was gathered and not flushed."""
        tell_at_end_of_block(self._unflushed, error)
        self.close()

    def __repr__(self) -> str:
        """Say what it does."""
        members = self._members
        steps = f"{self.accumulation_steps} micro-batches"
        if self._meter is not None:
            steps += f" at present, at most {self._most}"
        return (
            f"<offbeat.AsyncGradientAccumulator {members.rank} of {members.size}, an update every {steps}"
            f"{', one window late' if self._overlaps else ''}, update {self.updates}"
            f"{', closed' if self._is_closed else ''}>"
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on, besides the model: a nest of plain values and tensors.

        It refers to live tensors, as torch's own states and the model's do: save it, or take `copy.deepcopy`
        of it, at once.

        What a window has gathered so far is in it, and so is the optimizer's state. A sum that is under way
        is waited for, and its update is still made when its time comes: others have to come to the end of
        that window, and each member has a state of its own.

        Raises:
            ConnectionLostError: If a member is lost.
            StateError: As `train_step`.
        """
        self._check_here()
        if self._is_under_way:
            self._wait()
        self._unflushed.end()  # it is to go on from here
        return {
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "was_update": self._was_update,
            "samples": self._samples,
            "samples_since_end": self._buffers.seen,
            "sizes": self._sizes.state_dict(),
            "size": self._members.size,
            "steps": self._most,
            "losses": self._losses_are(),
            "model": None if isinstance(self._updates, PushedUpdates) else fingerprint(self._named),
            "agreed": self._members.agreed(),
            "window": self._window.state_dict(),
            "window_scale": self._scaler.scale_of_window,
            "due": None if self._due is None else total_state(self._due),
            **state_told(self._updates.chosen if isinstance(self._updates, LocalUpdates) else None),
            "meter": None if self._meter is None else self._meter.state_dict(),
            "grad_scaler": self._scaler.state_dict(),
            "worker": True if isinstance(self._updates, PushedUpdates) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, optimizer: object = None) -> None:
        """Go on from a state, in a model that has its values back.

        It gets them after this was made: members of a group begin with the first one's, also in buffers such
        as BatchNorm's, of which each has its own until `flush`. What is gathered or under way here is
        dropped. With others, all call this in the same place, each with a state of the same update.

        Args:
            state: As `state_dict` gave it, of the same number of members.
            optimizer: As in `train_step`; needed where the state has an optimizer's, and there is none here.
                Its settings are the state's then; a warning tells those that were given otherwise.

        Raises:
            ConfigError: If the state does not fit, or there is no optimizer of its class for it; nothing is
                changed then.
            StateError: In all members, if the model of one is not that of its state, which changes nothing.
            ConnectionLostError: If a member is lost.
        """
        self._check_here()
        faults = check_state(state, self._parameters, size=self._members.size, losses=self._losses_are())
        updates, is_new = self._updates, False
        chosen = updates.chosen.trial() if isinstance(updates, LocalUpdates) else None
        if chosen is not None:
            is_new = chosen.live is None
            faults += faults_of_state(state, chosen, optimizer)
        parts = {
            "meter": ("adaptive_accumulation", self._meter is not None),
            "grad_scaler": ("grad_scaler", self._scaler.is_there),
            "worker": ("worker", isinstance(updates, PushedUpdates)),
        }
        for part, (keyword, is_here) in parts.items():
            if (state[part] is not None) != is_here:
                faults.append(
                    f"the state is of one {'without' if is_here else 'with'} {keyword}: make it so here"
                )
        refuse(faults)
        if self._is_under_way:
            self._wait()  # what members ask one another comes after it
        check_model(self._named, state, self._members)
        tell_of_steps(state, self._most, is_adaptive=self._meter is not None)
        if state["optimizer"] is not None and isinstance(updates, LocalUpdates) and chosen is not None:
            updates.chosen = chosen
            bring_back_told(chosen, state, is_new=is_new)
        self._members.agree(state["agreed"])
        self._due = None if state["due"] is None else total_of_state(state["due"], self._parameters)
        self._is_under_way = self._due is not None
        self._window.load_state_dict(state["window"])
        self._flushed = None
        self._unflushed.end()  # what it has is kept where it came from
        if self._meter is not None:
            self._meter.load_state_dict(state["meter"])
        if self._scaler.is_there:
            self._scaler.load_state_dict(state["grad_scaler"])
            self._scaler.begin_window(state.get("window_scale"))  # which older states do not have
        self.updates, self.skipped_updates = state["updates"], state["skipped_updates"]
        self._was_update = state["was_update"]
        self._samples = state["samples"]
        self._buffers.bring(state["samples_since_end"])
        self._sizes.load_state_dict(state["sizes"])
        if self._due is not None and not self._due.num_at_work:
            self._update()  # of a flush that was broken off: the others of that group wait no more

    # ------------------------------------------------------------------ inside

    def _meter_of(self) -> Meter:
        adaptation = Adaptation(
            most=self._most,
            num_members=self._members.size,
            overlaps=self._overlaps,
            decided=self._most,
        )
        return Meter(adaptation, self._members)

    def _check_here(self) -> None:
        if self._members.size > 1:  # else there is nobody to wait for
            self._origin.check()

    def _check_open(self) -> None:
        self._check_here()
        if self._is_closed:
            raise ClosedError(
                "this AsyncGradientAccumulator was closed, and takes part no more: make a new one, or go on "
                "alone with its model and optimizer"
            )

    def _losses_are(self) -> list[object]:
        """Give what a gathered sum means, as JSON can have it."""
        return [self._reduction, self._normalizer is not None]

    def _add(self, loss: torch.Tensor, *, counts: float, samples: int, began_s: float) -> float:
        """Add a micro-batch by its loss, and make an update if it is time to; give the loss as a number."""
        self._is_broken = False
        try:
            if not self._window.batches:
                self._scaler.begin_window()
            self._window.add(
                self._scaler.scaled(loss), counts=counts, samples=samples, unit=self._members.unit
            )
            value = float(loss.detach())
            self._buffers.seen += samples
            if counts:
                self._window.see(value)
                if not math.isfinite(value):  # and so, perhaps, what it left in buffers
                    self._is_broken = self._scaler.is_there and not are_finite(self._window.there)
                    self._buffers.put_back()
            if self._sizes.see(samples):
                steps, really = self.accumulation_steps, self.effective_batch_size
                whole = self._target_batch_size, self._members.size
                are_alike = self._others is None
                log.warn(
                    words_of_other(
                        self._sizes.told, samples, *whole, steps=steps, really=really, are_alike=are_alike
                    )
                )
            if self._meter is not None:
                self._meter.work(began_s)
            if self._window.batches >= self.accumulation_steps:
                self._end_window()
        finally:
            self._unflushed.note(self._window.batches, is_under_way=self._is_under_way)
        return value

    def _end_window(self) -> None:
        if self._is_under_way:
            self._wait()  # what breaks that off, as Ctrl-C does, costs nothing: the window is still there
        batches = self._window.batches
        own, scale = self._window.take(), self._scaler.end_window()
        self._sizes.end_window(own.samples, batches)
        if own.counts != 0 and own.is_empty:  # where nothing counts there is nothing to learn
            raise StateError(
                "no parameter has a gradient: the loss does not come from this model's parameters, or a hook "
                "on them has taken the gradients away, as one does that steps an optimizer in backward"
            )
        fault = None
        if self._is_under_way:
            try:
                self._catch_up()
            except NonFiniteError as error:  # of the window before; this one is to be sent all the same
                fault = error
        self._send(own, scale)
        self._buffers.end()
        del own  # what is sent is a copy
        if fault is not None:
            raise fault
        if not self._overlaps:
            self._update()

    def _send(self, own: Sum | None, scale: float) -> None:
        """Begin a sum, of nothing where this member has ended."""
        told = [scale if own is not None else 0.0] if self._scaler.is_there else []
        members = self._members
        self._warn_of_lateness()
        told += culprits.told(members.rank, members.size, is_finite=own is None or own.is_finite)
        if self._meter is not None:
            told += self._meter.told(own, scale)
        self._members.begin(own, self._settings(), told, rates=self._rates())
        self._is_under_way = True

    def _wait(self) -> Total:
        """Wait for the total that is under way; it stays so until its update is made."""
        if self._due is None:
            try:
                self._due = self._members.finish()
            except Exception:
                self._is_under_way = False  # it will never come
                raise
        return self._due

    def _update(self) -> int:
        """Wait for the total that is under way and step by it; give how many members had something to add."""
        total = self._wait()
        has_none = self._members.size > 1 and self._updates.own is None
        if total.num_at_work and has_none:  # the total stays until there is one
            raise ConfigError(
                "others make an update, and there is no optimizer here, where no data was: call "
                "flush(optimizer=...) with one that is set as theirs, as offbeat.optim.SGD(lr=...) or a live "
                "one; it goes on from here"
            )
        self._is_under_way, self._due = False, None
        scale, told = self._scaler.scale, list(total.told)
        if self._scaler.is_there:
            scale = told.pop(0) / max(total.num_at_work, 1)  # the same in all that are at work
        num = culprits.num_numbers(self._members.size)
        unfinite, told = culprits.culprits_in(told[:num]), told[num:]
        if self._meter is not None:
            self._meter.take(total, told, scale)
        if total.num_at_work:
            try:
                self._was_update = self._updates.make(
                    total.gradients,
                    number=self.updates + 1,
                    samples=total.samples,
                    scale=scale,
                    gain=self.gain,
                    whose=culprits.worded(unfinite, self._members.size),
                )
            except NonFiniteError:
                self._buffers.put_back(is_refused=True)
                raise
            if not self._was_update:
                self._buffers.put_back()
            self.updates += self._was_update
            is_any = any(gradient is not None for gradient in total.gradients)
            if is_any and self._scaler.has_skipped:  # of none it was not asked
                self.skipped_updates += 1
                trained_by.skipped(self.model)
            self._samples = total.samples
        return total.num_at_work

    def _settings(self) -> dict[str, object]:
        """Give what may change from update to update and has to be the same for all members, by name."""
        return {
            "updates": self.updates,
            "accumulation_steps": self.accumulation_steps if self._meter else None,
            "scale of grad_scaler": self._scaler.scale,
            "what monitors do": [] if self._members.size == 1 else trained_by.act_on_updates(self.model),
        }

    def _rates(self) -> list[float | None] | None:
        """Give the learning rates, which have to be the same in all members that have an optimizer."""
        live = None if self._members.size == 1 else self._updates.own
        if live is None:
            return None
        rates = [group.get("lr") for group in live.param_groups]
        return [None if rate is None else float(rate) * factor_of(live) for rate in rates]

    def _catch_up(self) -> None:
        """Do what the total under way leads to: an update, or the end of a `flush` that was broken off."""
        if not self._update():
            self._end_alike()
            trained_by.moved(self.model)

    def _end_together(self, num_at_work: int) -> None:
        """Take part with nothing until nobody has anything to add any more; then make buffers alike."""
        faults: list[NonFiniteError] = []
        while num_at_work:
            self._send(None, self._scaler.scale)
            num_faults = len(faults)
            with kept_in(faults):
                num_at_work = self._update()
            if faults and not num_faults:  # each of the others is told by its own errors
                log.warn(
                    f"{str(faults[0]).partition(',')[0]}, of a window that other members alone had: it is "
                    f"dropped in all of them, those raise a NonFiniteError, and nothing is changed"
                )
        self._end_alike()

    def _end_alike(self) -> None:
        """Make buffers alike, as all members do who have learnt in one sum that all have ended."""
        self._members.end(dict(self.model.named_buffers()), self._buffers.seen)
        self._buffers.seen = 0

    def _tell_of_nothing_new(self) -> None:
        """Say for what a flush waits that has nothing to add, as one that is called twice."""
        if self._members.size == 1 or self._flushed is None:
            return
        text = (
            "nothing was trained here since the last flush(), which was complete in all members: this one "
            "waits until the others call it again, too"
        )
        (log.warn if self._flushed == "raised" else log.info)(text)

    def _others_of(self, base: int | None) -> float | None:
        """Hear what others bring to an update for each micro-batch here, and tell what it is of in all."""
        brought = self._members.gathered((self._most, base))
        warn_of_target(self._target_batch_size, brought, self._members.rank)
        return others_of(brought, self._members.rank)

    def _tell_made(self, *, is_late: bool) -> None:
        late = "one window late, behind the next one's work" if is_late else "at the end of its window"
        at_most = "" if self._meter is None else "at most "
        log.info(
            "an update is of %s%d micro-batches of %d members, made %s",
            at_most, self._most, self._members.size, late,
        )  # fmt: skip

    def _warn_of_lateness(self) -> None:
        """Say once, and for all members, what it takes that updates are late."""
        live = self._updates.own
        if not self._overlaps or self._has_told_of_lateness or live is None:
            return
        self._has_told_of_lateness = True
        if self._members.rank == 0 and (warning := lateness.words_of(live)) is not None:
            log.warn(warning)

    def _warn_of_reduction(self, loss_fn: LossFunction) -> None:
        warning = other_reduction(loss_fn, self._reduction, owner=type(self).__name__)
        if warning is not None and not self._has_warned:
            self._has_warned = True
            log.warn(warning)
