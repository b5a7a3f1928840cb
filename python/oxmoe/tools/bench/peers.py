"""The peers, each called as its own users call it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oxmoe.tools.bench.backend import Backend
from oxmoe.tools.bench.deep_gemm import DeepGemm
from oxmoe.tools.bench.flashinfer import FlashinferCuteDsl
from oxmoe.tools.bench.flashinfer_cutlass import FlashinferCutlass, FlashinferFp8
from oxmoe.tools.bench.humming import Humming
from oxmoe.tools.bench.layers import Inputs, Mxfp4, Shape, Weights, activated, choose
from oxmoe.tools.bench.marlin import Marlin
from oxmoe.tools.bench.sglang import SglangTriton


class TritonKernels(Backend):
    """triton_kernels' top-k, ragged metadata and two matmul_ogs, as SGLang's triton_kernel backend calls them. MXFP4
    weights have the layouts that SGLang gives them at load.

    NOTE: its fused activation is GPT-OSS's (interleaved rows, alpha, limit). On other models' layers it has the same
    bytes and flops as silu and a product, but not the same numbers.
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
        """Returns (weights [E, K, N], precision configuration)."""
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
    """The layer in plain torch that never waits for the device: sort, gather, torch._grouped_mm twice, weighted sum."""

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
        Marlin,
        Humming,
        TritonKernels,
        FlashinferCuteDsl,
        FlashinferCutlass,
        FlashinferFp8,
        DeepGemm,
        TorchGroupedMm,
        TorchLoop,
    )
}
