"""int4 weights of compressed-tensors, AWQ, GPTQ and Marlin as `ExpertWeights.int4` takes them."""

from oxmoe.formats.int4 import Matrix, from_awq, from_gptq, from_marlin, from_pack_quantized

__all__ = ["Matrix", "from_awq", "from_gptq", "from_marlin", "from_pack_quantized"]
