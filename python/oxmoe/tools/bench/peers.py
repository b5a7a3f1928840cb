"""The peers, each called as its own users call it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.deep_gemm import DeepGemm
from oxmoe.tools.bench.flashinfer import FlashinferCuteDsl
from oxmoe.tools.bench.flashinfer_cutlass import FlashinferCutlass, FlashinferFp8
from oxmoe.tools.bench.layers import Fp8Block, Inputs, Mxfp4, Shape, Weights, activated, choose


class SglangTriton(Backend):
    """sgl_kernel's top-k softmax and SGLang's Triton fused_experts, tuned where SGLang ships a configuration.

    fp8_tensor-token is its path for a scale a channel (per_channel_quant), all channels of an expert with one number.
    """

    name = "sglang-triton"
    formats = ("bf16", "f16", "fp8_block", "fp8_tensor", "fp8_tensor-token", "fp8_tensor-static")
    VERSION = "0.5.12.post1"

    @classmethod
    def missing(cls, device: str) -> str | None:
        if device != "cuda":
            return "needs a GPU"
        if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
            return "sglang and sgl_kernel are not installed"
        import sglang

        if sglang.__version__ != cls.VERSION:
            return f"is written for SGLang {cls.VERSION}, found {sglang.__version__}"
        return None

    @staticmethod
    def prepare() -> None:
        """The two settings that fused_experts reads, which a server would have made."""
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(
            SimpleNamespace(enable_fused_moe_sum_all_reduce=False, enable_deterministic_inference=False)
        )

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        import sgl_kernel
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

        self.prepare()
        self.topk_softmax, self.fused_experts = sgl_kernel.topk_softmax, fused_experts
        self.config = MoeRunnerConfig(
            num_experts=shape.experts,
            num_local_experts=shape.experts,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            top_k=shape.top_k,
            inplace=False,
            gemm1_alpha=shape.options.get("alpha"),
            gemm1_clamp_limit=shape.options.get("limit"),
        )

        self.scales = [self._scales(item) if isinstance(item.w13, Fp8Block) else {} for item in weights]

    @staticmethod
    def _scales(item: Weights) -> dict[str, Any]:
        """Options of fused_experts for e4m3 experts."""
        if item.activation_scales is None:
            return {"w1_scale": item.w13.scales, "w2_scale": item.w2.scales, "block_shape": [128, 128]}
        of_experts = [weights.scales[:, 0, 0].contiguous() for weights in (item.w13, item.w2)]
        if item.activation_scales == "token":
            w1_scale, w2_scale = (
                scale[:, None, None].expand(-1, weights.codes.shape[1], 1).contiguous()
                for scale, weights in zip(of_experts, (item.w13, item.w2), strict=True)
            )
            return {"w1_scale": w1_scale, "w2_scale": w2_scale, "per_channel_quant": True}
        scales = {"w1_scale": of_experts[0], "w2_scale": of_experts[1]}
        if item.activation_scales != "tensor":
            scales.update(
                zip(("a1_scale", "a2_scale"), (scale.reshape(1) for scale in item.activation_scales), strict=True)
            )
        return scales

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        x, logits, top_k = inputs.x, inputs.router_logits, self.shape.top_k
        if inputs.chosen is not None:
            topk_weights, topk_ids = inputs.chosen
        elif inputs.router:
            from sglang.srt.layers.moe.topk import biased_grouped_topk

            bias, groups, chosen = (
                inputs.router[name] for name in ("correction_bias", "num_expert_group", "topk_group")
            )
            topk_weights, topk_ids = biased_grouped_topk(x, logits, bias, top_k, True, groups, chosen)
        else:
            topk_weights = torch.empty(x.shape[0], top_k, device=x.device)
            topk_ids = torch.empty(x.shape[0], top_k, dtype=torch.int32, device=x.device)
            self.topk_softmax(topk_weights, topk_ids, logits, True)
        item = self.weights[index]
        options: dict[str, Any] = {"b1": item.b13, "b2": item.b2}
        w13, w2 = item.w13, item.w2
        if isinstance(w13, Fp8Block):
            options.update(use_fp8_w8a8=True, **self.scales[index])
            w13, w2 = w13.codes, w2.codes
        return self.fused_experts(x, w13, w2, (topk_weights, topk_ids, logits), self.config, **options)


class TritonKernels(Backend):
    """triton_kernels' top-k, ragged metadata and two matmul_ogs, as SGLang's triton_kernel backend calls them; MXFP4
    weights in the layouts that SGLang gives them at load.

    NOTE: its fused activation is GPT-OSS's (interleaved rows, alpha, limit): on other models' layers the same bytes and
    flops as silu and a product, not the same numbers.
    """

    name = "triton_kernels"
    formats = ("bf16", "f16", "mxfp4")

    @classmethod
    def missing(cls, device: str) -> str | None:
        if device != "cuda":
            return "needs a GPU"
        spec = find_spec("triton_kernels")
        if spec is None:
            return "triton_kernels is not installed (sglang-kernel carries it)"
        if not any(Path(folder, "matmul_ogs.py").exists() for folder in spec.submodule_search_locations or []):
            return "the package of this name that is installed has no matmul_ogs (PyPI's triton-kernels is unrelated)"
        return None

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, weights)
        from triton_kernels import matmul_ogs as ogs
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import make_ragged_tensor_metadata
        from triton_kernels.topk import topk

        update_opt_flags_constraints({"split_k": 1})
        self.ogs, self.topk, self.make_metadata = ogs, topk, make_ragged_tensor_metadata
        specs = ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
        self.activation = ogs.FusedActivation(specs, (1.702, 7.0))
        self.transposed = [(self._operand(item.w13), self._operand(item.w2)) for item in weights]
        self.biases = [
            tuple(None if bias is None else bias.float() for bias in (item.b13, item.b2)) for item in weights
        ]

    def _operand(self, weights: Tensor | Mxfp4) -> tuple[Any, Any]:
        """(weights [E, K, N], precision configuration)."""
        if not isinstance(weights, Mxfp4):
            return weights.transpose(1, 2).contiguous(), self.ogs.PrecisionConfig()
        from triton_kernels.numerics import InFlexData
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        of_codes, code_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        of_scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        codes, scales = weights.codes.transpose(1, 2), weights.scales.transpose(1, 2)
        codes = convert_layout(wrap_torch_tensor(codes, dtype=FP4), of_codes, **code_options)
        scales = convert_layout(wrap_torch_tensor(scales), of_scales, **scale_options)
        flexible = self.ogs.FlexCtx(rhs_data=InFlexData())
        return codes, self.ogs.PrecisionConfig(weight_scale=scales, flex_ctx=flexible)

    def same_layer(self) -> bool:
        return self.shape.gpt_oss

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        if inputs.chosen is not None or inputs.router:
            raise NotImplementedError("takes router logits and softmax, neither ids nor another router")
        ogs, x, top_k = self.ogs, inputs.x, self.shape.top_k
        chosen = self.topk(inputs.router_logits, top_k, apply_softmax=True)
        dispatch, combine = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        metadata = self.make_metadata(chosen.mask_metadata.col_sum, dispatch.shape[0])
        gates = chosen.vals.flatten()[combine]
        routing = ogs.RoutingData(gates, metadata.slice_sizes, self.shape.experts, top_k, metadata)
        hidden = x.new_empty((1, x.shape[0] * top_k, self.shape.intermediate))
        out = x.new_empty((1, *x.shape))
        ((w13, of_w13), (w2, of_w2)), (b13, b2) = self.transposed[index], self.biases[index]
        ogs.matmul_ogs(
            x,
            w13,
            b13,
            routing,
            gather_indx=ogs.GatherIndx(combine, dispatch),
            precision_config=of_w13,
            fused_activation=self.activation,
            y=hidden,
        )
        ogs.matmul_ogs(
            hidden[0],
            w2,
            b2,
            routing,
            scatter_indx=ogs.ScatterIndx(dispatch, combine),
            precision_config=of_w2,
            gammas=routing.gate_scal,
            y=out,
        )
        return out[0]


class TorchGroupedMm(Backend):
    """Plain torch that never waits for the device: sort, gather, torch._grouped_mm twice, weighted sum."""

    name = "torch-grouped-mm"

    @classmethod
    def missing(cls, device: str) -> str | None:
        return None if device == "cuda" else "needs a GPU"

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        x, top_k, weights = inputs.x, self.shape.top_k, self.weights[index]
        topk_weights, topk_ids = choose(inputs, top_k)
        ids, order = topk_ids.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(self.shape.experts, device=x.device), right=True).int()
        sums = torch._grouped_mm(x[order // top_k], weights.w13.transpose(1, 2), offs=ends)
        if weights.b13 is not None:
            sums = sums + weights.b13[ids]
        rows = torch._grouped_mm(activated(sums, self.shape), weights.w2.transpose(1, 2), offs=ends)
        if weights.b2 is not None:
            rows = rows + weights.b2[ids]
        slots = torch.empty_like(rows).index_copy_(0, order, rows).view(*topk_ids.shape, -1)
        return (slots * topk_weights[..., None]).sum(1).to(x.dtype)


class TorchLoop(Backend):
    """A loop over the experts in plain torch, as most model code has it; MXFP4 weights are expanded at load."""

    name = "torch-loop"
    formats = ("bf16", "f16", "mxfp4")

    def __init__(self, shape: Shape, weights: Sequence[Weights]):
        super().__init__(shape, [item.dense() for item in weights])

    @classmethod
    def missing(cls, device: str) -> str | None:
        return None if device == "cpu" else "waits for the device in each layer, so no CUDA graph can hold it"

    def layer(self, index: int, inputs: Inputs) -> Tensor:
        x, weights = inputs.x, self.weights[index]
        topk_weights, topk_ids = choose(inputs, self.shape.top_k)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in topk_ids.unique().tolist():
            token, slot = torch.where(topk_ids == expert)
            b13, b2 = (None if bias is None else bias[expert] for bias in (weights.b13, weights.b2))
            sums = F.linear(x[token], weights.w13[expert], b13)
            rows = F.linear(activated(sums, self.shape), weights.w2[expert], b2)
            total.index_add_(0, token, rows * topk_weights[token, slot, None])
        return total.to(x.dtype)


PEERS: dict[str, type[Backend]] = {
    peer.name: peer
    for peer in (
        SglangTriton,
        TritonKernels,
        FlashinferCuteDsl,
        FlashinferCutlass,
        FlashinferFp8,
        DeepGemm,
        TorchGroupedMm,
        TorchLoop,
    )
}
