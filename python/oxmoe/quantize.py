"""MXFP4 weights on CPU and CUDA: quantisation, the layouts that other kernels hold them in, and the one that oxmoe's
GPU kernels read. Takes torch and numpy."""

from oxmoe._oxmoe import deinterleave_sm90_mxfp4, interleave_sm90_mxfp4, swizzle_hopper_mxfp4, unswizzle_hopper_mxfp4
from oxmoe._oxmoe import dequantize_mxfp4 as dequantize
from oxmoe._oxmoe import pack_mxfp4 as mxfp4_pack
from oxmoe._oxmoe import quantize_mxfp4 as mxfp4
from oxmoe._oxmoe import unpack_mxfp4 as mxfp4_unpack

__all__ = [
    "deinterleave_sm90_mxfp4",
    "dequantize",
    "interleave_sm90_mxfp4",
    "mxfp4",
    "mxfp4_pack",
    "mxfp4_unpack",
    "swizzle_hopper_mxfp4",
    "unswizzle_hopper_mxfp4",
]
