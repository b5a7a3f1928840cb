"""Activations of flashinfer's trtllm-gen layers: what alpha, beta, limits and factors of the output mean in each
format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from nvfp4_cases import make as make_nvfp4
from oxmoe.peers import flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_cases import CALLS, LAYERS, SHAPE, bf16, fp8, nv, on, routed, run, sizes, tokens_of
from trtllm_layouts import shuffle


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_trtllm_formats.cache.clear()


def test_swiglu_numbers(device: str, rng: torch.Generator) -> None:
    """alpha, beta and limit of bf16 experts count as they are; SwigluStep has a limit of 7 if none is given."""
    _, given, _ = bf16(device, rng, shuffled=False, layout=0)
    hidden, own = tokens_of("bf16", 9, device, rng)
    gates, ids = routed(9, device, rng)
    numbers = {name: (torch.rand(8, generator=rng) + 0.2).to(device) for name in ("alpha", "beta", "limit")}
    named = {f"gemm1_{'clamp_limit' if name == 'limit' else name}": value for name, value in numbers.items()}
    for options, own_options in (
        (named, numbers),
        ({"activation_type": SimpleNamespace(name="SwigluStep")}, {"clamp": "after", "limit": 7.0}),
    ):
        weights = oxmoe.ExpertWeights.bf16(
            given["gemm1_weights"], given["gemm2_weights"], layout="up_gate", **own_options  # type: ignore[arg-type]
        )  # fmt: skip
        expected = oxmoe.moe(**own, weights=weights, topk_weights=gates, topk_ids=ids)
        result = oxmoe.trtllm_bf16_routed_moe(topk_ids=(ids, gates), **hidden, **given, **sizes(), **options)
        assert bool(result.any()) and same_bits(result, expected)


def test_situ(device: str, rng: torch.Generator) -> None:
    """gemm1_alpha and gemm1_beta are the bounds of gate and up, of dequantised numbers also in NVFP4, and 1 by default.
    There output1_scale_scalar is the factor of GEMM1's output alone."""
    bounds = {"situ_beta": torch.rand(8, generator=rng) + 0.5, "situ_linear_beta": torch.rand(8, generator=rng) + 0.5}
    bounds = {name: value.to(device) for name, value in bounds.items()}
    named = {"gemm1_alpha": bounds["situ_beta"], "gemm1_beta": bounds["situ_linear_beta"]}
    ones = {"situ_beta": 1.0, "situ_linear_beta": 1.0}
    nothing = dict.fromkeys(("gemm1_alpha", "gemm1_beta"))
    for format in ("bf16", "mxfp4", "nvfp4"):
        options: dict[str, Any] = {"shuffled": True, "layout": 0} if format == "bf16" else {}
        _, given, _ = LAYERS[format](device, rng, **options)
        hidden, own = tokens_of(format, 9, device, rng)
        gates, ids = routed(9, device, rng)
        if format == "nvfp4":
            given["output1_scale_scalar"] = torch.full_like(given["output1_scale_gate_scalar"], 128.0)
        for kind, numbers, expected_numbers in ((10, named, bounds), (SimpleNamespace(name="Situ"), nothing, ones)):
            call = {**given, **numbers, "activation_type": kind}
            prepared = CALLS[format][2](**call)
            assert prepared.activation == "situ"
            for name, value in expected_numbers.items():
                assert getattr(prepared, name) is value or getattr(prepared, name) == value
            result = run(CALLS[format][1], format, topk_ids=(ids, gates), **hidden, **call, **sizes())
            expected = oxmoe.moe(**own, weights=prepared, topk_weights=gates, topk_ids=ids)
            assert bool(result.any()) and same_bits(result, expected)
        with pytest.raises(NotImplementedError, match="gemm1_clamp_limit: no kernel for Situ with a limit"):
            CALLS[format][2](**{**call, "gemm1_clamp_limit": torch.ones(8, device=device)})
    _, given, _ = fp8(device, rng)
    hidden, _ = tokens_of("fp8", 9, device, rng)
    with pytest.raises(NotImplementedError, match="no kernel for 'Situ' with fp8 weights of one scale"):
        run(CALLS["fp8"][1], "fp8", topk_ids=(ids, gates), **hidden, **{**given, "activation_type": 10}, **sizes())


def test_situ_of_nvfp4_is_the_layers(device: str, rng: torch.Generator) -> None:
    _, given, _ = nv(device, torch.Generator().manual_seed(3))
    made: Any = make_nvfp4(SHAPE, torch.Generator().manual_seed(3))
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, made.w13_global[:, 0].contiguous(), made.w2_global)
    numbers = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
    weights = oxmoe.ExpertWeights.nvfp4(
        *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=128.0, layout="up_gate",
        activation="situ", **numbers,
    )  # fmt: skip
    given |= {"gemm1_alpha": torch.full((8,), 4.0), "gemm1_beta": torch.full((8,), 25.0), "activation_type": 10}
    given["output1_scale_scalar"] = torch.full_like(given["output1_scale_gate_scalar"], 128.0)
    hidden, tokens = tokens_of("nvfp4", 9, device, rng)
    gates, ids = routed(9, device, rng)
    expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
    result = run(CALLS["nvfp4"][1], "nvfp4", topk_ids=(ids, gates), **hidden, **on(device, given), **sizes())
    assert bool(result.any()) and same_bits(result, expected)


