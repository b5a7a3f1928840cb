"""Runs MXFP8 linear layers of SGLang on `oxmoe.mxfp8_linear` if SGLang has no kernel for them; its own begin with
Blackwell. SGLang's method takes its function from a fixed list, so this module goes through the registry of
quantizations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization import fp8

from oxmoe import mxfp8_linear
from oxmoe.sglang.loading import e8m0_as_bytes

BLOCK = 32  # columns of one scale


def ours() -> bool:
    """Whether SGLang has no MXFP8 linear layer for this process's device, and oxmoe has one. That is a Hopper GPU or
    a CPU."""
    if not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


class Fp8LinearMethod(fp8.Fp8LinearMethod):
    """The method for W8A8 layers. The weight is float8_e4m3fn [n, k] with scales uint8 [n, k / 32], and the input is
    quantised to MXFP8 at every call.

    Parameters and loading are SGLang's, and the parameters are used as they lie. NOTE: SGLang's linear layers choose
    how weights are loaded by the name of their method's class, hence the name of this class.
    """

    oxmoe = True

    def __init__(self, quant_config: Any) -> None:
        super().__init__(quant_config)
        # SGLang's models ask this before they hand over activations in the layout of one of its kernels.
        self.mxfp8_dense_backend = None

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """Creates SGLang's parameters, whose scales a checkpoint may have as bytes or as torch.float8_e8m0fnu."""
        if "weight_loader" in attributes:
            attributes["weight_loader"] = _loader(attributes["weight_loader"])
        super().create_weights(layer, *sizes, **attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._process_mxfp8_linear_weight_scale(layer)

    def _process_mxfp8_linear_weight_scale(self, layer: Any, scale_u8: torch.Tensor | None = None) -> None:
        """Also for layers that a model makes of the parameters of others, such as MiniMax-M3's: it calls this alone.
        SGLang's would lay weights and scales out for one of its kernels."""
        columns = layer.weight.shape[1]
        if columns % BLOCK:
            raise NotImplementedError(
                f"oxmoe: an MXFP8 linear layer with {columns} columns on this rank; served are multiples of {BLOCK}"
            )
        for parameter in (layer.weight, layer.weight_scale_inv):
            parameter.requires_grad_(False)

    def apply(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer. x is [..., k], or its codes and scales."""
        codes, scale = x if isinstance(x, tuple) else (x, None)
        return mxfp8_linear(codes, layer.weight, layer.weight_scale_inv, scale, bias)


def _loader(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load`, SGLang's weight_loader, which would refuse scales in E8M0 or convert their numbers to bytes."""

    @functools.wraps(load)
    def weight_loader(param: Any, loaded_weight: Any, *arguments: Any, **named: Any) -> Any:
        return load(param, e8m0_as_bytes(param, loaded_weight), *arguments, **named)

    return weight_loader


def method(chosen: Any) -> Any:
    """Returns oxmoe's method in place of SGLang's for an MXFP8 linear layer that SGLang has no kernel for. Otherwise
    it returns what SGLang chose."""
    if type(chosen) is not fp8.Fp8LinearMethod or not chosen.use_mxfp8:
        return chosen
    # If the user asks for it, SGLang turns the layer into fp8 with blocks of 128 x 128 while it is loaded.
    if getattr(chosen, "convert_mxfp8_to_block", False) or not ours():
        return chosen
    return Fp8LinearMethod(chosen.quant_config)
