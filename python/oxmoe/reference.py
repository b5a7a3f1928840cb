"""The reference of every operation in plain torch: fp32 sums and the rounding points of the kernels, slow and obvious.

The tests use it on CPU and on GPU. Loops run over experts or slots; nothing here is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oxmoe import deprecation

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

BLOCK_SIZES = (16, 32, 64, 128)


# Experts


def split_rows(rows: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Splits `[..., 2I]` values that lie as w13's rows do into (gate, up)."""
    if layout == "interleaved":
        return rows[..., 0::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    if layout == "gate_up":
        return first, second
    if layout == "up_gate":
        return second, first
    raise ValueError(f"layout: unknown {layout!r}")


def _number(value: float) -> float:
    """Returns an integer as a float, because torch takes no integers of more than 64 bits."""
    return float(value) if isinstance(value, int) else value


def activate(
    sums: Tensor,
    *,
    layout: str = "gate_up",
    activation: str = "silu",
    gated: bool | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    clamp: str = "before",
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
) -> Tensor:
    """GEMM1's epilogue on fp32 sums `[..., 2I]` (or `[..., I]` when not gated), not rounded.

    "situ" (SiTU) is b tanh(g / b) sigmoid(g) * lb tanh(u / lb), as in SGLang's SituAndMul and the SituAdaptor of
    flashinfer's CUTLASS kernels; without a situ_linear_beta u itself is the second factor.
    """
    gated = activation != "relu2" if gated is None else gated
    gate, up = split_rows(sums, layout) if gated else (sums, None)
    bound = math.inf if limit is None else _number(limit)
    alpha, beta = _number(alpha), _number(beta)
    if activation == "situ":
        if up is None:
            raise ValueError("activation: situ has gate and up rows")
        b = 4.0 if situ_beta is None else _number(situ_beta)
        if situ_linear_beta is not None:
            lb = _number(situ_linear_beta)
            up = lb * torch.tanh(up / lb)
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * up
    if activation == "silu":
        if clamp == "before":
            gate = gate.clamp(max=bound)
        gate = gate * torch.sigmoid(alpha * gate)
        if clamp == "after":
            gate = gate.clamp(max=bound)
    elif activation in ("gelu", "gelu_tanh"):
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    elif activation == "relu2":
        gate = F.relu(gate).square()
    else:
        raise ValueError(f"activation: unknown {activation!r}")
    if up is None:
        return gate
    return gate * (up.clamp(-bound, bound) + beta)


def _product(rows: Tensor, weights: Tensor, fp32_sums: bool, activation_dtype: torch.dtype | None) -> Tensor:
    """Returns rows [M, K] times weights [N, K] transposed, in fp32."""
    if activation_dtype is not None:
        codes, scales = rows_e4m3(rows)
        # NOTE: e4m3 numbers are exact in bf16.
        return _product(codes.to(rows.dtype), weights, fp32_sums, None) * scales[:, None]
    if fp32_sums or not rows.is_cuda or rows.dtype not in (torch.bfloat16, torch.float16):
        return rows.float() @ weights.float().T
    # cuBLAS has other kernels, with other sums, for fewer than 8 rows.
    padded = torch.cat([rows, rows.new_zeros(max(0, 8 - len(rows)), rows.shape[1])])
    return torch.mm(padded, weights.T, out_dtype=torch.float32)[: len(rows)]


def _scaled_product(
    rows: Tensor,
    weights: Tensor,
    scales: Tensor,
    fp32_sums: bool,
    quantised: tuple[Tensor, Tensor] | None,
    index: Tensor | slice,
) -> Tensor:
    """Multiplies rows with e4m3 weights. fp8_block weights have fp32 scales and multiply the rows `index` of
    `quantised`; MXFP8 weights have E8M0 scales and multiply `rows`."""
    if quantised is not None:
        codes, scale = quantised
        # NOTE: torch 2.9 takes single rows of bytes on CPUs, but not of e4m3.
        taken = codes.view(torch.uint8)[index].view(codes.dtype)
        return fp8_product((taken, scale[index]), weights, scales)
    return _product(mxfp8_rows(rows), mxfp8_weights(weights, scales, rows.dtype), fp32_sums, None)


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    layout: str = "gate_up",
    activation: str = "silu",
    gated: bool | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 0.0,
    limit: float | Tensor | None = None,
    clamp: str = "before",
    situ_beta: float | Tensor | None = None,
    situ_linear_beta: float | Tensor | None = None,
    router_logits: Tensor | None = None,
    top_k: int = 0,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    num_token_non_padded: Tensor | int | None = None,
    routed_scaling_factor: float = 1.0,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    keep_router_weight: bool = False,
    ep_size: int = 1,
    ep_rank: int = 0,
    fp32_sums: bool = False,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    activation_dtype: torch.dtype | None = None,
    activation_scales: str | tuple[Tensor, Tensor] | None = None,
    acts: list[Tensor] | None = None,
) -> Tensor:
    """`oxmoe.moe` on experts as plain tensors. Rounds to x's dtype after the activation, after GEMM2 and at the end.

    w13 and w2 of e4m3 have block scales w13_scale and w2_scale, fp32 (ExpertWeights.fp8_block) or E8M0 (mxfp8): x and
    the activation's result are quantised before they are multiplied, with fp32 scales for each 128 columns of a row;
    activation_scales "tensor" or "token": with one for all of them or one for each row; or with these two. fp32 scales
    may be [E, N] or [E, N, 1], one for each row of an expert's weights (fp8_tensor).

    alpha, beta, limit, situ_beta and situ_linear_beta may be tensors `[E]`, one number for each expert. acts gets each
    expert's activated rows.

    Products are exact and sums fp32, of 16-bit numbers on CUDA as cuBLAS' tensor cores have them: they truncate as they
    add, which at K = 7168 moves every thirteenth result of a layer in f16. `fp32_sums`: rounded to nearest there, too.
    activation_dtype torch.float8_e4m3fn: rows of x, and rows that the activation gave and rounded, are quantised.
    """
    if router_logits is not None:
        topk_weights, topk_ids = topk(
            router_logits,
            top_k,
            scoring_func=scoring_func,
            renormalize=renormalize,
            correction_bias=correction_bias,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            num_token_non_padded=num_token_non_padded,
        )
    assert topk_weights is not None and topk_ids is not None
    slots = topk_ids.shape[1]
    experts, hidden = w2.shape[:2]
    local_ids = topk_ids.long() - ep_rank * experts if ep_size > 1 else topk_ids.long()

    acts = [] if acts is None else acts
    chosen = [torch.nonzero(local_ids == expert, as_tuple=True) for expert in range(experts)]
    given = activation_scales if isinstance(activation_scales, tuple) else (None, None)
    dynamic = activation_scales if isinstance(activation_scales, str) else None
    fp8 = w13_scale is not None and w13_scale.dtype == torch.float32
    quantised = fp8_rows(x, given[0], dynamic) if fp8 else None
    for expert, (token, slot) in enumerate(chosen):
        if not token.numel():
            # Few tokens leave most experts without a row: the weights of these are not converted.
            sums = x.new_empty((0, w13.shape[1]), dtype=torch.float32)
        elif w13_scale is None:
            sums = _product(x[token], w13[expert], fp32_sums, activation_dtype)
        else:
            sums = _scaled_product(x[token], w13[expert], w13_scale[expert], fp32_sums, quantised, token)
        if b13 is not None:
            sums = sums + b13[expert].float()
        if apply_router_weight_on_input:
            sums = sums * topk_weights[token, slot, None].float()
        of_layer = {"alpha": alpha, "beta": beta, "limit": limit}
        of_layer |= {"situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}
        numbers: dict[str, Any] = {
            name: value[expert].item() if isinstance(value, Tensor) else value for name, value in of_layer.items()
        }
        act = activate(sums, layout=layout, activation=activation, gated=gated, clamp=clamp, **numbers)
        acts.append(act.to(x.dtype))

    quantised = fp8_rows(torch.cat(acts), given[1], dynamic) if fp8 else None
    rows = x.new_zeros((x.shape[0], slots, hidden))
    first = 0
    for expert, (token, slot) in enumerate(chosen):
        if token.numel() == 0:
            continue
        places = slice(first, first + token.numel())
        first = places.stop
        if w2_scale is None:
            sums = _product(acts[expert], w2[expert], fp32_sums, activation_dtype)
        else:
            sums = _scaled_product(acts[expert], w2[expert], w2_scale[expert], fp32_sums, quantised, places)
        if b2 is not None:
            sums = sums + b2[expert].float()
        rows[token, slot] = sums.to(x.dtype)

    present = ((local_ids >= 0) & (local_ids < experts))[..., None]
    weighted = not apply_router_weight_on_input and (not no_combine or keep_router_weight)
    factors = (
        topk_weights.float()[..., None] if weighted else torch.ones_like(topk_weights, dtype=torch.float32)[..., None]
    )
    # NOTE: a skipped slot contributes nothing whatever its weight is, NaN included.
    terms = torch.where(present, factors * rows.float(), 0.0)
    if no_combine:
        return (float(routed_scaling_factor) * terms).to(x.dtype)
    total = torch.zeros_like(terms[:, 0]) if slots else x.new_zeros((x.shape[0], hidden), dtype=torch.float32)
    for slot_index in range(slots):
        total = total + terms[:, slot_index]
    return (float(routed_scaling_factor) * total).to(x.dtype)


# Formats

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


# NOTE: On a CPU, torch converts e4m3 one number at a time, and makes several copies to split nibbles. A table takes a
# quarter of the time, if its entries are single elements.
def _pairs(codes: Tensor, numbers: Sequence[float]) -> Tensor:
    """Returns the numbers fp32 [..., K] of 4-bit codes in bytes [..., K / 2]. Low nibbles are the even columns."""
    of_nibbles = torch.tensor(numbers, dtype=torch.float32, device=codes.device)
    of_bytes = torch.stack([of_nibbles.repeat(16), of_nibbles.repeat_interleave(16)], dim=1).view(torch.int64).flatten()
    return _looked_up(codes, of_bytes).view(torch.float32)


def e4m3_numbers(codes: Tensor) -> Tensor:
    """Returns the numbers fp32 [..., K] of float8_e4m3fn codes [..., K]."""
    every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn)
    return _looked_up(codes, every.float())