def test_fp8_without_a_gate_and_weights_on_input(device: str, rng: torch.Generator) -> None:
    for gated in (False, True):
        weights, given, scale = fp8(device, rng, gated=gated)
        hidden, own = tokens_of("fp8", 9, device, rng)
        gates, ids = routed(9, device, rng)
        operands = {"weights": weights, "topk_weights": gates, "topk_ids": ids, **own, **scale}
        call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
        for on_input in (False, True):
            expected = oxmoe.moe(**operands, apply_router_weight_on_input=on_input)
            result = run(CALLS["fp8"][1], "fp8", **call, use_routing_scales_on_input=on_input)
            assert bool(result.any()) and same_bits(result, expected)


def test_fp8_numbers_of_experts(device: str, rng: torch.Generator) -> None:
    """A limit is in units of GEMM1's sums; all experts quantise with the smallest factor."""
    _, given, scale = fp8(device, rng)
    hidden, own = tokens_of("fp8", 9, device, rng)
    gates, ids = routed(9, device, rng)
    of_sums, limits = given["output1_scales_gate_scalar"], torch.full((8,), 0.75, device=device)
    factors = (2.0 ** torch.randint(6, 10, (8,), generator=rng)).to(device)
    factors[0] = 2.0**6
    changed = {
        "output1_scales_scalar": of_sums * factors,
        "output2_scales_scalar": given["output2_scales_scalar"] * 2.0**8 / factors,
        "gemm1_clamp_limit": limits / of_sums,
        "activation_type": SimpleNamespace(name="SwigluStep"),
    }
    plain = {name: given[name].cpu().view(torch.uint8) for name in ("gemm1_weights", "gemm2_weights")}
    rows = torch.arange(256).view(1, 256, 1)
    places = shuffle(rows, True)[0, :, 0].argsort(), shuffle(rows, False)[0, :, 0].argsort()
    w13, w2 = (
        plain[name][:, order].contiguous().view(torch.float8_e4m3fn).to(device)
        for name, order in zip(plain, places, strict=True)
    )
    weights = oxmoe.ExpertWeights.fp8_tensor(
        w13, w2, of_sums, given["output2_scales_scalar"] * 2.0**8, a13_scale=torch.ones(1, device=device),
        a2_scale=torch.tensor([2.0**-6], device=device), layout="up_gate", clamp="after",
        limit=(limits / of_sums) * of_sums,
    )  # fmt: skip
    expected = oxmoe.moe(**own, **scale, weights=weights, topk_weights=gates, topk_ids=ids)
    result = run(CALLS["fp8"][1], "fp8", topk_ids=(ids, gates), **hidden, **given | changed, **sizes())
    assert bool(result.any()) and same_bits(result, expected)


def test_step_of_nvfp4(device: str, rng: torch.Generator) -> None:
    """SwigluStep's limit is in units of GEMM1's sums, and 7 of dequantised numbers by default. An alpha of ones, which
    flashinfer's own preparation gives, changes nothing."""
    seed = int(torch.randint(1 << 20, (), generator=rng))
    weights, given, _ = nv(device, torch.Generator().manual_seed(seed))
    made: Any = make_nvfp4(SHAPE, torch.Generator().manual_seed(seed))
    of_sums = made.w13_global[:, 0].contiguous()
    own = (made.w13, made.w2, made.w13_scale, made.w2_scale, of_sums, made.w2_global)
    hidden, tokens = tokens_of("nvfp4", 9, device, rng)
    gates, ids = routed(9, device, rng)
    call = {"topk_ids": (ids, gates), **hidden, **given, **sizes()}
    expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
    assert same_bits(run(CALLS["nvfp4"][1], "nvfp4", **call | {"gemm1_alpha": torch.ones(8, device=device)}), expected)
    powers = 2.0 ** torch.randint(-3, 1, (8,), generator=rng)
    for limit, raw in ((powers, powers / of_sums), (7.0, None)):
        step = {"layout": "up_gate", "clamp": "after", "limit": limit if raw is None else (raw * of_sums).to(device)}
        weights = oxmoe.ExpertWeights.nvfp4(
            *(part.to(device) for part in own), input_global_scale=1.0, a2_global_scale=128.0, **step
        )
        expected = oxmoe.moe(**tokens, weights=weights, topk_weights=gates, topk_ids=ids)
        changed = {"activation_type": SimpleNamespace(name="SwigluStep")}
        changed["gemm1_clamp_limit"] = None if raw is None else raw.to(device)
        result = run(CALLS["nvfp4"][1], "nvfp4", **call | changed)
        assert bool(result.any()) and same_bits(result, expected)
    with pytest.raises(ValueError, match="gemm1_alpha: SwigluStep takes gemm1_clamp_limit alone"):
        run(CALLS["nvfp4"][1], "nvfp4", **call | changed | {"gemm1_alpha": torch.ones(8, device=device)})
