"""Supports SGLang's expert load balancer. It moves rows of those parameters that have one row for each local expert,
also between ranks, and does not tell the layer's method. So everything that kernels read of an expert must be such a
row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oxmoe import ExpertWeights
from oxmoe.sglang import server

_MEND = "start without --enable-eplb"
PREFIX = "oxmoe_"  # prefix of the names of parameters that no checkpoint fills
# Runners whose layers oxmoe runs on copies of the weights.
COPIED = ("triton_kernel", "flashinfer_mxfp4")


def tables(weights: ExpertWeights) -> dict[str, Tensor]:
    """Returns by name what kernels read of each expert, except the numbers of its activation."""
    names = ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
    found = {name: getattr(weights, name) for name in names}
    for name, packed in (("w13", weights.w13_packed), ("w2", weights.w2_packed)):
        of_packed = zip(("codes", "scales", "expert_scales"), packed or (), strict=False)
        found |= {f"{name}_{part}": tensor for part, tensor in of_packed}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def of_layer(weights: ExpertWeights) -> dict[str, Tensor]:
    """Returns by name what kernels read of a layer beside its experts."""
    found = {name: getattr(weights, name) for name in ("a13_scale", "a2_scale")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def register(layer: torch.nn.Module, weights: ExpertWeights) -> None:
    """Turns all tables that are not parameters of the layer yet into parameters, so that SGLang moves them with
    experts, and saves and restores them (--load-format sharded_state). With --enable-eplb it raises
    NotImplementedError if an expert has more than its rows of them."""
    known = {parameter.data_ptr() for parameter in layer.parameters()}
    for name, tensor in (tables(weights) | of_layer(weights)).items():
        if tensor.data_ptr() not in known:
            layer.register_parameter(f"{PREFIX}{name}", torch.nn.Parameter(tensor, requires_grad=False))
    whole = not (weights.format.startswith("nvfp4") and weights.w13_packed is None)
    if not whole and server.restores_processed():
        raise NotImplementedError(
            f"oxmoe: NVFP4 experts on a CPU are not served with --load-format {server.load_format()[0]}: not all that "
            "was made of their checkpoint is among the parameters; start with another --load-format"
        )
    if not server.balances_experts():
        return
    if weights.a13_scale is not None:
        raise NotImplementedError(
            "oxmoe: experts with given scales of activations are not served with --enable-eplb: the largest scale of "
            f"this rank's experts counts, and an expert that comes from another rank may need a larger one; {_MEND}"
        )
    if not whole:
        raise NotImplementedError(f"oxmoe: NVFP4 experts on a CPU are not served with --enable-eplb; {_MEND}")


def copies(method: Any, runner: Any) -> str | None:
    """Returns why a layer that SGLang's own method runs on oxmoe would not see moved rows, or None if it would."""
    backend = runner.runner_backend.value
    if backend in COPIED:
        return f"with --moe-runner-backend {backend} oxmoe keeps copies of the weights"
    if type(method).__name__ == "Fp8MoEMethod" and not method.block_quant:
        return f"with --moe-runner-backend {backend} oxmoe keeps copies of fp8 experts' scales"
    return None
