"""A module's tensor table: the plain module's names, each tensor once, and a refusal by name for the rest."""

import json

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigError, ModelMismatchError, UnsupportedTensorError
from offbeat.module import Binding, describe


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


def names(model):
    return [entry["name"] for entry in json.loads(describe(model).table)]


def test_the_table_is_the_state_dict_in_its_order():
    model = mlp()
    table = json.loads(describe(model).table)
    state = model.state_dict()
    assert [entry["name"] for entry in table] == list(state)
    assert [entry["shape"] for entry in table] == [list(t.shape) for t in state.values()]
    assert [entry["role"] for entry in table] == ["parameter"] * 4 + ["buffer"] * 3 + ["parameter"] * 2
    assert [entry["dtype"] for entry in table][4:8] == ["f32", "f32", "i64", "f32"]


def test_buffers_outside_the_state_dict_are_left_out():
    model = mlp()
    model[0].register_buffer("cache", torch.zeros(3), persistent=False)
    assert names(model) == list(model.state_dict())


def test_tied_weights_are_one_tensor_with_an_alias():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    table = json.loads(describe(model).table)
    assert [(entry["name"], entry["aliases"]) for entry in table] == [("0.weight", ["1.weight"])]


def test_a_module_used_twice_has_aliases_for_all_it_holds():
    layer = nn.BatchNorm1d(3)
    table = json.loads(describe(nn.Sequential(layer, layer)).table)
    assert [entry["aliases"] for entry in table] == [[f"1.{k}"] for k in layer.state_dict()]


def test_torch_compile_leaves_no_trace_in_names():
    model = mlp()
    assert names(torch.compile(model)) == names(model)
    inner = mlp()
    inner[0] = torch.compile(inner[0])
    assert names(inner) == names(model)


def test_data_parallel_leaves_no_trace_in_names():
    model = mlp()
    assert names(nn.DataParallel(model)) == names(model)


