"""Converts int4 weights of compressed-tensors, AWQ, GPTQ, Marlin and flashinfer to the form that `ExpertWeights.int4`
takes."""

from typing import TYPE_CHECKING

from oxmoe import deprecation
from oxmoe.formats.int4 import (
    Matrix,
    from_awq,
    from_gptq,
    from_marlin,
    from_pack_quantized,
    from_sm90,
    interleave_sm90,
)

if not TYPE_CHECKING:
    __getattr__ = deprecation.lookup(__name__)

__all__ = ["Matrix", "from_awq", "from_gptq", "from_marlin", "from_pack_quantized", "from_sm90", "interleave_sm90"]
