"""Members whose updates have a loss scale: all have the same one, and skip the same updates."""

import copy
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed, nn

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import ConnectionLostError, StateError
from support.averaging import warned
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1, momentum=0.9)
CLIP = 0.5


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def data_of(rank, length, infinite=()):
    random = torch.Generator().manual_seed(100 + rank)
    batches = [
        (torch.randn(5, 6, generator=random), torch.randint(5, (5,), generator=random)) for _ in range(length)
    ]
    return [
        (inputs * (math.inf if n in infinite else 1.0), targets)
        for n, (inputs, targets) in enumerate(batches)
    ]


def arrays(trained):
    return [value.detach().numpy().copy() for value in trained.state_dict().values()]


def scaled_to(trainer, **values):
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | values)
    return trainer


def fit(trainer, data, epochs=1):
    return trainer.train(dataloader=data, epochs=epochs, optimizer=SPEC, loss_fn=LOSS, progress=False)


def trained(rank, overlap, lengths, infinite):
    """Give what a trainer has made of an epoch of warm-up and one after it, and accumulators by hand."""
    data = data_of(rank, lengths[rank], [n for member, n in infinite if member == rank])
    ours, theirs = model(seed=rank), model(seed=rank)
    trainer = offbeat.AsyncTrainer(
        ours, 1, 2, 3, strategy="accumulate", amp="fp16", overlap=overlap, max_grad_norm=CLIP
    )
    scaled_to(trainer, scale=64.0, growth_interval=3)
    with trainer:
        history = fit(trainer, data, epochs=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    live = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    live.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(theirs.parameters(), CLIP) and None)
    skipped = 0
    for length, behind in ((2, False), (3, overlap)):
        accumulator = offbeat.AsyncGradientAccumulator(theirs, length, overlap=behind, grad_scaler=scaler)
        for inputs, targets in data:
            accumulator.train_step(
                inputs=inputs,
                targets=targets,
                optimizer=live,
                loss_fn=LOSS,
                autocast=torch.autocast("cpu", dtype=torch.float16),
            )
        accumulator.flush(optimizer=live)
        accumulator.close()
        skipped += accumulator.skipped_updates
    told = history.steps, history.skipped, trainer.skipped_steps, trainer.scaler.state_dict()
    return arrays(ours), arrays(theirs), told, skipped, scaler.state_dict()


