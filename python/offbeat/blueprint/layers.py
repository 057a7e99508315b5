"""The layers a blueprint may name: each class with its constructor's arguments and where each is read.

Written by hand. Reading the arguments off the constructors' signatures failed on 23 of 89 layers (arguments
that no attribute keeps, attributes of another name, defaults worked out inside).

Left out: layers that take or give more than one tensor (Bilinear, LSTM, MultiheadAttention, Transformer,
losses, MaxUnpool), that keep hidden state (FractionalMaxPool), that need a process group (SyncBatchNorm), and
lazy ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["LAYERS", "Layer", "Value"]

#: What an argument may be.
Value = None | bool | int | float | str | tuple["Value", ...]

Reader = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class Layer:
    """How one class is read and built.

    Attributes:
        cls: The class itself; only exactly this type is described.
        arguments: Names of arguments that are attributes of the same name.
        derived: Arguments that are read otherwise.
        sometimes: Arguments that older torch does not know; left out where they are at their default.
    """

    cls: type[nn.Module]
    arguments: tuple[str, ...] = ()
    derived: Mapping[str, Reader] = field(default_factory=dict)
    sometimes: Mapping[str, tuple[Reader, object]] = field(default_factory=dict)

    def read(self, module: nn.Module) -> dict[str, object]:
        """Give the keyword arguments that would build this module."""
        found = {name: getattr(module, name) for name in self.arguments}
        found |= {name: reader(module) for name, reader in self.derived.items()}
        for name, (reader, default) in self.sometimes.items():
            if (value := reader(module)) != default:
                found[name] = value
        return found


def _has_bias(module: nn.Module) -> bool:
    return module.bias is not None


def _norm_bias(module: nn.Module) -> bool:
    """BatchNorm and its kin without `bias` at all (affine=False) were built with the default, True."""
    return module.bias is not None or module.weight is None


def _all(
    names: str,
    arguments: str = "",
    *,
    derived: Mapping[str, Reader] | None = None,
    sometimes: Mapping[str, tuple[Reader, object]] | None = None,
) -> dict[str, Layer]:
    """Enter several classes that share their arguments; names and arguments are separated by spaces."""
    return {
        name: Layer(getattr(nn, name), tuple(arguments.split()), derived or {}, sometimes or {})
        for name in names.split()
    }


_BIAS: dict[str, Reader] = {"bias": _has_bias}
_CONV = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
_POOL = "kernel_size stride padding"
_BATCH_NORM = "num_features eps momentum affine track_running_stats"
_NORM_BIAS: dict[str, tuple[Reader, object]] = {"bias": (_norm_bias, True)}
_EMBEDDING = "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse"

LAYERS: dict[str, Layer] = {
    # linear
    **_all("Linear", "in_features out_features", derived=_BIAS),
    **_all("Identity"),
    **_all("Embedding", _EMBEDDING),
    **_all("EmbeddingBag", f"{_EMBEDDING} mode include_last_offset"),
    # convolution
    **_all("Conv1d Conv2d Conv3d", _CONV, derived=_BIAS),
    **_all("ConvTranspose1d ConvTranspose2d ConvTranspose3d", f"{_CONV} output_padding", derived=_BIAS),
    **_all("Fold", "output_size kernel_size dilation padding stride"),
    **_all("Unfold", "kernel_size dilation padding stride"),
    # normalization
    **_all("BatchNorm1d BatchNorm2d BatchNorm3d", _BATCH_NORM, sometimes=_NORM_BIAS),
    **_all("InstanceNorm1d InstanceNorm2d InstanceNorm3d", _BATCH_NORM, sometimes=_NORM_BIAS),
    **_all("GroupNorm", "num_groups num_channels eps affine", sometimes=_NORM_BIAS),
    **_all("LayerNorm", "normalized_shape eps elementwise_affine", sometimes=_NORM_BIAS),
    **_all("RMSNorm", "normalized_shape eps elementwise_affine"),
    **_all("LocalResponseNorm CrossMapLRN2d", "size alpha beta k"),
    # pooling
    **_all("MaxPool1d MaxPool2d MaxPool3d", f"{_POOL} dilation return_indices ceil_mode"),
    **_all("AvgPool1d", f"{_POOL} ceil_mode count_include_pad"),
    **_all("AvgPool2d AvgPool3d", f"{_POOL} ceil_mode count_include_pad divisor_override"),
    **_all("LPPool1d LPPool2d LPPool3d", "norm_type kernel_size stride ceil_mode"),
    **_all("AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d", "output_size"),
    **_all("AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d", "output_size return_indices"),
    # padding
    **_all("ReflectionPad1d ReflectionPad2d ReflectionPad3d", "padding"),
    **_all("ReplicationPad1d ReplicationPad2d ReplicationPad3d", "padding"),
    **_all("CircularPad1d CircularPad2d CircularPad3d ZeroPad1d ZeroPad2d ZeroPad3d", "padding"),
    **_all("ConstantPad1d ConstantPad2d ConstantPad3d", "padding value"),
    # activation
    **_all("LogSigmoid Sigmoid Softmax2d Softsign Tanh Tanhshrink"),
    **_all("Hardsigmoid Hardswish Mish ReLU ReLU6 SELU SiLU", "inplace"),
    **_all("CELU ELU", "alpha inplace"),
    **_all("GELU", "approximate"),
    **_all("GLU LogSoftmax Softmax Softmin", "dim"),
    **_all("Hardshrink Softshrink", "lambd"),
    **_all("Hardtanh", "min_val max_val inplace"),
    **_all("LeakyReLU", "negative_slope inplace"),
    **_all("PReLU", "num_parameters init"),
    **_all("RReLU", "lower upper inplace"),
    **_all("Softplus", "beta threshold"),
    **_all("Threshold", "threshold value inplace"),
    # dropout
    **_all("AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout", "p inplace"),
    # shape
    **_all("ChannelShuffle", "groups"),
    **_all("Flatten", "start_dim end_dim"),
    **_all("Unflatten", "dim unflattened_size"),
    **_all("PixelShuffle", "upscale_factor"),
    **_all("PixelUnshuffle", "downscale_factor"),
    **_all("Upsample", "size scale_factor mode align_corners recompute_scale_factor"),
    **_all("UpsamplingBilinear2d UpsamplingNearest2d", "size scale_factor"),
}
