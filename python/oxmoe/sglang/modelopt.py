"""Runs the experts of NVIDIA's ModelOpt checkpoints in SGLang on oxmoe: NVFP4, fp8 with given scales of activations,
mixtures of these and others, and NVFP4 experts in an fp8 checkpoint (hybrid).

SGLang's own configurations claim such checkpoints before it asks other quantizations. So oxmoe registers subclasses
of them under their names in SGLang's table of quantizations. Linear layers, KV cache, excluded layers and names stay
SGLang's. SGLang also loads the experts, but its processing after loading is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.utils import should_use_flashinfer_cutlass_moe_fp4_allgather
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, modelopt_quant
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.utils import set_weight_attrs

from oxmoe import ExpertWeights
from oxmoe.sglang import capabilities, linear
from oxmoe.sglang.formats import FP8_BLOCK, NVFP4_BLOCK, is_hybrid
from oxmoe.sglang.loading import MadeAtLoad, NeedsBfloat16, share_packed

_HOPPER = 90
_TRTLLM = (
    "oxmoe: with --moe-runner-backend flashinfer_trtllm this SGLang swaps gate and up of ModelOpt's NVFP4 experts; "
    "choose another --moe-runner-backend"
)
_FP4_TOKENS = (
    "oxmoe: with --moe-runner-backend flashinfer_cutlass and DP attention SGLang gathers tokens as NVFP4, and these "
    "experts take bf16; choose another --moe-runner-backend, or start with "
    "--disable-flashinfer-cutlass-moe-fp4-allgather"
)
# SGLang's hybrid of an fp8 configuration and one of NVFP4 experts; None in older releases, which have no hybrid.
_HYBRID: Any = getattr(modelopt_quant, "HybridFp8NvFp4Config", None)


def runs_nvfp4() -> bool:
    """Whether NVFP4 experts run on oxmoe here. They do on Hopper and without a GPU. For other GPUs SGLang has
    kernels of its own."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


