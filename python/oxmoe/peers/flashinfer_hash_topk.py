"""flashinfer's `hash_topk`: the routing of DeepSeek-V4's first layers, whose experts a table gives for each token id.

Source: flashinfer/fused_moe/hash_topk.py and include/flashinfer/fused_moe/hash_topk.cuh of 0.7.2 and 0.7.4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from oxmoe.operands import WRONG_TYPES, check_no_grad, check_tensor, name_argument
from oxmoe.peers.flashinfer_trtllm_routing import check_dtype
from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = 2.0**-126  # its reciprocal is an fp32 number
_MOST = 32  # experts of a token, a shared one included: the lanes of flashinfer's warp


def hash_topk(
    router_logits: Tensor,
    input_ids: Tensor,
    tid2eid: Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """flashinfer's call: a token's experts by its token id. Returns (topk_weights fp32 [T, k], topk_ids int32 [T, k]).

    Row input_ids[t] of tid2eid has the experts of token t, in the order of the result. Their weights are
    sqrt(softplus(logit)) over the sum of these. A few launches of torch's compute it.

    router_logits: fp32 [T, E], contiguous as all of the operands.
    input_ids: int64 [T], rows of tid2eid.
    tid2eid: int32 [vocab, k], ids of experts. On CPUs ids out of range are a ValueError. On GPUs PyTorch's indexing
        fails with an assertion of the device.
    num_fused_shared_experts: 0, or 1 for one more column with id E and weight 1 / routed_scaling_factor. That is all
        that routed_scaling_factor is for.
    launch_with_pdl has no meaning.
    """
    try:
        import torch

        check_tensor("router_logits", router_logits, "T", "E")
        check_tensor("input_ids", input_ids, "T")
        check_tensor("tid2eid", tid2eid, "vocab", "k")
        check_no_grad("router_logits", router_logits)
        operands = {"router_logits": router_logits, "input_ids": input_ids, "tid2eid": tid2eid}
        for (name, tensor), dtype in zip(operands.items(), ("float32", "int64", "int32"), strict=True):
            check_dtype(name, tensor, dtype)
            if tensor.device != router_logits.device:
                raise ValueError(
                    f"{name}: expected device {router_logits.device} (router_logits'), got {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
        (tokens, experts), (vocab, top_k) = router_logits.shape, tid2eid.shape
        if input_ids.shape[0] != tokens:
            raise ValueError(
                f"input_ids: expected {tokens} token ids (rows of router_logits), got {input_ids.shape[0]}"
            )
        if experts < 1:
            raise ValueError("router_logits: dimension 1 (experts): expected 1 or more, got 0")
        if num_fused_shared_experts not in (0, 1):
            raise ValueError(f"num_fused_shared_experts: expected 0 or 1, got {num_fused_shared_experts!r}")
        shared = int(num_fused_shared_experts)
        if not 1 <= top_k <= _MOST - shared:
            raise ValueError(f"tid2eid: dimension 1 (top-k): expected 1 to {_MOST - shared}, got {top_k}")
        if shared and not (math.isfinite(routed_scaling_factor) and routed_scaling_factor > _LEAST):
            raise ValueError(f"routed_scaling_factor: expected a positive number, got {routed_scaling_factor}")
        looks = router_logits.device.type == "cpu" and not tracing()
        if looks:
            _check_range("input_ids", input_ids, vocab, "rows of tid2eid")
        ids = tid2eid[input_ids]
        if looks:
            _check_range("tid2eid", ids, experts, "experts")
        scores = torch.nn.functional.softplus(router_logits.gather(1, ids.long())).sqrt()
        weights = scores / scores.sum(1, keepdim=True)
        if shared:
            ids = torch.nn.functional.pad(ids, (0, 1), value=experts)
            weights = torch.nn.functional.pad(weights, (0, 1), value=1 / routed_scaling_factor)
        return weights, ids
    except WRONG_TYPES as error:
        name_argument(error, hash_topk, locals())
        raise


def _check_range(name: str, ids: Tensor, size: int, what: str) -> None:
    wrong = (ids < 0) | (ids >= size)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: token {place[0]} has id {int(ids[tuple(place)])}, expected 0 to {size - 1} ({what})")
