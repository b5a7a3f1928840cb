"""MXFP4 weights on CPU: quantisation, and the layouts that other kernels hold them in. Takes torch and numpy."""

from oxmoe._oxmoe import deinterleave_sm90_mxfp4, interleave_sm90_mxfp4, swizzle_hopper_mxfp4, unswizzle_hopper_mxfp4
from oxmoe._oxmoe import dequantize_mxfp4 as dequantize
from oxmoe._oxmoe import quantize_mxfp4 as mxfp4

__all__ = [
    "deinterleave_sm90_mxfp4",
    "dequantize",
    "interleave_sm90_mxfp4",
    "mxfp4",
    "swizzle_hopper_mxfp4",
    "unswizzle_hopper_mxfp4",
]
