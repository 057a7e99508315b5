"""Whether a model is the one that a state was taken of."""

import pytest
import torch
from torch import nn

from offbeat.errors import StateError
from offbeat.local.parameters import PIECE, check_back, each_once, fingerprint, is_as_it_was


def model(*sizes, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, size) for size in sizes))


def quantized(values):
    return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


def of_values(tensor):
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense().resolve_conj()


def conjugate(values):
    return torch.complex(values, values).conj()


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


@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, conjugate, quantized])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_of_one_whose_bits_cannot_be_read_nothing_is_said_but_its_shape(kind):
    def frozen(*shape, seed, kind=kind):
        torch.manual_seed(seed)
        return [("w", nn.Parameter(kind(torch.randn(*shape)), requires_grad=False)), *each_once(model(8))]

    kept = fingerprint(frozen(3, 4, seed=0))
    assert (kept[0][1], None in kept[1]) == (None, False)
    check_back(frozen(3, 4, seed=1), {"model": kept})
    dense = frozen(3, 4, seed=1, kind=lambda values: of_values(kind(values)))
    assert fingerprint(dense)[0][1] is not None
    check_back(dense, {"model": kept})
    with pytest.raises(
        StateError, match=r"parameter 'w' is of shape \[4, 4\], and the state's was of \[3, 4\]"
    ):
        check_back(frozen(4, 4, seed=0), {"model": kept})


def test_a_sum_is_of_all_bits_and_made_in_pieces():
    values = torch.arange(3 * PIECE + 5, dtype=torch.float32)
    (one,) = fingerprint([("w", nn.Parameter(values))])
    assert one == ["torch.float32", int(values.view(torch.int32).to(torch.int64).sum()), [len(values)]]
    assert fingerprint([("w", nn.Parameter(torch.empty(0, 3)))]) == [["torch.float32", 0, [0, 3]]]
    assert fingerprint([]) == []


def test_each_member_asks_the_others_and_hears_of_theirs():
    named, asked = each_once(model(8)), []
    state = {"model": fingerprint(named)}
    check_back(named, state, lambda value: asked.append(value) or True)
    with pytest.raises(StateError, match="the model of another member is not the one of its state"):
        check_back(named, state, asked.append)
    with pytest.raises(StateError, match="the model is not the one of the state"):
        check_back(each_once(model(8, seed=1)), state, lambda value: asked.append(value) or True)
    assert asked == [True, True, False]


@pytest.mark.parametrize("saved", [list, older])
def test_a_model_is_as_it_was_or_is_not(saved):
    kept = saved(fingerprint(each_once(model(8, 5))))
    assert is_as_it_was(each_once(model(8, 5)), kept)
    for other in (model(8, 5, seed=1), model(8), model(8, 5, 5), model(8, 5).double()):
        assert not is_as_it_was(each_once(other), kept)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_of_a_nested_one_nothing_is_said(layout):
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    named = [("w", nn.Parameter(nested, requires_grad=False))]
    kept = fingerprint(named)
    assert kept == [["torch.float32", None, None]]
    check_back(named, {"model": kept})
