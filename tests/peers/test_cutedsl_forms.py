"""flashinfer's CuTe DSL layers beside w4a4: MXFP8 experts, rows in the order of swap_ab, and `cute_dsl_fused_moe`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxmoe
from cases import Shape, make_routing, make_x
from cutedsl_cases import SHAPE, drawn, operands, quantised, wrapper
from mxfp8_cases import Mxfp8, check, make_mxfp8
from nvfp4_cases import E4M3, Nvfp4
from oxmoe import nvfp4
from oxmoe.peers import flashinfer_cutedsl
from oxmoe.testing import relative_norm, same_bits

MX = Shape("cutedsl-mxfp8", 8, 3, 256, 192)
E8M0 = torch.float8_e8m0fnu


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    flashinfer_cutedsl.cache.clear()


def in_turn(tensor: Tensor, group: int) -> Tensor:
    """Returns rows [gate; up] as `group` rows of up and of gate in turn, row by row."""
    half, result = tensor.shape[1] // 2, torch.empty_like(tensor)
    for row in range(half):
        place = row // group * 2 * group + row % group
        result[:, place], result[:, place + group] = tensor[:, half + row], tensor[:, row]
    return result


def tiles(scales: Tensor, rows: int, columns: int, block: int) -> Tensor:
    swizzled = nvfp4.swizzle_blockscale(scales.contiguous().view(E4M3)).view(scales.dtype)
    return nvfp4.convert_sf_to_mma_layout(swizzled, rows, columns, len(scales), block)


def mxfp8(layer: Mxfp8, group: int = 64, part: slice = slice(None)) -> dict[str, Any]:
    shape, experts = layer.shape, len(layer.w2[part])
    w13, w13_scale = layer.w13[part].view(torch.uint8), layer.w13_scale[part]
    if shape.gated:
        w13, w13_scale = in_turn(w13, group), in_turn(w13_scale, group)
    ones = torch.ones(experts, device=w13.device)
    return {
        "w1_weight": w13.view(torch.float8_e4m3fn),
        "w1_weight_sf": tiles(w13_scale, shape.w13_rows, shape.hidden, 32),
        "w1_alpha": ones,
        "fc2_input_scale": None,
        "w2_weight": layer.w2[part],
        "w2_weight_sf": tiles(layer.w2_scale[part], shape.hidden, shape.intermediate, 32),
        "w2_alpha": ones.clone(),
    }


def made(shape: Shape, device: str = "cpu", **options: Any) -> oxmoe.CuteDslMoEWrapper:
    options = {"quant_mode": "mxfp8", "device": device, **options}
    return oxmoe.CuteDslMoEWrapper(shape.experts, shape.top_k, shape.hidden, shape.intermediate, **options)


def codes(x: Tensor) -> dict[str, Tensor]:
    values, scales = oxmoe.mxfp8_quantize(x, False)
    return {"x": values, "x_sf": scales.view(x.shape[0], x.shape[1] // 32)}


def routed(tokens: int, device: str, rng: torch.Generator, experts: int = 8) -> dict[str, Tensor]:
    weights, ids = make_routing("uniform", tokens, experts, 3, rng)
    if tokens:
        ids[0, 2] = -1
    return {"token_selected_experts": ids.to(device), "token_final_scales": weights.to(device)}


NUMBERS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "swiglu": ({}, {}),
    "gpt-oss": (NUMBERS, {f"swiglu_{name}": value for name, value in NUMBERS.items()}),
    "geglu": ({"activation": "gelu_tanh"}, {"activation_type": SimpleNamespace(name="GegluTanh")}),
    "relu2": ({"activation": "relu2"}, {"activation_type": 6}),
    "situ": (
        {"activation": "situ", "situ_beta": 1.5, "situ_linear_beta": 0.75},
        {"situ_beta": 1.5, "situ_linear_beta": 0.75},
    ),
}


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_mxfp8(name: str, swap_ab: bool, device: str, rng: torch.Generator) -> None:
    own, options = LAYERS[name]
    shape = MX.with_options(**own)
    layer, moe = make_mxfp8(shape, device, rng), made(shape, device, swap_ab=swap_ab, **options)
    weights = mxfp8(layer, 16 if swap_ab else 64)
    for tokens in (0, 1, 40):
        x, routing = layer.x(tokens, rng), routed(tokens, device, rng)
        pair = routing["token_final_scales"], routing["token_selected_experts"]
        expected = check(layer, x, *pair) if tokens else x
        assert same_bits(moe.run(**codes(x), **routing, **weights), expected)
        function = {**options, "quant_mode": "mxfp8", "swap_ab": swap_ab, "num_experts": 8, "top_k": 3}
        out = torch.full_like(x, torch.nan)
        result = oxmoe.cute_dsl_fused_moe(**codes(x), **routing, **weights, **function, moe_output=out)
        assert result is out and same_bits(out, expected)
    assert len(flashinfer_cutedsl.cache) == len(moe._cache) == 1
    prepared = moe.prepare(**weights)
    assert prepared.format == "mxfp8"
    nothing = dict.fromkeys(weights)
    assert same_bits(moe.run(**codes(x), **routing, **nothing, weights=prepared), expected)
    flat = {"x": codes(x)["x"], "x_sf": codes(x)["x_sf"].flatten().view(E8M0)}
    assert same_bits(moe.run(**flat, **routing, **weights), expected)


def test_mxfp8_numbers(device: str, rng: torch.Generator) -> None:
    """Powers of two as alphas multiply the sums: they are a part of the scales."""
    layer, moe = make_mxfp8(MX, device, rng), made(MX, device)
    x, routing = layer.x(9, rng), routed(9, device, rng)
    pair = routing["token_final_scales"], routing["token_selected_experts"]
    given = mxfp8(layer)
    powers = torch.randint(-3, 4, (8,), generator=rng)
    given["w1_alpha"], given["w2_alpha"] = (2.0**powers).to(device), torch.full((1,), 0.5, device=device)
    scaled = Mxfp8(
        MX, layer.w13, layer.w2, (layer.w13_scale.int() + powers.to(device)[:, None, None]).to(torch.uint8),
        (layer.w2_scale.int() - 1).to(torch.uint8), None, None,
    )  # fmt: skip
    assert same_bits(moe.run(**codes(x), **routing, **given), check(scaled, x, *pair))
    for alpha in (torch.full((8,), 3.0), torch.zeros(8), torch.full((1,), torch.inf)):
        with pytest.raises(NotImplementedError, match="w1_alpha: no arithmetic for numbers other than powers of two"):
            moe.run(**codes(x), **routing, **given | {"w1_alpha": alpha.to(device)})
    with pytest.raises(ValueError, match="w2_alpha: its product with a scale is no E8M0 number"):
        moe.run(**codes(x), **routing, **given | {"w2_alpha": torch.full((8,), 2.0**-126, device=device)})
    with pytest.raises(ValueError, match="w2_alpha: expected 1 or 8 numbers, got 3"):
        moe.run(**codes(x), **routing, **given | {"w2_alpha": torch.ones(3, device=device)})


@pytest.mark.parametrize("local", [(0, 4), (4, 4), (3, 3), (1, 7)])
def test_mxfp8_experts_of_a_rank(local: tuple[int, int], device: str, rng: torch.Generator) -> None:
    layer, (offset, count) = make_mxfp8(MX, device, rng), local
    x, routing = layer.x(17, rng), routed(17, device, rng)
    given = mxfp8(layer, 64, slice(offset, offset + count))
    ids = routing["token_selected_experts"]
    kept = ids.where((ids >= offset) & (ids < offset + count), -1)
    expected = oxmoe.moe(x, layer.weights(), routing["token_final_scales"], kept)
    moe = made(MX, device, num_local_experts=count, local_expert_offset=offset)
    assert bool(expected.any()) and same_bits(moe.run(**codes(x), **routing, **given), expected)
    ranks = {"num_experts": 8, "top_k": 3, "num_local_experts": count, "local_expert_offset": offset}
    routing["token_selected_experts"] = ids.long()
    result = oxmoe.cute_dsl_fused_moe(**codes(x), **routing, **given, **ranks, quant_mode="mxfp8")
    assert same_bits(result, expected)


def swapped(layer: Nvfp4) -> dict[str, Any]:
    given = operands(layer)
    scale = in_turn(layer.w13_scale, 16)
    given["w1_weight"] = in_turn(layer.w13, 16)
    given["w1_weight_sf"] = tiles(scale, layer.shape.w13_rows, layer.shape.hidden, 16).view(E4M3)
    return given


@pytest.mark.parametrize("a4", [True, False], ids=["w4a4", "w4a16"])
def test_nvfp4(a4: bool, device: str, rng: torch.Generator) -> None:
    """The function computes what the class does, and rows of swap_ab are the same rows."""
    layer, mode = drawn(SHAPE, rng, a4), "w4a4" if a4 else "w4a16"
    x = make_x(12, SHAPE, torch.bfloat16, "cpu", rng)
    values, scales = quantised(layer, x)
    tokens = {"x": values.to(device), "x_sf": None if scales is None else scales.to(device)}
    routing = routed(12, device, rng)

    def there(given: dict[str, Any]) -> dict[str, Any]:
        return {name: part.to(device) if isinstance(part, Tensor) else part for name, part in given.items()}

    plain, other = there(operands(layer)), there(swapped(layer))
    expected = wrapper(SHAPE, a4, device=device).run(**tokens, **routing, **plain)  # type: ignore[arg-type]
    assert bool(expected.any())
    layer_numbers: Any = {"num_experts": 8, "top_k": 3, "quant_mode": mode}
    for given, swap in ((plain, False), (other, True)):
        out = torch.full_like(expected, torch.nan)
        for function in (oxmoe.cute_dsl_fused_moe, oxmoe.cute_dsl_fused_moe_nvfp4):
            result = function(**tokens, **routing, **given, **layer_numbers, swap_ab=swap, moe_output=out)  # type: ignore[arg-type]
            assert result is out and same_bits(out, expected)
        moe = wrapper(SHAPE, a4, device=device, swap_ab=swap)
        assert same_bits(moe.run(**tokens, **routing, **given), expected)  # type: ignore[arg-type]
    assert len(flashinfer_cutedsl.cache) == 2
    # Other numbers of the same weights are other experts, and both are kept.
    other_layer = {**layer_numbers, "swiglu_limit": 0.25}
    assert not same_bits(oxmoe.cute_dsl_fused_moe(**tokens, **routing, **plain, **other_layer), expected)  # type: ignore[arg-type]
    assert same_bits(oxmoe.cute_dsl_fused_moe(**tokens, **routing, **plain, **layer_numbers), expected)  # type: ignore[arg-type]
    assert len(flashinfer_cutedsl.cache) == 3
    plain["w2_alpha"].mul_(2)
    doubled = oxmoe.cute_dsl_fused_moe(**tokens, **routing, **plain, **layer_numbers)  # type: ignore[arg-type]
    assert relative_norm(doubled, expected * 2) < 1e-2


def test_what_is_refused(rng: torch.Generator) -> None:
    layer = make_mxfp8(MX, "cpu", rng)
    x, routing, given, moe = layer.x(5, rng), routed(5, "cpu", rng), mxfp8(layer), made(MX)
    tokens = codes(x)
    calls: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "x_sf: needed with quant_mode 'mxfp8'", {"x_sf": None}),
        (ValueError, r"x_sf: expected 40 scales \(5 tokens x hidden_size 256 / 32\)", {"x_sf": tokens["x_sf"][:, :3]}),
        (ValueError, "x: expected dtype float8_e4m3fn with quant_mode 'mxfp8', got bfloat16", {"x": x}),
        (ValueError, "x_sf: expected dtype uint8 or float8_e8m0fnu", {"x_sf": tokens["x_sf"].float()}),
        (ValueError, "fc2_input_scale: expected None with quant_mode 'mxfp8'", {"fc2_input_scale": torch.ones(1)}),
        (ValueError, r"w1_weight: expected shape \(8, 384, 256\)", {"w1_weight": given["w1_weight"][..., :128]}),
        (ValueError, r"w1_weight_sf: expected shape \(32, 4, 3, 4, 2, 8\)", {"w1_weight_sf": given["w2_weight_sf"]}),
        (ValueError, "w2_weight_sf: expected 8 x 256 x 8 scales, got 8", {"w2_weight_sf": torch.ones(8).byte()}),
        (ValueError, "w2_weight_sf: expected a dtype of one byte", {"w2_weight_sf": given["w2_weight_sf"].int()}),
        (NotImplementedError, "per_token_scale", {"per_token_scale": torch.ones(5)}),
        (ValueError, "weights: expected mxfp8 experts", {"weights": drawn(SHAPE, rng).weights()}),
    ]
    for error, words, changed in calls:
        with pytest.raises(error, match=words):
            moe.run(**{**tokens, **routing, **given, **changed})
    numbers: Any = {"num_experts": 8, "top_k": 3, "quant_mode": "mxfp8"}
    functions: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotImplementedError, "no kernel for localized_weights, localized_sm_count",
         {"localized_weights": [], "localized_sm_count": 4}),
        (NotImplementedError, "no kernel for localized_allow_nonlocalized", {"localized_allow_nonlocalized": True}),
        (NotImplementedError, "quant_mode 'w4a8'", {"quant_mode": "w4a8"}),
        (NotImplementedError, "tactic", {"tactic": (128,)}),
        (NotImplementedError, "no arithmetic for clamped_relu2_limit", {"clamped_relu2_limit": torch.ones(1)}),
        (ValueError, "local_expert_offset: experts 2 to 10", {"local_expert_offset": 2}),
        (ValueError, "w2_weight: expected", {"w2_weight": given["w2_weight"][0]}),
    ]  # fmt: skip
    for error, words, changed in functions:
        with pytest.raises(error, match=words):
            oxmoe.cute_dsl_fused_moe(**{**tokens, **routing, **given, **numbers, **changed})
    odd = Shape("odd", 8, 3, 64, 96)
    layer = make_mxfp8(odd, "cpu", rng)
    with pytest.raises(ValueError, match="w1_weight: expected intermediate_size to be a multiple of 64 rows"):
        made(odd).prepare(**{**mxfp8(layer, 32)})
    assert made(odd, swap_ab=True).prepare(**mxfp8(layer, 16)).format == "mxfp8"


def test_signatures() -> None:
    """The function has the arguments of the class and of its `run`."""
    function = set(inspect.signature(oxmoe.cute_dsl_fused_moe).parameters)
    made_of = set(inspect.signature(oxmoe.CuteDslMoEWrapper).parameters)
    of_run = set(inspect.signature(oxmoe.CuteDslMoEWrapper.run).parameters) - {"self"}
    none = {
        "hidden_size",
        "intermediate_size",
        "use_cuda_graph",
        "max_num_tokens",
        "tile_size",
        "sf_vec_size",
        "device",
    }
    more = {name for name in function if name.startswith("localized_")}
    assert function == (made_of - none) | of_run | more | {"moe_output", "aux_stream", "autotune_use_cuda_graph"}
