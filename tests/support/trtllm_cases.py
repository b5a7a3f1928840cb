"""Layers of bf16, fp8 with one scale, MXFP4 and NVFP4 as flashinfer's trtllm-gen calls take them, and the layers of the
same numbers in oxmoe's own form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_routing, make_x
from fp8_cases import make_fp8_tensor
from mxfp4_cases import make_blocks
from nvfp4_cases import make as make_nvfp4
from oxmoe import nvfp4
from trtllm_layouts import blocked, interleave, shuffle

# I and H in whole tiles of scales, 128 rows by 4 blocks, as flashinfer's shuffle needs them.
SHAPE = Shape("trtllm-formats", 8, 3, 256, 128, options=(("layout", "up_gate"),))
BIASED = Shape("trtllm-formats", 8, 3, 256, 128, bias=True, options=(("layout", "up_gate"),))
FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")
Call = tuple[oxmoe.ExpertWeights, dict[str, Any], dict[str, Any]]


def on(device: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: part.to(device) if isinstance(part, Tensor) else part for name, part in tensors.items()}


def codes(weights: Tensor, gated: bool) -> Tensor:
    return shuffle(weights.cpu().view(torch.uint8), gated)


def bf16(device: str, rng: torch.Generator, *, shuffled: bool = True, layout: int = 2, gated: bool = True) -> Call:
    shape = SHAPE if gated else SHAPE.with_options(gated=False)
    made: Any = make_layer(shape, torch.bfloat16, device, rng)
    forms = []
    for weights, of_halves in ((made.w13, gated), (made.w2, False)):
        form = shuffle(weights.cpu(), of_halves) if shuffled else weights.cpu()
        forms.append((blocked(form) if layout == 2 else form).to(device))
    options = {} if gated else {"activation_type": SimpleNamespace(name="Relu2")}
    given = {"gemm1_weights": forms[0], "gemm2_weights": forms[1], "use_shuffled_weight": shuffled}
    own = {"activation": "silu", "layout": "up_gate"} if gated else {"activation": "relu2", "gated": False}
    return oxmoe.ExpertWeights.bf16(made.w13, made.w2, **own), given | {"weight_layout": layout} | options, {}  # type: ignore[arg-type]


def fp8(device: str, rng: torch.Generator, *, gated: bool = True) -> Call:
    """Activation scales are powers of two, whose products and quotients are exact."""
    shape = SHAPE if gated else SHAPE.with_options(gated=False, activation="relu2")
    made: Any = make_fp8_tensor(shape, device, rng, mode="static")
    made.a13_scale, made.a2_scale = torch.ones(1, device=device), torch.tensor([2.0**-8], device=device)
    of_x, quantises = 2.0**-7, 2.0**8
    of_sums = made.w13_scale.reshape(-1) * of_x
    assert of_sums.numel() == SHAPE.experts
    made.w13_scale = of_sums
    given = {
        "gemm1_weights": codes(made.w13, gated).view(torch.float8_e4m3fn),
        "gemm2_weights": codes(made.w2, False).view(torch.float8_e4m3fn),
        "output1_scales_gate_scalar": of_sums,
        "output1_scales_scalar": of_sums * quantises if gated else torch.full_like(of_sums, quantises),
        "output2_scales_scalar": made.w2_scale.reshape(-1) / quantises,
        "activation_type": 3 if gated else SimpleNamespace(name="Relu2"),
    }
    return made.weights(), on(device, given), {"x_scale": torch.ones(1, device=device)}


def mxfp4(device: str, rng: torch.Generator) -> Call:
    made: Any = make_blocks(BIASED, "bf16", device, rng, bias_dtype=torch.float32)
    numbers = {name: torch.full((SHAPE.experts,), value) for name, value in (("alpha", 1.7), ("beta", 1.0))}
    given = {
        "gemm1_weights": codes(made.w13, True),
        "gemm1_weights_scale": interleave(codes(made.w13_scale, True)).view(made.w13_scale.shape),
        "gemm2_weights": codes(made.w2, False),
        "gemm2_weights_scale": interleave(codes(made.w2_scale, False)).view(made.w2_scale.shape),
        "gemm1_bias": shuffle(made.b13.cpu(), True),
        "gemm2_bias": shuffle(made.b2.cpu(), False),
        "gemm1_clamp_limit": None,
        **{f"gemm1_{name}": value for name, value in numbers.items()},
        **dict.fromkeys(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")),
    }
    return made.weights(alpha=1.7, beta=1.0), on(device, given), {}


def nv(device: str, rng: torch.Generator) -> Call:
    """W4A4, the factor of GEMM1's output a power of two."""
    made: Any = make_nvfp4(SHAPE, rng)
    of_sums, quantises = made.w13_global[:, 0].contiguous(), 128.0
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, of_sums, made.w2_global)
    weights = oxmoe.ExpertWeights.nvfp4(
        *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=quantises, layout="up_gate"
    )
    scales = [part.view(torch.uint8) for part in (made.w13_scale, made.w2_scale)]
    given = {
        "gemm1_weights": codes(made.w13, True),
        "gemm1_weights_scale": interleave(shuffle(scales[0], True)).view(scales[0].shape).view(torch.float8_e4m3fn),
        "gemm2_weights": codes(made.w2, False),
        "gemm2_weights_scale": interleave(shuffle(scales[1], False)).view(scales[1].shape).view(torch.float8_e4m3fn),
        **dict.fromkeys(("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")),
        "output1_scale_scalar": of_sums * quantises,
        "output1_scale_gate_scalar": of_sums,
        "output2_scale_scalar": made.w2_global,
    }
    return weights, on(device, given), {}


