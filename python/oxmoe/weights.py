"""Makes ExpertWeights of bare tensors, in a format that is named or follows from the tensors' dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe

if TYPE_CHECKING:
    from torch import Tensor

_BUILDERS: dict[str, Callable[..., _oxmoe.ExpertWeights]] = {
    "bfloat16": _oxmoe.ExpertWeights.bf16,
    "float16": _oxmoe.ExpertWeights.f16,
    "float32": _oxmoe.ExpertWeights.f32,
}
SERVED = (
    "fused_experts serves unquantised bfloat16, float16 and (on CPU) float32 experts with or without biases, and (on "
    "CPU; on CUDA oxmoe.moe takes them, as ExpertWeights.mxfp4) MXFP4 experts: uint8 codes with w1_scale and w2_scale; "
    "with use_fp8_w8a8 float8_e4m3fn experts with w1_scale and w2_scale, of block_shape [128, 128], one number an "
    "expert or one for each row of its weights, for bfloat16 tokens"
)


@functools.cache
def _builder(dtype: Any) -> Callable[..., _oxmoe.ExpertWeights]:
    name = str(dtype).rpartition(".")[2]
    if name not in _BUILDERS:
        raise NotImplementedError(f"w1: no kernel for dtype {name}; {SERVED}")
    return _BUILDERS[name]


def expert_weights(w13: Tensor, w2: Tensor, *, format: str | None = None, **options: Any) -> _oxmoe.ExpertWeights:
    """Returns ExpertWeights in this format, or in the format that follows from w13's dtype."""
    if format == "mxfp4-a8":
        return _oxmoe.ExpertWeights.mxfp4(w13, w2, activation_dtype="float8_e4m3fn", **options)
    if format == "mxfp8":
        options.pop("dtype", None)  # MXFP8 always has dtype bf16
    if format in ("fp8_tensor", "fp8_tensor-token"):
        return _oxmoe.ExpertWeights.fp8_tensor(w13, w2, per_token=format.endswith("token"), **options)
    if format == "fp8_tensor-static":
        format = "fp8_tensor"
    build = _builder(w13.dtype) if format is None else getattr(_oxmoe.ExpertWeights, format)
    return build(w13, w2, **options)
