"""flashinfer's layers for Hopper under their names: `mono_moe` and `cute_dsl_fused_moe_bf16`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oxmoe
from cases import Shape, make_layer, make_routing, make_x
from fp8_cases import make_fp8
from oxmoe.formats.nvfp4 import interleave_w13_halves
from oxmoe.peers import flashinfer_hopper as hopper
from oxmoe.testing import relative_norm, same_bits

FP8 = Shape("mono", 8, 3, 256, 128)
PLAIN = Shape("cutedsl", 6, 2, 128, 64, options=(("layout", "up_gate"),))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_mono_moe(tokens: int, scoring: str, device: str, rng: torch.Generator) -> None:
    made: Any = make_fp8(FP8, device, rng)
    x = make_x(tokens, FP8, torch.bfloat16, device, rng)
    logits = torch.randn(tokens, FP8.experts, generator=rng).bfloat16().to(device)
    weights = oxmoe.ExpertWeights.fp8_block(made.w13, made.w2, made.w13_scale, made.w2_scale)
    options: dict[str, Any] = {"scoring_func": scoring, "renormalize": scoring == "softmax"}
    expected = oxmoe.moe(x, weights, router_logits=logits, top_k=3, **options)
    blocks = (made.w13, made.w13_scale, made.w2, made.w2_scale)
    out, scratchpad = torch.full_like(x, torch.nan), hopper.alloc_scratchpad(device)
    assert hopper.has_monomoe() and scratchpad.numel() == hopper.get_scratchpad_size_bytes()
    result = hopper.mono_moe(x, logits, *blocks, 3, **options, out=out, scratchpad=scratchpad)
    assert result is out and bool(expected.any()) and relative_norm(out, expected) < 1e-2
    nothing = (None, None, None, None)
    assert same_bits(hopper.mono_moe(x, logits, *nothing, 3, **options, weights=weights), expected)
    with pytest.raises(NotImplementedError, match="interleave_up: no kernel for rows that interleave_for_tma_wgmma_up"):
        hopper.mono_moe(x, logits, *blocks, 3, interleave_up=False)
    with pytest.raises(ValueError, match="scoring_func: expected 'softmax' or 'sigmoid', got 'identity'"):
        hopper.mono_moe(x, logits, *blocks, 3, scoring_func="identity")
    with pytest.raises(ValueError, match="expert_scales_up: needed where weights is None"):
        hopper.mono_moe(x, logits, made.w13, None, made.w2, made.w2_scale, 3)


ACTIVATIONS = {"Swiglu": "silu", "GegluTanh": "gelu_tanh", "Relu2": "relu2", "Situ": "situ"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_cute_dsl(name: str, place: tuple[str, torch.dtype], rng: torch.Generator) -> None:
    device, dtype = place
    gated = name != "Relu2"
    shape = PLAIN if gated else PLAIN.with_options(gated=False)
    made: Any = make_layer(shape, dtype, device, rng)
    x = make_x(9, shape, dtype, device, rng)
    gates, ids = (part.to(device) for part in make_routing("uniform", 9, 12, 2, rng))
    numbers = {"alpha": 1.5, "beta": 0.5, "limit": 3.0} if name == "Swiglu" else {}
    options: dict[str, Any] = {"activation": ACTIVATIONS[name], "gated": gated, **numbers}
    if gated:
        options["layout"] = "up_gate"
    constructor = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    weights = getattr(oxmoe.ExpertWeights, constructor)(made.w13, made.w2, **options)
    w1 = interleave_w13_halves(made.w13, 32) if gated else made.w13
    assert not gated or not same_bits(w1, made.w13)
    given: dict[str, Any] = {f"swiglu_{name}": value for name, value in numbers.items()}
    if name == "Situ":  # flashinfer selects it by its numbers, with the activation Swiglu
        given = {"situ_beta": 1.5, "situ_linear_beta": 0.75}
        weights = getattr(oxmoe.ExpertWeights, constructor)(made.w13, made.w2, **options, **given)
    given |= {"activation_type": SimpleNamespace(name=name.replace("Situ", "Swiglu")), "num_local_experts": 6}
    hopper.cache.clear()
    for rank in range(2):
        expected = oxmoe.moe(x, weights, gates, ids, ep_size=2, ep_rank=rank)
        out = torch.full_like(x, torch.nan)
        operands = (x, ids.int(), gates, w1, made.w2, 12, 2)
        result = hopper.cute_dsl_fused_moe_bf16(*operands, local_expert_offset=6 * rank, moe_output=out, **given)
        assert result is out and bool(expected.any()) and same_bits(out, expected)
    assert len(hopper.cache) == int(gated)
    if gated:
        # The next call notices a write to the weights.
        w1[:, :1] += 1
        assert not same_bits(hopper.cute_dsl_fused_moe_bf16(*operands, local_expert_offset=6, **given), expected)


def test_ranks_of_other_sizes(rng: torch.Generator) -> None:
    """A rank may hold any experts in a row: 6 of 12 from 3 on, and 6 of 7."""
    made: Any = make_layer(PLAIN, torch.bfloat16, "cpu", rng)
    x = make_x(9, PLAIN, torch.bfloat16, "cpu", rng)
    weights = oxmoe.ExpertWeights.bf16(made.w13, made.w2, layout="up_gate")
    w1 = interleave_w13_halves(made.w13, 32)
    for experts, offset in ((12, 3), (7, 0), (7, 1)):
        gates, ids = make_routing("uniform", 9, experts, 2, rng)
        ids[2, 0] = -1
        local = torch.where((ids >= offset) & (ids < offset + 6), ids - offset, -1)
        expected = oxmoe.moe(x, weights, gates, local)
        result = hopper.cute_dsl_fused_moe_bf16(x, ids.int(), gates, w1, made.w2, experts, 2, 6, offset)
        assert bool(result.any()) and same_bits(result, expected)
    with pytest.raises(ValueError, match="topk_ids"):
        hopper.cute_dsl_fused_moe_bf16(x, ids.int() + 40, gates, w1, made.w2, 12, 2, 6, 3)


def test_bf16_wrapper(place: tuple[str, torch.dtype], rng: torch.Generator) -> None:
    device, dtype = place
    made: Any = make_layer(PLAIN, dtype, device, rng)
    for name, options in (("Swiglu", {"swiglu_alpha": 1.5, "swiglu_beta": 0.5, "swiglu_limit": 3.0}), ("Relu2", {})):
        gated = name == "Swiglu"
        w13 = made.w13 if gated else made.w13[:, : PLAIN.intermediate].contiguous()
        w1 = interleave_w13_halves(w13, 32) if gated else w13
        kind = SimpleNamespace(name=name)
        moe = oxmoe.CuteDslBf16MoEWrapper(
            12, 2, PLAIN.hidden, PLAIN.intermediate, 6, 6, dtype, activation_type=kind, **options
        )
        for tokens in (0, 1, 9):
            x = make_x(tokens, PLAIN, dtype, device, rng)
            gates, ids = (part.to(device) for part in make_routing("uniform", tokens, 12, 2, rng))
            expected = hopper.cute_dsl_fused_moe_bf16(
                x, ids.int(), gates, w1, made.w2, 12, 2, 6, 6, activation_type=kind, **options
            )
            out = torch.full_like(x, torch.nan)
            assert moe.run(x, ids.int(), gates, w1, made.w2, moe_output=out) is out and same_bits(out, expected)
            assert same_bits(moe.run(x, ids.int(), gates, w1, made.w2, (128,)), expected)
    with pytest.raises(ValueError, match=r"w2_weight: expected shape \(6, .*got"):
        moe.run(x, ids.int(), gates, w1, made.w2[:5])
    with pytest.raises(ValueError, match=r"x: expected dtype .* \(output_dtype\), got"):
        moe.run(x.double(), ids.int(), gates, w1, made.w2)
    with pytest.raises(NotImplementedError, match="activation_type: no kernel for 'Gelu'"):
        oxmoe.CuteDslBf16MoEWrapper(12, 2, 64, 32, activation_type="Gelu")
    with pytest.raises(ValueError, match="local_expert_offset: experts 9 to 15"):
        oxmoe.CuteDslBf16MoEWrapper(12, 2, 64, 32, 6, 9)


def test_cute_dsl_refuses(rng: torch.Generator) -> None:
    made: Any = make_layer(PLAIN, torch.bfloat16, "cpu", rng)
    x = make_x(3, PLAIN, torch.bfloat16, "cpu", rng)
    gates, ids = make_routing("uniform", 3, 6, 2, rng)
    operands: tuple[Any, ...] = (x, ids.int(), gates, made.w13, made.w2)
    for error, words, arguments, options in (
        (ValueError, "situ_linear_beta: needs situ_beta", (6, 2), {"situ_linear_beta": 1.0}),
        (ValueError, "not with situ_beta", (6, 2), {"situ_beta": 1.0, "swiglu_alpha": 1.5}),
        (NotImplementedError, "activation_type: no kernel for 'Situ'", (6, 2), {"activation_type": 10}),
        (NotImplementedError, "activation_type: no kernel for 'Gelu'", (6, 2), {"activation_type": "Gelu"}),
        (ValueError, "local_expert_offset: experts 7 to 13 .* are not among num_experts 12", (12, 2, 6, 7), {}),
        (ValueError, 'w1_weight: dimension 0 "experts": expected 12, got 6', (12, 2), {}),
        (ValueError, 'token_selected_experts: dimension 1 "top_k": expected 3, got 2', (6, 3), {}),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            hopper.cute_dsl_fused_moe_bf16(*operands, *arguments, **options)
