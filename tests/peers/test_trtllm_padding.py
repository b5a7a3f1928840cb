"""flashinfer's pad_trtllm_moe_weights, and its calls with valid_hidden_size and valid_intermediate_size: the bits are
those of the layer without padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_x, tie_free_logits
from mxfp4_cases import make_blocks
from mxfp8_cases import make_mxfp8
from nvfp4_cases import make as make_nvfp4
from oxmoe import nvfp4
from oxmoe.peers import flashinfer_trtllm, flashinfer_trtllm_formats
from oxmoe.testing import same_bits
from trtllm_layouts import blocked, interleave, shuffle

SHAPE = Shape("trtllm-padded", 6, 3, 160, 96, options=(("layout", "up_gate"),))
BIASED = Shape("trtllm-padded", 6, 3, 160, 96, bias=True, options=(("layout", "up_gate"),))
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    flashinfer_trtllm.cache.clear()
    flashinfer_trtllm_formats.cache.clear()


def pad(made: Any, gated: bool = True, **alignments: int) -> oxmoe.TrtllmMoePaddedWeights:
    parts = (made.w13, made.w13_scale, made.w2, made.w2_scale)
    options: dict[str, Any] = {"is_gated_act": gated, **alignments}
    return oxmoe.pad_trtllm_moe_weights(*(part.cpu() for part in parts), SHAPE.hidden, SHAPE.intermediate, **options)


def shuffled(padded: oxmoe.TrtllmMoePaddedWeights, gated: bool, device: str) -> dict[str, Tensor]:
    given = {}
    for name, weights, scale, halves in (
        ("gemm1", padded.gemm1_weights, padded.gemm1_weights_scale, gated),
        ("gemm2", padded.gemm2_weights, padded.gemm2_weights_scale, False),
    ):
        given[f"{name}_weights"] = shuffle(weights.view(torch.uint8), halves).view(weights.dtype)
        given[f"{name}_weights_scale"] = interleave(shuffle(scale.view(torch.uint8), halves)).view(scale.dtype)
    return {name: tensor.to(device) for name, tensor in given.items()}


def sizes(padded: Any) -> dict[str, Any]:
    return {
        "num_experts": SHAPE.experts,
        "top_k": SHAPE.top_k,
        "n_group": None,
        "topk_group": None,
        "intermediate_size": padded.intermediate_size,
        "local_expert_offset": 0,
        "local_num_experts": SHAPE.experts,
        "routed_scaling_factor": None,
        "valid_hidden_size": padded.valid_hidden_size,
        "valid_intermediate_size": padded.valid_intermediate_size,
        "routing_bias": None,
    }


def wide(x: Tensor, columns: int) -> Tensor:
    """Pads x with numbers that must not be read."""
    behind = torch.full((x.shape[0], columns - x.shape[1]), 0x77, dtype=torch.uint8, device=x.device)
    behind = behind.repeat_interleave(x.element_size(), 1)
    return torch.cat((x.view(torch.uint8), behind), 1).view(x.dtype)


def routed(tokens: int, device: str, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    gates, ids = make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng)
    if tokens:
        ids[0, 1] = -1
    return gates.to(device), ids.to(device)


@pytest.mark.parametrize("gated", [True, False])
def test_padding(gated: bool, rng: torch.Generator) -> None:
    """Rows, columns and the bytes between them, one by one."""
    shape = SHAPE if gated else Shape("trtllm-padded", 6, 3, 160, 96).with_options(activation="relu2")
    halves = 2 if gated else 1
    for made, each, block, neutral in (
        (make_mxfp8(shape, "cpu", rng), 1, 32, 127),
        (make_nvfp4(shape, rng, a4=True), 2, 16, 0x38),
    ):
        padded = pad(made, gated)
        assert padded[4:] == (512, 128, 160, 96)
        for result, plain, fill, rows, size, columns, unit in (
            (padded.gemm1_weights, made.w13, 0, 128, 96, 512, each),
            (padded.gemm1_weights_scale, made.w13_scale, neutral, 128, 96, 512, block),
            (padded.gemm2_weights, made.w2, 0, 256, 160, 128, each),
            (padded.gemm2_weights_scale, made.w2_scale, neutral, 256, 160, 128, block),
        ):
            parts = halves if plain.shape[1] == halves * 96 and size == 96 else 1
            assert result.dtype == plain.dtype and tuple(result.shape) == (6, parts * rows, columns // unit)
            for half in range(parts):
                given = plain.view(torch.uint8)[:, half * size : (half + 1) * size]
                got = result.view(torch.uint8)[:, half * rows : (half + 1) * rows]
                assert torch.equal(got[:, :size, : given.shape[2]], given)
                assert bool((got[:, size:] == fill).all()) and bool((got[:, :, given.shape[2] :] == fill).all())


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("plain", [False, True])
def test_mxfp8(plain: bool, tokens: int, device: str, rng: torch.Generator) -> None:
    layer = make_mxfp8(BIASED if plain else SHAPE, device, rng, bias_dtype=torch.float32)
    padded, x, (gates, ids) = pad(layer, hidden_alignment=256), layer.x(tokens, rng), routed(tokens, device, rng)
    expected = oxmoe.moe(x, layer.weights(), gates, ids)
    assert tokens == 0 or bool(expected.any())
    given = shuffled(padded, True, device)
    if plain:  # rows as they are, with biases
        given = {name: getattr(padded, name).to(device) for name in given}
    codes, scales = oxmoe.mxfp8_quantize(x, False)
    hidden: dict[str, Any] = {
        "hidden_states": wide(codes, padded.hidden_size),
        "hidden_states_scale": wide(scales.view(tokens, 5), padded.hidden_size // 32),
    }
    how = {**sizes(padded), "fp8_quantization_type": 2, "use_shuffled_weight": not plain}
    out = torch.full_like(x, torch.nan)
    if not plain:
        for _ in range(2):
            result = oxmoe.trtllm_fp8_block_scale_routed_moe((ids, gates), **hidden, **given, **how, output=out)
            assert result is out and same_bits(out, expected) and len(flashinfer_trtllm.cache) == 1
        rows, _, _ = oxmoe.trtllm_fp8_block_scale_routed_moe((ids, gates), **hidden, **given, **how, do_finalize=False)
        assert rows.shape == (tokens * 3, 160)
    else:
        bias = {"gemm1_bias": layer.b13, "gemm2_bias": layer.b2}
        bias["gemm1_bias"] = torch.nn.functional.pad(layer.b13.unflatten(1, (2, -1)), (0, 32)).flatten(1)
        bias["gemm2_bias"] = torch.nn.functional.pad(layer.b2, (0, 96))
        logits = tie_free_logits(tokens, SHAPE.experts, rng).to(device)
        method: dict[str, Any] = {"top_k": 3, "scoring_func": "softmax_topk", "renormalize": False}
        expected = oxmoe.moe(x, layer.weights(), router_logits=logits, **method)
        how |= {"routing_method_type": 1}
        result = oxmoe.trtllm_fp8_block_scale_moe(logits, **hidden, **given, **how, **bias)
        assert same_bits(result, expected)
        given |= bias  # type: ignore[arg-type]
        hidden = {"hidden_states": wide(x, padded.hidden_size), "hidden_states_scale": None}
        assert same_bits(oxmoe.trtllm_fp8_block_scale_moe(logits, **hidden, **given, **how), expected)
    made = oxmoe.prepare_trtllm_fp8_block_scale_moe(
        **given, use_shuffled_weight=not plain, fp8_quantization_type=2, valid_hidden_size=160,
        valid_intermediate_size=96,
    )  # fmt: skip
    call: Any = oxmoe.trtllm_fp8_block_scale_moe if plain else oxmoe.trtllm_fp8_block_scale_routed_moe
    assert same_bits(call(logits if plain else (ids, gates), **hidden, **given, **how, weights=made), expected)
    size = oxmoe.trtllm_fused_moe_workspace_size(
        max(tokens, 1), 256, 128, 6, 3, quant_mode="mxfp8", device=device, valid_hidden_size=160,
        valid_intermediate_size=96,
    )  # fmt: skip
    assert size == oxmoe.workspace_bytes(made, max(tokens, 1), 3)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_fp4(format: str, gated: bool, device: str, rng: torch.Generator) -> None:
    options: dict[str, Any] = {"layout": "up_gate"} if gated else {"activation": "relu2"}
    shape = Shape("trtllm-padded", 6, 3, 160, 96, bias=format == "mxfp4").with_options(**options)
    x, (gates, ids) = make_x(9, shape, torch.bfloat16, device, rng), routed(9, device, rng)
    given: dict[str, Any] = dict.fromkeys(("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta"))
    given |= dict.fromkeys(("gemm1_clamp_limit", "output1_scale_scalar", "output1_scale_gate_scalar"))
    given |= {"output2_scale_scalar": None, "activation_type": 3 if gated else SimpleNamespace(name="Relu2")}
    made: Any
    if format == "mxfp4":
        made = make_blocks(shape, "bf16", device, rng, bias_dtype=torch.float32)
        weights, hidden = made.weights(), {"hidden_states": wide(x, 512), "hidden_states_scale": None}
        expected = oxmoe.moe(x, weights, gates, ids)
        b13 = torch.nn.functional.pad(made.b13.cpu().unflatten(1, (2 if gated else 1, -1)), (0, 32)).flatten(1)
        given["gemm1_bias"] = shuffle(b13, gated).to(device)
        given["gemm2_bias"] = shuffle(torch.nn.functional.pad(made.b2.cpu(), (0, 96)), False).to(device)
    else:
        made = make_nvfp4(shape, rng)
        of_sums, quantises = made.w13_global[:, 0].contiguous().to(device), 128.0
        own = (part.to(device) for part in (made.w13, made.w2, made.w13_scale, made.w2_scale))
        weights = oxmoe.ExpertWeights.nvfp4(
            *own, of_sums, made.w2_global.to(device), input_global_scale=1.0, a2_global_scale=quantises, **options
        )
        codes, scales = nvfp4.fp4_quantize(x, torch.ones(1, device=device), is_sf_swizzled_layout=False)
        scales = scales.view(E4M3).reshape(9, 10)
        expected = oxmoe.moe(codes, weights, gates, ids, x_scale=scales)
        hidden = {"hidden_states": wide(codes, 256), "hidden_states_scale": wide(scales, 32)}
        given["output1_scale_scalar"] = of_sums * quantises if gated else torch.full_like(of_sums, quantises)
        given |= {"output1_scale_gate_scalar": of_sums, "output2_scale_scalar": made.w2_global.to(device)}
    assert bool(expected.any())
    padded = pad(made, gated)
    given |= shuffled(padded, gated, device)
    for _ in range(2):
        (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe((ids, gates), **hidden, **given, **sizes(padded))
        assert same_bits(result, expected) and len(flashinfer_trtllm_formats.cache) == 1
    whole = {"valid_hidden_size": 160, "valid_intermediate_size": 96}
    prepared = oxmoe.prepare_trtllm_fp4_block_scale_moe(**given, **whole)
    (result,) = oxmoe.trtllm_fp4_block_scale_routed_moe(
        (ids, gates), **hidden, **given, **sizes(padded), weights=prepared
    )
    assert same_bits(result, expected)


def test_mxint4(device: str, rng: torch.Generator) -> None:
    """H and I of flashinfer's layout are multiples of 256; the layer's are not."""
    hidden, intermediate = 160, 96
    numbers = {"w13": (192, 160), "w2": (160, 96)}
    codes = {
        n: torch.randint(0, 256, (6, r, k // 2), dtype=torch.uint8, generator=rng) for n, (r, k) in numbers.items()
    }
    scales = {n: (torch.rand((6, r, k // 32), generator=rng) * 0.02).bfloat16() for n, (r, k) in numbers.items()}
    own = [codes["w13"] ^ 0x88, codes["w2"] ^ 0x88, scales["w13"], scales["w2"]]
    weights = oxmoe.ExpertWeights.int4(*(part.to(device) for part in own), layout="up_gate")
    given: dict[str, Any] = dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
    for name, part, halves, rows, columns in (("gemm1", "w13", 2, 256, 256), ("gemm2", "w2", 1, 256, 256)):
        wide_codes = torch.full((6, halves, rows, columns // 2), 0x31, dtype=torch.uint8)
        wide_scales = torch.full((6, halves, rows, columns // 32), 9.0).bfloat16()
        for result, plain in ((wide_codes, codes[part]), (wide_scales, scales[part])):
            plain = plain.unflatten(1, (halves, -1))
            result[:, :, : plain.shape[2], : plain.shape[3]] = plain
        given[f"{name}_weights"] = blocked(shuffle(wide_codes.flatten(1, 2), halves == 2)).to(device)
        given[f"{name}_weights_scale"] = interleave(shuffle(wide_scales.flatten(1, 2), halves == 2)).to(device)
    x, (gates, ids) = torch.randn((9, hidden), generator=rng).bfloat16().to(device), routed(9, device, rng)
    expected = oxmoe.moe(x, weights, gates, ids)
    padded = SimpleNamespace(intermediate_size=256, valid_hidden_size=hidden, valid_intermediate_size=intermediate)
    how = sizes(padded)
    del how["routing_bias"]
    (result,) = oxmoe.trtllm_mxint4_block_scale_routed_moe((ids, gates), wide(x, 256), **given, **how)
    assert bool(expected.any()) and same_bits(result, expected)
    prepared = oxmoe.prepare_trtllm_mxint4_block_scale_moe(**given, valid_hidden_size=160, valid_intermediate_size=96)
    (result,) = oxmoe.trtllm_mxint4_block_scale_routed_moe((ids, gates), wide(x, 256), **given, **how, weights=prepared)
    assert same_bits(result, expected)


def test_refusals(rng: torch.Generator) -> None:
    layer = make_mxfp8(SHAPE, "cpu", rng)
    given = [layer.w13, layer.w13_scale, layer.w2, layer.w2_scale]
    for words, operands, options in (
        ("hidden_alignment: expected a multiple of 128, got 96", given, {"hidden_alignment": 96}),
        ("intermediate_alignment: expected 1 or more, got 0", given, {"intermediate_alignment": 0}),
        (r"gemm1_weights: expected shape \[6, 96, 160\], got \[6, 192, 160\]", given, {"is_gated_act": False}),
        (r"gemm1_weights: dimension 2: expected 160 codes .* got 100", [layer.w13[..., :100], *given[1:]], {}),
        ("gemm1_weights_scale: dimension 2: expected a scale for 32 or 16", [given[0], given[1][..., :3], *given[2:]],
         {}),
        (r"gemm2_weights: expected shape \[6, 160, 96\], got", [*given[:2], layer.w2[:, :100], given[3]], {}),
        ("gemm2_weights_scale: expected a dtype of one byte, got float32", [*given[:3], given[3].float()], {}),
        (r"gemm1_weights: expected \[E, rows, K\], got shape \(192, 160\)", [layer.w13[0], *given[1:]], {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            oxmoe.pad_trtllm_moe_weights(*operands, 160, 96, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="intermediate_size: expected a multiple of 32"):
        oxmoe.pad_trtllm_moe_weights(*given, 160, 90)
