"""Calls of quantisers, layouts and the dense MXFP8 GEMM for calls.py."""

from __future__ import annotations

from recording import attempt, records
from tensors import Tensor

import oxmoe._oxmoe as oxmoe


def packed_functions(rows, columns):
    """Runs mxfp4_pack and mxfp4_unpack."""
    codes, scales = Tensor((3, 2, rows, columns // 2), "uint8"), Tensor((3, 2, rows, columns // 32), "uint8")
    form = {"gated": True, "layout": "up_gate"}
    packed = oxmoe.pack_mxfp4(codes, scales, **form)
    back = oxmoe.unpack_mxfp4(*packed, rows=rows, columns=columns, **form)
    addresses = [t.address for t in (codes, scales, *packed, *back)]
    return {"addresses": addresses, "shapes": [t.shape for t in (*packed, *back)], "records": records()}


def layouts(rows, columns, num_warps=8):
    """Converts to every other layout and back: [addresses of codes and scales before and after, shapes after, records]
    of each."""
    lead = (3, 2)
    codes, scales = Tensor((*lead, rows, columns // 2), "uint8"), Tensor((*lead, rows, columns // 32), "uint8")
    results = []

    def convert(function, *given, **options):
        made = function(*given, **options)
        addresses = [t.address for t in (*given, *made)]
        results.append([addresses, [list(t.shape) for t in made], records()])
        return made

    held = convert(oxmoe.swizzle_hopper_mxfp4, codes, scales, num_warps=num_warps, row_multiple=256)
    convert(oxmoe.unswizzle_hopper_mxfp4, *held, rows=rows, columns=columns, num_warps=num_warps)
    for flashinfer in ("0.6", "0.7"):
        held = convert(oxmoe.interleave_sm90_mxfp4, codes, scales, flashinfer=flashinfer)
        convert(oxmoe.deinterleave_sm90_mxfp4, *held)
    return results


def quantized(shape, dtype, rounding):
    """Runs mxfp4 and back: addresses of numbers, codes, scales and numbers again, shapes of the last three, records."""
    x = Tensor(shape, dtype)
    codes, scales = oxmoe.quantize_mxfp4(x, rounding=rounding)
    back = oxmoe.dequantize_mxfp4(codes, scales, dtype)
    addresses = [t.address for t in (x, codes, scales, back)]
    return {"addresses": addresses, "shapes": [t.shape for t in (codes, scales, back)], "records": records()}


def quantized_rows(shape):
    """Runs rows_e4m3: addresses of numbers, codes and scales, shapes of the last two, records."""
    x = Tensor(shape)
    made = oxmoe.quantize_rows_e4m3(x)
    return {
        "addresses": [t.address for t in (x, *made)],
        "shapes": [list(t.shape) for t in made],
        "records": records(),
    }


def dense_quantize(shape, dtype, layout, alignment):
    """Runs MXFP8 and back: addresses of numbers, codes, scales and numbers again, shapes of codes and scales,
    records."""
    x = Tensor(shape, dtype)
    codes, scales = oxmoe.quantize_mxfp8(x, layout=layout, alignment=alignment)
    back = oxmoe.dequantize_mxfp8(codes, scales, dtype, layout=layout)
    return {
        "addresses": [t.address for t in (x, codes, scales, back)],
        "shapes": [list(codes.shape), list(scales.shape)],
        "records": records(),
    }


def dense_mm(m, n, k, a_scales, b_scales, out_dtype="bfloat16", use_8x4=False):
    """Runs the dense MXFP8 GEMM with scales of these shapes: addresses of operands and output, records."""
    a, b = Tensor((m, k), "float8_e4m3fn"), Tensor((n, k), "float8_e4m3fn").swapaxes(0, 1)
    scales = [Tensor(shape, "uint8") for shape in (a_scales, b_scales)]
    out = oxmoe.mm_mxfp8(a, b, *scales, out_dtype=out_dtype, use_8x4_sf_layout=use_8x4)
    return {"addresses": [t.address for t in (a, b, *scales, out)], "shape": list(out.shape), "records": records()}


def nvfp4_quantized(shape, dtype, block, layout):
    """Runs NVFP4, or MXFP4 of blocks of 32: addresses of numbers, codes and scales, shapes of the last two, records."""
    x = Tensor(shape, dtype)
    kind = "e4m3" if block == 16 else "e8m0"
    codes, scales = oxmoe.quantize_nvfp4(x, block=block, scale_dtype=kind, scale_layout=layout)
    return {
        "addresses": [t.address for t in (x, codes, scales)],
        "shapes": [list(t.shape) for t in (codes, scales)],
        "records": records(),
    }


def refused_dense():
    """Returns what the dense MXFP8 GEMM raises on a GPU."""
    a, b = Tensor((4, 64), "float8_e4m3fn"), Tensor((8, 64), "float8_e4m3fn").swapaxes(0, 1)
    scales = Tensor((4, 2), "uint8"), Tensor((2, 8), "uint8")
    shifted = Tensor((4, 64), "float8_e4m3fn")
    shifted.address += 8
    return {
        "right": attempt(oxmoe.mm_mxfp8, a, b, *scales),
        "address": attempt(oxmoe.mm_mxfp8, shifted, b, *scales),
        "device": attempt(oxmoe.mm_mxfp8, a, b, scales[0], Tensor((2, 8), "uint8", device=1)),
    }
