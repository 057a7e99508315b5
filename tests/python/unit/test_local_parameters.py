"""Whether a model is the one that a state was taken of."""

import pytest
import torch
from torch import nn

from offbeat.errors import StateError
from offbeat.local.parameters import check_back, each_once, fingerprint


def model(*sizes, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, size) for size in sizes))


def older(kept):
    """What was saved before shapes were."""
    return [entry[:2] for entry in kept]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            model(8, 5, seed=1),
            r"parameter '0.weight' has other values: load the model's own state before this",
        ),
        (
            model(8, 4),
            r"parameter '1.weight' is of shape \[4, 6\], and the state's was of \[5, 6\]: build the",
        ),
        (model(8), "it has 2 parameters, and the state's had 4: build the model that was saved"),
        (model(8, 5).bfloat16(), None),  # of whose values nothing can be said
        (model(8, 5), None),
    ],
)
def test_a_model_is_told_from_another_and_in_what(other, told):
    named, kept = each_once(other), fingerprint(each_once(model(8, 5)))
    if told is None:
        for known in (kept, older(kept), None):
            check_back(named, {"model": known})
        check_back(named, {})
        return
    with pytest.raises(StateError, match=f"the model is not the one of the state: {told}"):
        check_back(named, {"model": kept})
    with pytest.raises(StateError, match=r"has other values|has 2 parameters"):
        check_back(named, {"model": older(kept)})


def test_each_member_asks_the_others_and_hears_of_theirs():
    named, asked = each_once(model(8)), []
    state = {"model": fingerprint(named)}
    check_back(named, state, lambda value: asked.append(value) or True)
    with pytest.raises(StateError, match="the model of another member is not the one of its state"):
        check_back(named, state, asked.append)
    with pytest.raises(StateError, match="the model is not the one of the state"):
        check_back(each_once(model(8, seed=1)), state, lambda value: asked.append(value) or True)
    assert asked == [True, True, False]
