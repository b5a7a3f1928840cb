"""oxmoe: mixture-of-experts layers as one Rust and CUDA extension; with torch, also as `torch.ops.oxmoe.*`."""

from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights, __version__, device_info, explain, workspace_bytes
from oxmoe.dispatch import moe, sort_by_expert, topk
from oxmoe.fused_experts import fused_experts
from oxmoe.routing import ExptData, GatherIndx, RaggedTensorMetadata, RoutingData, ScatterIndx, routing

__all__ = [
    "ExpertWeights",
    "ExptData",
    "GatherIndx",
    "RaggedTensorMetadata",
    "RoutingData",
    "ScatterIndx",
    "__version__",
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
