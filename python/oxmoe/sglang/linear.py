"""MXFP8 linear layers of SGLang on `oxmoe.mxfp8_linear`, where SGLang has no kernel for them: its own begin with
Blackwell. The function that its method calls comes from a fixed list; its registry of quantizations is the way in.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization import fp8

from oxmoe import mxfp8_linear

BLOCK = 32  # columns of one scale


def ours() -> bool:
    """Whether this process's device has no MXFP8 linear layer in SGLang and one here: Hopper, or a CPU."""
    if not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


class Fp8LinearMethod(fp8.Fp8LinearMethod):
    """W8A8: weight float8_e4m3fn [n, k] with scales uint8 [n, k / 32], input quantised to MXFP8 at every call.

    Parameters and loading are SGLang's, and are used as they lie. NOTE: its linear layers choose how weights are loaded
    by the name of their method's class, hence this one's.
    """

    oxmoe = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        columns = layer.weight.shape[1]
        if columns % BLOCK:
            raise NotImplementedError(
                f"oxmoe: an MXFP8 linear layer with {columns} columns on this rank; served are multiples of {BLOCK}"
            )
        for parameter in (layer.weight, layer.weight_scale_inv):
            parameter.requires_grad_(False)

    def apply(self, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., k], or its codes and scales."""
        codes, scale = x if isinstance(x, tuple) else (x, None)
        return mxfp8_linear(codes, layer.weight, layer.weight_scale_inv, scale, bias)


def method(chosen: Any) -> Any:
    """Ours in place of SGLang's method for an MXFP8 linear layer, where it has no kernel; else what it chose."""
    if type(chosen) is not fp8.Fp8LinearMethod or not chosen.use_mxfp8:
        return chosen
    # Turned into fp8 with blocks of 128 x 128 while it is loaded, where the user asks for that.
    if getattr(chosen, "convert_mxfp8_to_block", False) or not ours():
        return chosen
    return Fp8LinearMethod(chosen.quant_config)
