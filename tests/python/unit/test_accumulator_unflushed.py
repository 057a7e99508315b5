"""What was gathered and made no update of is told of where a process ends well, and nothing else is."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import offbeat
from offbeat import forgotten, optim
from offbeat.errors import NonFiniteError
from support.averaging import warned

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """Forget what those of tests before have left, and what is left here, which is what these are about."""
    forgotten.with_something_left.clear()
    yield
    forgotten.with_something_left.clear()


def gather(accumulator, batches, loss_fn=LOSS):
    for _ in range(batches):
        accumulator.train_step(
            inputs=torch.ones(2, 4),
            targets=torch.zeros(2, dtype=torch.long),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=loss_fn,
        )


def at_the_end(failure=None):
    with warned() as told:
        forgotten.warn_of_forgotten(failure)
    return told


def made():
    return offbeat.AsyncGradientAccumulator(nn.Linear(4, 2), accumulation_steps=4)


def test_what_was_gathered_and_made_no_update_of_is_told_at_the_end_with_its_number():
    accumulator = made()
    gather(accumulator, 4)
    assert at_the_end() == [], "a window that is full is an update"
    gather(accumulator, 3)
    del accumulator
    (said,) = at_the_end()
    assert said.startswith("no update was made of 3 micro-batch(es) that were gathered, and the process ends")
    assert "flush()" in said
    assert at_the_end(ValueError()) == [], "whoever ends by an exception is told that"


@pytest.mark.parametrize("does", ["flush", "close", "state_dict"])
def test_what_is_flushed_closed_or_saved_is_not_forgotten_until_there_is_more(does):
    accumulator = made()
    gather(accumulator, 3)
    assert len(at_the_end()) == 1
    state = getattr(accumulator, does)()
    assert at_the_end() == []
    if does == "state_dict":
        again = made()
        again.model.load_state_dict(accumulator.model.state_dict())
        again.load_state_dict(state, optimizer=optim.SGD(lr=0.1))
        assert at_the_end() == [], "a state that was loaded is nothing new"
    if does != "close":
        gather(accumulator, 2)
        assert len(at_the_end()) == 1


@pytest.mark.parametrize("does", [None, "flush", "close", "state_dict"])
def test_a_with_block_that_ends_well_tells_what_was_not_flushed(does):
    with warned() as told, made() as accumulator:
        gather(accumulator, 3)
        if does is not None:
            getattr(accumulator, does)()
    said = "no update was made of 3 micro-batch(es) that were gathered, and the with block ends: "
    assert [text[: len(said)] for text in told] == ([said] if does is None else [])
    assert at_the_end() == [], "it is told once"


def test_a_with_block_that_ends_by_an_exception_tells_that_alone():
    accumulator = made()
    gather(accumulator, 3)
    with warned() as told, pytest.raises(KeyError), accumulator:
        raise KeyError
    assert told == []


def test_what_it_does_can_be_read():
    accumulator = made()
    gather(accumulator, 4)
    said = "<offbeat.AsyncGradientAccumulator 0 of 1, an update every 4 micro-batches, update 1"
    assert repr(accumulator) == f"{said}>"
    accumulator.close()
    assert repr(accumulator) == f"{said}, closed>"


def test_a_window_that_was_dropped_by_an_error_is_not_forgotten():
    accumulator = made()
    gather(accumulator, 3)
    with pytest.raises(NonFiniteError):
        gather(accumulator, 1, lambda outputs, targets: LOSS(outputs, targets) * float("nan"))
    assert at_the_end() == []


def test_a_trainer_that_is_closed_has_forgotten_nothing():
    class StopError(Exception):
        pass

    class Stops:
        def on_step(self, trainer, step):
            raise StopError

    trainer = offbeat.AsyncTrainer(
        nn.Linear(4, 2), strategy="accumulate", regular_sync_frequency=4, callbacks=Stops()
    )
    with pytest.raises(StopError):
        trainer.train(
            dataloader=[(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))] * 3,
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
            progress=False,
        )
    assert len(at_the_end()) == 1
    trainer.close()
    assert at_the_end() == []


ENDS = """
import sys
import torch
import offbeat

def main():
    accumulator = offbeat.AsyncGradientAccumulator(torch.nn.Linear(2, 2), accumulation_steps=2)
    accumulator.train_step(
        inputs=torch.ones(2, 2), targets=torch.ones(2, 2), optimizer=offbeat.optim.SGD(lr=0.1),
        loss_fn=torch.nn.MSELoss(),
    )
    if "raise" in sys.argv:
        raise ValueError("of the user's")

main()
"""


@pytest.mark.parametrize("how", ["well", "raise"])
def test_a_process_that_ends_well_tells_what_was_forgotten_also_of_what_a_function_has_held(how):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=60, check=False
    )
    text = "offbeat: no update was made of 1 micro-batch(es)"
    assert (ended.returncode, text in ended.stderr) == {"well": (0, True), "raise": (1, False)}[how]
