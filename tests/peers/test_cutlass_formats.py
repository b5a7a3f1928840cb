"""flashinfer's `cutlass_fused_moe` with every format that it describes, against the layer of the same numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_layer, make_routing, make_x
from fp8_cases import make_fp8, make_fp8_tensor
from mxfp8_cases import make_mxfp8
from nvfp4_cases import make as make_nvfp4
from oxmoe import nvfp4, quantize, reference
from oxmoe.peers import flashinfer_cutlass
from oxmoe.testing import assert_close_ulp, relative_norm, same_bits

SHAPE = Shape("cutlass", 6, 3, 256, 128, bias=True, options=(("layout", "up_gate"),))
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16}
FORMATS = (*PLAIN, "fp8_block", "fp8_tensor", "mxfp8", "nvfp4")
FLAGS = {"fp8_block": "use_deepseek_fp8_block_scale", "mxfp8": "use_mxfp8_act_scaling"}


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_cutlass.cache.clear()


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


def swizzled(scales: Tensor) -> Tensor:
    return torch.stack([quantize.swizzle_scales(of.cpu(), "128x4") for of in scales]).to(scales.device)


def layer(format: str, device: str, rng: torch.Generator) -> tuple[oxmoe.ExpertWeights, dict[str, Any]]:
    """Returns ExpertWeights, and the arguments of flashinfer's call that describe the same experts."""
    made: Any
    flags = {FLAGS[format]: True} if format in FLAGS else {}
    if format in PLAIN:
        made = make_layer(SHAPE, PLAIN[format], device, rng)
        weights, scales = made.weights(), None
    elif format == "fp8_block":
        made = make_fp8(SHAPE, device, rng)
        weights, scales = made.weights(), [made.w13_scale, made.w2_scale]
    elif format == "fp8_tensor":
        made = make_fp8_tensor(SHAPE, device, rng, mode="static")
        # Scales are powers of two, whose products and quotients are exact.
        made.a13_scale, made.a2_scale = torch.tensor(2.0**-7, device=device), torch.tensor([2.0**-8], device=device)
        weights = made.weights()
        a13, a2 = made.a13_scale, made.a2_scale
        scales = [made.w13_scale * a13, 1 / a2[0], made.w2_scale * a2, a13]
    elif format == "mxfp8":
        made = make_mxfp8(SHAPE, device, rng)
        weights, unread = made.weights(), torch.ones(SHAPE.experts, device=device)
        of_weights = [swizzled(scale).view(torch.int32) for scale in (made.w13_scale, made.w2_scale)]
        scales = [of_weights[0], unread, of_weights[1], unread]
    else:
        return nvfp4_layer(device, rng)
    return weights, arguments(made, scales) | flags


def arguments(made: Any, scales: list[Tensor] | None) -> dict[str, Any]:
    return {
        "fc1_expert_weights": made.w13,
        "fc2_expert_weights": made.w2,
        "quant_scales": scales,
        "fc1_expert_biases": made.b13,
        "fc2_expert_biases": made.b2,
    }


def nvfp4_layer(device: str, rng: torch.Generator) -> tuple[oxmoe.ExpertWeights, dict[str, Any]]:
    """Makes W4A4 experts: each activation scale is one number; gate and up have one dequantisation scale."""
    made: Any = make_nvfp4(SHAPE, rng, a4=True)
    w13_global, (of_x, of_hidden) = made.w13_global[:, 0].contiguous(), (110.0, 90.0)
    (w13, w2, w13_scale, w2_scale, b13, b2, g13, g2) = on(
        device, made.w13, made.w2, made.w13_scale, made.w2_scale, made.b13, made.b2, w13_global, made.w2_global
    )
    weights = oxmoe.ExpertWeights.nvfp4(
        *(w13, w2, w13_scale, w2_scale, g13, g2),
        **{"input_global_scale": of_x, "a2_global_scale": of_hidden, "b13": b13, "b2": b2, "layout": "up_gate"},
    )
    blocks = [
        nvfp4.swizzle_blockscale(scale.view(torch.float8_e4m3fn)).view(torch.int32) for scale in (w13_scale, w2_scale)
    ]
    numbers = torch.tensor([of_x, of_hidden], device=device)
    scales = [numbers[0], blocks[0], g13, numbers[1], blocks[1], g2]
    given = arguments(SimpleNamespace(w13=w13.view(torch.int64), w2=w2.view(torch.int64), b13=b13, b2=b2), scales)
    return weights, given


