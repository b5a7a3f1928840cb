"""Fused all-reduce + residual + RMSNorm (+ quantisation) with flashinfer's names, values and meanings.

`fusion` has the call. `workspace` has what the ranks of a group need for it, and how they agree. `exchange` moves
bytes on CPUs. `memory` and `mailbox` let GPUs open their memory to each other. `trtllm` has flashinfer's older
names.
"""

from oxmoe.allreduce.fusion import (
    AllReduceFusionPattern,
    QuantizationSFLayout,
    allreduce_fusion,
    takes,
)
from oxmoe.allreduce.workspace import AllReduceFusionWorkspace, create_allreduce_fusion_workspace, workspace_bytes

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "takes",
    "workspace_bytes",
]
