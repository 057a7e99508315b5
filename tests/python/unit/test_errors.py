"""The errors form one tree, and each is also the builtin that users expect."""

import builtins
import inspect
import pickle  # noqa: TID251  that errors survive a trip between processes is the claim

import pytest

from offbeat import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value)]
RAISED = [cls for cls in CLASSES if cls is not errors.OffbeatError]


def test_the_module_lists_every_class_it_has():
    assert len(CLASSES) == 21
    assert sorted(errors.__all__) == sorted(cls.__name__ for cls in CLASSES)


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_each_error_is_under_the_root_and_a_builtin(cls):
    assert issubclass(cls, errors.OffbeatError)
    found = [
        base
        for base in cls.__mro__
        if base.__module__ == builtins.__name__ and base not in {object, BaseException, Exception}
    ]
    assert found, f"{cls.__name__} is no builtin error besides Exception"


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_each_error_says_when_it_is_raised(cls):
    assert cls.__doc__
    assert cls.__doc__ != cls.__mro__[1].__doc__


@pytest.mark.parametrize("cls", RAISED, ids=lambda cls: cls.__name__)
def test_each_error_carries_its_message_and_survives_pickling(cls):
    error = cls("what happened")
    assert str(error) == "what happened"
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  made one line above
    assert type(copy) is cls
    assert str(copy) == "what happened"


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (errors.AddressInUseError, OSError),
        (errors.AuthenticationError, PermissionError),
        (errors.CheckpointError, OSError),
        (errors.ConfigError, ValueError),
        (errors.ConnectError, ConnectionError),
        (errors.ConnectionLostError, ConnectionError),
        (errors.ModelMismatchError, ValueError),
        (errors.NonFiniteError, ValueError),
        (errors.OffbeatTimeoutError, TimeoutError),
        (errors.ProtocolError, ConnectionError),
        (errors.ServerClosedError, errors.ConnectionLostError),
        (errors.UnknownAttributeError, AttributeError),
        (errors.UnsupportedTensorError, TypeError),
    ],
)
def test_a_user_who_expects_the_builtin_catches_it(cls, base):
    with pytest.raises(base):
        raise cls("what happened")
