"""SGLang's quantization "oxmoe". MoE layers run on oxmoe, and so do MXFP8 linear layers if SGLang has no kernel for
them. All other layers stay as they are.

Checkpoints of bf16 or f16 weights need `--quantization oxmoe`; otherwise SGLang would run their layers on its Triton
kernels. MXFP4, MXFP8 and fp8 checkpoints, and those of compressed-tensors with fp8, NVFP4 or int4 layers, get this
quantization by themselves. No weights are laid out for another package first. MXFP4 and MXFP8 weights are packed at
load in their own memory; 16-bit and fp8 weights are used as they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.utils import set_weight_attrs

from oxmoe import ExpertWeights
from oxmoe.sglang import compressed_tensors, deepep, formats, int4, int4_schemes, linear, modelopt, server
from oxmoe.sglang.deepseek_v4 import OxmoeFp8Mxfp4MoEMethod
from oxmoe.sglang.experts import Experts
from oxmoe.sglang.formats import FP8_BLOCK, served_fp8
from oxmoe.sglang.loading import (
    MadeAtLoad,
    NeedsBfloat16,
    check_all_to_all,
    check_layer_config,
    check_loaded,
    checked_loader,
    handover,
    leave_out_gates,
    loaded,
    mark_scales,
    refuse_transposed,
)
from oxmoe.sglang.updates import Writes

NAME = "oxmoe"
BLOCK = 32  # weights of one MXFP4 scale
PACKED = 64  # rows and columns of a block of packed weights
SCALE_OF_ONE = 127  # 1.0 in E8M0


def run_moe(runner: Any, dispatch_output: Any, quant_info: Any, experts: Experts) -> Any:
    """Runs a layer's tokens through its MoeRunner, or directly if SGLang has no runner for oxmoe."""
    if hasattr(runner, "run"):
        return runner.run(dispatch_output, quant_info)
    return deepep.combine_input(dispatch_output, experts.run(dispatch_output, quant_info, runner.config))


