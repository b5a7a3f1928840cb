"""Converts int4 weights of compressed-tensors, AWQ, GPTQ and Marlin to the form that `ExpertWeights.int4` takes."""

from oxmoe.formats.int4 import Matrix, from_awq, from_gptq, from_marlin, from_pack_quantized

__all__ = ["Matrix", "from_awq", "from_gptq", "from_marlin", "from_pack_quantized"]
