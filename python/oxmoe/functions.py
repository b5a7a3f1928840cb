"""The public functions. With torch they are the wrappers of `oxmoe.ops`, which torch can trace; without it they are
the extension's builtins."""

from __future__ import annotations

from oxmoe.tracing import HAS_TORCH

if HAS_TORCH:
    from oxmoe.ops import dequantize_mxfp8, matmul_mxfp8, moe, quantize_mxfp8, routing_tables, sort_by_expert, topk
    from oxmoe.ops_rows import moe_contiguous, moe_masked, quantize_fp8, quantize_nvfp4
else:
    from oxmoe._oxmoe import (
        dequantize_mxfp8,
        moe,
        moe_contiguous,
        moe_masked,
        quantize_fp8,
        quantize_mxfp8,
        quantize_nvfp4,
        routing_tables,
        sort_by_expert,
        topk,
    )
    from oxmoe._oxmoe import mm_mxfp8 as matmul_mxfp8

__all__ = [
    "dequantize_mxfp8",
    "matmul_mxfp8",
    "moe",
    "moe_contiguous",
    "moe_masked",
    "quantize_fp8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "routing_tables",
    "sort_by_expert",
    "topk",
]
