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
from oxmoe.dispatch import moe, sort_by_expert, topk
from oxmoe.fused_experts import fused_experts
from oxmoe.routing import ExptData, GatherIndx, RaggedTensorMetadata, RoutingData, ScatterIndx, routing

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
    "device_info",
    "explain",
    "fused_experts",
    "moe",
    "quantize",
    "routing",
    "sort_by_expert",
    "topk",
    "workspace_bytes",
]
