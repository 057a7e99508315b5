"""Which strategy is at work: one at a time, each made when its turn comes."""

from collections.abc import Mapping
from typing import Any

import torch

from offbeat import log
from offbeat.averaging.loaded import GONE_ON
from offbeat.averaging.methods import Method
from offbeat.errors import OffbeatError, OtherTermsError, StateError
from offbeat.local.buffers import write
from offbeat.local.parameters import each_once, other_shape
from offbeat.trainer.accumulated import Accumulated
from offbeat.trainer.handover import Handover
from offbeat.trainer.next import next_of
from offbeat.trainer.served import Served
from offbeat.trainer.settings import Kind, Sync, Syncs, kind_at, shown_kind
from offbeat.trainer.strategies import Averaged, Local, Strategy, Workshop

__all__ = ["Stage"]


class Stage:
    """Makes strategies, and lets each end together with the others before the next begins.

    Attributes:
        schedule: Strategies by the epochs that they begin with.
        syncs: How often members meet in which epoch.
        strategy: At work; None before the first batch.
        used: What was at work since `begin`, one after the other, in words.
        epoch_at_work: That of the newest batch since `begin`, also when it has ended; None before the first,
            and when training is over.
    """

    def __init__(self, workshop: Workshop, schedule: Mapping[int, Kind], syncs: Syncs) -> None:
        self.schedule: Mapping[int, Kind] = {}
        self.strategy: Strategy | None = None
        self.used: list[str] = []
        self.epoch_at_work: int | None = None
        self._workshop = workshop
        self.syncs = syncs
        self._kind: Kind | None = None
        self._epoch = 0
        self._since = 0  # the epoch in which what is at work was made
        self._handover = Handover(workshop)
        self._has_told_of_budget = False
        self.follow(schedule)

    def begin(self) -> None:
        """Let what is at work begin again, with the optimizer there is by now."""
        self.used, self.epoch_at_work = [], None
        strategy, kind = self.strategy, self._kind
        if strategy is None or kind is None:
            return
        if self._handover.is_unfinished and kind != kind_at(self.schedule, self._since):
            self.strategy = self._kind = None  # the change to it broke off, and is not wanted any more
            strategy.close()
            return
        self.used.append(shown_kind(kind))
        try:
            with self._handover.to(kind, self._since) as begin:
                begin(strategy)
        except OffbeatError as error:
            if self._handover.has_begun or kind == kind_at(self.schedule, self._since):
                raise
            log.info("strategy %s could not begin, and is not wanted any more: %s", shown_kind(kind), error)
            self.strategy = self._kind = None  # closed by now
            self.used = []
        self._tell_of_what_comes()

    def end(self) -> None:
        """Know that no batch is trained on any more, until it begins again."""
        self.epoch_at_work = None

    def note_measured(self, batches: int) -> None:
        """Tell whoever may wonder that this member gets on while it measures the model."""
        if self.strategy is not None:
            self.strategy.note_measured(batches)

    @property
    def stands_alone(self) -> bool:
        """Whether the model here has all that was trained, should the others be lost, and can go on with it.

        Where the change from a strategy broke off that had ended with the others in a process group, it
        cannot: they may go on from before that, and would wait there for this one.
        """
        if self.strategy is not None:
            return self.strategy.stands_alone
        kind = self._kind
        return kind is None or not (kind == "parameter_server" or self._workshop.places.need_group([kind]))

    def at(self, epoch: int) -> Strategy:
        """Give the strategy for the next batch of an epoch, which has the optimizer and follows the epoch."""
        kind, sync = kind_at(self.schedule, epoch), self.syncs.at(epoch)
        strategy = self.strategy
        if kind != self._kind and self._became(kind):
            log.info("epoch %d goes on with strategy %s", epoch, shown_kind(kind))
            self._kind = kind
            self.used.append(shown_kind(kind))
        if strategy is None or kind != self._kind:
            if strategy is not None:
                strategy.settle(next_of(kind))
            has_all = self._handover.come_from_server(strategy, self._kind, kind, epoch)
            self._handover.leave(strategy, self._kind, has_all=has_all)
            if strategy is not None:
                self.strategy = None  # what breaks off the rest leaves nothing to settle a second time
                strategy.close()  # whoever holds it: its group is no use to anybody
                log.info("epoch %d goes on with strategy %s", epoch, shown_kind(kind))
                if isinstance(strategy, Served) and strategy.left is not None and self._is_away(kind):
                    log.announce(_leaving(epoch, comes_back=self._comes_back(kind, epoch)))
            self._keep_place(kind, epoch)
            self._since = epoch
            with self._handover.to(kind, epoch) as begin:
                strategy = self.strategy = self._made_for(epoch)
                self._kind = kind
                self.used.append(shown_kind(kind))
                begin(strategy)
            self._tell_of_what_comes()
        elif sync != strategy.sync:
            if strategy.meets_others:
                log.info("epoch %d: members meet every %d batches from here on", epoch, sync.every)
            strategy.follow(sync)
            if isinstance(strategy, Served):
                with self._handover.to(kind, epoch) as begin:
                    begin(strategy)
        self._keep_place(kind, epoch)  # also of one that goes on from a state
        self._epoch = epoch  # not before: where the others were lost on the way, this is in the epoch before
        self.epoch_at_work = epoch
        return strategy

    def follow(self, schedule: Mapping[int, Kind]) -> None:
        """Choose by that from here on."""
        self.schedule = schedule
        self._handover.knows_server |= "parameter_server" in schedule.values()
        if "parameter_server" not in (kind_at(schedule, self._epoch), *self._later(self._epoch)):
            self._handover.give_place_up()
        self._tell_of_what_comes()

    def _keep_place(self, kind: Kind, epoch: int) -> None:
        """Keep a place at the server that was left, where members come back to one, and no longer."""
        if self._comes_back(kind, epoch):
            self._handover.keep_place()
        elif self._is_away(kind):
            self._handover.give_place_up()

    def _is_away(self, kind: Kind) -> bool:
        """Whether members are at no server by that strategy."""
        return kind == "local" or self._workshop.places.need_group([kind])

    def _comes_back(self, kind: Kind, epoch: int) -> bool:
        """Whether a later epoch has a parameter server, and they are at none in this one."""
        return self._is_away(kind) and "parameter_server" in self._later(epoch)

    def _later(self, epoch: int) -> list[Kind]:
        return [kind for begin, kind in self.schedule.items() if begin > epoch]

    def _tell_of_what_comes(self) -> None:
        """Say, once, while members are at a server, what that has to be for what comes later."""
        if isinstance(self.strategy, Served) and self.strategy.worker is not None:
            now = max(self._epoch, self._since)
            later = {epoch: kind for epoch, kind in self.schedule.items() if epoch > now}
            # Also as it may have been set in mid-run.
            self._tell_of_budget(self.strategy, [*later.values(), kind_at(self.schedule, now)])

    def _tell_of_budget(self, strategy: Served, later: list[Kind]) -> None:
        """Warn, once, where the server ends members one by one, and a later strategy waits for all."""
        places, worker = self._workshop.places, strategy.worker
        waits = places.share_updates(later) or (places.need_group(later) and places.average_with_others())
        if not waits or self._has_told_of_budget or worker is None or worker.max_samples is None:
            return
        self._has_told_of_budget = True
        log.warn(
            f"the server's max_samples is {worker.max_samples}, which ends each member by itself, and a "
            f"later strategy waits for all of them: one that has ended is waited for in vain, until the "
            f"process group's timeout. Start the server without max_samples, and end by epochs= or max_steps="
        )

    def _became(self, kind: Kind) -> bool:
        """Tell whether what is at work goes on as that strategy."""
        strategy = self.strategy
        return isinstance(strategy, Averaged) and isinstance(kind, Method) and strategy.become(kind)

    def state_dict(self, *, is_of_now: bool = False) -> dict[str, Any] | None:
        """Give what is at work; None before the first batch.

        Args:
            is_of_now: Wait for nobody, as if a round that is under way had not begun.
        """
        strategy, kind = self.strategy, self._kind
        if kind is None or (strategy is None and kind != "local"):
            return None
        work = None  # of "local", where the change from it broke off
        if strategy is not None:
            work = strategy.state_of_now() if is_of_now else strategy.state_dict()
        return {
            "kind": shown_kind(kind),
            "epoch": self._epoch if self._handover.has_begun or strategy is None else self._since,
            "work": work,
        }

    def account(self) -> dict[str, Any]:
        """Give what the next strategy may begin without, also where nothing is at work."""
        return self._handover.state_dict(self.strategy)

    def differences(self, state: dict[str, Any] | None) -> list[str]:
        """Word why a state does not fit."""
        if state is None:
            return []
        kind = kind_at(self.schedule, state["epoch"])
        if (own := shown_kind(kind)) != state["kind"]:
            was = f"the state's was {state['kind']}"
            return [f"in epoch {state['epoch']} the strategy is {own}, and {was}: give that"]
        kept = state["work"].get("model") if isinstance(state["work"], dict) else None
        if kept is None or self._workshop.places.need_group([kind]):
            return []  # older states tell of none; members of a group ask one another, in `load_state_dict`
        named = each_once(self._workshop.model)
        if kind == "local":  # what is frozen is nobody's business: of it there is a warning
            if len(kept) != len(named):
                return []
            pairs = [(own, was) for own, was in zip(named, kept, strict=True) if own[1].requires_grad]
            named, kept = [own for own, _ in pairs], [was for _, was in pairs]
        other = other_shape(named, kept)
        return [] if other is None else [f"the model is not the one of the state: {other}"]

    def load_state_dict(self, state: dict[str, Any] | None, account: dict[str, Any] | None = None) -> None:
        """Make what was at work, with what it had; it has not begun. The model stays as it is.

        Args:
            state: As `state_dict` gave it.
            account: As `account` gave it then; older states have none.
        """
        self.close()
        self.epoch_at_work = None  # it may go back to an epoch before
        self._handover.load_state_dict(account)
        if state is None:
            self._handover.has_begun = False
            return
        tensors = [*self._workshop.model.parameters(), *self._workshop.model.buffers()]
        values = [tensor.detach().clone() for tensor in tensors]
        epoch = self._epoch = state["epoch"]
        self._kind = kind_at(self.schedule, epoch)
        self._since = epoch
        self.strategy = self._made_for(epoch)  # members of a group begin with the first's
        if not self.strategy.has_joined_others:
            for tensor, value in zip(tensors, values, strict=True):
                write(value, tensor)
        elif not all(map(torch.equal, tensors, values)):
            log.announce(GONE_ON)
        self.strategy.load_state_dict(state["work"])

    def close(self, failure: BaseException | None = None) -> None:
        """End whatever is at work, by a failure perhaps; nobody is waited for."""
        strategy = self.strategy
        self._handover.close(strategy, self._kind, failure)
        self.strategy = self._kind = None
        if strategy is not None:
            strategy.close(failure)

    def _made_for(self, epoch: int) -> Strategy:
        """Make the strategy of an epoch.

        Raises:
            StateError: Where those at a server average otherwise: they may be in another epoch.
        """
        try:
            return self._made(kind_at(self.schedule, epoch), self.syncs.at(epoch))
        except OtherTermsError as error:
            if (changes := self._changes()) is None:
                raise
            raise StateError(
                f"{error}. With {changes} that may be so although all were given the same: what is averaged "
                f"by follows from the epoch, and this member is in epoch {epoch} of its own, as where it was "
                f"killed and the others have gone on since, who do not go back for it. It can come to them "
                f"with what they average by in all its epochs (strategy= without a dict, warm_up_epochs=0) "
                f"and, in a FaultTolerantTrainer, another checkpoint_dir: it begins with their mean then"
            ) from None

    def _changes(self) -> str | None:
        """Word what lets members average otherwise in other epochs; None: nothing does."""
        shown = [f"{epoch}: {shown_kind(kind)}" for epoch, kind in sorted(self.schedule.items())]
        if len({shown_kind(kind) for kind in self.schedule.values() if isinstance(kind, Method)}) > 1:
            return f"strategy={{{', '.join(shown)}}}"
        syncs = self.syncs
        has_two = bool(syncs.warm_up_epochs) and syncs.warm_up != syncs.regular
        return f"warm_up_epochs={syncs.warm_up_epochs}" if has_two else None

    def _made(self, kind: Kind, sync: Sync) -> Strategy:
        if kind != "parameter_server" and self._workshop.live is None:
            raise StateError(
                f"the optimizer of this train runs on the server, and strategy {shown_kind(kind)} needs one "
                f"here: end it (max_steps=, say), and call train again"
            )
        if isinstance(kind, Method):
            return Averaged(self._workshop, sync, kind)
        if kind == "accumulate":
            return Accumulated(self._workshop, sync)
        if kind == "parameter_server":
            return Served(self._workshop, sync)
        self._tell_of_nothing_to_meet()
        return Local(self._workshop, sync)

    def _tell_of_nothing_to_meet(self) -> None:
        """Say what of the frequencies has no effect as strategy "local" is about to train alone."""
        no_effect = 'strategy "local" trains alone: the frequencies of meeting others have no effect in it'
        given, warm_up = self.syncs.given(), range(self.syncs.warm_up_epochs)
        meets_nobody = bool(warm_up) and all(kind_at(self.schedule, epoch) == "local" for epoch in warm_up)
        if given and not self.used and all(other == "local" for other in self.schedule.values()):
            log.warn(
                f"{no_effect} ({', '.join(given)}): leave them out, or take a strategy that meets others, as "
                f'"average" does'
            )
        elif meets_nobody and not self.used:
            of_warm_up = [name for name in given if name.startswith("warm_up")]
            log.warn(
                f'the warm-up is over before strategy "local" is, which meets nobody, and so has no effect '
                f"({', '.join(of_warm_up)}): warm_up_epochs counts from the first epoch of all; give more of "
                f"them, or leave it out"
            )
        else:
            log.info(no_effect)


def _leaving(epoch: int, *, comes_back: bool) -> str:
    """Say what a server has that members leave, and how long it is there."""
    text = (
        f"epoch {epoch} leaves the server, whose model stays what it is now, in its --save and its "
        f"checkpoints, too: what is trained from here on is in the members' models"
    )
    if comes_back:
        return f"{text}; each keeps its place there until it comes back"
    return (
        f"{text}. Where all have left, a server ends after its linger (10 s), unless it was started by "
        f"offbeat launch or with --keep-running"
    )
