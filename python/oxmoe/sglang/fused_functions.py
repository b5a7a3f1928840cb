"""The adapter for SGLang releases without `register_moe_runner_core`. It registers fused functions in their free
places, and the quantization "oxmoe".

Such a release takes no runner named oxmoe, because `initialize_moe_config` knows only the names of its enum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeQuantInfo, register_fused_func
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.server_args import add_quantization_method_choices

from oxmoe.sglang import capabilities, collective, deepep, int4, modelopt
from oxmoe.sglang.experts import Experts
from oxmoe.sglang.quantization import (
    NAME,
    OxmoeConfig,
    OxmoeFp8Config,
    OxmoeFp8MoEMethod,
    OxmoeMxfp4Config,
    OxmoeMxfp4MoEMethod,
    OxmoeMxfp8MoEMethod,
    OxmoeUnquantizedFusedMoEMethod,
)
from oxmoe.sglang.server import fuses_allreduce as allreduce_fusion

__all__ = [
    "OxmoeConfig",
    "OxmoeFp8Config",
    "OxmoeFp8MoEMethod",
    "OxmoeMxfp4Config",
    "OxmoeMxfp4MoEMethod",
    "OxmoeUnquantizedFusedMoEMethod",
    "allreduce_fusion",
    "fused_experts",
]

FUSION_FLAG = capabilities.fusion_flag()

# Layers by the address of their configuration. A fused function is called with it, and each layer has an object of its
# own.
_layers: dict[int, tuple[weakref.ref[MoeRunnerConfig], Experts]] = {}


def experts_of(config: MoeRunnerConfig) -> Experts:
    """Returns the Experts of the layer with this configuration."""
    known = _layers.get(id(config))
    if known is not None and known[0]() is config:
        return known[1]
    # Not every release refuses an overlap for fused functions, and its combine would wait for ever.
    deepep.refuse_overlap()
    key = id(config)
    experts = Experts()

    def gone(reference: weakref.ref[MoeRunnerConfig]) -> None:
        if key in _layers and _layers[key][0] is reference:
            del _layers[key]

    _layers[key] = (weakref.ref(config, gone), experts)
    return experts


def fused_experts(dispatch_output: Any, quant_info: MoeQuantInfo, runner_config: MoeRunnerConfig) -> Any:
    """The fused function that SGLang calls with a layer's tokens, weights and configuration."""
    result = experts_of(runner_config).run(dispatch_output, quant_info, runner_config)
    return deepep.combine_input(dispatch_output, result)


fused_experts.oxmoe = True  # type: ignore[attr-defined]


def install_oxmoe() -> str:
    """Registers the quantization. SGLang refuses a name that is taken."""
    if NAME in QUANTIZATION_METHODS:
        raise ValueError(f"SGLang already has a quantization {NAME!r}")
    QUANTIZATION_METHODS[NAME] = OxmoeConfig
    add_quantization_method_choices([NAME])
    int4.install(OxmoeUnquantizedFusedMoEMethod)
    modelopt.register(unquantized=OxmoeUnquantizedFusedMoEMethod, blocks=OxmoeFp8MoEMethod, mxfp8=OxmoeMxfp8MoEMethod)
    return (
        f"quantization {NAME!r}: MXFP4, MXFP8 and fp8 checkpoints, compressed-tensors of fp8 and int4, AWQ, GPTQ, "
        f"W4AFP8, ModelOpt's, and bf16 and f16 ones with --quantization {NAME}"
    )


def _fused(name: str, formats: str, a2a_backends: tuple[str, ...] = ("none",)) -> Callable[[], str]:
    def install() -> str:
        for a2a_backend in a2a_backends:
            if FusedOpPool.get_fused_func(a2a_backend, name) is not None:
                raise RuntimeError(f"SGLang has a fused function for {name!r} already; leave this part out")
        for a2a_backend in a2a_backends:
            register_fused_func(a2a_backend, name)(fused_experts)
        return f"fused function of --moe-runner-backend {name}: {formats}"

    return install


SWAPS = {
    "moe=oxmoe": install_oxmoe,
    "moe=triton_kernel": _fused("triton_kernel", "bf16 (weights copied) and MXFP4 experts (packed copies)"),
    "moe=deep_gemm": _fused(
        "deep_gemm", "bf16, f16 and fp8 experts without biases", ("none", "deepep", "mooncake", "nixl")
    ),
    "allreduce": collective.install,
}
