"""MXFP8 in flashinfer's trtllm_fp8_block_scale_moe and its routed form: weights plain, shuffled and blocked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, tie_free_logits
from mxfp4_cases import call
from mxfp8_cases import Mxfp8, check, make_mxfp8
from oxmoe.peers import flashinfer_trtllm, flashinfer_trtllm_layouts
from oxmoe.testing import same_bits
from trtllm_layouts import blocked, interleave, shuffle

# I and H in whole tiles of scales, 128 rows by 4 blocks of 32, as flashinfer's shuffle needs them.
SHAPE = Shape("trtllm-mxfp8", 8, 3, 256, 128, bias=True).with_options(layout="up_gate")
MX = 2  # Fp8QuantizationType.MxFp8


def as_trtllm(layer: Mxfp8, *, shuffled: bool = True, weight_layout: int = 0, gated: bool = True) -> dict[str, Tensor]:
    """Returns the four tensors and the biases as SGLang hands them to flashinfer."""
    form = {}
    for name, weights, scales, bias, halves in (
        ("gemm1", layer.w13, layer.w13_scale, layer.b13, gated),
        ("gemm2", layer.w2, layer.w2_scale, layer.b2, False),
    ):
        device, codes, parts = weights.device, weights.view(torch.uint8).cpu(), scales.cpu()
        if shuffled:
            codes, parts = shuffle(codes, halves), interleave(shuffle(parts, halves)).reshape(parts.shape)
            bias = None if bias is None else shuffle(bias.cpu(), halves)
        if weight_layout == 2:
            codes = blocked(codes)
        form[f"{name}_weights"] = codes.view(torch.float8_e4m3fn).to(device)
        form[f"{name}_weights_scale"] = parts.to(device)
        if bias is not None:
            form[f"{name}_bias"] = bias.to(device)
    return form


def arguments(layer: Mxfp8, x: Tensor, **options: Any) -> dict[str, Any]:
    codes, scales = oxmoe.mxfp8_quantize(x, False)
    shape = layer.shape
    return {
        "routing_bias": None,
        "hidden_states": codes,
        "hidden_states_scale": scales.view(x.shape[0], x.shape[1] // 32),
        "num_experts": shape.experts,
        "top_k": shape.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": shape.intermediate,
        "local_expert_offset": 0,
        "local_num_experts": shape.experts,
        "routed_scaling_factor": None,
        "routing_method_type": 1,
        "fp8_quantization_type": MX,
        **options,
    }


@pytest.mark.parametrize("blocks", [4, 3, 8, 5])
@pytest.mark.parametrize("gated", [False, True])
def test_shuffles_are_undone(gated: bool, blocks: int, rng: torch.Generator) -> None:
    weights = torch.randint(256, (3, 256, 32 * blocks), dtype=torch.uint8, generator=rng)
    scales = torch.randint(256, (3, 256, blocks), dtype=torch.uint8, generator=rng)
    places = shuffle(weights, gated), interleave(shuffle(scales, gated))
    for given in (places[1], places[1].view(3, 256, -1), places[1].view(torch.float8_e8m0fnu)):
        back = flashinfer_trtllm_layouts.plain_mxfp8(places[0], given, gated=gated, weight_layout=0)
        assert torch.equal(back[0], weights) and torch.equal(back[1].view(torch.uint8), scales)
    bias = torch.randn((3, 256), generator=rng)
    assert torch.equal(flashinfer_trtllm_layouts.plain_biases(shuffle(bias, gated), 32, gated=gated), bias)


@pytest.mark.parametrize("weight_layout", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_layouts_of_weights(tokens: int, shuffled: bool, weight_layout: int, device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, device, rng, bias_dtype=torch.float32)
    x, logits = layer.x(tokens, rng), tie_free_logits(tokens, SHAPE.experts, rng).to(device)
    expected = call(x, layer.weights(), router_logits=logits, top_k=3, scoring_func="softmax_topk", renormalize=False)
    form = as_trtllm(layer, shuffled=shuffled, weight_layout=weight_layout)
    how = {"use_shuffled_weight": shuffled, "weight_layout": weight_layout}
    flashinfer_trtllm.cache.clear()
    for _ in range(2):
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **arguments(layer, x), **form, **how), expected)
    # Weights that are neither packed nor undone are described at each call.
    assert len(flashinfer_trtllm.cache) == int(shuffled or weight_layout == 2 or device == "cuda")
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(**form, **how, fp8_quantization_type=MX)
    flashinfer_trtllm.cache.clear()
    out = torch.full_like(x, torch.nan)
    result = oxmoe.trtllm_fp8_block_scale_moe(logits, **arguments(layer, x), **form, weights=made, output=out)
    assert result is out and same_bits(out, expected) and len(flashinfer_trtllm.cache) == 0


@pytest.mark.parametrize("tokens", [1, 40])
def test_routed_close_to_the_reference(tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, device, rng, bias_dtype=torch.float32)
    x = layer.x(tokens, rng)
    weights, ids = make_routing("holes", tokens, SHAPE.experts, SHAPE.top_k, rng)
    weights = weights.nan_to_num(nan=-0.5).bfloat16().float()
    expected = check(layer, x, weights, ids)
    given = {**arguments(layer, x), **as_trtllm(layer), "use_shuffled_weight": True}
    biases = {"b13": given.pop("gemm1_bias"), "b2": given.pop("gemm2_bias")}
    assert all(bias is not None for bias in biases.values())  # the routed call has none: prepared weights do
    how = {"gemm1_bias": biases["b13"], "gemm2_bias": biases["b2"], "use_shuffled_weight": True}
    tensors = {name: given[name] for name in given if name.startswith("gemm")}
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(**tensors, **how, fp8_quantization_type=MX)
    packed = oxmoe.pack_topk(weights.to(device), ids.to(device))
    assert same_bits(oxmoe.trtllm_fp8_block_scale_routed_moe(packed, **given, weights=made), expected)


def test_tokens(device: str, rng: torch.Generator) -> None:
    """bf16 tokens, flat scales and scales as e8m0 have the same bits, also if codes are not those of oxmoe's
    quantiser."""
    layer = make_mxfp8(SHAPE, device, rng)
    x, logits = layer.x(20, rng), tie_free_logits(20, SHAPE.experts, rng).to(device)
    given = {**arguments(layer, x), **as_trtllm(layer), "use_shuffled_weight": True}
    expected = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
    scale = given["hidden_states_scale"]
    forms: list[dict[str, Any]] = [
        {"hidden_states_scale": scale.flatten()},
        {"hidden_states_scale": scale.view(torch.float8_e8m0fnu)},
        {"hidden_states": x, "hidden_states_scale": None},
        # Halves of the numbers times twice the scale, which a minimal scale is not: exact but for subnormal codes.
        {
            "hidden_states": (given["hidden_states"].float() / 2).to(torch.float8_e4m3fn),
            "hidden_states_scale": scale + 1,
        },
    ]
    for form in forms[:3]:
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, **form}), expected)
    wide = {**given, **forms[3]}
    rows = (wide["hidden_states"].float().view(20, -1, 32) * torch.exp2(scale.float() - 126)[..., None]).view(20, -1)
    as_bf16 = {**given, "hidden_states": rows.bfloat16(), "hidden_states_scale": None}
    assert same_bits(
        oxmoe.trtllm_fp8_block_scale_moe(logits, **wide), oxmoe.trtllm_fp8_block_scale_moe(logits, **as_bf16)
    )


def test_numbers_of_experts(device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, device, rng)
    x, logits = layer.x(20, rng), tie_free_logits(20, SHAPE.experts, rng).to(device)
    numbers = {name: (torch.rand(8, generator=rng) + 0.5).to(device) for name in ("alpha", "beta", "limit")}
    routing = {"router_logits": logits, "top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
    expected = call(x, layer.weights(**numbers), **routing)
    names = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
    for shuffled in (False, True):
        result = oxmoe.trtllm_fp8_block_scale_moe(
            logits,
            **arguments(layer, x),
            **as_trtllm(layer, shuffled=shuffled),
            use_shuffled_weight=shuffled,
            **{names[name]: value for name, value in numbers.items()},
        )
        assert same_bits(result, expected)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("SwigluStep", {"clamp": "after", "limit": 7.0}),
        ("Geglu", {"activation": "gelu"}),
        ("Relu2", {"activation": "relu2", "gated": False}),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_activations(name: str, own: dict[str, Any], shuffled: bool, device: str, rng: torch.Generator) -> None:
    gated = name != "Relu2"
    shape = SHAPE if gated else Shape("trtllm-mxfp8", 8, 3, 256, 128, bias=True).with_options(**own)
    layer = make_mxfp8(shape, device, rng, bias_dtype=torch.float32)
    x, logits = layer.x(20, rng), tie_free_logits(20, 8, rng).to(device)
    given = {**arguments(layer, x), **as_trtllm(layer, shuffled=shuffled, gated=gated), "use_shuffled_weight": shuffled}
    given["activation_type"] = SimpleNamespace(name=name)
    routing = {"router_logits": logits, "top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
    expected = call(x, layer.weights(**own), **routing)
    result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
    assert bool(result.any()) and same_bits(result, expected)
    if number := {"Geglu": 4, "Relu2": 6}.get(name):
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given | {"activation_type": number}), expected)
    tensors = {part: value for part, value in given.items() if part.startswith("gemm")}
    how = {"activation_type": SimpleNamespace(name=name), "use_shuffled_weight": shuffled, "fp8_quantization_type": MX}
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(**tensors, **how)
    assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given, weights=made), expected)
    if name == "SwigluStep":
        limits = (torch.rand(8, generator=rng) + 0.1).to(device)
        expected = call(x, layer.weights(clamp="after", limit=limits), **routing)
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **given, gemm1_clamp_limit=limits), expected)
    unfit = "SwigluStep takes gemm1_clamp_limit" if name == "SwigluStep" else f"{name} takes no such numbers"
    with pytest.raises(ValueError, match=f"^gemm1_alpha: {unfit}"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **given, gemm1_alpha=torch.ones(8, device=device))
    blocks = {**given, "fp8_quantization_type": 1, "hidden_states_scale": None}
    with pytest.raises(NotImplementedError, match=r"no kernel for activation_type .*; served: .* with MxFp8 Geglu"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **blocks)


def test_workspace_buffer(device: str, rng: torch.Generator) -> None:
    """A buffer of the right size is written to; a smaller one is left alone, and the result is the same."""
    layer = make_mxfp8(SHAPE, device, rng, bias_dtype=torch.float32)
    x, logits = layer.x(9, rng), tie_free_logits(9, 8, rng).to(device)
    size = oxmoe.trtllm_fused_moe_workspace_size(9, 256, 128, 8, 3, quant_mode="mxfp8", device=device)
    assert size == oxmoe.workspace_bytes(layer.weights(), 9, 3)
    given = {**arguments(layer, x), **as_trtllm(layer), "use_shuffled_weight": True}
    expected = oxmoe.trtllm_fp8_block_scale_moe(logits, **given)
    tensors = {part: value for part, value in given.items() if part.startswith("gemm")}
    how = {"use_shuffled_weight": True, "fp8_quantization_type": MX}
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(**tensors, **how)
    for room, weights in ((size, None), (size, made), (size - 1, None), (size - 1, made)):
        memory = torch.full((size + 256,), 0x5A, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % 256
        buffer = memory[start : start + room]
        result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given, workspace_buffer=buffer, weights=weights)
        assert same_bits(result, expected) and bool((buffer != 0x5A).any()) == (room == size)
    with pytest.raises(RuntimeError, match="workspace_buffer: dtype must be int8 or uint8, got float32"):
        oxmoe.trtllm_fp8_block_scale_moe(logits, **given, workspace_buffer=torch.zeros(size, device=device))


def test_experts_of_two_ranks(device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, device, rng)
    x, logits = layer.x(30, rng), tie_free_logits(30, SHAPE.experts, rng).to(device)
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        tensors = (layer.w13, layer.w2, layer.w13_scale, layer.w2_scale, layer.b13, layer.b2)
        mine = Mxfp8(SHAPE, *(None if t is None else t[part].contiguous() for t in tensors))
        given = arguments(mine, x, local_expert_offset=4 * rank, local_num_experts=4, use_shuffled_weight=True)
        result = oxmoe.trtllm_fp8_block_scale_moe(logits, **given, **as_trtllm(mine))
        routing = {"router_logits": logits, "top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
        assert same_bits(result, call(x, mine.weights(), **routing, ep_size=2, ep_rank=rank))


def test_refused(rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, "cpu", rng)
    x, logits = layer.x(5, rng), tie_free_logits(5, SHAPE.experts, rng)
    given = {**arguments(layer, x), **as_trtllm(layer), "use_shuffled_weight": True}

    def refused(error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            oxmoe.trtllm_fp8_block_scale_moe(logits, **{**given, **options})

    message = r"hidden_states_scale: expected uint8 of shape \[5, 8\], got float32 \[2, 5\]"
    refused(ValueError, message, hidden_states_scale=torch.ones((2, 5)))
    fp8 = oxmoe.ExpertWeights.fp8_block(layer.w13, layer.w2, torch.ones(8, 2, 2), torch.ones(8, 2, 1))
    refused(ValueError, r"weights: expected mxfp8 experts \(fp8_quantization_type\), got fp8_block", weights=fp8)
    scale = given["gemm1_weights_scale"]
    message = (
        r"use_shuffled_weight needs scales of 8 experts in tiles of 128 x 4, 256 x 8 each, got shape \[8, 256, 7\]"
    )
    refused(ValueError, message, gemm1_weights_scale=scale[..., :7])
    refused(NotImplementedError, "weight_layout: no kernel for 1; served are MajorK", weight_layout=1)
    refused(NotImplementedError, "no kernel for fp8_quantization_type 3; served: .* MxFp8", fp8_quantization_type=3)
    refused(ValueError, "needs a multiple of 32 rows, got 250", gemm1_weights=given["gemm1_weights"][:, :250])
    with pytest.raises(ValueError, match="use_shuffled_weight needs a multiple of 32 rows, got 48"):
        flashinfer_trtllm_layouts.unshuffled(torch.zeros(2, 48, 64), 32)
