"""Marlin's W4A16 MoE as SGLang 0.5.23 runs it: its repacking of a checkpoint's weights, and its fused_marlin_moe.

SGLang compiles the kernels with nvcc at the first call, all tiles of all formats in one module for each combination of
bias and GEMM: that takes minutes on one core. SGLANG_JIT_CACHE_DIR says where the modules are kept.

NOTE: SGLang 0.5.23 calls this kernel for MXFP4, NVFP4, int4 and int8. e4m3 weights have no way into it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from oxmoe.formats.int4 import Experts as Int4
from oxmoe.tools.bench import sglang
from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.layers import Inputs, Mxfp4, Nvfp4, Shape, Weights


def split(tensor: Tensor, shape: Shape) -> Tensor:
    """Returns w13's rows as [gate; up]."""
    if not shape.gpt_oss:
        return tensor
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)


def make_module(shape: Shape, item: Weights, group: int) -> Any:
    """Returns a layer that holds a checkpoint's tensors under SGLang's names, for SGLang's methods to prepare."""
    module: Any = Module()
    module.hidden_size, module.intermediate_size_per_partition = shape.hidden, shape.intermediate
    module.moe_runner_config = SimpleNamespace(
        is_gated=True,
        activation=shape.options.get("activation", "silu"),
        apply_router_weight_on_input=False,
        gemm1_alpha=shape.options.get("alpha"),
    )
    module.params_dtype = module.orig_dtype = torch.bfloat16
    module.quant_config = SimpleNamespace(group_size=group)
    return module


def _padding(size: int, multiple: int) -> int:
    return -size % multiple


def parameter(tensor: Tensor | None) -> Parameter | None:
    return None if tensor is None else Parameter(tensor, requires_grad=False)