@pytest.mark.parametrize("lengths", [(7, 7), (7, 3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_infinite_in_one_member_is_skipped_in_all_as_by_accumulators_by_hand(overlap, lengths):
    first, second = together(trained, 2, overlap, lengths, [(0, 4), (1, 2), (0, 6)])
    for ours, theirs, (steps, skipped, in_all, scale), by_hand, its_scale in (first, second):
        assert all(map(np.array_equal, ours, theirs))
        assert skipped == in_all == by_hand >= 3
        assert steps + skipped == 4 + 3, "of the longest, with what the warm-up's end and the last flush"
        assert scale == its_scale
    assert all(map(np.array_equal, first[0], second[0]))
    assert first[2] == second[2], "also what was skipped as others had more to do"


def trained_apart(rank, strategy):
    """Train a member alone, whose scale is cut thrice there, then together with another and alone again."""
    scales = []

    class Notes:
        def on_epoch_end(self, trainer, epoch):
            scales.append(trainer.scaler.state_dict())

    trainer = offbeat.AsyncTrainer(
        model(), 0, 1, 2, strategy=strategy, amp="fp16", overlap=False, callbacks=Notes()
    )
    scaled_to(trainer, scale=64.0, growth_interval=4)
    with trainer:
        fit(trainer, data_of(rank, 5 + rank, infinite=[0, 1, 2] if rank == 1 else ()))
        fit(trainer, data_of(rank, 6), epochs=2)
    return scales, arrays(trainer.model), trainer.skipped_steps


@pytest.mark.parametrize("before", ["local", "average"])
def test_members_that_had_scales_of_their_own_go_on_with_the_least_of_them_and_grow_alike(before):
    strategy = {0: before, 1: "accumulate", 2: before}
    (first, one, skipped), (second, other, also) = together(trained_apart, 2, strategy)
    assert (first[0]["scale"], second[0]["scale"]) == (128.0, 8.0)
    # Three updates since: each counts for the growth, from where the member of the least scale was.
    assert first[1] == second[1]
    assert first[1]["scale"] == 16.0
    assert (skipped, also) == (0, 3)
    if before == "average":
        assert all(map(np.array_equal, one, other))


def watched(rank, amp):
    """Train with a monitor that drops the one gradient that is far too large, which only one member has."""
    trainer = offbeat.AsyncTrainer(model(), 0, 1, 1, strategy="accumulate", amp=amp, overlap=False)
    if amp == "fp16":
        scaled_to(trainer, scale=8.0)
    losses = []

    def loss_fn(outputs, targets):
        losses.append(1)
        return LOSS(outputs, targets) * (1000.0 if (rank, len(losses)) == (1, 12) else 1.0)

    with (
        trainer,
        AsyncTrainingMonitor(
            trainer.model, ["gradient_norm"], remediation_strategy="reject", warm_up=8
        ) as monitor,
        warned() as told,
    ):
        history = trainer.train(
            dataloader=data_of(rank, 1) * 15, optimizer=optim.SGD(lr=0.01), loss_fn=loss_fn, progress=False
        )
    return monitor.report().num_dropped, history.steps, history.skipped, arrays(trainer.model), told


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_what_their_monitors_drop_is_no_update_of_any_and_none_that_the_scale_skipped(amp):
    for dropped, steps, skipped, _, told in (both := together(watched, 2, amp)):
        assert (dropped, steps, skipped) == (1, 14, 0)
        assert [line.partition(":")[0] for line in told] == ["step 12"], (
            "of no scaler that seems to be at work"
        )
    assert all(map(np.array_equal, both[0][3], both[1][3]))


def resumed(rank, overlap):
    """Take a state in mid-window, with a sum under way, and go on from it in another trainer."""
    data = data_of(rank, 12, infinite=[3] if rank == 0 else ())
    kept = []

    class Keeps:
        def on_step(self, trainer, step):
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 7:
                kept.append(copy.deepcopy((trainer.model.state_dict(), trainer.state_dict())))

    def made(callbacks=()):
        return offbeat.AsyncTrainer(
            model(), 0, 1, 2, strategy="accumulate", amp="fp16", overlap=overlap, callbacks=callbacks
        )

    whole, other = scaled_to(made(Keeps()), scale=64.0, growth_interval=2), made()
    with whole, other:
        fit(whole, data)
        values, state = kept[0]
        other.model.load_state_dict(values)
        other.load_state_dict(state, optimizer=SPEC)
        fit(other, data[7:])
    told = [(t.scaler.state_dict(), t.skipped_steps) for t in (whole, other)]
    is_late = state["stage"]["work"]["accumulator"]["due"] is not None
    return arrays(whole.model), arrays(other.model), told, is_late


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_of_members_goes_on_bit_for_bit_with_its_scale(overlap):
    for whole, other, (theirs, ours), is_late in together(resumed, 2, overlap):
        assert all(map(np.array_equal, whole, other))
        assert theirs == ours
        assert theirs[1] == 1
        assert is_late == overlap


def unlike(rank):
    trainer = offbeat.AsyncTrainer(model(), 0, 1, 2, strategy="accumulate", amp=("fp16", "bf16")[rank])
    with trainer, pytest.raises(StateError) as told:
        fit(trainer, data_of(rank, 4))
    return str(told.value)


def test_members_of_which_one_alone_scales_its_losses_are_all_told():
    for told in together(unlike, 2):
        assert "grad_scaler is 'a GradScaler' in member 0 and None in member 1" in told


def fallen(rank):
    """Train alone until one member's scale is 0, and then together on sound data."""
    ours = model()
    strategy = {0: "local", 1: "accumulate"}
    with warned() as told, offbeat.AsyncTrainer(ours, 0, 1, 1, strategy=strategy, amp="fp16") as trainer:
        scaled_to(trainer, scale=2.0**-140 if rank == 1 else 64.0)
        fit(trainer, data_of(rank, 15, range(15) if rank == 1 else ()))
        scale = trainer.scaler.get_scale()
        history = fit(trainer, data_of(rank, 6))
    return scale, trainer.scaler.get_scale(), history.steps, told


def test_a_scale_that_has_fallen_to_0_in_one_member_ends_nobody_s_learning():
    (_, first, steps, _), (scale, second, others, told) = together(fallen, 2)
    assert (scale, first, second) == (0.0, 64.0, 64.0)
    assert (steps, others) == (6, 6)
    assert len([text for text in told if "this member's loss scale had fallen to 0" in text]) == 1


def left_alone(rank):
    """Go on by updates of a group whose other member does not come; give what the optimizer has then."""
    ours = model()
    live = torch.optim.Adam(ours.parameters(), lr=0.01)
    group = distributed.new_group(timeout=timedelta(seconds=3))
    settings = {"strategy": {0: "local", 1: "accumulate"}, "process_group": group}
    with offbeat.AsyncTrainer(ours, 0, 1, 1, **settings) as trainer:
        trainer.train(dataloader=data_of(rank, 4), optimizer=live, loss_fn=LOSS, progress=False)
        if rank == 0:
            with pytest.raises(ConnectionLostError):
                trainer.train(dataloader=data_of(rank, 4), optimizer=live, loss_fn=LOSS, progress=False)
        distributed.barrier()
    return [float(state["step"]) for state in live.state.values()]


def test_an_optimizer_begins_anew_for_the_members_updates_and_not_before_they_are_there():
    assert together(left_alone, 2) == [[4.0] * 4] * 2
