"""The parameter server: it holds the model, and every worker's pushes move it."""

import json
import os
import sys
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast

from offbeat import log, process, schedule, staleness
from offbeat.address import reachable, start_line
from offbeat.arrays import (
    Array,
    Entry,
    as_array,
    as_state,
    by_name,
    contiguous,
    describe,
    no_such_tensor,
    read_table,
)
from offbeat.checks import Faults, is_count, refuse, seconds
from offbeat.errors import ClosedError, ConfigError, ModelMismatchError, StateError
from offbeat.naming import a_class, known_keywords
from offbeat.optim import as_spec
from offbeat.settings import Settings
from offbeat.termination import stopping_on_sigterm

if TYPE_CHECKING:
    import torch

    from offbeat import _offbeat
    from offbeat.tracking.endpoint import MetricsEndpoint

__all__ = ["ParameterServer"]

SHORT_TOKEN = 16
"""Characters: a shorter token gets a warning, since whoever reaches the port may try as many as he likes."""


class ParameterServer(process.Live):
    """Holds a model and applies what workers push, as it comes.

    Args:
        model: What is trained: an `nn.Module`, or a dict of named arrays or tensors, whose order is kept. It
            is copied and never changed. None: the first worker brings it.
        port: TCP port; 0 takes a free one.
        host: Address to listen on. None: the environment's OFFBEAT_HOST; else with a token every interface,
            without one this machine only.
        optimizer: The server's optimizer, such as `offbeat.optim.SGD(lr=0.1)`. None: the first worker that
            has one says it.
        update_rule: "async_sgd", the only one: each push is admitted, weighed and applied as it comes.
        staleness_policy: What late pushes are worth: a name, an object of `offbeat.staleness`, or a list.
        staleness_lr_factor: Factor of "adaptive_lr" where that is given by name.
        max_staleness: A push that is more updates late is rejected; None rejects none.
        momentum_correction: Whether SGD's momentum lives in the workers. None: where it can. False: one
            velocity on the server, as in torch.optim, which stale pushes can make diverge.
        transaction: "fragment" streams each push in pieces; "model" applies it as one.
        lr_schedule: An object of `offbeat.schedule`; or "linear" or "cosine", to 0 over `max_samples`.
        max_samples: The run ends for everybody when this many samples were pushed.
        token: What workers must know to join. None: the environment's OFFBEAT_TOKEN, or none.
        run_id: Name of the run; None makes one up.
        checkpoint_dir: Where the server keeps its checkpoints, for itself alone; made where it is not there.
            Three are kept. One is written when the model is in place and one by `stop()`. None: none.
        checkpoint_frequency: What is between two: a number of updates, or a time such as "500ms", "30s", "5m"
            or "1h". None: 1000 updates.
        resume: "auto" goes on from the newest checkpoint if there is one: with its model, optimizer state,
            counts, run id and, if `port` is 0, port; hyper-parameters are those given here. "must" does not
            start without one. "never" begins anew, and sets aside what is there.
        insecure: Allow another host than this machine without a token.
        linger_s: How long nobody must be there before `wait_for_workers` takes the work for done.
        rejoin_grace_s: How long a lost worker counts as there; one that was there before the server went on
            from a checkpoint five times as long.
        metrics_port: Where `GET /metrics` over HTTP tells the status in Prometheus's format; 0 takes a free
            port, None opens none. Needs prometheus-client.
        metrics_host: Address to listen on for that; another one than this machine's needs `insecure`, since
            there is no token.

    Raises:
        ConfigError: If a setting cannot be used; it names all that cannot.
        UnsupportedTensorError: If the model has tensors that cannot be held.

    Example:
        >>> with offbeat.ParameterServer({"w": np.zeros(3, np.float32)}) as server:
        ...     print(server.address)
    """

    _exit_turn = 2  # after workers of this process
    _instead = "hand server.address to others, and take the parameters with server.state_dict()"

    @known_keywords
    def __init__(
        self,
        model: "torch.nn.Module | Mapping[str, object] | None" = None,
        port: int = 0,
        *,
        host: str | None = None,
        optimizer: object = None,
        update_rule: str = "async_sgd",
        staleness_policy: staleness.Policy = "constant",
        staleness_lr_factor: float = staleness.DEFAULT_LR_FACTOR,
        max_staleness: int | None = None,
        momentum_correction: bool | None = None,
        transaction: str = "fragment",
        lr_schedule: schedule.Schedule | str | None = None,
        max_samples: int | None = None,
        token: str | None = None,
        run_id: str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_frequency: int | str | None = None,
        resume: str = "auto",
        insecure: bool = False,
        linger_s: float = 10.0,
        rejoin_grace_s: float = 60.0,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> None:
        self._server: _offbeat.Server | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._stopped = False
        self._config = Settings(
            port=port,
            host=host,
            optimizer=optimizer,
            update_rule=update_rule,
            staleness_policy=staleness_policy,
            staleness_lr_factor=staleness_lr_factor,
            max_staleness=max_staleness,
            momentum_correction=momentum_correction,
            transaction=transaction,
            lr_schedule=lr_schedule,
            max_samples=max_samples,
            token=token,
            run_id=run_id,
            checkpoint_dir=checkpoint_dir,
            checkpoint_frequency=checkpoint_frequency,
            resume=resume,
            insecure=insecure,
            linger_s=linger_s,
            rejoin_grace_s=rejoin_grace_s,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        ).resolve()
        self._metrics_at = None if metrics_port is None else (metrics_host, metrics_port)
        self._keeps_checkpoints = checkpoint_dir is not None
        self._model = _snapshot(model)
        self._config["blueprint"] = _blueprint(model)

    # -- life

    def start(self) -> None:
        """Listen; returns at once. The log says where, and the line with which a worker joins.

        Raises:
            AddressInUseError: If the port is taken, or that of the metrics.
            CheckpointError: If `checkpoint_dir` or what is in it cannot be used.
            ConfigError: If the checkpoint is of another run, or its workers had live optimizers and the
                settings given here are for the server's; or if `checkpoint_dir` is a
                `FaultTolerantTrainer`'s.
            ModelMismatchError: If the model is not the checkpoint's.
            StateError: If it was started before.
        """
        if self._stopped:
            raise ClosedError("this server was stopped; make a new one")
        if self._server is not None:
            raise StateError(f"this server has been started and listens on {self._server.address}")
        from offbeat._offbeat import Server

        # First, since it is known at once whether its port is free: nothing has to be undone then.
        endpoint = None if self._metrics_at is None else _endpoint(*self._metrics_at, weakref.ref(self))
        try:
            self._server = Server(json.dumps(self._config), self._model)
        except BaseException:
            if endpoint is not None:
                endpoint.close()
            raise
        self._model = None
        if endpoint is not None:
            self._endpoint = endpoint
            weakref.finalize(self, endpoint.close).atexit = False  # at exit `stop` does
            endpoint.start()
        process.register(self)
        token = self._config["token"]
        if token is not None and len(token) < SHORT_TOKEN:
            log.warn(
                f"the token is {len(token)} characters long and could be guessed: take {SHORT_TOKEN} or "
                "more, such as `openssl rand -hex 16` makes"
            )
        known = token is not None and token == os.environ.get("OFFBEAT_TOKEN")
        log.announce(start_line(self._server.address, token=token, in_environment=known))

    @property
    def address(self) -> str:
        """Where workers find it, "HOST:PORT"."""
        return reachable(self._open().address)

    @property
    def metrics_address(self) -> str | None:
        """Where `GET /metrics` is answered, "HOST:PORT"; None where there is no `metrics_port`."""
        self._open()
        return None if self._endpoint is None else reachable(self._endpoint.address)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there is a `checkpoint_dir`, and `rollback` has something to go back to."""
        return self._keeps_checkpoints

    def wait_for_workers(self, n: int | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the work is done: workers have joined, and for `linger_s` nobody has been there.

        A worker that was lost counts as there for `rejoin_grace_s`, since it may come back. One that could
        not begin, refused or gone before there was a model or before it had heard that it was in, is none
        of the n: another is waited for. SIGTERM stops the server in good order and ends the process with
        exit code 0, if nobody else handles it; with `checkpoint_dir` workers then wait for the server to come
        again.

        Args:
            n: Least number of workers that must have joined; None means 1.
            timeout_s: How long to wait; None means for ever.

        Returns:
            Whether it is so; False if the time was up.

        Raises:
            ConnectionLostError: If all workers were lost or have left, and none has finished.
        """
        with stopping_on_sigterm(self._terminate):
            return self._open().wait_for_workers(_workers(1 if n is None else n), _timeout(timeout_s))

    def wait_until_joined(self, n: int, timeout_s: float | None = None) -> bool:
        """Wait until n workers have joined; False if the time was up. SIGTERM as in `wait_for_workers`."""
        with stopping_on_sigterm(self._terminate):
            return self._open().wait_until_joined(_workers(n), _timeout(timeout_s))

    def stop(self, *, restarting: bool = False) -> None:
        """End the run: workers are told, and the socket is closed. Stopping twice is fine.

        Pushes that are under way have up to 10 s to end. Model and status stay readable as long as this
        object lives: a `state_dict()` taken after it holds every push that was acknowledged. A last
        checkpoint that cannot be written raises nothing: `status()["checkpoints"]["failed"]` then says why.

        Args:
            restarting: Whether the server will come again, from its last checkpoint: workers wait for it
                and go on, instead of ending.

        Raises:
            ConfigError: If it is to come again and keeps no checkpoints; nothing has stopped then.
        """
        if restarting and not self._keeps_checkpoints:
            raise ConfigError(
                "stop(restarting=True) of a server that keeps no checkpoints: nothing would be left to come "
                "again from; give checkpoint_dir= to ParameterServer, or leave restarting out"
            )
        self._stopped = True
        if self._server is not None:
            try:
                self._server.stop(not restarting)
            finally:
                if self._endpoint is not None:
                    self._endpoint.close()
            process.release(self)

    def __enter__(self) -> Self:
        """Use as a context manager: started at the begin, if it was not before, and stopped at the end."""
        if self._server is None or self._stopped:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- the model and the run

    def status(self) -> dict[str, Any]:
        """Tell everything there is to know: version, optimizer, workers and how they fare, pushes by fate.

        After `stop()` it tells how the run ended.
        """
        status: dict[str, Any] = json.loads(self._held().status())
        status["address"] = reachable(status["address"])
        return status

    def state_dict(self) -> "dict[str, torch.Tensor] | dict[str, Array]":
        """Copy the model as it is now, or as `stop()` left it.

        Returns:
            CPU tensors by name, as the plain module's `load_state_dict(strict=True)` takes them; arrays
            where torch is not imported. Of members that average it has BatchNorm's statistics, and with
            `asynchronous=True` the run's counts, under names of its own: a member has the whole model.

        Raises:
            StateError: If nobody has brought a model yet.
        """
        return _state(self._held())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Replace the model's values, in a new term: pushes on what was before are rejected.

        With `checkpoint_dir` it returns once a checkpoint has them. Where that cannot be written, a warning
        in the log says so, the values are in place, and the server tries again.

        Args:
            state: Arrays or tensors by name, all of the model's and no other; copied. A tensor with several
                names may be given under any of them.

        Raises:
            ModelMismatchError: If a name, shape or dtype is not the model's, or if two names of one tensor
                are given different values.
            CheckpointError: If the new term cannot be noted in `checkpoint_dir`; nothing is replaced then.
        """
        server = self._open()
        held = server.tensors()
        if held is None:
            raise StateError(
                "the server has no model yet: give it one when you make it, or let a worker bring it"
            )
        entries = read_table(held[0])
        known = by_name(entries)
        for name in state:
            if name not in known:
                raise no_such_tensor(name, known, "the state")
        server.load_tensors([_value_of(entry, state) for entry in entries])

    def rollback(self, version: int | None = None) -> int:
        """Go back to a checkpoint, while the run goes on: as after a learning rate that was too high.

        Model and optimizer state are what they were then; the learning rate, counts, versions and the
        schedule's place go on from now, in a new `term`. Pushes that were made on the values in between are
        rejected (`server_rolled_back`), and their workers read anew. It returns once a new checkpoint has
        that state, so that a server that is killed then goes on from it. Where that cannot be written, a
        warning in the log names the directory and the cause, the rollback stands, and the server tries again.
        Checkpoints of the stretch that was gone back from are the first to make room for new ones, as long as
        this server runs.

        Args:
            version: That whose values are wanted; None means those of the newest checkpoint. The checkpoint
                that a rollback has written counts as one of the version to which it went back, and not of
                the run's version at that time.

        Returns:
            The version whose values are in place now.

        Raises:
            CheckpointError: If there is none of that version (the error says which there are), it is damaged,
                or the directory takes no new term.
            StateError: If this server keeps no checkpoints, or has no model yet.
        """
        if version is not None and not is_count(version):
            raise ConfigError(
                f"version is {version!r}: give a checkpoint's, a whole number, 0 or more, or None"
            )
        return self._open().roll_back(version)

    def set_lr(self, lr: float, group: int | None = None) -> None:
        """Change the learning rate, from the next push on; the schedule's factor multiplies it as before.

        Args:
            lr: The new base rate.
            group: Index of the optimizer's group; None means all of them.

        Raises:
            ConfigError: If the rate is no finite number from 0 on, or if there is no such group.
        """
        server, faults = self._open(), Faults()
        rate = faults.catch(lambda: _rate(lr))
        if group is not None and not is_count(group):
            faults.append(f"group is {group!r}: give the index of a group, 0 or more, or None for all")
        refuse(faults)
        server.set_lr(cast(float, rate), group)

    def set_optimizer(self, optimizer: object) -> None:
        """Change the optimizer, from the next push on; its state begins anew, unless rates alone are other.

        Args:
            optimizer: A spec, or what becomes one: `offbeat.optim.as_spec`.
        """
        spec = as_spec(optimizer).spec(momentum_correction=self._config["momentum_correction"])
        self._open().set_optimizer(json.dumps(spec))

    @property
    def max_staleness(self) -> int | None:
        """The bound on staleness, in updates; may be set, from the next push on. None: no bound.

        A bound below what a worker's pushes usually miss rejects nearly all of them; at 0 workers with
        ``in_flight=2`` lose every second push, and are refused where they come. A server that goes on from a
        checkpoint has the bound that it is made with.

        Raises:
            ConfigError: If it is set to what is no number of updates; or to one while members are here whose
                mean needs each one's share, of which each is later than the one before.
        """
        is_running = self._server is not None and not self._stopped
        told = self.status() if is_running else self._config  # which another thread may set meanwhile
        found: int | None = told["staleness"]["max_staleness"]
        return found

    @max_staleness.setter
    def max_staleness(self, most: int | None) -> None:
        server = self._open()
        refuse(staleness.no_bound(most))
        server.set_max_staleness(most)
        self._config["staleness"]["max_staleness"] = most

    def __repr__(self) -> str:
        if self._server is None or self._stopped:
            return f"<offbeat.ParameterServer, {'stopped' if self._stopped else 'not started'}>"
        return f"<offbeat.ParameterServer at {self._server.address}>"

    # -- inside

    def _terminate(self) -> None:
        self.stop(restarting=self._keeps_checkpoints)

    def _at_exit(self, failure: BaseException | None) -> None:
        del failure
        self.stop()

    def _open(self) -> "_offbeat.Server":
        if self._stopped:
            raise ClosedError("this server was stopped; make a new one")
        return self._held()

    def _held(self) -> "_offbeat.Server":
        """Give what holds the model, whether it is still open or was stopped."""
        if self._server is None and self._stopped:
            raise ClosedError("this server was stopped before it was started; make a new one")
        if self._server is None:
            raise StateError("this server has not been started: call server.start(), or use a with statement")
        return self._server


def _endpoint(host: str, port: int, of: "weakref.ref[ParameterServer]") -> "MetricsEndpoint":
    """Listen for those who ask for a server's metrics, without holding the server."""
    from offbeat.tracking.endpoint import MetricsEndpoint
    from offbeat.tracking.prometheus import CONTENT_TYPE, Steady, text

    steady = Steady()

    def read() -> bytes:
        server = of()
        if server is None:
            raise ClosedError("the server of these metrics has gone")
        return text(server.status(), steady)

    return MetricsEndpoint(read, content_type=CONTENT_TYPE, host=host, port=port)


def _state(server: "_offbeat.Server") -> "dict[str, torch.Tensor] | dict[str, Array]":
    held = server.tensors()
    if held is None:
        raise StateError("the server has no model yet: no worker has brought one")
    return as_state(*held, tensor=sys.modules.get("torch") is not None)


def _value_of(entry: Entry, state: Mapping[str, object]) -> Array:
    """Take one tensor out of a state, under whichever of its names it is given."""
    values = {}
    for name in (entry.name, *entry.aliases):
        if name in state:
            array, code = as_array(name, state[name])
            values[name] = contiguous(entry.check(array, code, "the state"))
    if not values:
        raise ModelMismatchError(f"the state has no {entry}")
    first, *others = values
    for other in others:
        if values[first].tobytes() != values[other].tobytes():
            raise ModelMismatchError(
                f"the state has two values for one tensor: {first!r} and {other!r} are tied in the model, "
                "and what is given for them differs"
            )
    return values[first]


def _snapshot(model: "torch.nn.Module | Mapping[str, object] | None") -> "_offbeat.Snapshot | None":
    """Copy a model's values, so that what its owner does to it later is nothing to the server."""
    if model is None:
        return None
    if isinstance(model, Mapping):
        table, arrays = describe(model)
    elif _is_module(model):
        from offbeat.module import describe as describe_module

        description = describe_module(model)
        table, arrays = description.table, list(description.arrays())
    else:
        what = f"the class {model.__name__}" if isinstance(model, type) else a_class(model)
        raise ConfigError(f"model is {what}: give an nn.Module, a dict of named arrays, or None")
    from offbeat._offbeat import Snapshot

    return Snapshot(table, arrays)


def _blueprint(model: object) -> str | None:
    if not _is_module(model):
        return None
    from offbeat.blueprint import describe as describe_structure

    return describe_structure(model)


def _is_module(model: object) -> "TypeGuard[torch.nn.Module]":
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _rate(lr: object) -> float:
    try:
        rate = None if isinstance(lr, str | bool) else float(cast(float, lr))  # also takes 0-d tensors
    except (OverflowError, TypeError, ValueError):
        rate = None
    if rate is None:
        raise ConfigError(f"lr is {lr!r}: give a finite number, 0 or more")
    return rate


def _workers(n: int) -> int:
    if type(n) is not int or n < 1:
        raise ConfigError(f"n is {n!r}: it is a number of workers, 1 or more")
    return n


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and seconds(timeout_s=timeout_s):
        raise ConfigError(f"timeout_s is {timeout_s!r}: it is a number of seconds, or None for no limit")
    return timeout_s
