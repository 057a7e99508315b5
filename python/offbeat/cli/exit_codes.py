"""How a command ends: one number per kind of end, for scripts to tell them apart; docs/cli.md lists them."""

from enum import IntEnum

from offbeat.errors import (
    AddressInUseError,
    AuthenticationError,
    ConfigError,
    ConnectError,
    ConnectionLostError,
    FencedError,
    ModelMismatchError,
    NonFiniteError,
    OffbeatTimeoutError,
    ProtocolError,
    UnsupportedTensorError,
)

__all__ = ["SIGNALLED", "ExitCode", "code_of", "first_failure"]

SIGNALLED = 128
"""A process that signal n ended counts as exit code 128 + n, as in a shell."""


class ExitCode(IntEnum):
    """What each number means."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_THE_BENCHMARK = 3
    UNREACHABLE = 4
    NOT_ADMITTED = 5
    ADDRESS_IN_USE = 6
    BAD_MODEL = 7
    LOST = 8
    TIMEOUT = 9
    PROTOCOL = 10
    FILE = 11
    MISSING_PACKAGE = 12
    NOT_SAVED = 13
    INTERRUPTED = SIGNALLED + 2  # SIGINT


# A class comes before those it inherits from.
_CODES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], ExitCode], ...] = (
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
    (ConfigError, ExitCode.USAGE),
    (ConnectError, ExitCode.UNREACHABLE),
    (AuthenticationError, ExitCode.NOT_ADMITTED),
    (AddressInUseError, ExitCode.ADDRESS_IN_USE),
    ((ModelMismatchError, UnsupportedTensorError, NonFiniteError), ExitCode.BAD_MODEL),
    ((ConnectionLostError, FencedError), ExitCode.LOST),
    (OffbeatTimeoutError, ExitCode.TIMEOUT),
    (ProtocolError, ExitCode.PROTOCOL),
    (ModuleNotFoundError, ExitCode.MISSING_PACKAGE),
    (OSError, ExitCode.FILE),
)


def code_of(error: BaseException) -> ExitCode:
    """Give the exit code of an error; 1 for what nobody foresaw."""
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), ExitCode.UNEXPECTED)


def first_failure(*codes: int) -> int:
    """Give the code of a command of what its parts ended with, what matters most first."""
    return next((code for code in codes if code != ExitCode.OK), ExitCode.OK)
