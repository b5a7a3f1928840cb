"""SGLang 0.5.23: the MoE runner "oxmoe", and the quantization "oxmoe" that gives it to every unquantised MoE layer.

SGLang's own method for unquantised layers takes its Triton runner even with `--moe-runner-backend oxmoe`, so a layer
gets ours through its quantization method: `--quantization oxmoe`, or
`FusedMoE(quant_method=OxmoeUnquantizedFusedMoEMethod())`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from oxmoe import ExpertWeights, moe
from oxmoe.fused_experts import expert_options, expert_weights

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.base import DispatchOutput
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.server_args import add_moe_runner_backend_choices, add_quantization_method_choices

NAME = "oxmoe"

_SERVED = "TritonMoeQuantInfo with unquantised bf16 or f16 experts (w13_weight, w2_weight, optional b13 and b2)"
_SERVED_FIELDS = frozenset({"w13_weight", "w2_weight", "b13", "b2", "fuse_swiglu_interleaved"})


def _check_quant_info(quant_info: MoeQuantInfo) -> None:
    if not isinstance(quant_info, TritonMoeQuantInfo):
        raise NotImplementedError(f"oxmoe: no kernel for {type(quant_info).__name__}; served: {_SERVED}")
    # NOTE: looked at one by one, so that a format which SGLang adds as a field is refused and not misread.
    given = {
        field.name: getattr(quant_info, field.name) for field in fields(quant_info) if field.name not in _SERVED_FIELDS
    }
    used = [name for name, value in given.items() if value is not None and value is not False]
    if used:
        raise NotImplementedError(f"oxmoe: no kernel for TritonMoeQuantInfo with {', '.join(used)}; served: {_SERVED}")


def _identity(quant_info: TritonMoeQuantInfo) -> tuple[int, ...]:
    # NOTE: addresses, not tensor objects: SGLang gives a parameter other memory by assigning its `.data`.
    b13, b2 = quant_info.b13, quant_info.b2
    return (
        quant_info.w13_weight.data_ptr(),
        quant_info.w2_weight.data_ptr(),
        0 if b13 is None else b13.data_ptr(),
        0 if b2 is None else b2.data_ptr(),
    )


class OxmoeRunnerCore(DispatchMoeRunnerCore):
    """Runs one layer's experts; holds their ExpertWeights, made once for each set of weight tensors."""

    def __init__(self, config: MoeRunnerConfig):
        super().__init__(config)
        self._made_for: tuple[int, ...] | None = None
        self._weights: ExpertWeights | None = None

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        return resolve_moe_runner_backend(NAME)

    def prepare(self, quant_info: MoeQuantInfo) -> ExpertWeights:
        """The layer's ExpertWeights; the same object until SGLang gives the layer other tensors."""
        if (
            isinstance(quant_info, TritonMoeQuantInfo)
            and self._weights is not None
            and _identity(quant_info) == self._made_for
        ):
            return self._weights
        _check_quant_info(quant_info)
        config = self.config
        self._weights = expert_weights(
            quant_info.w13_weight,
            quant_info.w2_weight,
            b13=quant_info.b13,
            b2=quant_info.b2,
            **expert_options(
                activation=config.activation,
                is_gated=config.is_gated,
                gemm1_alpha=config.gemm1_alpha,
                gemm1_beta=config.gemm1_beta,
                gemm1_limit=config.gemm1_clamp_limit,
                swiglu_limit=config.swiglu_limit,
                gate_up_interleaved=config.gate_up_interleaved,
                fuse_swiglu_interleaved=quant_info.fuse_swiglu_interleaved,
            ),
        )
        self._made_for = _identity(quant_info)
        return self._weights

    def run_from_dispatch(
        self,
        dispatch_output: DispatchOutput,
        quant_info: MoeQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        if hooks is not None:
            raise NotImplementedError(
                "oxmoe: LoRA on MoE layers is not served; run LoRA models without OXMOE_SGLANG=moe"
            )
        topk_output = dispatch_output.topk_output
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise NotImplementedError(
                f"oxmoe: no kernel for {type(topk_output).__name__}; served: StandardTopKOutput (weights and ids)"
            )
        if runner_config.inplace and runner_config.no_combine:
            raise ValueError("oxmoe: inplace and no_combine exclude each other (the result is [T, k, H])")
        x, scale = dispatch_output.hidden_states, runner_config.routed_scaling_factor
        result = moe(
            x,
            self.prepare(quant_info),
            topk_output.topk_weights,
            topk_output.topk_ids,
            # SGLang scales while it combines: without a combine there is no scale.
            routed_scaling_factor=1.0 if scale is None or runner_config.no_combine else scale,
            apply_router_weight_on_input=runner_config.apply_router_weight_on_input,
            no_combine=runner_config.no_combine,
            keep_router_weight=runner_config.no_combine_keep_router_weight,
            out=x if runner_config.inplace else None,
        )
        return StandardCombineInput(hidden_states=result)


class OxmoeUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """bf16 and f16 experts on our runner; parameters and loading are SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        # Rows of w13 are [gate; up] here whatever the server's --moe-runner-backend is.
        self.use_flashinfer_cutlass = False

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend(NAME), moe_runner_config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Describes the weights once, at load: what oxmoe does not serve fails here and not at the first request."""
        self.runner.runner_core.prepare(self.get_triton_quant_info(layer))

    def apply(self, layer: torch.nn.Module, dispatch_output: DispatchOutput) -> StandardCombineInput:
        return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))


class OxmoeConfig(QuantizationConfig):
    """`--quantization oxmoe`, for unquantised checkpoints: MoE layers on our runner, all others as they are."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OxmoeConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return OxmoeUnquantizedFusedMoEMethod()
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    def get_scaled_act_names(self) -> list[str]:
        return []


def install_moe() -> str:
    """Registers runner and quantization; SGLang refuses a name that is taken."""
    if NAME in QUANTIZATION_METHODS:
        raise ValueError(f"SGLang already has a quantization {NAME!r}")
    register_moe_runner_core(NAME, OxmoeRunnerCore)
    add_moe_runner_backend_choices([NAME])
    QUANTIZATION_METHODS[NAME] = OxmoeConfig
    add_quantization_method_choices([NAME])
    return f"MoE runner and quantization {NAME!r} registered; --quantization {NAME} runs unquantised MoE layers on it"


SWAPS = {"moe": install_moe}
