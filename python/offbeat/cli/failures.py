"""The workers that failed: each is told of as it ends, what several say alike once, and all at the end."""

from offbeat.cli.processes import Ended

__all__ = ["Failures"]

MAX_WORDS = 300
"""Of a worker's last words, in letters: above, with its rank before it, they are whole."""


class Failures:
    """Words what became of the workers that failed.

    Args:
        num_workers: How many there were, with those that did not.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._all: list[Ended] = []
        self._told: dict[tuple[int, str], int] = {}
        self._newest: tuple[int, str] | None = None

    def add(self, ended: Ended) -> None:
        """Count one that nobody is told of as it ends."""
        self._all.append(ended)

    def tell(self, ended: Ended) -> str:
        """Count one, and word how it ended; what another has said before it is not said again."""
        self.add(ended)
        end = self._newest = _end(ended)
        first = self._told.setdefault(end, ended.rank)
        if first != ended.rank and end[1]:
            return f"{_how(ended)}, as worker {first} did"
        return f"{_how(ended)}{_words(ended)}"

    def well(self) -> None:
        """Note that one has ended well: how the last one failed was said before that."""
        self._newest = None

    @property
    def first(self) -> Ended | None:
        """The one that failed first."""
        return min(self._all, key=lambda ended: ended.order, default=None)

    def summary(self) -> str:
        """Count them, and name the first; its last words, too, unless they were the last that was told."""
        if (first := self.first) is None:
            return f"none of {self._num_workers} workers failed"
        text = f"{len(self._all)} of {self._num_workers} workers failed; the first: {_how(first)}"
        if self._newest != _end(first):
            text += _words(first)
        alike = sum(_end(ended) == _end(first) for ended in self._all) - 1
        if alike and first.last_line_if_known():
            text += f"; {alike} more, in the same words" if alike > 1 else "; one more, in the same words"
        return text


def _end(ended: Ended) -> tuple[int, str]:
    return ended.code, ended.last_line_if_known()


def _how(ended: Ended) -> str:
    how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"failed with exit code {ended.code}"
    return f"worker {ended.rank} {how}"


def _words(ended: Ended) -> str:
    line = ended.last_line_if_known()
    if len(line) > MAX_WORDS:
        line = f"{line[:MAX_WORDS]}…"
    if not line:
        return ""
    return f"; its last line: {line}" if ended.code < 0 else f": {line}"  # of a signal it is seldom the cause