class _Nvfp4Parameters(modelopt_quant.ModelOptNvFp4FusedMoEMethod):
    """Creates the parameters of NVFP4 experts that SGLang's loader fills, without its second copies of the scales."""

    def __init__(self, quant_config: Any) -> None:
        # SGLang's constructor is not called: it asks for a GPU and a --moe-runner-backend of its own kernels.
        self.quant_config = quant_config

    @property
    def load_up_proj_weight_first(self) -> bool:
        """Says that rows of w13 are [gate; up], whatever the server's --moe-runner-backend is."""
        return False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        def add(name: str, tensor: torch.Tensor) -> None:
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            set_weight_attrs(getattr(layer, name), attributes)

        parts = (2,) if layer.moe_runner_config.is_gated else ()
        rows = math.prod(parts) * intermediate_size_per_partition
        sizes = (("w13", rows, hidden_size, parts), ("w2", hidden_size, intermediate_size_per_partition, ()))
        for name, rows, columns, own in sizes:
            add(f"{name}_weight", torch.empty((num_experts, rows, columns // 2), dtype=torch.uint8))
            scales = torch.empty((num_experts, rows, columns // NVFP4_BLOCK), dtype=torch.float8_e4m3fn)
            add(f"{name}_weight_scale", scales)
            add(f"{name}_weight_scale_2", torch.empty((num_experts, *own), dtype=torch.float32))
            # Scales of activations: checkpoints have them, and nobody reads them.
            add(f"{name}_input_scale", torch.ones(num_experts, dtype=torch.float32))


class OxmoeModelOptNvFp4MoEMethod(NeedsBfloat16, MadeAtLoad, _Nvfp4Parameters):
    """The method for NVFP4 experts with bf16 activations. If the checkpoint has scales to quantise activations, they
    are ignored. Gate and up may have global scales of their own.

    SGLang's loader recognises the scales by "ModelOpt" in the name of the method's class. Its top-k multiplies by
    the routed scaling factor for methods of this kind, and the layer says so (`Handover.scaled`). On CUDA the
    parameters hold packed weights after loading, if the sizes are multiples of 64.
    """

    of, sized_as = "ModelOpt NVFP4", "nvfp4"

    def __init__(self, quant_config: Any) -> None:
        super().__init__(quant_config)
        if getattr(quant_config, "is_awq", False):
            raise NotImplementedError(
                "oxmoe: ModelOpt's NVFP4_AWQ experts are not served: oxmoe does not read their pre_quant_scale"
            )
        if quant_config.group_size != NVFP4_BLOCK:
            raise NotImplementedError(
                f"oxmoe: ModelOpt's NVFP4 experts with group_size {quant_config.group_size} are not served, but with "
                f"{NVFP4_BLOCK}"
            )

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        if getattr(layer, "use_flashinfer_trtllm_moe", False) and not capabilities.layer_decides():
            raise NotImplementedError(_TRTLLM)
        if should_use_flashinfer_cutlass_moe_fp4_allgather():
            raise NotImplementedError(_FP4_TOKENS)
        super().create_weights(layer, *sizes, **attributes)

    def make(self, layer: torch.nn.Module, **options: Any) -> ExpertWeights:
        return ExpertWeights.nvfp4(
            layer.w13_weight.data,
            layer.w2_weight.data,
            layer.w13_weight_scale.data,
            layer.w2_weight_scale.data,
            layer.w13_weight_scale_2.data,
            layer.w2_weight_scale_2.data,
            **options,
        )

    def share(self, layer: torch.nn.Module, weights: ExpertWeights) -> None:
        share_packed(layer, weights, "weight")


class OxmoeModelOptFp8MoEMethod(NeedsBfloat16, MadeAtLoad, modelopt_quant.ModelOptFp8MoEMethod):
    """The method for fp8 experts with one scale a matrix and given scales of activations. Gate and up each have a
    scale."""

    of, sized_as = "ModelOpt fp8", "fp8_tensor"
    reads_input_scales = True

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        scale = layer.w13_weight_scale.data
        return ExpertWeights.fp8_tensor(
            layer.w13_weight.data,
            layer.w2_weight.data,
            # The scale is [E, 1] if there is no gate.
            scale if options["gated"] else scale.view(-1),
            layer.w2_weight_scale.data,
            a13_scale=layer.w13_input_scale.data,
            a2_scale=layer.w2_input_scale.data,
            **options,
        )


def nvfp4_method(config: Any) -> QuantizeMethodBase:
    """Returns the method for NVFP4 experts: oxmoe's, or SGLang's if the GPU is one of those that SGLang has kernels
    for."""
    if runs_nvfp4():
        return OxmoeModelOptNvFp4MoEMethod(config)
    return modelopt_quant.ModelOptNvFp4FusedMoEMethod(config)


class _Experts:
    """A configuration of SGLang's whose experts run on oxmoe. All other layers are SGLang's."""

    unquantized: Any = None  # the method of layers that the checkpoint leaves as they are
    blocks: Any = None  # the method for fp8 experts with block scales
    mxfp8: Any = None

    @classmethod
    def override_quantization_method(cls, checkpoint: dict[str, Any] | None, user_quant: str | None) -> str | None:
        """Returns SGLang's answer. If the release would take its own configuration for that name, it returns oxmoe's
        second name."""
        answer = super().override_quantization_method(checkpoint, user_quant)  # type: ignore[misc]
        return second_name(answer) if answer in _SECOND and not capabilities.finds_modelopt_by_name() else answer

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, FusedMoE):
            return linear.method(self.others(layer, prefix))
        return self.unquantized() if self.is_layer_excluded(prefix) else self.experts(layer, prefix)  # type: ignore[attr-defined]

    def others(self, layer: torch.nn.Module, prefix: str) -> Any:
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def experts(self, layer: torch.nn.Module, prefix: str) -> Any:
        raise NotImplementedError


class _WithNvfp4(_Experts):
    """A configuration with NVFP4 layers. Older releases have these for Blackwell only."""

    @classmethod
    def get_min_capability(cls) -> int:
        return min(_HOPPER, int(super().get_min_capability()))  # type: ignore[misc]

    def others(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().others(layer, prefix)
        needed = int(modelopt_quant.ModelOptFp4Config.get_min_capability())
        if isinstance(method, modelopt_quant.ModelOptFp4LinearMethod) and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            if 10 * major + minor < needed:
                raise NotImplementedError(
                    f"oxmoe: {prefix} is an NVFP4 linear layer, for which this SGLang has kernels from sm_{needed} on; "
                    "install a newer SGLang"
                )
        return method


class OxmoeModelOptFp4Config(_WithNvfp4, modelopt_quant.ModelOptFp4Config):
    """The configuration of an NVFP4 checkpoint."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not self.is_checkpoint_nvfp4_serialized:
            return self.others(layer, prefix)  # these are quantised while they are loaded, by SGLang
        return nvfp4_method(self)


class OxmoeModelOptFp8Config(_Experts, modelopt_quant.ModelOptFp8Config):
    """The configuration of an fp8 checkpoint."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Any:
        return OxmoeModelOptFp8MoEMethod(self)


# quant_algo of a layer -> the name of its configuration in a mixture's.
_MIXED = {
    "FP8": "fp8_config",
    "NVFP4": "nvfp4_config",
    "W4A16_NVFP4": "nvfp4a16_config",
    "MXFP8": "mxfp8_config",
    "FP8_PB_WO": "fp8_block_config",
    "FP8_BLOCK_SCALES": "fp8_block_config",
}


class OxmoeModelOptMixedPrecisionConfig(_WithNvfp4, modelopt_quant.ModelOptMixedPrecisionConfig):
    """The configuration of a checkpoint that names a quant_algo for each of its layers."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Any:
        algorithm = self._resolve_quant_algo(prefix)
        if algorithm is None:
            return self.unquantized()
        config = getattr(self, _MIXED.get(algorithm, ""), None)
        if config is None:
            raise NotImplementedError(f"oxmoe: {prefix}: experts of quant_algo {algorithm} are not served")
        if algorithm.endswith("NVFP4"):
            return nvfp4_method(config)
        if algorithm == "FP8":
            return OxmoeModelOptFp8MoEMethod(config)
        if algorithm == "MXFP8":
            return self.mxfp8(config)
        if list(config.weight_block_size) != [FP8_BLOCK, FP8_BLOCK]:
            raise NotImplementedError(
                f"oxmoe: {prefix}: fp8 experts with blocks of {config.weight_block_size} are not served, but of "
                f"[{FP8_BLOCK}, {FP8_BLOCK}]"
            )
        return self.blocks(config)


class _HybridOfFp8:
    """An fp8 configuration that SGLang's loader turns into a hybrid.

    The hybrid takes over all attributes of the fp8 configuration, including this get_quant_method. It recognises the
    hybrid by the layer that asks.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.get_quant_method = self._of_hybrid

    def _of_hybrid(self, layer: torch.nn.Module, prefix: str) -> Any:
        hybrid = getattr(layer, "quant_config", None)
        if isinstance(hybrid, _HYBRID):
            # The hybrid has got the names as the model has them.
            self.ignored_layers = hybrid.ignored_layers
            if isinstance(layer, FusedMoE) and not hybrid.nvfp4_config.is_layer_excluded(prefix):
                return nvfp4_method(hybrid.nvfp4_config)
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]


def fp8_config(kind: Any, checkpoint: dict[str, Any]) -> Any:
    """Returns an fp8 checkpoint's configuration of this kind. For a hybrid checkpoint it returns the configuration
    that SGLang's loader turns into a hybrid."""
    if not is_hybrid(checkpoint):
        return kind.from_config(checkpoint)
    if _HYBRID is None:
        raise NotImplementedError(
            "oxmoe: the experts of this fp8 checkpoint are NVFP4 (moe_quant_algo), which this SGLang does not load; "
            "install a newer one"
        )
    made: Any = type(kind.__name__, (_HybridOfFp8, kind), {})
    return made.from_config(checkpoint)


_CONFIGS = {
    "modelopt": OxmoeModelOptFp8Config,
    "modelopt_fp8": OxmoeModelOptFp8Config,
    "modelopt_fp4": OxmoeModelOptFp4Config,
    "modelopt_mixed": OxmoeModelOptMixedPrecisionConfig,
}
# For checkpoints with an hf_quant_config.json, older releases take SGLang's configurations without a look at the table.
_SECOND = ("modelopt_fp8", "modelopt_fp4")


def second_name(name: str) -> str:
    """Returns the second name under which a configuration is registered, so that those releases look at the table."""
    return f"oxmoe_{name}"


def register(**methods: Any) -> None:
    """Replaces SGLang's configurations in its table of quantizations by oxmoe's.

    methods: the adapter's methods for layers of other formats: `unquantized`, `blocks` and `mxfp8`.
    """
    made = {kind: type(kind.__name__, (kind,), methods) for kind in _CONFIGS.values()}
    QUANTIZATION_METHODS.update({name: made[kind] for name, kind in _CONFIGS.items() if name in QUANTIZATION_METHODS})
    if not capabilities.finds_modelopt_by_name():
        QUANTIZATION_METHODS.update({second_name(name): made[_CONFIGS[name]] for name in _SECOND})
