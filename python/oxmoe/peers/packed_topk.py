"""Top-k results in the form of flashinfer's and SGLang's pre-routed calls: an expert and its weight in one int32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oxmoe.operands import WRONG_TYPES, check_tensor, name_argument
from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor


def pack_topk(topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """int32 [T, k]: id << 16 | the bits of the weight in bf16. topk_weights fp32, bf16 or f16 [T, k]; topk_ids int32 or
    int64 [T, k], -32768 to 32767; -1, no expert, becomes 0xFFFF.

    A negative weight leaves the id as it is.
    """
    try:
        import torch

        _check("topk_weights", topk_weights, (torch.float32, torch.bfloat16, torch.float16))
        _check("topk_ids", topk_ids, (torch.int32, torch.int64))
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(f"topk_ids: expected shape {list(topk_weights.shape)}, got {list(topk_ids.shape)}")
        if topk_weights.device != topk_ids.device:
            raise ValueError(
                f"topk_ids: expected device {topk_weights.device} (from topk_weights), got {topk_ids.device}"
            )
        # Traced code has no numbers, and reading a GPU's numbers would wait for it.
        if topk_ids.device.type == "cpu" and not tracing() and bool(((topk_ids < -0x8000) | (topk_ids > 0x7FFF)).any()):
            raise ValueError(f"topk_ids: expected ids from -32768 to 32767, got {topk_ids.min()} to {topk_ids.max()}")
        # NOTE: int16 has a sign, whose extension would reach into the id.
        bits = topk_weights.to(torch.bfloat16).resolve_neg().view(torch.int16).to(torch.int32) & 0xFFFF
        return topk_ids.to(torch.int32) << 16 | bits
    except WRONG_TYPES as error:
        name_argument(error, pack_topk, locals())
        raise


def unpack_topk(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts pack_topk. Returns (topk_weights fp32 [T, k], topk_ids int32 [T, k]). The id 0xFFFF becomes -1."""
    try:
        import torch

        _check("packed", packed, (torch.int32,))
        return (packed << 16).view(torch.float32), packed >> 16
    except WRONG_TYPES as error:
        name_argument(error, unpack_topk, locals())
        raise


def _check(name: str, tensor: Tensor, dtypes: tuple[object, ...]) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).rpartition(".")[2] for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {expected}, got {str(tensor.dtype).rpartition('.')[2]}")
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions [tokens, top_k], got shape {list(tensor.shape)}")
