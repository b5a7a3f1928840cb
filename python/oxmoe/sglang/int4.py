"""Runs the experts of int4 checkpoints in SGLang on oxmoe: pack-quantized ones of compressed-tensors, AWQ's, GPTQ's
and W4AFP8's.

The parameters are the checkpoint's tensors as they lie there, under the names that SGLang's loader looks for. There
is no copy for Marlin. AWQ and GPTQ have configurations of their own here. They replace SGLang's "awq_marlin" and
"gptq_marlin" in its registry of quantizations, and "w4afp8" is replaced in the same way. Linear layers keep SGLang's
methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.w4afp8 import W4AFp8Config
from sglang.srt.utils import set_weight_attrs
from torch import Tensor

from oxmoe import ExpertWeights
from oxmoe.formats.int4 import Matrix, from_awq, from_gptq, from_pack_quantized
from oxmoe.sglang import deepep, eplb, int4_schemes, sglang_version
from oxmoe.sglang.int4_schemes import Scheme
from oxmoe.sglang.loading import MadeAtLoad, NeedsBfloat16, share_packed

_WORD = 8  # codes of an int32
_ABSENT = -1  # an entry of a g_idx that no checkpoint has filled
_MARLIN = ("awq_marlin", "gptq_marlin")


@dataclass(frozen=True)
class _Names:
    """The names of a layout's tensors after "w13_" and "w2_", as SGLang's loader makes them from a checkpoint's
    names."""

    codes: str
    scales: str
    zeros: str
    order: str = ""


_NAMES = {
    int4_schemes.PACK_QUANTIZED: _Names("weight_packed", "weight_scale", "weight_zero_point"),
    "awq": _Names("qweight", "scales", "qzeros"),
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    int4_schemes.W4AFP8: _Names("weight", "weight_scale_inv", ""),
}


def _shapes(layout: str, rows: int, columns: int, groups: int) -> tuple[list[int], list[int], list[int]]:
    """Returns the shapes of a matrix's codes, scales and zero points."""
    if layout == int4_schemes.PACK_QUANTIZED:
        return [rows, columns // _WORD], [rows, groups], [rows // _WORD, groups]
    if layout == int4_schemes.W4AFP8:
        return [rows, columns // 2], [rows, groups], []
    codes = [columns, rows // _WORD] if layout == "awq" else [columns // _WORD, rows]
    return codes, [groups, rows], [groups, rows // _WORD]


def _spread(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load` so that it repeats the scales and zero points of groups that several ranks share."""

    def weight_loader(param: Any, loaded_weight: Tensor, *arguments: Any, **named: Any) -> Any:
        times, dimension = getattr(param, "oxmoe_spread", (1, 0))
        if times > 1:
            loaded_weight = loaded_weight.repeat_interleave(times, dim=dimension)
        return load(param, loaded_weight, *arguments, **named)

    return weight_loader


class _Parameters(FusedMoEMethodBase):
    """Creates parameters for the checkpoint's tensors."""

    scheme: Scheme

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        scheme, intermediate, names = self.scheme, intermediate_size_per_partition, _NAMES[self.scheme.layout]
        of_w13, of_w2 = int4_schemes.groups_of(scheme, hidden_size, intermediate, layer.moe_tp_size)
        if "weight_loader" in attributes:
            attributes["weight_loader"] = _spread(attributes["weight_loader"])
        attributes["is_transposed"] = transposed = scheme.layout in int4_schemes.METHODS
        attributes["quant_method"] = "channel" if scheme.group is None else "group"

        def add(name: str, parameter: Tensor, **more: Any) -> None:
            layer.register_parameter(name, torch.nn.Parameter(parameter, requires_grad=False))
            set_weight_attrs(getattr(layer, name), {**attributes, **more})

        gated = layer.moe_runner_config.is_gated
        for name, rows, columns, group in (
            ("w13", (2 if gated else 1) * intermediate, hidden_size, of_w13),
            ("w2", hidden_size, intermediate, of_w2),
        ):
            codes, scales, zeros = _shapes(scheme.layout, rows, columns, columns // (group or columns))
            spread = ((scheme.group or 1) // (group or 1), 0 if transposed else 1)
            word = torch.int8 if scheme.layout == int4_schemes.W4AFP8 else torch.int32
            add(f"{name}_{names.codes}", torch.zeros(num_experts, *codes, dtype=word))
            add(f"{name}_{names.scales}", torch.zeros(num_experts, *scales, dtype=params_dtype), oxmoe_spread=spread)
            if scheme.zeros or scheme.layout == "gptq":
                # Symmetric checkpoints of GPTQ have them, too.
                add(f"{name}_{names.zeros}", torch.zeros(num_experts, *zeros, dtype=torch.int32), oxmoe_spread=spread)
            if names.order:
                add(f"{name}_{names.order}", torch.full((num_experts, columns), _ABSENT, dtype=torch.int32))
            if scheme.layout == int4_schemes.PACK_QUANTIZED:
                add(f"{name}_weight_shape", torch.zeros(num_experts, 2))


class OxmoeInt4MoEMethod(NeedsBfloat16, MadeAtLoad, _Parameters):
    """The method for int4 experts with bf16 activations.

    On CUDA the parameters of codes hold packed weights after loading, if the sizes are multiples of 64. So do the
    parameters of scales, if the packed scales have as many bytes. On a CPU the codes of AWQ and GPTQ are reordered
    in their own memory.
    """

    of, sized_as = "int4", "int4"
    turned = False  # whether parameters hold other bytes than the checkpoint's, on a CPU

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme, self.names = scheme, _NAMES[scheme.layout]
        self.integers = tuple(f"{name}_{self.names.zeros}" for name in ("w13", "w2")) if scheme.zeros else ()

    def matrix(self, layer: Any, name: str) -> Matrix:
        """Returns what a matrix's parameters hold."""
        scheme, names = self.scheme, self.names
        codes, scales = (getattr(layer, f"{name}_{part}").data for part in (names.codes, names.scales))
        zeros = getattr(layer, f"{name}_{names.zeros}").data if scheme.zeros else None
        if scheme.layout == int4_schemes.PACK_QUANTIZED:
            return from_pack_quantized(codes, scales, zeros)
        if scheme.layout == "awq":
            assert zeros is not None
            return from_awq(codes, scales, zeros)
        self._check_order(layer, name)
        return from_gptq(codes, scales, zeros, version=scheme.version)

    def _check_order(self, layer: Any, name: str) -> None:
        """Raises NotImplementedError unless, in the whole matrix, each column belongs to the group that it lies in."""
        order = getattr(layer, f"{name}_{self.names.order}").data
        first = layer.moe_tp_rank * order.shape[1] if name == "w2" else 0
        end = first + order.shape[1]
        plain = torch.arange(first, end, device=order.device) // (self.scheme.group or end)
        if not bool(((order == plain) | (order == _ABSENT)).all()):
            raise NotImplementedError(
                f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: g_idx of experts has columns in activation order, "
                f"though its config has no desc_act; served is {int4_schemes.SERVED}"
            )

    def make(self, layer: torch.nn.Module, **options: Any) -> ExpertWeights:
        (w13, w13_scale, w13_zeros), (w2, w2_scale, w2_zeros) = (self.matrix(layer, name) for name in ("w13", "w2"))
        if not w13.is_cuda and self.scheme.layout in int4_schemes.METHODS:
            w13, w2 = self._turn(layer, "w13", w13), self._turn(layer, "w2", w2)
            self.turned = True
        self._zeros = {}
        if w13_zeros is not None and w2_zeros is not None and not w13.is_cuda:
            self._zeros = {"w13_zeros": w13_zeros, "w2_zeros": w2_zeros}
        return ExpertWeights.int4(w13, w2, w13_scale, w2_scale, w13_zeros=w13_zeros, w2_zeros=w2_zeros, **options)

    def _turn(self, layer: torch.nn.Module, name: str, codes: Tensor) -> Tensor:
        """Reorders codes in the memory of their parameter."""
        own: Tensor = getattr(layer, f"{name}_{self.names.codes}").data
        return own.view(-1).view(torch.uint8).view(codes.shape).copy_(codes)

    def share(self, layer: torch.nn.Module, weights: ExpertWeights) -> None:
        share_packed(layer, weights, self.names.codes, self.names.scales)

    def finish(self, layer: torch.nn.Module) -> None:
        # Kernels of a CPU read zero points: an expert that moves must take its own along.
        for name, zeros in self._zeros.items():
            layer.register_parameter(f"{eplb.PREFIX}{name}", torch.nn.Parameter(zeros, requires_grad=False))
        super().finish(layer)
        if self.turned:
            self.packed |= {f"{name}_{self.names.codes}" for name in ("w13", "w2")}
        if self.turned or self._zeros:
            self.updates.finish(derived=True)


class OxmoeW4AFp8MoEMethod(OxmoeInt4MoEMethod):
    """The method for the experts of a W4AFP8 checkpoint, with bf16 activations.

    Two codes in two's complement lie in an int8, the lower column in the lower four bits. They become codes from 0 to
    15 in their own memory. The checkpoint also has a scale for the e4m3 activations of each expert. It is not used:
    activations stay bf16, which is nearer to the model in fp32.
    """

    of = "W4AFP8"

    def create_weights(self, layer: Any, num_experts: int, *sizes: Any, **attributes: Any) -> None:
        # This runs before a checkpoint is read: an all-to-all that brings other tokens than bf16 is refused by name.
        deepep.dispatched("int4", sglang_version())
        if not layer.moe_runner_config.is_gated:
            raise NotImplementedError("oxmoe: W4AFP8 experts without a gate are not served")
        super().create_weights(layer, num_experts, *sizes, **attributes)
        for name in ("w13_input_scale", "w2_input_scale"):
            # SGLang's models look for a parameter of this name for each scale that a checkpoint has.
            parameter = torch.nn.Parameter(torch.ones(num_experts, dtype=torch.bfloat16), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, {**attributes, "weight_loader": _ignore})

    def matrix(self, layer: Any, name: str) -> Matrix:
        codes = getattr(layer, f"{name}_{self.names.codes}").data.view(torch.uint8)
        codes.bitwise_xor_(0x88)
        self.turned = True
        return Matrix(codes, getattr(layer, f"{name}_{self.names.scales}").data, None)


def _ignore(*_: Any, **__: Any) -> None:
    """Stands for the weight_loader of a parameter whose contents are not used."""


# Configurations


class OxmoeW4AFp8Config(W4AFp8Config):
    """SGLang's configuration of a W4AFP8 checkpoint, under its own name. Its MoE layers run on oxmoe."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)
        return OxmoeW4AFp8MoEMethod(Scheme(int4_schemes.W4AFP8, self.group_size, False))


class _Int4Experts:
    """SGLang's configuration of an AWQ or GPTQ checkpoint, whose MoE layers run on oxmoe."""

    unquantized: Any = None  # the method of layers that the checkpoint leaves as they are
    checkpoint: dict[str, Any]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return super().from_config(config).of(config)  # type: ignore[misc]

    def of(self, checkpoint: dict[str, Any]) -> Any:
        """Returns this configuration, which remembers what it was read from."""
        self.checkpoint = checkpoint
        return self

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Returns SGLang's dtypes, and bf16, which the experts need."""
        return [*dict.fromkeys([*super().get_supported_act_dtypes(), torch.bfloat16])]  # type: ignore[misc]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, FusedMoE):
            return self._linear(super().get_quant_method(layer, prefix), prefix)  # type: ignore[misc]
        if int4_schemes.skips(self.checkpoint, prefix):
            return self.unquantized()
        return OxmoeInt4MoEMethod(int4_schemes.of_checkpoint(self.checkpoint))

    def _linear(self, method: QuantizeMethodBase | None, prefix: str) -> QuantizeMethodBase | None:
        """Returns SGLang's method of a linear layer. Raises NotImplementedError if it has no kernels for bf16."""
        plain = method is None or type(method).__name__.startswith("Unquantized")
        if plain or torch.bfloat16 in super().get_supported_act_dtypes():  # type: ignore[misc]
            return method
        name = str(self.checkpoint.get("quant_method", "")).upper()
        raise NotImplementedError(
            f"oxmoe: {prefix} is a linear layer of {name}, which SGLang runs in f16 alone here, and oxmoe's "
            "experts need bf16; serve this model without moe, or a checkpoint whose linear layers are not quantised"
        )


_made: dict[tuple[Any, Any], Any] = {}


def _of(base: Any, unquantized: Any) -> Any:
    """Returns a subclass of `base`, an SGLang configuration, whose experts run on oxmoe. Each base has one such
    class."""
    if issubclass(base, _Int4Experts):
        return base
    if (base, unquantized) not in _made:
        name = f"Oxmoe{base.__name__}"
        _made[base, unquantized] = type(name, (_Int4Experts, base), {"unquantized": unquantized})
    return _made[base, unquantized]


def install(unquantized: Any) -> None:
    """Replaces SGLang's configurations of W4AFP8, and those for Marlin, which claim AWQ's and GPTQ's checkpoints, by
    ones whose experts run on oxmoe."""
    if int4_schemes.W4AFP8 in QUANTIZATION_METHODS:
        QUANTIZATION_METHODS[int4_schemes.W4AFP8] = OxmoeW4AFp8Config
    for name in _MARLIN:
        if name in QUANTIZATION_METHODS:
            QUANTIZATION_METHODS[name] = _of(QUANTIZATION_METHODS[name], unquantized)


def claims(checkpoint: dict[str, Any] | None, asked: str | None, name: str) -> bool:
    """Whether the quantization `name` takes an AWQ or GPTQ checkpoint. It does if the user asks for it, or if the
    user names none and the checkpoint's experts are served."""
    config = checkpoint or {}
    if str(config.get("quant_method", "")).lower() not in int4_schemes.METHODS or asked not in (None, name):
        return False
    if asked == name:
        return True
    try:
        int4_schemes.of_checkpoint(config)
    except NotImplementedError:
        return False
    return True


def from_config(config: dict[str, Any], unquantized: Any) -> QuantizationConfig:
    """Returns the configuration of an AWQ or GPTQ checkpoint. Its linear layers are those that SGLang would choose
    by itself."""
    method = str(config.get("quant_method", "")).lower()
    marlin: Any = QUANTIZATION_METHODS.get(f"{method}_marlin")
    fits = marlin is not None and getattr(marlin, f"is_{method}_marlin_compatible")(config)
    if fits:
        base = marlin
    else:
        # Newer releases have the class, but do not register it if they have no linear layers in f16.
        base = get_quantization_config(method) if method in QUANTIZATION_METHODS else GPTQConfig
    return _of(base, unquantized).from_config(config)
