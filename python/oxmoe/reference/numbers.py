"""What the codes and scales of a format mean, and which codes and scales a number is rounded to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
