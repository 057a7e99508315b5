"""A blueprint is the model or it is not there: whatever only looks alike is found out, by name."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from offbeat import blueprint
from offbeat.blueprint.layers import LAYERS
from offbeat.errors import ConfigError, ProtocolError

# Constructor arguments of one odd specimen per class: no default where another value is possible.
SPECIMENS = {
    "Linear": {"in_features": 3, "out_features": 2, "bias": False},
    "Identity": {},
    "Embedding": {
        "num_embeddings": 7,
        "embedding_dim": 3,
        "padding_idx": -1,
        "max_norm": 2.5,
        "norm_type": 1.5,
    },
    "EmbeddingBag": {"num_embeddings": 7, "embedding_dim": 3, "mode": "sum", "padding_idx": 2},
    "Conv1d": {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": "same", "groups": 2},
    "Conv2d": {"in_channels": 2, "out_channels": 3, "kernel_size": (3, 1), "stride": 2, "padding": (1, 0)}
    | {"dilation": 2, "bias": False, "padding_mode": "reflect"},
    "Conv3d": {
        "in_channels": 1,
        "out_channels": 2,
        "kernel_size": 2,
        "padding": 1,
        "padding_mode": "circular",
    },
    "ConvTranspose1d": {
        "in_channels": 2,
        "out_channels": 3,
        "kernel_size": 3,
        "stride": 2,
        "output_padding": 1,
    },
    "ConvTranspose2d": {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "bias": False, "dilation": 2},
    "ConvTranspose3d": {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "groups": 2},
    "Fold": {"output_size": (4, 5), "kernel_size": (2, 2), "stride": 2},
    "Unfold": {"kernel_size": 2, "padding": 1, "stride": (1, 2)},
    "BatchNorm1d": {"num_features": 3, "momentum": None, "eps": 1e-3},
    "BatchNorm2d": {"num_features": 3, "affine": False},
    "BatchNorm3d": {"num_features": 3, "track_running_stats": False},
    "InstanceNorm1d": {"num_features": 3},
    "InstanceNorm2d": {"num_features": 3, "affine": True},
    "InstanceNorm3d": {"num_features": 3, "affine": True, "track_running_stats": True},
    "GroupNorm": {"num_groups": 2, "num_channels": 4, "affine": False},
    "LayerNorm": {"normalized_shape": (2, 3), "bias": False},
    "RMSNorm": {"normalized_shape": (3,), "eps": 1e-3},
    "LocalResponseNorm": {"size": 3, "alpha": 0.1, "beta": 0.5, "k": 2.0},
    "CrossMapLRN2d": {"size": 3, "alpha": 0.1, "beta": 0.5, "k": 2},
    "MaxPool1d": {"kernel_size": 2, "stride": 1, "dilation": 2, "ceil_mode": True},
    "MaxPool2d": {"kernel_size": (2, 3), "padding": 1},
    "MaxPool3d": {"kernel_size": 2},
    "AvgPool1d": {"kernel_size": 2, "count_include_pad": False},
    "AvgPool2d": {"kernel_size": 2, "stride": 3, "divisor_override": 5},
    "AvgPool3d": {"kernel_size": 2, "ceil_mode": True},
    "LPPool1d": {"norm_type": 2.0, "kernel_size": 2},
    "LPPool2d": {"norm_type": 1.5, "kernel_size": (2, 1), "stride": 2},
    "LPPool3d": {"norm_type": 1.5, "kernel_size": 2, "ceil_mode": True},
    "AdaptiveAvgPool1d": {"output_size": 3},
    "AdaptiveAvgPool2d": {"output_size": (None, 3)},
    "AdaptiveAvgPool3d": {"output_size": 1},
    "AdaptiveMaxPool1d": {"output_size": 3},
    "AdaptiveMaxPool2d": {"output_size": (2, 3)},
    "AdaptiveMaxPool3d": {"output_size": 2},
    "ReflectionPad1d": {"padding": 1},
    "ReflectionPad2d": {"padding": (1, 2, 0, 1)},
    "ReflectionPad3d": {"padding": 1},
    "ReplicationPad1d": {"padding": (1, 0)},
    "ReplicationPad2d": {"padding": 1},
    "ReplicationPad3d": {"padding": 1},
    "CircularPad1d": {"padding": 1},
    "CircularPad2d": {"padding": 1},
    "CircularPad3d": {"padding": 1},
    "ZeroPad1d": {"padding": 1},
    "ZeroPad2d": {"padding": (0, 1, 2, 3)},
    "ZeroPad3d": {"padding": 1},
    "ConstantPad1d": {"padding": 1, "value": 2.5},
    "ConstantPad2d": {"padding": 1, "value": -1},
    "ConstantPad3d": {"padding": 1, "value": float("-inf")},
    "LogSigmoid": {},
    "Sigmoid": {},
    "Softmax2d": {},
    "Softsign": {},
    "Tanh": {},
    "Tanhshrink": {},
    "Hardsigmoid": {"inplace": True},
    "Hardswish": {"inplace": True},
    "Mish": {"inplace": True},
    "ReLU": {"inplace": True},
    "ReLU6": {"inplace": True},
    "SELU": {"inplace": True},
    "SiLU": {"inplace": True},
    "CELU": {"alpha": 2.0},
    "ELU": {"alpha": 0.5, "inplace": True},
    "GELU": {"approximate": "tanh"},
    "GLU": {"dim": 1},
    "LogSoftmax": {"dim": 1},
    "Softmax": {"dim": -1},
    "Softmin": {"dim": 0},
    "Hardshrink": {"lambd": 0.25},
    "Softshrink": {"lambd": 0.25},
    "Hardtanh": {"min_val": -2.0, "max_val": 0.5},
    "LeakyReLU": {"negative_slope": 0.3},
    "PReLU": {"num_parameters": 4, "init": 0.1},
    "RReLU": {"lower": 0.1, "upper": 0.2},
    "Softplus": {"beta": 2.0, "threshold": 5.0},
    "Threshold": {"threshold": 0.1, "value": 20.0},
    "AlphaDropout": {"p": 0.3},
    "Dropout": {"p": 0.0, "inplace": True},
    "Dropout1d": {"p": 0.1},
    "Dropout2d": {"p": 0.2},
    "Dropout3d": {"p": 0.3},
    "FeatureAlphaDropout": {"p": 0.4},
    "ChannelShuffle": {"groups": 2},
    "Flatten": {"start_dim": 0, "end_dim": 1},
    "Unflatten": {"dim": 1, "unflattened_size": (2, 3)},
    "PixelShuffle": {"upscale_factor": 2},
    "PixelUnshuffle": {"downscale_factor": 2},
    "Upsample": {"scale_factor": (2.0, 1.5), "mode": "bilinear", "align_corners": True},
    "UpsamplingBilinear2d": {"scale_factor": 2.0},
    "UpsamplingNearest2d": {"size": (4, 4)},
}


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 4),
    )


def reason(model: nn.Module) -> str:
    """Why a model has no blueprint; fails if it has one."""
    text = blueprint.describe(model)
    with pytest.raises(ConfigError, match="cannot be built here") as caught:
        blueprint.build(text)
    return str(caught.value)


def test_every_layer_of_the_table_has_a_specimen():
    assert len(LAYERS) > 80
    assert sorted(SPECIMENS) == sorted(LAYERS)


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_layer_is_built_as_it_was_described(name):
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[name].cls(**SPECIMENS[name]))
    built = blueprint.build(blueprint.describe(model))
    assert repr(built) == repr(model)
    assert [(k, v.shape, v.dtype) for k, v in built.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in model.state_dict().items()
    ]
    assert blueprint.describe(built) == blueprint.describe(model)


def test_a_built_model_computes_what_the_original_computes():
    model = cnn()
    built = blueprint.build(blueprint.describe(model))
    built.load_state_dict(model.state_dict())
    x = torch.randn(5, 1, 3, 3)
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    assert torch.equal(built(x), wanted)
    assert all(torch.equal(a, b) for a, b in zip(built.buffers(), model.buffers(), strict=True))


def test_describing_and_building_use_no_random_numbers():
    model, before = cnn(), torch.get_rng_state()
    blueprint.build(blueprint.describe(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_are_built_without_memory_and_get_it_once(monkeypatch):
    text = blueprint.describe(nn.Linear(2, 3))
    devices, reset = [], nn.Linear.reset_parameters

    def watched(self):
        devices.append(self.weight.device.type)
        reset(self)

    monkeypatch.setattr(nn.Linear, "reset_parameters", watched)
    assert blueprint.build(text).weight.device.type == "cpu"
    assert devices == ["meta"]


def test_tied_shared_frozen_and_half_precision_survive():
    shared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.Sequential(shared, nn.Linear(3, 3), shared, nn.Linear(3, 3), nn.Linear(3, 3))
    model[3].weight = model[1].weight
    model[4].requires_grad_(False)
    model[4].to(torch.bfloat16)
    built = blueprint.build(blueprint.describe(model))
    assert built[2] is built[0]
    assert built[3].weight is built[1].weight
    assert built[3].bias is not built[1].bias
    assert [p.requires_grad for p in built.parameters()] == [p.requires_grad for p in model.parameters()]
    assert built[4].weight.dtype is torch.bfloat16
    assert len(list(built.parameters())) == len(list(model.parameters()))


def test_the_building_process_s_default_dtype_does_not_matter():
    text = blueprint.describe(cnn())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        built = blueprint.build(text)
        assert blueprint.describe(built) == text
    finally:
        torch.set_default_dtype(before)
    assert {p.dtype for p in built.parameters()} == {torch.float32}


# ---------------------------------------------------------------------------------------- near misses


class MyLinear(nn.Linear):
    pass


class Doubling(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def _subclass_of_a_layer(model):
    model[3] = MyLinear(4, 4)


def _subclass_of_sequential(model):
    model[0] = Doubling(*model[0])


def _same_name_as_a_layer(model):
    model[3] = type("Linear", (nn.Linear,), {})(4, 4)


def _patched_forward(model):
    model[3].forward = lambda x: x


def _forward_hook(model):
    model[4].register_forward_hook(lambda module, inputs, output: output * 2)


def _forward_pre_hook(model):
    model[2].register_forward_pre_hook(lambda module, inputs: inputs)


def _backward_hook(model):
    model[3].register_full_backward_hook(lambda module, grad_input, grad_output: None)


def _state_dict_hook(model):
    model[3].register_state_dict_post_hook(lambda module, state, prefix, metadata: None)


def _gradient_hook_on_a_parameter(model):
    model[3].weight.register_hook(lambda gradient: gradient * 0.1)


def _post_accumulate_hook_on_a_parameter(model):
    model[3].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _weight_norm(model):
    parametrizations.weight_norm(model[3])


def _spectral_norm(model):
    parametrizations.spectral_norm(model[3])


def _dropout_in_eval_mode(model):
    model[2].eval()


def _norm_in_eval_mode(model):
    model[0][1].eval()


def _extra_attribute(model):
    model[3].scale = 2.0


def _changed_attribute(model):
    model[0][0].transposed = True


def _changed_private_attribute(model):
    model[0][0]._reversed_padding_repeated_twice = (1, 1, 1, 1)


def _missing_attribute(model):
    del model[3].in_features


def _extra_parameter(model):
    model[3].register_parameter("gain", nn.Parameter(torch.ones(1)))


def _extra_buffer(model):
    model[4].register_buffer("seen", torch.zeros(1))


def _parameter_taken_away(model):
    model[3].bias = None
    model[3].bias_was = True


def _buffer_out_of_the_state_dict(model):
    model[0][1]._non_persistent_buffers_set.add("running_mean")


def _extra_child(model):
    model[3].add_module("extra", nn.ReLU())


def _other_shape(model):
    model[3].weight = nn.Parameter(torch.zeros(4, 5))


def _a_list_for_an_argument(model):
    model[0].append(nn.MaxPool2d([1, 1]))


def _a_tensor_for_an_argument(model):
    model[2].p = torch.tensor(0.25)


def _shared_buffer(model):
    model[0].append(nn.BatchNorm2d(4))
    model[0][3].running_mean = model[0][1].running_mean


def _attention(model):
    model[4] = nn.MultiheadAttention(4, 1)


def _a_module_list(model):
    model[4] = nn.ModuleList([nn.ReLU()])


def _whole_model_in_eval_mode(model):
    model.eval()


NEAR_MISSES = {
    _subclass_of_a_layer: "module '3'",
    _subclass_of_sequential: "module '0'",
    _same_name_as_a_layer: "module '3'",
    _patched_forward: "module '3' has an attribute of its own, 'forward'",
    _forward_hook: "module '4' has a hook",
    _forward_pre_hook: "module '2' has a hook",
    _backward_hook: "module '3' has a hook",
    _state_dict_hook: "module '3' has a hook",
    _gradient_hook_on_a_parameter: "module '3' has a hook on its parameter 'weight'",
    _post_accumulate_hook_on_a_parameter: "module '3' has a hook on its parameter 'weight'",
    _weight_norm: "module '3'",
    _spectral_norm: "module '3'",
    _dropout_in_eval_mode: "module '2' is in eval mode",
    _norm_in_eval_mode: "module '0.1' is in eval mode",
    _extra_attribute: "module '3' has an attribute of its own, 'scale'",
    _changed_attribute: "module '0.0' has transposed=True",
    _changed_private_attribute: "module '0.0' has _reversed_padding_repeated_twice",
    _missing_attribute: "module '3'",
    _extra_parameter: "module '3' has the parameter names",
    _extra_buffer: "module '4' has the buffer names",
    _parameter_taken_away: "module '3' has an attribute of its own",
    _buffer_out_of_the_state_dict: "module '0.1' keeps other buffers",
    _extra_child: "module '3' has the child names",
    _other_shape: "module '3' has a parameter 'weight' of shape",
    _a_list_for_an_argument: "module '0.3' has kernel_size=[1, 1], a list",
    _a_tensor_for_an_argument: "module '2' has p=tensor(0.2500)",
    _shared_buffer: "module '0.3' shares its buffer 'running_mean'",
    _attention: "module '4' is a torch.nn.MultiheadAttention",
    _a_module_list: "module '4' is a torch.nn.ModuleList",
    _whole_model_in_eval_mode: "the model itself is in eval mode",
}


def test_there_are_at_least_twenty_near_misses():
    assert len(NEAR_MISSES) >= 20


@pytest.mark.parametrize("spoil", NEAR_MISSES, ids=lambda f: f.__name__.strip("_"))
def test_a_near_miss_is_not_describable_and_its_module_is_named(spoil):
    model = cnn()
    blueprint.build(blueprint.describe(model))  # the sound one is describable
    spoil(model)
    assert NEAR_MISSES[spoil] in reason(model)


def test_the_user_s_own_module_is_named_with_its_class_and_the_remedy():
    said = reason(nn.Sequential(nn.Linear(2, 2), MyLinear(2, 2)))
    assert "MyLinear" in said
    assert "model=" in said


# ---------------------------------------------------------------------------------------- text from outside


def test_a_blueprint_is_plain_json_without_code():
    text = blueprint.describe(cnn())
    assert set(json.loads(text)) == {"format", "module", "tied", "frozen", "dtypes"}
    assert "torch." not in text


def deep(levels):
    node = {"class": "Sequential", "children": {}}
    for _ in range(levels):
        node = {"class": "Sequential", "children": {"0": node}}
    return node


def whole(**changes):
    return json.dumps({"format": 1, "module": deep(0), "tied": [], "frozen": [], "dtypes": {}} | changes)


HOSTILE = {
    "no JSON": "{",
    "not an object": "[]",
    "null": "null",
    "another format": whole(format=2),
    "no module": whole(module=None),
    "a class outside the table": whole(module={"class": "LSTM", "arguments": {}}),
    "a path for a class": whole(module={"class": "os.system", "arguments": {}}),
    "a module's attribute for a class": whole(module={"class": "modules", "arguments": {}}),
    "an unknown argument": whole(module={"class": "ReLU", "arguments": {"device": "meta", "x": 1}}),
    "a wrong argument": whole(
        module={"class": "Linear", "arguments": {"in_features": -1, "out_features": 2}}
    ),
    "an object for an argument": whole(module={"class": "ReLU", "arguments": {"inplace": {}}}),
    "no arguments": whole(module={"class": "ReLU"}),
    "same as nothing": whole(module={"same_as": "5"}),
    "nested too deep": whole(module=deep(100)),
    "nested far too deep": '{"format":1,"module":' + '{"class":"Sequential","children":{"0":' * 100_000,
    "a tie to nothing": whole(tied=[["0.weight", "1.weight"]]),
    "an empty tie": whole(tied=[[]]),
    "frozen nothing": whole(frozen=["0.weight"]),
    "names that are numbers": whole(frozen=[1]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_or_hostile_text_is_a_protocol_error(case):
    with pytest.raises(ProtocolError):
        blueprint.build(HOSTILE[case])


def test_building_runs_in_a_process_that_never_saw_the_model():
    code = "import sys, offbeat.blueprint as b; print(b.build(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, blueprint.describe(cnn())], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == repr(cnn())
