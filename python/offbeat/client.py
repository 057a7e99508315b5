"""A worker of one's own in numpy: pull parameters, compute whatever you like, push gradients."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from offbeat import log, process
from offbeat.arrays import (
    Array,
    Entry,
    as_array,
    as_dict,
    by_name,
    contiguous,
    describe,
    no_such_tensor,
    read_table,
    writable,
)
from offbeat.checks import (
    is_count,
    is_number,
    of_address,
    of_worker_id,
    one_or_two,
    refuse,
    refuse_two_in_flight,
    seconds,
    strings,
)
from offbeat.dtypes import NAMES
from offbeat.errors import (
    ClosedError,
    ConfigError,
    ForkedError,
    ModelMismatchError,
    NonFiniteError,
    StateError,
)
from offbeat.naming import known_keywords
from offbeat.optim import as_spec
from offbeat.receipt import Receipt
from offbeat.rounds import Entered, Gathered, New
from offbeat.samples import sample_count

if TYPE_CHECKING:
    from offbeat import _offbeat

__all__ = ["Client"]

_UNSENT = (NonFiniteError, StateError)
"""A call that ends so sent nothing: what was in flight stays so."""
_CONTRIBUTIONS = ("gradient", "delta")
MOST_MEMBERS = 2**32 - 1
NO_ADDRESS = 'which server? Give address="HOST:PORT", or set OFFBEAT_SERVER'


class Client(process.Live):
    """A connection to a parameter server, without torch.

    SGD's momentum, where the server says that it lives in the workers, is kept here, in Rust. One thread may
    use a client at a time. Every call answers Ctrl-C. A client that nobody holds any more is closed.

    Args:
        address: The server's "HOST:PORT"; None means the environment's OFFBEAT_SERVER.
        worker_id: Name of this worker, kept over restarts; None lets the server choose.
        token: The server's token; None means the environment's OFFBEAT_TOKEN, or none.
        in_flight: Pushes under way at once. With 2, `push_pull` returns the receipt of the push before.
        connect_timeout_s: How long to try to reach the server.
        reconnect_timeout_s: How long a call waits for a server that is lost; 0: not at all. None: 300 s for
            one that keeps checkpoints, and may be started again; else 30 s.
        contribution: What its pushes carry: "gradient", of which the server's optimizer makes a step, or
            "delta", a difference that the server adds as it is. One kind a run.

    Raises:
        ConfigError: If an argument cannot be used.
        ConnectError: If the server could not be reached in time.
        AuthenticationError: If the server's token is another one.

    Example:
        >>> with offbeat.Client("127.0.0.1:5000") as client:
        ...     parameters = client.pull()
        ...     receipt = client.push_pull({"w": np.ones_like(parameters["w"])}, out=parameters)
    """

    _session: "_offbeat.Session | None" = None  # until there is something to close
    _instead = "it is one connection; make another one where it is needed, with the server's address"

    @known_keywords
    def __init__(
        self,
        address: str | None = None,
        worker_id: str | None = None,
        token: str | None = None,
        in_flight: int = 1,
        connect_timeout_s: float = 60,
        *,
        reconnect_timeout_s: float | None = None,
        contribution: Literal["gradient", "delta"] = "gradient",
    ) -> None:
        faults = strings('"HOST:PORT", a string', address=address) + of_address(address, name="address")
        faults += of_worker_id(worker_id) + strings(token=token)
        faults += one_or_two(in_flight=in_flight) + seconds(connect_timeout_s=connect_timeout_s)
        if reconnect_timeout_s is not None:
            faults += seconds(reconnect_timeout_s=reconnect_timeout_s)
        if contribution not in _CONTRIBUTIONS:
            faults.append(f'contribution is {contribution!r}: give "gradient" or "delta"')
        address = address or os.environ.get("OFFBEAT_SERVER")
        token = token or os.environ.get("OFFBEAT_TOKEN") or None
        if not address:
            raise ConfigError("; ".join([NO_ADDRESS, *faults]))
        refuse(faults)
        from offbeat._offbeat import Session

        process.register(self)  # now already: connecting may have to tell the log what it waits for
        try:
            session = Session(
                address,
                worker_id,
                token,
                None,
                in_flight,
                float(connect_timeout_s),
                None if reconnect_timeout_s is None else float(reconnect_timeout_s),
                None,
            )
            try:
                if in_flight > 1:
                    refuse_two_in_flight(json.loads(session.run))
            except BaseException as error:
                session.close("withdrawn", process.cause_of(error))
                raise
        except BaseException:
            process.release(self)
            raise
        self._session = session
        self._words = f"{self._session.worker_id} at {self._session.address}"
        self._table: list[Entry] = []
        self._names: dict[str, Entry] = {}
        self._arrays: _offbeat.ArrayTable
        self._own: dict[str, Array] | None = None
        self._own_is_written = False
        self._is_answer_due = False  # a push in flight brings parameters with the next call
        self._contribution = contribution
        self._configured = False
        self._has_read = False
        if self._session.table is not None:
            self._learn(self._session.table)

    # -- the model

    def init(self, arrays: Mapping[str, object], optimizer: object = None) -> bool:
        """Bring a model to a server that has none.

        Args:
            arrays: The initial values by name; their order is the model's. float32, float16 and bfloat16 are
                parameters, integers and booleans buffers.
            optimizer: The server's optimizer, where it has none: `offbeat.optim.SGD(lr=0.1)` or the like.

        Returns:
            Whether these values are the model's; False if another worker's came first.

        Raises:
            UnsupportedTensorError: If an array cannot be held; float64 among them.
            ModelMismatchError: If the server has another model.
        """
        session = self._open()
        table, values = describe(as_dict(arrays, "the model"))
        taken = session.init(table, values, None)
        self._has_read = self._has_read or taken
        self._learn(session.wait_for_model())
        if optimizer is not None:
            self.set_optimizer(optimizer)
        return taken

    def set_optimizer(self, optimizer: object) -> None:
        """Say which optimizer the server is to run; where it has one already, the two have to agree.

        Raises:
            ConfigError: If the server has another one; `server.set_optimizer` changes it. Or if this client's
                pushes carry differences, which the server adds without one.
        """
        self._open().configure(self._contribution, json.dumps(as_spec(optimizer).spec()))
        self._configured = True

    @property
    def dtypes(self) -> dict[str, str]:
        """Names of the tensors' dtypes; "bfloat16" where numpy, without `ml_dtypes`, only knows uint16."""
        return {entry.name: NAMES[entry.code] for entry in self._model()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes."""
        return {entry.name: entry.shape for entry in self._model()}

    # -- pull and push

    def pull(self, out: dict[str, Array] | None = None) -> dict[str, Array]:
        """Fetch the newest model; wait for one if the server has none yet.

        Args:
            out: Arrays by name, of the model's shapes and dtypes and C-contiguous, to be written in place.

        Returns:
            `out`; without it new arrays, which are the caller's.

        Raises:
            ModelMismatchError: If `out` is not of the model's names, shapes and dtypes.
        """
        session = self._open()
        if not self._table:
            if session.table is None:
                log.warn(
                    f"the server has no model yet: client {self._words} waits for another to bring one "
                    f"(client.init() brings one from here)"
                )
            self._learn(session.wait_for_model())
        out = out if out is not None else self._empty()
        self._is_answer_due = False
        session.pull(self._memories(out), False)  # noqa: FBT003  the extension takes no keywords here
        self._has_read = True
        return out

    def push(self, gradients: Mapping[str, object], samples: int = 1) -> Receipt:
        """Push the gradient at the parameters pulled last, or the difference to them.

        Args:
            gradients: The gradient of the mean over the samples, by name; with `contribution="delta"` the
                difference to be added. Of a buffer its new value. What is missing or None is left out: the
                server's value, moments and step count of it stay.
            samples: How many samples it is the mean over; counted, not multiplied by.

        Returns:
            What became of it. A rejection is a receipt too.

        Raises:
            ModelMismatchError: If a name, shape or dtype is not the model's.
            NonFiniteError: If there is a NaN or an infinity in it; nothing was sent.
            ConfigError: If it is no dict, or names nothing.
        """
        session = self._ready()
        values, count = self._values(gradients), sample_count(samples)
        was_due, self._is_answer_due = self._is_answer_due, False
        try:
            return session.push(values, count)
        except _UNSENT:
            self._is_answer_due = was_due
            raise

    def push_pull(
        self, gradients: Mapping[str, object], out: dict[str, Array] | None = None, samples: int = 1
    ) -> Receipt | None:
        """Push, and fetch the model as it is after that, both at once.

        Args:
            gradients: As in `push`.
            out: Arrays to be written in place, as in `pull`; without it `parameters` is written.
            samples: As in `push`.

        Returns:
            This push's receipt; with two in flight that of the push before, None at the first.
        """
        session = self._ready()
        is_own = out is None
        if out is None:
            out = self._own = self._own or self._empty()
        values, memories, count = self._values(gradients), self._memories(out), sample_count(samples)
        was_due, self._is_answer_due = self._is_answer_due, False
        try:
            receipt, came = session.push_pull(values, count, memories, False)  # noqa: FBT003
        except _UNSENT:
            self._is_answer_due = was_due
            raise
        self._own_is_written |= is_own and came
        self._is_answer_due = was_due or not came
        return receipt

    def flush(self) -> list[Receipt]:
        """Wait for the pushes in flight and return their receipts."""
        session = self._open()
        memories = self._memories(self._own) if self._own is not None else None
        was_due, self._is_answer_due = self._is_answer_due, False
        try:
            receipts = session.flush(memories)
        except _UNSENT:
            self._is_answer_due = was_due
            raise
        self._own_is_written |= was_due and self._own is not None
        return receipts

    @property
    def parameters(self) -> dict[str, Array]:
        """What `push_pull` without `out` wrote last; the arrays stay this client's.

        Raises:
            StateError: If it wrote nothing yet, as the first of two in flight does.
        """
        if self._own is None or not self._own_is_written:
            raise StateError("client.parameters holds what push_pull() without out= wrote; use pull() before")
        return self._own

    # -- rounds

    def enter(
        self,
        samples: float,
        *,
        at_work: bool = True,
        grace_s: float | None = None,
        at_least: int = 1,
        linger_s: float | None = None,
        terms: str | None = None,
        wish: str | None = None,
        new: New | None = None,
    ) -> Entered:
        """Enter a round with what so many samples have made, and wait for the others.

        The round closes when all have entered who entered one before and are there, or when the grace has
        passed since the first did; who comes later is in the next. Each member then pushes its difference
        times its share (`contribution="delta"`), gathers, and pulls what all have made.

        Until it has gathered, a client is in its round: asked again, whatever it says, the server answers the
        same. After Ctrl-C the server still waits, and so does the next call; `close` ends it. A client that
        does nothing in its round while others have gathered, for three leases and ten times as long as they
        took, is not waited for until it enters again.

        Args:
            samples: What this client's share is measured by, 0 or more.
            at_work: Whether it goes on after this round; else it only waits for the others' end.
            grace_s: How long the round is to wait, from the first that has entered, for those who have not;
                the longest that a member gives counts. None: it does not say; where nobody does, as long as
                it takes.
            at_least: Members that the round is to have, this client among them, unless the grace has passed;
                of who is not at work it counts for nothing.
            linger_s: How long the round is to wait, where all in it only wait for the others' end, for each
                client that is there and has entered none yet: so that it ends with them. For each once, and
                twice as long at most, however many come meanwhile; the longest that a member gives counts.
                None: not at all.
            terms: By what this client takes part, in words of up to 1024 bytes without control characters,
                which have to be the same in all members. None: it does not say.
            wish: By what it would from the next round on; `Entered.agreed` tells when all do. None: by the
                same.
            new: A part of what is pushed that other samples have led to: where all members say so of the same
                part, it goes times `Entered.new_share`. None: all goes times `share`.

        Raises:
            ConfigError: If an argument cannot be used.
            StateError: If those who are there take part by other terms; naming both.
        """
        faults = []
        if not is_number(samples) or samples < 0:
            faults.append(f"samples is {samples!r}: give a finite number, 0 or more")
        if not isinstance(at_work, bool):
            faults.append(f"at_work is {at_work!r}: give True or False")
        if grace_s is not None:
            faults += seconds(grace_s=grace_s)
        if linger_s is not None:
            faults += seconds(linger_s=linger_s)
        if not is_count(at_least, least=1) or at_least > MOST_MEMBERS:
            faults.append(f"at_least is {at_least!r}: give a whole number, 1 to {MOST_MEMBERS}")
        if not (new is None or _is_new(new)):
            faults.append(
                f"new is {new!r}: give New(samples, of), a finite number and a whole one, 0 or more"
            )
        refuse(faults + strings(terms=terms, wish=wish))
        times = None if grace_s is None else float(grace_s), None if linger_s is None else float(linger_s)
        measures = float(samples), None if new is None else (float(new.samples), new.of)
        return Entered(*self._open().enter(measures, at_work, times, at_least, (terms, wish)))

    def gather(self, round: int) -> Gathered:  # noqa: A002  as `Entered` calls it
        """Say that this client's push in a round has ended, and wait until every member's has.

        Who is lost or leaves is not waited for, nor for long who does nothing. A round that the server does
        not know, since it was started again, is over, and nothing is told of shares that may be missing.

        Args:
            round: The number of the round that was entered.

        Raises:
            ConfigError: If it is no number of a round.
        """
        if not is_count(round, least=1):
            raise ConfigError(f"round is {round!r}: give the number that client.enter() has returned")
        return Gathered(*self._open().gather(round))

    # -- the session

    @property
    def worker_id(self) -> str:
        """This worker's name."""
        return self._open().worker_id

    @property
    def run_id(self) -> str:
        """The run that it takes part in."""
        return self._open().run_id

    @property
    def incarnation(self) -> int:
        """A number that tells this client from any other that had its name, or will have it."""
        return self._open().incarnation

    @property
    def run(self) -> dict[str, Any]:
        """What is in force in this run: transaction, optimizer, staleness policy, schedule."""
        run: dict[str, Any] = json.loads(self._open().run)
        return run

    def status(self) -> dict[str, Any]:
        """Ask the server for its status."""
        status: dict[str, Any] = json.loads(self._open().status())
        return status

    def set_progress(self, steps: int) -> None:
        """Tell the server, with the next heartbeat, that this worker gets on; nothing is sent here.

        A worker that neither says so nor makes a call for 10 s, and for three times as long as between the
        two before, is shown as stalled, and the server warns of it; not while it waits for others in a round.
        Calls tell it by themselves; this is for whoever works long between two of them.

        Args:
            steps: A whole number, 0 or more, that grows while the worker gets on, such as steps of training.

        Raises:
            ConfigError: If it is none.
        """
        if not is_count(steps, least=0):
            raise ConfigError(f"steps is {steps!r}: give a whole number, 0 or more")
        self._open().set_progress(steps)

    def close(self, *, finished: bool = True, cause: str | None = None) -> None:
        """Say goodbye and close; closing twice is fine.

        Args:
            finished: Whether this worker's work is done, or it only leaves.
            cause: Why it leaves, as the server then tells.

        Raises:
            StateError: If another thread is in a call of this client, which then stays as it is.
        """
        self._part(finished=finished, cause=cause)

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end, as unfinished if that is an exception."""
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def __del__(self) -> None:
        """Finish when nobody holds the client any more, as a function that made it returns."""
        self.close()

    def __repr__(self) -> str:
        if self._session is None:
            return "<offbeat.Client, closed>"
        # A session answers neither in a child nor two threads at once.
        return f"<offbeat.Client {self._words}>"

    # -- inside

    def _at_exit(self, failure: BaseException | None) -> None:
        self._end(failure, is_at_exit=True)

    def _end(self, failure: BaseException | None, *, is_at_exit: bool = False) -> None:
        failure = process.failure_in(failure)
        cause = None if failure is None else process.cause_of(failure)
        self._part(finished=failure is None, cause=cause, is_at_exit=is_at_exit)

    def _part(self, *, finished: bool, cause: str | None, is_at_exit: bool = False) -> None:
        """Say goodbye and close; at the process's end another thread's call is broken off for it."""
        if (session := self._session) is not None:
            say = session.leave if is_at_exit else session.close
            with suppress(ForkedError):  # in a child there is nothing to say: the connection is the parent's
                say("finished" if finished else "left", None if finished else cause)
            self._session = None
            process.release(self)

    def _open(self) -> "_offbeat.Session":
        if self._session is None:
            raise ClosedError("this client is closed; make a new one")
        return self._session

    def _model(self) -> list[Entry]:
        if not self._table:
            raise StateError(
                "the server has no model yet: bring one with client.init(arrays), or wait for another "
                "worker's with client.pull()"
            )
        return self._table

    def _ready(self) -> "_offbeat.Session":
        session = self._open()
        self._model()
        if not self._has_read:
            raise StateError("a gradient belongs to parameters that were read: call client.pull() first")
        if not self._configured:
            session.configure(self._contribution, None)
            self._configured = True
        return session

    def _learn(self, table: str) -> None:
        from offbeat._offbeat import ArrayTable

        self._table = read_table(table)
        self._names = by_name(self._table)
        self._arrays = ArrayTable([((e.name, *e.aliases), e.shape, e.dtype) for e in self._table])

    def _empty(self) -> dict[str, Array]:
        return {entry.name: np.empty(entry.shape, entry.dtype) for entry in self._table}

    def _memories(self, out: Mapping[str, Array]) -> list[Array]:
        return self._arrays.memories(as_dict(out, "out"), self._adapt_out)

    def _values(self, gradients: Mapping[str, object]) -> list[Array | None]:
        return self._arrays.values(as_dict(gradients, "the push"), self._adapt)

    def _adapt(self, name: str, value: object) -> Array:
        entry = self._names.get(name)
        if entry is None:
            raise no_such_tensor(name, self._names, "the push")
        array, code = as_array(name, value)
        return contiguous(entry.check(array, code, "the push"))

    def _adapt_out(self, name: str, value: object) -> Array:
        entry = self._names.get(name)
        if entry is None:
            raise no_such_tensor(name, self._names, "out")
        if value is None:
            raise ModelMismatchError(f"out has no {entry}: give an array for every tensor of the model")
        return writable(name, value, entry)


def _is_new(value: object) -> bool:
    if not isinstance(value, New):
        return False
    samples = value.samples
    of: object = value.of  # up to 64 bits, one more than a count has
    is_part = isinstance(of, int) and not isinstance(of, bool) and 0 <= of < 1 << 64
    return is_number(samples) and samples >= 0 and is_part
