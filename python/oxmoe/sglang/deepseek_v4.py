"""MXFP4 experts of an fp8 checkpoint in SGLang's quantization "oxmoe": DeepSeek-V4's form.

SGLang sets `is_fp4_experts` of an fp8 checkpoint's configuration after it has looked at the config and the tensors.
A layer then has int8 codes [E, 2I, H / 2] with rows [gate; up]. Its scales, one for 32 columns, have the names of
fp8's scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs
from torch import Tensor

from oxmoe import ExpertWeights
from oxmoe.sglang import deepep, sglang_version
from oxmoe.sglang.loading import MadeAtLoad, NeedsBfloat16

BLOCK = 32  # weights of one scale
PACKED = 64  # rows and columns of a block of packed weights
SCALES = ("w13_weight_scale_inv", "w2_weight_scale_inv")
_E8M0, _BYTES = torch.float8_e8m0fnu, torch.uint8
_FP4 = getattr(torch, "float4_e2m1fn_x2", None)


class _Parameters(FusedMoEMethodBase):
    """Creates the parameters of such a layer, in the shapes that SGLang's loader knows."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """num_experts: the number of experts of this rank."""
        rows = intermediate_size_per_partition * (2 if layer.moe_runner_config.is_gated else 1)
        for name, size in (
            ("w13", (num_experts, rows, hidden_size)),
            ("w2", (num_experts, hidden_size, intermediate_size_per_partition)),
        ):
            codes = torch.zeros(*size[:2], size[2] // 2, dtype=torch.int8)
            scales = torch.ones(*size[:2], size[2] // BLOCK, dtype=_E8M0)
            # The word "block" tells SGLang's loader to cut scales as it cuts weights.
            for suffix, tensor, more in (
                ("weight", codes, {}),
                ("weight_scale_inv", scales, {"quant_method": "block"}),
            ):
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
                set_weight_attrs(parameter, attributes | more)


class OxmoeFp8Mxfp4MoEMethod(NeedsBfloat16, MadeAtLoad, _Parameters):
    """The method for such experts on oxmoe, with bf16 activations.

    Scales are E8M0 while SGLang's loader writes them, because it converts numbers to the dtype of a parameter. At
    all other times the parameter is the same bytes as uint8. Every process group can send uint8, which SGLang's load
    balancer needs to move experts. On CUDA the parameters hold packed weights after loading, if the sizes are
    multiples of 64.
    """

    of, sized_as = "MXFP4", "mxfp4"
    converts_scales = True

    def __init__(self, quant_config: Any) -> None:
        super().__init__()
        self.quant_config = quant_config
        if getattr(quant_config, "dequant_fp4_to_fp8", False):
            raise NotImplementedError(
                "oxmoe: SGLANG_DSV4_FP4_DEQUANT=1 would make fp8 of this checkpoint's MXFP4 experts, which oxmoe "
                "serves as they are; unset it, or start without moe"
            )

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        deepep.dispatched("mxfp4", sglang_version())
        if attributes.get("with_bias"):
            raise NotImplementedError("oxmoe: MXFP4 experts of an fp8 checkpoint are not served with biases")
        if "weight_loader" in attributes:
            attributes["weight_loader"] = _loader(layer, attributes["weight_loader"])
        super().create_weights(layer, *sizes, **attributes)

    def make(self, layer: torch.nn.Module, **options: Any) -> ExpertWeights:
        w13, w2, w13_scale, w2_scale = (
            getattr(layer, name).data.view(_BYTES) for name in ("w13_weight", "w2_weight", *SCALES)
        )
        sizes = (w13.shape[1], 2 * w13.shape[2], w2.shape[1], 2 * w2.shape[2])
        in_place = w13.is_cuda and not any(size % PACKED for size in sizes)
        return ExpertWeights.mxfp4(w13, w2, w13_scale, w2_scale, in_place=in_place, **options)

    def finish(self, layer: torch.nn.Module) -> None:
        super().finish(layer)
        _view_scales(layer, _BYTES)


def _view_scales(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    for name in SCALES:
        parameter = getattr(layer, name)
        parameter.data = parameter.data.view(dtype)


def _loader(layer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load`, SGLang's weight_loader, so that the parameters keep the numbers of the tensors."""

    def weight_loader(param: Any, loaded_weight: Tensor, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(("weight_name", "shard_id", "expert_id"), arguments, strict=False)) | named
        kept = _codes(loaded_weight)
        if param is layer.w13_weight_scale_inv or param is layer.w2_weight_scale_inv:
            kept = _scales(layer, param, loaded_weight, str(given.get("weight_name")), given.get("shard_id"))
        # This is done for codes, too: SGLang writes a fused shared expert's scales with them.
        _view_scales(layer, _E8M0)
        return load(param, kept, *arguments, **named)

    return weight_loader


def _codes(loaded: Tensor) -> Tensor:
    return loaded.view(torch.int8) if loaded.dtype in (_BYTES, _FP4) else loaded


def _scales(layer: Any, parameter: Tensor, loaded: Tensor, name: str, shard: str | None) -> Tensor:
    """Converts a checkpoint's scales to E8M0. Raises ValueError if that would change a number."""
    # Ranks cut neither the columns of w13 nor the rows of w2. Scales of another size are a fused shared expert's, of
    # fp8 blocks.
    whole = -2 if shard == "w2" else -1
    if loaded.dim() < 2 or loaded.shape[whole] != parameter.shape[whole] or loaded.dtype == _E8M0:
        return loaded
    if loaded.dtype == _BYTES:
        return loaded.view(_E8M0)
    kept = loaded.to(_E8M0)
    changed = (kept.to(torch.float32) != loaded) & ~loaded.isnan()
    if changed.any():
        raise ValueError(
            f"oxmoe: layer {getattr(layer, 'layer_id', '?')}: {name}: scales of MXFP4 experts must be powers of two "
            f"from 2^-127 to 2^127, got {loaded[changed][0].item()!r} ({loaded.dtype})"
        )
    return kept
