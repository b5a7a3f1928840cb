"""Dense MXFP8 on CPUs and on Hopper: flashinfer's quantiser and GEMM, and SGLang's linear layer made of them."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

from oxmoe.functions import dequantize_mxfp8, matmul_mxfp8, quantize_mxfp8
from oxmoe.operands import WRONG_TYPES, check_no_grad, check_quantizer, check_tensor, name_argument, named_arguments

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SfLayout", "mm_mxfp8", "mxfp8_dequantize_host", "mxfp8_linear", "mxfp8_quantize"]

_GROUP = 32
_GEMMS = ("auto", "cutlass", "cute-dsl", "cutedsl_low_latency", "cudnn", "b12x")


class SfLayout(enum.IntEnum):
    """The layout of the scales of a matrix [rows, columns / 32]: flashinfer's enum of this name."""

    layout_128x4 = 0
    """Tiles of 128 rows by 4 scales: [rows / 128, scales / 4, 32, 4, 4], row r of a tile at [r % 32, r / 32]."""
    layout_8x4 = 1
    """Tiles of 8 rows by 4 scales: [rows / 8, scales / 4, 8, 4]."""
    layout_linear = 2
    """Row by row."""


_LAYOUT_NAMES = ("128x4", "8x4", "linear")


def _layout_name(sf_swizzle_layout: Any, is_sf_swizzled_layout: bool) -> str:
    if sf_swizzle_layout is None:
        sf_swizzle_layout = SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
    value = getattr(sf_swizzle_layout, "value", sf_swizzle_layout)
    if value not in (0, 1, 2):
        raise ValueError(f"sf_swizzle_layout: expected 0 (128x4), 1 (8x4) or 2 (linear), got {sf_swizzle_layout!r}")
    return _LAYOUT_NAMES[value]


