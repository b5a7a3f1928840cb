"""The adapter for SGLang releases that have `register_moe_runner_core`. It registers MoE runner cores under the name
"oxmoe" and under SGLang's own names, and the quantization "oxmoe".

SGLang's own method for unquantised layers takes its Triton runner even with `--moe-runner-backend oxmoe`. So such a
layer gets oxmoe's runner through its quantization method: `--quantization oxmoe`, or
`FusedMoE(quant_method=OxmoeUnquantizedFusedMoEMethod())`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, FusedOpPool, MoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.base import DispatchOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, get_moe_a2a_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.server_args import add_moe_runner_backend_choices, add_quantization_method_choices

from oxmoe import ExpertWeights
from oxmoe.sglang import capabilities, collective, compressed_tensors, deepep, int4, modelopt, quantization
from oxmoe.sglang.experts import Experts
from oxmoe.sglang.quantization import NAME, OxmoeMxfp4Config, OxmoeMxfp4MoEMethod
from oxmoe.sglang.server import fuses_allreduce as allreduce_fusion

__all__ = [
    "OxmoeConfig",
    "OxmoeFp8Config",
    "OxmoeFp8MoEMethod",
    "OxmoeMxfp4Config",
    "OxmoeMxfp4MoEMethod",
    "OxmoeRunnerCore",
    "OxmoeUnquantizedFusedMoEMethod",
    "allreduce_fusion",
]

FUSION_FLAG = capabilities.fusion_flag()


class OxmoeRunnerCore(DispatchMoeRunnerCore):
    """Runs the experts of one layer. It holds their ExpertWeights, which are made once for each set of weight
    tensors."""

    oxmoe = True
    name = NAME

    def __init__(self, config: MoeRunnerConfig):
        super().__init__(config)
        if get_moe_a2a_backend().value not in deepep.A2A_BACKENDS:
            raise NotImplementedError(
                f"oxmoe: --moe-a2a-backend {get_moe_a2a_backend().value} is not served; served are "
                f"{', '.join(deepep.A2A_BACKENDS)}"
            )
        # Runners of this kind are not given the arguments of an overlap: a combine would wait for ever.
        deepep.refuse_overlap()
        self.experts = Experts()

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        return resolve_moe_runner_backend(self.name)

    def prepare(self, quant_info: MoeQuantInfo) -> ExpertWeights:
        """Returns the layer's ExpertWeights. It is the same object until SGLang gives the layer other tensors."""
        return self.experts.prepare(quant_info, self.config)

    def run_from_dispatch(
        self,
        dispatch_output: DispatchOutput,
        quant_info: MoeQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> Any:
        result = self.experts.run(dispatch_output, quant_info, runner_config, hooks)
        return deepep.combine_input(dispatch_output, result)


class OxmoeUnquantizedFusedMoEMethod(quantization.OxmoeUnquantizedFusedMoEMethod):
    """The method for bf16 and f16 experts on oxmoe's runner. Parameters and loading are SGLang's."""

    @staticmethod
    def make_runner(config: MoeRunnerConfig) -> MoeRunner:
        return MoeRunner(resolve_moe_runner_backend(NAME), config)


class OxmoeFp8MoEMethod(quantization.OxmoeFp8MoEMethod):
    """The method for fp8 experts with block scales on oxmoe's runner. Parameters and loading are SGLang's."""

    @staticmethod
    def make_runner(config: MoeRunnerConfig) -> MoeRunner:
        return MoeRunner(resolve_moe_runner_backend(NAME), config)


class OxmoeFp8Config(quantization.OxmoeFp8Config):
    """The configuration of an fp8 or MXFP8 checkpoint."""

    experts = OxmoeFp8MoEMethod
    unquantized = OxmoeUnquantizedFusedMoEMethod


class OxmoeCompressedTensorsConfig(quantization.OxmoeCompressedTensorsConfig):
    """The configuration of a compressed-tensors checkpoint."""

    unquantized = OxmoeUnquantizedFusedMoEMethod


class OxmoeConfig(quantization.OxmoeConfig):
    """`--quantization oxmoe`."""

    unquantized = OxmoeUnquantizedFusedMoEMethod
    fp8 = OxmoeFp8Config
    compressed = OxmoeCompressedTensorsConfig


def install_oxmoe() -> str:
    """Registers the runner and the quantization. SGLang refuses a name that is taken."""
    if NAME in QUANTIZATION_METHODS:
        raise ValueError(f"SGLang already has a quantization {NAME!r}")
    register_moe_runner_core(NAME, OxmoeRunnerCore)
    add_moe_runner_backend_choices([NAME])
    QUANTIZATION_METHODS[NAME] = OxmoeConfig
    add_quantization_method_choices([NAME])
    int4.install(OxmoeUnquantizedFusedMoEMethod)
    modelopt.register(
        unquantized=OxmoeUnquantizedFusedMoEMethod, blocks=OxmoeFp8MoEMethod, mxfp8=quantization.OxmoeMxfp8MoEMethod
    )
    return (
        f"MoE runner and quantization {NAME!r}: MXFP4, MXFP8 and fp8 checkpoints, compressed-tensors of "
        f"{compressed_tensors.KINDS}, AWQ, GPTQ, W4AFP8, ModelOpt's, and bf16 and f16 ones with --quantization {NAME}"
    )


def _override(name: str, formats: str) -> Callable[[], str]:
    """Registers oxmoe's core for one of SGLang's own runners. SGLang looks for such a core before it makes its own."""
    core = type(f"OxmoeCoreOf_{name}", (OxmoeRunnerCore,), {"name": name})

    def install() -> str:
        if FusedOpPool.get_fused_func("none", name) is not None:
            raise RuntimeError(
                f"SGLang has a fused function for {name!r} already, which goes before a core: a module that registers "
                "it was imported before the plugin. Leave this part out"
            )
        register_moe_runner_core(name, core)
        return f"runner core of --moe-runner-backend {name}: {formats}"

    return install


SWAPS = {
    "moe=oxmoe": install_oxmoe,
    "moe=triton_kernel": _override("triton_kernel", "bf16 (weights copied) and MXFP4 experts (packed copies)"),
    "moe=deep_gemm": _override("deep_gemm", "bf16, f16 and fp8 experts without biases"),
    "moe=flashinfer_mxfp4": _override("flashinfer_mxfp4", "MXFP4 experts on Hopper (packed copies)"),
    "allreduce": collective.install,
}