def operands(format: str, device: str, rng: torch.Generator, tokens: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    x = make_x(tokens, SHAPE, PLAIN.get(format, torch.bfloat16), device, rng)
    return x, *on(device, *make_routing("uniform", tokens, SHAPE.experts, SHAPE.top_k, rng))


def fused(x: Tensor, gates: Tensor, ids: Tensor, **given: Any) -> Tensor:
    given.setdefault("output_dtype", x.dtype if x.dtype in PLAIN.values() else torch.bfloat16)
    routing = {"token_selected_experts": ids, "token_final_scales": gates}
    (result,) = oxmoe.cutlass_fused_moe(input=x, **routing, **given)
    return result


@pytest.mark.parametrize("name", ["fc1_expert_weights", "fc2_expert_weights", "quant_scales[1]", "quant_scales[4]"])
def test_packed_operands_without_bytes_beside_each_other(name: str, rng: torch.Generator) -> None:
    """Packed operands may have any dtype, but their last dimension has to be contiguous."""
    _, given = nvfp4_layer("cpu", rng)
    place = int(name[-2]) if name.endswith("]") else None
    holder, key = (given, name) if place is None else (given["quant_scales"], place)
    column = holder[key].transpose(-1, -2).contiguous().transpose(-1, -2)
    for wrong in (column, torch.zeros((), dtype=holder[key].dtype)):
        holder[key] = wrong
        with pytest.raises(ValueError, match=re.escape(f"{name}: expected")):
            oxmoe.prepare_cutlass_fused_moe(**given)


@pytest.mark.parametrize("format", FORMATS)
def test_layer(format: str, device: str, rng: torch.Generator) -> None:
    weights, given = layer(format, device, rng)
    x, gates, ids = operands(format, device, rng)
    expected = oxmoe.moe(x, weights, gates, ids)
    assert bool(expected.isfinite().all()) and bool(expected.any())
    out = torch.full_like(x, torch.nan)
    assert fused(x, gates, ids, **given, output=out) is out and same_bits(out, expected)
    # The call is repeated (from the cache, if there is one), then prepared, then in a workspace of the documented size.
    assert same_bits(fused(x, gates, ids.long(), **given), expected)
    prepared = oxmoe.prepare_cutlass_fused_moe(**given)
    nothing = {"fc1_expert_weights": None, "fc2_expert_weights": None, "quant_scales": None}
    assert same_bits(fused(x, gates, ids, **nothing, weights=prepared), expected)
    dtypes = {"x_dtype": x.dtype, "weight_dtype": given["fc1_expert_weights"].dtype}
    flags = {flag: True for flag in FLAGS.values() if flag in given}
    sizes = (SHAPE.hidden, SHAPE.intermediate, SHAPE.experts, SHAPE.top_k)
    size = oxmoe.cutlass_fused_moe_workspace_size(13, *sizes, **dtypes, **flags, device=device)
    assert size == oxmoe.workspace_bytes(weights, 13, SHAPE.top_k)
    workspace = torch.empty(size + 256, dtype=torch.uint8, device=device)
    workspace = workspace[-workspace.data_ptr() % 256 :][:size]
    assert same_bits(fused(x, gates, ids, **given, workspace_buffer=workspace.view(torch.int8)), expected)
    with pytest.raises(RuntimeError, match=r"workspace_buffer too small"):
        fused(x, gates, ids, **given, workspace_buffer=workspace[:-256])


@pytest.mark.parametrize("format", FORMATS)
def test_ranks(format: str, device: str, rng: torch.Generator) -> None:
    """ids are global ids of two ranks' experts; the bias of fc2 counts on tp_rank 0 alone."""
    weights, given = layer(format, device, rng)
    x, gates, ids = operands(format, device, rng)
    ids = ids + SHAPE.experts * (torch.arange(13, device=device) % 2)[:, None].to(ids.dtype)
    for rank in range(2):
        expected = oxmoe.moe(x, weights, gates, ids, ep_size=2, ep_rank=rank)
        assert same_bits(fused(x, gates, ids, **given, ep_size=2, ep_rank=rank), expected)
    second = fused(x, gates, ids, **given, ep_size=2, ep_rank=1, tp_size=2, tp_rank=1)
    assert same_bits(second, fused(x, gates, ids, **given | {"fc2_expert_biases": None}, ep_size=2, ep_rank=1))
    assert not same_bits(second, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens(format: str, device: str, rng: torch.Generator) -> None:
    _, given = layer(format, device, rng)
    x, gates, ids = operands(format, device, rng, tokens=0)
    assert fused(x, gates, ids, **given).shape == (0, SHAPE.hidden)


ACTIVATIONS = {
    "Swiglu": {"activation": "silu"},
    "SwigluStep": {"activation": "silu", "clamp": "after", "limit": 7.0},
    "Geglu": {"activation": "gelu"},
    "GegluTanh": {"activation": "gelu_tanh"},
    "Situ": {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0},  # flashinfer's numbers
    "Silu": {"activation": "silu", "gated": False},
    "Gelu": {"activation": "gelu", "gated": False},
    "Relu2": {"activation": "relu2", "gated": False},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, device: str, rng: torch.Generator) -> None:
    options: dict[str, Any] = ACTIVATIONS[name]
    shape = SHAPE if options.get("gated", True) else SHAPE.with_options(gated=False)
    made, x = make_layer(shape, torch.bfloat16, device, rng), make_x(40, SHAPE, torch.bfloat16, device, rng)
    # The sums are so large that SwigluStep's limit cuts them.
    x = 12 * x if name == "SwigluStep" else x
    gates, ids = on(device, *make_routing("uniform", 40, SHAPE.experts, SHAPE.top_k, rng))
    layout = {"layout": "up_gate"} if options.get("gated", True) else {}
    expected = reference.moe(x, made.w13, made.w2, gates, ids, b13=made.b13, b2=made.b2, **layout, **options)
    given = arguments(made, None)
    result = fused(x, gates, ids, **given, activation_type=SimpleNamespace(name=name))
    assert_close_ulp(result, expected)
    if name == "SwigluStep":
        assert relative_norm(fused(x, gates, ids, **given, activation_type=3), expected) > 0.1


def test_numbers_of_situ(device: str, rng: torch.Generator) -> None:
    """16-bit experts are described at each call, and NVFP4 experts are prepared once. 10 is the activation's number in
    0.7.2."""
    own = {
        name: (torch.rand(SHAPE.experts, generator=rng) + 0.2).to(device) for name in ("situ_beta", "situ_linear_beta")
    }
    made, (x, gates, ids) = make_layer(SHAPE, torch.bfloat16, device, rng), operands("bf16", device, rng)
    for kind in (10, SimpleNamespace(name="Situ")):
        for numbers in (own, {"situ_beta": own["situ_beta"]}):
            result = fused(x, gates, ids, **arguments(made, None), **numbers, activation_type=kind)
            options: dict[str, Any] = {"situ_linear_beta": 25.0, **numbers}
            expected = reference.moe(
                x,
                made.w13,
                made.w2,
                gates,
                ids,
                b13=made.b13,
                b2=made.b2,
                layout="up_gate",
                activation="situ",
                **options,
            )
            assert_close_ulp(result, expected)
    with pytest.raises(ValueError, match='situ_beta: only for activation "situ", got it with "silu"'):
        fused(x, gates, ids, **arguments(made, None), situ_beta=own["situ_beta"])
    with pytest.raises(ValueError, match="alpha, beta, limit: only for activation"):
        fused(x, gates, ids, **arguments(made, None), swiglu_alpha=own["situ_beta"], activation_type=10)
    _, given = layer("nvfp4", device, rng)
    x, gates, ids = operands("nvfp4", device, rng)
    prepared = oxmoe.prepare_cutlass_fused_moe(**given, **own, activation_type=10)
    assert prepared.activation == "situ" and prepared.situ_beta is own["situ_beta"]
    nothing = {"fc1_expert_weights": None, "fc2_expert_weights": None, "quant_scales": given["quant_scales"]}
    of_call = {name: value for name, value in given.items() if name not in nothing}
    assert same_bits(
        fused(x, gates, ids, **given, **own, activation_type=10),
        fused(x, gates, ids, **nothing, weights=prepared, **{k: v for k, v in of_call.items() if k.startswith("use_")}),
    )


def test_numbers_of_experts(device: str, rng: torch.Generator) -> None:
    made, (x, gates, ids) = make_layer(SHAPE, torch.bfloat16, device, rng), operands("bf16", device, rng)
    own = {name: (torch.rand(SHAPE.experts, generator=rng) + 0.2).to(device) for name in ("alpha", "beta", "limit")}
    operands_ = (x, made.w13, made.w2, gates, ids)
    expected = reference.moe(*operands_, b13=made.b13, b2=made.b2, layout="up_gate", **own)
    numbers = {f"swiglu_{name}": value for name, value in own.items()}
    result = fused(
        x, gates, ids, **arguments(made, None), **numbers, activation_type=SimpleNamespace(name="SwigluBias")
    )
    assert_close_ulp(result, expected)


def test_e4m3_input_of_one_scale(device: str, rng: torch.Generator) -> None:
    """The input is fp8, as in flashinfer's own test."""
    weights, given = layer("fp8_tensor", device, rng)
    x, gates, ids = operands("fp8_tensor", device, rng)
    scale = given["quant_scales"][3]
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    result = fused(codes, gates, ids, **given)
    assert same_bits(result, oxmoe.moe(codes, weights, gates, ids, x_scale=scale))
    assert relative_norm(result, oxmoe.moe(x, weights, gates, ids)) < 5e-2
    with pytest.raises(NotImplementedError, match="output_dtype: no kernel for float16 of float8_e4m3fn input"):
        fused(codes, gates, ids, **given, output_dtype=torch.float16)


@pytest.mark.parametrize("is_swizzled", [True, False])
def test_nvfp4_input(is_swizzled: bool, device: str, rng: torch.Generator) -> None:
    weights, given = layer("nvfp4", device, rng)
    x, gates, ids = operands("nvfp4", device, rng)
    codes, scales = nvfp4.fp4_quantize(x, given["quant_scales"][0], is_sf_swizzled_layout=is_swizzled)
    result = fused(codes, gates, ids, **given, input_sf=scales, swizzled_input_sf=is_swizzled)
    assert same_bits(result, oxmoe.moe(x, weights, gates, ids))
    with pytest.raises(ValueError, match="input_sf: needed where input is NVFP4 codes"):
        fused(codes, gates, ids, **given)


@pytest.mark.parametrize("is_swizzled", [True, False])
def test_nvfp4_input_of_other_forms(is_swizzled: bool, device: str, rng: torch.Generator) -> None:
    """The scales' shape is free, and the codes may be words. What does not fit is named."""
    _, given = layer("nvfp4", device, rng)
    x, gates, ids = operands("nvfp4", device, rng)
    codes, scales = nvfp4.fp4_quantize(x, given["quant_scales"][0], is_sf_swizzled_layout=is_swizzled)
    expected = fused(codes, gates, ids, **given, input_sf=scales, swizzled_input_sf=is_swizzled)
    words, flat = codes.view(torch.int64), scales.reshape(-1)
    apart = torch.stack([flat, flat], 1)[:, 0]
    for given_scales in (flat, apart, flat.view(torch.int32)):
        result = fused(words, gates, ids, **given, input_sf=given_scales, swizzled_input_sf=is_swizzled)
        assert same_bits(result, expected)
    for name, operand in (
        ("input", {"x": words.t().contiguous().t()}),
        ("input", {"x": words[0]}),
        ("input_sf", {"input_sf": torch.stack([flat.view(torch.int32)] * 2, 1)[:, 0]}),
        ("input_sf", {"input_sf": flat[4:]}),
    ):
        call = {"x": words, "input_sf": flat, **operand}
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            fused(call["x"], gates, ids, **given, input_sf=call["input_sf"], swizzled_input_sf=is_swizzled)


def test_refusals(rng: torch.Generator) -> None:
    _, given = layer("bf16", "cpu", rng)
    x, gates, ids = operands("bf16", "cpu", rng)
    call = {"x": x, "gates": gates, "ids": ids, **given}
    for name, value in {
        "min_latency_mode": True,
        "use_packed_weights": True,
        "use_wfp4afp8_humming": True,
        "enable_alltoall": True,
        "cluster_size": 2,
        "clamped_relu2_limit": torch.ones(1),
        "backend": "cake",
    }.items():
        with pytest.raises(NotImplementedError, match=f"cutlass_fused_moe: no kernel for {name}"):
            fused(**call, **{name: value})
    for flag in (*FLAGS.values(), "use_w4_group_scaling"):
        with pytest.raises(NotImplementedError, match=f"no kernel for {flag} with fc1_expert_weights of bfloat16"):
            fused(**call, **{flag: True})
    with pytest.raises(ValueError, match="quant_scales: expected none, got 1 tensors"):
        fused(**call | {"quant_scales": [torch.ones(1)]})
    for name in ("Relu", "Identity", 7):
        with pytest.raises(NotImplementedError, match=f"activation_type: no kernel for {name!r}"):
            fused(**call, activation_type=name if isinstance(name, int) else SimpleNamespace(name=name))
    with pytest.raises(NotImplementedError, match="no kernel for input of bfloat16 with input_sf and bf16 weights"):
        fused(**call, input_sf=torch.ones(13, 16))
    with pytest.raises(NotImplementedError, match="fc1_expert_weights of uint8 with no quant_scales"):
        fused(**call | {"fc1_expert_weights": given["fc1_expert_weights"].view(torch.uint8), "quant_scales": []})


@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor", "mxfp8", "nvfp4"])
def test_scales_are_counted(format: str, rng: torch.Generator) -> None:
    _, given = layer(format, "cpu", rng)
    x, gates, ids = operands(format, "cpu", rng)
    given["quant_scales"] = given["quant_scales"][:1]
    with pytest.raises((ValueError, NotImplementedError), match=r"quant_scales: expected|with 1 quant_scales"):
        fused(x, gates, ids, **given)


def test_one_scale_has_its_shapes(rng: torch.Generator) -> None:
    _, given = layer("fp8_tensor", "cpu", rng)
    x, gates, ids = operands("fp8_tensor", "cpu", rng)
    for place, size, expected in ((0, 5, "1 or 6"), (1, 6, "1"), (2, 7, "1 or 6"), (3, 2, "1")):
        scales = list(given["quant_scales"])
        scales[place] = torch.ones(size)
        with pytest.raises(ValueError, match=rf"quant_scales\[{place}\]: expected {expected} numbers, got {size}"):
            fused(x, gates, ids, **given | {"quant_scales": scales})


def test_workspaces_that_cannot_be_used(rng: torch.Generator) -> None:
    _, given = layer("bf16", "cpu", rng)
    x, gates, ids = operands("bf16", "cpu", rng)
    size = 1 << 20
    for buffer, words in (
        (torch.empty(size), "dtype must be int8 or uint8, got float32"),
        (torch.empty(size, dtype=torch.uint8, device="meta"), "does not match input device cpu"),
        (torch.empty(2, size, dtype=torch.uint8), r"must be 1-D, got shape \[2, "),
        (torch.empty(size, dtype=torch.uint8)[::2], "must be contiguous, got stride 2"),
        (torch.empty(size, dtype=torch.uint8)[1:], "must be aligned to 256 bytes"),
    ):
        for error in (ValueError, RuntimeError):
            with pytest.raises(error, match=f"^workspace_buffer: .*{words}"):
                fused(x, gates, ids, **given, workspace_buffer=buffer)


def test_misaligned_input(device: str, rng: torch.Generator) -> None:
    """On a GPU this is flashinfer's error; the CPU reads every address."""
    weights, given = layer("bf16", device, rng)
    x, gates, ids = operands("bf16", device, rng)
    moved = torch.empty(x.numel() + 8, dtype=x.dtype, device=device)[1 : 1 + x.numel()].view_as(x).copy_(x)
    if device == "cpu":
        assert same_bits(fused(moved, gates, ids, **given), oxmoe.moe(x, weights, gates, ids))
    else:
        with pytest.raises(ValueError, match=r"^input: must be 16B-aligned"):
            fused(moved, gates, ids, **given)
    on_gpu = SimpleNamespace(is_cuda=True, data_ptr=lambda: 0x7F02)
    with pytest.raises(ValueError, match=r"^input: must be 16B-aligned .* got address 0x7f02; pass input.clone"):
        flashinfer_cutlass._check_aligned("input", on_gpu)  # type: ignore[arg-type]
    flashinfer_cutlass._check_aligned("input", SimpleNamespace(is_cuda=True, data_ptr=lambda: 0x7F10))  # type: ignore[arg-type]


def test_workspace_sizes_that_no_layer_has() -> None:
    sizes = {"max_num_tokens": 64, "hidden_size": 256, "intermediate_size": 512, "num_experts_total": 8, "top_k": 2}
    dtypes = {"x_dtype": torch.bfloat16, "weight_dtype": torch.bfloat16}
    for name in sizes:
        for size in (0, -1):
            with pytest.raises(ValueError, match=f"^{name}: expected 1 or more, got {size}"):
                oxmoe.cutlass_fused_moe_workspace_size(**sizes | {name: size}, **dtypes)
    with pytest.raises(ValueError, match="num_experts_total: expected a number divisible by ep_size 2, got 7"):
        oxmoe.cutlass_fused_moe_workspace_size(**sizes | {"num_experts_total": 7}, **dtypes, ep_size=2)
    with pytest.raises(ValueError, match="ep_rank: expected 0 to 1, got 2"):
        oxmoe.cutlass_fused_moe_workspace_size(**sizes, **dtypes, ep_size=2, ep_rank=2)
    whole = oxmoe.cutlass_fused_moe_workspace_size(**sizes, **dtypes)
    assert whole > oxmoe.cutlass_fused_moe_workspace_size(**sizes | {"max_num_tokens": 8}, **dtypes) > 0
    ungated = SimpleNamespace(name="Relu2")
    assert oxmoe.cutlass_fused_moe_workspace_size(**sizes, **dtypes, activation_type=ungated) <= whole
