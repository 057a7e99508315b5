"""What a server is set to that members who average at it cannot bear."""

from collections.abc import Mapping
from typing import Any

__all__ = ["for_a_mean", "for_arrivals"]


def for_a_mean(run: Mapping[str, Any]) -> list[str]:
    """Tell what keeps a server from adding up the shares of a mean as they are.

    Args:
        run: The server's settings, as `Client.run`.

    Returns:
        A fault for each setting.
    """
    faults = _ends(run)
    if run["contribution"] == "gradient" and run["optimizer"] is not None:
        faults.append(
            "the server has an optimizer of its own, which is for workers' gradients, and members that "
            "average bring differences that it is to add up as they are: start it without optimizer= "
            "(`--optimizer` of `offbeat server` and `offbeat launch`), or let members meet at another one"
        )
    staleness = run["staleness"]
    if any(weight["name"] != "constant" for weight in staleness["weights"]):
        faults.append(
            f"the server weighs what comes late by {staleness['weights']}, and shares of a mean are "
            f"worth the same whenever they come: start it with staleness_policy='constant'"
        )
    if (most := staleness["max_staleness"]) is not None:
        faults.append(
            f"the server's max_staleness is {most}, and of a round's shares each comes later than the one "
            f"before: those rejected would be missing in the mean, and in the models at the end; start it "
            f"without max_staleness (`--max-staleness`)"
        )
    return faults


def for_arrivals(run: Mapping[str, Any]) -> list[str]:
    """Tell what keeps a server from taking members' ways one by one, as `for_a_mean`."""
    faults = _ends(run)
    if (transaction := run["transaction"]) != "model":
        # Of a push that is cut short some fragments would have moved, and all of it would come again.
        faults.append(
            f"asynchronous is True and the server's transaction {transaction!r}, under which a push that "
            f"is cut short counts in part: start the server with transaction='model' (`--transaction "
            f"model` of `offbeat server` and `offbeat launch`)"
        )
    return faults


def _ends(run: Mapping[str, Any]) -> list[str]:
    if (most := run["max_samples"]) is None:
        return []
    text = (
        f"the server's max_samples is {most}, after which it takes nothing from anybody, and members that "
        f"average end each by itself: what they learn after that would be lost; start it without max_samples "
        f"(`--max-samples` of `offbeat server` and `offbeat launch`), and end by the members' own loops"
    )
    return [text]