class DirectRunner:
    """Stands for a MoeRunner if SGLang takes no runner under another name."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ThroughRunner:
    """A method whose layer keeps SGLang's parameters. Tokens go through its MoeRunner."""

    oxmoe = True
    of = ""  # the format of its experts, in words
    make_runner: Any = staticmethod(DirectRunner)
    experts: Experts
    get_triton_quant_info: Any
    sized_as = "bf16"
    processed = False
    writes: Writes | None = None  # what came through the layer's loader

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """Creates SGLang's parameters."""
        if "weight_loader" in attributes:
            self.writes = Writes()
            attributes["weight_loader"] = checked_loader(layer, attributes["weight_loader"], self.of, self.writes)
        super().create_weights(layer, *sizes, **attributes)  # type: ignore[misc]
        mark_scales(layer)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        refuse_transposed(layer)
        check_all_to_all(self.sized_as)
        check_layer_config(moe_runner_config)
        self.moe_runner_config = moe_runner_config
        self.runner = self.make_runner(moe_runner_config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Describes the weights once, at load. So what oxmoe does not serve fails here, and not at the first
        request."""
        if not self.processed and self.writes:
            check_loaded(layer, self.of, self.writes)
        self.processed = True
        if self.writes is not None:
            self.writes.clear()
        experts = getattr(getattr(self.runner, "runner_core", None), "experts", self.experts)
        experts.follow(handover(layer, self))
        weights = experts.prepare(self.get_triton_quant_info(layer), self.moe_runner_config)
        loaded(layer, weights)
        if server.offloads() is not None:
            # SGLang lends the layer its parameters on the GPU while it processes them.
            experts.forget()

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        if not self.processed:
            # --load-format remote_instance leaves this out. Such weights are used as they lie.
            self.process_weights_after_loading(layer)
        return run_moe(self.runner, dispatch_output, self.get_triton_quant_info(layer), self.experts)

    def get_moe_runner_backend(self, layer: torch.nn.Module) -> Any:
        """Newer releases ask this. None means that tokens come with top-k ids of this rank's experts."""
        return getattr(self.runner, "runner_backend", None)


class OxmoeUnquantizedFusedMoEMethod(ThroughRunner, UnquantizedFusedMoEMethod):
    """The method for bf16 and f16 experts on oxmoe. Parameters and loading are SGLang's."""

    of = "unquantised"

    def __init__(self) -> None:
        super().__init__()
        # Rows of w13 are [gate; up] here, whatever the server's --moe-runner-backend is.
        self.use_flashinfer_cutlass = False
        self.experts = Experts()


class _WithoutGates:
    """A method of SGLang's fp8 experts that also takes experts without a gate, in all releases."""

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        super().create_weights(layer, *sizes, **attributes)  # type: ignore[misc]
        leave_out_gates(layer)


class OxmoeFp8MoEMethod(NeedsBfloat16, ThroughRunner, _WithoutGates, Fp8MoEMethod):
    """The method for fp8 experts with a scale for each 128 x 128 block. Parameters and loading are SGLang's."""

    of, sized_as = "fp8", "fp8_block"

    def __init__(self, quant_config: Fp8Config) -> None:
        super().__init__(quant_config)
        self.experts = Experts()


class OxmoeFp8TensorMoEMethod(NeedsBfloat16, MadeAtLoad, _WithoutGates, Fp8MoEMethod):
    """The method for fp8 experts with one scale a matrix; gate and up each have one. Parameters and loading are
    SGLang's."""

    of, sized_as = "fp8", "fp8_tensor"
    takes_biases = True
    reads_input_scales = True

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        scale = layer.w13_weight_scale.data
        return ExpertWeights.fp8_tensor(
            layer.w13_weight.data,
            layer.w2_weight.data,
            # SGLang has a place for gate's scale and one for up's, also without a gate.
            scale if options["gated"] else scale[:, 0].contiguous(),
            layer.w2_weight_scale.data,
            a13_scale=_data(layer, "w13_input_scale"),
            a2_scale=_data(layer, "w2_input_scale"),
            b13=_data(layer, "w13_weight_bias"),
            b2=_data(layer, "w2_weight_bias"),
            **options,
        )


class OxmoeMxfp8MoEMethod(NeedsBfloat16, MadeAtLoad, _WithoutGates, Fp8MoEMethod):
    """The method for MXFP8 experts: e4m3 codes with an E8M0 scale for each 32 of a row. Parameters and loading are
    SGLang's.

    On CUDA the parameters hold packed weights after loading (`ExpertWeights.mxfp8(in_place=True)`). Elsewhere they
    hold the checkpoint's.
    """

    of, sized_as = "MXFP8", "mxfp8"
    takes_biases = True
    integers = ("w13_weight_scale_inv", "w2_weight_scale_inv")

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        return ExpertWeights.mxfp8(
            w13,
            w2,
            layer.w13_weight_scale_inv.data,
            layer.w2_weight_scale_inv.data,
            b13=_data(layer, "w13_weight_bias"),
            b2=_data(layer, "w2_weight_bias"),
            in_place=w13.is_cuda and not any(size % PACKED for size in (*w13.shape[1:], *w2.shape[1:])),
            **options,
        )


class OxmoeMxfp4MoEMethod(MadeAtLoad, FusedMoEMethodBase):
    """The method for MXFP4 experts of a GPT-OSS checkpoint: [E, 2I, H / 2] codes, with gate and up rows in turn.

    On CUDA the parameters hold packed weights after loading (`ExpertWeights.mxfp4(in_place=True)`). Elsewhere they
    hold the checkpoint's.
    """

    of, sized_as = "MXFP4", "mxfp4"
    takes_biases = True
    hidden = 0
    layer_loads = False
    integers = ("w13_weight_scale", "w2_weight_scale")

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        """num_experts: the number of experts of this rank. A rank's share of I is rounded up, because GPT-OSS is cut
        at whole blocks of weights."""
        if params_dtype != torch.bfloat16:
            raise NotImplementedError(f"oxmoe: MXFP4 experts need --dtype bfloat16, got {params_dtype}")
        if "weight_loader" in attributes:
            attributes["weight_loader"] = self.loader(layer, attributes["weight_loader"])
        padded = getattr(layer, "use_flashinfer_mxfp4_moe", False)
        self.hidden = getattr(layer, "hidden_size_unpadded", 0 if padded else hidden_size)
        if self.hidden == 0:
            raise NotImplementedError(
                "oxmoe: with --moe-runner-backend flashinfer_mxfp4 this SGLang pads hidden_size; choose another"
            )
        intermediate = -(-intermediate_size_per_partition // PACKED) * PACKED

        def add(name: str, fill: int, *size: int, dtype: torch.dtype = torch.uint8) -> None:
            parameter = torch.nn.Parameter(torch.full(size, fill, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, attributes)

        for name, rows, columns in (("w13", 2 * intermediate, hidden_size), ("w2", hidden_size, intermediate)):
            add(f"{name}_weight", 0, num_experts, rows, columns // 2)
            add(f"{name}_weight_scale", SCALE_OF_ONE, num_experts, rows, columns // BLOCK)
            if with_bias:
                add(f"{name}_weight_bias", 0, num_experts, rows, dtype=torch.bfloat16)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        super().create_moe_runner(layer, moe_runner_config)
        if moe_runner_config.gemm1_alpha is None:
            raise NotImplementedError(
                "oxmoe: an MXFP4 checkpoint without gemm1_alpha is not served (only GPT-OSS's order of rows is known)"
            )

    def make(self, layer: Any, **options: Any) -> ExpertWeights:
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        columns = 2 * w13.shape[-1]
        return ExpertWeights.mxfp4(
            w13,
            w2,
            layer.w13_weight_scale.data,
            layer.w2_weight_scale.data,
            b13=_data(layer, "w13_weight_bias"),
            b2=_data(layer, "w2_weight_bias"),
            hidden_size=None if self.hidden == columns else self.hidden,
            in_place=w13.is_cuda and columns % PACKED == 0 and columns - self.hidden < PACKED,
            **options,
        )


def _data(layer: torch.nn.Module, name: str) -> torch.Tensor | None:
    parameter = getattr(layer, name, None)
    return None if parameter is None else parameter.data


class OxmoeMxfp4Config(Mxfp4Config):
    """SGLang's configuration of an MXFP4 checkpoint (its name stays "mxfp4", by which models choose their loader)."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return OxmoeMxfp4MoEMethod()
        return super().get_quant_method(layer, prefix)


class OxmoeFp8Config(Fp8Config):
    """SGLang's configuration of an fp8 or MXFP8 checkpoint, under its own name. The experts of an fp8 checkpoint may
    be MXFP4."""

    experts: Any = OxmoeFp8MoEMethod
    unquantized: Any = OxmoeUnquantizedFusedMoEMethod

    def get_min_capability(self) -> int:
        """Returns at most 90, because SGLang's own MXFP8 begins with sm_100."""
        return min(90, int(super().get_min_capability()))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, FusedMoE):
            return linear.method(super().get_quant_method(layer, prefix))
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return self.unquantized()
        if self.is_fp4_experts:
            return OxmoeFp8Mxfp4MoEMethod(self)
        if self.use_mxfp8:
            return OxmoeMxfp8MoEMethod(self)
        return OxmoeFp8TensorMoEMethod(self) if self.weight_block_size is None else self.experts(self)


def served_compressed(checkpoint: dict[str, Any] | None) -> bool:
    """Whether a checkpoint's quantization_config is one of compressed-tensors that `compressed_tensors.served`
    accepts."""
    config = checkpoint or {}
    return config.get("quant_method") in formats.COMPRESSED and compressed_tensors.served(config)


class OxmoeCompressedTensorsConfig(compressed_tensors.OxmoeCompressedTensorsConfig):
    """The configuration of a compressed-tensors checkpoint."""

    unquantized = OxmoeUnquantizedFusedMoEMethod


class OxmoeConfig(QuantizationConfig):
    """The configuration of `--quantization oxmoe`, for bf16 and f16 checkpoints. For quantised checkpoints it makes
    their own configurations."""

    unquantized: Any = OxmoeUnquantizedFusedMoEMethod
    fp8: Any = OxmoeFp8Config
    compressed: Any = OxmoeCompressedTensorsConfig

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
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None) -> str | None:
        """SGLang asks each method whether a checkpoint belongs to it. Returns this method's name for the checkpoints
        that oxmoe serves, unless the user names another method."""
        method = (hf_quant_cfg or {}).get("quant_method")
        if int4.claims(hf_quant_cfg, user_quant, NAME):
            return NAME
        ours = method == "mxfp4" or served_fp8(hf_quant_cfg) or served_compressed(hf_quant_cfg)
        return NAME if ours and user_quant in (None, method, NAME) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        method = config.get("quant_method")
        if method == "mxfp4":
            return OxmoeMxfp4Config.from_config(config)
        if served_fp8(config):
            return modelopt.fp8_config(cls.fp8, config)
        if served_compressed(config):
            return cls.compressed.from_config(config)
        if method in int4_schemes.METHODS:
            return int4.from_config(config, cls.unquantized)
        if method is not None:
            block = config.get("weight_block_size")
            given = f"{method} with blocks of {block}" if block else method
            raise NotImplementedError(
                f"--quantization oxmoe: no kernel for a checkpoint of {given}; served are bf16, f16, mxfp4, mxfp8, "
                f"awq, gptq, fp8 with one scale a matrix or weight_block_size [{FP8_BLOCK}, {FP8_BLOCK}], and "
                f"compressed-tensors with layers of {compressed_tensors.SERVED}"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            return self.unquantized()
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    def get_scaled_act_names(self) -> list[str]:
        return []
