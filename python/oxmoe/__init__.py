"""oxmoe: mixture-of-experts layers as one Rust and CUDA extension; with torch, also as `torch.ops.oxmoe.*`."""

from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights, __version__, device_info, explain, workspace_bytes
from oxmoe.allreduce import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    QuantizationSFLayout,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from oxmoe.cutlass_moe import cutlass_fused_moe, fused_experts_flashinfer_mxfp4, prepare_cutlass_fused_moe
from oxmoe.dispatch import moe, sort_by_expert, topk
from oxmoe.fused_experts import fused_experts
from oxmoe.routing import ExptData, GatherIndx, RaggedTensorMetadata, RoutingData, ScatterIndx, routing
from oxmoe.triton_kernels_moe import prepare_triton_kernel_experts, triton_kernel_fused_experts_with_bias

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "ExpertWeights",
    "ExptData",
    "GatherIndx",
    "QuantizationSFLayout",
    "RaggedTensorMetadata",
    "RoutingData",
    "ScatterIndx",
    "__version__",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "cutlass_fused_moe",
    "device_info",
    "explain",
    "fused_experts",
    "fused_experts_flashinfer_mxfp4",
    "moe",
    "prepare_cutlass_fused_moe",
    "prepare_triton_kernel_experts",
    "quantize",
    "routing",
    "sort_by_expert",
    "topk",
    "triton_kernel_fused_experts_with_bias",
    "workspace_bytes",
]
