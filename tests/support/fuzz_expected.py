"""Expected results of the fuzzer's calls of layers: the reference, for each format's operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oxmoe import reference
from oxmoe.nvfp4 import unswizzle_blockscale

E4M3 = torch.float8_e4m3fn
Operands = dict[str, Any]


def parts(operands: Operands) -> tuple[Operands, Operands]:
    """Returns (operands of ExpertWeights, the others)."""
    experts = {name.partition(".")[2]: value for name, value in operands.items() if "." in name}
    return experts, {name: value for name, value in operands.items() if "." not in name}


def fp32(name: str, value: Any) -> Any:
    """Returns a number as calls take it: integers too, if the operand is a real number."""
    names = ("alpha", "beta", "limit", "situ_beta", "situ_linear_beta", "routed_scaling_factor")
    real = name.rpartition(".")[2].removeprefix("config_") in names
    if type(value) is float or (real and type(value) is int):
        return float(np.float32(float(value)))
    return value


def expected_moe(format: str, operands: Operands) -> Tensor:
    """Returns the reference's result of a call of `moe`."""
    single = {name: fp32(name, value) for name, value in operands.items() if value is not None}
    experts, call = parts(single)
    for name in ("weights", "out", "workspace", "format"):
        call.pop(name, None)
    experts.pop("dtype", None)
    w13, w2 = experts.pop("w13"), experts.pop("w2")
    if format.startswith("nvfp4"):
        return _expected_nvfp4(w13, w2, experts, call)
    if format == "int4":
        pairs = (
            (w, experts.pop(f"{name}_scale"), experts.pop(f"{name}_zeros", None))
            for name, w in (("w13", w13), ("w2", w2))
        )
        w13, w2 = (reference.int4_weights(*pair, call["x"].dtype) for pair in pairs)
        return reference.moe(w13=w13, w2=w2, **experts, **call)
    if format.startswith("mxfp4"):
        activation_dtype = experts.pop("activation_dtype", None)
        w13, w2 = (
            torch.stack([_mxfp4(*one, call["x"].dtype, activation_dtype) for one in zip(w, scales, strict=True)])
            for w, scales in ((w13, experts.pop("w13_scale")), (w2, experts.pop("w2_scale")))
        )
        return reference.moe(w13=w13, w2=w2, activation_dtype=activation_dtype, **experts, **call)
    if format == "fp8_tensor":
        given = experts.pop("a13_scale", None), experts.pop("a2_scale", None)
        dynamic = "token" if experts.pop("per_token", False) else "tensor"
        scales: Any = dynamic if given[0] is None else tuple(scale.max() for scale in given)
        for name, w in (("w13_scale", w13), ("w2_scale", w2)):
            if experts[name].shape[1:2] != (w.shape[1],):
                of_experts = _of_experts(experts[name], w.shape[0])
                rows = of_experts.repeat_interleave(w.shape[1] // 128 // of_experts.shape[1], 1)
                experts[name] = rows[..., None].repeat(1, 1, w.shape[2] // 128)
        return reference.moe(w13=w13, w2=w2, activation_scales=scales, **experts, **call)
    return reference.moe(w13=w13, w2=w2, **experts, **call)


def _mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype, activation_dtype: Any) -> Tensor:
    if activation_dtype is not None:
        codes, scales = reference.mxfp4_window(codes, scales)
    return reference.mxfp4_weights(codes, scales, dtype)


def _of_experts(scale: Any, experts: int) -> Tensor:
    """Returns [E, n] of one number for all experts or [E] or [E, n]."""
    scale = torch.as_tensor(scale, dtype=torch.float32)
    return scale.reshape(1, 1).expand(experts, 1) if scale.numel() == 1 else scale.view(experts, -1)


def _row_scales(scales: Tensor, codes: Tensor) -> Tensor:
    """Returns NVFP4 scales row by row. Swizzled scales have another shape, which a mutation may have made."""
    rows, columns = codes.shape[0], codes.shape[1] // 8
    return (scales if scales.shape == (rows, columns) else unswizzle_blockscale(scales, rows, columns)).view(E4M3)


def _expected_nvfp4(w13: Tensor, w2: Tensor, experts: Operands, call: Operands) -> Tensor:
    x, count = call["x"], w13.shape[0]
    weights, ids = call.get("topk_weights"), call.get("topk_ids")
    if ids is None:
        names = ("top_k", "scoring_func", "renormalize", "correction_bias", "num_expert_group", "topk_group")
        routed = {name: call[name] for name in (*names, "num_token_non_padded") if name in call}
        weights, ids = reference.topk(call["router_logits"], **routed)
    assert weights is not None
    ids = ids.long() - call.get("ep_rank", 0) * count if call.get("ep_size", 1) > 1 else ids.long()
    rows = x.new_zeros((*ids.shape, x.shape[1]))
    names = ("alpha", "beta", "limit", "situ_beta", "situ_linear_beta")
    scalars = {name: experts[name] for name in names if name in experts}
    options = {name: experts[name] for name in ("layout", "activation", "gated", "clamp") if name in experts}
    of_experts = {name: _of_experts(experts[name], count) for name in experts if name.endswith("global_scale")}
    halves = of_experts["w13_global_scale"]
    for expert in range(count):
        factor = halves[expert].repeat_interleave(w13.shape[1] // halves.shape[1])
        roundings = None
        if "input_global_scale" in experts:
            names = ("input_global_scale", "a2_global_scale")
            roundings = tuple(of_experts[name][expert, 0].item() for name in names)
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if roundings is not None and not all(0 < scale < math.inf for scale in roundings):
            rows[token, slot] = torch.nan  # rounding under such a scale has no definition
            continue
        numbers = {n: v[expert].item() if isinstance(v, Tensor) else v for n, v in scalars.items()}
        bias = {name: experts[name][expert] for name in ("b13", "b2") if name in experts}
        rows[token, slot] = reference.nvfp4_expert(
            x[token],
            reference.nvfp4_numbers(w13[expert], _row_scales(experts["w13_scale"][expert], w13[expert])),
            reference.nvfp4_numbers(w2[expert], _row_scales(experts["w2_scale"][expert], w2[expert])),
            (factor, of_experts["w2_global_scale"][expert]),
            roundings,
            **bias,
            **options,
            **numbers,
        )
    present = ((ids >= 0) & (ids < count))[..., None]
    weighted = not call.get("no_combine") or call.get("keep_router_weight")
    terms = torch.where(present, (weights.float()[..., None] if weighted else 1.0) * rows.float(), 0.0)
    total = terms if call.get("no_combine") else terms.sum(1)
    return (call.get("routed_scaling_factor", 1.0) * total).to(x.dtype)


# Layers