def _looked_up(codes: Tensor, of_bytes: Tensor) -> Tensor:
    return of_bytes.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def mxfp4_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights `[..., K]` of uint8 codes `[..., K / 2]` (even column: low nibble) and E8M0 bytes `[..., K / 32]`."""
    exponents = scales.view(torch.uint8).int()
    # NOTE: fp64 holds every product, so a number is rounded only once.
    values = _pairs(codes, _E2M1).double()
    factors = torch.where(exponents == 255, math.nan, torch.exp2((exponents - 127).double()))
    most = torch.finfo(dtype).max
    return (values * factors.repeat_interleave(32, dim=-1)).clamp(-most, most).to(dtype)


def mxfp4_window(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and E8M0 bytes of one matrix as the kernels with e4m3 activations have them.

    Bytes more than 11 below the largest (255 aside, and at least 7) are brought up to that bound. The numbers of
    their blocks are rounded to e2m1 times the new scale, ties to even.
    """
    bytes_, exponents = codes.view(torch.uint8).int(), scales.view(torch.uint8).int()
    largest = torch.where(exponents == 255, 0, exponents).max().clamp(min=7)
    least = (largest - 11).clamp(min=0)
    raised = torch.maximum(exponents, least)
    pairs = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)
    magnitudes = torch.tensor(_E2M1[:8], dtype=torch.float64, device=codes.device)
    numbers = magnitudes[pairs & 7] * torch.exp2((exponents - raised).double()).repeat_interleave(16, -1)[..., None]
    # At the borders 0.25, 1.25, 2.5 and 5 the lower code is even, and a number on the border takes it.
    rounded = sum((numbers > border).int() for border in (0.25, 1.25, 2.5, 5.0)) + sum(
        (numbers >= border).int() for border in (0.75, 1.75, 3.5)
    )
    pairs = pairs & 8 | rounded
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), raised.to(torch.uint8)


