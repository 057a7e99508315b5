"""Every error that Offbeat raises on purpose: one tree, and each also the builtin that Python users expect.

`except offbeat.errors.OffbeatError` catches all of them and nothing else; `except ConnectionError`, `except
ValueError` and their like keep working in code that never heard of Offbeat. A refused *push* is no error: it
is a `Receipt` with a reason.

The Rust core looks these classes up by name and raises them with one argument, the message.
"""

__all__ = [
    "AddressInUseError",
    "AuthenticationError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "ConnectionLostError",
    "DamagedError",
    "FencedError",
    "ForkedError",
    "ModelMismatchError",
    "NonFiniteError",
    "OffbeatError",
    "OffbeatTimeoutError",
    "OtherTermsError",
    "ProtocolError",
    "RejectedError",
    "ServerClosedError",
    "StateError",
    "UnknownAttributeError",
    "UnsupportedTensorError",
]


class OffbeatError(Exception):
    """The root of the tree; never raised itself."""


class ConfigError(OffbeatError, ValueError):
    """A setting cannot be used: out of its range, unknown by name, or at odds with another setting.

    Raised where the setting is given, before anything is started; it names every bad setting at once, and for
    an unknown name the nearest known one.
    """


class UnknownAttributeError(ConfigError, AttributeError):
    """An attribute is set that there is not, or that cannot be set any more. Nothing was changed.

    The message says what to do instead, and which attributes can be set.
    """


class UnsupportedTensorError(OffbeatError, TypeError):
    """A tensor is of a kind that Offbeat does not carry.

    Sparse, quantized, meta and distributed tensors, and the dtypes outside the table in the documentation.
    The message names the tensor.
    """


class ModelMismatchError(OffbeatError, ValueError):
    """Two sides hold different models, or what was given does not fit the model.

    The message names the first tensors that differ, with both shapes and both dtypes.
    """


class NonFiniteError(OffbeatError, ValueError):
    """A gradient or a parameter is NaN or infinite where only finite numbers may go. Nothing was changed."""


class ConnectError(OffbeatError, ConnectionError):
    """The server could not be reached.

    The message says which address was tried, for how long, how each attempt ended, and what to look at.
    """


class ConnectionLostError(OffbeatError, ConnectionError):
    """A connection that stood has broken, and the call could not be finished.

    The session is over: every later call raises this too, and whether the server applied the last push stays
    unknown. Make a new client or worker.
    """


class ServerClosedError(ConnectionLostError):
    """The server has ended the run or was stopped, and said so."""


class AuthenticationError(OffbeatError, PermissionError):
    """The two sides do not hold the same token, or one of them holds none."""


class ProtocolError(OffbeatError, ConnectionError):
    """The other side sent what this version of Offbeat does not understand, or it was damaged on the way."""


class FencedError(OffbeatError, RuntimeError):
    """Another process has taken this worker's place, so that this one may push no more."""


class OffbeatTimeoutError(OffbeatError, TimeoutError):
    """What was waited for did not happen within the `timeout_s` given."""


class AddressInUseError(OffbeatError, OSError):
    """The server's address is taken by another process. `port=0` takes a free port."""


class CheckpointError(OffbeatError, OSError):
    """A directory of checkpoints cannot be used, or what is in it: the message says which file, and why."""


class DamagedError(CheckpointError):
    """A checkpoint of a `FaultTolerantTrainer` is not as it was written. Another one may serve."""


class ClosedError(OffbeatError, RuntimeError):
    """The server, client or worker was closed, or stopped, and is used again."""


class ForkedError(OffbeatError, RuntimeError):
    """A server, client or worker made before a fork is used in the child.

    The fork itself is allowed. Create the object in the child, or start processes with the "spawn" method.
    """


class StateError(OffbeatError, RuntimeError):
    """The call makes no sense yet, or no longer: the message says what has to come first."""


class OtherTermsError(StateError):
    """Those at the server average otherwise than this member: the message says in what, and what to do."""


class RejectedError(OffbeatError, RuntimeError):
    """The server rejected 100 pushes of this worker in a row. The message counts the reasons."""