def mxfp8_quantize(
    input: Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    sf_swizzle_layout: SfLayout | int | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """flashinfer.mxfp8_quantize on CPU and any GPU from sm_80 on: (float8_e4m3fn [..., K rounded up to alignment],
    scales uint8, flat) of bf16, f16 or fp32 input [..., K], K a multiple of 32, alignment too.

    A scale byte b stands for 2^(b - 127), the least power of two that clips none of its 32 elements: amax / 448
    rounded towards +inf. An element is input * 2^(127 - b), to nearest, ties to even. It is 0 if b is 0, and beyond
    K. NaN stays NaN and does not count for the scale. In a group with an infinity (b = 254), the infinity becomes
    NaN and finite numbers become 0.

    Scales of rows M and columns K' lie in tiles of 128 x 4, padded with zeros (M up to 128, K' / 32 up to 4); with
    SfLayout.layout_8x4 in tiles of 8 x 4; linear: M * K' / 32. sf_swizzle_layout overrides is_sf_swizzled_layout.
    enable_pdl and backend ("auto", "cuda", "cute-dsl") change nothing here. batch_invariant (flashinfer 0.7.4) changes
    nothing either, since the bits of a row depend on that row alone; like flashinfer's it needs backend "auto".
    numpy has no float8: there codes are uint8.
    """
    try:
        check_quantizer(backend, batch_invariant)
        return quantize_mxfp8(input, layout=_layout_name(sf_swizzle_layout, is_sf_swizzled_layout), alignment=alignment)
    except WRONG_TYPES as error:
        name_argument(error, mxfp8_quantize, locals())
        raise


@named_arguments
def mxfp8_dequantize_host(
    input: Tensor,
    scale_tensor: Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | int | None = None,
) -> Tensor:
    """flashinfer.mxfp8_dequantize_host, also on GPUs: fp32 [..., K] of uint8 or float8_e4m3fn codes and flat scales.

    A number is the element times 2^(b - 127). The scale byte 255 makes its 32 elements NaN.
    """
    return dequantize_mxfp8(input, scale_tensor, layout=_layout_name(sf_swizzle_layout, is_sf_swizzled_layout))


def mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    out: Tensor | None = None,
    out_dtype: Any = None,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """flashinfer.mm_mxfp8 on CPU and Hopper: [m, n] in out_dtype (bfloat16, the default, or float16) of a float8_e4m3fn
    [m, k] and b float8_e4m3fn [k, n], column-major, as weight.t() is; k is a multiple of 32.

    a_descale: uint8 [m, k / 32] of any strides, or flat in the 128x4 order (use_8x4_sf_layout: 8x4) that
    mxfp8_quantize gives; b_descale: [k / 32, n] of any strides, or flat in the 128x4 order of the weight [n, k].
    Elements times scales are exact in bf16, from 2^-133 to 2^128; they are multiplied exactly, summed in fp32 and
    rounded once. The same input gives the same bits; up to 32 rows of a, a row's do not depend on the others.

    backend is one of flashinfer's names and changes nothing. "trtllm", whose b is shuffled, is refused. Nothing in
    such a tensor shows that it is shuffled, so do not pass one under another name. batch_invariant (flashinfer 0.7.4)
    is refused: beyond 32 rows the order of a sum depends on their number. Raises ValueError if shapes, dtypes or
    strides are wrong, and NotImplementedError on GPUs other than sm_90.
    """
    try:
        if backend not in _GEMMS:
            message = f"mm_mxfp8: backend {backend!r}; supported: {', '.join(_GEMMS)}"
            if backend != "trtllm":
                raise ValueError(message)
            raise NotImplementedError(f"{message} (trtllm takes rows of b shuffled for its own kernels)")
        if batch_invariant:
            raise NotImplementedError(
                "mm_mxfp8: no kernel for batch_invariant; beyond 32 rows the order of a sum depends on their number"
            )
        name = "bfloat16" if out_dtype is None else str(out_dtype).rpartition(".")[2]
        if name not in ("bfloat16", "float16"):
            raise ValueError(f"out_dtype: expected bfloat16 or float16, got {name}")
        return matmul_mxfp8(a, b, a_descale, b_descale, out=out, out_dtype=name, use_8x4_sf_layout=use_8x4_sf_layout)
    except WRONG_TYPES as error:
        name_argument(error, mm_mxfp8, locals())
        raise


def mxfp8_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
) -> Tensor:
    """The function that SGLang's dispatch_w8a8_mxfp8_linear chooses (0.5.12.post1, 0.5.23): [..., n] of input [..., k]
    and weight float8_e4m3fn [n, k] with its scales: uint8 [n, k / 32], or flat in the 128x4 order.

    Without input_scale, bf16, f16 or fp32 input is quantised as by mxfp8_quantize; else it is float8_e4m3fn, and
    input_scale [rows, k / 32] or flat in the 128x4 order. The product is rounded to output_dtype (bfloat16, float16 or
    float32; default: input's, bfloat16 for codes), then bias [n] is added in it. Raises ValueError where k differs or
    is no multiple of 32, TypeError where weight is not float8_e4m3fn.
    """
    try:
        check_tensor("input", input)
        check_tensor("weight", weight)
        if weight.ndim != 2:
            raise ValueError(f"weight: expected 2 dimensions [n, k], got shape {tuple(weight.shape)}")
        check_tensor("weight_scale", weight_scale)
        if input_scale is not None:
            check_tensor("input_scale", input_scale)
        if input.ndim == 0:
            raise ValueError("input: expected [..., k], got shape ()")
        if bias is not None:
            check_tensor("bias", bias, "n")
            if bias.shape[0] != weight.shape[0]:
                raise ValueError(
                    f'bias: dimension 0 "n": expected {weight.shape[0]} (from weight), got {bias.shape[0]}'
                )
            if (name := str(bias.dtype).rpartition(".")[2]) not in ("bfloat16", "float16", "float32"):
                raise ValueError(f"bias: expected dtype bfloat16, float16 or float32, got {name}")
            if bias.device != input.device:
                raise ValueError(f"bias: expected device {input.device} (from input), got {bias.device}")
            check_no_grad("bias", bias)
        (n, k), rows = weight.shape, input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
        if rows.shape[1] != k:
            raise ValueError(f'input: dimension {input.ndim - 1} "k": expected {k} (from weight), got {rows.shape[1]}')
        if k % _GROUP:
            raise ValueError(f'weight: dimension 1 "k": expected a multiple of {_GROUP}, got {k}')
        if not str(weight.dtype).endswith("float8_e4m3fn"):
            raise TypeError(f"weight: expected dtype float8_e4m3fn, got {weight.dtype}")
        if weight_scale.ndim == 2 and tuple(weight_scale.shape) != (n, k // _GROUP):
            raise ValueError(
                f"weight_scale: expected shape {(n, k // _GROUP)}, or flat in the 128x4 order, "
                f"got {tuple(weight_scale.shape)}"
            )
        name = str(rows.dtype if output_dtype is None else output_dtype).rpartition(".")[2]
        if output_dtype is None and name == "float8_e4m3fn":
            name = "bfloat16"
        if input_scale is None:
            rows, input_scale = quantize_mxfp8(rows.contiguous())
        scale = weight_scale.t() if weight_scale.ndim == 2 else weight_scale
        output = matmul_mxfp8(rows.contiguous(), weight.contiguous().t(), input_scale, scale, out_dtype=name)
        if bias is not None:
            output += bias
        return output.reshape(*input.shape[:-1], n)
    except WRONG_TYPES as error:
        name_argument(error, mxfp8_linear, locals())
        raise
