"""Checkpoints of compressed-tensors (llm-compressor) in SGLang's quantization "oxmoe": their fp8, NVFP4 and
int4 experts.

Parameters and loading are those of SGLang's schemes; int4 has its own, in `int4`. The schemes' processing after
loading is left out. So gate and up keep a scale each, and nothing is laid out for Marlin.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.compressed_tensors import schemes
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from oxmoe import ExpertWeights
from oxmoe.sglang import formats, int4, int4_schemes
from oxmoe.sglang.formats import FP8_BLOCK as BLOCK
from oxmoe.sglang.loading import MadeAtLoad, NeedsBfloat16, leave_out_gates, share_packed

# Older releases have NVFP4 layers, also linear ones, for Blackwell alone.
_WEIGHT_ONLY_NVFP4 = getattr(schemes, "CompressedTensorsW4A16Nvfp4MoE", None)
KINDS = "fp8, NVFP4 and int4" if _WEIGHT_ONLY_NVFP4 else "fp8 and int4"
SERVED = f"fp8 with a scale a tensor, a channel or a [{BLOCK}, {BLOCK}] block, {int4_schemes.SERVED}" + (
    ", and NVFP4 on Hopper" if _WEIGHT_ONLY_NVFP4 else ""
)


def nvfp4_runs() -> bool:
    """Whether this SGLang loads NVFP4 layers below Blackwell. If there is a GPU, it must also be a Hopper."""
    return _WEIGHT_ONLY_NVFP4 is not None and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    )


def served(checkpoint: dict[str, Any]) -> bool:
    """Whether oxmoe has experts for the formats of all layers in a checkpoint's quantization_config."""
    return formats.compressed_served(checkpoint, nvfp4=nvfp4_runs())


class _OfScheme(FusedMoEMethodBase):
    """Creates the parameters of one of SGLang's schemes."""

    def __init__(self, scheme: Any) -> None:
        super().__init__()
        self.scheme = scheme

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        self.scheme.create_weights(layer, *sizes, **attributes)


class OxmoeCompressedTensorsMoEMethod(NeedsBfloat16, MadeAtLoad, _OfScheme):
    """The method for experts of such a scheme on oxmoe."""

    of = "compressed-tensors"


class OxmoeCompressedFp8MoEMethod(OxmoeCompressedTensorsMoEMethod):
    """The method for fp8 experts with one scale for a tensor (gate and up each have one), a channel, or a block. The
    weights are used as they lie."""

    reads_input_scales = True

    @property
    def sized_as(self) -> str:  # type: ignore[override]
        return "fp8_block" if self.scheme.block_quant else "fp8_tensor"

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Creates the scheme's parameters, without rows of gates if the experts have none."""
        super().create_weights(layer, *sizes, **attributes)
        leave_out_gates(layer)

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        scale = layer.w13_weight_scale.data
        if not options["gated"] and scale.dim() == 2:
            scale = scale[:, 0]  # one of a matrix
        weights = layer.w13_weight.data, layer.w2_weight.data, scale, layer.w2_weight_scale.data
        if self.scheme.block_quant:
            return ExpertWeights.fp8_block(*weights, **options)
        if self.scheme.static_input_scales:
            options |= {"a13_scale": layer.w13_input_scale.data, "a2_scale": layer.w2_input_scale.data}
        return ExpertWeights.fp8_tensor(*weights, **options)


class OxmoeCompressedNvfp4MoEMethod(OxmoeCompressedTensorsMoEMethod):
    """The method for NVFP4 experts with bf16 activations. If the checkpoint has scales to quantise activations, they
    are ignored.

    On CUDA the parameters hold packed weights after loading, if the sizes are multiples of 64.
    """

    sized_as = "nvfp4"

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        return ExpertWeights.nvfp4(
            layer.w13_weight_packed.data,
            layer.w2_weight_packed.data,
            layer.w13_weight_scale.data,
            layer.w2_weight_scale.data,
            # Here the checkpoint has the factor that multiplied the numbers, so its reciprocal dequantises them.
            1 / layer.w13_weight_global_scale.data,
            1 / layer.w2_weight_global_scale.data,
            **options,
        )

    def share(self, layer: torch.nn.Module, weights: ExpertWeights) -> None:
        share_packed(layer, weights, "weight_packed")


class OxmoeCompressedTensorsConfig(CompressedTensorsConfig):
    """SGLang's configuration of a compressed-tensors checkpoint (its name stays)."""

    unquantized: Any = None  # the method of layers that the checkpoint leaves as they are

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, FusedMoE):
            return super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        found = [self.get_scheme_dict(layer, f"{prefix}.0.{part}_proj") for part in ("gate", "up", "down")]
        if any(scheme != found[0] for scheme in found):
            raise ValueError(f"oxmoe: {prefix}: gate, up and down projections of experts have different schemes")
        if found[0] is None:
            return self.unquantized()
        weights, inputs = found[0].get("weights"), found[0].get("input_activations")
        if inputs is not None and self._is_fp8_w8a8(weights, inputs):
            if not formats.compressed_fp8_served(weights.strategy, inputs.strategy):
                raise NotImplementedError(
                    f"oxmoe: {prefix}: SGLang has no fp8 experts of compressed-tensors with a scale a "
                    f"{weights.strategy} and activations by {inputs.strategy}, but with tensor and tensor, channel and "
                    "token, or blocks"
                )
            return OxmoeCompressedFp8MoEMethod(schemes.CompressedTensorsW8A8Fp8MoE(weights, inputs))
        if _WEIGHT_ONLY_NVFP4 is not None and formats.compressed_kind(weights.model_dump(mode="json")) == "nvfp4":
            return OxmoeCompressedNvfp4MoEMethod(_WEIGHT_ONLY_NVFP4(has_input_global_scale=inputs is not None))
        described = weights.model_dump(mode="json")
        if int4_schemes.is_packed({"weights": described, "input_activations": inputs}):
            layout = found[0].get("format") or self.quant_format
            return int4.OxmoeInt4MoEMethod(int4_schemes.of_weights(described, layout))
        raise NotImplementedError(
            f"oxmoe: no kernel for experts of compressed-tensors' {weights} with {inputs or 'bf16 activations'}; "
            f"served are {SERVED}"
        )