def rows_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x [..., K] to e4m3 with one scale a row: (codes float8_e4m3fn [..., K], scales fp32 [...])."""
    # The divisor is a tensor: on CUDA, torch would multiply with the reciprocal of a Python number.
    scales = x.abs().amax(-1).float() / torch.tensor(448.0, dtype=torch.float32, device=x.device)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)
    codes = (x.float() * (1.0 / scales)[..., None]).clamp(-448.0, 448.0)
    return codes.to(torch.float8_e4m3fn), scales


def fp8_groups(x: Tensor, group: int = 128, eps: float = 1e-10, powers: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 codes [..., K], fp32 scales [..., K / group]). A scale is amax / 448, or with `powers` the next
    power of two; NaN does not count for it."""
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1).clamp(min=float(eps))
    scales = amax / torch.tensor(448.0, dtype=torch.float32, device=x.device)
    if powers:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    codes = (groups * (1.0 / scales)[..., None]).clamp(-448.0, 448.0).flatten(-2)
    return codes.to(torch.float8_e4m3fn), scales


def mxfp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x [..., K] to MXFP8: (codes float8_e4m3fn [..., K], E8M0 bytes uint8 [..., K / 32]). Scales are
    2^ceil(log2(amax / 448)). NaN does not count, except that a group of nothing else has the byte 255. Infinity makes
    the byte 254 and the finite numbers beside it 0."""
    groups = x.double().unflatten(-1, (-1, 32))
    amax = torch.where(groups.isnan(), -1.0, groups.abs()).amax(-1)
    mantissa, exponent = torch.frexp(amax / 448)
    scales = (exponent - (mantissa == 0.5).int() + 127).clamp(min=0)
    scales = torch.where(amax > 0, scales, 0)
    scales = torch.where(amax.isinf(), 254, torch.where(amax < 0, 255, scales))
    inverse = torch.where((scales >= 1) & (scales <= 253), torch.exp2((127 - scales).double()), 0.0)
    codes = (groups * inverse[..., None]).clamp(-448.0, 448.0).flatten(-2)
    return codes.float().to(torch.float8_e4m3fn), scales.to(torch.uint8)


def mxfp8_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers `[..., K]` of e4m3 codes `[..., K]` and E8M0 bytes `[..., K / 32]`."""
    exponents = scales.view(torch.uint8).int()
    factors = torch.where(exponents == 255, math.nan, torch.exp2((exponents - 127).double()))
    most = torch.finfo(dtype).max
    values = e4m3_numbers(codes).double() * factors.repeat_interleave(32, dim=-1)
    return values.clamp(-most, most).to(dtype)