LAYERS: dict[str, Any] = {"bf16": bf16, "fp8": fp8, "mxfp4": mxfp4, "nvfp4": nv}
CALLS = {
    "bf16": (oxmoe.trtllm_bf16_moe, oxmoe.trtllm_bf16_routed_moe, oxmoe.prepare_trtllm_bf16_moe),
    "fp8": (
        oxmoe.trtllm_fp8_per_tensor_scale_moe,
        oxmoe.trtllm_fp8_per_tensor_scale_routed_moe,
        oxmoe.prepare_trtllm_fp8_per_tensor_scale_moe,
    ),
    "mxfp4": (
        oxmoe.trtllm_fp4_block_scale_moe,
        oxmoe.trtllm_fp4_block_scale_routed_moe,
        oxmoe.prepare_trtllm_fp4_block_scale_moe,
    ),
}
CALLS["nvfp4"] = CALLS["mxfp4"]


def tokens_of(format: str, tokens: int, device: str, rng: torch.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (hidden_states and its scale as flashinfer has them, x and x_scale of `moe`)."""
    x = make_x(tokens, SHAPE, torch.bfloat16, device, rng)
    if format == "fp8":
        x = (x.float() * 2.0**7).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"hidden_states": x}, {"x": x}
    if format == "nvfp4":
        x, scales = nvfp4.fp4_quantize(x, torch.ones(1, device=device), is_sf_swizzled_layout=False)
        scales = scales.view(torch.float8_e4m3fn).reshape(tokens, SHAPE.hidden // 16)
        return {"hidden_states": x, "hidden_states_scale": scales}, {"x": x, "x_scale": scales}
    return {"hidden_states": x} | ({"hidden_states_scale": None} if format == "mxfp4" else {}), {"x": x}


def sizes(**others: Any) -> dict[str, Any]:
    return {
        "num_experts": SHAPE.experts,
        "top_k": SHAPE.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": SHAPE.intermediate,
        "local_expert_offset": 0,
        "local_num_experts": SHAPE.experts,
        "routed_scaling_factor": None,
        **others,
    }


def run(call: Any, format: str, **given: Any) -> Tensor:
    if format == "fp8":
        given = {"use_routing_scales_on_input": False} | given
    if call is not oxmoe.trtllm_bf16_routed_moe:
        given = {"routing_bias": None} | given
    result = call(**given)
    if format in ("mxfp4", "nvfp4"):
        (result,) = result
    assert isinstance(result, Tensor)
    return result


def routed(tokens: int, device: str, rng: torch.Generator, experts: int = SHAPE.experts) -> tuple[Tensor, Tensor]:
    gates, ids = (part.to(device) for part in make_routing("uniform", tokens, experts, SHAPE.top_k, rng))
    return gates, ids.int()
