"""SGLang's `flashinfer_cutedsl_moe_masked`: NVFP4 experts on rows in expert order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oxmoe import _oxmoe
from oxmoe.operands import check_tensor
from oxmoe.peers.kept import Cache
from oxmoe.rows import moe_masked
from oxmoe.tracing import tracing

if TYPE_CHECKING:
    from torch import Tensor

cache = Cache()  # experts on CUDA, which are packed


def flashinfer_cutedsl_moe_masked(
    hidden_states: tuple[Tensor, Tensor | None],
    input_global_scale: Tensor | None,
    w1: Tensor,
    w1_blockscale: Tensor,
    w1_alpha: Tensor,
    w2: Tensor,
    a2_global_scale: Tensor,
    w2_blockscale: Tensor,
    w2_alpha: Tensor,
    masked_m: Tensor,
    down_sm_count: int | None = None,
    down_signals: Tensor | None = None,
    down_start_event: Any = None,
    activation: str = "silu",
) -> Tensor:
    """SGLang's function of this name, on every device that runs ExpertWeights.nvfp4. It runs W4A4 experts on
    DeepEP's masked layout. Returns bf16 [El, m, K].

    hidden_states: (x bf16 [El, m, K], None), quantised with input_global_scale fp32 [El], or (codes uint8 of logical
    shape [m, K / 2, El], scales [32, 4, m tiles, 4, k tiles, El]) as scaled_fp4_grouped_quantize gives them. w1 uint8
    [El, 2N, K / 2] is [gate; up] (activation "relu2": [El, N, K / 2]), w2 [El, K, N / 2]; their scales are swizzled,
    [El, M', G'] or as a view in MMA layout; alphas and a2_global_scale fp32 [El]; masked_m int32 [El]. Rows beyond the
    mask are undefined.

    With CUDA tensors, the first call with these weights packs them, which a CUDA graph cannot capture. It keeps that
    copy (`oxmoe.nvfp4.cache`) for as long as they live.

    GEMM1's sums go into the activation unrounded; SGLang's kernels round them to bf16 first. down_sm_count,
    down_signals and down_start_event are refused by name. With them a combine on another stream waits for signals of
    finished rows, and the down projection here writes none.
    """
    overlap = {"down_sm_count": down_sm_count, "down_signals": down_signals, "down_start_event": down_start_event}
    for name, value in overlap.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: the down projection writes no signals, so a combine on another stream would wait for ever; "
                "supported: None"
            )
    if activation not in ("silu", "relu2"):
        raise ValueError(f"activation: expected 'silu' (gated) or 'relu2' (not gated), got {activation!r}")
    if len(hidden_states) != 2:
        raise ValueError(f"hidden_states: expected (x, scales or None), got {len(hidden_states)} values")
    import torch

    if tracing():
        operands = (w1, w1_blockscale, w1_alpha, w2, a2_global_scale, w2_blockscale, w2_alpha, masked_m)
        operator = torch.ops.oxmoe.flashinfer_cutedsl_moe_masked.default
        result: Tensor = operator(*hidden_states, input_global_scale, *operands, activation=activation)
        return result
    from oxmoe.formats.nvfp4 import convert_sf_from_mma_layout, unswizzle_blockscale

    x, scales = hidden_states
    if scales is not None:
        check_tensor("hidden_states[0]", x, "m", "K / 2", "El")
        for name, tensor in (("hidden_states[0]", x), ("hidden_states[1]", scales)):
            check_tensor(name, tensor)
            if tensor.element_size() != 1:
                raise ValueError(f"{name}: expected a dtype of one byte, got {str(tensor.dtype).rpartition('.')[2]}")
        rows, pairs, experts = x.shape
        swizzled = convert_sf_from_mma_layout(scales.view(torch.uint8), rows, 2 * pairs, experts)
        tiles = swizzled.view(experts, -1, swizzled.shape[-1])
        scales = unswizzle_blockscale(tiles, rows, pairs // 8).view(torch.float8_e4m3fn)
        x = x.view(torch.uint8).permute(2, 0, 1).contiguous()
    elif input_global_scale is None:
        raise ValueError("input_global_scale: needed where hidden_states has no scales")

    def make() -> _oxmoe.ExpertWeights:
        return _oxmoe.ExpertWeights.nvfp4(
            w1,
            w2,
            w1_blockscale,
            w2_blockscale,
            w1_alpha,
            w2_alpha,
            input_global_scale=1.0 if input_global_scale is None else input_global_scale,
            a2_global_scale=a2_global_scale,
            scale_layout="swizzled",
            activation=activation,  # type: ignore[arg-type]
        )

    if w1.is_cuda:
        numbers = (w1_alpha, w2_alpha, input_global_scale, a2_global_scale)
        weights = cache.get((w1, w1_blockscale, w2, w2_blockscale), numbers, (activation,), make)
    else:
        weights = make()
    return moe_masked(x, weights, masked_m, x_scale=scales)
