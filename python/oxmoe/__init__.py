"""oxmoe: mixture-of-experts layers as one Rust and CUDA extension; with torch, also as `torch.ops.oxmoe.*`."""

import importlib
from typing import TYPE_CHECKING, Any

# This import comes first, because it may replace functions of the extension.
from oxmoe import profiling as profiling
from oxmoe import quantize
from oxmoe._oxmoe import ExpertWeights, __version__, device_info, explain, stats, workspace_bytes
from oxmoe.allreduce import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    QuantizationSFLayout,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from oxmoe.allreduce.trtllm import (
    TRTLLMAllReduceFusionWorkspace,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from oxmoe.dense import SfLayout, mm_mxfp8, mxfp8_dequantize_host, mxfp8_linear, mxfp8_quantize
from oxmoe.deprecation import lookup as _lookup
from oxmoe.functions import moe, sort_by_expert, topk
from oxmoe.peers.flashinfer_cutedsl import CuteDslMoEWrapper, cute_dsl_fused_moe, cute_dsl_fused_moe_nvfp4
from oxmoe.peers.flashinfer_cutlass import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    fused_experts_flashinfer_mxfp4,
    prepare_cutlass_fused_moe,
)
from oxmoe.peers.flashinfer_hash_topk import hash_topk
from oxmoe.peers.flashinfer_hopper import CuteDslBf16MoEWrapper, cute_dsl_fused_moe_bf16, mono_moe
from oxmoe.peers.flashinfer_trtllm import (
    prepare_trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
)
from oxmoe.peers.flashinfer_trtllm_channels import (
    prepare_trtllm_fp8_per_channel_scale_moe,
    trtllm_fp8_per_channel_scale_moe,
    trtllm_fp8_per_channel_scale_routed_moe,
)
from oxmoe.peers.flashinfer_trtllm_formats import (
    prepare_trtllm_bf16_moe,
    prepare_trtllm_fp8_per_tensor_scale_moe,
    trtllm_bf16_moe,
    trtllm_bf16_routed_moe,
    trtllm_fp8_per_tensor_scale_moe,
    trtllm_fp8_per_tensor_scale_routed_moe,
)
from oxmoe.peers.flashinfer_trtllm_fp4 import (
    prepare_trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_routed_moe,
)
from oxmoe.peers.flashinfer_trtllm_int4 import (
    prepare_trtllm_mxint4_block_scale_moe,
    trtllm_mxint4_block_scale_moe,
    trtllm_mxint4_block_scale_routed_moe,
)
from oxmoe.peers.flashinfer_trtllm_padding import TrtllmMoePaddedWeights, pad_trtllm_moe_weights
from oxmoe.peers.flashinfer_trtllm_routing import fused_topk_deepseek
from oxmoe.peers.flashinfer_trtllm_workspace import trtllm_fused_moe_workspace_size
from oxmoe.peers.packed_topk import pack_topk, unpack_topk
from oxmoe.peers.sglang import fused_experts
from oxmoe.peers.triton_kernels import prepare_triton_kernel_experts, triton_kernel_fused_experts_with_bias
from oxmoe.peers.triton_kernels_routing import (
    ExptData,
    GatherIndx,
    RaggedTensorMetadata,
    RoutingData,
    ScatterIndx,
    routing,
)
from oxmoe.rows import masked_workspace_bytes, moe_contiguous, moe_masked
from oxmoe.tracing import HAS_TORCH

if HAS_TORCH:
    # This module defines the operators of the calls above.
    importlib.import_module("oxmoe.peers.operators")
if TYPE_CHECKING:
    from oxmoe import int4 as int4
    from oxmoe import nvfp4 as nvfp4
    from oxmoe import reference as reference
    from oxmoe import sglang as sglang
    from oxmoe import testing as testing

# Modules that users have after `import oxmoe`. They import torch, so each is loaded when it is first used.
_LATER = ("int4", "nvfp4", "reference", "sglang", "testing")
# Modules whose `cache` users empty: the old name, which docstrings had, -> the module of `oxmoe.peers`.
_MOVED = {
    "cutlass_moe": "flashinfer_cutlass",
    "triton_kernels_moe": "triton_kernels",
    "trtllm_moe": "flashinfer_trtllm",
}


def _later(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"oxmoe.{name}")
    return importlib.import_module(f"oxmoe.peers.{_MOVED[name]}") if name in _MOVED else None


__getattr__ = _lookup(__name__, _later)

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "CuteDslBf16MoEWrapper",
    "CuteDslMoEWrapper",
    "ExpertWeights",
    "ExptData",
    "GatherIndx",
    "QuantizationSFLayout",
    "RaggedTensorMetadata",
    "RoutingData",
    "ScatterIndx",
    "SfLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "TrtllmMoePaddedWeights",
    "__version__",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
    "cute_dsl_fused_moe",
    "cute_dsl_fused_moe_bf16",
    "cute_dsl_fused_moe_nvfp4",
    "cutlass_fused_moe",
    "cutlass_fused_moe_workspace_size",
    "device_info",
    "explain",
    "fused_experts",
    "fused_experts_flashinfer_mxfp4",
    "fused_topk_deepseek",
    "hash_topk",
    "masked_workspace_bytes",
    "mm_mxfp8",
    "moe",
    "moe_contiguous",
    "moe_masked",
    "mono_moe",
    "mxfp8_dequantize_host",
    "mxfp8_linear",
    "mxfp8_quantize",
    "pack_topk",
    "pad_trtllm_moe_weights",
    "prepare_cutlass_fused_moe",
    "prepare_triton_kernel_experts",
    "prepare_trtllm_bf16_moe",
    "prepare_trtllm_fp4_block_scale_moe",
    "prepare_trtllm_fp8_block_scale_moe",
    "prepare_trtllm_fp8_per_channel_scale_moe",
    "prepare_trtllm_fp8_per_tensor_scale_moe",
    "prepare_trtllm_mxint4_block_scale_moe",
    "quantize",
    "routing",
    "sort_by_expert",
    "stats",
    "topk",
    "triton_kernel_fused_experts_with_bias",
    "trtllm_allreduce_fusion",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_channel_scale_moe",
    "trtllm_fp8_per_channel_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_fused_moe_workspace_size",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
    "unpack_topk",
    "workspace_bytes",
]