class DataParallel(nn.Module):
    """A user's own, that is called as torch's is, and has more than what it is around."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


def test_a_module_that_is_but_called_as_a_wrapper_is_whole():
    assert names(DataParallel()) == ["module.weight", "module.bias", "head.weight", "head.bias"]


def test_the_bytes_are_those_of_the_logical_order():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.register_buffer("every_other", torch.arange(4, dtype=torch.bfloat16)[::2])
    weight, _bias, half = describe(model).arrays()
    assert weight.tobytes() == model.weight.detach().contiguous().numpy().tobytes()
    assert torch.frombuffer(half.copy(), dtype=torch.bfloat16).tolist() == [0.0, 2.0]


def test_describing_copies_nothing_that_is_in_order():
    model = mlp()
    assert describe(model).arrays()[0].ctypes.data == model[0].weight.data_ptr()


# ---------------------------------------------------------------------------------------- refusals


class DTensor(torch.Tensor):
    """Bears the name by which the real one is known; that one needs a process group."""


def with_parameter(tensor):
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    return model


def with_buffer(tensor):
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("odd", tensor)
    return model


REFUSED = {
    "float64": (with_parameter(torch.zeros(2, dtype=torch.float64)), "is float64: parameters are float32"),
    "integer": (with_parameter(torch.zeros(2, dtype=torch.int32)), "is int32: parameters are float32"),
    "float8": (with_parameter(torch.zeros(2).to(torch.float8_e4m3fn)), "is float8_e4m3fn"),
    "complex": (with_parameter(torch.zeros(2, dtype=torch.complex64)), "is complex64"),
    "meta": (with_parameter(torch.zeros(2, device="meta")), "is a meta tensor"),
    "sparse": (with_parameter(torch.eye(2).to_sparse()), "is sparse"),
    "expanded": (with_parameter(torch.zeros(1).expand(3)), "is expanded"),
    "a DTensor": (with_parameter(torch.zeros(2).as_subclass(DTensor)), "is a DTensor"),
    "a subclass": (
        with_parameter(torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {}))),
        "is a Odd",
    ),
    "a complex buffer": (with_buffer(torch.zeros(2, dtype=torch.complex64)), "buffer '1.odd' is complex64"),
    "a sparse buffer": (with_buffer(torch.eye(2).to_sparse()), "buffer '1.odd' is sparse"),
    "an unsigned buffer": (with_buffer(torch.zeros(2, dtype=torch.uint16)), "buffer '1.odd' is uint16"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_cannot_be_held_is_refused_by_name(kind):
    model, said = REFUSED[kind]
    with pytest.raises(UnsupportedTensorError) as caught:
        describe(model)
    assert "'1.odd'" in str(caught.value)
    assert said in str(caught.value)


def test_a_real_dtensor_is_refused_by_name(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(UnsupportedTensorError, match=r"'1\.odd' is a DTensor \(FSDP"):
            describe(with_parameter(distribute_tensor(torch.zeros(2), mesh)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings(
    "ignore:.*[Qq]uantiz", "ignore:.*deprecated"
)  # torch tells each once in a process
def test_a_quantized_tensor_is_refused_by_name():
    quantized = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    with pytest.raises(UnsupportedTensorError, match=r"'1\.odd' is quantized"):
        describe(with_parameter(quantized))


def test_an_inference_tensor_is_refused_by_name():
    with torch.inference_mode():
        model = with_buffer(torch.zeros(2))
    with pytest.raises(UnsupportedTensorError, match="is an inference tensor"):
        describe(model)


def test_a_lazy_layer_is_refused_until_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedTensorError, match=r"'0\.weight' has no shape yet"):
        describe(model)
    model(torch.zeros(1, 2))
    assert names(model) == ["0.weight", "0.bias"]


def test_fsdp_is_refused_by_name(tmp_path):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(
            nn.Linear(2, 2),
            sharding_strategy=ShardingStrategy.NO_SHARD,  # all that a world of one can do
            device_id=torch.device("cpu"),
        )
        with pytest.raises(UnsupportedTensorError, match="the model is wrapped in FSDP"):
            describe(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_two_parameters_in_one_memory_are_refused_by_both_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedTensorError, match=r"'1\.weight' and '0\.weight'"):
        describe(model)


def test_a_parameter_that_is_a_part_of_another_one_s_memory_is_refused_by_both_names():
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 4, bias=False))
    model[1].weight.data = model[0].weight.data[1:]
    with pytest.raises(UnsupportedTensorError, match=r"'1\.weight' and '0\.weight' are two tensors in one"):
        describe(model)


def test_parameters_side_by_side_in_one_memory_are_several():
    """As those of an LSTM on a GPU are."""
    model, flat = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.zeros(17)
    for parameter, part in zip(model.parameters(), flat.split([6, 3, 6, 2]), strict=True):
        parameter.data = part.view(parameter.shape)
    columns = torch.zeros(4, 6)
    model.append(with_parameter(columns[:, ::2]))
    model.append(with_parameter(columns[:, 1::2]))
    assert len(names(model)) == 6 + 2 * 2


def test_all_that_cannot_be_held_is_named_at_once():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedTensorError) as caught:
        describe(model)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert repr(name) in str(caught.value)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        describe(nn.BatchNorm1d(3, affine=False))


# ---------------------------------------------------------------------------------------- matching


def test_matching_is_by_name_and_the_order_is_the_server_s():
    table = json.loads(describe(mlp()).table)
    binding = Binding(mlp(), json.dumps(table[::-1]))
    assert [slot.spec["name"] for slot in binding.slots] == [entry["name"] for entry in table[::-1]]


def _other_width(model):
    model[0] = nn.Linear(4, 5)


def _other_dtype(model):
    model.to(torch.bfloat16)


def _one_layer_more(model):
    model.append(nn.Linear(2, 2))


def _one_layer_less(model):
    del model[3]


def _a_tie(model):
    model[0].bias = model[1].bias


MISMATCHES = {
    _other_width: "tensor number 0 is parameter '0.weight' of shape [3, 4] and dtype float32 on the "
    "server, and this worker's model has parameter '0.weight' of shape [5, 4] and dtype float32",
    _other_dtype: "'0.weight' of shape [3, 4] and dtype bfloat16",
    _one_layer_more: "this worker's has parameter '4.weight' of shape [2, 2]",
    _one_layer_less: "tensor number 7 is parameter '3.weight' of shape [2, 3] and dtype float32 on the "
    "server, and this worker's model has no such tensor",
    _a_tie: "tied with '1.bias'",
}


def test_of_a_model_with_several_other_tensors_the_first_are_named_and_the_others_counted():
    table, other = describe(mlp()).table, mlp()
    other[0] = nn.Linear(4, 5, dtype=torch.bfloat16)
    with pytest.raises(ModelMismatchError) as caught:
        Binding(other, table)
    for name, theirs, ours in (("0.weight", [3, 4], [5, 4]), ("0.bias", [3], [5])):
        assert f"is parameter {name!r} of shape {theirs} and dtype float32 on the server" in str(caught.value)
        assert f"model has parameter {name!r} of shape {ours} and dtype bfloat16" in str(caught.value)
    assert "more differ" not in str(caught.value)
    count = sum(tensor.is_floating_point() for tensor in mlp().state_dict().values())
    with pytest.raises(ModelMismatchError, match=rf"; and {count - 3} more differ$") as caught:
        Binding(mlp().to(torch.bfloat16), table)
    assert str(caught.value).count("on the server, and this worker's model has") == 3


@pytest.mark.parametrize("change", MISMATCHES, ids=lambda f: f.__name__.strip("_"))
def test_another_model_is_refused_with_the_first_tensor_that_differs(change):
    table = describe(mlp()).table
    other = mlp()
    change(other)
    with pytest.raises(ModelMismatchError) as caught:
        Binding(other, table)
    assert MISMATCHES[change] in str(caught.value)
