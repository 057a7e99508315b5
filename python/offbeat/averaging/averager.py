"""`AsyncModelAverager`."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import distributed, nn
from torch.utils.data import Dataset

from offbeat import log, process, trained_by
from offbeat.averaging.arrivals import Arrivals
from offbeat.averaging.gauge import Gauge
from offbeat.averaging.meeting import Meeting
from offbeat.averaging.methods import Method, as_method
from offbeat.averaging.pace import AdaptationMetric, Adaptive, Seconds
from offbeat.averaging.served import Served
from offbeat.averaging.settings import (
    AveragingPolicy,
    Backend,
    Pacing,
    asynchronous_faults,
    changed,
    fitting_faults,
    overlap_faults,
    pacing,
    server_faults,
)
from offbeat.averaging.state import faults_of, state_of, take_up
from offbeat.averaging.statistics import Statistics
from offbeat.averaging.timing import Timing
from offbeat.averaging.turns import Turns, setting_of
from offbeat.checks import Faults, is_count, is_scalar, refuse
from offbeat.errors import ClosedError, ConfigError
from offbeat.forgotten import tell_at_end_of_block
from offbeat.local.arguments import of_autocast, of_loss_fn
from offbeat.local.batches import check_any, count, moved
from offbeat.local.device import usable_device
from offbeat.local.evaluate import evaluate
from offbeat.local.loss import LossFunction, check_loss, wake
from offbeat.local.parameters import each_once, of_model
from offbeat.metrics import Metric
from offbeat.module import shared_memory
from offbeat.naming import known_attributes, known_keywords

if TYPE_CHECKING:
    from offbeat.receipt import Receipt

__all__ = ["AsyncModelAverager"]

EVALUATION_BATCH = 256
"""Samples at a time, of a dataset that is given without a loader."""


@known_attributes
class AsyncModelAverager:
    """Trains a model apart from others and averages it with theirs now and then, behind the training.

    Each member trains on data of its own, at its own speed. Every so often it takes its model as it is, and
    while it goes on, the members' mean is computed, weighted by the samples each has had since the last time.
    What the mean is away from what was taken is then added to the model, so that nothing is lost that was
    learnt meanwhile; `method` may make more of the mean than that. Optimizers, with their states, are each
    member's own; so are buffers, but for BatchNorm's statistics, which are averaged with the parameters.

    All begin with the first member's model. A member whose data is at its end calls `flush`, after which all
    models are alike; those that end earlier take part with nothing until the last has ended. A member whose
    parameters are not finite adds nothing to a round and takes over the others' mean, with a warning, and
    what its optimizer kept that is not finite is forgotten. Where no member's are finite it is an error.

    `close`, or a `with` block, gives back the connections that members have of their own.

    Args:
        model: An `nn.Module`, complete: its parameters are to stay the same objects. It is brought to
            `device` and trained in place.
        world_size: How many members there are; None: as the environment says (see `init_distributed`).
        rank: Which this is; None likewise. Data is shared out by these two as they are given, or as
            `init_distributed` returns them: at a server the attribute `world_size` may be less than `rank`.
        averaging_frequency: Iterations from average to average; or a time, as ``"30s"``, which
            ``averaging_policy="time"`` needs. None: 100 iterations, brought within the bounds, or 30 s.
        averaging_policy: ``"iteration"``, ``"time"``, which counts from the end of an average to the
            beginning of the next, or ``"adaptive"``, which begins with `averaging_frequency` and then goes by
            `adaptation_metric`, within the two bounds.
        min_averaging_frequency: Least iterations from average to average, with ``"adaptive"``. None: a
            quarter of `averaging_frequency`.
        max_averaging_frequency: Most of them. None: four times `averaging_frequency`.
        adaptation_metric: What ``"adaptive"`` goes by: where it rises, members average more often.
            ``"loss_variance"``: of the losses since the last average, over their mean, as in AdaComm's rule;
            ``"gradient_norm"``, of the last step;
            ``"parameter_variance"``: how far members have drifted apart, as FDA has it; or a function that is
            given this averager at each round and gives a number, 0 or more, taken for a variance. Members of
            a process group go by the mean over all of them; with ``"tcp"`` each goes by its own, so that
            frequencies can differ, up to the bounds, and whoever averages more often waits for the others.
        communication_backend: ``"tcp"``: members meet at an Offbeat server, and may come, go and die without
            stopping the others; losing it pauses averaging, not training. ``"gloo"`` or ``"nccl"``: torch's
            process group, the default one, which is made if there is none. None: ``"tcp"`` with
            `server_address`, else the group that there is. Where there is none, a process by itself is alone;
            one of several, as torchrun and `offbeat launch` start them, is refused: with ``"tcp"`` these meet
            at the server that `server_address` is about, also where that is not given.
        device: Where to train.
        method: What is made of the mean: ``"average"``, ``"easgd"``, ``"diloco"``, ``"slowmo"`` or
            ``"bmuf"``, or an object such as ``offbeat.averaging.DiLoCo(lr=0.7)``. With ``"gossip"`` members
            of a process group meet in twos instead, as equals, and wait for nobody but whom they meet; all of
            them meet in `flush`. With ``"tcp"`` it is refused.
        overlap: When a round ends: True: after the iteration in which the others' models have come, and
            before the next round begins; a number: so many iterations after it began, waiting if need be,
            which makes a run in a process group repeatable (a server adds in the order of arrival); False:
            where it began, as synchronous training does.
        process_group: The members, in place of torch's default group; False: alone, whatever there is.
        server_address: The server's "HOST:PORT", with ``"tcp"``, as `offbeat server` says it. None:
            ``OFFBEAT_SERVER``; else one that rank 0 starts, and that ends with it, at ``MASTER_ADDR`` and
            ``MASTER_PORT``, or at a free port there under torchrun, which listens at that one itself.
        token: The server's. None: ``OFFBEAT_TOKEN``, or none.
        asynchronous: With ``"diloco"`` and ``"tcp"``: nobody waits for anybody. A member that has done its
            iterations brings its way to the server, which takes the outer step for each that arrives
            (delayed Nesterov: Liu et al., 2024), and goes on from the outer parameters as they are by then.
            A server that is given has to have ``transaction="model"``; the one that rank 0 starts has it.
            ``averaging_policy="time"`` gives each member iterations in proportion to its speed, which keeps
            arrivals fresh (their dynamic local updates).

    Raises:
        ConfigError: Naming all settings that cannot be used; or if this is one of several processes, and
            there is no group of them.
        ModelMismatchError: If members hold different models.
        StateError: If members are set differently, the process group is another one than is asked for, or
            this process is that member at the server already: one server is for one model.
        ConnectError: If a process group was to be made, and the others did not come.
        ConnectionLostError: If a member is lost while they meet.

    Example:
        >>> averager = offbeat.AsyncModelAverager(nn.Linear(4, 2), averaging_frequency=10)
        >>> for _ in range(25):
        ...     loss = averager.train_step(
        ...         inputs=torch.ones(8, 4),
        ...         targets=torch.zeros(8, dtype=torch.long),
        ...         optimizer=offbeat.optim.SGD(lr=0.1),
        ...         loss_fn=nn.CrossEntropyLoss(),
        ...     )
        >>> averager.averaging_round, averager.last_averaging_iteration
        (2, 5)
    """

    @known_keywords
    def __init__(  # noqa: PLR0917  all that say which member this is, how often it averages and where
        self,
        model: nn.Module,
        world_size: int | None = None,
        rank: int | None = None,
        averaging_frequency: int | str | None = None,
        averaging_policy: AveragingPolicy = "iteration",
        min_averaging_frequency: int | None = None,
        max_averaging_frequency: int | None = None,
        adaptation_metric: AdaptationMetric = "loss_variance",
        communication_backend: Backend | None = None,
        device: str | torch.device = "cpu",
        *,
        method: str | Method = "average",
        overlap: bool | int = True,
        process_group: "distributed.ProcessGroup | Literal[False] | None" = None,
        server_address: str | None = None,
        token: str | None = None,
        asynchronous: bool = False,
    ) -> None:
        faults = Faults(of_model(model))
        given = Pacing(
            averaging_frequency,
            averaging_policy,
            min_averaging_frequency,
            max_averaging_frequency,
            adaptation_metric,
        )
        pace, wrong = pacing(given)
        faults += wrong + overlap_faults(overlap)
        where = faults.catch(lambda: usable_device(device))
        how = faults.catch(lambda: as_method(method))
        if not faults:
            named = each_once(model)
            faults += fitting_faults(how, pace, overlap, len(named))
            # One memory under two Parameters would be given each round's way twice.
            faults += [f"model's parameters {fault}" for fault in shared_memory(named)]
        faults += asynchronous_faults(asynchronous, how)
        meeting = Meeting(
            communication_backend,
            process_group,
            server_address,
            token,
            rank,
            world_size,
            is_asynchronous=bool(asynchronous),
        )
        faults += meeting.faults(how, has_others=bool(faults))
        refuse(faults)
        assert where is not None  # noqa: S101  else there is a fault
        assert how is not None  # noqa: S101
        assert pace is not None  # noqa: S101
        self.model = model.to(where)
        self.device = where
        timing = Timing(pace, overlap)
        gauge = Gauge(adaptation_metric if isinstance(pace, Adaptive) else None)
        joined = meeting.join(self.model, each_once(self.model), how, pace, setting=setting_of(timing, gauge))
        self.rank, self._server = joined.rank, joined.server
        self._turns = Turns(self.model, joined, how, timing, gauge, is_guided=bool(asynchronous))
        self._loss_fn: LossFunction | None = None
        self._is_closed = False
        self._origin = process.Origin(type(self).__name__)
        trained_by.register(model, self)
        log.info("%r", self)
        members = self._turns.members
        if isinstance(members, Served) and members.name != f"worker-{self.rank}":
            log.announce(f"this averager, of rank {self.rank}, is {members.name} at the server")

    # ------------------------------------------------------------------ training

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
        """Train on a batch; average if it is time to. Gradients are zeroed before, and stay afterwards.

        Args:
            inputs: What the model takes: a tensor, or a nest of them; brought to the device.
            targets: What the loss takes, likewise.
            optimizer: A spec of `offbeat.optim`, which becomes torch's optimizer; a class; or a live one. The
                same at each call, or its equal; may be left out after the first.
            loss_fn: From (outputs, targets) to a scalar.
            autocast: What the model and the loss are computed in, such as
                ``torch.autocast("cpu", torch.bfloat16)``; the backward pass is outside. None: nothing.

        Returns:
            The loss of this batch.

        Raises:
            ConfigError: If the optimizer, the batch or the loss cannot be used. A batch without a sample is
                refused before anything is trained.
            StateError: If the model has other parameters than when this was made, or members average
                differently.
            NonFiniteError: If it was to be averaged, and no member's parameters are finite.
            ConnectionLostError: If a member is lost.
            ClosedError: After `close()`; nothing is trained.
            ForkedError: In a child that was forked since this was made, where there are others.
        """
        self._check_open()
        refuse(of_loss_fn(loss_fn) + of_autocast(autocast))
        samples = count(inputs, targets)
        check_any(samples)
        live = self._turns.optimizer.use(optimizer)
        inputs, targets = moved(inputs, self.device), moved(targets, self.device)
        wake(self.model)
        self._turns.untrained.train()
        live.zero_grad()
        with nullcontext() if autocast is None else autocast:
            loss = loss_fn(self.model(inputs), targets)
        check_loss(loss, owner=None)
        trained_by.tell(self.model, loss=loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        live.step()
        self._loss_fn = loss_fn
        value = float(loss.detach())
        self.step(samples, loss=value)
        return value

    def step(self, samples: int, *, loss: float | None = None, optimizer: object = None) -> None:
        """Count an iteration of a loop of one's own, after its ``optimizer.step()``; average if it is time.

        Args:
            samples: In the batch, 1 or more; weights what this member adds.
            loss: Of the batch; needed where the pace goes by ``"loss_variance"``.
            optimizer: The live optimizer that has stepped, for ``"slowmo"``, whose velocity follows the
                learning rate, and for `state_dict`; may be left out after the first call.

        Raises:
            ConfigError: If a value cannot be used, or is missing.
            StateError: As `train_step`.
            NonFiniteError: As `train_step`.
            ConnectionLostError: As `train_step`.
            ClosedError: As `train_step`.
        """
        self._check_open()
        faults = (
            [] if is_count(samples, least=1) else [f"samples is {samples!r}: give a whole number, 1 or more"]
        )
        if self.goes_by_loss and loss is None:
            faults.append('loss is missing, and adaptation_metric is "loss_variance": give the batch\'s loss')
        if loss is not None and not is_scalar(loss):
            faults.append(f"loss is {loss!r}: give the batch's loss, a number or a tensor of one")
        refuse(faults)
        if optimizer is not None:
            self._turns.optimizer.use(optimizer, steps_here=False)
        self._turns.advance(self, samples, loss if self.goes_by_loss else None)

    def flush(self) -> None:
        """End together: average what is left, and leave the same model in all members.

        To be called by every member when its data is at its end. It waits until all have called it, taking
        part with nothing in the rounds of those that have more to do. Training may go on afterwards.

        At a server one that has just come, and was in no round yet, is waited for 10 s, once, and in all no
        longer than 20 s, whoever comes meanwhile; a warning tells of it where this ends without it.

        At a server that was started again without its run, and so knows nobody of before, as many as were in
        the newest round are waited for up to a minute; a warning tells how many this ends with, if not all.
        Where a server is lost in this call, the one that is there in its place is met once.

        With ``"gossip"``, whose members hold different models until then, they go on meeting in twos while
        others have more to do, and then all go to the mean of all, which is each one's equal part.

        Raises:
            StateError: As `train_step`.
            NonFiniteError: As `train_step`.
            ConnectionLostError: If a member is lost, or does not call this; with ``"tcp"`` if the server is
                away. The model is then as this member has it: it may train on, and call this again.
            ClosedError: As `train_step`.
        """
        self._check_open()
        self._turns.flush(self)

    def flush_to_go_on(self) -> None:
        """As `flush`, by members that go on in another way, and wait for nobody who was in no round yet.

        For `AsyncTrainer`.
        """
        self._check_open()
        self._turns.flush(self, lingers=False)

    def bring(self) -> None:
        """Average what is left, so that a `flush` only waits for the others' end, if their server is there.

        For `FaultTolerantTrainer`, which saves in between.
        """
        self._check_open()
        self._turns.bring(self)

    def close(self) -> None:
        """Take part no more, and give back the members' own connections; the model stays usable.

        What would train or average after it, which no other member would have, is refused. May be called
        twice. Not to be called while other members have more to do: `flush` comes first. What comes of a
        round under way is not added here. Its other members still have what this one has said in it: in a
        process group they are waited for, for a few seconds, and where they have not come to it by then the
        connections stay open behind until they have, or the process ends. A server that rank 0 has started is
        stopped once all members have said goodbye, or after half a minute, which one that was killed takes.
        """
        self.end_by(None)

    def end_by(self, failure: BaseException | None) -> None:
        """Close, as `close` does; where it is a failure by which this ends, a server hears that it has left.

        Args:
            failure: None, and a `SystemExit` of code 0, are none.
        """
        self._is_closed = True
        trained_by.unregister(self.model, self)
        self.give_up()
        if not self._origin.is_here:  # what a child has of the others is the parent's
            return
        self._turns.members.end_by(failure)
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def __enter__(self) -> Self:
        """Use the averager in a `with` block, at whose end it is closed; it is not flushed there."""
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, by an exception perhaps; else warn of what was trained and not flushed."""
        tell_at_end_of_block(self._turns.unshared, error)
        self.end_by(error)

    # ------------------------------------------------------------------ what is known

    @property
    def world_size(self) -> int:
        """How many members there are; at a server, how many were in the newest round.

        So it changes as members come and go, and is no number to share out data by.
        """
        return self._turns.members.size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer; None before the first step."""
        return self._turns.optimizer.live

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and not ended; a state taken now would end it."""
        return self._turns.rounds.is_under_way

    @property
    def has_joined_others(self) -> bool:
        """Whether the model that this member began with is what others have made at a server.

        For `FaultTolerantTrainer`, which then keeps that model and not its checkpoint's.
        """
        return self._turns.members.has_gone_on

    @property
    def shared(self) -> list[torch.Tensor]:
        """What members have in common: the parameters, and BatchNorm's statistics; all else is their own.

        For `FaultTolerantTrainer`, which brings a member's own back.
        """
        return [*(parameter for _, parameter in self._turns.named), *Statistics(self.model).buffers()]

    @property
    def tells_variance(self) -> bool:
        """Whether it tells how far members were from their mean; for `AsyncTrainingMonitor`."""
        return not (self.is_alone or self._turns.members.arrives_alone)

    @property
    def is_alone(self) -> bool:
        """Whether there can be no others."""
        return self._turns.members.is_alone

    @property
    def is_at_server(self) -> bool:
        """Whether members meet at a server, where each comes and goes, but for its host."""
        return isinstance(self._turns.members, Served)

    @property
    def hosts_server(self) -> bool:
        """Whether that is this process's: where it goes the others have none."""
        return self._server is not None

    @property
    def has_lost_server(self) -> bool:
        """Whether members meet at a server, and the newest round that has ended could not reach it."""
        return self._turns.members.away is not None

    @property
    def goes_by_loss(self) -> bool:
        """Whether `step` needs the batch's loss. For `FaultTolerantTrainer`'s own loop."""
        return self._turns.gauge.needs_losses

    def agree(self, value: object) -> bool:
        """Tell in all members at once whether a value, as JSON can have it, is the same in all of them.

        To be called by all members, where no round is under way. At a server nobody is asked: True. For
        `FaultTolerantTrainer`, whose members ask one another whether all have a checkpoint, or are done.
        """
        self._check_here()
        return self._turns.members.is_alike(value)

    def give_up(self) -> None:
        """Take no notice of what comes of the round under way: the others are gone, or this member goes.

        For `FaultTolerantTrainer` and `AsyncTrainer`; who is done with an averager calls `close`.
        """
        self._turns.drop()

    @property
    def iterations(self) -> int:
        """Iterations since the start."""
        return self._turns.course.iterations

    @property
    def averaging_round(self) -> int:
        """Rounds of averaging that have changed this model."""
        return self._turns.course.rounds

    @property
    def last_averaging_iteration(self) -> int:
        """Iterations since this model was averaged last, or since the start."""
        return self._turns.course.since_average

    @property
    def averaging_frequency(self) -> int | float:
        """Iterations from average to average, at present; seconds, with ``averaging_policy="time"``.

        May be set in all members, to what the constructor takes, and is followed as `method` is: a number
        within the bounds with ``"adaptive"``, which then begins anew from there, and with ``"time"`` no
        longer than at first, for so long a round waits for others. What `method` has kept stays.
        """
        return self._turns.timing.pace.every

    @averaging_frequency.setter
    def averaging_frequency(self, given: int | str) -> None:
        self._check_open()
        timing = self._turns.timing
        pace = changed(timing.pace, given, longest=self._turns.longest)
        refuse(fitting_faults(self.method, pace, timing.wished_overlap, len(self._turns.named)))
        timing.ask(pace=pace)

    @property
    def min_averaging_frequency(self) -> int | None:
        """Least iterations from average to average, with ``"adaptive"``; None with another policy."""
        pace = self._turns.timing.pace
        return pace.least if isinstance(pace, Adaptive) else None

    @property
    def max_averaging_frequency(self) -> int | None:
        """Most of them; None likewise."""
        pace = self._turns.timing.pace
        return pace.most if isinstance(pace, Adaptive) else None

    @property
    def overlap(self) -> bool | int:
        """When a round ends, at present, as the constructor has it.

        May be set in all members, and is followed as `method` is.
        """
        return self._turns.timing.overlap

    @overlap.setter
    def overlap(self, given: bool | int) -> None:
        self._check_open()
        faults = overlap_faults(given)
        timing = self._turns.timing
        refuse(faults or fitting_faults(self.method, timing.wished_pace, given, len(self._turns.named)))
        timing.ask(overlap=given)

    @property
    def receipt(self) -> "Receipt | None":
        """What the server said of the newest push, with ``asynchronous=True``; None before the first.

        Its staleness is how many other outer steps came between this member's last two pulls.
        """
        members = self._turns.members
        return members.receipt if isinstance(members, Arrivals) else None

    @property
    def bytes_sent(self) -> int:
        """What this member has added to sums, in bytes; how often each travels is the group's affair."""
        return 0 if self._turns.members.is_alone else self._turns.rounds.num_bytes

    @property
    def method(self) -> Method:
        """What is made of the mean, at present.

        May be set, to a name or an object, in all members. They change together, after the first round that
        all have begun with the same wish; until then all keep to the method before, and a warning says so
        where it takes long. This reads as before until then, and the averager's repr tells what it wishes
        for. A member that waits in `flush` wishes for what it had. What the method before has
        kept (a reference, a velocity) is forgotten; the new one begins with the mean of its first round, to
        which members go.
        """
        return self._turns.method

    @method.setter
    def method(self, given: str | Method) -> None:
        self._check_open()
        how = as_method(given)
        if self._turns.is_guided:
            raise ConfigError(
                f"method is {how!r} and asynchronous True: the outer step is the server's, for all members; "
                f"flush, and make averagers with another method at another server"
            )
        timing = self._turns.timing
        faults = fitting_faults(how, timing.wished_pace, timing.wished_overlap, len(self._turns.named))
        refuse(faults if self._turns.members.meets_in_twos else faults + server_faults(how))
        how.check_for(self._turns.members.size)
        self._turns.rounds.wanted_method = how

    @overload
    def evaluate(
        self,
        loader: Iterable[Any] | Dataset[Any],
        metrics: list[Any] | tuple[Any, ...] | nn.ModuleDict,
        *,
        loss_fn: LossFunction | None = None,
    ) -> dict[str, float]: ...
    @overload
    def evaluate(
        self,
        loader: Iterable[Any] | Dataset[Any],
        metrics: Metric = "accuracy",
        *,
        loss_fn: LossFunction | None = None,
    ) -> float: ...
    def evaluate(
        self,
        loader: Iterable[Any] | Dataset[Any],
        metrics: Metric | list[Any] | tuple[Any, ...] = "accuracy",
        *,
        loss_fn: LossFunction | None = None,
    ) -> float | dict[str, float]:
        """Measure this member's model as it is, in eval mode; modes and random states stay as they are.

        Other members need not call this, and wait no longer than their next round needs this one.

        Args:
            loader: Gives batches (inputs, targets); or a dataset.
            metrics: One metric, or a list of them: "accuracy" (0..1), "loss", callables of (outputs,
                targets), torchmetrics objects and collections.
            loss_fn: For "loss"; None: that of the last `train_step`, a mean over the batch.

        Returns:
            The mean over all samples; for a list or a collection, a dict by name.

        Raises:
            ConfigError: If the loader or a metric cannot be used, or the loader gave no sample.
        """
        return evaluate(
            self.model,
            loader,
            metrics,
            batch_size=EVALUATION_BATCH,
            device=self.device,
            loss_fn=self._loss_fn if loss_fn is None else loss_fn,
            reduction="mean",
            each=self.note_measured,
            keeps=[self],
        )

    def note_measured(self, batches: int) -> None:
        """Tell a server that this member gets on while it measures the model, which may take long."""
        if self._origin.is_here:  # a child may measure what it has, and is no member
            self._turns.members.note_progress(self._turns.course.iterations + batches)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on, besides the model: a nest of plain values and tensors.

        It refers to live tensors, as torch's own states and the model's do: save it, or take `copy.deepcopy`
        of it, at once.

        Of what was set in mid-run it has what is in force, and no wish that members have not agreed on yet.

        A round that is under way is ended first, in which every member has to take part, and which moves the
        model: all members call this in the same round, and take the model's own state after it. Each
        member's state is its own. The optimizer's is in it.

        In the same iteration members of a process group are in the same round, but for
        ``averaging_policy="time"``, and for a frequency that changes (``"adaptive"``, or set anew) with
        ``overlap=True``: one may have begun a round there that others have not. It would wait here for those
        who wait for it elsewhere, as at a barrier, and their states would be of different rounds. There all
        call `flush` before.

        Raises:
            StateError: As `train_step`.
            NonFiniteError: As `train_step`.
            ConnectionLostError: If a member is lost.
        """
        self._check_here()
        return state_of(self._turns, self, ends=True)

    def state_of_now(self) -> dict[str, Any]:
        """Give the state and wait for nobody: as if a round that is under way had not begun; it goes on.

        For `FaultTolerantTrainer`, whose members are saved each at its own time, and after others have gone.
        """
        self._check_here()
        return state_of(self._turns, self, ends=False)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """See that a state fits this averager, before anything is loaded; for `FaultTolerantTrainer`.

        Args:
            state: As `state_dict` gave it.

        Raises:
            ConfigError: If it does not.
        """
        refuse(faults_of(self._turns, state))

    def load_state_dict(
        self, state: Mapping[str, Any], *, optimizer: object = None, strict: bool = True
    ) -> None:
        """Go on from a state, in a model that has its values back. To be called by all members.

        In this order: the averager is made, which gives the first member's model to all; each member's model
        takes back its own values; then comes this, which refuses a model that is not the state's. A member
        that calls it while others train or average meets them in another message than theirs, which torch's
        gloo ends a process for.

        `averaging_frequency` and `overlap` are those that were in force then, with a warning where this was
        made with others; at a server they are wished for, and in force once all members wish for them.

        At a server at which others have gone on meanwhile the members' mean stays in the model, or is put
        back into it, with a warning, where other values were loaded: what this member loads is older, and
        the way to it is nothing that it has learnt. What `method` has kept begins anew then. So it is where a
        model is loaded without this call, between joining and the first step of its optimizer. With
        ``asynchronous=True`` it begins with the server's parameters of now in any case, as one does that
        joins; what it had not brought there is not in them.

        Args:
            state: As `state_dict` gave it.
            optimizer: As in `train_step`; needed where the state has an optimizer's, and there is none here.
                Its settings are the state's then; a warning tells those that were given otherwise.
            strict: Refuse states of different rounds. False: where members were saved in different rounds,
                what `method` has kept begins anew, with a warning, and all go on together from here.

        Raises:
            ConfigError: If the state does not fit, or there is no optimizer of its class for it; nothing is
                changed then.
            StateError: If a round is under way, a member's model is not that of its state, which changes
                nothing, or members' states are not of the same round.
        """
        self._check_here()
        take_up(self._turns, state, optimizer=optimizer, strict=strict)

    def __repr__(self) -> str:
        """Say what it does."""
        pace = self._turns.timing.pace
        how = f"every {pace.every:g} {'s' if isinstance(pace, Seconds) else 'iterations'}"
        if isinstance(pace, Adaptive):
            how += f" at present, {pace.least} to {pace.most} by {self._turns.gauge.name}"
        members = self._turns.members
        who = f"{self.rank} of {members.size}"
        if isinstance(members, Served):  # who comes late has a rank beside those who are there
            who = f"member {self.rank}, {members.shown}"
        wishes = self._turns.wishes()
        return (
            f"<offbeat.AsyncModelAverager {who}, {self.method!r}"
            f"{', asynchronous' if self._turns.is_guided else ''}, {how}, round {self.averaging_round}"
            f"{'' if self.receipt is None else f', {self.receipt.staleness} updates late'}"
            f"{', wishes for ' if wishes else ''}{', '.join(wishes)}>"
        )

    # ------------------------------------------------------------------ inside

    def _check_here(self) -> None:
        if not self.is_alone:  # else there is nobody to wait for
            self._origin.check()

    def _check_open(self) -> None:
        self._check_here()
        if self._is_closed:
            raise ClosedError(
                "this AsyncModelAverager was closed, and takes part no more: make a new one, or go on alone "
                "with its model and optimizer"
            )
