"""What an averager goes on from in another life: its state given, checked, and taken up again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offbeat import log
from offbeat.averaging.arrivals import Arrivals
from offbeat.averaging.loaded import keep_to_the_others
from offbeat.averaging.pace import Adaptive, Pace
from offbeat.averaging.served import Served
from offbeat.averaging.settings import fitting_faults
from offbeat.averaging.turns import Owner, Turns
from offbeat.checks import Faults, check_keys, refuse
from offbeat.errors import StateError
from offbeat.local.parameters import check_back, fingerprint, is_as_it_was
from offbeat.local.saved import bring_back_told, faults_of_state, state_told

__all__ = ["faults_of", "state_of", "take_up"]

KEYS = ("pace", "rounds", "optimizer")
"""What every state has besides the course."""


def state_of(turns: Turns, owner: Owner, *, ends: bool) -> dict[str, Any]:
    """Give the state.

    Args:
        turns: Of a member.
        owner: Whose they are.
        ends: After the end of a round that is under way; else as if that had not begun, and it goes on.

    Raises:
        StateError: As `Turns.finish`.
        NonFiniteError: As `Turns.finish`.
        ConnectionLostError: As `Turns.finish`.
    """
    if ends and turns.rounds.is_under_way:
        turns.finish(owner)
    turns.unshared.leave()  # it is to go on from here
    return {
        **turns.course.state_dict(),
        **turns.timing.state_dict(),
        "rounds": turns.rounds.state_dict(),
        "model": fingerprint(turns.named),
        **state_told(turns.optimizer),
    }


def faults_of(turns: Turns, state: Mapping[str, Any]) -> Faults:
    """Word why a state does not fit.

    Raises:
        ConfigError: If it is no averager's at all.
    """
    check_keys(state, [*turns.course.state_dict(), *KEYS], owner="an averager")
    faults = Faults()
    faults.catch(lambda: turns.rounds.check(state["rounds"]))
    theirs = timing[0][0] if (timing := state.get("timing")) else None
    is_other = theirs not in (None, turns.timing.pace.setting()[0])
    if is_other or (state["pace"] is not None) != isinstance(turns.timing.pace, Adaptive):
        faults.append("the state is of another averaging_policy: make the averager with the same")
    elif not faults:
        faults += fitting_faults(
            turns.method, *turns.timing.of_state(state, longest=turns.longest), len(turns.named)
        )
    return faults


def take_up(turns: Turns, state: Mapping[str, Any], *, optimizer: object, strict: bool) -> None:
    """Go on from a state.

    Args:
        turns: Of a member whose model has got its values back since all met.
        state: As `state_of` gave it.
        optimizer: As the user gives it, or None.
        strict: Refuse states of different rounds.

    Raises:
        ConfigError: If the state does not fit, or there is no optimizer for it; nothing is changed then.
        StateError: If a round is under way, a member's model is not that of its state, which changes nothing,
            or members' states are not of the same round.
    """
    if turns.rounds.is_under_way:
        raise StateError(
            "a round is under way, which would move the model that has just been loaded: load into an "
            "averager that was just made, or call flush() before"
        )
    faults, chosen = faults_of(turns, state), turns.optimizer.trial()
    is_new = chosen.live is None
    faults += faults_of_state(state, chosen, optimizer)
    refuse(faults)
    _check_model(turns, state)
    if state["optimizer"] is not None:
        turns.optimizer = chosen
        bring_back_told(chosen, state, is_new=is_new)
    pace, overlap = turns.timing.of_state(state, longest=turns.longest)
    keeps_rounds = _keeps_rounds(turns, state, strict=strict)
    if keeps_rounds:
        if turns.rounds.load_state_dict(state["rounds"], strict=strict, setting=state.get("timing")):
            _resume_timing(turns, pace, overlap)
    elif isinstance(pace, Adaptive) and isinstance(turns.timing.pace, Adaptive):
        turns.timing.pace = replace(pace, start=turns.timing.pace.start)  # the others' is the start
    turns.course.load_state_dict(state)
    turns.unshared.end(turns.course.iterations)
    if isinstance(turns.members, Arrivals):
        turns.members.go_out_anew()
    if isinstance(turns.members, Arrivals) or not keeps_rounds:
        # What was trained before is not in this model: it has no weight, and no loss, in the next round.
        turns.rounds.count_from(samples=turns.course.samples, iterations=turns.course.iterations)
        turns.course.losses = []


def _keeps_rounds(turns: Turns, state: Mapping[str, Any], *, strict: bool) -> bool:
    """See that a member that has joined others has their model, and tell whether its rounds go on as saved.

    They do where the others have gone no further: the server has what the state was taken of. A member that
    has trained there keeps its own model: others have what it has brought, and it has theirs.
    """
    members = turns.members
    if isinstance(members, Arrivals):
        keep_to_the_others(members)
        return strict or not members.has_gone_on
    if not isinstance(members, Served) or not turns.untrained.is_so:
        return True
    kept = state.get("model")
    is_back = kept is not None and is_as_it_was(turns.named, kept)
    return not keep_to_the_others(members) and strict and is_back


def _check_model(turns: Turns, state: Mapping[str, Any]) -> None:
    """See that all members have their models back: where they have met, all have the first one's.

    Raises:
        StateError: In all members of a process group, if one has not.
    """
    if turns.members.has_gone_on or isinstance(turns.members, Arrivals):
        return  # the model is what others have made
    check_back(turns.named, state, turns.members.is_alike)


def _resume_timing(turns: Turns, pace: Pace, overlap: bool | int) -> None:  # noqa: FBT001  as users give it
    """Go on at the pace of a state; at a server, where nobody knows the others', once all want it."""
    made = turns.timing.setting()
    if repr([pace.setting(), overlap]) != repr(made) and not turns.members.is_waited_for:
        turns.timing.ask(pace=pace, overlap=overlap)
        return
    turns.timing.resume(pace, overlap)
    turns.rounds.goes_on = overlap is not False
    if repr(turns.timing.setting()) != repr(made):  # 1 is another than True
        log.warn(
            f"averaging goes on as in the state, with averaging_frequency {pace.every} and overlap "
            f"{overlap}, and not with those that this averager was made with: set averager."
            f"averaging_frequency and averager.overlap, in all members, where others are meant"
        )