class Marlin(Backend):
    name = "marlin"
    formats = ("mxfp4", "nvfp4", "int4")
    VERSIONS: ClassVar[tuple[str, ...]] = (sglang.NEW,)

    @classmethod
    def missing(cls, device: str) -> str | None:
        return sglang.missing(device, cls.VERSIONS)

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
        from sglang.srt.layers.quantization.marlin_utils import check_moe_marlin_supports_layer, marlin_make_workspace

        sglang.prepare()
        self.fused_marlin_moe, self.make_workspace = fused_marlin_moe, marlin_make_workspace
        self.route = sglang.router(shape.top_k)
        first = weights[0].w13
        self.group = 2 * first.codes.shape[2] // first.scales.shape[2]
        module = make_module(shape, weights[0], self.group)
        # NVFP4's and int4's methods refuse sizes that they would have to pad; MXFP4's method pads.
        group = 64 if isinstance(first, Nvfp4) else self.group
        if not check_moe_marlin_supports_layer(module, group, allow_tile_padding=isinstance(first, Mxfp4)):
            raise NotImplementedError(f"SGLang refuses hidden size {shape.hidden} with {shape.intermediate} a rank")
        self.hidden_pad = _padding(shape.hidden, 256) if isinstance(first, Mxfp4) else 0
        prepare = {Mxfp4: self._mxfp4, Nvfp4: self._nvfp4, Int4: self._int4}[type(first)]
        self.operands = [prepare(item) for item in weights]

    def _mxfp4(self, item: Weights) -> dict[str, Any]:
        """Prepares a layer as Mxfp4MoEMethod does with --moe-runner-backend marlin: it pads both sizes."""
        from sglang.srt.layers.quantization import marlin_utils_fp4

        module = make_module(self.shape, item, self.group)
        # A layer of [gate; up] is padded later, half by half.
        intermediate = _padding(self.shape.intermediate, 128) if self.shape.gpt_oss else 0
        for name, matrix, bias in (("w13", item.w13, item.b13), ("w2", item.w2, item.b2)):
            rows, columns = (2 * intermediate, self.hidden_pad) if name == "w13" else (self.hidden_pad, intermediate)
            # Padding copies the scales, which are put into place later.
            codes, scales = matrix.codes.view(torch.uint8), matrix.scales
            setattr(module, f"{name}_weight", parameter(pad(codes, (0, columns // 2, 0, rows)).view(torch.int8)))
            setattr(module, f"{name}_weight_scale", parameter(pad(scales, (0, columns // self.group, 0, rows)).clone()))
            if bias is not None:
                setattr(module, f"{name}_weight_bias", parameter(pad(bias, (0, rows)).clone()))
        if self.shape.gpt_oss:
            marlin_utils_fp4.deinterleave_moe_mxfp4_w13_for_marlin(module)
        marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(module)
        biases = {
            f"w{number}_bias": getattr(module, f"{name}_weight_bias", None) for number, name in ((1, "w13"), (2, "w2"))
        }
        return {
            **self._common(module.w13_weight, module.w2_weight, module.w13_weight_scale, module.w2_weight_scale),
            **biases,
        }

    def _nvfp4(self, item: Weights) -> dict[str, Any]:
        """Prepares a layer as ModelOptNvFp4FusedMoEMethod does when it falls back to Marlin."""
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_nvfp4_layer_for_marlin

        module = make_module(self.shape, item, self.group)
        for name, matrix in (("w13", item.w13), ("w2", item.w2)):
            codes, scales = matrix.codes, matrix.scales
            if name == "w13":
                codes, scales = split(codes, self.shape), split(scales, self.shape)
            factors = torch.full((self.shape.experts,), matrix.factor, device=codes.device)
            setattr(module, f"{name}_weight", parameter(codes))
            setattr(module, f"{name}_weight_scale", parameter(scales))
            setattr(module, f"{name}_weight_scale_2", parameter(factors))
        if item.b13 is not None:
            module.w13_bias, module.w2_bias = parameter(split(item.b13, self.shape)), parameter(item.b2)
        prepare_moe_nvfp4_layer_for_marlin(module)
        common = self._common(module.w13_weight, module.w2_weight, module.w13_weight_scale, module.w2_weight_scale)
        of_layer = {
            f"w{number}_global_scale": getattr(module, f"{name}_weight_scale_2")
            for number, name in ((1, "w13"), (2, "w2"))
        }
        return {
            **common,
            **of_layer,
            "w1_bias": getattr(module, "w13_bias", None),
            "w2_bias": getattr(module, "w2_bias", None),
        }

    def _int4(self, item: Weights) -> dict[str, Any]:
        """Prepares a layer as CompressedTensorsWNA16MoE does."""
        from sglang.srt.hardware_backend.gpu.quantization.gptq_kernels import gptq_marlin_moe_repack
        from sglang.srt.layers.quantization.marlin_utils import marlin_moe_permute_scales, marlin_permute_bias

        made: list[Tensor] = []
        scales_made: list[Tensor] = []
        none = torch.empty((self.shape.experts, 0), dtype=torch.int32, device=item.w13.codes.device)
        for matrix in (item.w13, item.w2):
            codes, scales = matrix.codes, matrix.scales
            if matrix is item.w13:
                codes, scales = split(codes, self.shape), split(scales, self.shape)
            rows, columns = codes.shape[1], 2 * codes.shape[2]
            # The checkpoint's words of eight columns, transposed as SGLang's loader transposes them.
            words = codes.view(torch.int32).transpose(1, 2).contiguous()
            made.append(gptq_marlin_moe_repack(words, none, columns, rows, 4))
            scales_made.append(
                marlin_moe_permute_scales(scales.transpose(1, 2).contiguous(), columns, rows, self.group)
            )
        biases = {}
        if item.b13 is not None and item.b2 is not None:
            given = split(item.b13, self.shape), item.b2
            biases = {
                f"w{i}_bias": torch.stack([marlin_permute_bias(one) for one in bias]) for i, bias in enumerate(given, 1)
            }
        indices = dict.fromkeys(("g_idx1", "g_idx2", "sort_indices1", "sort_indices2"), none)
        # The method for int4 keeps the workspace; the runner of the other formats makes one for each call.
        workspace = self.make_workspace(codes.device, 4)
        return {**self._common(*made, *scales_made), **biases, **indices, "workspace": workspace}

    def _common(self, w1: Tensor, w2: Tensor, w1_scale: Tensor, w2_scale: Tensor) -> dict[str, Any]:
        given = self.shape.options
        # SGLang has the bounds of SiTU in the same two places.
        limit, alpha = given.get("situ_linear_beta", given.get("limit")), given.get("situ_beta", given.get("alpha"))
        options = {"num_bits": 4, "inplace": False, "clamp_limit": limit, "gemm1_alpha": alpha}
        if self.shape.situ:
            options["activation"] = "situ"
        return {"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale, **options}

    def prepare(self, tokens: Sequence[int]) -> None:
        """Compiles both GEMMs' modules beside each other."""
        from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module as module

        bias = self.weights[0].b13 is not None
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for zero in (False, True):
                pool.submit(module, torch.bfloat16, False, bias, True, zero, True)

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        topk_weights, topk_ids = self.route(inputs)
        operands = self.operands[index]
        if "workspace" not in operands:
            operands = {**operands, "workspace": self.make_workspace(inputs.x.device, max_blocks_per_sm=4)}
        result: Tensor = self.fused_marlin_moe(
            hidden_states=pad(inputs.x, (0, self.hidden_pad)) if self.hidden_pad else inputs.x,
            gating_output=inputs.router_logits,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            **operands,
        )
        return result[:, : self.shape.hidden]