def mxfp8_rows(x: Tensor) -> Tensor:
    """Returns x [..., K] rounded to MXFP8, as numbers of x's dtype."""
    return mxfp8_weights(*mxfp8_groups(x), x.dtype)


def fp8_rows(x: Tensor, scale: Tensor | None, dynamic: str | None) -> tuple[Tensor, Tensor]:
    """Quantises x [M, K] to codes and scales [M, ceil(K / 128)]. The scale is `scale`; or it follows from the amax of
    all of x (dynamic "tensor"), of a row ("token"), or of each 128 columns of a row (None)."""
    if scale is None and dynamic is None:
        return fp8_groups(x)
    if scale is None:
        amax = x.float().abs().nan_to_num(nan=0.0, posinf=math.inf)
        amax = amax.amax(-1, keepdim=True) if dynamic == "token" else amax.max() if amax.numel() else amax.sum()
        scale = amax.clamp(min=1e-10) / torch.tensor(448.0, dtype=torch.float32, device=x.device)
    codes = (x.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes, scale.broadcast_to((x.shape[0], -(-x.shape[1] // 128)))


def fp8_product(rows: tuple[Tensor, Tensor], weights: Tensor, scales: Tensor) -> Tensor:
    """Multiplies e4m3 rows [M, K] with scales [M, K / 128] by e4m3 weights [N, K] transposed with scales [N / 128, K
    / 128]. The fp32 products of every 128 columns are multiplied by both scales and added in fp32. Scales [N] or [N,
    1], one for each row of weights, multiply the sums; N and K are then any sizes."""
    codes, row_scales = rows
    if scales.shape[0] == weights.shape[0] and scales.numel() == weights.shape[0]:
        ones = scales.new_ones((-(-weights.shape[0] // 128), -(-weights.shape[1] // 128)))
        return fp8_product(rows, weights, ones) * scales.flatten()
    total = torch.zeros((codes.shape[0], weights.shape[0]), dtype=torch.float32, device=codes.device)
    codes, weights = e4m3_numbers(codes), e4m3_numbers(weights)
    for block in range(scales.shape[1]):
        columns = slice(128 * block, 128 * block + 128)
        product = codes[:, columns] @ weights[:, columns].T
        of_rows = scales[:, block].repeat_interleave(128)[: weights.shape[0]]
        total += product * (row_scales[:, block, None] * of_rows)
    return total


def nvfp4(x: Tensor, scale: Tensor | float, powers: bool = False, block: int = 16) -> tuple[Tensor, Tensor]:
    """Returns (e2m1 codes uint8 [..., K], values of block scales fp32 [..., K / block]) of x times scale."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=x.device)
    wanted = scale * (blocks.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1) * sixth)
    if powers:
        mantissa, exponent = torch.frexp(wanted)
        scales = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int()).masked_fill(wanted == 0, 0.0)
    else:
        scales = wanted.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    scaled = blocks * torch.where(scales > 0, scale / scales, 0.0)[..., None]
    # The middles between two neighbouring codes. A number on a middle takes the even code.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32, device=x.device)
    magnitude = scaled.abs().nan_to_num(nan=6.0)
    low, high = torch.searchsorted(middles, magnitude), torch.searchsorted(middles, magnitude, right=True)
    codes = torch.where(low % 2 == 0, low, high) | torch.where(scaled.signbit() & ~scaled.isnan(), 8, 0)
    return codes.flatten(-2).to(torch.uint8), scales


def nvfp4_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers fp32 [..., K] of e2m1 pairs uint8 [..., K / 2] times block scales [..., G] of any dtype."""
    numbers = _pairs(codes, _E2M1)
    return (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]).flatten(-2)


def int4_weights(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Weights [..., K] in dtype of int4 pairs (bytes [..., K / 2]), scales [..., G], zero points [..., G] (None: 8).
    The scale and then the product are rounded to dtype."""
    numbers = _pairs(codes, range(16)).unflatten(-1, (scales.shape[-1], -1))
    less = 8 if zeros is None else zeros.float()[..., None]
    # NOTE: fp32 holds the product of such an integer and a 16-bit scale, so a number is rounded only once.
    return ((numbers - less) * scales.to(dtype).float()[..., None]).flatten(-2).to(dtype)


def nvfp4_expert(
    rows: Tensor,
    w13: Tensor,
    w2: Tensor,
    factors: tuple[Tensor, Tensor],
    roundings: tuple[float, float] | None = None,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """Computes one expert of ExpertWeights.nvfp4 on rows [M, H]. w13 and w2 are fp32 numbers (nvfp4_numbers). factors
    multiply the sums. roundings multiply rows before they are rounded to NVFP4."""

    def product(rows: Tensor, weights: Tensor, stage: int, bias: Tensor | None) -> Tensor:
        numbers = rows.float()
        if roundings is not None:
            codes, scales = nvfp4(rows, roundings[stage])
            numbers = nvfp4_numbers(codes[..., 0::2] | codes[..., 1::2] << 4, scales)
        sums = (numbers @ weights.T) * factors[stage]
        return sums if bias is None else sums + bias.float()

    hidden = activate(product(rows, w13, 0, b13), **activation).to(rows.dtype)
    return product(hidden, w2, 1, b2).to(rows.dtype)


# Top-k


def scores(router_logits: Tensor, scoring_func: str) -> Tensor:
    """Returns the fp32 score of every expert; for softmax_topk the logit, which becomes a weight only once the choice
    is made."""
    # Scores are computed in fp64: the vector and the scalar code of torch's float functions give equal logits other
    # scores.
    logits = router_logits.double()
    if scoring_func == "softmax":
        return torch.softmax(logits, dim=-1).float()
    if scoring_func == "sigmoid":
        return torch.sigmoid(logits).float()
    if scoring_func == "sqrtsoftplus":
        return F.softplus(logits).sqrt().float()
    if scoring_func in ("softmax_topk", "identity"):
        return router_logits.float()
    raise ValueError(f"scoring_func: unknown {scoring_func!r}")


def best(values: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    """Returns column numbers of the largest values, best first, ties to the lower number; NaN is the largest. `among`
    is a mask: columns outside of it come after all others."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    if among is not None:
        last = (~among).gather(-1, order).to(torch.uint8)
        order = order.gather(-1, torch.sort(last, dim=-1, stable=True).indices)
    return order[:, :count]


def choice_values(
    router_logits: Tensor,
    *,
    scoring_func: str = "softmax",
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str | None = None,
) -> Tensor:
    """Returns the values that order the choice: the logits, or score + bias with experts of losing groups at -inf."""
    choice, kept = _choice(router_logits, scoring_func, correction_bias, (num_expert_group, topk_group, group_score))
    return choice if kept is None else torch.where(kept, choice, -math.inf)


def _choice(
    router_logits: Tensor, scoring_func: str, correction_bias: Tensor | None, groups: tuple[int, int, str | None]
) -> tuple[Tensor, Tensor | None]:
    """Returns (the values that order the choice, a mask of the experts that may be chosen; None: all)."""
    count, kept, group_score = groups
    grouped = kept < count
    if correction_bias is None and not grouped:
        return router_logits.float(), None
    choice = scores(router_logits, scoring_func)
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    if not grouped:
        return choice, None
    group_score = group_score or ("max" if correction_bias is None else "top2")
    tokens, experts = choice.shape
    of_group = torch.sort(choice.view(tokens, count, experts // count), dim=-1, descending=True).values
    of_group = of_group[..., 0] if group_score == "max" else of_group[..., 0] + of_group[..., 1]
    keep = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best(of_group, kept), True)
    return choice, keep.repeat_interleave(experts // count, dim=1)


def topk(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_token_non_padded: Tensor | int | None = None,
    order: str = "weight",
) -> tuple[Tensor, Tensor]:
    """`oxmoe.topk`: (weights fp32, ids int32), best first or by id, ties to the lower id, shared experts last."""
    tokens, experts = router_logits.shape
    groups = (num_expert_group, topk_group, group_score)
    choice, kept = _choice(router_logits, scoring_func, correction_bias, groups)
    ids = best(choice, top_k - num_fused_shared_experts, kept)
    if scoring_func == "softmax_topk":
        weights = torch.softmax(router_logits.float().gather(1, ids), dim=-1)
    else:
        weights = scores(router_logits, scoring_func).gather(1, ids)
        if renormalize:
            # A softmax over all experts that is renormalised equals a softmax over the chosen ones, whose sum cannot
            # vanish.
            over_chosen = scoring_func == "softmax" and correction_bias is None and kept is None
            weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if over_chosen else 1e-20))
    if order == "id":
        ids, by_id = ids.sort(dim=1)
        weights = weights.gather(1, by_id)
    if num_fused_shared_experts:
        shared = torch.arange(experts, experts + num_fused_shared_experts, device=ids.device).expand(tokens, -1)
        shared_weights = torch.full(shared.shape, 1.0 / routed_scaling_factor, dtype=torch.float32, device=ids.device)
        ids, weights = torch.cat([ids, shared], dim=1), torch.cat([weights, shared_weights], dim=1)
    if apply_routed_scaling_factor_on_output:
        weights = weights * float(routed_scaling_factor)
    if num_token_non_padded is not None:
        padded = torch.arange(tokens, device=ids.device)[:, None] >= num_token_non_padded
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    return weights, ids.int()


# Sort and schedule


def sort_by_expert(
    topk_ids: Tensor, num_experts: int, *, first_expert: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`oxmoe.sort_by_expert`: (histogram, offsets, place_of_slot, slot_of_place), int32, stable in the slot number."""
    ids = topk_ids.reshape(-1).long() - (first_expert or 0)
    local = (ids >= 0) & (ids < num_experts)
    histogram = torch.bincount(ids[local], minlength=num_experts)
    offsets = F.pad(histogram.cumsum(0), (1, 0))
    placed = int(offsets[-1])
    slots = torch.argsort(torch.where(local, ids, num_experts), stable=True)[:placed]
    slot_of_place = torch.full_like(ids, -1)
    slot_of_place[:placed] = slots
    place_of_slot = torch.full_like(ids, -1)
    place_of_slot[slots] = torch.arange(placed, device=ids.device)
    return histogram.int(), offsets.int(), place_of_slot.int(), slot_of_place.int()


def max_blocks(num_experts: int, num_rows: int) -> int:
    """Returns the length of a schedule that holds any split of num_rows rows over num_experts experts in blocks of
    16."""
    if num_rows <= num_experts:
        return num_rows
    return num_experts - 1 - ((num_experts - num_rows - 1) // min(BLOCK_SIZES))


def block_tables(histogram: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns (block_offs_data [4, E + 1], block_schedule_data [4, max_blocks]). An entry of the schedule is block <<
    16 | expert; -1 fills the rest."""
    experts = histogram.numel()
    offsets = torch.zeros((len(BLOCK_SIZES), experts + 1), dtype=torch.int32, device="cpu")
    schedule = torch.full((len(BLOCK_SIZES), max_blocks(experts, num_rows)), -1, dtype=torch.int32, device="cpu")
    counts = histogram.tolist()
    for row, size in enumerate(BLOCK_SIZES):
        entries = [block << 16 | expert for expert, count in enumerate(counts) for block in range(-(-count // size))]
        schedule[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32, device="cpu")
        blocks = torch.tensor([-(-count // size) for count in counts], device="cpu")
        offsets[row, 1:] = blocks.cumsum(0)
    return offsets.to(histogram.device), schedule.to(histogram.device)


def routing_tables(
    logits: Tensor,
    n_expts_act: int,
    *,
    sm_first: bool = False,
    expt_indx: Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: Tensor | int | None = None,
) -> tuple[Tensor, ...]:
    """Returns the seven tables of triton_kernels' routing, in the order of `_oxmoe.routing_tables`."""
    rows, experts = logits.shape
    values = torch.softmax(logits, dim=-1) if sm_first else logits
    # NOTE: triton_kernels orders a row's chosen experts by id.
    ids = best(values.float(), n_expts_act).sort(dim=1).values if expt_indx is None else expt_indx.long()
    gates = values.float().gather(1, ids)
    if not sm_first:
        gates = torch.softmax(gates, dim=-1)
    if n_rows is not None:
        padded = torch.arange(rows, device=ids.device)[:, None] >= n_rows
        ids = ids.masked_fill(padded, -1)

    # NOTE: simulated_ep keeps the first experts // simulated_ep experts; the ids that a row keeps move to its front.
    experts //= simulated_ep
    gone = (ids < 0) | (ids >= experts)
    order = torch.argsort(gone.int(), dim=1, stable=True)
    ids = ids.masked_fill(gone, -1).gather(1, order)
    gates = gates.gather(1, order)

    histogram, offsets, place_of_slot, slot_of_place = sort_by_expert(ids, experts)
    gate_scal = torch.zeros_like(slot_of_place, dtype=logits.dtype)
    placed = slot_of_place >= 0
    gate_scal[placed] = gates.reshape(-1)[slot_of_place[placed].long()].to(logits.dtype)
    return gate_scal, histogram, offsets, slot_of_place, place_of_slot, *block_tables(histogram, ids.numel())
