"""NVFP4 under the names that flashinfer and SGLang have for it: quantisation, the layouts of scales and of w13, and
SGLang's layer on rows in expert order, whose packed experts `cache` keeps."""

from typing import TYPE_CHECKING

from oxmoe import deprecation
from oxmoe.formats.nvfp4 import (
    convert_sf_from_mma_layout,
    convert_sf_to_mma_layout,
    deinterleave_w13_halves,
    fp4_quantize,
    interleave_w13_halves,
    scaled_fp4_grouped_quantize,
    swizzle_blockscale,
    unswizzle_blockscale,
)
from oxmoe.peers.flashinfer_cutedsl_masked import cache as cache
from oxmoe.peers.flashinfer_cutedsl_masked import flashinfer_cutedsl_moe_masked

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

__all__ = [
    "convert_sf_from_mma_layout",
    "convert_sf_to_mma_layout",
    "deinterleave_w13_halves",
    "flashinfer_cutedsl_moe_masked",
    "fp4_quantize",
    "interleave_w13_halves",
    "scaled_fp4_grouped_quantize",
    "swizzle_blockscale",
    "unswizzle_blockscale",
]
