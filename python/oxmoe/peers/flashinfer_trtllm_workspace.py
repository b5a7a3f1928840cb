"""The size of the workspace_buffer of flashinfer's trtllm-gen calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.operands import check_counts, named_arguments
from oxmoe.peers.flashinfer_cutlass_formats import ACTIVATIONS, SWIGLU, activation_of
from oxmoe.peers.flashinfer_trtllm_layouts import valid_sizes

if TYPE_CHECKING:
    from torch import Tensor

# flashinfer's quant_mode -> the format of ExpertWeights.
_FORMATS = {
    "bf16": "bf16",
    "fp8_per_tensor": "fp8_tensor-static",
    "fp8_per_channel": "fp8_tensor-token",
    "fp8_block_scale": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4-a4",
    "mxfp4_bf16": "mxfp4",
    "mxint4": "int4",
}
_UNSERVED = ("mxfp4_mxfp8",)
# Formats whose padded weights (`pad_trtllm_moe_weights`) the calls take.
_PADDED = ("mxfp8", "nvfp4-a4", "mxfp4", "int4")
# Formats whose calls take fused shared experts.
_SHARED = ("fp8_block", "mxfp8", "nvfp4-a4", "mxfp4")


@named_arguments
def trtllm_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    *,
    quant_mode: str,
    local_num_experts: int | None = None,
    num_fused_shared_experts: int = 0,
    activation_type: Any = SWIGLU,
    use_shuffled_weight: bool = True,
    weight_layout: int | None = None,
    use_routing_scales_on_input: bool = False,
    use_per_token_scale: bool = False,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    gemm1_weights: Tensor | None = None,
    gemm1_weights_scale: Tensor | None = None,
    gemm2_weights: Tensor | None = None,
    gemm2_weights_scale: Tensor | None = None,
    device: Any = None,
    tactic: Any = None,
) -> int:
    """Bytes of the workspace_buffer that the `trtllm_*_moe` calls use for up to max_num_tokens tokens: exact, never
    decreasing in them, the same on every GPU. device: "cpu" for a CPU, where NVFP4 experts need less.

    hidden_size and intermediate_size: of the weights, unpacked; num_experts: of all ranks, of which local_num_experts
    are held here. quant_mode: "bf16", "fp8_per_tensor", "fp8_per_channel", "fp8_block_scale", "mxfp8", "nvfp4",
    "mxfp4_bf16" or "mxint4". valid_hidden_size and valid_intermediate_size: of padded weights, as in the calls.
    The size depends on the shape alone: the weights, their layout, use_routing_scales_on_input and tactic have no
    meaning. "mxfp4_mxfp8", scales of tokens, and fused shared experts of formats whose calls have none are a
    NotImplementedError.
    """
    if quant_mode not in _FORMATS:
        known = ", ".join(map(repr, _FORMATS))
        if quant_mode in _UNSERVED:
            raise NotImplementedError(f"quant_mode: no kernel for {quant_mode!r}; served are {known}")
        raise ValueError(f"quant_mode: expected one of {known}, got {quant_mode!r}")
    local = num_experts if local_num_experts is None else local_num_experts
    tokens_and_slots = {"max_num_tokens": max_num_tokens, "top_k": top_k}
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    check_counts({**tokens_and_slots, **sizes, "num_experts": num_experts, "local_num_experts": local})
    if local > num_experts:
        raise ValueError(f"local_num_experts: expected at most num_experts {num_experts}, got {local}")
    format = _FORMATS[quant_mode]
    valid = valid_sizes(valid_hidden_size, valid_intermediate_size, hidden_size, intermediate_size)
    shared = int(num_fused_shared_experts or 0)
    if shared < 0 or (shared and local != num_experts):
        raise ValueError(
            f"num_fused_shared_experts: expected 0 or more, and with them all {num_experts} experts here, got {shared} "
            f"with local_num_experts {local}"
        )
    unserved = {
        f"num_fused_shared_experts with {quant_mode}": shared and format not in _SHARED,
        "use_per_token_scale": use_per_token_scale,
        f"valid_hidden_size, valid_intermediate_size with {quant_mode}": valid is not None and format not in _PADDED,
    }
    if any(unserved.values()):
        given = ", ".join(name for name, used in unserved.items() if used)
        raise NotImplementedError(f"trtllm_fused_moe_workspace_size: no kernel for {given}")
    if format == "nvfp4-a4" and str(device).startswith("cpu"):
        format = "nvfp4"
    _, gated, _, _ = ACTIVATIONS[activation_of(activation_type)]
    return _oxmoe.shape_workspace_bytes(
        local + shared,
        top_k + shared,
        *(valid or (hidden_size, intermediate_size)),
        max_num_tokens,
        format=format,
        gated=gated,
    )
