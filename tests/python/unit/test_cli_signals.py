"""Where a signal breaks a command off: in the places marked for it, and nowhere else."""

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from offbeat.cli.signals import Signals, Stopped, handlers, install


@pytest.fixture
def signals():
    before = handlers()
    yield Signals()
    install(before)


def test_a_signal_is_raised_in_a_place_that_it_may_break_off(signals):
    with pytest.raises(Stopped, match="SIGTERM"), signals.raised():
        signal.raise_signal(signal.SIGTERM)


def test_one_that_comes_elsewhere_is_raised_as_the_next_place_is_entered_and_once(signals):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM"), signals.raised():
        pytest.fail("entered")
    with signals.raised():
        pass


def test_none_breaks_into_what_the_first_has_begun(signals):
    with contextlib.suppress(Stopped), signals.raised():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
            ended = True
    assert ended
    with pytest.raises(Stopped, match="SIGTERM"), signals.raised():
        pytest.fail("entered")


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_place_passes_over_as_many_as_it_says_those_that_came_earlier_counted(signals, capfd, earlier):
    passed_over = []
    for _ in range(earlier):
        signal.raise_signal(signal.SIGINT)
    with contextlib.suppress(Stopped), signals.raised(but_for=1):
        while len(passed_over) <= 1:
            signal.raise_signal(signal.SIGINT)
            passed_over.append(capfd.readouterr().err)
    assert passed_over == ["offbeat: SIGINT, and this ends already; one more breaks that off\n"][earlier:]


def test_what_a_place_has_passed_over_is_not_raised_by_the_next(signals):
    with signals.raised(but_for=1):
        signal.raise_signal(signal.SIGTERM)
    with signals.raised():
        pass


def test_what_is_forgotten_is_not_raised(signals):
    signal.raise_signal(signal.SIGTERM)
    signals.forget()
    with signals.raised():
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_third_that_is_kept_ends_the_process(number):
    code = (
        "import signal, sys\n"
        "from offbeat.cli.signals import Signals\n"
        "signals = Signals()\n"
        "signals.before_the_last = lambda: print('the last', flush=True)\n"
        "for n in range(4):\n"
        "    print(n, flush=True)\n"
        "    signal.raise_signal(int(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(int(number))],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (-number, ["0", "1", "2", "the last"])


def test_from_a_thread_that_may_not_change_them_handlers_stay(signals):
    def elsewhere():
        install(dict.fromkeys(handlers(), signal.SIG_IGN))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with pytest.raises(Stopped), signals.raised():
        signal.raise_signal(signal.SIGTERM)
